"""A suite: a base, its fine-tuned models, and for each its task, with data to choose on and data to report on.

Anything that can be written as a `Suite` can be benchmarked: `network` turns a state dict into a module, a task's
`splits` yield batches for it, and its `score` and `loss` grade the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from epimer.errors import DataError
from epimer.geometry.linalg import nonfinite
from epimer.machine import out_of_memory
from epimer.tasks.batches import Batch
from epimer.tasks.labels import IGNORED, logits_of

BATCH = 500  # samples evaluated at a time
VALIDATING = 4  # of inputs without labels every fourth validates what the others gave

State = Mapping[str, Tensor]
SampleFunction = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> one number per sample"""


class Data(Protocol):
    """Samples of a task, in a fixed order."""

    def __len__(self) -> int: ...

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of all samples, or of those with the indices `order`, at most `size` at a time.

        Inputs are a tensor, a tuple or a dict, and are passed to the network accordingly.
        """
        ...


@dataclass(frozen=True)
class Split:
    """Inputs and their labels, in memory."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self)) if order is None else order
        for indices in torch.split(order.to(self.y.device), size):
            if len(indices):
                yield self.x[indices], self.y[indices]


@dataclass(frozen=True)
class Subset:
    """The samples of a split with the given indices."""

    data: Data
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        return self.data.batches(size, self.indices if order is None else self.indices[order])


@dataclass(frozen=True)
class Unlabelled:
    """Samples without their labels: targets are None or, of texts, say which tokens count."""

    data: Data

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self.data.batches(size, order):
            tokens = isinstance(targets, Tensor) and targets.dim() > 1 and not targets.is_floating_point()
            yield inputs, torch.where(targets == IGNORED, IGNORED, 0) if tokens else None


def divided(data: Data, order: Tensor) -> dict[str, Subset]:
    """Return the samples with the indices `order` as train, and divided into val and, every fourth, test."""
    validating = torch.arange(len(order)) % VALIDATING == VALIDATING - 1
    parts = {"train": order, "val": order[~validating], "test": order[validating]}
    return {name: Subset(data, indices) for name, indices in parts.items()}


def correct(outputs: Any, targets: Tensor) -> Tensor:
    """Return 1 for each sample that a classifier predicts correctly, else 0; NaN where its logits hold NaN."""
    top = logits_of(outputs).max(1)
    return (top.indices == targets).double().masked_fill(top.values.isnan(), math.nan)


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy."""
    return cross_entropy(logits_of(outputs).float(), targets, reduction="none")


@dataclass(frozen=True)
class SuiteTask:
    """One task: its data in splits that share no sample, and how outputs are scored."""

    name: str
    classes: Sequence[str]
    """their names; labels are their numbers, from 0; empty where targets are not classes"""
    splits: Mapping[str, Data]
    """train (what fine-tuning saw, and curvature is measured on), val (to choose on), test (to report on)"""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """`weight` (classes x features) and `bias` of the frozen head, where it is not part of the models"""
    score: SampleFunction = correct
    """(outputs, targets) -> one number per sample, higher is better"""
    loss: SampleFunction = classification_loss
    """(outputs, targets) -> each sample's loss, whose curvature is measured"""
    metric: str = "accuracy"
    """what the mean score is: accuracy, token-accuracy, loss (minus the score), perplexity (exp of it), or any name"""
    doubtful: str = ""
    """why its scores say little, where they do: nothing is chosen by them, and averages are given without them too"""


