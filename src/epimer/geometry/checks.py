"""What is wrong with measured curvature: not finite, negative, asymmetric or indefinite beyond rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from epimer.errors import CurvatureError
from epimer.geometry.decompositions import cholesky, eigvalsh
from epimer.geometry.linalg import as_compute_dtype, nonfinite

ROUNDING = 1e-6  # share of the trace by which an eigenvalue may be negative
WIDE = 512  # side of a Kronecker factor from which on it is checked where it is used, which is cheaper
BLOCK = 512  # side of a block of a matrix that is compared with its transpose in the cache


def _blocks(M: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the blocks on and above the diagonal of a square matrix, each with the transpose of its mirror image."""
    for i in range(0, len(M), BLOCK):
        for j in range(i, len(M), BLOCK):
            yield M[i : i + BLOCK, j : j + BLOCK], M[j : j + BLOCK, i : i + BLOCK].T


def is_symmetric(M: Tensor) -> bool:
    """Whether a square matrix equals its transpose, entry by entry."""
    return all(torch.equal(block, mirrored) for block, mirrored in _blocks(M))


def not_finite(name: str, x: Tensor) -> str | None:
    """Return that `x` holds NaN or Inf, or None."""
    bad = nonfinite(x)
    return f"{name} holds NaN or Inf in {bad} of {x.numel()} entries" if bad else None


def negative_entries(name: str, x: Tensor) -> str | None:
    """Return why `x` does not hold finite numbers of at least 0, or None."""
    if (problem := not_finite(name, x)) or not x.numel() or float(x.min()) >= 0:
        return problem
    return f"{name} must not be negative; its lowest entry is {float(x.min()):.3g}"


def not_psd(name: str, M: Tensor, size: int | None, *, open_if_wide: bool = False) -> str | None:
    """Return why `M` is not a symmetric positive semi-definite matrix (of `size`), up to rounding.

    With `open_if_wide`, the eigenvalues of a wide matrix are not looked at, only its diagonal: see `check_wide_factor`.
    """
    if M.dim() != 2 or M.shape[0] != M.shape[1] or (size is not None and len(M) != size):
        expected = "square" if size is None else f"{size} x {size}"
        return f"{name} must be {expected}, got shape {tuple(M.shape)}"
    if not M.numel():
        return None
    diagonal = M.diagonal().double()
    asked = [*torch.aminmax(as_compute_dtype(M)), diagonal.abs().sum(), diagonal.min(), _asymmetry(M)]
    lowest, highest, trace, lowest_of_diagonal, asymmetry = torch.stack([x.double() for x in asked]).tolist()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return not_finite(name, M)
    largest = max(abs(lowest), abs(highest))
    if largest == 0:
        return None
    slack = _slack(M.dtype)
    if not asymmetry <= slack * largest * math.sqrt(len(M)):
        pairs = ((as_compute_dtype(block), as_compute_dtype(mirrored)) for block, mirrored in _blocks(M))
        uneven = max(float((block - mirrored).abs_().max()) for block, mirrored in pairs)
        if uneven > slack * largest:
            return f"{name} must be symmetric; its largest asymmetry is {uneven:.3g}"
    if not (open_if_wide and len(M) > WIDE):
        return _negative_eigenvalue(name, M, slack * trace)
    if lowest_of_diagonal >= -slack * trace:
        return None
    return f"{name} must not be negative on its diagonal; its lowest entry is {lowest_of_diagonal:.3g}"


def _asymmetry(M: Tensor) -> Tensor:
    """Return how far products of a wide matrix and of its transpose are apart: √n times what its entries are off by.

    NaN of a small matrix, whose entries are quickly compared, and of one whose product would need a wider copy.
    """
    if len(M) <= WIDE or M.dtype not in (torch.float32, torch.float64):
        return M.new_full((), math.nan, dtype=torch.float64)
    z = _random_vector(len(M), M.dtype, M.device)
    return (M @ z - z @ M).abs().max()


@cache
def _random_vector(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(device, dtype)


def _negative_eigenvalue(name: str, M: Tensor, slack: float) -> str | None:
    """Return that a symmetric matrix has an eigenvalue below -`slack`, or None; decided in float64 if need be."""
    for dtype in dict.fromkeys((as_compute_dtype(M[:0]).dtype, torch.float64)):
        shifted = M.to(dtype, copy=True)
        shifted.diagonal().add_(slack)
        if not cholesky(shifted).info:
            return None
    lowest = float(eigvalsh(M.double())[0])
    if lowest >= -slack:
        return None
    return f"{name} must be positive semi-definite; its lowest eigenvalue is {lowest:.3g}"


def check_wide_blocks(name: str, M: Tensor) -> None:
    """Refuse a wide factor that is not positive semi-definite within a block of its diagonal, which is quickly seen."""
    for i in range(0, len(M), WIDE) if len(M) > WIDE else ():
        check_wide_factor(name, M, M[i : i + WIDE, i : i + WIDE])


def check_wide_factor(name: str, M: Tensor, restricted: Tensor) -> None:
    """Refuse a wide factor that is not positive semi-definite where it is used; `problem` does not look that far."""
    if len(M) <= WIDE:
        return
    trace = float(M.diagonal().double().abs().sum())
    if _negative_eigenvalue(name, restricted, ROUNDING * trace):
        stored = next((d for d in (torch.bfloat16, torch.float16) if torch.equal(M.to(d).to(M.dtype), M)), M.dtype)
        if problem := _negative_eigenvalue(name, restricted, _slack(stored) * trace):
            raise CurvatureError(f"{problem} on the directions that are merged.")


def _slack(dtype: torch.dtype) -> float:
    """Return the share of the trace by which the rounding of a matrix stored as `dtype` may make it indefinite."""
    return max(ROUNDING, 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
