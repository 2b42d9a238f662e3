"""The solution of a linear system, of a Fréchet mean or of a method. A failed solve is a value with a status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from epimer.records import Status

if TYPE_CHECKING:  # methods are registered without torch
    from torch import Tensor

CONVERGED = 1e-5  # a relative residual above this is reported as stalled


@dataclass(frozen=True)
class Solution:
    """A solution and how it came about: the `y` of a system, the `x` of a subspace, the merged delta of a method."""

    value: Tensor
    """a `LowRank` where a method takes task vectors of low rank as they are, and all of them were"""
    status: Status = Status.EXACT
    residual: float = 0.0
    """relative residual of the normal equations"""
    damping: float = 0.0
    """what had to be added to the diagonal of a singular system"""
    eta: float | None = None
    """F(x̄) - F(x*), where the aggregator is a mean or a sum"""
    rank: int | None = None
    """directions kept per task"""
    note: str = ""


def solved(value: Tensor, residual: float, damping: float = 0.0, *, iterative: bool = False) -> Solution:
    """Return the solution of a linear system, with the status that its residual and its damping amount to."""
    if damping > 0:
        status = Status.DAMPED
    elif not residual <= CONVERGED:
        status = Status.STALLED
    else:
        status = Status.CONVERGED if iterative else Status.EXACT
    return Solution(value, status, residual, damping)