@dataclass(frozen=True)
class Suite:
    """Models of one ancestor, each with its task."""

    name: str
    base: State
    models: Sequence[State]
    tasks: Sequence[SuiteTask]
    network: Callable[[State, SuiteTask], nn.Module]
    """(state dict, task) -> the module whose outputs are scored, in eval mode"""
    folder: Path | None = None
    """where curvature is cached between runs; None: nowhere"""
    batch: int = BATCH
    """samples evaluated at a time"""
    names: Callable[[SuiteTask], Mapping[str, str]] | None = None
    """parameter of a task's network -> its name in the state dicts; None where the two are the same"""
    untrained: str = "base"
    """what tables call the base with each task's head on it"""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """source -> method -> the average in percent that it reports, shown next to ours"""
    remarks: Sequence[str] = ()
    """notes for readers of the suite's tables"""

    def __post_init__(self) -> None:
        """Refuse a suite whose parts do not fit together."""
        names = [task.name for task in self.tasks]
        if len(self.models) != len(names):
            raise DataError(
                f"{self.name}: there are {len(self.models)} models and {len(names)} tasks; give every task its model."
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{self.name}: two tasks are named {twice!r}; give every task a different name.")

    @property
    def trusted(self) -> Suite:
        """The suite that choices are made by: without its doubtful tasks, unless it has no others."""
        kept = [t for t, task in enumerate(self.tasks) if not task.doubtful] or range(len(self.tasks))
        return replace(self, tasks=[self.tasks[t] for t in kept], models=[self.models[t] for t in kept])

    def truncated(self, **counts: int) -> Suite:
        """Return the suite with only the first samples of the named splits: `suite.truncated(val=100, test=400)`."""

        def first(name: str, data: Data) -> Data:
            return Subset(data, torch.arange(min(counts[name], len(data)))) if name in counts else data

        def cut(task: SuiteTask) -> SuiteTask:
            return replace(task, splits={name: first(name, data) for name, data in task.splits.items()})

        return replace(self, tasks=[cut(task) for task in self.tasks])

    def inputs_only(self, samples: int, seed: int = 0) -> Suite:
        """Return the suite on some training inputs: all of them as train, three of four as val, the others as test.

        Their labels are left out, so that nothing can read them.
        """

        def cut(task: SuiteTask) -> SuiteTask:
            if "train" not in task.splits:
                raise DataError(
                    f"{self.name}: task {task.name!r} has no train data, which inputs are taken from; add it."
                )
            data = Unlabelled(task.splits["train"])
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[: max(samples, 0)]
            if len(order) < VALIDATING:
                raise DataError(
                    f"{self.name}: task {task.name!r} has {len(order)} inputs to choose by, and {VALIDATING} are the "
                    "fewest that can be divided; take more samples."
                )
            return replace(task, splits=divided(data, order))

        return replace(self, tasks=[cut(task) for task in self.tasks])

    def scores(self, state: State, split: str) -> list[Tensor]:
        """Return every sample's score, per task."""
        return [self.scores_on(state, task, split) for task in self.tasks]

    def scores_on(self, state: State, task: SuiteTask, split: str) -> Tensor:
        """Return every sample's score on one task."""
        return self._per_sample(state, task, split, task.score)

    def finite_scores(self, state: State, task: SuiteTask, split: str, who: str = "the model") -> Tensor:
        """Return every sample's score on one task; refuse NaN and Inf."""
        return self.check_finite(self.scores_on(state, task, split), task, split, task.metric, who)

    def check_finite(self, scores: Tensor, task: SuiteTask, split: str, metric: str, who: str) -> Tensor:
        """Return the scores; refuse NaN and Inf among them."""
        if bad := nonfinite(scores):
            raise DataError(
                f"{self.name}: {who} gets NaN or Inf as {metric} on {bad} of {len(scores)} {split} samples of task "
                f"{task.name!r}; look for NaN in it and in the task's head, try a wider dtype, or correct the score."
            )
        return scores

    def losses(self, state: State, split: str) -> list[float]:
        """Return the mean loss per task."""
        return [float(self._per_sample(state, task, split, task.loss).mean()) for task in self.tasks]

    @torch.no_grad()
    def _per_sample(self, state: State, task: SuiteTask, split: str, function: SampleFunction) -> Tensor:
        """Return the function's value for every sample of a split, in batches that memory holds."""
        count = len(task.splits[split])
        if not count:
            raise DataError(f"{self.name}: task {task.name!r} has no sample in {split}; give at least one.")
        network, size = self.network(state, task), min(self.batch, count)
        while True:
            try:
                return self._in_batches(network, task, split, function, size)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    problem = f"there is too little memory for one {split} sample of task {task.name!r}"
                    raise DataError(f"{self.name}: {problem}; free some, or take another device.") from None
            size //= 2

    def _in_batches(
        self, network: nn.Module, task: SuiteTask, split: str, function: SampleFunction, size: int
    ) -> Tensor:
        """Return the function's value for every sample of a split, `size` of them at a time."""
        count, results = len(task.splits[split]), list[Tensor]()
        for inputs, targets in task.splits[split].batches(size):
            self._check_labels(task, split, targets)
            values = function(Batch(inputs, targets, 0).run(network), targets)
            if not isinstance(values, Tensor):
                raise DataError(
                    f"{self.name}: task {task.name!r} scores samples of {split} with a value of type "
                    f"{type(values).__name__}; expected a tensor with one number per sample."
                )
            results.append(values.double().cpu())
        if any(values.ndim != 1 for values in results) or sum(map(len, results)) != count:
            shapes = ", ".join(str(tuple(values.shape)) for values in results[:3]) or "none"
            raise DataError(
                f"{self.name}: task {task.name!r} scores {count} samples of {split} with values of shapes {shapes}; "
                "expected one number per sample."
            )
        return torch.cat(results)

    def _check_labels(self, task: SuiteTask, split: str, targets: Any) -> None:
        """Refuse a label that is not one of the task's classes."""
        labels = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
        if labels and task.classes and len(bad := targets[(targets < 0) | (targets >= len(task.classes))]):
            raise DataError(
                f"{self.name}: task {task.name!r} has label {int(bad[0])} in {split}, expected 0 to "
                f"{len(task.classes) - 1}, as it has {len(task.classes)} classes; correct the label, or leave "
                "`classes` empty where targets are not classes."
            )
