"""The mean under Gram matrices of the inputs, multiplied in single precision where that is shown to be exact enough.

With off-diagonal entries multiplied by ρ < 1, H = ρA + (1 - ρ) diag(A), scaled to a unit diagonal, has no eigenvalue
below 1 - ρ, and Cholesky's method does not depend on such a scaling. So most digits of single precision remain; fewer
where inputs have one sign or few samples, or some are much weaker than others. Hence the error is measured, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epimer.geometry.decompositions import cholesky_solve
from epimer.geometry.linalg import null_share, positive_factor, symmetrize_, weighted_sum
from epimer.geometry.solution import CONVERGED, Solution, solved

ALLOWED = 5e-6  # share of the merge by which single precision may miss it, along the probes
PROBES = 8  # random combinations of outputs along which that is measured
ROWS = 32  # of a Gram matrix, widened at once: they stay in the cache
LEAST = 256  # inputs and outputs from which on products take longer than measuring


def mean_of_inputs(
    deltas: Sequence[Tensor], grams: Sequence[Tensor], weights: Sequence[float], off_diagonal: float
) -> Solution | None:
    """Return X = D̄ + Σ λ_t (D_t - D̄) H_t (Σ λ_t H_t)⁻¹, or None where the sum is singular.

    The products (D_t - D̄) H_t take most of the time. They are in single precision unless a few random combinations of
    rows, multiplied both ways, say that X would be off by more than `ALLOWED`; it is compared with those once more when
    it is there.

    Args:
        deltas: D_t, outputs x inputs, in float32.
        grams: A_t of the inputs, in float32.
        weights: λ_t, which sum to 1.
        off_diagonal: ρ of H_t = ρA_t + (1 - ρ) diag(A_t).
    """
    center_mn = weighted_sum(deltas, weights)
    signs = torch.randint(2, (len(center_mn), PROBES), generator=torch.Generator().manual_seed(0))
    probes_mk = (2 * signs - 1).double()
    H_nn, exact_nk, single_nk = _sums(deltas, grams, weights, off_diagonal, center_mn, probes_mk)
    L_nn = positive_factor(H_nn, null_share(torch.float32), entrywise=True)
    if L_nn is None:
        return None
    center_nk = center_mn.double().T @ probes_mk
    merged_nk = center_nk + cholesky_solve(exact_nk, L_nn)

    def is_exact(descent_nk: Tensor) -> bool:
        error_nk = descent_nk - exact_nk
        missed = _ratio(cholesky_solve(error_nk, L_nn), merged_nk)
        return missed <= ALLOWED and _ratio(error_nk, exact_nk) <= CONVERGED

    for dtype in (torch.float32, torch.float64) if is_exact(single_nk) else (torch.float64,):
        descent_mn = _descent(deltas, grams, weights, off_diagonal, center_mn, dtype).double()
        if dtype == torch.float64 or is_exact(descent_mn.T @ probes_mk):
            break
    step_nm = cholesky_solve(descent_mn.T, L_nn)
    residual = _ratio(H_nn @ (step_nm @ probes_mk) - exact_nk, exact_nk)
    eta = float((descent_mn * step_nm.T).sum())
    return replace(solved(step_nm.T.add_(center_mn).float(), residual), eta=max(0.0, eta))


def _sums(
    deltas: Sequence[Tensor],
    grams: Sequence[Tensor],
    weights: Sequence[float],
    off_diagonal: float,
    center_mn: Tensor,
    probes_mk: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ λ_t H_t and Σ λ_t H_t (D_t - D̄)ᵀ Z, with each Gram matrix widened once; and the latter in single."""
    n, k = center_mn.shape[1], probes_mk.shape[1]
    H_nn = center_mn.new_zeros(n, n, dtype=torch.float64)
    exact_nk, single_kn = H_nn.new_zeros(n, k), center_mn.new_zeros(k, n)
    wide_mn, wide_rn = torch.empty_like(center_mn, dtype=torch.float64), H_nn.new_empty(ROWS, n)
    center_nk = wide_mn.copy_(center_mn).T @ probes_mk
    for D, A, weight in zip(deltas, grams, weights, strict=True):
        away_nk = (wide_mn.copy_(D).T @ probes_mk).sub_(center_nk)
        kept, diagonal = weight * off_diagonal, A.diagonal().double() * (weight * (1 - off_diagonal))
        H_nn.diagonal().add_(diagonal)
        exact_nk.addcmul_(away_nk, diagonal[:, None])
        single_kn.add_((away_nk * diagonal[:, None]).T).addmm_(away_nk.T.float(), A, alpha=kept)
        parts = (torch.split(x, ROWS) for x in (H_nn, exact_nk, A))
        for H_rn, exact_rk, A_rn in zip(*parts, strict=True):
            A_rn = wide_rn[: len(A_rn)].copy_(A_rn)
            H_rn.add_(A_rn, alpha=kept)
            exact_rk.addmm_(A_rn, away_nk, alpha=kept)
    return symmetrize_(H_nn), exact_nk, single_kn.T.double()


def _descent(
    deltas: Sequence[Tensor],
    grams: Sequence[Tensor],
    weights: Sequence[float],
    off_diagonal: float,
    center_mn: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return Σ λ_t (D_t - D̄) H_t in a precision."""
    total_mn, room = (torch.zeros_like(center_mn, dtype=dtype) for _ in range(2))
    for D, A, weight in zip(deltas, grams, weights, strict=True):
        away_mn = torch.sub(D, center_mn, out=room) if D.dtype == dtype else room.copy_(D).sub_(center_mn)
        A = A.to(dtype)
        total_mn.addmm_(away_mn, A, alpha=weight * off_diagonal)
        total_mn.add_(away_mn.mul_(A.diagonal() * (weight * (1 - off_diagonal))))
    return total_mn


def _ratio(x: Tensor, of: Tensor) -> float:
    """Return ‖x‖ / ‖of‖; 0 where there is nothing to miss."""
    size, whole = (float(torch.linalg.vector_norm(y)) for y in (x, of))
    return size / whole if size else 0.0
