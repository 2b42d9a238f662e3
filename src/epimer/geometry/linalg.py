"""Linear algebra with its failure modes handled: top-k SVD, polar factor, damped solve, conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

OVERSAMPLING = 4  # extra columns of a Krylov block
FIRST_BLOCKS = 5  # blocks before the first look at the error
SMALL = 192  # below this side a full SVD in float64 costs next to nothing
SVD_TOLERANCE = 2e-3  # bound on the relative error of U diag(σ) Vᵀ for float32 input; the error itself is ~10x lower
NULL = 1e-10  # Gram eigenvalues below this share of the largest count as zero
ILL = 1e-7  # Cholesky pivots below this share of the largest call for the eigenvalue route


def working(x: Tensor) -> Tensor:
    """Return `x` in the precision it is computed in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


class Svd(NamedTuple):
    """The leading triples: A ≈ U_mk diag(sigma_k) V_nkᵀ; triples with σ = 0 are left out."""

    U: Tensor
    sigma: Tensor
    V: Tensor


def top_svd(A_mn: Tensor, k: int) -> Svd:
    """Return the `k` leading singular triples of `A_mn`, fewer where its rank is lower.

    Float64 and small matrices take a full SVD. Large float32 ones take a block Krylov space, grown until the
    estimated error of the truncated product is under `SVD_TOLERANCE`, and an eigendecomposition of the Gram
    matrix where that would need half the space.
    """
    m, n = A_mn.shape
    if m < n:
        flipped = top_svd(A_mn.T, k)
        return Svd(flipped.V, flipped.sigma, flipped.U)
    if A_mn.dtype == torch.float64 or n <= SMALL:
        U, sigma, Vh = torch.linalg.svd(A_mn.double(), full_matrices=False)
        found = Svd(U[:, :k], sigma[:k], Vh[:k].T)
    else:
        found = _krylov_svd(A_mn, k) or _gram_svd(A_mn, k)
    return _nonzero(found, A_mn)


def _nonzero(svd: Svd, A_mn: Tensor) -> Svd:
    """Drop the triples that are zero up to the rounding of `A_mn`'s precision."""
    if not svd.sigma.numel():
        return Svd(*(part.to(A_mn.dtype) for part in svd))
    floor = 4 * torch.finfo(A_mn.dtype).eps * math.sqrt(max(A_mn.shape)) * svd.sigma[0]
    rank = int((svd.sigma > floor).sum())
    U, sigma, V = (part.to(A_mn.dtype) for part in svd)
    return Svd(U[:, :rank], sigma[:rank], V[:, :rank])


def _gram_svd(A_mn: Tensor, k: int) -> Svd:
    """Take the SVD from the eigenvectors of AᵀA in float64, where squaring loses nothing of float32."""
    A = A_mn.double()
    V = torch.linalg.eigh(A.T @ A).eigenvectors.flip(-1)[:, :k]
    U = A @ V
    sigma = torch.linalg.vector_norm(U, dim=0)
    return Svd(U / sigma.clamp_min(torch.finfo(torch.float64).tiny), sigma, V)


def _krylov_svd(A_mn: Tensor, k: int) -> Svd | None:
    """Find the leading triples in span{Q, AᵀAQ, (AᵀA)²Q, …}; None when half the space was not enough.

    The start is the same for every matrix of one shape, so that equal matrices have equal triples.
    """
    m, n = A_mn.shape
    width = k + OVERSAMPLING
    most, wanted = n // (2 * width), FIRST_BLOCKS
    if most < wanted:
        return None
    B_nb, W_mb = A_mn.new_empty(n, most * width), A_mn.new_empty(m, most * width)  # the space and its image
    start = torch.randn(m, width, generator=torch.Generator().manual_seed(0)).to(A_mn)
    done = 0
    while True:
        while done < wanted * width:
            fresh = A_mn.T @ (W_mb[:, done - width : done] if done else start)
            for _ in range(2):  # once leaves what rounding brings back, twice is enough
                fresh -= B_nb[:, :done] @ (B_nb[:, :done].T @ fresh)
            block = torch.linalg.qr(fresh).Q
            B_nb[:, done : done + width], W_mb[:, done : done + width] = block, A_mn @ block
            done += width
        W = W_mb[:, :done].double()
        values, vectors = torch.linalg.eigh(W.T @ W)
        R_bk = vectors.flip(-1)[:, :k].float()
        V, U = B_nb[:, :done] @ R_bk, W_mb[:, :done] @ R_bk
        sigma = torch.linalg.vector_norm(U, dim=0)
        if not sigma[0] > 0:
            return Svd(U[:, :0], sigma[:0], V[:, :0])
        found = Svd(U / sigma.clamp_min(torch.finfo(torch.float32).tiny), sigma, V)
        error = _product_error(A_mn, found, values.flip(-1)[k].clamp_min(0).sqrt().float())
        if error <= SVD_TOLERANCE:
            return found
        wanted += max(1, math.ceil(math.log10(error / SVD_TOLERANCE)))  # a block gains about one digit
        if wanted > most:
            return None


