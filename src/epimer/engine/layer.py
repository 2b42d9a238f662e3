"""Merge one tensor's task vectors by its rule, once more in float64 where that fails; a failure names the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import torch

from epimer.engine.memory import ROOM
from epimer.errors import CurvatureError, NumericalError, TensorError
from epimer.geometry.decompositions import fallbacks
from epimer.geometry.linalg import Delta, LowRank
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import owned_by
from epimer.methods.averaging import average
from epimer.methods.full_space import FISHER, fisher
from epimer.methods.registry import Layer
from epimer.plan.jobs import Job
from epimer.plan.layer_curvature import LayerCurvature
from epimer.records import Status


def merge_layer(job: Job, layer: Layer, curvature: LayerCurvature, *, wide: bool = False) -> Solution:
    """Return the merged task vector of one tensor under its rule; its curvature is in the task vectors' precision.

    What overflows or does not converge in float32 is merged once more in float64, or at once with `wide`; the
    solution's note says so.
    """
    models = job.models
    if len(models) < len(job.weights):
        job, layer, curvature = without_zero_weights(job, layer, curvature)
    dtype = layer.deltas[0].dtype
    with named_failure(job.matrix, layer.deltas, models), fallbacks() as retried:
        try:
            if wide:
                raise NumericalError("its merge overflowed")
            solution = _merge_once(job, layer, curvature)
        except NumericalError as error:
            if dtype == torch.float64:
                raise
            retried[:] = [f"in float64, as {error}"]
            with nullcontext() if job.entrywise else ROOM.get()(job.matrix, job.memory_in_float64()):
                solution = _merge_once(job, *_in_float64(layer, curvature))
            solution = replace(solution, value=solution.value.to(dtype))
    if not retried:
        return solution
    status = solution.status if solution.status.remedy else Status.RETRIED
    notes = (solution.note, *dict.fromkeys(retried))
    return replace(solution, status=status, note="; ".join(note for note in notes if note))


def merge_stack(job: Job, layers: Sequence[Layer], curvatures: Sequence[LayerCurvature]) -> list[Solution | None]:
    """Return the merged task vectors of matrices of one shape under one job's settings, made at once.

    None stands for those that are to be merged one by one: where that cannot be done, or failed, or took another try,
    of which the record of a tensor of its own tells.
    """
    assert job.method is not None
    unsolved: list[Solution | None] = [None] * len(layers)
    if job.method.merge_stack is None:
        return unsolved
    known = [_with_curvature(layer, curvature) for layer, curvature in zip(layers, curvatures, strict=True)]
    with suppress(NumericalError, torch.OutOfMemoryError), fallbacks() as retried:
        solutions = job.method.merge_stack(known, job.options)
        return unsolved if retried else solutions
    return unsolved


@contextmanager
def named_failure(name: str, deltas: Sequence[Delta], models: Sequence[int]) -> Iterator[None]:
    """Name the tensor, and the model whose task vector failed or, where all were together, has the largest entries."""
    try:
        yield
    except NumericalError as error:
        sizes = [max(float(x.abs().max()) for x in _tensors(D) if x.numel()) for D in deltas]
        task = sizes.index(max(sizes)) if error.task is None else error.task
        raise TensorError(
            f"{name!r}: {error}; its task vector reaches {sizes[task]:.2g} in models[{models[task]}]: give it the rule "
            "'average' or 'copy', or repair that model or its curvature."
        ) from error


def _tensors(D: Delta) -> tuple[torch.Tensor, ...]:
    return (D.A, D.B) if isinstance(D, LowRank) else (D,)


def _in_float64(layer: Layer, curvature: LayerCurvature) -> tuple[Layer, LayerCurvature]:
    """Return task vectors, base and curvature in float64."""
    deltas = [D.to(torch.float64) for D in layer.deltas]
    base = None if layer.base is None else layer.base.double()
    known = replace(curvature, metrics=list(curvature.metrics))  # which conversion empties
    return replace(layer, deltas=deltas, base=base, atoms=None), known.converted(deltas[0])


def _merge_once(job: Job, layer: Layer, curvature: LayerCurvature) -> Solution:
    """Return the merged task vector of one tensor under its rule; its curvature is in the task vectors' precision."""
    assert job.method is not None
    if job.rule == "average":
        return average(layer, job.options)
    if job.method.needs_curvature and not curvature.metrics:
        return replace(average(layer, job.options), note="no curvature: averaged")
    layer = _with_curvature(layer, curvature)
    return fisher(layer, FISHER) if job.rule == "fisher" else job.method.merge(layer, job.options)


def _with_curvature(layer: Layer, curvature: LayerCurvature) -> Layer:
    return replace(layer, metrics=curvature.metrics, base_metric=curvature.base_metric, basis=curvature.basis)


def without_zero_weights(job: Job, layer: Layer, curvature: LayerCurvature) -> tuple[Job, Layer, LayerCurvature]:
    """Return the merge of one tensor without the models of weight 0, which thus shape neither basis nor count."""
    assert job.method is not None
    models, basis = job.models, curvature.basis
    if basis is not None:
        basis = owned_by(basis, models)
        if basis is None:
            zero = ", ".join(f"models[{t}]" for t, weight in enumerate(job.weights) if not weight)
            raise CurvatureError(
                f"the basis of {job.matrix!r} was built with {zero} of weight 0; leave that model out, or build "
                "the basis from the recipe with these weights (`epimer basis`)."
            )
    weights = [job.weights[t] for t in models]
    layer = replace(
        layer,
        deltas=[layer.deltas[t] for t in models],
        weights=weights,
        context=None if layer.context is None else [layer.context[t] for t in models],
    )
    metrics = [curvature.metrics[t] for t in models] if curvature.metrics else []
    job = replace(job, weights=weights, options=job.method.options_of(job.options, models))
    return job, layer, replace(curvature, metrics=metrics, basis=basis)
