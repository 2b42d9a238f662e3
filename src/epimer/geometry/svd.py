"""Leading singular triples: exactly, or as far as a merge can feel, of one matrix or of many at once.

Shapes: A_mn or a stack A_tmn with m >= n, k triples wanted, a search space of w > k columns. Products of a search
are in float32: block Lanczos steps for one matrix on the CPU, a filtered subspace for a stack on a GPU, which is asked
for a number but once a round. A steep spectrum takes one more step in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from epimer.geometry.decompositions import cholesky, eigh, of_task, qr, solve_triangular, thin_svd
from epimer.geometry.linalg import SMALL_EIGH, Delta, LowRank, gram, rounding_share, small_eigh, small_eigvalsh

BLOCK = 16  # the search space's columns are a multiple of this, which matrix products like
FIRST_LOOK, LARGEST = 3.5, 32  # columns of a block Krylov space per triple wanted, and blocks of it at most
FIRST_POWERS = 2  # products with AᵀA before the first look at the spectrum
ROUNDS = 6  # of filtering before a matrix is decomposed exactly
DEGREES = 12  # of one filter at most
SPARE = 30  # times below the tolerance that filters aim at: a degree more costs less than a round more
FILTER_RANGE = 1e12  # how far a filter may set the first singular value above the last, which float32 must bear
SMALL = 192  # below this side a full SVD in float64 costs next to nothing
SVD_TOLERANCE = 1e-4  # root mean square angle between the triples found and the exact ones
SAME = 1e-3  # singular values whose squares are this close, relatively, need not be told apart
FAINT = 1e-6  # squares below this share of the largest are lost in the rounding of a float32 Gram matrix
NOISE = 2e-7  # residuals below this share of the largest square are the rounding of float32 products
WIDENED = 512  # rows of a float32 matrix that are widened to float64 at a time
STACKED = 1 << 26  # entries of Gram matrices that are held at once


class Svd(NamedTuple):
    """The leading triples: A ≈ U_mk diag(sigma_k) V_nkᵀ; triples with σ = 0 are left out."""

    U: Tensor
    sigma: Tensor
    V: Tensor


def top_svd(A_mn: Delta, k: int, *, exact: bool = False) -> Svd:
    """Return the `k` leading singular triples of `A_mn`, fewer where its rank is lower."""
    return top_svds([A_mn], k, 0.0 if exact else SVD_TOLERANCE)[0][0]


def top_svds(matrices: Sequence[Delta], k: int, tolerance: float = SVD_TOLERANCE) -> tuple[list[Svd], list[float]]:
    """Return the `k` leading singular triples of matrices of one shape, and the angle that each one's are wrong by.

    Large float32 matrices are searched until the root mean square angle is below `tolerance`, all others, and those
    where it cannot be reached, decomposed exactly (angle 0); a `tolerance` of 0 decomposes all.
    """
    if not matrices:
        return [], []
    if matrices[0].shape[0] < matrices[0].shape[1]:
        flipped, errors = top_svds([A.T for A in matrices], k, tolerance)
        return [Svd(V, sigma, U) for U, sigma, V in flipped], errors
    searched = [t for t, A in enumerate(matrices) if tolerance > 0 and searches(A, k)]
    triples: dict[int, Svd] = {}
    errors = [0.0] * len(matrices)
    for group in _groups(searched, matrices[0]):
        for t, svd, error in zip(group, *_search([matrices[t] for t in group], k, tolerance), strict=True):
            if error <= tolerance:
                triples[t], errors[t] = svd, error
    for t, A in enumerate(matrices):
        if t not in triples:
            with of_task(t if len(matrices) > 1 else None):
                triples[t] = _decompose(A, k)
    return [triples[t] for t in range(len(matrices))], errors


def searches(A_mn: Delta, k: int) -> bool:
    """Whether `top_svd` searches for `k` triples, which makes them approximate, instead of decomposing the matrix."""
    side = min(A_mn.shape)
    single = isinstance(A_mn, Tensor) and A_mn.dtype != torch.float64
    return single and side > SMALL and k > 0 and 3 * _width(k) <= side


def _width(k: int) -> int:
    """Return the columns of the space in which `k` triples are searched."""
    return -(-(k + max(BLOCK, k // 3)) // BLOCK) * BLOCK


def _groups(tasks: Sequence[int], A_mn: Delta) -> Iterator[Sequence[int]]:
    """Divide matrices into stacks that are searched at once: one at a time on the CPU, where a stack gains nothing."""
    m, n = A_mn.shape
    size = 1 if A_mn.device.type == "cpu" else max(1, STACKED // (m * n))
    for start in range(0, len(tasks), size):
        yield tasks[start : start + size]


# --- exactly ---


def _decompose(A_mn: Delta, k: int) -> Svd:
    """Return the leading triples of a matrix with m >= n, exactly.

    A product of factors takes the SVD of the r x r matrix between their orthonormal bases; float64 and small matrices
    a full SVD; large float32 matrices the eigenvectors of their Gram matrix in float64.
    """
    if isinstance(A_mn, LowRank):
        (P, left), (Q, right) = qr(A_mn.B.double()), qr(A_mn.A.T.double())
        U, sigma, Vh = thin_svd(left @ right.T)
        return _nonzero(Svd(P @ U[:, :k], sigma[:k], Q @ Vh[:k].T), A_mn)
    n = A_mn.shape[1]
    if k == 0:
        return Svd(A_mn[:, :0], A_mn.new_zeros(0), A_mn.new_zeros(n, 0))
    if A_mn.dtype == torch.float64 or n <= SMALL:
        small = A_mn.numel() <= SMALL_EIGH**2  # for which a GPU would take thousands of kernels
        U, sigma, Vh = (part.to(A_mn.device) for part in thin_svd((A_mn.cpu() if small else A_mn).double()))
        return _nonzero(Svd(U[:, :k], sigma[:k], Vh[:k].T), A_mn)
    return _nonzero(_gram_svd(A_mn, k), A_mn)


def _gram_svd(A_mn: Tensor, k: int) -> Svd:
    """Take the SVD from the eigenvectors of AᵀA in float64, where squaring loses nothing of float32."""
    A = A_mn.double()
    V = eigh(gram(A)).vectors.flip(-1)[:, :k]
    U = A @ V
    sigma = torch.linalg.vector_norm(U, dim=0)
    return Svd(U / sigma.clamp_min(torch.finfo(torch.float64).tiny), sigma, V)


def gram_svds(A: Tensor) -> Svd:
    """Take the SVDs of a stack of small float64 matrices from the eigenvectors of AᵀA; A = U diag(σ) Vᵀ holds exactly.

    Left singular vectors of singular values below 1e-8 of the largest are not orthogonal to each other.
    """
    V = small_eigh(gram(A)).vectors.flip(-1)
    U = A @ V
    sigma = torch.linalg.vector_norm(U, dim=-2)
    return Svd(U / sigma.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(-2), sigma, V)


def _nonzero(svd: Svd, A_mn: Delta) -> Svd:
    """Drop the triples that are zero up to the rounding of `A_mn`'s precision."""
    rank = int((svd.sigma > rounding_share(A_mn) * svd.sigma[0]).sum()) if svd.sigma.numel() else 0
    return _leading(svd, rank, A_mn.dtype)


