"""Linear algebra with its failure modes handled: top-k SVD, polar factor, damped solve, conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epimer.geometry.solution import Solution, solved
from epimer.records import Status

BLOCK = 16  # a Krylov block's columns are a multiple of this, which matrix products like
FIRST_POWERS = 2  # products with AAᵀ before the first block, which need no memory
FIRST_CHECK = 4  # blocks before the error is first estimated
SMALL = 192  # below this side a full SVD in float64 costs next to nothing
SVD_TOLERANCE = 6e-3  # bound on the mean angle of float32 triples; their product's error is some 30x lower
CHUNK = 1 << 17  # entries of a chunk, which stays in the cache, where entries do not depend on each other
NULL = 1e-10  # eigenvalues below this share of the largest count as zero in float64
MAX_STEPS = 2000  # of conjugate gradients


def nonfinite(x: Tensor) -> int:
    """Return how many entries of `x` are NaN or Inf, in a single fast pass where there are none."""
    narrow = x.element_size() < 4 and x.device.type == "cpu"  # widened for the sum, which is cheap in the cache only
    parts = chunks(x.reshape(-1)) if narrow else [x]
    if all(math.isfinite(as_compute_dtype(part).sum()) for part in parts):
        return 0
    return x.numel() - int(torch.isfinite(as_compute_dtype(x)).sum())


def chunks(flat: Tensor) -> Sequence[Tensor]:
    """Divide a vector on the CPU into parts that stay in the cache."""
    return torch.split(flat, CHUNK) if flat.device.type == "cpu" else [flat]


def as_compute_dtype(x: Tensor) -> Tensor:
    """Return `x` in the precision of all arithmetic: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def mean_of(x: Tensor) -> float:
    """Return the mean of a tensor's entries; 0 where it has none."""
    return float(x.mean()) if x.numel() else 0.0


