"""The one equation: the Fréchet mean of the task vectors, in a subspace, under each task's curvature.

    x* = argmin_x Σ_t λ_t (x - x_t)ᵀ H̃_t (x - x_t) = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t

It is solved as a step from a reference r, which costs the same and leaves r where no task has curvature:

    x = r + (Σ λ_t H̃_t + εI)⁻¹ Σ λ_t H̃_t (x_t - r)

The mean has r = x̄ = Σ λ_t x_t and ε = 0; anchored has its anchor and its damping; sum is T times the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from epimer.geometry.kronecker import KroneckerSum
from epimer.geometry.metric import Metric
from epimer.geometry.operator import Form, combine
from epimer.geometry.subspace import Subspace


@dataclass(frozen=True)
class Solution:
    """Where a solve ended and how well it went."""

    coordinates: Tensor
    residual: float
    """relative residual of the normal equations"""
    status: str
    """exact, converged, damped (the system was singular) or stalled (CG did not reach its tolerance)"""
    eta: float | None = None
    """F(x̄) - F(x*), where the reference was x̄"""


@dataclass(frozen=True)
class Problem:
    """F(x) = Σ λ_t (x - x_t)ᵀ H̃_t (x - x_t) with H̃_t = scale_t · form_t + shift_t · I."""

    points: list[Tensor]
    forms: list[Form]
    weights: list[float]
    scales: list[float]
    shifts: list[float]

    def product(self, t: int, x: Tensor) -> Tensor:
        """Return H̃_t x."""
        image = self.forms[t].apply(x).mul(self.scales[t]) if self.scales[t] else torch.zeros_like(x)
        return image + self.shifts[t] * x

    def flat_mean(self) -> Tensor:
        """Return x̄ = Σ λ_t x_t."""
        return weighted_sum(self.points, self.weights)

    def objective(self, x: Tensor) -> float:
        """Return F(x)."""
        total = 0.0
        for t, (point, weight) in enumerate(zip(self.points, self.weights, strict=True)):
            step = x - point
            total += weight * float((step * self.product(t, step)).sum())
        return total

    def pull(self, x: Tensor) -> Tensor:
        """Return Σ λ_t H̃_t (x_t - x), half the negative gradient of F."""
        total = torch.zeros_like(x)
        for t, (point, weight) in enumerate(zip(self.points, self.weights, strict=True)):
            total += weight * self.product(t, point - x)
        return total

    def mean_form(self) -> Form:
        """Return Σ λ_t scale_t form_t, the mean curvature without its shift."""
        return self._mean_form

    @cached_property
    def _mean_form(self) -> Form:
        return combine(self.forms, [w * scale for w, scale in zip(self.weights, self.scales, strict=True)])

    def mean_shift(self) -> float:
        """Return Σ λ_t shift_t."""
        return sum(w * shift for w, shift in zip(self.weights, self.shifts, strict=True))

    def solve(self, reference: Tensor, epsilon: float = 0.0) -> Solution:
        """Return r + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - r)."""
        return self._step(reference, self.pull(reference), epsilon)

    def _step(self, reference: Tensor, pull: Tensor, epsilon: float = 0.0) -> Solution:
        if not pull.any():
            return Solution(reference, 0.0, "exact")
        solved = self.mean_form().solve(pull, self.mean_shift() + epsilon)
        return Solution(reference + solved.y, solved.residual, solved.status)

    def mean(self) -> Solution:
        """Return the Fréchet mean x*, with η = F(x̄) - F(x*) = ⟨Σ λ_t H̃_t (x_t - x̄), x* - x̄⟩."""
        flat = self.flat_mean()
        pull = self.pull(flat)
        solution = self._step(flat, pull)
        eta = float((pull * (solution.coordinates - flat)).sum())
        return replace(solution, eta=max(0.0, eta))


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weights_t · tensors_t."""
    total = tensors[0] * weights[0]
    for x, weight in zip(tensors[1:], weights[1:], strict=True):
        if isinstance(x, Tensor) and isinstance(total, Tensor) and x.dtype == total.dtype:
            total += weight * x  # not add_(x, alpha=…), whose rounding depends on where in a tensor an entry lies
        else:
            total = total + weight * x
    return total


def pose(
    subspace: Subspace,
    metrics: Sequence[Metric],
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    *,
    normalize: str = "trace",
    damping: float = 0.0,
    jitter: float = 0.0,
    tolerance: float = 0.0,
    most: int | None = None,
) -> Problem:
    """Project, add `jitter`·I, scale each H̃_t to mean diagonal 1 ("trace"), then add `damping` times its mean diagonal.

    A task without curvature becomes damping·I under "trace" and nothing under "none". `most` ends an iterative solve
    after so many steps.
    """
    forms = [subspace.restrict(metric, tolerance) for metric in metrics]
    forms = [replace(form, most=most) if isinstance(form, KroneckerSum) else form for form in forms]
    scales, shifts = [], []
    for form in forms:
        size = form.mean_diagonal() + jitter
        scale = 1.0 if normalize == "none" else 1 / size if size > 0 else 0.0
        scales.append(scale)
        shifts.append(jitter * scale + damping * (1.0 if normalize == "trace" else size))
    return Problem([subspace.project(D) for D in deltas], forms, list(weights), scales, shifts)


def mean_size(problem: Problem) -> float:
    """Return the mean diagonal of H̄, the unit in which an anchor's damping is counted."""
    return sum(
        w * (scale * form.mean_diagonal() + shift)
        for w, scale, shift, form in zip(problem.weights, problem.scales, problem.shifts, problem.forms, strict=True)
    )
