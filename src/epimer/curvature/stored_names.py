"""Curvature by the names that a checkpoint on disk has, where transformers holds its tensors otherwise.

transformers joins experts that a checkpoint stores one by one: the matrix of an expert in memory may be one tensor on
disk, or two that are stacked (gate and up). The blocks of its curvature are those of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.curvature.curvature import Curvature
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Samples
from epimer.methods.rules import is_stack, member_name, with_members
from epimer.tasks.loading import holds
from epimer.tasks.task import Task


class Rows(NamedTuple):
    """A tensor on disk that holds some rows of a matrix in memory."""

    name: str
    start: int
    stop: int


def split_experts(task: Task) -> dict[str, list[Rows]]:
    """Return expert's matrix in memory -> the tensors on disk that it was joined from; their values must agree."""
    parameters, found = dict(task.model.named_parameters()), dict[str, list[Rows]]()
    for name in task.unmatched:
        W = parameters[name].detach()
        if is_stack(name, W.shape):
            for pattern in _patterns(task.checkpoint, W[0]):
                rows = [[part._replace(name=part.name.format(e)) for part in pattern] for e in range(len(W))]
                if all(holds(task.checkpoint, name, W[e][a:b]) for e, parts in enumerate(rows) for name, a, b in parts):
                    found |= {member_name(name, e): parts for e, parts in enumerate(rows)}
                    break
    return found


def _patterns(checkpoint: Checkpoint, W: Tensor) -> Iterator[list[Rows]]:
    """Yield the tensors that make up the first expert's matrix, with {} for its number: one, or two halves."""
    first = [name for name in checkpoint.headers if ".experts.0." in name]
    for count in (1, 2):
        size, rest = divmod(len(W), count)
        edges = [(i * size, (i + 1) * size) for i in range(count)]
        halves = [[name for name in first if holds(checkpoint, name, W[a:b])] for a, b in edges]
        if not rest and all(halves):
            names = [half[0].replace(".experts.0.", ".experts.{}.") for half in halves]
            yield [Rows(name, *edge) for name, edge in zip(names, edges, strict=True)]


def on_disk(curvature: Curvature, task: Task, split: dict[str, list[Rows]]) -> Curvature:
    """Return curvature by the names on disk; what has no name there is dropped."""
    renamed = curvature.renamed(with_members(task.names, curvature))
    metrics, counts = dict(renamed.metrics), dict(renamed.provenance.counts)
    left_out = dict(renamed.provenance.left_out)
    for name, parts in split.items():
        for part in parts if name in curvature.metrics else ():
            if (metric := _rows(curvature.metrics[name], part)) is None:
                left_out[part.name] = f"{curvature.kind} curvature of joined experts cannot be divided"
                continue
            metrics[part.name] = metric
            if name in curvature.provenance.counts:
                counts[part.name] = curvature.provenance.counts[name]
    return Curvature(metrics, replace(renamed.provenance, counts=counts, left_out=left_out), inputs=renamed.inputs)


def _rows(metric: Metric, part: Rows) -> Metric | None:
    """Return the curvature of some rows of a matrix; None where its kind has none."""
    rows = slice(part.start, part.stop)
    if isinstance(metric, Diagonal):
        return Diagonal(metric.F[rows].clone())
    if isinstance(metric, Kronecker) and metric.inputs == 1 and metric.G is not None:
        return replace(metric, G=metric.G[rows, rows].clone())
    if isinstance(metric, Samples):
        return replace(metric, g=metric.g[..., rows].clone())
    return None
