"""Batches of samples: pairs (inputs, targets), where inputs is a tensor, a tuple or a dict; or a dict with `labels`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epimer.errors import CurvatureError

IGNORED = -100  # the target that adds nothing to a loss, as in torch


@dataclass(frozen=True)
class Batch:
    """N samples and their targets."""

    inputs: Any
    targets: Any
    N: int
    squares: bool = False  # whether an input of shape [N, N] belongs to all samples: a mask over N tokens

    @property
    def mask(self) -> Tensor | None:
        """The padding mask among the inputs, [N, tokens] and True at real tokens, if there is one."""
        mask = self.inputs.get("attention_mask") if isinstance(self.inputs, Mapping) else None
        return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def run(self, model: Callable[..., Any]) -> Any:
        """Return the model's outputs."""
        if isinstance(self.inputs, Mapping):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, tuple | list) else model(self.inputs)

    def part(self, start: int, stop: int, *, repeats: int = 1) -> Batch:
        """Return the samples from `start` to `stop`, all of them `repeats` times."""
        first = _first(self.inputs)

        def cut(t: Tensor) -> Tensor:
            square = t is not first and t.shape == (self.N, self.N) and self.squares
            return torch.cat([t[start:stop]] * repeats) if t.dim() and len(t) == self.N and not square else t

        inputs, targets = _each(self.inputs, cut), _each(self.targets, cut)
        return replace(self, inputs=inputs, targets=targets, N=(min(stop, self.N) - start) * repeats)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        inputs, targets = (_each(value, lambda t: t.detach().to(device)) for value in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in a structure of dicts, tuples and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_each(item, change) for item in value)
    return value


def _first(value: Any) -> Tensor | None:
    """Return the first tensor with a dimension in a structure of dicts, tuples and lists."""
    tensors: list[Tensor] = []
    _each(value, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return next((t for t in tensors if t.dim()), None)


def read_batches(
    batches: Iterable[Any], samples: int | None, device: torch.device, ignore_index: int = IGNORED
) -> Iterator[Batch]:
    """Yield batches on a device until `samples` samples have been read; the last batch is cut to that number.

    Integer targets of `ignore_index` become -100.
    """
    seen = 0
    for i, given in enumerate(batches):
        inputs, targets = _inputs_and_targets(given, i)
        if isinstance(targets, Tensor) and not targets.is_floating_point() and ignore_index != IGNORED:
            targets = targets.masked_fill(targets == ignore_index, IGNORED)
        first = targets if isinstance(targets, Tensor) and targets.dim() else _first(inputs)
        if first is None:
            raise CurvatureError(f"batch {i} holds no tensor with a batch dimension; inputs must be torch tensors.")
        batch = Batch(inputs, targets, len(first)).to(device)
        if not batch.N:
            continue
        if samples is not None and seen + batch.N > samples:
            batch = batch.part(0, samples - seen)
        seen += batch.N
        yield batch
        if seen == samples:
            return
    if not seen:
        raise CurvatureError("there are no batches to measure on: batches is empty; give at least one sample.")


def _inputs_and_targets(batch: Any, i: int) -> tuple[Any, Any]:
    """Return a pair as it is, and a mapping as its entries but `labels`, and those."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}, batch.get("labels")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        problem = f"batch {i} is {type(batch).__name__}, expected a pair (inputs, targets) or a dict with 'labels'"
        raise CurvatureError(f"{problem}; targets may be None.")
    return batch[0], batch[1]
