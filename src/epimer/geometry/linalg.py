"""Linear algebra with its failure modes handled: polar factor, damped solve, conjugate gradients, order statistics."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epimer.geometry.decompositions import (
    Eigh,
    cholesky,
    cholesky_solve,
    eigh,
    eigvalsh,
    householder_product,
    householder_qr,
    qr,
    thin_svd,
)
from epimer.geometry.replay import repeated
from epimer.geometry.solution import Solution, solved
from epimer.records import Status

CHUNK = 1 << 17  # entries of a chunk, which stays in the cache, where entries do not depend on each other
HALVED = 512  # columns from which on a Gram matrix is formed in blocks, without most of what symmetry gives
BLOCKS = 8  # of columns of a Gram matrix
SMALL_EIGH = 384  # up to this size a matrix on a GPU is decomposed on the CPU
WEAKEST = 2e-5  # singular value, of a stack scaled to norm 1, that Newton-Schulz steps still bring to 1
STRETCH = 1.5  # of a Newton-Schulz step at most
PROBE = 1e-3  # size of the error, relative to a column, that measures how errors grow
NEARLY_SQUARE = 0.75  # columns per row from which on a stack's Gram matrix is taken in float64
FAR_WEAKER = 1e-5  # share of a stack's largest eigenvalue below which its polar factor is multiplied in float64
NULL = 1e-10  # eigenvalues below this share of the largest count as zero in float64
MAX_STEPS = 2000  # of conjugate gradients
CPU_THREADS = min(16, os.cpu_count() or 1)  # that decompose a GPU's small matrices


def nonfinite(x: Tensor) -> int:
    """Return how many entries of `x` are NaN or Inf, in a single fast pass where there are none."""
    if math.isfinite((as_compute_dtype(x) if x.element_size() == 1 else x).sum()):  # float8 cannot be added up
        return 0
    return x.numel() - int(torch.isfinite(as_compute_dtype(x)).sum())


def chunks(flat: Tensor) -> Sequence[Tensor]:
    """Divide a vector on the CPU into parts that stay in the cache."""
    return torch.split(flat, CHUNK) if flat.device.type == "cpu" else [flat]


def as_compute_dtype(x: Tensor) -> Tensor:
    """Return `x` in the precision of all arithmetic: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def unit_of(tensors: Sequence[Tensor]) -> float:
    """Return the power of two by which the largest entry of some tensors comes to about 1; no digit is lost by it."""
    largest = max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)
    top = math.frexp(torch.finfo(tensors[0].dtype).max)[1] - 2  # of what can be multiplied by it
    return 2.0 ** max(-top, min(-math.frexp(largest)[1], top)) if math.isfinite(largest) else 1.0


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


def rounding_share(A_mn: Delta) -> float:
    """Return the share of the largest singular value below which there is only the rounding of `A_mn`."""
    return 8 * torch.finfo(A_mn.dtype).eps * math.sqrt(max(A_mn.shape))


