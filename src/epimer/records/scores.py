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
        """The task with the lowest score."""
        return min(self.tasks, key=lambda task: self.tasks[task]) if self.tasks else ""


@dataclass(frozen=True)
class Trial(Score):
    """One setting of a sweep; scores on test data only where it is the best of its method and rank."""

    rank: int | None = None
    unit: str | None = None
    """what scores are: accuracy, loss or perplexity (minus the loss), or score"""
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values; tasks are None where a trial has no scores on test data."""
        data = super().to_dict()
        for trial in (*data["data"], data["best"] or {}):
            trial["tasks"] = trial.get("tasks") or None
        return data


@dataclass(frozen=True)
class OverallScore:
    """The average score over all tasks, or the worst of them; a loss is a loss."""

    score: float
    low: float | None = None
    high: float | None = None
    """95% interval"""
    base: float | None = None
    """the base's score"""
    fine_tuned: float | None = None
    """that of the model fine-tuned for the task"""
    task: str | None = field(default=None, kw_only=True)
    """the worst task"""


@dataclass(frozen=True)
class TaskScore:
    """A model's score on one task as its metric is known, beside the base's and the fine-tuned model's."""

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
    """provenance: versions, date, and the most samples per task (None: all)"""


@dataclass(frozen=True)
class HarnessScore:
    """One number of a harness."""

    task: str
    metric: str
    score: float
    filter: str = "none"
    stderr: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class HarnessRecord(Record):
    """How one model does in an evaluation harness such as lm-eval, one row per task and metric."""

    kind: ClassVar[str] = "harness"

    model: str
    harness: str
    results: list[HarnessScore]
    limit: int | None = None
