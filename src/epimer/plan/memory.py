"""How much memory one tensor's merge takes, from its reading until its result is consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epimer.curvature.curvature import Curvature
from epimer.geometry.checks import WIDE
from epimer.geometry.linalg import CHUNK
from epimer.geometry.metric import Metric
from epimer.methods.averaging import average
from epimer.methods.full_space import FISHER
from epimer.methods.registry import Method, describe_method, list_methods
from epimer.methods.rules import AVERAGED, matrix_shape
from epimer.methods.workspace import Workload, workspace_bytes
from epimer.plan.curvature_inputs import metric_bytes
from epimer.plan.layer_curvature import Curvatures
from epimer.plan.participants import Participants

MARGIN = 1.2  # for what libraries take, and what the heap keeps in pieces too small to use
CHECKED = {"kronecker": 3 * 8, "ekfac": 8}  # bytes per entry of a factor while it is checked
RANK = 256  # from where on lower ranks are proposed where none is set
STORED = 4  # bytes per entry of curvature in a folder
SCRAPS, SCRAP_CHUNKS = 2.8, 10  # what the heap keeps of chunks that come and go: times their own size, and at least
STREAMED = 1 << 20  # entries that are read and summed at a time where entries stand alone
METHOD = "merge_method"  # what another method is called among settings

Smaller = tuple[str, Any, int]
"""an option, a value of it, and the bytes that the merge takes with it"""


@dataclass(frozen=True)
class CurvatureSize:
    """One tensor's curvature, all models' together, as far as memory depends on it."""

    bytes: int = 0
    kind: str | None = None
    inputs: int = 1
    """the dimension that the layer's inputs belong to"""
    in_memory: bool = False
    """nothing is read: it is the caller's"""


def curvature_size(curvatures: Curvatures | None, name: str) -> CurvatureSize:
    """Return what is known of a tensor's curvature without reading it."""
    known = [one for one in curvatures or () if name in one]
    if not known:
        return CurvatureSize()
    total = sum(metric_bytes(one, name) for one in known)
    stored = isinstance(known[0], Curvature) and known[0].file is not None
    return CurvatureSize(total, *_kind(known[0], name), in_memory=not stored)


def _kind(curvature: Mapping[str, Metric], name: str) -> tuple[str, int]:
    if isinstance(curvature, Curvature) and curvature.file is not None:
        kind = curvature.kind if curvature.provenance.basis is None else "projected"
        return kind, 0 if name in getattr(curvature.metrics, "inputs_first", ()) else 1
    metric: Any = curvature[name]
    return getattr(metric, "kind", "diagonal"), getattr(metric, "inputs", 1)


def bytes_to_read(participants: Participants, name: str) -> int:
    """Return the bytes of one tensor, of the base and of every model, that are not in memory yet."""
    return sum(one.size(name) for one in participants.all if not one.checkpoint.in_memory)


@dataclass(frozen=True)
class TensorInputs:
    """What one tensor's merge is made from, as far as memory depends on it."""

    tasks: int
    """models that take part"""
    dtype: torch.dtype
    """precision of the task vectors"""
    to_read: int
    """bytes of the models' tensors that are not in memory yet"""
    basis: int = 0
    """bytes of a basis that is read for it"""
    curvature: CurvatureSize = CurvatureSize()
    left_out: int = 0
    """models of weight 0, which are read and not merged"""
    streams: bool = False
    """whether some rows can be read alone, as they are merged, where entries stand alone"""


def workload(method: Method, rule: str, W: Tensor, inputs: TensorInputs, options: Any) -> tuple[Method, Workload]:
    """Return the method by which a tensor is merged under its rule, and what it has to do.

    `rule` is matrix, average, statistic, fisher or elementwise, `W` has the tensor's shape and dtype.
    """
    if rule in (*AVERAGED, "fisher"):
        method = describe_method("fisher" if rule == "fisher" else "average")
        options = FISHER if rule == "fisher" else options
    shape = matrix_shape(W) if rule == "matrix" and W.numel() else (1, W.numel())
    size, curvature = inputs.dtype.itemsize, inputs.curvature
    measured = 0 if rule in AVERAGED else curvature.bytes * size // STORED
    kind = curvature.kind if measured else method.curvature
    return method, Workload(shape, inputs.tasks, size, options, kind, measured, curvature.inputs)


