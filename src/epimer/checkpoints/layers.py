"""A checkpoint assembled from the layers of others, renumbered: each of its tensors is a tensor of one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows
from epimer.errors import CheckpointError, listed
from epimer.geometry.linalg import LowRank
from epimer.layer_names import before_layers, module_of, split_layer

LAYER_COUNT = re.compile(r"(n|num)_(\w+_)?layers?|(en|de)coder_layers")
"""keys of config.json that may hold the number of layers"""
CLEARLY = 4  # times as many tensors as any other stack has one that is taken for the layers


class LayerRange(NamedTuple):
    """Some layers of a checkpoint: the first, and one past the last; all of it where there is no `stop`."""

    checkpoint: Checkpoint
    start: int = 0
    stop: int | None = None


class Assembled(Checkpoint):
    """A checkpoint of which each tensor is a tensor of another."""

    places: dict[str, tuple[Checkpoint, str]]
    """name -> the checkpoint that has the tensor, and its name there"""

    def read(self, name: str, rows: Rows = None) -> Tensor:
        source, inner = self.places[name]
        return source.read(inner, rows)

    def prefetch(self, name: str, rows: Rows = None) -> None:
        source, inner = self.places[name]
        source.prefetch(inner, rows)

    def size(self, name: str) -> int:
        source, inner = self.places[name]
        return source.size(inner)

    def problem(self, name: str) -> str | None:
        source, inner = self.places[name]
        return source.problem(inner)

    def sample(self, name: str) -> bytes:
        source, inner = self.places[name]
        return source.sample(inner)


class Stacked(Assembled):
    """The layers of several checkpoints on top of each other, for each module of a model.

    What belongs to no layer comes from the first checkpoint if it is an embedding, else (norm, head) from the last.
    Modules are named by a word of their tensors' names; the only one of most models has the name "".
    """

    def __init__(self, modules: Mapping[str, Sequence[LayerRange]], like: Checkpoint | None = None) -> None:
        self.modules = modules
        ranges = [one for each in modules.values() for one in each]
        self.like = like or ranges[0].checkpoint
        self.folder = self.like.folder
        self.sources = list({id(one.checkpoint): one.checkpoint for one in ranges}.values())
        self.name = "+".join(dict.fromkeys(one.name for one in self.sources))
        self.where = ", ".join(dict.fromkeys(one.where for one in self.sources))
        self.files = list(dict.fromkeys(file for one in self.sources for file in one.files))
        self.streams = all(one.streams for one in self.sources)
        self.in_memory = any(one.in_memory for one in self.sources)
        self.places = {}
        for module, each in modules.items():
            self.places.update(self._places(module, each))
        self.headers = {name: source.headers[inner] for name, (source, inner) in self.places.items()}
        self.ties = dict(self._ties())

    def _places(self, module: str, ranges: Sequence[LayerRange]) -> Iterator[tuple[str, tuple[Checkpoint, str]]]:
        """Yield a module's tensors by name, each with the checkpoint it lies in and its name there."""
        names = [self._names(one.checkpoint, module) for one in ranges]
        if len(ranges) == 1 and ranges[0].stop is None:
            yield from ((name, (ranges[0].checkpoint, name)) for name in names[0])
            return
        stacks = [layer_stack(one.checkpoint, each) for one, each in zip(ranges, names, strict=True)]
        for k, begins in ((0, True), (-1, False)):
            for name in names[k]:
                part = split_layer(name)
                if (part is None or part.stack != stacks[k]) and before_layers(name) is begins:
                    yield name, (ranges[k].checkpoint, name)
        below = 0
        for (source, start, stop), each, stack in zip(ranges, names, stacks, strict=True):
            end = layer_count(source, each) if stop is None else stop
            for name in each:
                part = split_layer(name)
                if part is not None and part.stack == stack and start <= part.number < end:
                    yield f"{stacks[0]}{below + part.number - start}{part.rest}", (source, name)
            below += end - start

    def _names(self, source: Checkpoint, module: str) -> list[str]:
        """Return the names of a module's tensors in a checkpoint."""
        every = tuple(self.modules)
        found = [name for name in source.headers if module_of(name, every) == module]
        if not found or (module and not any(module in name.split(".") for name in found)):
            raise CheckpointError(
                f"{source.where} has no tensor of the module {module!r}; modules are named by a word of their tensors' "
                f"names, as {listed(dict.fromkeys(name.split('.')[0] for name in source.headers))}."
            )
        return found

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Yield the names that lie in one checkpoint and are tied there."""
        first: dict[tuple[int, str], str] = {}
        for name, (source, inner) in self.places.items():
            twin = first.setdefault((id(source), source.ties.get(inner, inner)), name)
            if twin != name and split_layer(name) is None:
                yield name, twin

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys(folder for one in (self.like, *self.sources) for folder in one.folders))

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.like.tokenizer_folder

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return [entry for one in self.sources for entry in one.state]

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        source, inner = self.places[name]
        under, twin = base.places[name] if isinstance(base, Stacked) else (base, name)
        return source.delta(inner, under, rows) if twin == inner else None

    def adapted_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the number of these layers, and with its lists of one entry per layer in their order."""
        changed = self.like.adapted_config(config)
        for module, ranges in self.modules.items():
            if len(ranges) == 1 and ranges[0].stop is None:
                continue
            names = self._names(self.like, module)
            count = layer_count(self.like, names)
            numbers = [i for one in ranges for i in range(one.start, one.stop or layer_count(one.checkpoint, names))]
            changed = _with_layers(changed, count, numbers, layer_stack(self.like, names))
        return changed


def _with_layers(config: Mapping[str, Any], count: int, numbers: Sequence[int], stack: str) -> dict[str, Any]:
    """Return a config of `count` layers as one of the layers with these `numbers`."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and _is_of(key, stack):
            changed[key] = _with_layers(value, count, numbers, stack)
        elif LAYER_COUNT.fullmatch(key) and value == count:
            changed[key] = len(numbers)
        elif isinstance(value, list) and "layer" in key and len(value) == count and max(numbers) < count:
            changed[key] = [value[i] for i in numbers]
        else:
            changed[key] = value
    return changed


def _is_of(key: str, stack: str) -> bool:
    """Whether a part of a config, `vision_config`, can be about the layers of a stack."""
    kind = key.removesuffix("_config")
    return kind in stack if any(word in stack for word in ("vis", "audio")) else kind not in ("vision", "audio")


def layer_count(checkpoint: Checkpoint, names: Sequence[str]) -> int:
    """Return how many layers there are, going by the numbers in the names of a checkpoint's tensors."""
    stack = layer_stack(checkpoint, names)
    return 1 + max(part.number for name in names if (part := split_layer(name)) and part.stack == stack)


def layer_stack(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """Return what the names of the layers' tensors begin with, `model.layers.`; refuse several such stacks."""
    tensors = Counter(part.stack for name in names if (part := split_layer(name)))
    if not tensors:
        raise CheckpointError(f"{checkpoint.where} has no layers to take a range of: {listed(names)}.")
    (stack, most), *others = tensors.most_common(2)
    if others and others[0][1] * CLEARLY > most:
        raise CheckpointError(
            f"{checkpoint.where} has several stacks of layers, {stack!r} and {others[0][0]!r}; give slices for each "
            "under 'modules', named by a word of its tensors' names."
        )
    return stack
