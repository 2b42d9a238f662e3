"""Evaluate one model on every task of a suite, next to the base and the models that were fine-tuned for the tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.errors import CheckpointError, DataError, ParameterError, listed
from epimer.evaluation.metrics import unit
from epimer.evaluation.provenance import provenance
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import State, Subset, Suite
from epimer.geometry.linalg import nonfinite
from epimer.progress import Progress
from epimer.records import EvaluationRecord, OverallScore, TaskScore
from epimer.score_format import format_interval, format_score, metric_value
from epimer.tasks.data import choose

SPLITS = ("test", "val")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class TaskScores:
    """Every sample's score on one task."""

    task: str
    metric: str
    scores: Mapping[str, Tensor]
    """of `model` and, where references were evaluated, of `base` and `fine_tuned`, the task's own model"""


@dataclass(frozen=True)
class Evaluation:
    """How a model does on a suite."""

    suite: str
    model: str
    split: str
    tasks: list[TaskScores]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """versions, date, machine, command, and the most samples per task (None: all)"""

    @property
    def columns(self) -> tuple[str, ...]:
        """Whose scores there are: model, base, fine_tuned, or the model's alone."""
        return tuple(self.tasks[0].scores)

    @property
    def unit(self) -> str | None:
        """The unit of all tasks; None where they differ, and an average would be meaningless."""
        units = {unit(task.metric) for task in self.tasks}
        return units.pop() if len(units) == 1 else None

    def scores(self, *tasks: TaskScores) -> dict[str, Scores]:
        """Return everyone's scores on some tasks, all of them by default."""
        return {who: Scores([task.scores[who] for task in tasks or self.tasks]) for who in self.columns}

    def rows(self) -> Iterator[list[str]]:
        """Yield the table's rows: task, metric, the model's score with its 95% interval, the references' scores."""
        for task in self.tasks:
            yield [task.task, task.metric, *_cells(task.metric, self.scores(task))]
        if self.unit is not None and len(self.tasks) > 1:
            total, metrics = self.scores(), {task.metric for task in self.tasks}
            metric = metrics.pop() if len(metrics) == 1 else self.unit
            yield ["average", metric, *_cells(self.unit, total)]
            yield ["worst", metric, *(format_score(self.unit, scores.worst) for scores in total.values())]

    def record(self) -> EvaluationRecord:
        """Return the record of it, in the metric's own values: shares from 0 to 1, losses as losses."""
        tasks = []
        for task in self.tasks:
            values = _values(task.metric, self.scores(task))
            tasks.append(TaskScore(task.task, task.metric, len(task.scores["model"]), *values))
        average = worst = None
        if self.unit is not None:
            total = self.scores()
            score, *references = (metric_value(self.unit, scores.worst) for scores in total.values())
            first = min(self.tasks, key=lambda task: self.scores(task)["model"].average)
            average = OverallScore(*_values(self.unit, total))
            worst = OverallScore(score, None, None, *references, task=first.task)
        return EvaluationRecord(self.suite, self.model, self.split, tasks, average, worst, dict(self.provenance))

    def to_dict(self) -> dict[str, Any]:
        return self.record().to_dict()


def _cells(metric: str, scores: Mapping[str, Scores]) -> list[str]:
    """Return table cells: every average, the model's with its interval."""
    model, *references = [format_score(metric, column.average) for column in scores.values()]
    return [f"{model} {format_interval(metric, *scores['model'].interval())}", *references]


def _values(metric: str, scores: Mapping[str, Scores]) -> Iterator[float]:
    """Yield the model's score and the ends of its interval, then the references' scores."""
    score, *references = (metric_value(metric, column.average) for column in scores.values())
    yield score
    yield from sorted(metric_value(metric, end) for end in scores["model"].interval())
    yield from references


def evaluate(
    suite: Suite,
    model: str,
    *,
    split: str = "test",
    limit: int | None = None,
    references: bool = True,
    progress: bool = False,
) -> Evaluation:
    """Evaluate a model folder, a hub id or `base+adapter`, with the tensor names of the suite's base, on every task.

    `limit` takes only so many samples of each task, the same ones every time; `references` evaluates the base and each
    task's fine-tuned model too.
    """
    if split not in SPLITS:
        raise ParameterError(f"--split must be one of {', '.join(SPLITS)}, got {split!r}.")
    for task in suite.tasks:
        if split not in task.splits:
            known = ", ".join(name for name in task.splits if name in SPLITS) or "it has none"
            raise DataError(f"{suite.name}: task {task.name!r} has no {split} data; add it, or take --split ({known}).")
    state = _open_model(model, suite, progress=progress)
    results = []
    with Progress(progress, unit="tasks") as bar:
        stage = bar.begin("evaluating", len(suite.tasks))
        for task, tuned in zip(suite.tasks, suite.models, strict=True):
            if limit is not None:  # at random, as folders of images are sorted by class
                chosen = sorted(choose(len(task.splits[split]), samples=limit, fraction=None, seed=0))
                task = replace(task, splits={split: Subset(task.splits[split], torch.tensor(chosen))})
            scores = {"model": suite.finite_scores(state, task, split, "the model")}
            if references:
                scores["base"] = suite.finite_scores(suite.base, task, split, "the base")
                scores["fine_tuned"] = suite.finite_scores(tuned, task, split, "the fine-tuned model")
            results.append(TaskScores(task.name, task.metric, scores))
            stage.advance(1, task.name)
    return Evaluation(suite.name, model, split, results, provenance(limit=limit))


def _open_model(model: str, suite: Suite, *, progress: bool) -> State:
    """Open a model as a state dict with the names of the suite's base; refuse one of another architecture."""
    checkpoint = open_checkpoint(model, progress=progress)
    where, headers = checkpoint.where, checkpoint.headers
    missing = [name for name in suite.base if name not in headers]
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of the {len(suite.base)} tensors that {suite.name} is evaluated with: "
            f"{listed(missing)}; is it a merge of this suite's models?"
        )
    patterns = {NUMBER.sub("#", name) for name in suite.base}
    extra = [name for name in headers if name not in suite.base and NUMBER.sub("#", name) in patterns]
    if extra:
        raise CheckpointError(
            f"{where} has {len(extra)} tensors like those of {suite.name}'s base but of other numbers: "
            f"{listed(extra)}; give a model with as many layers."
        )
    base: State = getattr(suite.base, "headers", suite.base)
    for name in suite.base:
        if headers[name].shape != base[name].shape:
            raise CheckpointError(
                f"{where}[{name!r}] has shape {tuple(headers[name].shape)}, expected {tuple(base[name].shape)} as in "
                f"the base of {suite.name}; give a model of its architecture."
            )
    return LazyTensors({name: headers[name] for name in suite.base}, partial(_read_finite, checkpoint))


def _read_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a tensor; refuse NaN and Inf."""
    W = checkpoint.read(name)
    if W.is_floating_point() and (bad := nonfinite(W)):
        raise CheckpointError(
            f"{checkpoint.where}[{name!r}] holds NaN or Inf in {bad} of {W.numel()} entries; merge it again."
        )
    return W
