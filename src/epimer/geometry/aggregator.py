"""How task vectors are aggregated: by their Fréchet mean, by T times it, or by a damped step from an anchor.

Damping ε is counted in mean diagonals of curvature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epimer.geometry.frechet import Problem
from epimer.geometry.linalg import squared_norm, weighted_sum
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Full, Tagged
from epimer.geometry.svd import Svd, top_svd

FAINT = 0.01  # share of the merge's energy along a direction below which a task's own is next to nothing


class Aggregator(ABC):
    """The third factor of a method: turns the problem that subspace and metric pose into one merged task vector."""

    @abstractmethod
    def aggregate(self, problem: Problem) -> Solution:
        """Return the merged task vector, of the layer's shape."""


@dataclass(frozen=True)
class Mean(Aggregator):
    """The Fréchet mean x* = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t with ε added to every H̃_t."""

    damping: float = 0.0

    def aggregate(self, problem: Problem) -> Solution:
        solution = problem.damped(self.damping).mean()
        return replace(solution, value=problem.subspace.lift(solution.value))


@dataclass(frozen=True)
class Sum(Aggregator):
    """T x*, T times the Fréchet mean, as task arithmetic adds task vectors up."""

    damping: float = 0.0

    def aggregate(self, problem: Problem) -> Solution:
        solution = Mean(self.damping).aggregate(problem)
        return replace(solution, value=len(problem.points) * solution.value)


@dataclass(frozen=True)
class Anchored(Aggregator):
    """x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a): what has no curvature, or is not in the subspace, stays at x_a."""

    anchor: Tensor
    """x_a, of the layer's shape"""
    damping: float

    def aggregate(self, problem: Problem) -> Solution:
        subspace, epsilon = problem.subspace, self.damping * problem.mean_unit
        start = subspace.project(self.anchor)
        solution = problem.solve(start, epsilon)
        if isinstance(subspace, Full):
            return replace(solution, value=subspace.lift(solution.value))
        return replace(solution, value=self.anchor + subspace.lift(solution.value - start))


def stretched_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return s·D̄, the mean of task vectors stretched until the tasks keep their whole length on average.

    s = Σ λ_t ‖D_t‖² / ‖D̄‖² solves Σ λ_t ⟨s D̄, D_t⟩ = Σ λ_t ‖D_t‖²: T, so the sum, for T orthogonal tasks of equal
    weight, and 1, so the model itself, for copies. It is at most 1 / Σ λ_t², the number of models that the weights
    amount to, which opposing tasks would exceed.
    """
    mean = weighted_sum(deltas, weights)
    length, most = squared_norm(mean), 1 / sum(w * w for w in weights)
    if length * most <= 0:
        return mean
    kept = sum(w * squared_norm(D) for w, D in zip(weights, deltas, strict=True))
    return min(most, kept / length) * mean


def calibrated(merged: Svd, deltas: Sequence[Tensor], least: float) -> Tensor:
    """Return a merged task vector whose singular values are divided by how often the tasks count each direction.

    Singular value calibration: along the left singular vector u_r the merge is s_rt = ⟨u_rᵀΔ, u_rᵀD_t⟩ / ‖u_rᵀD_t‖²
    times task t, so σ_r is multiplied by γ_r = T / Σ_t max(`least`, s_rt). With 1 as least, only what is counted more
    than once is shortened: copies added up become the model again, and tasks that share no direction stay their sum.
    A task whose energy along u_r is below `FAINT` of the merge's is taken at that, so that next to nothing of a task
    does not decide how long a direction of others may be.
    """
    U, sigma, V = merged
    rows = sigma[:, None] * V.T
    faint = FAINT * sigma.square()
    counted = torch.zeros_like(sigma)
    for D in deltas:
        own = U.T @ D
        counted += ((rows * own).sum(1) / torch.maximum(own.square().sum(1), faint)).clamp_min(least)
    return (U * (len(deltas) / counted)) @ rows


def tsv_delta(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return the merge of TSV-M's authors: U diag(T λ_owner σ) Vᵀ."""
    owned = torch.tensor(weights, dtype=atoms.sigma.dtype, device=atoms.sigma.device)[atoms.owner]
    return atoms.lift_atoms(len(weights) * owned * atoms.sigma)


def iso_c_delta(deltas: Sequence[Tensor], weights: Sequence[float], side: int | None = None) -> Tensor:
    """Return the merge of Iso-C: the sum of task vectors with every singular value replaced by the mean of `side`.

    `side` is the number of singular values, zeros included: by default the shorter side of the task vectors.
    """
    side = min(deltas[0].shape) if side is None else side
    U, sigma, V = top_svd(len(deltas) * weighted_sum(deltas, weights), side)
    return sigma.sum() / side * (U @ V.T)
