"""One task's curvature in the coordinates of a subspace: x -> H̃x, and the solve of a weighted sum of them.

The sum Σ c_t H̃_t is an operator of the same kind: a diagonal metric is summed before it is projected, so that
one projection is enough for all tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from epimer.geometry.linalg import NULL, conjugate_gradients, mean_of, solve_spd
from epimer.geometry.solution import Solution, solved


class SubspaceOperator(ABC):
    """A symmetric positive semi-definite operator on the coordinates of one subspace."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return H̃x."""

    @abstractmethod
    def mean_diagonal(self) -> float:
        """Return trace(H̃) / dimension."""

    @abstractmethod
    def plus(self, other: Self, weight: float) -> Self:
        """Return self + weight · other."""

    @abstractmethod
    def times(self, weight: float) -> Self:
        """Return weight · self."""

    @abstractmethod
    def solve(self, b: Tensor, shift: float) -> Solution:
        """Solve (H̃ + shift·I) y = b."""

    def shifted(self, shift: float) -> Callable[[Tensor], Tensor]:
        """Return x -> H̃x + shift·x."""
        return lambda x: self.apply(x) + shift * x

    def relative_residual(self, y: Tensor, b: Tensor, shift: float) -> float:
        """Return ‖(H̃ + shift·I) y - b‖ / ‖b‖."""
        norm = float(torch.linalg.vector_norm(b))
        return float(torch.linalg.vector_norm(self.apply(y) + shift * y - b)) / norm if norm > 0 else 0.0


def linear_combination(operators: list[SubspaceOperator], weights: list[float]) -> SubspaceOperator:
    """Return Σ weights_t · operators_t; all operators are of one kind."""
    total = operators[0].times(weights[0])
    for operator, weight in zip(operators[1:], weights[1:], strict=True):
        total = total.plus(operator, weight)
    return total


@dataclass(frozen=True)
class Dense(SubspaceOperator):
    """H̃ as a p x p matrix, in float64."""

    H: Tensor
    null: float = NULL
    """share of the largest eigenvalue below which there is only rounding"""

    def apply(self, x: Tensor) -> Tensor:
        return self.H @ x

    def mean_diagonal(self) -> float:
        return mean_of(self.H.diagonal())

    def plus(self, other: Self, weight: float) -> Dense:
        return Dense(self.H + weight * other.H, max(self.null, other.null))

    def times(self, weight: float) -> Dense:
        return Dense(self.H * weight, self.null)

    def solve(self, b: Tensor, shift: float) -> Solution:
        column = solve_spd(self.H, b[:, None], shift, self.null)
        y, damping = column.value[:, 0], column.damping
        return solved(y, self.relative_residual(y, b, shift + damping), damping)


@dataclass(frozen=True)
class Elementwise(SubspaceOperator):
    """A diagonal on the full space: F has the shape of the coordinates, or is one number."""

    F: Tensor

    def apply(self, x: Tensor) -> Tensor:
        return self.F * x

    def mean_diagonal(self) -> float:
        return float(self.F.double().mean())

    def plus(self, other: Self, weight: float) -> Elementwise:
        return Elementwise(self.F + weight * other.F.double())

    def times(self, weight: float) -> Elementwise:
        return Elementwise(self.F.double() * weight)

    def solve(self, b: Tensor, shift: float) -> Solution:
        """Divide by the diagonal; y is 0 where the curvature is zero."""
        F = self.F + shift
        return Solution(torch.where(F > 0, b / torch.where(F > 0, F, 1), 0))


@dataclass(frozen=True)
class OuterSum(SubspaceOperator):
    """X -> Σ_t c_t (1/N_t) Σ_n s_n ⟨s_n, X⟩ with s_n = Σ_tokens g xᵀ, never formed."""

    terms: tuple[tuple[float, Tensor, Tensor], ...]

    def apply(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for c, g, inputs in self.terms:
            along_n = torch.einsum("ntm,mk,ntk->n", g, x.to(g.dtype), inputs)
            total += (c / len(g)) * torch.einsum("n,ntm,ntk->mk", along_n, g, inputs).double()
        return total

    def mean_diagonal(self) -> float:
        total = 0.0
        for c, g, inputs in ((c, g.double(), inputs.double()) for c, g, inputs in self.terms):
            grams = torch.einsum("nsm,ntm->nst", g, g) * torch.einsum("nsk,ntk->nst", inputs, inputs)
            dimension = max(1, g.shape[-1] * inputs.shape[-1])
            total += c * float(grams.sum()) / (max(1, len(g)) * dimension)
        return total

    def plus(self, other: Self, weight: float) -> OuterSum:
        return OuterSum(self.terms + other.times(weight).terms)

    def times(self, weight: float) -> OuterSum:
        return OuterSum(tuple((weight * c, g, x) for c, g, x in self.terms))

    def solve(self, b: Tensor, shift: float) -> Solution:
        tolerance = 1e-11 if self.terms[0][1].dtype == torch.float64 else 1e-6
        return conjugate_gradients(self.shifted(shift), b, tolerance=tolerance)
