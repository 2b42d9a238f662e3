"""The anchored step of many layers of one shape at once: a GPU is fast on many matrices only.

Shapes: l layers, t tasks, coordinates X_lpq of a tensor product, factors G_ltpp and A_ltqq, all in float64. A layer
that is not solved to its goal is left to a solve of its own, which has more to try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epimer.geometry.checks import ROUNDING, WIDE
from epimer.geometry.decompositions import cholesky, cholesky_inverse
from epimer.geometry.frechet import MERGE_TOLERANCE
from epimer.geometry.kronecker import BEARABLE, DOUBLE, FLOOR
from epimer.geometry.linalg import conjugate_steps, gram, null_share
from epimer.geometry.metric import Kronecker, Metric, TaskGram
from epimer.geometry.solution import Solution, solved
from epimer.geometry.svd import random_start, ritz
from epimer.records import Status

LEADING = 32  # eigenvectors of each factor that a preconditioner uses
PAIRS = 512  # products of them that it inverts exactly: steps are cheap here, and decompositions are not
STEPS = 200  # of conjugate gradients, after which a layer is left to a solve of its own
CORRECTIONS = 8  # of a solution in single precision


@dataclass(frozen=True)
class StackedProblem:
    """Σ_t λ_t (x - x_t)ᵀ H̃_t (x - x_t) of every layer, with H̃_t: X -> c_t G_t X A_t of mean diagonal 1 or as given."""

    c_lt: Tensor
    """λ_t over the task's mean diagonal, or over that of the mean"""
    G_ltpp: Tensor
    A_ltqq: Tensor
    points_ltpq: Tensor
    """the tasks' coordinates UᵀD_tV"""
    weights_lt: Tensor
    mean_unit_l: Tensor
    """what damping is counted in: the mean diagonal of H̄"""

    def step(self, start_lpq: Tensor, damping: float, max_steps: int | None) -> list[Solution | None]:
        """Return x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a) from anchors x_a, with ε = `damping` mean diagonals."""
        shift_l = damping * self.mean_unit_l
        b = self._applied(self.points_ltpq - start_lpq[:, None])
        flat = (self.weights_lt[:, :, None, None] * self.points_ltpq).sum(1)
        length_l, norm_l = torch.minimum(_norms(start_lpq), _norms(flat)), _norms(b)
        goal_l = torch.maximum(DOUBLE * norm_l, MERGE_TOLERANCE * shift_l * length_l)
        y, size_l = self._refined(b, shift_l, goal_l, max_steps)
        largest_l = (self.c_lt * _norms(self.G_ltpp) * _norms(self.A_ltqq)).sum(1)
        rounding_l = null_share(torch.float32) / math.sqrt(min(b.shape[-2:])) * largest_l
        size_l = torch.where(shift_l > rounding_l, size_l, torch.inf)
        numbers = torch.stack([size_l, norm_l, goal_l]).T.tolist()
        steps = zip(start_lpq + y, numbers, strict=True)
        return [_outcome(value, *sizes, stopped=max_steps is not None) for value, sizes in steps]

    def _applied(self, x_ltpq: Tensor) -> Tensor:
        """Return Σ_t c_t G_t X_t A_t of every layer."""
        return (self.c_lt[:, :, None, None] * (self.G_ltpp @ x_ltpq @ self.A_ltqq)).sum(1)

    def _refined(self, b_lpq: Tensor, shift_l: Tensor, goal_l: Tensor, max_steps: int | None) -> tuple[Tensor, Tensor]:
        """Return y and its residuals' norms, which are kept in float64; steps are in single precision."""
        shift = shift_l[:, None, None]
        apply, precondition = self._single_sum(shift), self._preconditioner(shift_l)
        y, r, size_l = torch.zeros_like(b_lpq), b_lpq, _norms(b_lpq)
        for _ in range(CORRECTIONS):
            target_l, size = (0.5 * goal_l / size_l).clamp_min(FLOOR), size_l[:, None, None]
            goals = target_l[:, None, None].float()
            found = conjugate_steps(apply, (r / size).float(), precondition, goals, max_steps or STEPS, stacked=True)
            y = y + size * found.double()
            r = b_lpq - self._applied(y[:, None]) - shift * y
            before_l, size_l = size_l, _norms(r)
            if max_steps is not None or not bool(((size_l > goal_l) & (size_l <= 0.5 * before_l)).any()):
                break
        return y, size_l

    def _single_sum(self, shift: Tensor) -> Callable[[Tensor], Tensor]:
        """Return X -> Σ c G X A + shift·X in single precision: [G_1 X, G_2 X, …] [A_1; A_2; …]."""
        layers, tasks, p, _ = self.G_ltpp.shape
        G_lsp = (self.c_lt[:, :, None, None] * self.G_ltpp).flatten(1, 2).float()
        A_lsq, single = self.A_ltqq.flatten(1, 2).float(), shift.float()

        def apply(x: Tensor) -> Tensor:
            image = (G_lsp @ x).view(layers, tasks, p, -1).transpose(1, 2).flatten(2)
            return (image @ A_lsq).addcmul_(single, x)

        return apply

    def _preconditioner(self, shift_l: Tensor) -> Callable[[Tensor], Tensor]:
        """Return an approximate inverse of the sum and its shift, by Woodbury's identity, as one layer has it.

        (s + W Λ Wᵀ)⁻¹ = (1 - W (s Λ⁻¹ + WᵀW)⁻¹ Wᵀ) / s with the largest products of the factors' eigenvalues in Λ, and
        s the mean diagonal of the rest, with the shift.
        """
        p, q = self.G_ltpp.shape[-1], self.A_ltqq.shape[-1]
        (g_ltk, E_lrp), (a_lth, F_lrq) = _leading(self.G_ltpp), _leading(self.A_ltqq)
        k, h = g_ltk.shape[-1], a_lth.shape[-1]
        values = (self.c_lt[:, :, None, None] * g_ltk[..., :, None] * a_lth[..., None, :]).flatten(1)
        values_ln, index_ln = torch.topk(values, min(PAIRS, values.shape[1]))
        values_ln = torch.maximum(values_ln, torch.finfo(torch.float32).eps * values_ln[:, :1])
        rest_l = shift_l + ((self._mean_diagonals() * p * q - values_ln.sum(1)) / (p * q)).clamp_min(0)
        rows, columns = index_ln // h, index_ln // (k * h) * h + index_ln % h
        E_lnp, F_lnq = _rows(E_lrp, rows).float(), _rows(F_lrq, columns).float()
        inner = (gram(E_lnp.mT) * gram(F_lnq.mT)).double()
        inner.diagonal(dim1=-2, dim2=-1).add_(rest_l[:, None] / values_ln)
        inverse, rest = cholesky_inverse(cholesky(inner).L).float(), rest_l[:, None, None].float()

        def precondition(r: Tensor) -> Tensor:
            along_ln1 = inverse @ ((E_lnp @ r) * F_lnq).sum(-1, keepdim=True)
            return (r - E_lnp.mT @ (along_ln1 * F_lnq)) / rest

        return precondition

    def _mean_diagonals(self) -> Tensor:
        return (self.c_lt * mean_diagonals(self.G_ltpp) * mean_diagonals(self.A_ltqq)).sum(1)


