"""How sure a score is, by bootstrap and by a paired test for two merges of the same models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 2000
ROOM = 1 << 22  # samples drawn at a time
FEW = 16  # values that are counted instead


@dataclass(frozen=True)
class Scores:
    """How a model does on every task of a suite."""

    values: Sequence[Tensor]
    """per task, every sample's score: 1 or 0 where it is right or wrong; higher is better"""

    @property
    def accuracies(self) -> list[float]:
        """The mean score per task: the share that is right."""
        return [float(scores.double().mean()) for scores in self.values]

    @property
    def average(self) -> float:
        """The mean of the tasks' scores."""
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def worst(self) -> float:
        """The lowest of the tasks' scores."""
        return min(self.accuracies)

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return the 95% bootstrap interval of the average, samples drawn anew within each task."""
        means = _resampled([scores.double() for scores in self.values], seed)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high


@dataclass(frozen=True)
class Difference:
    """By how much one average lies above another's, with its 95% interval and the p of a paired test."""

    difference: float
    low: float
    high: float
    p: float


def compare(one: Scores, other: Scores, seed: int = 0) -> Difference:
    """Compare two models on the same samples: a bootstrap over their differences, and a two-sided sign-flip test.

    Under the null hypothesis it does not matter which of the two models gave which of a sample's two answers.
    """
    differences = [a.double() - b.double() for a, b in zip(one.values, other.values, strict=True)]
    observed = sum(float(d.mean()) for d in differences) / len(differences)
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.zeros(DRAWS, dtype=torch.float64)
    for d in differences:
        changed = d[d != 0]
        signs = torch.randint(0, 2, (DRAWS, len(changed)), generator=generator, dtype=torch.float64) * 2 - 1
        flipped += (signs @ changed) / len(d) / len(differences)
    as_far = int((flipped.abs() >= abs(observed) - 1e-12).sum())
    return Difference(observed, *Scores(differences).interval(seed), (as_far + 1) / (DRAWS + 1))


def _resampled(tasks: Sequence[Tensor], seed: int) -> Tensor:
    """Return the average over tasks of each task's mean over samples drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(DRAWS, dtype=torch.float64)
    for scores in tasks:
        n = len(scores)
        values, counts = torch.unique(scores, return_counts=True)
        if len(values) <= FEW:
            total += _counted(values.flip(0).tolist(), counts.flip(0).tolist(), generator) / n
            continue
        step = max(1, ROOM // n)
        for start in range(0, DRAWS, step):
            places = torch.randint(0, n, (min(step, DRAWS - start), n), generator=generator)
            total[start : start + step] += scores[places].mean(1)
    return total / len(tasks)


def _counted(values: list[float], counts: list[int], generator: torch.Generator) -> Tensor:
    """Return sums of as many draws as there are samples, by how often each of a few values is drawn."""
    rest = sum(counts)
    left, total = torch.full((DRAWS,), float(rest), dtype=torch.float64), torch.zeros(DRAWS, dtype=torch.float64)
    for value, count in zip(values[:-1], counts[:-1], strict=True):
        drawn = torch.binomial(left, torch.full_like(left, count / rest), generator=generator)
        total += value * drawn
        left, rest = left - drawn, rest - count
    return total + values[-1] * left
