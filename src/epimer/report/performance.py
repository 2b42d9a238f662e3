"""The experiment `performance` as scores: every method on a suite, and which of them is best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from epimer.errors import DataError
from epimer.records import Experiment, MethodScore, Score, checked
from epimer.report.numbers import Unit


@dataclass(frozen=True)
class Performance(Experiment):
    """Every method's scores on a suite."""

    scores: list[MethodScore] = field(default_factory=list)

    @classmethod
    def of(cls, experiment: Experiment, where: str) -> Performance:
        """Return an experiment with its rows as scores; `where` names its file in errors."""
        scores = [checked(MethodScore, row, where, "data", i) for i, row in enumerate(experiment.data)]
        if not scores:
            raise DataError(f"{where}: data is empty; expected a row per method.")
        suite = experiment.suite or experiment.title.partition(": accuracy of merged models")[0]
        return cls(**{**vars(experiment), "suite": suite, "scores": scores})

    @property
    def against(self) -> str:
        """The method that differences are taken from."""
        return next((name.removeprefix("against ") for name in self.headings if name.startswith("against ")), "")

    @property
    def merges(self) -> list[MethodScore]:
        return [score for score in self.scores if not score.reference]

    @property
    def references(self) -> list[MethodScore]:
        """The scores of the base and of the fine-tuned models."""
        return [score for score in self.scores if score.reference]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for score in self.scores for task in score.tasks))

    @property
    def unit(self) -> Unit:
        return unit_of(self.scores, self.metric)

    @property
    def validated(self) -> bool:
        """Whether every merge has a score on validation data."""
        return all(score.validation is not None for score in self.merges)

    @property
    def chosen_by(self) -> str:
        """How the winner was chosen, in words."""
        return "chosen on validation data" if self.validated else "the best average"

    @property
    def winner(self) -> MethodScore | None:
        """The best merge on validation data; where a merge has no score there, on average."""
        merges = [score for score in self.merges if score.average is not None]
        return max(merges, key=lambda s: (s.validation if self.validated else s.average) or 0.0, default=None)


def unit_of(scores: Iterable[Score], metric: str | None = None) -> Unit:
    """Return how scores are shown: as those of a metric, or of the unit that a trial names."""
    scores = list(scores)
    values = [v for s in scores for v in (s.average, s.low, s.high, s.validation, *s.tasks.values())]
    return Unit.of(values, metric or next((unit for s in scores if (unit := getattr(s, "unit", None))), None))
