"""How models score: the settings that a sweep tried, a model on a suite of tasks, and a harness's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from epimer.records.record import Record


@dataclass(frozen=True)
class Score:
    """How one merge scores: the average over tasks with its 95% interval, the worst task, and every task."""

    method: str
    scale: float | None = None
    validation: float | None = None
    """the average on validation data, by which settings are chosen; everything else is on test data"""
    average: float | None = None
    low: float | None = None
    high: float | None = None
    worst: float | None = None
    tasks: Annotated[dict[str, float], BeforeValidator(lambda tasks: tasks or {})] = field(default_factory=dict)

    @property
    def worst_task(self) -> str:
        return min(self.tasks, key=lambda task: self.tasks[task]) if self.tasks else ""


@dataclass(frozen=True)
class Trial(Score):
    """One setting of a sweep; scores on test data only where it is the best of its method and rank."""

    rank: int | None = None
    unit: str | None = None
    """what scores are: accuracy, agreement, loss or perplexity (minus the loss), or score"""
    kl: float | None = None
    """mean KL from the predictions of the tasks' own models, where it was measured"""


@dataclass(frozen=True)
class MethodScore(Score):
    """A row of the experiment `performance`: a method at its best scale, or a model that is not merged."""

    edge: bool = False
    """the scale is the first or last of its grid"""
    seconds: float | None = None
    difference: float | None = None
    """from the method it is compared with"""
    p: float | None = None
    """of a paired test over samples"""
    p_holm: float | None = None
    """p, corrected for the number of comparisons"""
    p_tasks: float | None = None
    """of a paired test over tasks"""
    difference_without: dict[str, float] = field(default_factory=dict)
    """task -> the difference over the other tasks"""
    trusted: float | None = None
    """the average without doubtful tasks, where there are any"""
    difference_trusted: float | None = None
    reference: bool = False
    """not a merge: the base, or the fine-tuned models"""


@dataclass(frozen=True)
class SweepRecord(Record):
    """Methods, ranks and scales that were tried on the user's own evaluation: what `epimer sweep` writes."""

    kind: ClassVar[str] = "sweep"
    omitted: ClassVar[frozenset[str]] = frozenset({"kl"})

    eval: str
    data: list[Trial]
    best: Trial | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def unlabelled(self) -> bool:
        """Whether no label was read: settings were compared by how far they agree with the tasks' own models."""
        return any(trial.kl is not None for trial in self.data)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values; tasks are None where a trial has no scores on test data."""
        data = super().to_dict()
        for trial in (*data["data"], data["best"] or {}):
            trial["tasks"] = trial.get("tasks") or None
        return data


@dataclass(frozen=True)
class OverallScore:
    """The average score over all tasks, or that of the worst `task`, as its metric is known: a loss is a loss."""

    score: float
    low: float | None = None
    high: float | None = None
    base: float | None = None
    fine_tuned: float | None = None
    task: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class TaskScore:
    """A model's score on one task with its 95% interval, and the scores of the base and the fine-tuned model."""

    name: str
    metric: str
    samples: int
    score: float
    low: float
    high: float
    base: float | None = None
    fine_tuned: float | None = None


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """How one model does on a suite: what `epimer eval` writes."""

    kind: ClassVar[str] = "evaluation"
    omitted: ClassVar[frozenset[str]] = frozenset({"average", "worst", "base", "fine_tuned", "low", "high", "task"})

    suite: str
    model: str
    split: str
    tasks: list[TaskScore]
    average: OverallScore | None = None
    worst: OverallScore | None = None
    """both only where all tasks have one metric"""
    made: dict[str, Any] = field(default_factory=dict)
    """provenance: commit, versions, date, machine, command, and the most samples per task (None: all)"""


@dataclass(frozen=True)
class HarnessScore:
    """One number of a harness."""

    task: str
    metric: str
    score: float
    filter: str = "none"
    stderr: float | None = None
    samples: int | None = None

    @property
    def filtered_metric(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


@dataclass(frozen=True)
class HarnessRecord(Record):
    """How one model does in an evaluation harness such as lm-eval, one row per task and metric."""

    kind: ClassVar[str] = "harness"

    model: str
    harness: str
    results: list[HarnessScore]
    limit: int | None = None
