"""Sums of Kronecker products on a subspace: no closed form where both sides differ, so a well-preconditioned solve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from epimer.geometry.decompositions import cholesky, cholesky_inverse, cholesky_solve, eigvalsh
from epimer.geometry.linalg import (
    NULL,
    conjugate_gradients,
    conjugate_steps,
    gram,
    small_eigh,
    solve_spd,
    unit_of_diagonal,
)
from epimer.geometry.operator import SubspaceOperator
from epimer.geometry.solution import Solution, solved
from epimer.geometry.svd import random_start, ritz
from epimer.records import Status

STACKED = 1024  # factors up to this size are decomposed whole, and multiplied by all tasks at once
PROBES = 32  # combinations of columns that a residual is measured on
ROWS = 32  # of a wide factor, widened at once
LEADING = 64  # eigenvectors of each factor that a preconditioner may use
PAIRS = 1024  # products of them that it inverts exactly
DOUBLE = 1e-10  # relative residual at which a solve stops at the latest
MIXED = 1 << 12  # unknowns from which single precision with corrections is faster than float64
BEARABLE = 1e30  # size of factors and coefficients up to which, and down to whose inverse, single precision bears them
SMALL_SHIFT = 0.3  # of what the largest eigenvalues leave: below it a preconditioner looks at all of the spectrum
FLOOR = 3e-6  # relative residual that single precision reaches without a correction


@dataclass(frozen=True)
class Formed:
    """A symmetric positive semi-definite matrix formed anew for every use, so that no two tasks' are in memory."""

    form: Callable[[], Tensor]
    mean_diagonal: float


Factor = Tensor | Formed | None
"""a symmetric positive semi-definite matrix; None is the identity"""
Term = tuple[float, Factor, Factor]
"""c, G, A of X -> c G X A"""


