"""Load the suite of a YAML file: tensors read on access, one transformers network per task, data in batches.

A network is loaded once, with its task's own model, and every state dict is copied into it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.errors import CheckpointError, DataError, listed
from epimer.evaluation.metrics import CLASSIFIER_SCORES, TOKEN_SCORES
from epimer.evaluation.suite import State, Suite, SuiteTask, classification_loss
from epimer.evaluation.suite_file import SuiteFile, TaskEntry, errors_at, read_suite_file
from epimer.plan.participants import Participant, align
from epimer.tasks.ctc import find_ctc_loss
from epimer.tasks.loading import CLASSIFIERS, Output, WithHead
from epimer.tasks.tables import Table
from epimer.tasks.task import load_task, sample_losses
from epimer.tasks.task_network import TaskNetwork, task_network

CACHE_BYTES = 1 << 28  # of a split's batches that are kept for the next evaluation


def read_suite(
    path: str | Path, *, device: str = "auto", keep: bool = True, labels: bool = True, progress: bool = False
) -> Suite:
    """Read a suite from its YAML file, in which paths are relative to its folder.

    `keep` holds every network and tensor in memory for many evaluations, otherwise there is one task's network at a
    time; `labels` refuses data without them.
    """
    file = read_suite_file(path, labels=labels, progress=progress)
    with errors_at(file.source, ("base",)):
        base = open_checkpoint(file.base, progress=progress)
    models = []
    for entry in file.tasks:
        with errors_at(file.source, (*entry.location, "model")):
            models.append(open_checkpoint(entry.model, progress=progress))
    participants = align(base, models, [entry.model for entry in file.tasks])
    ancestor, tuned, ties = participants.template, participants.models, participants.ties
    merged = _merged_names(file, ancestor, tuned)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = Networks(file, tuned, merged, device, keep=keep, labels=labels)

    def tensors(model: Participant) -> LazyTensors:
        return LazyTensors({name: model.headers[name] for name in merged}, model.read, keep=keep, ties=ties)

    states, tasks = [tensors(model) for model in tuned], [networks.task(entry) for entry in file.tasks]
    return Suite(file.name, tensors(ancestor), states, tasks, networks.network, batch=file.batch, names=networks.names)


def _merged_names(file: SuiteFile, base: Participant, models: Sequence[Participant]) -> list[str]:
    """Return the tensors that are merged: the base's, without those that belong to a task or that no model has."""
    classifier = [pattern for entry in file.tasks for pattern in entry.classifier]
    anywhere = set[str]().union(*(model.headers for model in models))
    merged = [name for name in base.headers if name in anywhere and not _matches(classifier, name)]
    for entry, model in zip(file.tasks, models, strict=True):
        for pattern in entry.classifier:
            if not any(fnmatchcase(name, pattern) for name in model.headers):
                raise file.source.error(
                    (*entry.location, "classifier"),
                    f"the model of task {entry.name!r} has no tensor {pattern!r}; it has {listed(model.headers)}: "
                    "'classifier' takes whole names or patterns such as 'classifier.*'.",
                )
        with errors_at(file.source, (*entry.location, "model")):
            _check_model(entry, model, base, merged, classifier)
    return merged


def _check_model(
    entry: TaskEntry, model: Participant, base: Participant, merged: Sequence[str], classifier: Sequence[str]
) -> None:
    """Refuse a model that does not have the merged tensors in the base's shapes, or that has others."""
    missing = [name for name in merged if name not in model.headers]
    if not merged or len(missing) == len(merged):
        raise CheckpointError(
            f"{entry.model} shares no tensor with the base: it has {listed(model.headers)}, the base "
            f"{listed(base.headers)}; is it a model of this ancestor, saved with the same prefix?"
        )
    if missing:
        raise CheckpointError(f"{entry.model} lacks {listed(missing)}, which the others have; give a whole model.")
    for name in merged:
        W, W0 = model.headers[name], base.headers[name]
        if W.shape != W0.shape:
            raise CheckpointError(
                f"{entry.model}[{name!r}] has shape {tuple(W.shape)}, the base's {tuple(W0.shape)}; "
                "if it belongs to the task, name it in 'classifier'."
            )
    added = [name for name, W in model.headers.items() if name not in base.headers and W.is_floating_point()]
    extra = [name for name in added if not _matches(classifier, name)]
    if extra and entry.head is None:
        raise CheckpointError(
            f"{entry.model} has {listed(extra)}, which the base lacks; name them in 'classifier' if they belong "
            "to the task, or give the task a 'head'."
        )


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- networks --------------------------------------------------------------------------------------------------------


