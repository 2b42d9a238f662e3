"""A suite: a base, its fine-tuned models, and for each its task, with data to choose on and data to report on.

Anything that can be written as a `Suite` can be benched: `network` turns a state dict into a module, a task's `splits`
yield batches for it, and its `score` and `loss` judge the outputs.
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
from epimer.tasks.batches import Batch
from epimer.tasks.labels import logits_of

BATCH = 500  # samples evaluated at a time


class Data(Protocol):
    """Samples of a task, in a fixed order."""

    def __len__(self) -> int: ...

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of all samples, or of those in `order`, some at a time.

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
        """Yield the samples, all or those of `order`, some at a time."""
        order = torch.arange(len(self)) if order is None else order
        order = order.to(self.y.device)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield self.x[some], self.y[some]


@dataclass(frozen=True)
class Some:
    """The first samples of a split."""

    data: Data
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield the samples, some at a time."""
        return self.data.batches(size, torch.arange(len(self)) if order is None else order)


def right(outputs: Any, targets: Tensor) -> Tensor:
    """Return which samples a classifier gets right: 1 or 0 each, NaN where its logits hold NaN."""
    top = logits_of(outputs).max(1)
    return (top.indices == targets).double().masked_fill(top.values.isnan(), math.nan)


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy."""
    return cross_entropy(logits_of(outputs).float(), targets, reduction="none")


@dataclass(frozen=True)
class SuiteTask:
    """One task: its data in splits that share no sample, and how outputs are judged."""

    name: str
    classes: Sequence[str]
    """their names; labels are their numbers, from 0; empty where targets are no classes"""
    splits: Mapping[str, Data]
    """train (what fine-tuning saw, and curvature is measured on), val (to choose on), test (to report on)"""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """`weight` (classes x features) and `bias` of the frozen head, where it is not part of the models"""
    score: Callable[[Any, Any], Tensor] = right
    """(outputs, targets) -> one number per sample, higher is better"""
    loss: Callable[[Any, Any], Tensor] = classification_loss
    """(outputs, targets) -> each sample's loss, which curvature is measured of"""
    metric: str = "accuracy"
    """what the mean score is: accuracy, token-accuracy, loss (minus the score), perplexity (exp of it), or any name"""


@dataclass(frozen=True)
class Suite:
    """Models of one ancestor, each with its task."""

    name: str
    base: Mapping[str, Tensor]
    models: Sequence[Mapping[str, Tensor]]
    tasks: Sequence[SuiteTask]
    network: Callable[[Mapping[str, Tensor], SuiteTask], nn.Module]
    """(state dict, task) -> the module whose outputs are judged, in eval mode"""
    folder: Path | None = None
    """where curvature is kept between runs, where it may be"""
    batch: int = BATCH
    """samples evaluated at a time"""
    names: Callable[[SuiteTask], Mapping[str, str]] | None = None
    """parameter of a task's network -> its name in the state dicts; None where the two are the same"""
    untrained: str = "base"
    """what the base is called in tables, with each task's head on it"""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """who -> method -> the average in percent that they report, to be shown beside ours"""
    remarks: Sequence[str] = ()
    """what to know when reading the suite's tables"""

    def __post_init__(self) -> None:
        """Refuse a suite whose parts do not fit together."""
        names = [task.name for task in self.tasks]
        if len(self.models) != len(names):
            raise DataError(
                f"{self.name}: there are {len(self.models)} models and {len(names)} tasks; give every task its model."
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{self.name}: two tasks are named {twice!r}; give every task a name of its own.")

    def some(self, **counts: int) -> Suite:
        """Return the suite with only the first samples of the splits that are named."""

        def cut(task: SuiteTask) -> SuiteTask:
            splits = {name: Some(data, counts[name]) if name in counts else data for name, data in task.splits.items()}
            return replace(task, splits=splits)

        return replace(self, tasks=[cut(task) for task in self.tasks])

    def scores(self, state: Mapping[str, Tensor], split: str) -> list[Tensor]:
        """Return every sample's score, per task."""
        return [self.scores_on(state, task, split) for task in self.tasks]

    def scores_on(self, state: Mapping[str, Tensor], task: SuiteTask, split: str) -> Tensor:
        """Return every sample's score on one task."""
        return self._judged(state, task, split, task.score)

    def sure_scores(self, state: Mapping[str, Tensor], task: SuiteTask, split: str, who: str = "the model") -> Tensor:
        """Return every sample's score on one task; refuse any that is no number."""
        return self.sure(self.scores_on(state, task, split), task, split, task.metric, who)

    def sure(self, scores: Tensor, task: SuiteTask, split: str, metric: str, who: str = "the model") -> Tensor:
        """Return scores; refuse any that is no number."""
        if bad := nonfinite(scores):
            raise DataError(
                f"{self.name}: {who} gets NaN or Inf as {metric} on {bad} of {len(scores)} {split} samples of task "
                f"{task.name!r}; look for NaN in it and in the task's head, try a wider dtype, or mend the score."
            )
        return scores

    def losses(self, state: Mapping[str, Tensor], split: str) -> list[float]:
        """Return the mean loss per task."""
        return [float(self._judged(state, task, split, task.loss).mean()) for task in self.tasks]

    @torch.no_grad()
    def _judged(
        self, state: Mapping[str, Tensor], task: SuiteTask, split: str, judge: Callable[[Any, Any], Tensor]
    ) -> Tensor:
        count = len(task.splits[split])
        if not count:
            raise DataError(f"{self.name}: task {task.name!r} has no sample in {split}; give one at least.")
        network, found = self.network(state, task), list[Tensor]()
        for inputs, targets in task.splits[split].batches(self.batch):
            self._check_labels(task, split, targets)
            values = judge(Batch(inputs, targets, 0).run(network), targets)
            if not isinstance(values, Tensor):
                raise DataError(
                    f"{self.name}: task {task.name!r} judges samples of {split} by a value of type "
                    f"{type(values).__name__}; expected a tensor with one number per sample."
                )
            found.append(values.double().cpu())
        if any(one.ndim != 1 for one in found) or sum(map(len, found)) != count:
            shapes = ", ".join(str(tuple(one.shape)) for one in found[:3]) or "none"
            raise DataError(
                f"{self.name}: task {task.name!r} judges {count} samples of {split} by values of shapes {shapes}; "
                "expected one number per sample."
            )
        return torch.cat(found)

    def _check_labels(self, task: SuiteTask, split: str, targets: Any) -> None:
        """Refuse a label that is none of the task's classes."""
        labels = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
        if labels and task.classes and len(bad := targets[(targets < 0) | (targets >= len(task.classes))]):
            raise DataError(
                f"{self.name}: task {task.name!r} has label {int(bad[0])} in {split}, expected 0 to "
                f"{len(task.classes) - 1}, as it has {len(task.classes)} classes; mend the label, or leave `classes` "
                "empty where targets are no classes."
            )