@dataclass(frozen=True)
class KroneckerSum(SubspaceOperator):
    """X -> Σ_t c_t G_t X A_t; None stands for the identity."""

    terms: tuple[Term, ...]
    null: float = NULL
    max_steps: int | None = None
    """steps after which an iterative solve stops, converged or not"""
    entrywise: bool = False
    """whether factors are rounded entry by entry, relative to their diagonals, as Gram matrices of features are"""
    allowed: float = 0.0
    """error ‖y - y*‖ that makes no difference; where the curvature is in single precision, a solve may stop there"""

    @property
    def one_sided(self) -> bool:
        """Whether all factors of one side are the identity, so that a solve has a closed form."""
        return any(all(term[side] is None for term in self.terms) for side in (1, 2))

    def apply(self, x: Tensor) -> Tensor:
        return _one_by_one(self.terms, 0.0)(x)

    def mean_diagonal(self) -> float:
        return _mean_diagonal(self.terms)

    def plus(self, other: Self, weight: float) -> KroneckerSum:
        terms = self.terms + other.times(weight).terms
        entrywise = self.entrywise and other.entrywise
        return replace(self, terms=terms, null=max(self.null, other.null), entrywise=entrywise)

    def times(self, weight: float) -> KroneckerSum:
        return replace(self, terms=tuple((weight * c, G, A) for c, G, A in self.terms))

    def solve(self, b: Tensor, shift: float) -> Solution:
        """Solve in closed form where one side is the identity, else by preconditioned conjugate gradients."""
        if all(G is None for _, G, _ in self.terms):
            return self._one_sided(b, [(c, A) for c, _, A in self.terms], shift, right=True)
        if all(A is None for _, _, A in self.terms):
            return self._one_sided(b, [(c, G) for c, G, _ in self.terms], shift, right=False)
        damping = self._missing_shift(shift, b.shape)
        if damping == 0:
            return self._iterated(b, shift)
        if self.entrywise and (solution := self._scaled_solution(b, shift)) is not None:
            return solution
        if shift > 0:
            solution = self._iterated(b, damping)
        else:  # no preconditioner: it would leave the operator's range
            solution = conjugate_gradients(self.shifted(damping), b, tolerance=1e-8, max_steps=self.max_steps)
        return replace(solution, status=Status.DAMPED, damping=damping)

    def _scaled_solution(self, b: Tensor, shift: float) -> Solution | None:
        """Return the solution of a sum that looks singular only because its features differ in size, else None."""
        sizes = _sizes(self.terms)
        unit_p1 = _unit([(c * a, G) for (c, _, a), (_, G, _) in zip(sizes, self.terms, strict=True)])[:, None]
        unit_1q = _unit([(c * g, A) for (c, g, _), (_, _, A) in zip(sizes, self.terms, strict=True)])
        scaled = replace(self, terms=tuple((c, _rescaled(G, unit_p1), _rescaled(A, unit_1q)) for c, G, A in self.terms))
        if scaled._missing_shift(shift / float(unit_p1.max() * unit_1q.max()) ** 2, b.shape) > 0:
            return None
        if shift > 0:
            return self._iterated(b, shift)
        solution = scaled._iterated(b / unit_p1 / unit_1q, 0.0)
        return replace(solution, value=solution.value / unit_p1 / unit_1q)

    def _iterated(self, b: Tensor, shift: float) -> Solution:
        """Solve (H̃ + shift·I) y = b by conjugate gradients, in single precision as far as that leads to the goal."""
        norm = float(torch.linalg.vector_norm(b))
        limited = self.max_steps is not None
        is_single = self.null > NULL
        if (is_single or (b.numel() >= MIXED and not limited)) and self._fits_single(shift):
            goal = max(DOUBLE * norm, shift * self.allowed if is_single else 0.0)
            solution = self._refined(b, shift, goal)
            if limited or solution.residual * norm <= goal:
                return solution
        apply, precondition = _shifted_sum(self.terms, shift, b), _preconditioner(self.terms, shift, b)
        solution = conjugate_gradients(apply, b, precondition, max_steps=self.max_steps)
        bearable = max(10 * DOUBLE * norm, shift * self.allowed)
        if shift > 0 and self.allowed > 0 and solution.residual * norm > bearable:
            return replace(solution, status=Status.STALLED)
        return solution

    def _fits_single(self, shift: float) -> bool:
        """Whether single precision can hold the factors and multiply by them and by their coefficients."""
        values = [shift, *(x for c, g, a in _sizes(self.terms) for x in (c, g, a, g * a))]
        return all(x == 0 or 1 / BEARABLE < x < BEARABLE for x in values)

    def _refined(self, b: Tensor, shift: float, goal: float) -> Solution:
        """Iterate in single precision until the residual, which is kept in float64, is at most `goal`.

        No eigenvalue is below `shift`, so that ‖y - y*‖ is at most ‖r‖ / shift.
        """
        size = norm = float(torch.linalg.vector_norm(b))
        y, r, single = torch.zeros_like(b), b, b.float()
        apply, precondition = _shifted_sum(self.terms, shift, single), _preconditioner(self.terms, shift, single)
        for _ in range(8 if norm > 0 else 0):
            target, scaled = max(0.5 * goal / size, FLOOR), (r / size).float()
            y = y + size * conjugate_steps(apply, scaled, precondition, target, self.max_steps).double()
            r, previous = b - self.shifted(shift)(y), size
            size = float(torch.linalg.vector_norm(r))
            if size <= goal or size > 0.5 * previous or self.max_steps is not None:
                break
        if size <= goal:
            return Solution(y, Status.CONVERGED, size / norm if norm > 0 else 0.0)
        return solved(y, size / norm, iterative=True)

    def _missing_shift(self, shift: float, shape: Sequence[int]) -> float:
        """Return the shift below which rounding of the factors decides the solution; 0 if `shift` is enough.

        Rounding matters if neither the shift nor another term is above it, and if a factor is singular: a product of
        well-conditioned factors has small relative errors. It moves eigenvalues of G ⊗ A by `null` of the largest at
        most, and by a share 1 / √p of that if entries of a p x p factor are rounded independently. Without a shift, the
        first counts.
        """
        share = self.null / math.sqrt(min(shape)) if shift > 0 else self.null
        if shift > share * math.prod(shape) * self.mean_diagonal() or shift > share * _largest_bound(self.terms):
            return 0.0
        lowest, rounding = shift, 0.0
        for c, G, A in self.terms:
            g, a = ((1.0, 1.0) if M is None else eigvalsh(_matrix(M).double())[[0, -1]].tolist() for M in (G, A))
            lowest = max(lowest, c * max(0.0, g[0]) * max(0.0, a[0]))
            if shift == 0 or not (g[0] > self.null * g[1] and a[0] > self.null * a[1]):
                rounding += share * c * g[1] * a[1]
        return 0.0 if lowest > rounding else rounding

    def _one_sided(self, b: Tensor, factors: list[tuple[float, Factor]], shift: float, *, right: bool) -> Solution:
        H, rhs = _total(factors, b.shape[1] if right else b.shape[0], b), b.T if right else b
        solution = solve_spd(H, rhs, shift, self.null, entrywise=self.entrywise)
        y = solution.value
        return solved(y.T if right else y, _relative_residual(H, y, rhs, shift), solution.damping)


