"""The memory that a method's arithmetic takes beside the task vectors and the curvature, counted before any is used.

Matrices are m x n with a long side l and a short side s, p = kT directions of a basis; N = mn. What is counted is what
is alive together where most is: a result never exceeds it, and `benchmarks/plans_hold.py` measures how near it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epimer.geometry import kronecker as solver

if TYPE_CHECKING:
    from epimer.methods.registry import Method

DOUBLE = 8  # bytes of what is solved and decomposed
PAIRS = 1 << 21  # entries of the largest temporary of an exact projection of a diagonal, if a row has not more
SMALL_PIECES = 1.25  # what the heap keeps of matrices under a megabyte
PIECE = 1 << 20  # bytes from where on a freed matrix is given back at once
ITERATE = 10  # vectors of conjugate gradients, with the solution and the reference of the solve


@dataclass(frozen=True)
class Workload:
    """One tensor to merge, as far as memory depends on it."""

    shape: tuple[int, int]
    """m x n; a tensor that is no matrix has one row"""
    tasks: int
    itemsize: int
    """bytes of an entry of the task vectors"""
    options: Any
    """the method's options for this tensor"""
    kind: str | None = None
    """of the curvature: diagonal, kronecker, ekfac, samples, projected or task-gram"""
    curvature: int = 0
    """bytes of all models' curvature, in the precision of the task vectors"""
    inputs: int = 1
    """the dimension that the layer's inputs belong to"""

    @property
    def entries(self) -> int:
        m, n = self.shape
        return m * n

    @property
    def basis(self) -> str:
        """tagged, tensor or full; a given basis of which no more is known counts as tensor, which takes most."""
        chosen = getattr(self.options, "basis", "tagged")
        return chosen if isinstance(chosen, str) else getattr(chosen, "kind", None) or "tensor"

    @property
    def rank(self) -> int:
        """Directions per task."""
        built = getattr(getattr(self.options, "basis", None), "rank", None)
        ceiling, rank = min(self.shape) // self.tasks, built or getattr(self.options, "rank", None)
        return ceiling if rank is None else min(rank, ceiling)

    @property
    def directions(self) -> int:
        return self.rank * self.tasks


def workspace_bytes(method: Method, load: Workload) -> int:
    """Return the bytes of a method's workspace, from its row: a function, or tensors per model and in any case."""
    if callable(method.workspace):
        return method.workspace(load)
    per_task, fixed = method.workspace
    entries = max(load.shape) ** 2 if method.squares else load.entries
    return int(entries * load.itemsize * (load.tasks * per_task + fixed))


# --- entry by entry ---


def elementwise(load: Workload) -> int:
    """Return the bytes of a solve with a diagonal on the full space, where one task vector at a time is in float64."""
    return DOUBLE * 8 * load.entries


def in_chunks(load: Workload) -> int:
    """Return the bytes of the same chunk by chunk, on a CPU: the merge, and one task's diagonal in float64."""
    return (DOUBLE + 2 * load.itemsize) * load.entries


def gradient_matching(load: Workload) -> int:
    """Return the bytes of weighing task vectors by diagonals, in chunks."""
    return in_chunks(load)


# --- singular vectors ---


def svd(load: Workload, k: int) -> int:
    """Return the bytes of `k` triples of one task vector, by the eigenvectors of its Gram matrix."""
    short, long = sorted(load.shape)
    if load.itemsize == DOUBLE:
        return DOUBLE * (3 * load.entries + 8 * short**2)
    return DOUBLE * (load.entries + 5 * short**2 + 2 * k * long)