def memory_of(method: Method, rule: str, W: Tensor, inputs: TensorInputs, options: Any) -> int:
    """Return the bytes that one tensor's merge takes at most: while it is read, converted or merged.

    `rule` is matrix, average, statistic, fisher or elementwise, `W` has the tensor's shape and dtype.
    """
    chunked = rule in AVERAGED or (rule == "elementwise" and method.separable)
    method, load = workload(method, rule, W, inputs, options)
    if chunked:
        load = replace(load, shape=(1, min(W.numel(), CHUNK)))
    size, basis, models, kind = load.itemsize, inputs.basis, inputs.tasks + inputs.left_out, load.kind
    held = (models + 1) * load.entries * size + basis
    if chunked:
        share = streamed_rows(W) / max(1, len(W)) if inputs.streams else 1.0
        working = workspace_bytes(method, load)
        if method.merge is average:  # which has one place for its sums
            blocks = 2 if W.dtype == inputs.dtype else 3  # in working precision: of a model, of their sum, of the base
            working = max(working, blocks * min(W.numel(), STREAMED) * size - held)
        elif W.numel() > CHUNK:
            working = int(SCRAPS * working)
        kept = SCRAP_CHUNKS * CHUNK * size if W.numel() > CHUNK else 0
        return int(MARGIN * (share * (inputs.to_read + W.nbytes) + held + working + kept))
    reads = 0 if inputs.curvature.in_memory else inputs.curvature.bytes
    widest = max(load.shape)
    checked = min(widest, WIDE) if kind == "kronecker" else widest  # wide factors are checked where they are used
    reading = inputs.to_read + basis + reads + (CHECKED.get(str(kind), 0) * checked**2 if load.curvature else 0)
    converting = held + max(reads, load.curvature) + (load.curvature // models if size != STORED else 0)
    merging = held + load.curvature + workspace_bytes(method, load)
    return int(MARGIN * max(reading, converting, merging))


def memory_in_float64(method: Method, rule: str, W: Tensor, inputs: TensorInputs, options: Any) -> int:
    """Return the bytes that a merge takes where it is done once more in float64, with all that the first one held."""
    models = inputs.tasks + inputs.left_out + 1
    first = models * W.numel() * inputs.dtype.itemsize + inputs.curvature.bytes + inputs.basis
    return first + memory_of(method, rule, W, replace(inputs, dtype=torch.float64), options)


def streamed_rows(W: Tensor) -> int:
    """Return how many rows of a streamed tensor are read at a time: as few blocks as hold it, of one size."""
    most = max(1, STREAMED // max(1, W[:1].numel()))
    return -(-len(W) // max(1, -(-len(W) // most)))


def smaller_settings(options: Any, estimate: Callable[[Any], int]) -> Iterator[Smaller]:
    """Yield values of a method's options under which a merge may take less memory, the nearest first."""
    basis = getattr(options, "basis", "tagged")
    if basis == "full":
        for narrower in ("tensor", "tagged"):
            yield "basis", narrower, estimate(replace(options, basis=narrower))
    elif hasattr(options, "rank") and isinstance(basis, str):
        rank = options.rank or RANK
        while rank > 1:
            rank //= 2
            yield "rank", rank, estimate(replace(options, rank=rank))


def smaller_merges(method: Method, rule: str, W: Tensor, inputs: TensorInputs, options: Any) -> Iterator[Smaller]:
    """Yield settings under which a merge may take less memory; then methods that solve in a basis without curvature."""
    yield from smaller_settings(options, partial(memory_of, method, rule, W, inputs))
    without = replace(inputs, curvature=CurvatureSize(inputs=inputs.curvature.inputs))
    for row in map(describe_method, list_methods() if W.dim() == 2 and rule not in AVERAGED else ()):
        if row.defaults.get("basis") in ("tagged", "tensor") and not row.needs_curvature and row.name != method.name:
            yield METHOD, row.name, memory_of(row, "matrix", W, without, row.resolve({}))
