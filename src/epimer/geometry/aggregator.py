"""How task vectors are aggregated: by their Fréchet mean, by T times it, or by a damped step from an anchor.

The third factor of a method, after its subspace and its metric. Damping ε is counted in mean diagonals of curvature:

    Mean      x* = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t with ε added to every H̃_t
    Sum       T x*
    Anchored  x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a): directions without curvature stay at the anchor x_a
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epimer.geometry.linalg import top_svd, weighted_sum
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Subspace, Tagged

if TYPE_CHECKING:
    from epimer.geometry.frechet import Problem

Anchor = Callable[["Problem", Subspace], Tensor]
"""returns the coordinates x_a"""


class Aggregator(ABC):
    """A rule that turns a problem on a subspace into one merged task vector."""

    @abstractmethod
    def aggregate(self, problem: Problem, subspace: Subspace) -> Solution:
        """Return the merged task vector, of the layer's shape."""


@dataclass(frozen=True)
class Mean(Aggregator):
    """The Fréchet mean x*."""

    damping: float = 0.0

    def aggregate(self, problem: Problem, subspace: Subspace) -> Solution:
        mean = problem.damped(self.damping).mean()
        return replace(mean, value=subspace.lift(mean.value))


@dataclass(frozen=True)
class Sum(Aggregator):
    """T times the Fréchet mean, as task arithmetic adds task vectors up."""

    damping: float = 0.0

    def aggregate(self, problem: Problem, subspace: Subspace) -> Solution:
        mean = Mean(self.damping).aggregate(problem, subspace)
        return replace(mean, value=len(problem.points) * mean.value)


@dataclass(frozen=True)
class Anchored(Aggregator):
    """A step from an anchor, as far as curvature is worth more than the damping."""

    anchor: Anchor
    damping: float

    def aggregate(self, problem: Problem, subspace: Subspace) -> Solution:
        step = problem.solve(self.anchor(problem, subspace), self.damping * problem.mean_unit)
        return replace(step, value=subspace.lift(step.value))


def average_anchor(problem: Problem, subspace: Subspace) -> Tensor:
    """Return x̄ = Σ λ_t x_t."""
    return problem.flat_mean()


def sum_anchor(problem: Problem, subspace: Subspace) -> Tensor:
    """Return T x̄."""
    return len(problem.points) * problem.flat_mean()


def anchor_at(delta: Tensor) -> Anchor:
    """Return the anchor at a task vector: its coordinates in whichever subspace the problem has."""
    return lambda problem, subspace: subspace.project(delta)


def tsv_delta(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return the merge of TSV-M's authors: U diag(T λ_owner σ) Vᵀ."""
    owned = torch.tensor(weights, dtype=atoms.sigma.dtype, device=atoms.sigma.device)[atoms.owner]
    return atoms.lift_atoms(len(weights) * owned * atoms.sigma)


def iso_c_delta(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the merge of Iso-C: the sum of task vectors with every singular value replaced by their mean."""
    side = min(deltas[0].shape)
    U, sigma, V = top_svd(len(deltas) * weighted_sum(deltas, weights), side)
    return sigma.sum() / side * (U @ V.T)