def _outcome(value: Tensor, size: float, norm: float, goal: float, *, stopped: bool) -> Solution | None:
    """Return the solution of a layer with its residual; None where it missed its goal, unless it was to be stopped."""
    if not norm > 0 or not (size <= goal or (stopped and math.isfinite(size))):
        return None
    if size <= goal:
        return Solution(value, Status.CONVERGED, size / norm)
    return solved(value, size / norm, iterative=True)


def stacked_problem(
    metrics: Sequence[Sequence[Metric]],
    deltas: Sequence[Sequence[Tensor]],
    U_lmp: Tensor,
    V_lnq: Tensor,
    weights: Sequence[Sequence[float]],
    normalize: str,
) -> StackedProblem | None:
    """Return the problem of layers of one shape, from each layer's metrics and task vectors.

    None where it is not made of two factors a task, a factor is indefinite, or single precision cannot hold it: then
    each layer is posed on its own, which says what is wrong.
    """
    parts = []
    for of_task, D_l in zip(zip(*metrics, strict=True), zip(*deltas, strict=True), strict=True):
        restricted = _restricted(of_task, torch.stack(D_l), U_lmp, V_lnq)
        if restricted is None:
            return None
        parts.append(restricted)
    G_ltpp, A_ltqq, points_ltpq = (torch.stack(side, dim=1) for side in zip(*parts, strict=True))
    weights_lt = torch.tensor(weights, dtype=torch.float64, device=U_lmp.device)
    left_lt, right_lt = mean_diagonals(G_ltpp), mean_diagonals(A_ltqq)
    mean_l = (weights_lt * left_lt * right_lt).sum(1)
    divisor_lt = {"trace": left_lt * right_lt, "common": mean_l[:, None], "none": torch.ones_like(left_lt)}[normalize]
    c_lt = weights_lt / divisor_lt
    sizes = torch.stack([x.expand_as(c_lt) for x in (left_lt, right_lt, left_lt * right_lt, c_lt)])
    lowest, highest = torch.stack([sizes.min(), sizes.max()]).tolist()
    if not 1 / BEARABLE < lowest <= highest < BEARABLE:
        return None
    mean_unit_l = mean_l if normalize == "none" else torch.ones_like(mean_l)
    return StackedProblem(c_lt, G_ltpp, A_ltqq, points_ltpq, weights_lt, mean_unit_l)