@dataclass(frozen=True)
class LowRank:
    """A matrix kept as its factors B_mr A_rn, with those operations of a tensor that the geometry applies to it."""

    B: Tensor
    A: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.B.shape[0], self.A.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.B.dtype

    @property
    def device(self) -> torch.device:
        return self.B.device

    @property
    def T(self) -> LowRank:
        return LowRank(self.A.T, self.B.T)

    def to(self, *args: Any) -> LowRank:
        return LowRank(self.B.to(*args), self.A.to(*args))

    def dense(self) -> Tensor:
        return self.B @ self.A

    def __matmul__(self, X: Tensor) -> Tensor:
        return self.B @ (self.A @ X)

    def __mul__(self, factor: float) -> LowRank:
        return LowRank(factor * self.B, self.A)

    __rmul__ = __mul__

    def __add__(self, other: LowRank | Tensor) -> LowRank | Tensor:
        if isinstance(other, LowRank):
            return LowRank(torch.cat([self.B, other.B], dim=1), torch.cat([self.A, other.A]))
        return self.dense() + other

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Support torch tensors as the left operand: X @ D and X + D."""
        if function is Tensor.__matmul__ or function is Tensor.matmul or function is torch.matmul:
            return (args[0] @ args[1].B) @ args[1].A
        if function is Tensor.__add__ or function is Tensor.add:
            return args[1] + args[0]
        return NotImplemented


Delta = Tensor | LowRank
"""A task vector: any tensor, or a matrix of low rank"""


def dense(D: Delta) -> Tensor:
    """Return a task vector as a tensor."""
    return D.dense() if isinstance(D, LowRank) else D


def squared_norm(D: Delta) -> float:
    """Return ‖D‖² in float64; of a product of factors without the product."""
    if isinstance(D, LowRank):
        B, A = D.B.double(), D.A.double()
        return float(((B.T @ B) * (A @ A.T)).sum())
    return float(torch.linalg.vector_norm(D, dtype=torch.float64)) ** 2


class Svd(NamedTuple):
    """The leading triples: A ≈ U_mk diag(sigma_k) V_nkᵀ; triples with σ = 0 are left out."""

    U: Tensor
    sigma: Tensor
    V: Tensor


def top_svd(A_mn: Delta, k: int, *, exact: bool = False) -> Svd:
    """Return the `k` leading singular triples of `A_mn`, fewer where its rank is lower.

    A product of factors takes the SVD of the r x r matrix between their orthonormal bases. Float64 and small
    matrices take a full SVD. Large float32 matrices take a block Krylov space, grown until the triples have converged,
    and an eigendecomposition of the Gram matrix where that would need half the space or where `exact` asks for it.
    """
    m, n = A_mn.shape
    if isinstance(A_mn, LowRank):
        left, right = torch.linalg.qr(A_mn.B.double()), torch.linalg.qr(A_mn.A.T.double())
        U, sigma, Vh = torch.linalg.svd(left.R @ right.R.T)
        return _nonzero(Svd(left.Q @ U[:, :k], sigma[:k], right.Q @ Vh[:k].T), A_mn)
    if m < n:
        flipped = top_svd(A_mn.T, k, exact=exact)
        return Svd(flipped.V, flipped.sigma, flipped.U)
    if k == 0:
        return Svd(A_mn[:, :0], A_mn.new_zeros(0), A_mn.new_zeros(n, 0))
    if A_mn.dtype == torch.float64 or n <= SMALL:
        U, sigma, Vh = torch.linalg.svd(A_mn.double(), full_matrices=False)
        return _nonzero(Svd(U[:, :k], sigma[:k], Vh[:k].T), A_mn)
    size = float(torch.linalg.vector_norm(A_mn, dtype=torch.float64))
    if size and not 1e-6 < size < 1e6:  # powers of it would leave float32
        scaled = top_svd((A_mn.double() / size).float(), k, exact=exact)
        return Svd(scaled.U, scaled.sigma * size, scaled.V)
    return _nonzero((None if exact else _krylov_svd(A_mn, k)) or _gram_svd(A_mn, k), A_mn)


def uses_krylov(A_mn: Delta, k: int) -> bool:
    """Whether `top_svd` searches a Krylov space for `k` triples, which makes them approximate."""
    side = min(A_mn.shape)
    single = isinstance(A_mn, Tensor) and A_mn.dtype != torch.float64
    return single and side > SMALL and side >= 2 * FIRST_CHECK * _width(k)


def _width(k: int) -> int:
    """Return the columns of a Krylov block that is to find `k` triples."""
    return -(-k // BLOCK) * BLOCK


def _nonzero(svd: Svd, A_mn: Delta) -> Svd:
    """Drop the triples that are zero up to the rounding of `A_mn`'s precision."""
    rank = int((svd.sigma > rounding_share(A_mn) * svd.sigma[0]).sum()) if svd.sigma.numel() else 0
    U, sigma, V = (part.to(A_mn.dtype) for part in svd)
    return Svd(U[:, :rank], sigma[:rank], V[:, :rank])


def rounding_share(A_mn: Delta) -> float:
    """Return the share of the largest singular value below which there is only the rounding of `A_mn`."""
    return 8 * torch.finfo(A_mn.dtype).eps * math.sqrt(max(A_mn.shape))


def _gram_svd(A_mn: Tensor, k: int) -> Svd:
    """Take the SVD from the eigenvectors of AᵀA in float64, where squaring loses nothing of float32."""
    A = A_mn.double()
    V = torch.linalg.eigh(A.T @ A).eigenvectors.flip(-1)[:, :k]
    U = A @ V
    sigma = torch.linalg.vector_norm(U, dim=0)
    return Svd(U / sigma.clamp_min(torch.finfo(torch.float64).tiny), sigma, V)


@cache
def _start(m: int, width: int) -> Tensor:
    return torch.randn(m, width, generator=torch.Generator().manual_seed(0))


