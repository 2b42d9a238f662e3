"""How long one tensor's merge takes: what its method does, counted in kernels whose speed is measured on this machine.

Matrices are m x n, p = kT directions of a basis. Counts are of arithmetic where it is known (products, passes over
memory) and of the leading term elsewhere (SVDs, eigenvectors); steps of conjugate gradients depend on the curvature and
are those of typical ones. An estimate is meant to be right within a factor of two.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from epimer.geometry import kronecker as solver
from epimer.geometry.decompositions import eigh
from epimer.geometry.svd import top_svd
from epimer.methods import workspace
from epimer.methods.averaging import average
from epimer.methods.options import per_model
from epimer.methods.registry import Method
from epimer.methods.workspace import Workload, workspace_bytes

Work = Counter[str]
"""kernel -> how many units of it"""
Speeds = dict[str, float]
"""kernel -> seconds per unit"""

STEPS = {"tensor": 20, "full": 80}  # of conjugate gradients at damping 1
STEPS_ALONG_MEAN = {"tensor": 40, "full": 60}  # at a small one, along the eigenvectors of mean factors
LOW_RANK = 16  # of the approximation of a diagonal that starts a solve
CHECKS = 4  # passes over a factor while it is checked
SORTING = 4  # passes over a model that counting its magnitudes takes as long as
LARGE, NEW_PAGES = 1 << 25, 3.0  # bytes of a tensor from which on each of its copies is new memory, and what that costs
LONG = 0.03  # seconds of calls of which two are enough


def seconds(work: Work, speeds: Speeds) -> float:
    """Return how long one worker takes for some work."""
    return sum(speeds[kernel] * units for kernel, units in work.items())


def work_of(method: Method, load: Workload) -> Work:
    """Return what a merge does: task vectors are taken, merged and added to the base."""
    counts = _counts(method, load)
    if not method.separable and load.itemsize * load.entries >= LARGE:
        counts["bytes"] = round(NEW_PAGES * counts["bytes"])
    return counts


def _counts(method: Method, load: Workload) -> Work:
    tensor = load.itemsize * load.entries
    passes = load.tasks + 2 if method.separable else 2 * load.tasks + 4  # in parts, which stay in the cache, or whole
    if method.merge is average:  # as the models are read
        passes = (load.tasks + 2) // 2
    counts = Work(bytes=tensor * passes + CHECKS * load.curvature)
    if method.prepare is not None:
        counts += Work(files=SORTING * method.passes * load.tasks * tensor)  # read and counted by the host
    counts += order(method, load)
    if callable(method.workspace) and method.workspace in WORK:
        return counts + WORK[method.workspace](load)
    if method.merge is average:
        return counts
    if method.separable:  # half of it stays in the cache
        return counts + Work(bytes=workspace_bytes(method, load) // 2)
    return counts + Work(bytes=method.sweeps * load.tasks * tensor + workspace_bytes(method, load))


def order(method: Method, load: Workload) -> Work:
    """Return the work of finding k-th largest entries, sorting rows and drawing numbers; none where all are kept."""
    kept = getattr(load.options, "density", getattr(load.options, "select_topk", 0.0))
    if min(per_model(kept, 1)) >= 1:
        return Work()
    entries = load.tasks * load.entries
    return Work(selected=method.selects * entries, sorted=method.sorts * entries, random=method.draws * entries)


# --- singular vectors ---


def triples(load: Workload, k: int) -> Work:
    """Return the work of `k` singular triples of one task vector: a Krylov space, or all of them by eigenvectors."""
    short, long = sorted(load.shape)
    if load.itemsize == workspace.DOUBLE or 8 * k > short:
        return whole_svd(long, short)
    return Work(leading=long * short * k)


def whole_svd(long: int, short: int) -> Work:
    """Return the work of an SVD: that of a square matrix, and products with the Gram matrix of the other rows."""
    return Work(svd=short**3, double=4 * (long - short) * short**2)


def polar_factor(m: int, p: int) -> Work:
    """Return the work of the polar factor of p columns: eigenvectors of their Gram matrix, and products with it."""
    return Work(eigen=p**3, single=6 * m * p**2)


def times(count: float, work: Work) -> Work:
    """Return `count` times some work."""
    return Work({kernel: round(count * units) for kernel, units in work.items()})


def basis(load: Workload) -> Work:
    """Return the work of a tagged basis: every task's triples, and the polar factors of both stacks."""
    (m, n), p = load.shape, load.directions
    return times(load.tasks, triples(load, load.rank)) + polar_factor(m, p) + polar_factor(n, p)


