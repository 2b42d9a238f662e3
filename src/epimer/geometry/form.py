"""One task's curvature in the coordinates of a subspace: x -> H̃x, and the solve of a weighted sum of them.

The sum Σ c_t H̃_t is a form of the same kind: a diagonal metric is summed before it is projected, so that
one projection serves all tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from epimer.geometry.linalg import NULL, conjugate_gradients, rounding, solve_spd

CHUNK = 1 << 24  # elements of the largest temporary of an exact projection
CHEAP = 1 << 28  # an exact projection of fewer multiplications than this needs no shortcut
CONVERGED = 1e-5  # a relative residual above this is reported as stalled
JOINT = 1024  # factors up to this size are worth an eigendecomposition per task
WELL = 1.3  # bound on ‖E‖‖E⁻¹‖ of the tasks' stacked leading eigenvectors, as a multiple of an orthonormal one's
SINGLE = 1e-6  # relative residual to reach where the curvature is in single precision


class Solved(NamedTuple):
    """y with (H + (shift + damping)·I) y = b up to the relative residual."""

    y: Tensor
    residual: float = 0.0
    damping: float = 0.0
    iterative: bool = False

    @property
    def status(self) -> str:
        """Say in a word how the system was solved."""
        if self.damping > 0:
            return "damped"
        if not self.residual <= CONVERGED:
            return "stalled"
        return "converged" if self.iterative else "exact"


class Form(ABC):
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
    def solve(self, b: Tensor, shift: float) -> Solved:
        """Solve (H̃ + shift·I) y = b."""


def combine(forms: list[Form], weights: list[float]) -> Form:
    """Return Σ weights_t · forms_t; all forms are of one kind."""
    total = forms[0].times(weights[0])
    for form, weight in zip(forms[1:], weights[1:], strict=True):
        total = total.plus(form, weight)
    return total


def _residual(form: Form, y: Tensor, b: Tensor, shift: float) -> float:
    norm = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(form.apply(y) + shift * y - b)) / norm if norm > 0 else 0.0


@dataclass(frozen=True)
class Dense(Form):
    """H̃ as a p x p matrix, in float64."""

    H: Tensor
    null: float = NULL
    """share of the largest eigenvalue below which there is only rounding"""

    def apply(self, x: Tensor) -> Tensor:
        return self.H @ x

    def mean_diagonal(self) -> float:
        return float(self.H.diagonal().mean()) if self.H.numel() else 0.0

    def plus(self, other: Self, weight: float) -> Dense:
        return Dense(self.H + weight * other.H, max(self.null, other.null))

    def times(self, weight: float) -> Dense:
        return Dense(self.H * weight, self.null)

    def solve(self, b: Tensor, shift: float) -> Solved:
        y, damping = solve_spd(self.H, b[:, None], shift, self.null)
        return Solved(y[:, 0], _residual(self, y[:, 0], b, shift + damping), damping)


@dataclass(frozen=True)
class Elementwise(Form):
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

    def solve(self, b: Tensor, shift: float) -> Solved:
        """Divide; where the curvature is zero there is nothing to move for, so y is 0."""
        F = self.F + shift
        return Solved(torch.where(F > 0, b / torch.where(F > 0, F, 1), 0))


@dataclass(frozen=True)
class AtomDiagonal(Form):
    """A diagonal metric on the atoms u_i v_iᵀ: dense in their coordinates, though never formed per task."""

    F: Tensor
    U: Tensor
    V: Tensor
    mix: Tensor | None
    tolerance: float
    """0 projects exactly; otherwise a low-rank projection with this relative error preconditions the solve"""

    def _lift(self, x: Tensor) -> Tensor:
        raw = x if self.mix is None else self.mix @ x
        return (self.U * raw.to(self.U.dtype)) @ self.V.T

    def _project(self, D_mn: Tensor) -> Tensor:
        raw = ((D_mn @ self.V) * self.U).sum(dim=0).double()
        return raw if self.mix is None else self.mix.T @ raw

    def apply(self, x: Tensor) -> Tensor:
        return self._project(self.F.to(self.U.dtype) * self._lift(x))

    def mean_diagonal(self) -> float:
        if self.mix is not None:
            H_pp = self.dense()
            return float(H_pp.diagonal().mean()) if H_pp.numel() else 0.0
        weight_mn = self.U.square() @ self.V.square().T
        return float((self.F.to(weight_mn.dtype) * weight_mn).sum()) / max(1, self.U.shape[1])

    def plus(self, other: Self, weight: float) -> AtomDiagonal:
        F = self.F + weight * other.F.double()
        return AtomDiagonal(F, self.U, self.V, self.mix, self.tolerance)

    def times(self, weight: float) -> AtomDiagonal:
        return AtomDiagonal(self.F.double() * weight, self.U, self.V, self.mix, self.tolerance)

    def dense(self) -> Tensor:
        """Return H̃[i,j] = Σ_ab F_ab U_ai U_aj V_bi V_bj exactly, in float64."""
        return self._mixed(project_diagonal(self.F.to(self.U.dtype), self.U, self.V))

    def _mixed(self, H_pp: Tensor) -> Tensor:
        return H_pp if self.mix is None else self.mix.T @ H_pp @ self.mix

    def solve(self, b: Tensor, shift: float) -> Solved:
        m, n, p = *self.F.shape, self.U.shape[1]
        if self.tolerance == 0 or m * n * p * p <= CHEAP:
            return Dense(self.dense(), rounding(self.U.dtype)).solve(b, shift)
        F = self.F.to(self.U.dtype)
        approximate = project_diagonal_lowrank(F, self.U, self.V, self.tolerance)
        if approximate is None:
            return Dense(self.dense(), rounding(self.U.dtype)).solve(b, shift)
        values, vectors = torch.linalg.eigh(self._mixed(approximate))
        inverse = 1 / (values.clamp_min(0) + max(shift, self.tolerance * float(values[-1]) / len(values)))

        def precondition(r: Tensor) -> Tensor:
            return vectors @ (inverse * (vectors.T @ r))

        tolerance = 1e-10 if self.U.dtype == torch.float64 else 3e-7
        y, residual = conjugate_gradients(
            lambda x: self.apply(x) + shift * x, b, precondition, tolerance=tolerance, most=200
        )
        if residual > CONVERGED:
            return Dense(self.dense(), rounding(self.U.dtype)).solve(b, shift)
        return Solved(y, residual, iterative=True)


def project_diagonal(F_mn: Tensor, U_mp: Tensor, V_np: Tensor) -> Tensor:
    """Return H[i,j] = Σ_ab F_ab U_ai U_aj V_bi V_bj at cost m·n·p², never forming S (m·n x p)."""
    if F_mn.shape[0] < F_mn.shape[1]:  # contract the longer side in the matrix product
        F_mn, U_mp, V_np = F_mn.T, V_np, U_mp
    p = U_mp.shape[1]
    H_pp = torch.zeros(p, p, dtype=torch.float64, device=F_mn.device)
    i = 0
    while i < p:
        rows = max(1, min(p - i, CHUNK // (len(U_mp) * (p - i))))
        pairs = (U_mp[:, i : i + rows, None] * U_mp[:, None, i:]).flatten(1)  # m x rows·(p - i)
        half = (F_mn.T @ pairs).view(-1, rows, p - i)
        H_pp[i : i + rows, i:] = torch.einsum("bij,bi,bj->ij", half, V_np[:, i : i + rows], V_np[:, i:])
        i += rows
    return H_pp.triu() + H_pp.triu(1).T


def project_diagonal_lowrank(F_mn: Tensor, U_mp: Tensor, V_np: Tensor, tolerance: float) -> Tensor | None:
    """Project a low-rank F = Σ_r α_r β_rᵀ: H = Σ_r (Uᵀdiag(α_r)U) ∘ (Vᵀdiag(β_r)V), cost r·p²(m + n).

    The rank doubles until the error, measured with random probes of the exact H, is at most
    `tolerance`·‖H‖; None when that costs as much as the exact projection.
    """
    (m, n), p = F_mn.shape, U_mp.shape[1]
    generator = torch.Generator().manual_seed(0)
    probe_p2 = torch.randint(0, 2, (p, 2), generator=generator).to(U_mp) * 2 - 1
    lifts = [(U_mp * probe) @ V_np.T for probe in probe_p2.T]

    def probed(D_mn: Tensor) -> Tensor:
        return torch.stack([((D_mn * lift @ V_np) * U_mp).sum(0) for lift in lifts])

    size = float(torch.linalg.vector_norm(probed(F_mn)))
    H_pp = torch.zeros(p, p, dtype=torch.float64, device=F_mn.device)
    rest_mn, rank, total = F_mn, 8, 0
    while 2 * (total + rank) * (m + n) < m * n:
        sketch = torch.randn(n, rank, generator=generator, dtype=torch.float32).to(F_mn)
        Q_mr = torch.linalg.qr(rest_mn @ (rest_mn.T @ (rest_mn @ sketch))).Q
        B_rn = Q_mr.T @ rest_mn
        for alpha, beta in zip(Q_mr.T, B_rn, strict=True):
            H_pp += (U_mp.T @ (alpha[:, None] * U_mp)) * (V_np.T @ (beta[:, None] * V_np))
        rest_mn = rest_mn - Q_mr @ B_rn
        total += rank
        if float(torch.linalg.vector_norm(probed(rest_mn))) <= tolerance * size:
            return 0.5 * (H_pp + H_pp.T)
        rank = total
    return None


@dataclass(frozen=True)
class PairDiagonal(Form):
    """A diagonal metric on all pairs u_i v_jᵀ: X -> Uᵀ(F ∘ (U X Vᵀ))V, matrix-free."""

    F: Tensor
    U: Tensor
    V: Tensor

    def apply(self, x: Tensor) -> Tensor:
        lifted = self.U @ x.to(self.U.dtype) @ self.V.T
        return (self.U.T @ (self.F.to(self.U.dtype) * lifted) @ self.V).double()

    def diagonal(self) -> Tensor:
        """Return the p x q diagonal of H̃."""
        return (self.U.square().T @ self.F.to(self.U.dtype) @ self.V.square()).double()

    def mean_diagonal(self) -> float:
        diagonal = self.diagonal()
        return float(diagonal.mean()) if diagonal.numel() else 0.0

    def plus(self, other: Self, weight: float) -> PairDiagonal:
        return PairDiagonal(self.F + weight * other.F.double(), self.U, self.V)

    def times(self, weight: float) -> PairDiagonal:
        return PairDiagonal(self.F.double() * weight, self.U, self.V)

    def solve(self, b: Tensor, shift: float) -> Solved:
        diagonal = (self.diagonal() + shift).clamp_min(torch.finfo(torch.float64).tiny)
        tolerance = 1e-11 if self.U.dtype == torch.float64 else 1e-6
        y, residual = conjugate_gradients(
            lambda x: self.apply(x) + shift * x, b, lambda r: r / diagonal, tolerance=tolerance
        )
        return Solved(y, residual, iterative=True)


@dataclass(frozen=True)
class KroneckerSum(Form):
    """X -> Σ_t c_t G_t X A_t; None stands for the identity."""

    terms: tuple[tuple[float, Tensor | None, Tensor | None], ...]
    null: float = NULL

    def apply(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for c, G, A in self.terms:
            image = x if G is None else G @ x
            total += c * (image if A is None else image @ A)
        return total

    def mean_diagonal(self) -> float:
        return sum(c * _mean_diagonal(G) * _mean_diagonal(A) for c, G, A in self.terms)

    def plus(self, other: Self, weight: float) -> KroneckerSum:
        return KroneckerSum(self.terms + other.times(weight).terms, max(self.null, other.null))

    def times(self, weight: float) -> KroneckerSum:
        return KroneckerSum(tuple((weight * c, G, A) for c, G, A in self.terms), self.null)

    def solve(self, b: Tensor, shift: float) -> Solved:
        """Solve in closed form where one side is the identity, else by CG in the mean factors' eigenbases."""
        if all(G is None for _, G, _ in self.terms):
            return self._one_sided(b, [(c, A) for c, _, A in self.terms], shift, right=True)
        if all(A is None for _, _, A in self.terms):
            return self._one_sided(b, [(c, G) for c, G, _ in self.terms], shift, right=False)
        single = self.null > NULL
        P = _diagonaliser([G for _, G, _ in self.terms], b.shape[0], b, single=single)
        Q = _diagonaliser([A for _, _, A in self.terms], b.shape[1], b, single=single)
        terms = [(c, _congruent(P, G), _congruent(Q, A)) for c, G, A in (*self.terms, (shift, None, None)) if c]
        y = P @ _preconditioned(terms, P.T @ b @ Q, single=single) @ Q.T
        return Solved(y, _residual(self, y, b, shift), iterative=True)

    def _one_sided(self, b: Tensor, factors: list[tuple[float, Tensor | None]], shift: float, *, right: bool) -> Solved:
        H = _total(factors, b.shape[1] if right else b.shape[0], b)
        y, damping = solve_spd(H, b.T if right else b, shift, self.null)
        y = y.T if right else y
        return Solved(y, _residual(self, y, b, shift + damping), damping)


