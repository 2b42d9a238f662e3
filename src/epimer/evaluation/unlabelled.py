"""A suite of the unlabelled inputs that curvature keeps: merges are judged by each task's own model, not by labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.curvature.curvature import Curvature
from epimer.curvature.kept_inputs import MASK, PIXELS, WRITTEN, WRITTEN_MASK, KeptInputs
from epimer.errors import DataError
from epimer.evaluation.suite import HELD_OUT, Suite, SuiteTask, classification_loss, divided
from epimer.plan.participants import Participant, Participants
from epimer.tasks.labels import IGNORED
from epimer.tasks.loading import CLASSIFIERS, DTYPES
from epimer.tasks.task import load_task, sample_losses
from epimer.tasks.task_network import TaskNetwork, task_network

BATCH = 32  # samples evaluated at a time: a language model's predictions are large


def suite_of_inputs(
    models: Sequence[str], participants: Participants, curvatures: Sequence[Curvature], *, device: str = "auto"
) -> Suite | None:
    """Return a suite with one task per model, whose samples are the inputs that its curvature keeps; None without any.

    The splits are train (all inputs), val (three of four) and test (every fourth). Networks are loaded when they are
    first needed, and kept.

    Args:
        models: where each model is: a folder, a hub id or base+adapter.
        participants: the same models, opened, under the names that state dicts have.
        curvatures: one per model.
        device: of the networks; auto takes a GPU if there is one.
    """
    kept = [curvature.inputs for curvature in curvatures]
    sources = [
        Source(model, participant, inputs, curvature)
        for model, participant, inputs, curvature in zip(models, participants.models, kept, curvatures, strict=True)
        if inputs is not None
    ]
    if len(sources) < len(models):
        return None
    for source in sources:
        if len(source.inputs) < HELD_OUT:
            raise DataError(
                f"{source.curvature.where} keeps {len(source.inputs)} inputs, and {HELD_OUT} are the fewest that can "
                "be divided; measure it on more samples."
            )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    template, ties = participants.template, participants.ties
    names = task_names(models)
    networks = Networks(dict(zip(names, sources, strict=True)), set(template.headers), device, {})
    tasks = [networks.task(name) for name in names]

    def tensors(model: Participant) -> LazyTensors:
        shared = {name: model.headers[name] for name in template.headers if name in model.headers}
        return LazyTensors(shared, model.read, ties={name: twin for name, twin in ties.items() if twin in shared})

    return Suite(
        "kept inputs",
        tensors(template),
        [tensors(model) for model in participants.models],
        tasks,
        lambda state, task: networks.loaded(task.name).copy(state),
        batch=BATCH,
        names=lambda task: networks.loaded(task.name).names,
    )


def task_names(models: Sequence[str]) -> list[str]:
    """Return what to call the models' tasks: the last part of where a model is, numbered where that is not enough."""
    short = [Path(model).name or model for model in models]
    return [name if short.count(name) == 1 else f"{name} ({t})" for t, name in enumerate(short)]


@dataclass(frozen=True)
class Source:
    """What a task's network is loaded from, and its samples."""

    model: str
    participant: Participant
    inputs: KeptInputs
    curvature: Curvature


@dataclass
class Networks:
    """One network per task, loaded when it is first needed."""

    sources: dict[str, Source]
    known: set[str]
    """the names of state dicts"""
    device: str
    _loaded: dict[str, TaskNetwork]

    def task(self, name: str) -> SuiteTask:
        """Return a task without labels."""
        inputs = self.sources[name].inputs
        data = KeptSplit(inputs, self.device, self._dtype(name))
        return SuiteTask(
            name,
            (),
            divided(data, torch.arange(len(data))),
            head=inputs.head,
            score=_no_labels,
            loss=classification_loss if inputs.task in CLASSIFIERS else sample_losses,
            metric="agreement",
        )

    def loaded(self, name: str) -> TaskNetwork:
        """Return a task's network, loaded at the first call."""
        if name not in self._loaded:
            source = self.sources[name]
            inputs = source.inputs
            task = load_task(
                source.model,
                inputs.task,
                head=inputs.head or None,
                pooling=inputs.pooling,
                dtype=self._dtype(name),
                device=self.device,
            )
            task.check_inputs(inputs.tensors, source.curvature.where)
            self._loaded[name] = task_network(task, self.known, source.participant.stored)
        return self._loaded[name]

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the curvature was measured in."""
        compute = self.sources[name].curvature.provenance.compute
        return getattr(torch, compute) if compute in DTYPES else torch.float32


def _no_labels(outputs: Any, targets: Any) -> NoReturn:
    raise DataError("there are no labels to score by: kept inputs are judged by agreement with each task's own model.")


@dataclass(frozen=True)
class KeptSplit:
    """Kept inputs as batches: texts are cut to the longest of their batch, targets only say which tokens count."""

    inputs: KeptInputs
    device: str
    dtype: torch.dtype
    """of pixels"""

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[dict[str, Tensor], Tensor | None]]:
        order = torch.arange(len(self)) if order is None else order.cpu()
        for rows in torch.split(order, size):
            if len(rows):
                yield self._batch(rows)

    def _batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        chosen = {name: value[rows] for name, value in self.inputs.tensors.items()}
        if PIXELS in chosen:
            return {PIXELS: chosen[PIXELS].to(self.device, self.dtype)}, None
        read = int(chosen[MASK].sum(1).max())
        written = int(chosen[WRITTEN_MASK].sum(1).max()) if WRITTEN_MASK in chosen else read
        lengths = {name: written if name in WRITTEN else read for name in chosen}
        inputs = {name: value[:, : lengths[name]].to(self.device, torch.int64) for name, value in chosen.items()}
        if self.inputs.counted is None:
            return inputs, None
        counted = self.inputs.counted[rows, :written].to(self.device)
        return inputs, torch.where(counted, 0, IGNORED)