def tsv(load: Workload) -> Work:
    """Return the work of TSV-M: its basis, and the merge."""
    return basis(load) + Work(single=2 * load.entries * load.directions)


def iso_c(load: Workload) -> Work:
    """Return the work of Iso-C: a whole SVD of the sum, and its product."""
    short, long = sorted(load.shape)
    return whole_svd(long, short) + Work(single=2 * long * short**2, bytes=3 * load.itemsize * load.entries)


def iso_cts(load: Workload) -> Work:
    """Return the work of Iso-CTS: that of Iso-C, every task's own triples, and polar factors of full width."""
    side, own = min(load.shape), max(1, min(load.shape) // (5 * load.tasks))
    beyond = triples(load, own) + Work(single=4 * load.entries * (side - own * load.tasks))
    both = polar_factor(load.shape[0], side) + polar_factor(load.shape[1], side)
    return iso_c(load) + times(load.tasks, beyond) + both


# --- the one equation ---


def frechet(load: Workload) -> Work:
    """Return the work of the one equation: a basis, restricted curvature, a solve, and a calibration."""
    return equation(load) + solve(load)


def equation(load: Workload) -> Work:
    """Return the work around a solve: the basis with the tasks' coordinates, an anchor, a calibration."""
    options, p = load.options, load.directions
    anchor = options.anchored_at(load.basis)
    counts = Work()
    if (load.basis != "full" or anchor == "tsv") and isinstance(options.basis, str):
        counts += basis(load)
    if load.basis != "full":
        counts += Work(single=2 * load.tasks * (load.entries + load.shape[0] * p) * p + 4 * load.entries * p)
    if anchor == "iso_c":
        counts += iso_c(load)
    elif anchor is not None and anchor != "tsv":  # a mean of the task vectors, and their norms
        counts += Work(bytes=(3 * load.tasks + 4) * load.itemsize * load.entries)
    if options.calibrate is not None:
        tensor = load.basis == "tensor" and options.stays_in_subspace(load.basis)
        side = p if tensor else min(load.shape)
        counts += Work(
            svd=side**3 if tensor else load.entries * side, single=2 * (load.tasks + 2) * load.entries * side
        )
    return counts


def solve(load: Workload) -> Work:
    """Return the work of restricting every task's curvature to the subspace, and of the solve there."""
    (m, n), tasks, p, full = load.shape, load.tasks, load.directions, load.basis == "full"
    tagged, kind = load.basis == "tagged", load.kind
    dense = Work(double=p**3, bytes=workspace.DOUBLE * tasks * p**2)  # a Cholesky decomposition and its solves
    match kind:
        case "diagonal" if full:
            return elementwise(load)
        case "diagonal" if tagged:
            exact = load.options.projection_tol == 0
            projected = 2 * load.entries * p**2 if exact else 2 * LOW_RANK * p**2 * (m + n)
            iterated = 0 if exact else 4 * load.entries * p * LOW_RANK
            return dense + Work(single=projected + iterated, bytes=3 * workspace.DOUBLE * tasks * load.entries)
        case "diagonal" | "ekfac":
            turned = 2 * tasks * (m * m + n * n) * p if kind == "ekfac" and not full else 0
            steps = STEPS["tensor"] * 4 * load.entries * p * (tasks if kind == "ekfac" else 1)
            return Work(single=turned, double=2 * tasks * load.entries * p if tagged else steps)
        case "samples":
            along = load.curvature // load.itemsize * (p if not full else min(m, n))
            return Work(single=2 * along * (1 if tagged else 2 * STEPS["tensor"])) + (dense if tagged else Work())
        case "projected":
            restricting = Work()
        case "task-gram":
            restricting = Work(single=2 * tasks * (2 * load.entries * (p if not full else 0) + (m + n) * p**2))
            if full:
                restricting = Work(single=2 * tasks * load.entries * (m + n))
        case _:
            restricting = Work() if full else Work(single=2 * tasks * ((m * m + n * n) * p + (m + n) * p**2))
    return restricting + (dense if tagged else kronecker(load))


def kronecker(load: Workload) -> Work:
    """Return the work of conjugate gradients with both factors of every task, and of their preconditioner."""
    full = load.basis == "full"
    p, q = load.shape if full else (load.directions, load.directions)
    product = 2 * load.tasks * p * q * (p + q)
    where, small = "full" if full else "tensor", load.options.damping < solver.SMALL_SHIFT
    steps = (STEPS_ALONG_MEAN if small else STEPS)[where]
    steps = min(steps, load.options.iterations or steps)
    wide = max(p, q) > solver.STACKED
    checked = Work(double=load.tasks * (p**3 + q**3) // 3) if wide else Work()
    if small:
        step, preparing = product + 4 * p * q * (p + q), Work(eigen_single=p**3 + q**3, single=product)
    else:
        step, preparing = product, Work(single=solver.PAIRS**3)
        if wide:
            preparing += Work(leading=load.tasks * solver.LEADING * (p * p + q * q))
        else:
            preparing += Work(eigen_single=load.tasks * (p**3 + q**3))
    return preparing + checked + Work(single=steps * step, double=3 * product)


def one_sided(load: Workload) -> Work:
    """Return the work of solving with the inputs' factors alone: a product each, their sum, and one decomposition."""
    if load.basis != "full":
        return frechet(load)
    side = load.shape[load.inputs]
    products = 2 * load.entries * side
    formed = 2 * load.tasks * products if load.kind == "task-gram" else 0
    bytes_ = workspace.DOUBLE * load.tasks * (4 * side**2 + 8 * load.entries)
    checked = load.tasks * side**3 // 3 if load.kind != "task-gram" and side > solver.STACKED else 0
    return Work(single=formed + checked, double=(load.tasks + 3) * products + side**3, bytes=bytes_) + equation(load)


def elementwise(load: Workload) -> Work:
    """Return the work of a solve with a diagonal on the full space."""
    return Work(bytes=workspace.DOUBLE * load.entries * (4 * load.tasks + 7))


def weighted_by_diagonals(load: Workload) -> Work:
    """Return the work of weighing task vectors by diagonals, in chunks."""
    return Work(bytes=workspace.DOUBLE * load.entries * (load.tasks + 3))


WORK: dict[Callable[[Workload], int], Callable[[Workload], Work]] = {
    workspace.in_chunks: elementwise,
    workspace.gradient_matching: weighted_by_diagonals,
    workspace.tsv: tsv,
    workspace.iso_c: iso_c,
    workspace.iso_cts: iso_cts,
    workspace.frechet: frechet,
    workspace.one_sided: one_sided,
}
"""what a method does, by what says which memory it does it in"""


# --- the machine ---


def falling(m: int, n: int, device: torch.device) -> Tensor:
    """Return a matrix whose singular values fall as those of fine-tuning do."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(m, n, generator=generator), torch.randn(n, n, generator=generator)
    return ((left * torch.arange(1, n + 1) ** -0.7) @ right / n).to(device)


@cache
def measured_speeds(device: torch.device, threads: int) -> Speeds:
    """Return the seconds that a unit of every kernel takes on a device with so many of torch's `threads`.

    A GPU is asked for larger singular value problems, as small ones only tell how fast kernels are started. Bytes of
    files pass the host's memory, and then page-locked memory on their way to a GPU.
    """
    gpu = device.type == "cuda"
    A = falling(4096, 2048, device) if gpu else falling(1536, 768, device)
    square, wide = A[:768, :768].contiguous(), torch.zeros(1 << 24)
    on_device, room = wide.to(device), torch.empty(wide.shape, pin_memory=gpu)
    core, double = A[:384, :384].contiguous(), A[:512, :512].double()
    kernels: dict[str, tuple[float, Callable[[], object]]] = {
        "single": (2 * 768**3, lambda: square @ square),
        "double": (2 * 512**3, lambda: double @ double),
        "eigen_single": (256**3, lambda: eigh(core[:256, :256])),
        "eigen": (384**3, lambda: eigh(double[:384, :384])),
        "leading": (32 * A.numel(), lambda: top_svd(A, 32)),
        "svd": (384**3, lambda: top_svd(core, 384)),
        "selected": (square.numel(), lambda: torch.kthvalue(square.reshape(-1), square.numel() // 2)),
        "sorted": (square.numel(), lambda: square.reshape(-1, 3072).argsort(dim=1, stable=True)),
        "random": (square.numel(), lambda: torch.rand(square.shape)),
        "bytes": (2 * wide.nbytes, lambda: on_device + 1.0),
    }
    speeds = {kernel: _seconds(call, device) / units for kernel, (units, call) in kernels.items()}
    to_gpu = (lambda: room.copy_(wide).to(device)) if gpu else None
    return speeds | {"files": speeds["bytes"] if to_gpu is None else _seconds(to_gpu, device) / wide.nbytes}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the least time of three calls, or of two that are long enough to be trusted; a GPU's first is not."""
    best = float("inf")
    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
    for i in range(3):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        if i and best > LONG:
            break
    return best
