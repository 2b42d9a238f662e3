"""The one equation, posed by a subspace and metrics and solved for an aggregator: the Fréchet mean of task vectors.

    x* = argmin_x Σ_t λ_t (x - x_t)ᵀ H̃_t (x - x_t) = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t

It is solved as a step from a reference r, which costs the same and leaves r where no task has curvature:

    x = r + (Σ λ_t H̃_t + εI)⁻¹ Σ λ_t H̃_t (x_t - r)

The mean has r = x̄ = Σ λ_t x_t and ε = 0; anchored has its anchor and its damping; sum is T times the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from epimer.errors import CurvatureError, NumericalError
from epimer.geometry.decompositions import of_task
from epimer.geometry.diagonal import TaggedDiagonal, sum_of_products
from epimer.geometry.kronecker import KroneckerSum
from epimer.geometry.linalg import weighted_sum
from epimer.geometry.metric import Metric
from epimer.geometry.operator import SubspaceOperator, linear_combination
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Full, Subspace

MERGE_TOLERANCE = (
    3e-5  # share of the merge by which an iterative solve may miss it: less than the basis misses tasks by
)


@dataclass(frozen=True)
class Coordinates(Sequence[Tensor]):
    """The tasks' coordinates Sᵀ vec(D_t), each computed when it is asked for: all at once would be float64 copies."""

    subspace: Subspace
    deltas: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.deltas)

    @overload
    def __getitem__(self, t: int) -> Tensor: ...
    @overload
    def __getitem__(self, t: slice) -> Coordinates: ...
    def __getitem__(self, t: int | slice) -> Tensor | Coordinates:
        if isinstance(t, slice):
            return Coordinates(self.subspace, self.deltas[t])
        return self.subspace.project(self.deltas[t])


@dataclass(frozen=True)
class Problem:
    """F(x) = Σ λ_t (x - x_t)ᵀ H̃_t (x - x_t) with H̃_t = scale_t · operator_t + shift_t · I."""

    subspace: Subspace
    """where x lives"""
    points: Sequence[Tensor]
    """x_t, the tasks' coordinates"""
    operators: list[SubspaceOperator]
    weights: list[float]
    scales: list[float]
    shifts: list[float]
    units: list[float]
    """what each task's damping is counted in: the mean diagonal of H̃_t before damping, 1 where it is scaled to that"""
    mean_unit: float
    """the same of H̄"""

    def damped(self, damping: float) -> Problem:
        """Return the problem with `damping` times its mean diagonal added to every H̃_t."""
        return replace(self, shifts=[s + damping * unit for s, unit in zip(self.shifts, self.units, strict=True)])

    def product(self, t: int, x: Tensor) -> Tensor:
        """Return H̃_t x."""
        image = self.operators[t].apply(x).mul_(self.scales[t]) if self.scales[t] else torch.zeros_like(x)
        return image.add_(self.shifts[t] * x) if self.shifts[t] else image

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

    def descent(self, x: Tensor) -> Tensor:
        """Return Σ λ_t H̃_t (x_t - x), half the negative gradient of F."""
        diagonals = [H for H in self.operators if isinstance(H, TaggedDiagonal)]
        if len(diagonals) == len(self.operators):
            scales = [w * s for w, s in zip(self.weights, self.scales, strict=True)]
            shifts = [w * s for w, s in zip(self.weights, self.shifts, strict=True)]
            steps = [point - x for point in self.points]
            return sum_of_products(diagonals, scales, steps) + weighted_sum(steps, shifts)
        total = torch.zeros_like(x)
        for t, (point, weight) in enumerate(zip(self.points, self.weights, strict=True)):
            total += self.product(t, point - x).mul_(weight)
        return total

    @cached_property
    def mean_operator(self) -> SubspaceOperator:
        """Σ λ_t scale_t operator_t, the mean curvature without its shift."""
        return linear_combination(self.operators, [w * s for w, s in zip(self.weights, self.scales, strict=True)])

    @property
    def mean_shift(self) -> float:
        """Σ λ_t shift_t."""
        return sum(w * shift for w, shift in zip(self.weights, self.shifts, strict=True))

    def solve(self, reference: Tensor, epsilon: float = 0.0) -> Solution:
        """Return r + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - r)."""
        return self._step(reference, self.descent(reference), epsilon)

    def _step(self, reference: Tensor, descent: Tensor, epsilon: float = 0.0) -> Solution:
        if not descent.any():
            return Solution(reference)
        operator = self.mean_operator
        if isinstance(operator, KroneckerSum) and not operator.one_sided:
            length = min(float(torch.linalg.vector_norm(x)) for x in (reference, self.flat_mean()))
            operator = replace(operator, allowed=MERGE_TOLERANCE * length)
        step = operator.solve(descent, self.mean_shift + epsilon)
        if not math.isfinite(step.residual):
            raise NumericalError("the system of the mean has no finite solution: it overflowed")
        return replace(step, value=reference + step.value)

    def mean(self) -> Solution:
        """Return the Fréchet mean x*, with η = F(x̄) - F(x*) = ⟨Σ λ_t H̃_t (x_t - x̄), x* - x̄⟩."""
        flat = self.flat_mean()
        descent = self.descent(flat)
        solution = self._step(flat, descent)
        eta = float((descent * (solution.value - flat)).sum())
        return replace(solution, eta=max(0.0, eta))


def build_problem(
    subspace: Subspace,
    metrics: Sequence[Metric],
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    *,
    normalize: str = "trace",
    jitter: float = 0.0,
    tolerance: float = 0.0,
    max_steps: int | None = None,
    name: str = "",
) -> Problem:
    """Return the undamped problem of one layer: curvature projected on the subspace, `jitter`·I added, normalised.

    `normalize` "trace" scales each projected curvature to mean diagonal 1; "common" scales all by one number, so that
    their λ-weighted mean has it and tasks keep their relative sizes; "none" leaves them. A task without curvature, once
    damped, becomes damping·I under "trace" and "common", and nothing under "none". `tolerance` is the relative error of
    the low-rank projection that may start a large diagonal solve; 0 projects exactly. Conjugate gradients stop after
    `max_steps`; None goes on until they converge. Errors call the tensor `name`.
    """
    operators: list[SubspaceOperator] = []
    for t, metric in enumerate(metrics):
        try:
            operators.append(subspace.restrict(metric, tolerance))
        except CurvatureError as error:
            raise CurvatureError(f"curvature[{t}][{name!r}]: {error}") from None
    operators = [replace(H, max_steps=max_steps) if isinstance(H, KroneckerSum) else H for H in operators]
    per_dimension = subspace.coordinates_per_dimension
    sizes = [per_dimension * H.mean_diagonal() + jitter for H in operators]
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True))
    scaled = normalize != "none"
    divisors = {"trace": sizes, "common": [mean_size] * len(sizes), "none": [1.0] * len(sizes)}[normalize]
    scales = [1 / divisor if divisor > 0 else 0.0 for divisor in divisors]
    for t, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        if not (math.isfinite(size) and math.isfinite(scale)):
            with of_task(t):
                raise NumericalError(f"its curvature's mean diagonal, {size:.2g}, or the inverse overflows")
    return Problem(
        subspace=subspace,
        points=Coordinates(subspace, deltas)
        if isinstance(subspace, Full)
        else [subspace.project_task(D, metric) for D, metric in zip(deltas, metrics, strict=True)],
        operators=operators,
        weights=list(weights),
        scales=scales,
        shifts=[jitter * scale for scale in scales],
        units=[1.0] * len(sizes) if scaled else sizes,
        mean_unit=1.0 if scaled else mean_size,
    )