class HeadFromFile(WithHead):
    """A model with a head; where the two do not fit, the error names the line of the file that names the head."""

    def __init__(self, plain: WithHead, errors: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(plain.backbone, plain.head, plain.pooling)
        self.errors = errors

    def forward(self, **inputs: Tensor) -> Output:
        with self.errors():
            return super().forward(**inputs)


@dataclass
class Networks:
    """One network per task, loaded when it is first needed."""

    file: SuiteFile
    models: Sequence[Participant]
    merged: Sequence[str]
    device: str
    keep: bool = True
    labels: bool = True
    """whether data without labels is an error"""
    _loaded: dict[str, TaskNetwork] = field(default_factory=dict)

    def task(self, entry: TaskEntry) -> SuiteTask:
        """Return a task whose data is read by its own model's tokenizer or image processor."""
        tokens = entry.kind not in CLASSIFIERS
        return SuiteTask(
            entry.name,
            entry.classes,
            {split: TableSplit(self, entry, table) for split, table in entry.tables.items()},
            score=(TOKEN_SCORES if tokens else CLASSIFIER_SCORES)[entry.metric],
            loss=sample_losses if tokens else classification_loss,
            metric=entry.metric,
            doubtful=entry.doubtful,
        )

    def network(self, state: State, task: SuiteTask) -> nn.Module:
        """Copy a state dict into the task's network; tensors that it lacks keep the values of the task's own model."""
        return self.loaded(task.name).copy(state)

    def names(self, task: SuiteTask) -> dict[str, str]:
        return self.loaded(task.name).names

    def loaded(self, name: str) -> TaskNetwork:
        """Return a task's network, loaded at the first call."""
        if name not in self._loaded:
            if not self.keep:
                self._loaded.clear()
            t = [entry.name for entry in self.file.tasks].index(name)
            entry, model = self.file.tasks[t], self.models[t]
            with errors_at(self.file.source, (*entry.location, "model")):
                self._loaded[name] = self._load(entry, model)
        return self._loaded[name]

    def _load(self, entry: TaskEntry, model: Participant) -> TaskNetwork:
        task = load_task(
            entry.model, entry.kind, head=entry.head, pooling=entry.pooling, dtype=self.file.dtype, device=self.device
        )
        if find_ctc_loss(task.model) is not None:
            problem = f"{entry.model} is trained by CTC, whose transcripts suites do not score"
            raise CheckpointError(f"{problem}; evaluate it by a function of your own (--eval module:function).")
        task.require_labels = self.labels
        if isinstance(task.model, WithHead):
            errors = partial(errors_at, self.file.source, (*entry.location, "head"))
            task.model = HeadFromFile(task.model, errors).eval()
        if entry.classes:
            if len(entry.classes) != task.classes:
                raise DataError(f"the model has {task.classes} classes, but 'classes' names {len(entry.classes)}.")
            task.label2id = {name: i for i, name in enumerate(entry.classes)}
        loaded = task_network(task, set(self.merged), model.stored)
        classifier = [pattern for other in self.file.tasks for pattern in other.classifier]
        foreign = [disk for name, disk in task.names.items() if name not in loaded.names]
        foreign = [disk for disk in foreign if not _matches(classifier, disk)]
        if foreign:
            raise CheckpointError(
                f"{entry.model} is run with {listed(foreign)}, which the base lacks; name them in 'classifier' if they "
                "belong to the task."
            )
        return loaded


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass
class TableSplit:
    """Rows of a table as batches for a task's network; those of a small split are prepared once."""

    networks: Networks
    entry: TaskEntry
    table: Table
    _cached: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        if order is None and self._cached is not None:
            yield from self._cached
            return
        file, nbytes = self.networks.file, 0
        prepared: list[Any] = []
        batches = self.networks.loaded(self.entry.name).task.batches(
            self.table,
            range(len(self)) if order is None else order.tolist(),
            batch_size=min(size, file.batch),
            max_length=file.max_length,
            **self.entry.columns,
        )
        for inputs, targets in batches:
            nbytes += sum(value.nbytes for value in inputs.values())
            if order is not None or not self.networks.keep or nbytes > CACHE_BYTES:
                prepared.clear()
            else:
                prepared.append((inputs, targets))
            yield inputs, targets
        self._cached = prepared or self._cached