def _leading(svd: Svd, rank: int, dtype: torch.dtype) -> Svd:
    U, sigma, V = (part.to(dtype) for part in svd)
    return Svd(U[:, :rank], sigma[:rank], V[:, :rank])


# --- searched ---


@cache
def random_start(n: int, width: int) -> Tensor:
    """Return where every search begins: the same for all matrices, so that equal ones have equal triples."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0))


def _search(matrices: Sequence[Delta], k: int, tolerance: float) -> tuple[list[Svd], list[float]]:
    """Return the leading triples of float32 matrices with m >= n, and the angle each set is wrong by.

    One matrix on the CPU by block Lanczos steps, which need the fewest products; a stack on a GPU, which has products
    to spare but small decompositions not, by filtered subspace iteration.
    """
    A = torch.stack([dense for dense in matrices if isinstance(dense, Tensor)]) if len(matrices) > 1 else matrices[0]
    assert isinstance(A, Tensor)
    sizes = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
    lowest, highest = torch.stack([sizes.min(), sizes.max()]).tolist()
    scaled = not 1e-6 < lowest <= highest < 1e6  # powers of it would leave float32
    if scaled:
        sizes = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True, dtype=torch.float64)
        sizes = torch.where(sizes > 0, sizes, 1.0)
        A = (A.double() / sizes).float()
    search = _lanczos if A.dim() == 2 and A.device.type == "cpu" else _filtered
    theta, V, error = search(A, k, tolerance)
    U = A @ V
    sigma = torch.linalg.vector_norm(U, dim=-2)
    share = rounding_share(matrices[0])
    lost = (theta[..., :k] < FAINT * theta[..., :1]) & (sigma > share * sigma[..., :1])
    error = torch.where(lost.any(-1), torch.inf, error)
    ranks = (sigma > share * sigma[..., :1]).sum(-1)
    U = U / sigma.clamp_min(torch.finfo(U.dtype).tiny).unsqueeze(-2)
    if scaled:
        sigma = sigma * sizes.squeeze(-1)
    found = [Svd(*parts) for parts in zip(U, sigma, V, strict=True)] if A.dim() > 2 else [Svd(U, sigma, V)]
    counts, errors = torch.stack([ranks.double(), error.double()]).reshape(2, -1).tolist()
    return [_leading(svd, int(rank), A.dtype) for svd, rank in zip(found, counts, strict=True)], errors


def _lanczos(A_mn: Tensor, k: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading Ritz values of AᵀA on a block Krylov space, the `k` leading Ritz vectors, and their angle.

    Every block is made orthogonal to all before, so that AᵀAQ = QH + W holds with W in the last block alone, and the
    residuals of all Ritz vectors QR are those of the last rows of R.
    """
    n, width = A_mn.shape[1], _width(k)
    b = -(-k // (2 * BLOCK)) * BLOCK
    check = max(3, math.ceil(FIRST_LOOK * k / b))
    product = _gram_product(A_mn, 4 * check * b)
    Q = A_mn.new_empty(n, min(7 * n // 8, LARGEST * b) // b * b)
    H = A_mn.new_zeros(Q.shape[1], Q.shape[1], dtype=torch.float64)
    block = _orthonormal(_orthonormal(product(random_start(n, b).to(A_mn))))  # once leaves what is nearly dependent
    for step in range(1, Q.shape[1] // b + 1):
        d = step * b
        Q[:, d - b : d] = block
        W = product(block)
        along = Q[:, :d].T @ W
        H[:d, d - b : d], H[d - b : d, :d] = along, along.T
        W = W - Q[:, :d] @ along
        if step == check or d + b > Q.shape[1]:
            check += 1 + check // 8
            values, vectors = eigh(torch.nan_to_num(H[:d, :d]))
            theta, R = values.flip(-1)[:width].to(W.dtype), vectors.flip(-1)[:, :k].to(W.dtype)
            residual = torch.linalg.vector_norm(W @ R[d - b :], dim=0)
            error = _mean_angle(theta, residual, n, k)
            if not float(error) > tolerance or float(residual.max()) < NOISE * float(theta[0]):
                break
        block = _orthonormal(W)
        block = _orthonormal(block - Q[:, :d] @ (Q[:, :d].T @ block))
    if tolerance < float(error) < math.inf:
        return _sharpened(A_mn, Q[:, :d], k, width)
    return theta, Q[:, :d] @ R, error


def _sharpened(A: Tensor, Q_nd: Tensor, k: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading Ritz values, the `k` leading Ritz vectors and their angle after one step in float64.

    Of a steep spectrum a search finds the space, but single precision hides the gaps between its singular values. A
    product with AᵀA and a Rayleigh quotient in float64 take far less than a whole decomposition.
    """
    n = Q_nd.shape[-2]
    V = _orthonormal(_wide_gram_product(A, Q_nd))
    values, vectors = small_eigh(gram(_wide_product(A, V)))
    theta, V = values.flip(-1)[..., :width], V @ vectors.flip(-1)[..., :k]
    residual = torch.linalg.vector_norm(_wide_gram_product(A, V) - V * theta[..., None, :k], dim=-2)
    error = _mean_angle(theta, residual, n, k)
    return theta.to(A.dtype), V.to(A.dtype), error.to(A.dtype)


def _wide_gram_product(A: Tensor, X: Tensor) -> Tensor:
    """Return AᵀAX in float64, a block of rows of A widened at a time."""
    total = torch.zeros_like(X, dtype=torch.float64)
    for rows in torch.split(A, WIDENED, dim=-2):
        wide = rows.double()
        total += wide.mT @ (wide @ X.double())
    return total


def _wide_product(A: Tensor, X: Tensor) -> Tensor:
    """Return AX in float64, a block of rows of A widened at a time."""
    return torch.cat([rows.double() @ X for rows in torch.split(A, WIDENED, dim=-2)], dim=-2)


def _filtered(A: Tensor, k: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_lanczos` does, for one matrix or a stack, by subspace iteration with Chebyshev filters.

    A filter is a polynomial in AᵀA that is small on the spectrum below the search space and grows fastest above it,
    whose degree is what float32 bears of the first value growing over the last.
    """
    width = _width(k)
    product = _gram_product(A, 16 * width)
    X = random_start(A.shape[-1], width).to(A).expand(*A.shape[:-2], -1, -1)
    for _ in range(FIRST_POWERS):
        X = product(X)
    X, image, H = _rayleigh_quotient(product, X)
    theta = small_eigvalsh(H).flip(-1).to(X.dtype)  # a filter needs no Ritz vectors
    error = theta.new_ones(())
    for _ in range(ROUNDS):
        degree, filters = _filters(theta, k, error, tolerance)
        Y = _chebyshev(product, X, image, theta, degree)
        for _ in range(filters - 1):  # Ritz vectors in between would come from the CPU
            X = _orthonormal(Y)
            Y = _chebyshev(product, X, product(X), theta, degree)
        theta, X, image = ritz(product, Y)
        leading = X[..., :k] * theta[..., None, :k]
        residual = torch.linalg.vector_norm(image[..., :k] - leading, dim=-2)
        error = _mean_angle(theta, residual, X.shape[-2], k)
        if not bool(((error > tolerance) & (residual.amax(-1) >= NOISE * theta[..., 0])).any()):
            break
    if tolerance < float(error.max()) < math.inf:
        return _sharpened(A, X, k, width)
    return theta, X[..., :k], error


def _gram_product(A: Tensor, widest: int) -> Callable[[Tensor], Tensor]:
    """Return X -> AᵀAX, with AᵀA formed where that pays for itself within a search: up to `widest` columns."""
    if A.shape[-1] > widest:
        return lambda X: A.mT @ (A @ X)
    K = gram(A)
    return lambda X: K @ X


def _lowest(theta: Tensor) -> Tensor:
    """Return the lowest Ritz value, with rounding as its floor."""
    return torch.maximum(theta[..., -1:], 1e-7 * theta[..., :1]).clamp_min(1e-30)


def _filters(theta: Tensor, k: int, error: Tensor, tolerance: float) -> tuple[int, int]:
    """Return the degree of the next filters, and how many bring the error far below `tolerance`, 3 at most.

    T_d grows by about 2x a degree at x >> 1, and by x + √(x² - 1) anywhere: at the k-th value that is the gain. More
    than float32 bears is divided among filters.
    """
    ratio = theta[..., [0, k - 1]] / _lowest(theta)
    widest, gain, missing = torch.stack([ratio[..., 0].max(), ratio[..., 1].min(), error.max()]).tolist()
    bearable = math.log(FILTER_RANGE) / math.log(4 * max(1.0, widest))
    x = max(1.01, 2 * gain - 1)
    needed = math.log(max(SPARE * missing / tolerance, 1.0)) / math.log(x + math.sqrt(x * x - 1))
    most = max(1, min(DEGREES, int(bearable)))
    filters = max(1, min(3, math.ceil(needed / most)))
    return most if filters > 1 else max(1, math.ceil(needed)), filters


def ritz(product: Callable[[Tensor], Tensor], Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Ritz values of AᵀA on span(Y), falling, the orthonormal Ritz vectors X, and AᵀAX."""
    X, image, H = _rayleigh_quotient(product, Y)
    values, vectors = small_eigh(H)
    R = vectors.flip(-1).to(Y.dtype)
    return values.flip(-1).to(Y.dtype), X @ R, image @ R


def _rayleigh_quotient(product: Callable[[Tensor], Tensor], Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return orthonormal columns X with the span of Y, AᵀAX, and XᵀAᵀAX in float64."""
    X = _orthonormal(Y)
    image = product(X)
    H = (X.mT @ image).double()
    return X, image, torch.nan_to_num(0.5 * (H + H.mT))  # a search that fails is noticed by its error


def _orthonormal(Y: Tensor) -> Tensor:
    """Return orthonormal columns with the span of Y, by Cholesky's method on its Gram matrix in float64."""
    Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(torch.finfo(Y.dtype).tiny)
    wide = Y.double()
    inner = gram(wide)
    inner.diagonal(dim1=-2, dim2=-1).add_(1e-12)
    L, _ = cholesky(inner)
    return solve_triangular(L, wide.mT, upper=False).mT.to(Y.dtype)


def _chebyshev(product: Callable[[Tensor], Tensor], X: Tensor, image: Tensor, theta: Tensor, degree: int) -> Tensor:
    """Return T_d(2 AᵀA / b - 1) X for the Chebyshev polynomial T_d, b the lowest Ritz value, image = AᵀAX."""
    step = 2 / _lowest(theta).unsqueeze(-1)
    before, current = X, step * image - X
    for _ in range(degree - 1):
        before, current = current, (2 * step) * product(current) - 2 * current - before
    return current


def _mean_angle(theta: Tensor, residual: Tensor, n: int, k: int) -> Tensor:
    """Return the root mean square angle between the `k` leading Ritz vectors in n dimensions and the exact ones.

    Out of the search space a vector leans by its residual ‖AᵀAx - θx‖ / (θ - θ_w), with θ_w the lowest value in it;
    within it, across the cut after the k-th, by what is left of that squared, over the gap to θ_k+1; and rounding of
    AᵀA adds to both. Angles are not weighted by σ: the polar factor of a stack treats all of its vectors alike. Gaps
    below `SAME` are not resolved: neighbours so close on both sides of the cut are as good as each other.
    """
    leading, tiny = theta[..., :k], torch.finfo(theta.dtype).tiny
    closest = SAME * leading
    outer = torch.maximum(leading - theta[..., -1:], closest).clamp_min(tiny)
    inner = torch.maximum(leading - theta[..., k : k + 1], closest).clamp_min(tiny)
    rounding = torch.finfo(theta.dtype).eps * theta[..., :1] / math.sqrt(n)
    angle = (residual / outer + residual.square() / (outer * inner) + rounding / inner).clamp_max(1.0)
    counted = leading >= FAINT * theta[..., :1]
    squares = torch.where(counted, angle.square(), 0.0).sum(-1) / counted.sum(-1).clamp_min(1)
    return torch.where(torch.isfinite(theta).all(-1), squares.sqrt(), torch.inf)