def _krylov_svd(A_mn: Tensor, k: int) -> Svd | None:
    """Find the leading triples in span{Q, AᵀAQ, (AᵀA)²Q, …}; None when half the space is not enough.

    The start is the same for every matrix of one shape, so that equal matrices have equal triples.
    """
    if not uses_krylov(A_mn, k):
        return None
    (m, n), width = A_mn.shape, _width(k)
    columns = n // (2 * width) * width
    B_nb, W_mb = A_mn.new_empty(n, columns), A_mn.new_empty(m, columns)  # the space and its image AB
    start = _start(m, width).to(A_mn)
    for _ in range(FIRST_POWERS):
        start = A_mn @ (A_mn.T @ start)
    fresh = A_mn.T @ start
    for done in range(width, columns + 1, width):
        new, every = slice(done - width, done), slice(done)
        B_nb[:, new] = torch.linalg.qr(fresh).Q
        W_mb[:, new] = image = A_mn @ B_nb[:, new]
        fresh = A_mn.T @ image
        for _ in range(2):  # once leaves what rounding brings back, twice is enough
            fresh -= B_nb[:, every] @ (B_nb[:, every].T @ fresh)
        if done < FIRST_CHECK * width:
            continue
        sigma, R_bk = _ritz(B_nb[:, every], W_mb[:, every], k)
        # The residual AᵀAv - σ²v of a Ritz vector v = BR lies in the next block: it is what `fresh` makes of R's end.
        residual_k = torch.linalg.vector_norm(fresh @ R_bk[new], dim=0)
        if _svd_error(sigma, residual_k, k, rounding_share(A_mn)) <= SVD_TOLERANCE:
            U = W_mb[:, every] @ R_bk
            sigma = torch.linalg.vector_norm(U, dim=0)
            return Svd(U / sigma.clamp_min(torch.finfo(U.dtype).tiny), sigma, B_nb[:, every] @ R_bk)
    return None


