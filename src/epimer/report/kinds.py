"""The records a page is made of, as plain dataclasses; those of merges and diagnoses are `epimer.records`' own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field

from epimer.records import Diagnosis, MergeRecord
from epimer.report.numbers import Unit

Record = TypeVar("Record")


@dataclass(frozen=True)
class Score:
    """How one merge did: a row of the performance experiment, or a try of a sweep."""

    method: str
    average: float | None = None
    low: float | None = None
    high: float | None = None
    worst: float | None = None
    tasks: Annotated[dict[str, float], BeforeValidator(lambda given: given or {})] = field(default_factory=dict)
    validation: float | None = None
    """what it was chosen by"""
    kl: float | None = None
    """how far predictions are from those of the tasks' own models"""
    scale: float | None = None
    rank: int | None = None
    edge: bool = False
    """the scale is the last of its grid"""
    seconds: float | None = None
    difference: float | None = None
    p: float | None = None
    unit: str | None = None
    """what a sweep's scores are of"""
    reference: bool = False
    """no merge: the base, or the fine-tuned models"""

    @property
    def worst_task(self) -> str:
        """The task it serves worst."""
        return min(self.tasks, key=lambda task: self.tasks[task]) if self.tasks else ""


@dataclass(frozen=True)
class Lines:
    """Lines of points (x, y, low, high)."""

    kind: Literal["lines"]
    x: str
    y: str
    lines: dict[str, list[tuple[float, float, float, float]]]
    metric: str | None = None
    """what y is a score of, if it is one"""


@dataclass(frozen=True)
class Dots:
    """Rows of one value with its interval and a second value: (value, low, high, second)."""

    kind: Literal["dots"]
    x: str
    names: tuple[str, str]
    dots: dict[str, tuple[float, float, float, float]]
    metric: str | None = None
    """what the values are scores of, if they are"""
    log: bool = False


@dataclass(frozen=True)
class MapPoint:
    """A model on a landscape's plane."""

    name: str
    kind: str
    a: float
    b: float
    off: float = 0.0
    joint: float = math.nan
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Maps:
    """Losses on a grid of the plane, per task and summed: `maps[task][row of b][column of a]`."""

    kind: Literal["maps"]
    a: list[float]
    b: list[float]
    maps: dict[str, list[list[float]]]
    joint: list[list[float]]
    points: list[MapPoint]
    explained: float

    def __post_init__(self) -> None:
        """Refuse maps that do not fit the axes."""
        for name, losses in {"joint": self.joint, **self.maps}.items():
            if len(losses) != len(self.b) or any(len(row) != len(self.a) for row in losses):
                raise ValueError(f"map {name!r} is not of {len(self.b)} x {len(self.a)} values")
        for name, axis in (("a", self.a), ("b", self.b)):
            rising = all(low < high for low, high in pairwise(axis))
            if len(axis) < 2 or not rising or not all(map(math.isfinite, axis)):
                raise ValueError(f"{name} must be two or more rising numbers")


@dataclass(frozen=True)
class Experiment:
    """A table with the numbers behind it, and often a figure: what `epimer bench` and `epimer demo` write."""

    name: str
    title: str
    headings: list[str]
    rows: list[list[str]]
    data: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    figure: Annotated[Lines | Dots | Maps, Field(discriminator="kind")] | None = None
    suite: str = ""
    metric: str = "accuracy"
    """what scores are of; in `data` higher is better, so a loss is minus itself"""

    def __post_init__(self) -> None:
        """Refuse a table with holes."""
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError("a row has not as many cells as there are headings")


@dataclass(frozen=True)
class Performance:
    """Every method's scores on a suite."""

    suite: str
    scores: list[Score]
    against: str
    """what differences are taken from"""
    notes: list[str]
    metric: str = "accuracy"

    @property
    def merges(self) -> list[Score]:
        """The scores of merged models."""
        return [score for score in self.scores if not score.reference]

    @property
    def references(self) -> list[Score]:
        """The scores of the base and of the fine-tuned models."""
        return [score for score in self.scores if score.reference]

    @property
    def tasks(self) -> list[str]:
        """The tasks, in their order."""
        return list(dict.fromkeys(task for score in self.scores for task in score.tasks))

    @property
    def unit(self) -> Unit:
        """How the scores read."""
        return unit_of(self.scores, self.metric)

    @property
    def winner(self) -> Score | None:
        """The merge that did best on validation data; where there is none, on average."""
        merges = [score for score in self.merges if score.average is not None]
        if not merges:
            return None
        if all(score.validation is not None for score in merges):
            return max(merges, key=lambda score: score.validation or 0.0)
        return max(merges, key=lambda score: score.average or 0.0)


@dataclass(frozen=True)
class Sweep:
    """Methods, ranks and scales that were tried on the user's own measure."""

    eval: str
    data: list[Score]
    best: Score | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """A model's score on one task, as the metric is known, beside the base's and the task's own model's."""

    metric: str
    score: float
    low: float
    high: float
    name: str
    samples: int
    base: float | None = None
    fine_tuned: float | None = None


@dataclass(frozen=True)
class Overall:
    """The average over tasks, or the worst of them."""

    score: float
    low: float | None = None
    high: float | None = None
    task: str = ""
    base: float | None = None
    fine_tuned: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """How one model does on a suite: what `epimer eval` writes."""

    suite: str
    model: str
    split: str
    tasks: list[Judged]
    average: Overall | None = None
    worst: Overall | None = None
    """both only where all tasks are of one metric"""


@dataclass(frozen=True)
class HarnessRow:
    """One number of a harness."""

    task: str
    metric: str
    score: float
    filter: str = "none"
    stderr: float | None = None


@dataclass(frozen=True)
class Harness:
    """How one model does in a harness as lm-eval."""

    model: str
    harness: str
    results: list[HarnessRow]
    limit: int | None = None


@dataclass(frozen=True)
class Sourced(Generic[Record]):
    """A record and the file it came from."""

    record: Record
    source: str


@dataclass(frozen=True)
class Records:
    """All that goes into one page, in the order it was given."""

    performances: list[Sourced[Performance]] = field(default_factory=list)
    experiments: list[Sourced[Experiment]] = field(default_factory=list)
    """all of them, performances included"""
    diagnoses: list[Sourced[Diagnosis]] = field(default_factory=list)
    sweeps: list[Sourced[Sweep]] = field(default_factory=list)
    merges: list[Sourced[MergeRecord]] = field(default_factory=list)
    evaluations: list[Sourced[Evaluation]] = field(default_factory=list)
    harnesses: list[Sourced[Harness]] = field(default_factory=list)

    def named(self, name: str) -> list[Sourced[Experiment]]:
        """Return the experiments of a name."""
        return [one for one in self.experiments if one.record.name == name]

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return any(vars(self).values())


def unit_of(scores: Sequence[Score], metric: str | None = None) -> Unit:
    """Return how scores read: as those of a metric, or of the one that they name."""
    return Unit.of(
        (
            value
            for score in scores
            for value in (score.average, score.low, score.high, score.validation, *score.tasks.values())
        ),
        metric or next((score.unit for score in scores if score.unit), None),
    )