def _relative_residual(H: Tensor, y: Tensor, b: Tensor, shift: float) -> float:
    """Return ‖(H + shift·I) y - b‖ / ‖b‖; of many columns along `PROBES` random combinations z, E zzᵀ = I, of them."""
    if b.shape[1] > 2 * PROBES:
        signs = torch.randint(2, (b.shape[1], PROBES), generator=torch.Generator().manual_seed(0))
        z = (2 * signs - 1).to(b)
        y, b = y @ z, b @ z
    norm = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm((H @ y).add_(y, alpha=shift).sub_(b))) / norm if norm > 0 else 0.0


def _matrix(factor: Tensor | Formed) -> Tensor:
    return factor.form() if isinstance(factor, Formed) else factor


def _unit(factors: Sequence[tuple[float, Factor]]) -> Tensor:
    """Return the square roots of the diagonal of a sum of factors; 1 where it is zero, or a factor is the identity."""
    diagonals = [c * _matrix(M).diagonal().double() for c, M in factors if M is not None]
    if len(diagonals) < len(factors):
        return torch.ones(1, dtype=torch.float64, device=diagonals[0].device if diagonals else None)
    return unit_of_diagonal(torch.stack(diagonals).sum(0))


def _rescaled(factor: Factor, unit: Tensor) -> Factor:
    """Return M_ij / (s_i s_j), formed anew for every use."""
    if factor is None:
        return None
    unit = unit.flatten()
    mean_diagonal = float((_matrix(factor).diagonal() / unit.square()).mean())
    return Formed(lambda: _matrix(factor) / unit / unit[:, None], mean_diagonal)


def _largest_bound(terms: Sequence[Term]) -> float:
    """Return Σ c ‖G‖ ‖A‖ in Frobenius norms, which no eigenvalue exceeds; the norm of the identity is 1."""
    norms = [
        [1.0 if M is None else float(torch.linalg.vector_norm(_matrix(M), dtype=torch.float64)) for M in pair]
        for _, *pair in terms
    ]
    return sum(c * left * right for (c, _, _), (left, right) in zip(terms, norms, strict=True))


def _one_by_one(terms: Sequence[Term], shift: float) -> Callable[[Tensor], Tensor]:
    """Return X -> Σ c G X A + shift·X in the precision of X, without a copy of more than one factor."""

    def apply(x: Tensor) -> Tensor:
        total = shift * x
        for c, G, A in terms:
            image = x if G is None else _matrix(G).to(x.dtype) @ x
            total.add_(image if A is None else image @ _matrix(A).to(x.dtype), alpha=c)
        return total

    return apply


