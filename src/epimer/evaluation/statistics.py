"""The uncertainty of scores: bootstrap intervals, paired tests over samples and over tasks, one task left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

DRAWS = 2000  # of the bootstrap
FLIPS = 20_000  # patterns of signs over samples
MAX_INDICES = 1 << 22  # indices drawn at a time
FEW = 16  # distinct values up to which counts are drawn instead of samples
EXACT = 14  # tasks up to which the test over tasks goes through all patterns of signs


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

    @property
    def averages_without_one(self) -> list[float]:
        """The average over the other tasks, for each task in turn; empty where there is only one."""
        total, others = sum(self.accuracies), len(self.values) - 1
        return [(total - one) / others for one in self.accuracies] if others else []

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return the 95% bootstrap interval of the average; samples are redrawn within each task."""
        means = _bootstrap_means([scores.double() for scores in self.values], seed)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high


@dataclass(frozen=True)
class Difference:
    """The difference of two averages, its 95% interval and the p-values of paired tests."""

    difference: float
    low: float
    high: float
    p: float
    """over samples: would the models differ as much on other samples of these tasks?"""
    p_tasks: float
    """over tasks: would they on other tasks?"""
    without_one: list[float]
    """the difference over the other tasks, for each task in turn; empty where there is only one"""


def compare(first: Scores, second: Scores, seed: int = 0) -> Difference:
    """Compare two models on the same samples: a bootstrap over their differences, and two-sided sign-flip tests.

    Under the null hypothesis it does not matter which of the two models gave which of a sample's two answers, or had
    which of a task's two scores.
    """
    differences = [a.double() - b.double() for a, b in zip(first.values, second.values, strict=True)]
    observed = sum(float(d.mean()) for d in differences) / len(differences)
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.zeros(FLIPS, dtype=torch.float64)
    for d in differences:
        changed = d[d != 0]
        step = max(1, MAX_INDICES // max(1, len(changed)))
        for part in torch.split(flipped, step):
            signs = torch.randint(0, 2, (len(part), len(changed)), generator=generator, dtype=torch.float64) * 2 - 1
            part += (signs @ changed) / len(d) / len(differences)
    extreme = int((flipped.abs() >= abs(observed) - 1e-12).sum())
    scores = Scores(differences)
    p, p_tasks = (extreme + 1) / (FLIPS + 1), sign_flip_p(scores.accuracies, seed)
    return Difference(observed, *scores.interval(seed), p, p_tasks, scores.averages_without_one)


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p of the sign-flip test: the share of all sign patterns with as large a sum.

    The differences are the units, e.g. one per task: with T of them p is at least 2 / 2^T. The test is exact up to
    `EXACT` of them; beyond, patterns are drawn.
    """
    values, T = torch.tensor(differences, dtype=torch.float64), len(differences)
    if exact := T <= EXACT:
        patterns = torch.arange(2**T)[:, None] >> torch.arange(T) & 1
    else:
        patterns = torch.randint(0, 2, (2**EXACT, T), generator=torch.Generator().manual_seed(seed))
    sums = (2 * patterns - 1).double() @ values
    extreme = int((sums.abs() >= abs(float(values.sum())) - 1e-12 * max(1.0, float(values.abs().sum()))).sum())
    return extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the order given."""
    order, count = sorted(range(len(p_values)), key=lambda i: p_values[i]), len(p_values)
    steps = accumulate((min(1.0, (count - rank) * p_values[i]) for rank, i in enumerate(order)), max)
    corrected = dict(zip(order, steps, strict=True))
    return [corrected[i] for i in range(count)]


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
