"""Read one tensor of every model, and take its difference from the base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Rows
from epimer.checkpoints.page_locked import PINNED
from epimer.errors import TensorError
from epimer.geometry.linalg import LowRank, nonfinite
from epimer.plan.inputs import check_finite
from epimer.plan.jobs import Job
from epimer.plan.layer_curvature import NO_CURVATURE, LayerCurvature
from epimer.plan.participants import Participant, Participants

READERS = 4  # threads that read for a GPU


@dataclass
class Tensors:
    """What was read for one job."""

    base: Tensor | None
    models: list[Tensor | LowRank | None]
    """per model its tensor, or its difference from the base as factors; None once it has been used"""
    curvature: LayerCurvature = NO_CURVATURE
    streamed: bool = False
    """whether the tensors are read piece by piece as they are merged, and nothing has been read yet"""


def read_tensors(participants: Participants, job: Job, rows: Rows = None, *, factors: bool = True) -> Tensors:
    """Read one tensor, or some rows, of the base and of every model; an adapter's as the `factors` it adds."""
    base = participants.base

    def read(model: Participant) -> Tensor | LowRank:
        delta = model.delta(job.name, base, rows) if factors and base is not None and model is not base else None
        if delta is None:
            return model.read(job.name, rows)
        for factor in (delta.A, delta.B):
            check_finite(model, job.name, factor)
        return delta

    start, *models = _at_once(read, [base, *participants.models])
    assert not isinstance(start, LowRank)
    return Tensors(start, models)


def _at_once(
    read: Callable[[Participant], Tensor | LowRank], models: Sequence[Participant | None]
) -> list[Tensor | LowRank | None]:
    """Read every model; a GPU merges faster than one thread reads, so that there several do."""
    if not PINNED.get():
        return [None if one is None else read(one) for one in models]
    contexts = [copy_context() for _ in models]
    tasks = zip(contexts, models, strict=True)
    futures = [None if one is None else _readers().submit(context.run, read, one) for context, one in tasks]
    return [None if future is None else future.result() for future in futures]


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, thread_name_prefix="reader")


def task_vectors(
    participants: Participants, job: Job, start: Tensor | None, tensors: Tensors, device: torch.device
) -> list[Any]:
    """Return D_t = W_t - W0 in working precision, letting go of each model's tensor on the way."""
    deltas: list[Any] = []
    for t, model in enumerate(participants.models):
        W, tensors.models[t] = tensors.models[t], None
        assert W is not None
        if isinstance(W, LowRank):
            D = W.to(device, job.precision)
            deltas.append(D if job.factored and len(D.A) else D.dense().reshape(job.shape))
            continue
        E = W.to(device, non_blocking=True).to(job.precision)
        if start is not None:  # in place where that is nobody else's: what was read from a file, or has been converted
            E = E - start if E is W and model.checkpoint.in_memory else E.sub_(start)
        check_delta(participants, model, job, E)
        deltas.append(E.reshape(job.shape))
    return deltas


def check_deltas(participants: Participants, job: Job, deltas: Sequence[Tensor | LowRank]) -> None:
    """Refuse task vectors that are not finite."""
    for model, D in zip(participants.models, deltas, strict=True):
        if isinstance(D, Tensor):
            check_delta(participants, model, job, D)


def check_delta(participants: Participants, model: Participant, job: Job, D: Tensor) -> None:
    """Refuse a task vector that is not finite, and say whose fault it is."""
    if nonfinite(D):
        for one in (participants.base, model):
            if one is not None:
                check_finite(one, job.name, one.read(job.name, job.rows))
        raise TensorError(f"{model.label}[{job.name!r}] is too far from base for {D.dtype}; pass both in float64.")
