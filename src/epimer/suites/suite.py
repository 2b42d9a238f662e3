"""A suite: a base, its fine-tuned models, and for each its task, with data to choose on and data to report on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH = 500  # samples evaluated at a time


@dataclass(frozen=True)
class Split:
    """Inputs and their labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples, all or those of `order`, some at a time."""
        order = torch.arange(len(self)) if order is None else order
        order = order.to(self.y.device)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield self.x[some], self.y[some]


@dataclass(frozen=True)
class SuiteTask:
    """One task: what its classes are, and its data in splits that share no sample."""

    name: str
    classes: Sequence[str]
    head: Mapping[str, Tensor]
    """`weight` (classes x features) and `bias` of the frozen head"""
    splits: Mapping[str, Split]
    """train (what fine-tuning saw, and curvature is measured on), val (to choose on), test (to report on)"""


@dataclass(frozen=True)
class Suite:
    """Models of one ancestor, each with its task."""

    name: str
    base: Mapping[str, Tensor]
    models: Sequence[Mapping[str, Tensor]]
    tasks: Sequence[SuiteTask]
    network: Callable[[Mapping[str, Tensor], SuiteTask], nn.Module]
    """(state dict, task) -> the module whose output is the task's logits, in eval mode"""
    folder: Path
    """where base/, models/NAME/ and heads/NAME.safetensors lie, as anybody's models would"""

    def right(self, state: Mapping[str, Tensor], split: str) -> list[Tensor]:
        """Return for each task which samples a model gets right."""
        return [self.right_on(state, task, split) for task in self.tasks]

    @torch.no_grad()
    def right_on(self, state: Mapping[str, Tensor], task: SuiteTask, split: str) -> Tensor:
        """Return which of a task's samples a model gets right."""
        network, data = self.network(state, task), task.splits[split]
        return torch.cat([network(x).argmax(1) == y for x, y in data.batches(BATCH)]).cpu()