def polar(load: Workload, p: int) -> int:
    """Return the bytes of the polar factor of `p` stacked columns of the long side, by QR and SVD where it must."""
    columns = max(load.shape) * p
    return DOUBLE * max(3 * columns + p**2 // 2, columns + 5 * p**2)


def triples(load: Workload) -> int:
    """Return the bytes of every task's leading singular triples; in float64 they are views of all of them."""
    width = min(load.shape) * load.tasks if load.itemsize == DOUBLE else load.directions
    return load.itemsize * width * sum(load.shape)


def basis(load: Workload) -> int:
    """Return the bytes of building a tagged basis: SVDs one after the other, then the stacks' polar factors."""
    stacks = load.itemsize * load.directions * sum(load.shape)  # of one side, or its factor
    return triples(load) + max(svd(load, load.rank), stacks + polar(load, load.directions))


def tsv(load: Workload) -> int:
    """Return the bytes of TSV-M: its basis, and the merge."""
    return max(basis(load), load.itemsize * (2 * load.directions * sum(load.shape) + 4 * load.entries))


def iso_c(load: Workload) -> int:
    """Return the bytes of Iso-C: a whole SVD of the sum."""
    side = min(load.shape)
    return svd(load, side) + 2 * load.itemsize * load.entries


def iso_cts(load: Workload) -> int:
    """Return the bytes of Iso-CTS: a weighted copy of every task vector, a whole SVD, and polar factors of its size."""
    side = min(load.shape)
    vectors = load.itemsize * side * sum(load.shape)
    work = max(svd(load, side) + 2 * load.itemsize * load.entries, 2 * vectors + polar(load, side))
    return load.itemsize * load.tasks * load.entries + vectors + work


# --- the one equation ---


def frechet(load: Workload) -> int:
    """Return the bytes of the one equation."""
    return equation(load, solve(load))


def equation(load: Workload, solving: int) -> int:
    """Return the bytes of building the basis, of solving in it or of calibrating the merge, whichever is most."""
    options, given = load.options, not isinstance(load.options.basis, str)
    anchor = options.anchored_at(load.basis)
    atoms = load.basis != "full" or anchor == "tsv"  # other anchors need no singular vectors of the tasks
    held = load.itemsize * load.directions * sum(load.shape) if atoms else 0
    building = basis(load) if atoms and not given else 0
    outside = not options.stays_in_subspace(load.basis) and load.basis != "full"
    solving += iso_c(load) if anchor == "iso_c" else load.itemsize * load.entries if outside else 0
    calibrating = 0 if options.calibrate is None else calibration(load, inside=load.basis == "tensor" and not outside)
    merged = 4 * load.itemsize * load.entries
    return max(building, held + max(solving, calibrating, merged))


def calibration(load: Workload, *, inside: bool) -> int:
    """Return the bytes of calibrating a merge: its SVD, then its products with one task vector at a time.

    `inside` all pairs of singular vectors the SVD is that of p x p coordinates, and the heap still has the solve's
    small matrices: about four of every task. Elsewhere it is one of the whole merge.
    """
    side, p, long = min(load.shape), load.directions, max(load.shape)
    if not inside:
        products = load.itemsize * (7 * load.entries + side**2)
        return max(svd(load, side) + 2 * load.itemsize * load.entries, products)
    kept = 4 * DOUBLE * load.tasks * p**2 if load.itemsize * p**2 < PIECE else 0
    return kept + DOUBLE * 8 * p**2 + load.itemsize * (3 * load.entries + 6 * p * long)


def solve(load: Workload) -> int:
    """Return the bytes of restricting every task's curvature to the subspace, and of the solve there."""
    full = load.basis == "full"
    p, q = load.shape if full else (load.directions, load.directions)
    tagged = load.basis == "tagged"
    match load.kind:
        case "diagonal" if full:
            return elementwise(load)
        case "diagonal" if tagged:
            return DOUBLE * 3 * load.entries + pairs(load)
        case "diagonal":
            return (DOUBLE * 3 + load.itemsize * 4) * load.entries + DOUBLE * ITERATE * p * q
        case "ekfac" if tagged:
            return DOUBLE * load.tasks * p**2 + pairs(load)
        case "ekfac":
            factors = 0 if full else load.itemsize * load.tasks * p * sum(load.shape)
            diagonals = load.tasks * (DOUBLE + load.itemsize) * load.entries
            return factors + diagonals + 3 * load.itemsize * load.entries + DOUBLE * (load.tasks + ITERATE) * p * q
        case "samples":
            return 2 * load.curvature + DOUBLE * (ITERATE - 2) * (p if tagged else p * q)
        case _ if tagged:
            return DOUBLE * (load.tasks + 6) * p**2 + load.itemsize * 2 * p * max(load.shape)
        case _ if full:
            return kronecker(load, p, q)
        case _:
            return int(SMALL_PIECES * kronecker(load, p, q))


def pairs(load: Workload) -> int:
    """Return the bytes of an exact projection of a diagonal on atoms, where no low rank is enough."""
    short, long = sorted(load.shape)
    entries = min(max(PAIRS, long * load.directions), long * load.directions**2)
    return int(load.itemsize * entries * (1 + 2 * short / long))


def kronecker(load: Workload, p: int, q: int) -> int:
    """Return the bytes of a solve with both factors of every task, on p x q coordinates.

    Factors that are formed for the merge are held in float64; those of the full space are the curvature itself. Narrow
    ones are stacked in the precision of the solve, with products [G_1 X, G_2 X, …] and their transpose; a wide one is
    in float64 while it is multiplied. The preconditioner has leading eigenvectors and a matrix of their pairs, or all
    eigenvectors of two factors.
    """
    factors, widest, full = p**2 + q**2, max(p, q) ** 2, load.basis == "full"
    item, stacked = min(DOUBLE, load.itemsize), max(p, q) <= solver.STACKED
    held = 0 if full and load.kind != "task-gram" else DOUBLE * load.tasks * factors
    pairs = min(solver.PAIRS, p * q)
    vectors = item * load.tasks * (min(p, solver.LEADING) * p + min(q, solver.LEADING) * q)
    leading = vectors + item * (pairs * (p + q) + 4 * pairs**2)
    stacks = item * load.tasks * (factors + 2 * p * q) if stacked else DOUBLE * widest
    decomposing = (item * load.tasks * factors + item * 4 * widest) if stacked else item * 2 * widest
    if load.options.damping < solver.SMALL_SHIFT:  # times what the largest leave, which is 1 at most
        leading = max(leading, vectors + item * (factors + 2 * p * q))
        decomposing += item * 4 * widest
    points = 0 if full else DOUBLE * load.tasks * p * q
    iterating = stacks + DOUBLE * ITERATE * p * q
    return held + points + leading + max(iterating, decomposing + DOUBLE * 4 * p * q)


def one_sided(load: Workload) -> int:
    """Return the bytes of a solve with the inputs' factors alone, which are formed one at a time and added up.

    The sum is decomposed by Cholesky's method; it may be singular where it is not damped, and then by its eigenvectors.
    """
    square = load.shape[load.inputs] ** 2
    if load.basis == "full":
        decomposed = 4 if load.options.damping > 0 else 5
        solving = DOUBLE * max(decomposed * square + 3 * load.entries, 3 * square + 8 * load.entries)
        return equation(load, load.itemsize * square + solving)
    return equation(load, solve(load))
