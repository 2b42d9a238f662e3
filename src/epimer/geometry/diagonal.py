"""A diagonal metric in the coordinates of a subspace, where it is dense, without forming a matrix for every task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from epimer.geometry.decompositions import qr
from epimer.geometry.linalg import conjugate_gradients, mean_of, null_share, small_eigh
from epimer.geometry.operator import Dense, SubspaceOperator
from epimer.geometry.solution import Solution, solved
from epimer.records import Status

if TYPE_CHECKING:
    from epimer.geometry.subspace import Tagged

CHUNK = 1 << 21  # elements of the largest temporary of an exact projection, which stays near the cache
GPU_CHUNK = 1 << 25  # the same on a GPU, which is fast on large products only
START_RANK = 8  # of the projection that preconditions a solve
STEPS = 60  # of a solve on exact products, which cost about as much as one exact projection
CHEAP = 1 << 28  # an exact projection of fewer multiplications than this needs no shortcut
GPU_CHEAP = 1 << 38  # the same on a GPU, where starting the kernels of many small steps takes longer


@dataclass(frozen=True)
class TaggedDiagonal(SubspaceOperator):
    """A diagonal metric on the atoms u_i v_iᵀ. It is dense in their coordinates, but never formed for a single task."""

    F: Tensor
    atoms: Tagged
    tolerance: float
    """0 projects exactly; otherwise a low-rank projection, trusted down to this share, preconditions the solve"""

    def apply(self, x: Tensor) -> Tensor:
        return self.atoms.project(self.F.to(self.atoms.U.dtype) * self.atoms.lift(x))

    def mean_diagonal(self) -> float:
        if self.atoms.mix is not None:
            return mean_of(self.H.diagonal())
        weight_mn = self.atoms.squares
        rows = torch.linalg.vecdot(self.F.to(weight_mn.dtype), weight_mn)
        return float(rows.sum(dtype=torch.float64)) / max(1, len(self.atoms.owner))

    def plus(self, other: Self, weight: float) -> TaggedDiagonal:
        return replace(self, F=self.F + weight * other.F)

    def times(self, weight: float) -> TaggedDiagonal:
        return replace(self, F=self.F * weight)

    @cached_property
    def H(self) -> Tensor:
        """H̃[i,j] = Σ_ab F_ab U_ai U_aj V_bi V_bj exactly, in float64."""
        U, V = self.atoms.U, self.atoms.V
        return self.atoms.orthonormal(project_diagonal(self.F.to(U.dtype), U, V))

    def solve(self, b: Tensor, shift: float) -> Solution:
        dtype, (m, n), p = self.atoms.U.dtype, self.F.shape, self.atoms.U.shape[1]
        if self.tolerance > 0 and m * n * p * p > (GPU_CHEAP if self.F.is_cuda else CHEAP):
            solution = replace(self, F=self.F.to(dtype))._iterate(b, shift)
            if solution.status is Status.CONVERGED:
                return solution
        return Dense(self.H, null_share(dtype)).solve(b, shift)

    def _iterate(self, b: Tensor, shift: float) -> Solution:
        """Iterate on exact products, preconditioned by a low-rank projection, for less than an exact one would cost."""
        approximate = project_diagonal_lowrank(self.F, self.atoms.U, self.atoms.V)
        values, vectors = small_eigh(self.atoms.orthonormal(approximate))
        floor = max(shift, self.tolerance * mean_of(values.clamp_min(0)))
        inverse = 1 / (values.clamp_min(0) + floor)

        def precondition(r: Tensor) -> Tensor:
            return vectors @ (inverse * (vectors.T @ r))

        tolerance = 1e-10 if self.F.dtype == torch.float64 else 3e-7
        return conjugate_gradients(self.shifted(shift), b, precondition, tolerance=tolerance, max_steps=STEPS)


def sum_of_products(operators: list[TaggedDiagonal], scales: list[float], points: list[Tensor]) -> Tensor:
    """Return Σ scale_t H̃_t x_t of diagonals on the same atoms: added up before the projection, which is then one."""
    atoms = operators[0].atoms
    total: Tensor | None = None
    for H, scale, x in zip(operators, scales, points, strict=True):
        lifted = atoms.lift(scale * x).mul_(H.F.to(atoms.U.dtype))
        total = lifted if total is None else total.add_(lifted)
    assert total is not None
    return atoms.project(total)


def project_diagonal(F_mn: Tensor, U_mp: Tensor, V_np: Tensor) -> Tensor:
    """Return H[i,j] = Σ_ab F_ab U_ai U_aj V_bi V_bj at cost m·n·p², never forming S (m·n x p)."""
    if F_mn.shape[0] < F_mn.shape[1]:  # contract the longer side in the matrix product
        F_mn, U_mp, V_np = F_mn.T, V_np, U_mp
    p, chunk = U_mp.shape[1], GPU_CHUNK if F_mn.is_cuda else CHUNK
    H_pp = torch.zeros(p, p, dtype=torch.float64, device=F_mn.device)
    i = 0
    while i < p:
        rows = max(1, min(p - i, chunk // (len(U_mp) * (p - i))))
        pairs = (U_mp[:, i : i + rows, None] * U_mp[:, None, i:]).flatten(1)  # m x rows·(p - i)
        half = (F_mn.T @ pairs).view(-1, rows, p - i)
        H_pp[i : i + rows, i:] = torch.einsum("bij,bi,bj->ij", half, V_np[:, i : i + rows], V_np[:, i:])
        i += rows
    return H_pp.triu() + H_pp.triu(1).T


def project_diagonal_lowrank(F_mn: Tensor, U_mp: Tensor, V_np: Tensor, rank: int = START_RANK) -> Tensor:
    """Project a low-rank part F ≈ Σ_r α_r β_rᵀ: H = Σ_r (Uᵀdiag(α_r)U) ∘ (Vᵀdiag(β_r)V), cost r·p²(m + n)."""
    rank = min(rank, *F_mn.shape)
    sketch = torch.randn(F_mn.shape[1], rank, generator=torch.Generator().manual_seed(0)).to(F_mn)
    Q_mr, _ = qr(F_mn @ (F_mn.T @ (F_mn @ sketch)))
    H_pp = torch.zeros(U_mp.shape[1], U_mp.shape[1], dtype=torch.float64, device=F_mn.device)
    for alpha, beta in zip(Q_mr.T, Q_mr.T @ F_mn, strict=True):
        H_pp += (U_mp.T @ (alpha[:, None] * U_mp)) * (V_np.T @ (beta[:, None] * V_np))
    return 0.5 * (H_pp + H_pp.T)


@dataclass(frozen=True)
class TensorProductDiagonal(SubspaceOperator):
    """Diagonal metrics on all pairs u_i v_jᵀ: X -> Σ Uᵀ(F ∘ (U X Vᵀ))V, matrix-free.

    Tasks share U and V where the diagonal is in the weights' own coordinates, so that their F add up to one term.
    """

    terms: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """F, U and V of each"""

    def apply(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for F, U, V in self.terms:
            total += (U.T @ (F.to(U.dtype) * (U @ x.to(U.dtype) @ V.T)) @ V).double()
        return total

    def diagonal(self) -> Tensor:
        """Return the p x q diagonal of H̃."""
        parts = [(U.square().T @ F.to(U.dtype) @ V.square()).double() for F, U, V in self.terms]
        return torch.stack(parts).sum(0)

    def mean_diagonal(self) -> float:
        return mean_of(self.diagonal())

    def plus(self, other: Self, weight: float) -> TensorProductDiagonal:
        terms = list(self.terms)
        for F, U, V in other.times(weight).terms:
            shared = next((i for i, (_, mine, _) in enumerate(terms) if mine is U), None)
            if shared is None:
                terms.append((F, U, V))
            else:
                terms[shared] = (terms[shared][0] + F, U, V)
        return TensorProductDiagonal(tuple(terms))

    def times(self, weight: float) -> TensorProductDiagonal:
        return TensorProductDiagonal(tuple((F.double() * weight, U, V) for F, U, V in self.terms))

    def solve(self, b: Tensor, shift: float) -> Solution:
        diagonal, dtype = self.diagonal(), self.terms[0][1].dtype
        noise = null_share(dtype) * float(diagonal.max())
        damping = noise if shift < noise else 0.0  # a preconditioner would carry a singular solve out of its range
        diagonal, shift = diagonal + shift + damping, shift + damping
        tolerance = 1e-11 if dtype == torch.float64 else 1e-6
        cast = TensorProductDiagonal(tuple((F.to(dtype), U, V) for F, U, V in self.terms))  # once, not in every product
        solution = conjugate_gradients(cast.shifted(shift), b, lambda r: r / diagonal, tolerance=tolerance)
        return solved(solution.value, solution.residual, damping, iterative=True)
