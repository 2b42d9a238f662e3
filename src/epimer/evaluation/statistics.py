"""The uncertainty of scores: bootstrap intervals, and a paired test for two models on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 2000
MAX_INDICES = 1 << 22  # indices drawn at a time
FEW = 16  # distinct values up to which counts are drawn instead of samples


@dataclass(frozen=True)
class Scores:
    """How a model does on every task of a suite."""

    values: Sequence[Tensor]
    """per task, every sample's score, e.g. 1 where it is correct and 0 where not; higher is better"""

    @property
    def accuracies(self) -> list[float]:
        """The mean score per task."""
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
        """Return the 95% bootstrap interval of the average; samples are redrawn within each task."""
        means = _bootstrap_means([scores.double() for scores in self.values], seed)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high


@dataclass(frozen=True)
class Difference:
    """The difference of two averages, its 95% interval and the p-value of a paired test."""

    difference: float
    low: float
    high: float
    p: float


def compare(first: Scores, second: Scores, seed: int = 0) -> Difference:
    """Compare two models on the same samples: a bootstrap over their differences, and a two-sided sign-flip test.

    Under the null hypothesis it does not matter which of the two models gave which of a sample's two answers.
    """
    differences = [a.double() - b.double() for a, b in zip(first.values, second.values, strict=True)]
    observed = sum(float(d.mean()) for d in differences) / len(differences)
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.zeros(DRAWS, dtype=torch.float64)
    for d in differences:
        changed = d[d != 0]
        signs = torch.randint(0, 2, (DRAWS, len(changed)), generator=generator, dtype=torch.float64) * 2 - 1
        flipped += (signs @ changed) / len(d) / len(differences)
    extreme = int((flipped.abs() >= abs(observed) - 1e-12).sum())
    return Difference(observed, *Scores(differences).interval(seed), (extreme + 1) / (DRAWS + 1))


def _bootstrap_means(tasks: Sequence[Tensor], seed: int) -> Tensor:
    """Return, per bootstrap draw, the average over tasks of the mean over redrawn samples: [DRAWS]."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(DRAWS, dtype=torch.float64)
    for scores in tasks:
        n = len(scores)
        values, counts = torch.unique(scores, return_counts=True)
        if len(values) <= FEW:
            total += _bootstrap_sums(values.flip(0).tolist(), counts.flip(0).tolist(), generator) / n
            continue
        step = max(1, MAX_INDICES // n)
        for start in range(0, DRAWS, step):
            indices = torch.randint(0, n, (min(step, DRAWS - start), n), generator=generator)
            total[start : start + step] += scores[indices].mean(1)
    return total / len(tasks)


def _bootstrap_sums(values: list[float], counts: list[int], generator: torch.Generator) -> Tensor:
    """Return, per bootstrap draw, the sum over redrawn samples of a few distinct values, from multinomial counts."""
    rest = sum(counts)
    left, total = torch.full((DRAWS,), float(rest), dtype=torch.float64), torch.zeros(DRAWS, dtype=torch.float64)
    for value, count in zip(values[:-1], counts[:-1], strict=True):
        drawn = torch.binomial(left, torch.full_like(left, count / rest), generator=generator)
        total += value * drawn
        left, rest = left - drawn, rest - count
    return total + values[-1] * left
