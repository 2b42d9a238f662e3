"""A suite of the unlabelled inputs that curvature keeps: merges are judged by each task's own model, not by labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.curvature.curvature import Curvature
from epimer.curvature.kept_inputs import MASK, PIXELS, WRITTEN, WRITTEN_MASK, KeptInputs
from epimer.errors import DataError
from epimer.evaluation.divergence import KEPT
from epimer.evaluation.suite import VALIDATING, Suite, SuiteTask, classification_loss, divided
from epimer.plan.participants import Participant, Participants
from epimer.tasks.labels import IGNORED
from epimer.tasks.loading import CLASSIFIERS, DTYPES
from epimer.tasks.task import load_task, sample_losses
from epimer.tasks.task_network import TaskNetwork, task_network

BATCH = 32  # samples evaluated at a time
LOGITS = 1 << 26  # bytes of a language model's predictions, at most, unless one text has more


def suite_of_inputs(
    models: Sequence[str],
    participants: Participants,
    curvatures: Sequence[Curvature],
    *,
    device: str = "auto",
    most: int | None = None,
) -> Suite | None:
    """Return a suite with one task per model, whose samples are the inputs that its curvature keeps; None without any.

    The splits are train (all inputs), val (three of four) and test (every fourth). Networks are loaded when they are
    first needed, and kept as far as `most` bytes hold them.

    Args:
        models: where each model is: a folder, a hub id or base+adapter.
        participants: the same models, opened, under the names that state dicts have.
        curvatures: one per model.
        device: of the networks; auto takes a GPU if there is one.
        most: bytes of the networks that are kept beside each other; None keeps all.
    """
    sources = sources_of(models, participants, curvatures)
    if sources is None:
        return None
    for source in sources:
        if len(source.inputs) < VALIDATING:
            raise DataError(
                f"{source.curvature.where} keeps {len(source.inputs)} inputs, and {VALIDATING} are the fewest that can "
                "be divided; measure it on more samples."
            )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    template, ties = participants.template, participants.ties
    names = task_names(models)
    networks = Networks(dict(zip(names, sources, strict=True)), set(template.headers), device, most)
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the curvature was measured in."""
        compute = self.curvature.provenance.compute
        return getattr(torch, compute) if compute in DTYPES else torch.float32

    @property
    def network_bytes(self) -> int:
        """The bytes of its network's parameters."""
        return self.dtype.itemsize * sum(W.numel() for W in self.participant.headers.values())

    @property
    def classes(self) -> int:
        """The size of a language model's vocabulary, or more: no matrix has more rows."""
        return max((len(W) for W in self.participant.headers.values() if W.dim() > 1), default=1)

    @property
    def longest(self) -> int:
        """The tokens of the longest text; of what is no text, a few hundred parts."""
        return self.inputs.tensors[MASK].shape[1] if MASK in self.inputs.tensors else 256

    @property
    def batch(self) -> int:
        """The most samples in a batch."""
        if self.inputs.counted is None:
            return BATCH
        return max(1, LOGITS // (torch.float32.itemsize * self.inputs.counted.shape[1] * self.classes))

    @property
    def held_bytes(self) -> int:
        """The bytes of its inputs and of its own model's predictions on them."""
        inputs = sum(value.nbytes for value in self.inputs.tensors.values())
        rows = len(self.inputs) if self.inputs.counted is None else int(self.inputs.counted.sum())
        return inputs + 2 * torch.float32.itemsize * rows * min(self.classes, KEPT)

    @property
    def batch_bytes(self) -> int:
        """The bytes of one batch: a few copies of its predictions and of the widest layer's inputs."""
        widest = max((W[0].numel() for W in self.participant.headers.values() if W.dim() > 1), default=1)
        entries = 0 if self.inputs.counted is None else self.inputs.counted.shape[1] * self.classes
        return 4 * self.dtype.itemsize * self.batch * (entries + self.longest * widest)


def sources_of(
    models: Sequence[str], participants: Participants, curvatures: Sequence[Curvature]
) -> list[Source] | None:
    """Return what the task of every model is loaded from; None unless each has inputs."""
    kept = [curvature.inputs for curvature in curvatures]
    sources = [
        Source(model, participant, inputs, curvature)
        for model, participant, inputs, curvature in zip(models, participants.models, kept, curvatures, strict=True)
        if inputs is not None
    ]
    return sources if len(sources) == len(models) else None


@dataclass
class Networks:
    """One network per task, loaded when it is first needed."""

    sources: dict[str, Source]
    known: set[str]
    """the names of state dicts"""
    device: str
    most: int | None = None
    """bytes of the networks in memory; the one in use is there whatever it takes"""
    _loaded: dict[str, TaskNetwork] = field(default_factory=dict)

    def task(self, name: str) -> SuiteTask:
        """Return a task without labels."""
        inputs = self.sources[name].inputs
        data = KeptSplit(inputs, self.device, self.sources[name].dtype, self.sources[name].batch)
        splits = divided(data, torch.arange(len(data)))
        # Not the inputs that curvature is measured on: it draws labels in their order.
        sorted_data = replace(data, by_length=True)
        splits |= {split: replace(splits[split], data=sorted_data) for split in ("val", "test")}
        return SuiteTask(
            name,
            (),
            splits,
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
            sizes = [self.sources[one].network_bytes for one in (name, *self._loaded)]
            if self.most is not None and sum(sizes) > self.most:
                self._loaded.clear()
            task = load_task(
                source.model,
                inputs.task,
                head=inputs.head or None,
                pooling=inputs.pooling,
                dtype=self.sources[name].dtype,
                device=self.device,
            )
            task.check_inputs(inputs.tensors, source.curvature.where)
            self._loaded[name] = task_network(task, self.known, source.participant.stored)
        return self._loaded[name]


def _no_labels(outputs: Any, targets: Any) -> NoReturn:
    raise DataError("there are no labels to score by: kept inputs are judged by agreement with each task's own model.")


@dataclass(frozen=True)
class KeptSplit:
    """Kept inputs as batches: texts are cut to the longest of their batch, targets only say which tokens count."""

    inputs: KeptInputs
    device: str
    dtype: torch.dtype
    """of pixels"""
    most: int = BATCH
    """samples in a batch"""
    by_length: bool = False
    """whether short texts come first, so that little padding is computed"""

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[dict[str, Tensor], Tensor | None]]:
        order = torch.arange(len(self)) if order is None else order.cpu()
        if self.by_length and MASK in self.inputs.tensors:
            order = order[self.inputs.tensors[MASK][order].sum(1).argsort(stable=True)]
        for rows in torch.split(order, min(size, self.most)):
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