def _diagonaliser(factors: list[Tensor | None], size: int, like: Tensor, *, single: bool) -> Tensor:
    """Return P for which all PᵀFP are nearly diagonal.

    E holds each factor's own leading eigenvectors, then the mean factor's on what these leave; F's leading part is
    diagonal in EᵀX, so P = E⁻ᵀ. Fewer eigenvectors per factor are taken until E is well-conditioned; with none of
    them it is the eigenbasis of the mean.
    """
    unit = [(1 / scale, factor) for factor in factors if (scale := _mean_diagonal(factor)) > 0]
    mean = _total(unit, size, like)
    share = size // len(factors) if size <= JOINT and None not in factors else 0
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
        if not info and float(torch.linalg.norm(E) * torch.linalg.norm(inverse)) < WELL * size:
            return inverse.T
        share //= 2
    return torch.linalg.eigh(mean).eigenvectors


def _congruent(P: Tensor, factor: Tensor | None) -> Tensor:
    return P.T @ P if factor is None else P.T @ factor @ P


def _preconditioned(terms: list[tuple[float, Tensor, Tensor]], b: Tensor, *, single: bool) -> Tensor:
    """Solve Σ c G Y A = b by conjugate gradients, preconditioned by the operator's diagonal.

    Factors known in single precision are iterated in it, under a residual that is kept in float64.
    """
    diagonal = torch.zeros_like(b)
    for c, G, A in terms:
        diagonal += c * G.diagonal()[:, None] * A.diagonal()[None, :]
    diagonal = diagonal.clamp_min(torch.finfo(torch.float64).tiny)
    exact = _Stacked(terms, torch.float64)
    if not single:
        return conjugate_gradients(exact.apply, b, lambda r: r / diagonal).y
    quick, diagonal = _Stacked(terms, torch.float32), diagonal.float()
    y, r, norm = torch.zeros_like(b), b, float(torch.linalg.vector_norm(b))
    size = norm
    for _ in range(8):
        wanted = max(0.5 * SINGLE * norm / size, 0.5 * SINGLE)
        step = conjugate_gradients(quick.apply, (r / size).float(), lambda r: r / diagonal, tolerance=wanted).y
        y = y + size * step.double()
        r, previous = b - exact.apply(y), size
        size = float(torch.linalg.vector_norm(r))
        if size <= SINGLE * norm or size > 0.5 * previous:
            break
    return y


