"""Evaluate one model on every task of a suite, beside the base and the models that were fine-tuned for the tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.errors import CheckpointError, DataError, ParameterError, listed
from epimer.evaluation.metrics import unit
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import Data, Suite
from epimer.geometry.linalg import nonfinite
from epimer.progress import Progress
from epimer.records import EvaluationRecord, OverallScore, TaskScore, provenance
from epimer.score_format import between, natural, shown
from epimer.tasks.data import choose

SPLITS = ("test", "val")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class TaskScores:
    """Every sample's score on one task."""

    task: str
    metric: str
    model: Tensor
    base: Tensor | None = None
    fine_tuned: Tensor | None = None
    """of the model that was fine-tuned for this task"""

    def of(self, who: str) -> Scores:
        """Return the scores of model, base or fine_tuned."""
        return Scores([getattr(self, who)])


@dataclass(frozen=True)
class Evaluation:
    """How a model does on a suite."""

    suite: str
    model: str
    split: str
    tasks: list[TaskScores]
    references: bool
    made: Mapping[str, Any] = field(default_factory=dict)
    """by which versions, when, and of how many samples per task at most (None: all)"""

    @property
    def columns(self) -> tuple[str, ...]:
        """Whose scores there are."""
        return ("model", "base", "fine_tuned") if self.references else ("model",)

    @property
    def unit(self) -> str | None:
        """What all tasks are measured in; None where they differ, and an average would say nothing."""
        units = {unit(task.metric) for task in self.tasks}
        return units.pop() if len(units) == 1 else None

    def all(self, who: str) -> Scores:
        """Return the scores on all tasks."""
        return Scores([getattr(task, who) for task in self.tasks])

    def worst(self, who: str) -> TaskScores:
        """Return the task with the lowest score."""
        return min(self.tasks, key=lambda task: task.of(who).average)

    def rows(self) -> Iterator[list[str]]:
        """Yield the table's rows: task, metric, the model's score with its 95% interval, the references' scores."""
        for task in self.tasks:
            cells = [_cell(task.metric, task.of(who), bounds=who == "model") for who in self.columns]
            yield [task.task, task.metric, *cells]
        if self.unit is not None and len(self.tasks) > 1:
            cells = [_cell(self.unit, self.all(who), bounds=who == "model") for who in self.columns]
            yield ["average", self.unit, *cells]
            yield ["worst", self.unit, *(shown(self.unit, self.all(who).worst) for who in self.columns)]

    def record(self) -> EvaluationRecord:
        """Return the record of it, each score as its metric is known: shares from 0 to 1, losses as losses."""
        tasks = []
        for task in self.tasks:
            score, low, high = _numbers(task.metric, task.of("model"))
            others = {who: natural(task.metric, task.of(who).average) for who in self.columns[1:]}
            tasks.append(TaskScore(task.task, task.metric, len(task.model), score, low, high, **others))
        average = worst = None
        if self.unit is not None:
            means = [natural(self.unit, self.all(who).average) for who in self.columns[1:]]
            lowest = [natural(self.unit, self.all(who).worst) for who in self.columns]
            average = OverallScore(*_numbers(self.unit, self.all("model")), *means)
            worst = OverallScore(lowest[0], None, None, *lowest[1:], task=self.worst("model").task)
        return EvaluationRecord(self.suite, self.model, self.split, tasks, average, worst, dict(self.made))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON-ready values."""
        return self.record().to_dict()


def _cell(metric: str, scores: Scores, *, bounds: bool) -> str:
    text = shown(metric, scores.average)
    if not bounds:
        return text
    return f"{text} {between(metric, *scores.interval())}"


def _numbers(metric: str, scores: Scores) -> tuple[float, float, float]:
    """Return an average and the ends of its 95% interval, as the metric is known."""
    low, high = sorted(natural(metric, score) for score in scores.interval())
    return natural(metric, scores.average), low, high


def evaluate(
    suite: Suite,
    model: str,
    *,
    split: str = "test",
    limit: int | None = None,
    references: bool = True,
    progress: bool = False,
) -> Evaluation:
    """Evaluate a model folder, a hub id or `base+adapter` on every task.

    Args:
        suite: the tasks.
        model: what to evaluate, with the names of the suite's base.
        split: test or val.
        limit: take only this many samples of each task, the same ones every time.
        references: evaluate the base and each task's own model too.
        progress: show a bar on a terminal.
    """
    if split not in SPLITS:
        raise ParameterError(f"--split must be one of {', '.join(SPLITS)}, got {split!r}.")
    if limit is not None and limit < 1:
        raise ParameterError(f"--limit must be at least 1, got {limit}.")
    for task in suite.tasks:
        if split not in task.splits:
            known = ", ".join(one for one in task.splits if one in SPLITS) or "it has none"
            raise DataError(f"{suite.name}: task {task.name!r} has no {split} data; add it, or take --split ({known}).")
    state = Checked(open_checkpoint(model, progress=progress), suite)
    found = []
    with Progress(progress, unit="tasks") as bar:
        stage = bar.begin("evaluating", len(suite.tasks))
        for t, given in enumerate(suite.tasks):
            task = given if limit is None else replace(given, splits={split: _drawn(given.splits[split], limit)})
            who: dict[str, Mapping[str, Tensor]] = {"the model": state}
            if references:
                who |= {"the base": suite.base, "the fine-tuned model": suite.models[t]}
            scores = [suite.sure_scores(one, task, split, name) for name, one in who.items()]
            found.append(TaskScores(task.name, task.metric, *scores))
            stage.advance(1, task.name)
    return Evaluation(suite.name, model, split, found, references, provenance(limit=limit))


class Checked(Mapping[str, Tensor]):
    """A checkpoint's tensors under the names of a suite's base, each checked when it is read."""

    def __init__(self, checkpoint: Checkpoint, suite: Suite) -> None:
        self.checkpoint, self.names = checkpoint, list(suite.base)
        where = checkpoint.where
        missing = [name for name in self.names if name not in checkpoint.headers]
        if missing:
            raise CheckpointError(
                f"{where} lacks {len(missing)} of the {len(self.names)} tensors that {suite.name} is evaluated with: "
                f"{listed(missing)}; is it a merge of this suite's models?"
            )
        known = {NUMBER.sub("#", name) for name in self.names}
        more = [name for name in checkpoint.headers if name not in suite.base and NUMBER.sub("#", name) in known]
        if more:
            raise CheckpointError(
                f"{where} has {len(more)} tensors like those of {suite.name}'s base but of other numbers: "
                f"{listed(more)}; give a model with as many layers."
            )
        headers: Mapping[str, Tensor] = getattr(suite.base, "headers", suite.base)
        for name in self.names:
            shape, expected = tuple(checkpoint.headers[name].shape), tuple(headers[name].shape)
            if shape != expected:
                raise CheckpointError(
                    f"{where}[{name!r}] has shape {shape}, expected {expected} as in the base of {suite.name}; "
                    "give a model of its architecture."
                )

    def __getitem__(self, name: str) -> Tensor:
        W = self.checkpoint.read(name)
        if W.is_floating_point() and (bad := nonfinite(W)):
            raise CheckpointError(
                f"{self.checkpoint.where}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries; merge it again."
            )
        return W

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Drawn:
    """Some of a task's samples, drawn at random: a folder of images has them class by class."""

    data: Data
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield them, or those of them in `order`."""
        return self.data.batches(size, self.order if order is None else self.order[order])


def _drawn(data: Data, limit: int) -> Drawn:
    return Drawn(data, torch.tensor(sorted(choose(len(data), samples=limit, fraction=None, seed=0))))
