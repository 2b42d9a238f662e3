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
from epimer.geometry.svd import Svd, gram_svds, top_svd

FAINT = 0.01  # share of the merge's energy along a direction below which a task's own is next to nothing


class Aggregator(ABC):
    """The third factor of a method: turns the problem that subspace and metric pose into one merged task vector."""

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """Return the coordinates of the merge in the problem's subspace."""

    def aggregate(self, problem: Problem) -> Solution:
        """Return the merged task vector, of the layer's shape."""
        solution = self.solve(problem)
        return replace(solution, value=problem.subspace.lift(solution.value))


@dataclass(frozen=True)
class Mean(Aggregator):
    """The Fréchet mean x* = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t with ε added to every H̃_t."""

    damping: float = 0.0

    def solve(self, problem: Problem) -> Solution:
        return problem.damped(self.damping).mean()


@dataclass(frozen=True)
class Sum(Aggregator):
    """T x*, T times the Fréchet mean, as task arithmetic adds task vectors up."""

    damping: float = 0.0

    def solve(self, problem: Problem) -> Solution:
        solution = Mean(self.damping).solve(problem)
        return replace(solution, value=len(problem.points) * solution.value)

    def aggregate(self, problem: Problem) -> Solution:
        solution = Mean(self.damping).aggregate(problem)
        return replace(solution, value=len(problem.points) * solution.value)


@dataclass(frozen=True)
class Anchored(Aggregator):
    """x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a): what has no curvature, or is not in the subspace, stays at x_a."""

    anchor: Tensor
    """x_a, of the layer's shape; or its coordinates, if it lies in the subspace"""
    damping: float
    inside: bool = False
    """whether the anchor is given by its coordinates"""

    def solve(self, problem: Problem) -> Solution:
        return self._step(problem, self.anchor if self.inside else problem.subspace.project(self.anchor))

    def aggregate(self, problem: Problem) -> Solution:
        if self.inside or isinstance(problem.subspace, Full):
            return super().aggregate(problem)
        start = problem.subspace.project(self.anchor)
        solution = self._step(problem, start)
        return replace(solution, value=self.anchor + problem.subspace.lift(solution.value - start))

    def _step(self, problem: Problem, start: Tensor) -> Solution:
        return problem.solve(start, self.damping * problem.mean_unit)


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
    counted = torch.zeros_like(sigma)
    for D in deltas:
        own = U.T @ D
        counted += _counts((rows * own).sum(1), own.square().sum(1), sigma, least)
    return (U * (len(deltas) / counted)) @ rows


def calibrated_coordinates(x: Tensor, points: Sequence[Tensor], grams: Sequence[Tensor], least: float) -> Tensor:
    """Return `calibrated` in the coordinates of a tensor product U X Vᵀ that the merge lies in.

    With x = P diag(σ) Qᵀ the merge's left singular vectors are UP, so that all that is asked of a task vector is its
    own coordinates UᵀD_tV, its `points`, and UᵀD_tD_tᵀU, its `grams`. x may be a stack of several layers, and points
    and grams then are stacks too.
    """
    P, sigma, Q = top_svd(x, min(x.shape)) if x.dim() == 2 else gram_svds(x)
    counted = torch.zeros_like(sigma)
    for point, gram in zip(points, grams, strict=True):
        counted += _counts(sigma * ((point @ Q) * P).sum(-2), ((gram @ P) * P).sum(-2), sigma, least)
    return (P * (sigma * len(points) / counted).unsqueeze(-2)) @ Q.mT


def _counts(inner: Tensor, energy: Tensor, sigma: Tensor, least: float) -> Tensor:
    """Return how often a task counts each direction, from ⟨u_rᵀΔ, u_rᵀD_t⟩ and ‖u_rᵀD_t‖²."""
    return (inner / torch.maximum(energy, FAINT * sigma.square())).clamp_min(least)


def tsv_coefficients(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return T λ_owner σ, each atom's coefficient in the merge of TSV-M's authors."""
    owned = torch.tensor(weights, dtype=atoms.sigma.dtype, device=atoms.sigma.device)[atoms.owner]
    return len(weights) * owned * atoms.sigma


def tsv_delta(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return the merge of TSV-M's authors: U diag(T λ_owner σ) Vᵀ."""
    return atoms.lift_atoms(tsv_coefficients(atoms, weights))


def iso_c_delta(deltas: Sequence[Tensor], weights: Sequence[float], side: int | None = None) -> Tensor:
    """Return the merge of Iso-C: the sum of task vectors with every singular value replaced by the mean of `side`.

    `side` is the number of singular values, zeros included: by default the shorter side of the task vectors.
    """
    return iso_c_with_rank(deltas, weights, side)[0]


def iso_c_with_rank(deltas: Sequence[Tensor], weights: Sequence[float], side: int | None = None) -> tuple[Tensor, int]:
    """Return `iso_c_delta` and the number of its directions: those that are not rounding."""
    side = min(deltas[0].shape) if side is None else side
    U, sigma, V = top_svd(len(deltas) * weighted_sum(deltas, weights), side)
    return sigma.sum() / side * (U @ V.T), len(sigma)