class _Stacked:
    """X -> Σ c G X A as two large products instead of two per term."""

    def __init__(self, terms: list[tuple[float, Tensor, Tensor]], dtype: torch.dtype) -> None:
        self.G_tpp = torch.stack([(c * G).to(dtype) for c, G, _ in terms])
        self.A_sq = torch.cat([A.to(dtype) for _, _, A in terms])  # the A_t below each other

    def apply(self, x: Tensor) -> Tensor:
        return torch.matmul(self.G_tpp, x).transpose(0, 1).flatten(1) @ self.A_sq  # the G_t X beside each other


def _mean_diagonal(factor: Tensor | None) -> float:
    return 1.0 if factor is None else float(factor.diagonal().mean()) if factor.numel() else 0.0


def _total(factors: list[tuple[float, Tensor | None]], size: int, like: Tensor) -> Tensor:
    total = torch.zeros(size, size, dtype=like.dtype, device=like.device)
    for c, factor in factors:
        if factor is None:
            total.diagonal().add_(c)
        else:
            total.add_(factor, alpha=c)
    return total


@dataclass(frozen=True)
class OuterSum(Form):
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
        for c, g, inputs in self.terms:
            grams = torch.einsum("nsm,ntm->nst", g, g) * torch.einsum("nsk,ntk->nst", inputs, inputs)
            dimension = max(1, g.shape[-1] * inputs.shape[-1])
            total += c * float(grams.sum()) / (max(1, len(g)) * dimension)
        return total

    def plus(self, other: Self, weight: float) -> OuterSum:
        return OuterSum(self.terms + other.times(weight).terms)

    def times(self, weight: float) -> OuterSum:
        return OuterSum(tuple((weight * c, g, x) for c, g, x in self.terms))

    def solve(self, b: Tensor, shift: float) -> Solved:
        tolerance = 1e-11 if self.terms[0][1].dtype == torch.float64 else 1e-6
        y, residual = conjugate_gradients(lambda x: self.apply(x) + shift * x, b, tolerance=tolerance)
        return Solved(y, residual, iterative=True)