def gram(X: Tensor) -> Tensor:
    """Return XᵀX of a matrix or of a stack of them; of a wide one in blocks of columns, the upper half alone."""
    n = X.shape[-1]
    if n < (4 * HALVED if X.is_cuda else HALVED):  # on a GPU many small products take longer than a large one
        return X.mT @ X
    K = X.new_empty(*X.shape[:-2], n, n)
    for start, end in pairwise(n * i // BLOCKS for i in range(BLOCKS + 1)):
        K[..., start:end, start:] = X[..., start:end].mT @ X[..., start:]
        K[..., end:, start:end] = K[..., start:end, end:].mT
    return K


def sandwich(M_nn: Tensor, U_np: Tensor) -> Tensor:
    """Return UᵀMU of a symmetric matrix; of a wide one from the blocks on and above its diagonal, half of the work."""
    n, p = U_np.shape
    if n < HALVED or U_np.is_cuda:
        H_pp = U_np.T @ M_nn @ U_np
        return 0.5 * (H_pp + H_pp.T)
    half_pp = U_np.new_zeros(p, p)
    for start, end in pairwise(n * i // BLOCKS for i in range(BLOCKS + 1)):
        rows = (M_nn[start:end, start:end] @ U_np[start:end]).mul_(0.5)
        rows.addmm_(M_nn[start:end, end:], U_np[end:])
        half_pp.addmm_(U_np[start:end].T, rows)
    return half_pp + half_pp.T


def small_eigh(H: Tensor) -> Eigh:
    """Return eigenvalues and eigenvectors of symmetric matrices; a GPU's small ones from the CPU, shared by threads."""
    if H.shape[-1] > SMALL_EIGH or not H.is_cuda:
        return eigh(H)
    values, vectors = (torch.cat(parts) for parts in zip(*_shared_by_threads(eigh, H), strict=True))
    return Eigh(values.reshape(H.shape[:-1]).to(H.device), vectors.reshape(H.shape).to(H.device))


def small_eigvalsh(H: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices, rising; a GPU's small ones from the CPU, shared by threads."""
    if H.shape[-1] > SMALL_EIGH or not H.is_cuda:
        return eigvalsh(H)
    return torch.cat(_shared_by_threads(eigvalsh, H)).reshape(H.shape[:-1]).to(H.device)


def _shared_by_threads(decompose: Callable[[Tensor], Any], H: Tensor) -> list[Any]:
    """Return what every thread found out about its share of a stack of matrices, in order."""
    stacks = H.cpu().reshape(-1, *H.shape[-2:]).chunk(CPU_THREADS)
    contexts = [copy_context() for _ in stacks]  # in which a thread notes what it had to try again
    threads = _cpu_threads().map if len(stacks) > 1 else map
    return list(threads(lambda context, M: context.run(decompose, M), contexts, stacks))


@cache
def _cpu_threads() -> ThreadPoolExecutor:
    """Return threads that work on matrices of their own."""
    return ThreadPoolExecutor(CPU_THREADS, initializer=torch.set_num_threads, initargs=(1,))


class Polar(NamedTuple):
    """The polar factor of a stack: orthonormal columns, or a partial isometry where its rank is deficient."""

    factor: Tensor
    full_rank: bool
    amplification: float
    """how many times an error of the stack, relative to a column, the factor is wrong by; inf for a deficient stack"""
    bearable: float
    """the error of the stack's columns from which on its weakest direction may turn over"""


def stack_gram(X_mp: Tensor) -> Tensor:
    """Return XᵀX of stacked columns, in float64 for a nearly square stack: it has a weak direction by chance alone."""
    return gram(X_mp.double() if X_mp.shape[1] > NEARLY_SQUARE * X_mp.shape[0] else X_mp)


def polar(X_mp: Tensor, inner: Tensor | None = None) -> Polar:
    """Return X(XᵀX)^(-1/2), the column-orthonormal matrix nearest to `X_mp`.

    On a GPU by Newton-Schulz steps alone; elsewhere by the eigenvectors of the p x p Gram matrix, in float64 where
    float32 would show, and one step for what squaring lost: far cheaper than an SVD of X, which is taken where the
    Gram matrix is near-singular. A rank-deficient stack gives the partial isometry. `inner` is the stack's Gram
    matrix, if the caller has it.
    """
    if not X_mp.shape[1]:
        return Polar(X_mp, True, 1.0, 1.0)
    if X_mp.is_cuda and X_mp.dtype != torch.float64:
        factor, (amplification,) = newton_schulz_polar(X_mp)
        if amplification < math.inf:
            return Polar(factor, True, amplification, math.inf)  # a direction that turned over has amplified a lot
    inner = stack_gram(X_mp) if inner is None else inner
    for G in (inner,) if inner.dtype == torch.float64 else (inner, None):
        G = gram(X_mp.double()) if G is None else G
        values, vectors = small_eigh(G)
        lowest, highest = torch.stack([values[0], values[-1]]).tolist()
        enough = 1e-3 if G.dtype == torch.float32 else 1e-9 if X_mp.dtype == torch.float64 else NULL
        if lowest > enough * highest:
            # a product in float32 turns a direction that is far weaker than the others
            wide = X_mp.double() if lowest < FAR_WEAKER * highest else X_mp
            factor = wide @ gram((vectors * values.pow(-0.25)).T).to(wide.dtype)
            if X_mp.dtype == torch.float64 or lowest < 0.1 * highest:  # rounding shows
                factor = _newton_schulz(factor)
            return Polar(factor.to(X_mp.dtype), True, *_sensitivity(values, len(X_mp)))
    del G, values, vectors
    reflectors, tau = householder_qr(X_mp.double())  # X = QR, since the SVD of R takes less memory than that of X
    rows = len(tau)
    U, sigma, Vh = thin_svd(reflectors[:rows].triu())
    kept = sigma > math.sqrt(NULL) * sigma[0]
    Q = householder_product(reflectors[:, :rows], tau)
    del reflectors
    factor = (Q @ (U[:, kept] @ Vh[kept])).to(X_mp.dtype)
    if not bool(kept.all()):
        return Polar(factor, False, math.inf, 0.0)
    return Polar(factor, True, *_sensitivity(sigma.square(), len(X_mp)))


def newton_schulz_polar(X: Tensor) -> tuple[Tensor, list[float]]:
    """Return polar factors of one X_mp or of several by products alone, and each one's amplification.

    The amplification is measured: a second stack, with a small error, is taken along. It is inf where the steps did
    not converge.
    """
    m, p = X.shape[-2:]
    generator = torch.Generator(X.device).manual_seed(0)
    noise = torch.randn(m, p, generator=generator, dtype=X.dtype, device=X.device) * (PROBE / math.sqrt(m))
    scale = torch.linalg.matrix_norm(X.mT @ X, ord=1, keepdim=True).sqrt()
    pair = torch.stack([X, X + noise]) / (1.01 * scale)
    for stretch in _stretches():
        pair = _newton_schulz(pair, stretch)
    factor, other = pair
    defect = (factor.mT @ factor - torch.eye(p, dtype=X.dtype, device=X.device)).abs().amax((-2, -1))
    grown = torch.linalg.vector_norm(other - factor, dim=(-2, -1)) / torch.linalg.vector_norm(noise)
    found = torch.stack([defect, grown]).reshape(2, -1).tolist()
    return factor, [amplified if wrong < 1e-3 else math.inf for wrong, amplified in zip(*found, strict=True)]


@cache
def _stretches() -> tuple[float, ...]:
    """Return how far each Newton-Schulz step stretches its matrix first, so that few steps lift `WEAKEST` to 1.

    With singular values in [l, 1], a stretch up to √(3 / (1 + l + l²)) sends none of them lower than l; at most
    `STRETCH`, as a step must not bring those near 1 so low that rounding shows.
    """
    found, lowest = [], WEAKEST
    while lowest < 1 - 1e-7:
        found.append(min(STRETCH, math.sqrt(3 / (1 + lowest + lowest**2))))
        lowest = min(1.5 * x - 0.5 * x**3 for x in (found[-1] * lowest, found[-1]))
    return (*found, 1.0)


def _newton_schulz(factor: Tensor, stretch: float = 1.0) -> Tensor:
    """Return (3Y - YYᵀY) / 2, nearer to orthonormal columns than Y, for Y = `stretch` · `factor`."""
    return 1.5 * stretch * factor - 0.5 * stretch**3 * (factor @ gram(factor))


def _sensitivity(values: Tensor, m: int) -> tuple[float, float]:
    """Return the amplification and the bearable error of a stack with m rows, from its Gram matrix's eigenvalues σ².

    Random errors grow by 1 / σ_i outside of the span, and by √2 / (σ_i + σ_j), i ≠ j, within it; along one direction
    they change nothing until, at a third of it being sure of that, their part 1 / √m exceeds σ_i.
    """
    sigma, inside = values.sqrt(), len(values) / m
    within = (sigma[:, None] + sigma).square_().reciprocal_().fill_diagonal_(0)  # in place: p x p is large
    growth = 2 * inside * within.mean() + (1 - inside) * (1 / values).mean()
    amplification, weakest = torch.stack([growth.sqrt(), sigma.min()]).tolist()
    return amplification, weakest * math.sqrt(m) / 3


def column_basis(X_mp: Tensor) -> Tensor:
    """Return orthogonal columns U diag(σ) that span those of X, without the negligible ones.

    A partial isometry gives an orthonormal basis. Singular values between 0 and 1 stay, so that a column that
    comes and goes does so continuously.
    """
    U, sigma, _ = thin_svd(X_mp)
    kept = sigma > (1e-6 if X_mp.dtype == torch.float64 else 1e-4)
    return U[:, kept] * sigma[kept].clamp_max(1.0)


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


def solve_spd(H_pp: Tensor, b: Tensor, shift: float = 0.0, null: float = NULL, *, entrywise: bool = False) -> Solution:
    """Solve (H + (shift + damping)·I) y = b for symmetric positive semi-definite H in float64.

    Damping is 0 unless H is singular, and then y is 0 in the null space. Eigenvalues of H below `null` of the largest
    are rounding; unless `shift` is above them, they count as zero. The residual is not computed here.

    Args:
        H_pp: H.
        b: Right-hand sides, one per column.
        shift: Share of the identity that is added to H.
        null: Relative rounding error of H.
        entrywise: Whether H_ij is rounded relative to √(H_ii H_jj), as in a Gram matrix of features. Eigenvalues are
            then those of H scaled to unit diagonal, so that features of any size count alike, and the damping that is
            returned is a share of the diagonal.
    """
    if not H_pp.numel():
        return Solution(b.clone())
    H_pp = (H_pp + H_pp.T).mul_(0.5)
    H_pp.diagonal().add_(shift)
    if (L := positive_factor(H_pp, null, shift, entrywise=entrywise)) is not None:
        return Solution(cholesky_solve(b, L))
    unit = unit_of_diagonal(H_pp.diagonal())[:, None] if entrywise else torch.ones_like(H_pp[:, :1])
    values, vectors = eigh(H_pp.div_(unit).div_(unit.T))
    del H_pp
    largest = float(values[-1])
    if largest <= 0:
        return Solution(torch.zeros_like(b))
    damping = null * largest
    above = values > damping  # below it there is only rounding
    values, vectors = values[above, None], vectors[:, above]
    y = (vectors @ ((vectors.T @ (b / unit)) / (values + damping))).div_(unit)
    if entrywise:  # the scaled system's solution of least norm has a part in the null space of H
        Q, _ = qr(vectors.mul_(unit))
        y = Q @ (Q.T @ y)
    return Solution(y, Status.DAMPED, damping=damping)


def unit_of_diagonal(diagonal: Tensor) -> Tensor:
    """Return s with H_ij / (s_i s_j) of unit diagonal, from the diagonal of H; 1 where that is zero."""
    unit = diagonal.clamp_min(0).sqrt()
    return torch.where(unit > 0, unit, 1.0)


def positive_factor(H_pp: Tensor, null: float, shift: float = 0.0, *, entrywise: bool = False) -> Tensor | None:
    """Return L of H = LLᵀ in float64; None where H, which includes `shift` on its diagonal, may as well be singular.

    With `entrywise`, pivots are compared with their own diagonal entries: those of H scaled to unit diagonal.
    """
    L, info = cholesky(H_pp)
    pivots = L.diagonal().square()
    largest = float(pivots.max())
    share = float((pivots / (H_pp.diagonal() if entrywise else largest)).min())
    enough = NULL if shift > null * largest else null
    return L if not info and share > enough else None


def symmetrize_(M: Tensor) -> Tensor:
    """Replace a square matrix by the mean of itself and its transpose, block by block in the cache."""
    for i in range(0, len(M), HALVED):
        for j in range(i, len(M), HALVED):
            upper, lower = M[i : i + HALVED, j : j + HALVED], M[j : j + HALVED, i : i + HALVED]
            mean = (upper + lower.T).mul_(0.5)
            upper.copy_(mean)
            lower.copy_(mean.T)
    return M


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

    The residual of the solution is computed anew at its end.
    """
    norm = float(torch.linalg.vector_norm(b))
    if norm == 0:
        return Solution(torch.zeros_like(b), Status.CONVERGED)
    y = conjugate_steps(apply, b, precondition, tolerance * norm, max_steps)
    return solved(y, float(torch.linalg.vector_norm(b - apply(y))) / norm, iterative=True)


def conjugate_steps(
    apply: Callable[[Tensor], Tensor],
    b: Tensor,
    precondition: Callable[[Tensor], Tensor],
    goal: float | Tensor,
    max_steps: int | None = None,
    *,
    stacked: bool = False,
) -> Tensor:
    """Return what conjugate gradients make of `apply(y) = b` until the residual that they keep is below `goal`.

    The start is 0, so that the iterates stay in the operator's range and a consistent singular system is solved. A
    step works on the same tensors every time, so that a GPU can replay it, and asks the device for its numbers once.
    With `stacked`, b[0], b[1], … are systems of their own, each with its goal in a tensor [l, 1, …]: one that has
    reached it waits for the others.
    """
    dims = tuple(range(int(stacked), b.dim()))
    y, r, direction = torch.zeros_like(b), b.clone(), torch.zeros_like(b)
    one_each = [*b.shape[: int(stacked)], *(1 for _ in dims)]
    rz, step = b.new_full(one_each, math.inf), b.new_zeros(one_each)
    unfinished, asked = torch.ones_like(step, dtype=torch.bool), b.new_zeros(2, dtype=torch.bool)

    def advance() -> None:
        z = precondition(r)
        current = (r * z).sum(dims, keepdim=True)
        torch.addcmul(z, torch.where(unfinished, current / rz, 0), direction, out=direction)
        image = apply(direction)
        curvature = (direction * image).sum(dims, keepdim=True)
        step.copy_(torch.where(unfinished, current / curvature, 0))
        r.addcmul_(step, image, value=-1)
        rz.copy_(current)
        positive, reached = curvature > 0, torch.linalg.vector_norm(r, dim=dims, keepdim=True) <= goal
        torch.logical_and(positive, ~reached, out=unfinished)
        torch.stack([positive.any(), unfinished.any()], out=asked)

    once_more = repeated(advance, b)
    for _ in range(max_steps or MAX_STEPS):
        once_more()
        positive, unconverged = asked.tolist()
        if not positive:
            break
        y.addcmul_(step, direction)
        if not unconverged:
            break
    return y