def _restricted(
    metrics: Sequence[Metric], D_lmn: Tensor, U_lmp: Tensor, V_lnq: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return UᵀGU, VᵀAV and UᵀDV of one task in every layer, in float64."""
    if all(isinstance(metric, TaskGram) for metric in metrics):
        known = TaskGram(D_lmn)
        G_lpp, A_lqq = known.factors(U_lmp, V_lnq)
        points_lpq = known.known_projection(D_lmn, U_lmp, V_lnq)
        assert points_lpq is not None
        return G_lpp, A_lqq, points_lpq
    factors = [(metric.G, metric.A) for metric in metrics if isinstance(metric, Kronecker)]
    left, right = ([M for M in side if M is not None] for side in zip(*factors, strict=True)) if factors else ([], [])
    if not len(metrics) == len(left) == len(right):
        return None
    G, A = _along(left, U_lmp), _along(right, V_lnq)
    return None if G is None or A is None else (G, A, (U_lmp.mT @ D_lmn @ V_lnq).double())


def _along(factors: Sequence[Tensor], U_lmp: Tensor) -> Tensor | None:
    """Return UᵀMU in float64; None where a wide factor is not positive semi-definite there (`check_wide_factor`)."""
    M_lmm = torch.stack(list(factors))
    half = U_lmp.mT @ M_lmm @ U_lmp
    H_lpp = (0.5 * (half + half.mT)).double()
    if M_lmm.shape[-1] > WIDE:
        slack = ROUNDING * M_lmm.diagonal(dim1=-2, dim2=-1).double().abs().sum(-1, keepdim=True)
        shifted = H_lpp.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(slack)
        if bool(cholesky(shifted).info.any()):
            return None
    return H_lpp


def mean_diagonals(M: Tensor) -> Tensor:
    """Return the mean diagonal of every matrix of a stack."""
    return M.diagonal(dim1=-2, dim2=-1).mean(-1)


def _leading(M_ltpp: Tensor) -> tuple[Tensor, Tensor]:
    """Return leading eigenvalues [l, t, k] and eigenvectors [l, t k, p] of every factor, as two products show them."""
    M, size = M_ltpp.float(), M_ltpp.shape[-1]
    start = random_start(size, min(LEADING, size)).to(M)
    values, vectors, _ = ritz(M.matmul, M @ (M @ start))
    return values.double().clamp_min(0), vectors.mT.flatten(1, 2)


def _rows(E_lrp: Tensor, index_ln: Tensor) -> Tensor:
    """Return rows of every layer by their numbers."""
    return E_lrp.gather(1, index_ln[..., None].expand(-1, -1, E_lrp.shape[-1]))


def _norms(x_lpq: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_lpq, dim=(-2, -1))