def _product_error(A_mn: Tensor, svd: Svd, beyond: Tensor) -> float:
    """Estimate the relative error of U diag(σ) Vᵀ: each triple's angle to what was cut off, weighted by its σ.

    sin θ <= σ‖Aᵀu - σv‖ / (σ² - σ'²) with σ' the first singular value left out.
    """
    residual_k = torch.linalg.vector_norm(A_mn.T @ svd.U - svd.V * svd.sigma, dim=0)
    gap_k = (svd.sigma.square() - beyond.square()).clamp_min(torch.finfo(torch.float32).tiny)
    angle_k = (residual_k * svd.sigma / gap_k).clamp_max(1.0)
    return float(torch.linalg.vector_norm(svd.sigma * angle_k) / torch.linalg.vector_norm(svd.sigma))


class Polar(NamedTuple):
    """The polar factor of a stack: orthonormal columns, or a partial isometry where its rank is deficient."""

    factor: Tensor
    full_rank: bool


def polar(X_mp: Tensor) -> Polar:
    """Return X(XᵀX)^(-1/2), the column-orthonormal matrix nearest to `X_mp`, in float64.

    By the eigenvectors of the p x p Gram matrix, far cheaper than an SVD of X; by the SVD where the Gram
    matrix is near-singular. A rank-deficient stack gives the partial isometry.
    """
    X = X_mp.double()
    if not X.shape[1]:
        return Polar(X, True)
    values, vectors = torch.linalg.eigh(X.T @ X)
    condition = float(values[-1] / values[0]) if values[0] > 0 else math.inf
    if condition < 1e9:
        factor = X @ ((vectors * values.rsqrt()) @ vectors.T)
        if condition > 1e4:  # one Newton-Schulz step removes what squaring lost
            factor = 1.5 * factor - 0.5 * (factor @ (factor.T @ factor))
        return Polar(factor, True)
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    kept = sigma > math.sqrt(NULL) * sigma[0]
    return Polar(U[:, kept] @ Vh[kept], bool(kept.all()))


def column_basis(X_mp: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of a partial isometry."""
    U, sigma, _ = torch.linalg.svd(X_mp, full_matrices=False)
    return U[:, sigma > 0.5]


class SpdSolution(NamedTuple):
    """y with (H + damping·I) y = b; damping is 0 unless H was singular, and then y is 0 in the null space."""

    y: Tensor
    damping: float


def solve_spd(H_pp: Tensor, b: Tensor) -> SpdSolution:
    """Solve H y = b for symmetric positive semi-definite H in float64, damping H only where it must be."""
    if not H_pp.numel():
        return SpdSolution(b.clone(), 0.0)
    H_pp = 0.5 * (H_pp + H_pp.T)
    L, info = torch.linalg.cholesky_ex(H_pp)
    pivots = L.diagonal()
    if not info and pivots.min() > ILL * pivots.max():
        return SpdSolution(torch.cholesky_solve(b, L), 0.0)
    values, vectors = torch.linalg.eigh(H_pp)
    largest = float(values[-1])
    if largest <= 0:
        return SpdSolution(torch.zeros_like(b), 0.0)
    damping = NULL * largest
    inverse = torch.where(values > damping, 1 / (values + damping), 0)  # below it there is only rounding
    return SpdSolution(vectors @ (inverse[:, None] * (vectors.T @ b)), damping)


class CgSolution(NamedTuple):
    """The solution and its true relative residual."""

    y: Tensor
    residual: float


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    b: Tensor,
    precondition: Callable[[Tensor], Tensor] = lambda r: r,
    *,
    tolerance: float = 1e-10,
    most: int = 2000,
) -> CgSolution:
    """Solve `apply(y) = b` for a symmetric positive semi-definite operator on tensors of any shape.

    Starts at 0 and so stays in the operator's range: a consistent singular system has a solution.
    """
    y = torch.zeros_like(b)
    norm = float(torch.linalg.vector_norm(b))
    if norm == 0:
        return CgSolution(y, 0.0)
    r, z = b, precondition(b)
    direction, rz = z, float((r * z).sum())
    for _ in range(most):
        image = apply(direction)
        curvature = float((direction * image).sum())
        if not curvature > 0:
            break
        step = rz / curvature
        y = y + step * direction
        r = r - step * image
        if float(torch.linalg.vector_norm(r)) <= tolerance * norm:
            break
        z = precondition(r)
        rz, previous = float((r * z).sum()), rz
        direction = z + (rz / previous) * direction
    return CgSolution(y, float(torch.linalg.vector_norm(b - apply(y))) / norm)


def kth_magnitude(chunks: Callable[[], Iterable[Tensor]], k: int) -> float:
    """Return the k-th smallest |value| (from 1) over all chunks, exactly, in memory that does not grow with them.

    Non-negative floats sort like their bit patterns, so counting 16 bits at a time finds the answer digit by
    digit; `chunks` is iterated once per digit.
    """
    wide = any(chunk.dtype == torch.float64 for chunk in chunks())
    real, whole, digits = (torch.float64, torch.int64, 4) if wide else (torch.float32, torch.int32, 2)
    prefix, remaining = 0, k
    for digit in reversed(range(digits)):
        counts = torch.zeros(1 << 16, dtype=torch.int64)
        for chunk in chunks():
            bits = chunk.to(real).abs().flatten().view(whole)
            inside = bits if digit == digits - 1 else bits[(bits >> (16 * (digit + 1))) == prefix]
            counts += torch.bincount((inside >> (16 * digit)) & 0xFFFF, minlength=1 << 16).cpu()
        found = int(torch.searchsorted(counts.cumsum(0), remaining))
        remaining -= int(counts[:found].sum())
        prefix = (prefix << 16) | found
    return float(torch.tensor(prefix, dtype=whole).view(real))
