"""Which kinds of curvature may take another's place; metrics fill the table when they are defined. No torch here."""

from __future__ import annotations

SERVES: dict[str, tuple[str, ...]] = {}
"""kind -> the kinds that a method must accept to accept it too"""
