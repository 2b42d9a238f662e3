"""Matrices kept as factors D_t = B_t A_t: the small space that they span together, and matrices of a given rank.

Shapes: D_mn, B_mr, A_rn; P_mp and Q_nq have orthonormal columns; cores are C_pq with D = P C Qᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epimer.geometry.decompositions import qr
from epimer.geometry.linalg import LowRank, dense
from epimer.geometry.svd import top_svd


@dataclass(frozen=True)
class Cores:
    """Matrices in the space that their factors span: D_t = P C_t Qᵀ, all in float64."""

    P: Tensor
    Q: Tensor
    cores: list[Tensor]

    def lift(self, factors: LowRank) -> LowRank:
        """Return P (B A) Qᵀ for factors of a core."""
        return LowRank(self.P @ factors.B, factors.A @ self.Q.T)


def cores_of(deltas: Sequence[LowRank]) -> Cores:
    """Return the space that the factors of matrices of one shape span, and every matrix in it."""
    P, left = qr(torch.cat([D.B for D in deltas], dim=1).double())
    Q, right = qr(torch.cat([D.A for D in deltas]).T.double())
    ranks = [len(D.A) for D in deltas]
    parts = zip(*(torch.split(R, ranks, dim=1) for R in (left, right)), strict=True)
    return Cores(P, Q, [B @ A.T for B, A in parts])


def of_rank(C_mn: Tensor, rank: int) -> tuple[LowRank, float]:
    """Return the nearest matrix of a rank as factors of equal size, and the share of ‖C‖ that it leaves out."""
    U, sigma, V = top_svd(C_mn, rank)
    root = sigma.sqrt()
    factors = LowRank(U * root, (V * root).T)
    return factors, _missing(C_mn, factors)


def in_columns(D_mn: Tensor, B_mr: Tensor) -> tuple[LowRank, float]:
    """Return a matrix whose columns are combinations of B's as factors, and the share of it that is none."""
    P = qr(B_mr.double())[0].to(D_mn.dtype)
    factors = LowRank(P, P.T @ D_mn)
    return factors, _missing(D_mn, factors)


def below_each_other(pieces: Sequence[tuple[int, Tensor | LowRank]], m: int, rank: int) -> tuple[LowRank, float]:
    """Return matrices below each other as factors of a rank at most, and the share that they leave out.

    Each comes with its first of m rows; other rows are 0. Pieces with one A in common keep it, bit by bit.
    """
    first = pieces[0][1]
    factored = [(start, D) for start, D in pieces if isinstance(D, LowRank)]
    if len(factored) < len(pieces):
        D_mn = torch.zeros(m, first.shape[1], dtype=first.dtype, device=first.device)
        for start, D in pieces:
            D_mn[start : start + D.shape[0]] = dense(D)
        return of_rank(D_mn, rank)
    shared = all(torch.equal(D.A, factored[0][1].A) for _, D in factored)
    A = factored[0][1].A if shared else torch.cat([D.A for _, D in factored])
    B, column = torch.zeros(m, len(A), dtype=A.dtype, device=A.device), 0
    for start, D in factored:
        B[start : start + D.shape[0], column : column + len(D.A)] = D.B
        column += 0 if shared else len(D.A)
    if len(A) <= rank:
        return LowRank(B, A), 0.0
    space = cores_of([LowRank(B, A)])
    factors, error = of_rank(space.cores[0], rank)
    return space.lift(factors), error


def _missing(C_mn: Tensor, factors: LowRank) -> float:
    """Return ‖C - B A‖ / ‖C‖; 0 for a zero matrix."""
    size = float(torch.linalg.vector_norm(C_mn, dtype=torch.float64))
    return float(torch.linalg.vector_norm(C_mn - factors.dense(), dtype=torch.float64)) / size if size else 0.0


def padded(factors: LowRank, rank: int) -> LowRank:
    """Return factors with zero columns and rows up to a rank."""
    more = rank - len(factors.A)
    return LowRank(torch.nn.functional.pad(factors.B, (0, more)), torch.nn.functional.pad(factors.A, (0, 0, 0, more)))
