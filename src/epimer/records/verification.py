"""Whether a merged model's folder is what its record says, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from epimer.records.record import Record


class Outcome(StrEnum):
    """What became of the check of one part."""

    OK = "ok"
    DIFFERS = "differs"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One part of a folder, compared with what its record says of it."""

    part: str
    """record, files, tensors, inputs or recomputed"""
    outcome: Outcome
    text: str
    """what was found, in a sentence"""
    names: tuple[str, ...] = ()
    """the files, tensors or inputs that differ or are missing"""
    identical: int | None = None
    """recomputed tensors that are the same to the last bit; None in other parts"""
    difference: float | None = None
    """the largest relative difference of a recomputed tensor; None in other parts"""


@dataclass(frozen=True)
class Verification(Record):
    """The checks of a folder in their order."""

    kind: ClassVar[str] = "verification"
    omitted: ClassVar[frozenset[str]] = frozenset({"identical", "difference"})

    folder: str
    checks: tuple[Check, ...]

    @property
    def verified(self) -> bool:
        """Whether every part was checked and is as recorded."""
        return all(check.outcome == Outcome.OK for check in self.checks)

    @property
    def differs(self) -> bool:
        """Whether some part is not as recorded."""
        return any(check.outcome == Outcome.DIFFERS for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that begins with the verdict."""
        return {"verified": self.verified, **super().to_dict()}
