"""A diagnosis in words: what to do and why, with the numbers that say so."""

from __future__ import annotations

from dataclasses import replace

from epimer.records import Advice, Diagnosis


def advise(found: Diagnosis) -> Diagnosis:
    """Return the diagnosis with its recommendation."""
    return replace(found, advice=())


__all__ = ["Advice", "advise"]