def _shifted_sum(terms: Sequence[Term], shift: float, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return X -> Σ c G X A + shift·X, where it pays as two products for all terms: [G_1 X, G_2 X, …] [A_1; A_2; …]."""
    if max(like.shape) > STACKED:
        return _one_by_one(terms, shift)
    c_t = torch.tensor([c for c, _, _ in terms], dtype=like.dtype, device=like.device)
    G_tpp = _stacked([G for _, G, _ in terms], like.shape[0], like).mul_(c_t[:, None, None])
    A_sq = _stacked([A for _, _, A in terms], like.shape[1], like).flatten(0, 1)
    return lambda x: (torch.matmul(G_tpp, x).transpose(0, 1).flatten(1) @ A_sq).add_(x, alpha=shift)


def _stacked(factors: Sequence[Factor], size: int, like: Tensor) -> Tensor:
    """Return the factors as one tensor [T, p, p] in the precision of `like`."""
    stack = like.new_empty(len(factors), size, size)
    for target, factor in zip(stack, factors, strict=True):
        target.copy_(torch.eye(size) if factor is None else _matrix(factor))
    return stack


def _preconditioner(terms: Sequence[Term], shift: float, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an approximate inverse of X -> Σ c G X A + shift·X, in the shape and precision of `like`.

    The curvature of few samples has few large eigenvalues. The largest λ of all terms with their eigenvectors
    W = [e_i ⊗ f_j] are inverted exactly, the rest as if it were its mean diagonal (s, with the shift), by Woodbury's
    identity: (s + W Λ Wᵀ)⁻¹ = (1 - W (s Λ⁻¹ + WᵀW)⁻¹ Wᵀ) / s, where WᵀW is a product of two Gram matrices. Where
    the shift is small beside what they leave, all of the spectrum counts.
    """
    (p, q), tasks = like.shape, len(terms)
    left, right = [G for _, G, _ in terms], [A for _, _, A in terms]
    if like.is_cuda and p == q:  # many matrices take a GPU hardly longer than few
        (g_tk, a_th), (E_tpk, F_tqh) = (torch.split(parts, tasks) for parts in _leading([*left, *right], p, like))
    else:
        (g_tk, E_tpk), (a_th, F_tqh) = _leading(left, p, like), _leading(right, q, like)
    c_t = torch.tensor([c for c, _, _ in terms], dtype=like.dtype, device=like.device)
    values_tkh = c_t[:, None, None] * g_tk[:, :, None] * a_th[:, None, :]
    largest = torch.topk(values_tkh.flatten(), min(PAIRS, -(-p * q // 2), values_tkh.numel()))
    kept = largest.values > torch.finfo(like.dtype).eps * largest.values[0]
    values, index = largest.values[kept], largest.indices[kept]
    trace = p * q * _mean_diagonal(terms)
    left_over = max(0.0, trace - float(values.sum(dtype=torch.float64))) / (p * q)
    if shift < SMALL_SHIFT * left_over and (along := _along_mean_factors(terms, shift, like)):
        return along
    rest = shift + left_over
    k, h = g_tk.shape[1], a_th.shape[1]
    task, i, j = index // (k * h), index // h % k, index % h
    E_np, F_nq = E_tpk[task, :, i], F_tqh[task, :, j]
    inner = gram(E_np.T) * gram(F_nq.T)
    inner.diagonal().add_(rest / values)
    L, info = cholesky(inner)
    if info or not values.numel() or not rest > 0:
        return lambda r: r
    inverse = cholesky_inverse(L) if like.is_cuda else None  # on a CPU it costs more than all of the solves
    k, h = int(i.max()) + 1, int(j.max()) + 1
    E_tpk, F_tqh = E_tpk[:, :, :k].contiguous(), F_tqh[:, :, :h].contiguous()
    F_sq, place = F_tqh.mT.flatten(0, 1), (task * k + i) * h + j

    def precondition(r: Tensor) -> Tensor:
        along = (torch.matmul(E_tpk.mT, r) @ F_tqh).flatten()
        weights = torch.zeros_like(along)
        inner = along[place]
        weights[place] = cholesky_solve(inner[:, None], L)[:, 0] if inverse is None else inverse @ inner
        lifted = torch.matmul(E_tpk, weights.view(tasks, k, h)).transpose(0, 1).flatten(1) @ F_sq
        return (r - lifted) / rest

    return precondition


def _along_mean_factors(terms: Sequence[Term], shift: float, like: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the inverse of the operator's diagonal along the eigenvectors of its mean factors, if it is positive."""
    sizes = _sizes(terms)
    left = [(c * a, G) for (c, _, a), (_, G, _) in zip(sizes, terms, strict=True)]
    right = [(c * g, A) for (c, g, _), (_, _, A) in zip(sizes, terms, strict=True)]
    E_pp, F_qq = (small_eigh(_total(*of, like))[1] for of in ((left, like.shape[0]), (right, like.shape[1])))
    diagonal_pq = torch.full_like(like, shift)
    for c, G, A in terms:
        diagonal_pq.addr_(_diagonal_along(G, E_pp), _diagonal_along(A, F_qq), alpha=c)
    if not float(diagonal_pq.min()) > 0:
        return None
    return lambda r: E_pp @ (E_pp.T @ r @ F_qq).div_(diagonal_pq) @ F_qq.T


def _diagonal_along(factor: Factor, U: Tensor) -> Tensor:
    """Return the diagonal of UᵀMU."""
    return U.new_ones(U.shape[1]) if factor is None else (_matrix(factor).to(U) @ U).mul_(U).sum(dim=0).clamp_min_(0)


def _leading(factors: Sequence[Factor], size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading eigenvalues [T, k] and eigenvectors [T, p, k] of every factor, in falling order.

    Those of a large factor are the Ritz pairs of two products with it: a preconditioner need not know them exactly.
    """
    groups = [factors] if size <= STACKED else [[factor] for factor in factors]
    pairs = [_leading_of(_stacked(group, size, like)) for group in groups]
    return torch.cat([values for values, _ in pairs]).clamp_min_(0), torch.cat([vectors for _, vectors in pairs])


def _leading_of(M_tpp: Tensor) -> tuple[Tensor, Tensor]:
    size = M_tpp.shape[-1]
    if size < 3 * LEADING:
        values, vectors = small_eigh(M_tpp)
        return values.flip(-1)[:, :LEADING], vectors.flip(-1)[:, :, :LEADING]
    values, vectors, _ = ritz(M_tpp.matmul, M_tpp @ (M_tpp @ random_start(size, LEADING).to(M_tpp)))
    return values, vectors


def _mean_diagonal(terms: Sequence[Term]) -> float:
    return sum(c * g * a for c, g, a in _sizes(terms))


def _sizes(terms: Sequence[Term]) -> list[tuple[float, float, float]]:
    """Return every term's c and the mean diagonals of its two factors; a device is asked for all of them at once."""
    factors = [factor for _, G, A in terms for factor in (G, A)]
    matrices = [factor for factor in factors if isinstance(factor, Tensor)]
    sums = [M.diagonal().double().sum() / max(1, len(M)) for M in matrices]
    measured = iter(torch.stack(sums).tolist() if sums else ())
    means = [
        1.0 if factor is None else factor.mean_diagonal if isinstance(factor, Formed) else next(measured)
        for factor in factors
    ]
    return [(c, g, a) for (c, _, _), g, a in zip(terms, means[::2], means[1::2], strict=True)]


def _total(factors: list[tuple[float, Factor]], size: int, like: Tensor) -> Tensor:
    total = torch.zeros(size, size, dtype=like.dtype, device=like.device)
    for c, factor in factors:
        if factor is None:
            total.diagonal().add_(c)
        else:
            matrix = _matrix(factor)
            for rows, part in zip(torch.split(total, ROWS), torch.split(matrix, ROWS), strict=True):
                rows.add_(part.to(total.dtype), alpha=c)  # widened in the cache
    return total
