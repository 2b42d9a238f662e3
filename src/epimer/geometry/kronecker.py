"""Sums of Kronecker products on a subspace: no closed form where both sides differ, so a well-preconditioned solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from epimer.geometry.linalg import NULL, conjugate_gradients, mean_of, solve_spd
from epimer.geometry.operator import SubspaceOperator
from epimer.geometry.solution import Solution, solved
from epimer.records import Status

JOINT = 1024  # factors up to this size are worth an eigendecomposition per task
WELL_CONDITIONED = 1.3  # bound on ‖E‖‖E⁻¹‖ of stacked leading eigenvectors, as a multiple of an orthonormal stack's
SINGLE = 1e-6  # relative residual to reach where the curvature is in single precision


@dataclass(frozen=True)
class KroneckerSum(SubspaceOperator):
    """X -> Σ_t c_t G_t X A_t; None stands for the identity."""

    terms: tuple[tuple[float, Tensor | None, Tensor | None], ...]
    null: float = NULL
    max_steps: int | None = None
    """steps after which an iterative solve stops, converged or not"""

    def apply(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for c, G, A in self.terms:
            image = x if G is None else G @ x
            total += c * (image if A is None else image @ A)
        return total

    def mean_diagonal(self) -> float:
        return sum(c * _mean_diagonal(G) * _mean_diagonal(A) for c, G, A in self.terms)

    def plus(self, other: Self, weight: float) -> KroneckerSum:
        return replace(self, terms=self.terms + other.times(weight).terms, null=max(self.null, other.null))

    def times(self, weight: float) -> KroneckerSum:
        return replace(self, terms=tuple((weight * c, G, A) for c, G, A in self.terms))

    def solve(self, b: Tensor, shift: float) -> Solution:
        """Solve in closed form where one side is the identity, else by CG where the factors are nearly diagonal."""
        if all(G is None for _, G, _ in self.terms):
            return self._one_sided(b, [(c, A) for c, _, A in self.terms], shift, right=True)
        if all(A is None for _, _, A in self.terms):
            return self._one_sided(b, [(c, G) for c, G, _ in self.terms], shift, right=False)
        single = self.null > NULL
        if shift == 0 and (damping := self._singular()):  # no preconditioner: it would leave the operator's range
            solution = conjugate_gradients(self.shifted(damping), b, tolerance=1e-8, max_steps=self.max_steps)
            return replace(solution, status=Status.DAMPED, damping=damping)
        joint = self.max_steps is None
        P = _diagonaliser([G for _, G, _ in self.terms], b.shape[0], b, single=single, joint=joint)
        Q = _diagonaliser([A for _, _, A in self.terms], b.shape[1], b, single=single, joint=joint)
        terms = [term for term in (*self.terms, (shift, None, None)) if term[0]]
        G_tpp = _stacked(P, [(c, G) for c, G, _ in terms])
        A_tqq = _stacked(Q, [(1.0, A) for _, _, A in terms])
        y = P @ _preconditioned(G_tpp, A_tqq, P.T @ b @ Q, single=single, max_steps=self.max_steps) @ Q.T
        return solved(y, self.relative_residual(y, b, shift), iterative=True)

    def _singular(self) -> float:
        """Return the damping an undamped sum needs: 0 where one term alone is well above rounding everywhere."""
        lowest = highest = 0.0
        for c, G, A in self.terms:
            spectra = [torch.linalg.eigvalsh(M)[[0, -1]].tolist() if M is not None else [1.0, 1.0] for M in (G, A)]
            lowest = max(lowest, c * max(0.0, spectra[0][0]) * max(0.0, spectra[1][0]))
            highest += c * spectra[0][1] * spectra[1][1]
        return 0.0 if lowest > self.null * highest else self.null * highest

    def _one_sided(
        self, b: Tensor, factors: list[tuple[float, Tensor | None]], shift: float, *, right: bool
    ) -> Solution:
        H = _total(factors, b.shape[1] if right else b.shape[0], b)
        solution = solve_spd(H, b.T if right else b, shift, self.null)
        y, damping = solution.value.T if right else solution.value, solution.damping
        return solved(y, self.relative_residual(y, b, shift + damping), damping)


def _diagonaliser(factors: list[Tensor | None], size: int, like: Tensor, *, single: bool, joint: bool) -> Tensor:
    """Return P for which PᵀFP is nearly diagonal for every factor F.

    E holds each factor's own leading eigenvectors, then the mean factor's on what these leave; F's leading part is
    diagonal in EᵀX, so P = E⁻ᵀ. Fewer eigenvectors per factor are taken until E is well-conditioned; with none of
    them it is the eigenbasis of the mean; and so it is where `joint` is false, for a solve too short to repay more.
    """
    unit = [(1 / scale, factor) for factor in factors if (scale := _mean_diagonal(factor)) > 0]
    mean = _total(unit, size, like)
    share = size // len(factors) if joint and size <= JOINT and None not in factors else 0
    vectors = [
        torch.linalg.eigh(factor.float() if single else factor).eigenvectors.flip(-1).to(like.dtype)
        for factor in factors
        if factor is not None and share
    ]
    while share:
        leading = torch.cat([vector[:, :share] for vector in vectors], dim=1)
        rest = torch.linalg.qr(leading, mode="complete").Q[:, leading.shape[1] :]
        rest = rest @ torch.linalg.eigh(rest.T @ mean @ rest).eigenvectors
        E = torch.cat([leading, rest], dim=1)
        inverse, info = torch.linalg.inv_ex(E)
        if not info and float(torch.linalg.norm(E) * torch.linalg.norm(inverse)) < WELL_CONDITIONED * size:
            return inverse.T
        share //= 2
    return torch.linalg.eigh(mean).eigenvectors


def _stacked(P: Tensor, factors: list[tuple[float, Tensor | None]]) -> Tensor:
    """Return c PᵀFP of every factor, [T, p, p]; filled one by one, so that none is in memory twice."""
    size = P.shape[1]
    stack = P.new_empty(len(factors), size, size)
    for target, (c, factor) in zip(stack, factors, strict=True):
        torch.mul(P.T @ P if factor is None else P.T @ factor @ P, c, out=target)
    return stack


def _preconditioned(G_tpp: Tensor, A_tqq: Tensor, b: Tensor, *, single: bool, max_steps: int | None) -> Tensor:
    """Solve Σ G Y A = b by conjugate gradients, preconditioned by the operator's diagonal.

    Factors known in single precision are iterated in it, under a residual that is kept in float64.
    """
    diagonal = torch.zeros_like(b)
    for G, A in zip(G_tpp, A_tqq, strict=True):
        diagonal += G.diagonal()[:, None] * A.diagonal()[None, :]
    diagonal = diagonal.clamp_min(1e-30 * float(diagonal.max()))
    exact = _summed(G_tpp, A_tqq)
    if not single:
        return conjugate_gradients(exact, b, lambda r: r / diagonal, max_steps=max_steps).value
    quick, diagonal = _summed(G_tpp.float(), A_tqq.float()), diagonal.float()
    y, r, norm = torch.zeros_like(b), b, float(torch.linalg.vector_norm(b))
    size = norm
    for _ in range(8):
        target, scaled = max(0.5 * SINGLE * norm / size, 3e-6), (r / size).float()
        step = conjugate_gradients(quick, scaled, lambda r: r / diagonal, tolerance=target, max_steps=max_steps)
        y = y + size * step.value.double()
        if max_steps is not None:
            break
        r, previous = b - exact(y), size
        size = float(torch.linalg.vector_norm(r))
        if size <= SINGLE * norm or size > 0.5 * previous:
            break
    return y


def _summed(G_tpp: Tensor, A_tqq: Tensor) -> Callable[[Tensor], Tensor]:
    """Return X -> Σ G X A as two large products instead of two per term: [G_1 X, G_2 X, …] [A_1; A_2; …]."""
    A_sq = A_tqq.flatten(0, 1)
    return lambda x: torch.matmul(G_tpp, x).transpose(0, 1).flatten(1) @ A_sq


def _mean_diagonal(factor: Tensor | None) -> float:
    return 1.0 if factor is None else mean_of(factor.diagonal())


def _total(factors: list[tuple[float, Tensor | None]], size: int, like: Tensor) -> Tensor:
    total = torch.zeros(size, size, dtype=like.dtype, device=like.device)
    for c, factor in factors:
        if factor is None:
            total.diagonal().add_(c)
        else:
            total.add_(factor, alpha=c)
    return total
