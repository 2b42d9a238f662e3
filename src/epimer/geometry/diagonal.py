"""A diagonal metric in the coordinates of a subspace, where it is dense, without forming a matrix for every task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from epimer.geometry.linalg import atom_coefficients, conjugate_gradients, mean_of, null_share, sum_of_atoms
from epimer.geometry.operator import Dense, SubspaceOperator
from epimer.geometry.solution import Solution, solved
from epimer.records import Status

if TYPE_CHECKING:
    from epimer.geometry.subspace import Tagged

CHUNK = 1 << 24  # elements of the largest temporary of an exact projection
CHEAP = 1 << 28  # an exact projection of fewer multiplications than this needs no shortcut


@dataclass(frozen=True)
class TaggedDiagonal(SubspaceOperator):
    """A diagonal metric on the atoms u_i v_iᵀ. It is dense in their coordinates, but never formed for a single task."""

    F: Tensor
    atoms: Tagged
    tolerance: float
    """0 projects exactly; otherwise a low-rank projection with this relative error preconditions the solve"""

    def apply(self, x: Tensor) -> Tensor:
        return self.atoms.project(self.F.to(self.atoms.U.dtype) * self.atoms.lift(x))

    def mean_diagonal(self) -> float:
        if self.atoms.mix is not None:
            return mean_of(self.H.diagonal())
        weight_mn = self.atoms.U.square() @ self.atoms.V.square().T
        return float((self.F.to(weight_mn.dtype) * weight_mn).sum()) / max(1, self.atoms.U.shape[1])

    def plus(self, other: Self, weight: float) -> TaggedDiagonal:
        return replace(self, F=self.F + weight * other.F.double())

    def times(self, weight: float) -> TaggedDiagonal:
        return replace(self, F=self.F.double() * weight)

    @cached_property
    def H(self) -> Tensor:
        """H̃[i,j] = Σ_ab F_ab U_ai U_aj V_bi V_bj exactly, in float64."""
        U, V = self.atoms.U, self.atoms.V
        return self.atoms.orthonormal(project_diagonal(self.F.to(U.dtype), U, V))

    def solve(self, b: Tensor, shift: float) -> Solution:
        dtype, (m, n), p = self.atoms.U.dtype, self.F.shape, self.atoms.U.shape[1]
        if self.tolerance > 0 and m * n * p * p > CHEAP:
            solution = replace(self, F=self.F.to(dtype))._solve_lowrank(b, shift)
            if solution is not None:
                return solution
        return Dense(self.H, null_share(dtype)).solve(b, shift)

    def _solve_lowrank(self, b: Tensor, shift: float) -> Solution | None:
        """Iterate on exact products, preconditioned by a low-rank projection; None where no low rank is enough."""
        approximate = project_diagonal_lowrank(self.F, self.atoms.U, self.atoms.V, self.tolerance)
        if approximate is None:
            return None
        values, vectors = torch.linalg.eigh(self.atoms.orthonormal(approximate))
        inverse = 1 / (values.clamp_min(0) + max(shift, self.tolerance * float(values[-1]) / len(values)))

        def precondition(r: Tensor) -> Tensor:
            return vectors @ (inverse * (vectors.T @ r))

        tolerance = 1e-10 if self.F.dtype == torch.float64 else 3e-7
        solution = conjugate_gradients(self.shifted(shift), b, precondition, tolerance=tolerance, max_steps=200)
        return solution if solution.status is Status.CONVERGED else None


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
    lifts = [sum_of_atoms(probe, U_mp, V_np) for probe in probe_p2.T]

    def probed(D_mn: Tensor) -> Tensor:
        return torch.stack([atom_coefficients(D_mn * lift, U_mp, V_np) for lift in lifts])

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
