"""How sure a score is: bootstrap intervals over samples, and a paired test for two merges of the same models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 2000


@dataclass(frozen=True)
class Scores:
    """What a model gets right on every task of a suite."""

    right: Sequence[Tensor]
    """per task, which samples"""

    @property
    def accuracies(self) -> list[float]:
        """The share that is right, per task."""
        return [float(right.double().mean()) for right in self.right]

    @property
    def average(self) -> float:
        """The mean of the tasks' accuracies."""
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def worst(self) -> float:
        """The lowest of the tasks' accuracies."""
        return min(self.accuracies)

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return the 95% bootstrap interval of the average, samples drawn anew within each task."""
        means = _resampled([right.double() for right in self.right], seed)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high


def compare(one: Scores, other: Scores, seed: int = 0) -> tuple[float, float]:
    """Return by how much one average lies above another's, and the two-sided p of a paired sign-flip test.

    Under the null hypothesis it does not matter which of the two models gave which of a sample's two answers.
    """
    differences = [a.double() - b.double() for a, b in zip(one.right, other.right, strict=True)]
    observed = sum(float(d.mean()) for d in differences) / len(differences)
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.zeros(DRAWS, dtype=torch.float64)
    for d in differences:
        changed = d[d != 0]
        signs = torch.randint(0, 2, (DRAWS, len(changed)), generator=generator, dtype=torch.float64) * 2 - 1
        flipped += (signs @ changed) / len(d) / len(differences)
    as_far = int((flipped.abs() >= abs(observed) - 1e-12).sum())
    return observed, (as_far + 1) / (DRAWS + 1)


def _resampled(tasks: Sequence[Tensor], seed: int) -> Tensor:
    """Return the average over tasks of each resampled mean; a mean of 0s and 1s is binomial."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(DRAWS, dtype=torch.float64)
    for right in tasks:
        counts = torch.binomial(
            torch.full((DRAWS,), float(len(right)), dtype=torch.float64),
            right.mean().expand(DRAWS),
            generator=generator,
        )
        total += counts / len(right)
    return total / len(tasks)
