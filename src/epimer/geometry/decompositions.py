"""Every matrix decomposition of the library, guarded: what fails is taken again in float64, rescaled, or elsewhere.

A matrix that is decomposed at the first try costs nothing extra, and its result is what torch returns, bit by bit. What
took another try is told to `fallbacks`, so that the record of a merge says where; what cannot be decomposed at all is a
`NumericalError`. `cholesky` reports an indefinite matrix by its `info`, as torch's does, and never fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from epimer.errors import NumericalError

_FALLBACKS: ContextVar[list[str] | None] = ContextVar("fallbacks", default=None)

cholesky = torch.linalg.cholesky_ex
cholesky_solve = torch.cholesky_solve
cholesky_inverse = torch.cholesky_inverse
solve_triangular = torch.linalg.solve_triangular
householder_qr = torch.geqrf
householder_product = torch.linalg.householder_product


class Eigh(NamedTuple):
    """Eigenvalues, rising, and orthonormal eigenvectors."""

    values: Tensor
    vectors: Tensor


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collect what did not succeed at the first try within the block, in words."""
    found: list[str] = []
    token = _FALLBACKS.set(found)
    try:
        yield found
    finally:
        _FALLBACKS.reset(token)


@contextmanager
def of_task(t: int | None) -> Iterator[None]:
    """Let an error of the block tell which task's matrix it is about."""
    try:
        yield
    except NumericalError as error:
        error.task = t
        raise


def eigh(H: Tensor) -> Eigh:
    """Return the eigenvalues and eigenvectors of a symmetric matrix, or of a stack of them."""
    return Eigh(*_guarded("eigh", torch.linalg.eigh, np.linalg.eigh, (True, False), H))


def eigvalsh(H: Tensor) -> Tensor:
    """Return the eigenvalues of a symmetric matrix, rising."""

    def values(M: Tensor) -> tuple[Tensor]:
        return (torch.linalg.eigvalsh(M),)

    return _guarded("eigvalsh", values, lambda M: (np.linalg.eigvalsh(M),), (True,), H)[0]


def thin_svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ and Vᵀ of a matrix's thin singular value decomposition."""

    def thin(M: Tensor) -> tuple[Tensor, ...]:
        return torch.linalg.svd(M, full_matrices=False)

    parts = _guarded("svd", thin, lambda M: np.linalg.svd(M, full_matrices=False), (False, True, False), A)
    return parts[0], parts[1], parts[2]


def qr(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q with orthonormal columns and the upper triangular R of a matrix."""
    Q, R = _guarded("qr", torch.linalg.qr, np.linalg.qr, (False, True), A)
    return Q, R


def solve(H: Tensor, b: Tensor) -> Tensor:
    """Return y with Hy = b of a symmetric matrix; of a singular one the least-squares solution of least norm."""
    y, info = torch.linalg.solve_ex(H, b)
    return y if not info and bool(y.isfinite().all()) else pinv(H, 1e-14) @ b


def pinv(H: Tensor, rtol: float) -> Tensor:
    """Return the pseudo-inverse of a symmetric matrix; eigenvalues below `rtol` of the largest count as zero."""
    values, vectors = eigh(H)
    sizes = values.abs()
    kept = sizes > rtol * sizes.amax(-1, keepdim=True) if sizes.numel() else sizes > 0
    return (vectors * torch.where(kept, 1 / values, 0)) @ vectors.mT


Decompose = Callable[[Tensor], tuple[Tensor, ...]]
OtherDriver = Callable[[Any], Sequence[Any]]


def _guarded(
    name: str, decompose: Decompose, other: OtherDriver, grows: tuple[bool, ...], A: Tensor
) -> tuple[Tensor, ...]:
    """Return a decomposition of `A` from the first try that succeeds; `grows` tells which parts are multiples of it."""
    if (parts := _attempt(decompose, grows, A)) is not None:
        return parts
    if A.dim() > 2:
        each = [_guarded(name, decompose, other, grows, M) for M in A.flatten(0, -3)]
        return tuple(torch.stack(part).reshape(*A.shape[:-2], *part[0].shape) for part in zip(*each, strict=True))
    m, n = A.shape
    if bad := A.numel() - int(A.isfinite().sum()):
        raise NumericalError(f"{name} of a {m} x {n} matrix with NaN or Inf in {bad} of its entries: it overflowed")
    largest = float(A.abs().max())
    power = 1 - math.frexp(largest)[1]  # of 2, so that nothing is rounded
    wide = torch.ldexp(A.double(), torch.tensor(power, device=A.device))

    def elsewhere(M: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.ascontiguousarray(part)).to(A.device) for part in other(M.cpu().numpy()))

    for how, attempt in (("rescaled in float64", decompose), ("rescaled in float64 by another driver", elsewhere)):
        if (parts := _attempt(attempt, grows, wide)) is None:
            continue
        back = torch.tensor(-power, device=A.device)
        parts = tuple((torch.ldexp(x, back) if g else x).to(A.dtype) for x, g in zip(parts, grows, strict=True))
        if not _finite(parts, grows):
            raise NumericalError(f"{name} of a {m} x {n} matrix with entries up to {largest:.3g} leaves {A.dtype}")
        if (known := _FALLBACKS.get()) is not None:
            known.append(f"{name} {how}")
        return parts
    raise NumericalError(f"{name} of a {m} x {n} matrix with entries up to {largest:.3g} did not converge")


def _attempt(decompose: Decompose, grows: tuple[bool, ...], A: Tensor) -> tuple[Tensor, ...] | None:
    """Return a decomposition; None where it fails, or where its short part, which tells of the rest, is not finite."""
    try:
        parts = tuple(decompose(A))
    except (LinAlgError, np.linalg.LinAlgError):
        return None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if not A.is_cuda:
            raise
        return None  # cuSOLVER's own errors have no type
    return parts if _finite(parts, grows) else None


def _finite(parts: Sequence[Tensor], grows: Sequence[bool]) -> bool:
    """Whether the eigenvalues, the singular values or R are finite, which they are not where anything else is not."""
    return all(bool(x.isfinite().all()) for x, g in zip(parts, grows, strict=True) if g)