def _ritz(B_nb: Tensor, W_mb: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the singular values of A on span(B), W = AB, in falling order, and R with V = BR for the first `k`.

    Where the Krylov space is exhausted (A of low rank), QR fills B up with directions it already has; these are
    found in the Gram matrix BᵀB and left out.
    """
    gram, W = (B_nb.T @ B_nb).double(), W_mb.double()
    H_bb, change = W.T @ W, None
    if (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max() > 1e-4:
        scales, directions = torch.linalg.eigh(gram)
        kept = scales > 1e-6
        change = directions[:, kept] * scales[kept].rsqrt()
        H_bb = change.T @ H_bb @ change
    values, vectors = torch.linalg.eigh(H_bb)
    R = vectors.flip(-1)[:, :k]
    return values.flip(-1).clamp_min(0).sqrt().float(), (R if change is None else change @ R).float()


def _svd_error(sigma: Tensor, residual_k: Tensor, k: int, floor: float) -> float:
    """Bound the error of the leading triples: the root mean square of their angles to what was cut off.

    sin θ <= ‖AᵀAv - σ²v‖ / (σ² - σ'²) with σ' the first singular value left out. Angles are not weighted by σ: the
    polar factor of a stack treats all of its vectors alike. Triples below `floor` are rounding and will be dropped.
    """
    beyond = sigma[k] if len(sigma) > k else sigma.new_zeros(())
    counted = sigma[:k] > floor * sigma[0]
    if not bool(counted.any()):
        return 0.0 if bool((sigma == 0).all()) else math.inf
    gap_k = (sigma[:k].square() - beyond.square()).clamp_min(torch.finfo(torch.float32).tiny)
    angle_k = (residual_k[: len(gap_k)] / gap_k).clamp_max(1.0)[counted]
    error = float(angle_k.square().mean().sqrt())
    return error if math.isfinite(error) else math.inf


class Polar(NamedTuple):
    """The polar factor of a stack: orthonormal columns, or a partial isometry where its rank is deficient."""

    factor: Tensor
    full_rank: bool
    weakest: float
    """lowest eigenvalue of the stack's Gram matrix, relative to its highest: errors grow by one over its root"""


def polar(X_mp: Tensor, least: float = 0.0) -> Polar:
    """Return X(XᵀX)^(-1/2), the column-orthonormal matrix nearest to `X_mp`.

    By the eigenvectors of the p x p Gram matrix and one Newton-Schulz step for what squaring lost, far cheaper than
    an SVD of X; by the SVD where the Gram matrix is near-singular. A rank-deficient stack gives the partial isometry.
    Above 0, `least` regularises: singular values σ of X below it become σ / `least` instead of 1, so that the factor
    depends continuously on a stack that comes close to a deficient one.
    """
    if not X_mp.shape[1]:
        return Polar(X_mp, True, 1.0)
    for dtype in dict.fromkeys((X_mp.dtype, torch.float64)):
        X = X_mp.to(dtype)
        values, vectors = torch.linalg.eigh(X.T @ X)
        weakest = float(values[0] / values[-1])
        if weakest > (1e-9 if dtype == torch.float64 else 1e-3) and float(values[0]) >= least**2:
            factor = X @ ((vectors * values.rsqrt()) @ vectors.T)
            factor = 1.5 * factor - 0.5 * (factor @ (factor.T @ factor))
            return Polar(factor.to(X_mp.dtype), True, weakest)
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    kept = sigma > math.sqrt(NULL) * sigma[0]
    shrunk = (sigma[kept] / least).clamp_max(1.0) if least > 0 else torch.ones_like(sigma[kept])
    return Polar(((U[:, kept] * shrunk) @ Vh[kept]).to(X_mp.dtype), bool(kept.all() and least == 0), max(0.0, weakest))


def column_basis(X_mp: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of a partial isometry."""
    U, sigma, _ = torch.linalg.svd(X_mp, full_matrices=False)
    return U[:, sigma > 0.5]


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weights_t · tensors_t."""
    total = tensors[0] * weights[0]
    for x, weight in zip(tensors[1:], weights[1:], strict=True):
        if isinstance(x, Tensor) and isinstance(total, Tensor) and x.dtype == total.dtype:
            total += weight * x  # not add_(x, alpha=…), whose rounding depends on where in a tensor an entry lies
        else:
            total = total + weight * x
    return total


def atom_coefficients(D_mn: Delta, U_mp: Tensor, V_np: Tensor) -> Tensor:
    """Return u_iᵀ D v_i, the coefficient of D along every atom u_i v_iᵀ."""
    return ((D_mn @ V_np) * U_mp).sum(dim=0)


def sum_of_atoms(c_p: Tensor, U_mp: Tensor, V_np: Tensor) -> Tensor:
    """Return Σ_i c_i u_i v_iᵀ."""
    return (U_mp * c_p.to(U_mp.dtype)) @ V_np.T


def solve_spd(H_pp: Tensor, b: Tensor, shift: float = 0.0, null: float = NULL) -> Solution:
    """Solve (H + (shift + damping)·I) y = b for symmetric positive semi-definite H in float64.

    Damping is 0 unless H is singular, and then y is 0 in the null space. Eigenvalues of H below `null` of the largest
    are rounding; unless `shift` is above them, they count as zero. The residual is not computed here.
    """
    if not H_pp.numel():
        return Solution(b.clone())
    H_pp = 0.5 * (H_pp + H_pp.T) + shift * torch.eye(len(H_pp), dtype=H_pp.dtype, device=H_pp.device)
    L, info = torch.linalg.cholesky_ex(H_pp)
    pivots = L.diagonal().square()
    noise = null * float(pivots.max())
    if not info and (pivots.min() > noise or (shift > noise and pivots.min() > NULL * float(pivots.max()))):
        return Solution(torch.cholesky_solve(b, L))
    values, vectors = torch.linalg.eigh(H_pp)
    largest = float(values[-1])
    if largest <= 0:
        return Solution(torch.zeros_like(b))
    damping = null * largest
    inverse = torch.where(values > damping, 1 / (values + damping), 0)  # below it there is only rounding
    return Solution(vectors @ (inverse[:, None] * (vectors.T @ b)), Status.DAMPED, damping=damping)


def null_share(dtype: torch.dtype) -> float:
    """Return the share of the largest eigenvalue below which a matrix of this precision holds only rounding."""
    return NULL if dtype == torch.float64 else 1e-6


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    b: Tensor,
    precondition: Callable[[Tensor], Tensor] = lambda r: r,
    *,
    tolerance: float = 1e-10,
    max_steps: int | None = None,
) -> Solution:
    """Solve `apply(y) = b` for a symmetric positive semi-definite operator on tensors of any shape.

    The residual of the solution is computed anew at its end. The start is 0, so that the iterates stay in the
    operator's range and a consistent singular system is solved.
    """
    y = torch.zeros_like(b)
    norm = float(torch.linalg.vector_norm(b))
    if norm == 0:
        return Solution(y, Status.CONVERGED)
    r, z = b, precondition(b)
    direction, rz = z, float((r * z).sum())
    for _ in range(max_steps or MAX_STEPS):
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
    return solved(y, float(torch.linalg.vector_norm(b - apply(y))) / norm, iterative=True)
