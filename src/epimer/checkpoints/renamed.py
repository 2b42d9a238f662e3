"""A checkpoint whose tensors have names with another prefix, as other versions of a library save them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows
from epimer.checkpoints.layers import Assembled
from epimer.errors import CheckpointError, listed
from epimer.geometry.linalg import LowRank

MOST_WORDS = 4  # of a prefix that is suggested


class Renamed(Assembled):
    """A checkpoint in which prefixes of names, whose longest counts, are replaced by others."""

    def __init__(self, source: Checkpoint, prefixes: Mapping[str, str]) -> None:
        self.source, self.name, self.where, self.folder = source, source.name, source.where, source.folder
        self.files, self.streams, self.in_memory = source.files, source.streams, source.in_memory
        self.downloads = source.downloads
        names = {name: _renamed(name, prefixes) for name in source.headers}
        if unused := [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]:
            raise CheckpointError(f"{self.where} has no tensor whose name begins with {listed(unused)}, of 'prefix'.")
        twice = [new for new, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise CheckpointError(f"{self.where} has several tensors that 'prefix' gives the name {listed(twice)}.")
        self.places = {new: (source, name) for name, new in names.items()}
        self.headers = {new: source.headers[name] for name, new in names.items()}
        self.ties = {names[name]: names[twin] for name, twin in source.ties.items()}

    @property
    def folders(self) -> list[Path]:
        return self.source.folders

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.source.tokenizer_folder

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return self.source.state

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        inner = self.places[name][1]
        return self.source.delta(inner, base, rows) if inner == name else None

    def adapted_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return self.source.adapted_config(config)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its longest known prefix replaced."""
    known = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if known is None else prefixes[known] + name.removeprefix(known)


def find_prefix(headers: Mapping[str, Tensor], wanted: Mapping[str, Tensor], missing: Iterable[str]) -> dict[str, str]:
    """Return the prefix that most missing tensors have in a model, with the one in its place; {} for none.

    Names that fit without it follow with their own prefixes, as exceptions.

    Args:
        headers: of the model.
        wanted: the tensors that it should have.
        missing: the names among them that it lacks.
    """
    by_rest: dict[str, list[tuple[str, str]]] = {}
    for name in headers:
        for prefix, rest in _divisions(name):
            by_rest.setdefault(rest, []).append((prefix, name))
    votes: Counter[tuple[str, str]] = Counter()
    lacking = list(missing)
    for name in lacking:
        for new, rest in _divisions(name):
            fitting = [old for old, other in by_rest.get(rest, ()) if headers[other].shape == wanted[name].shape]
            if fitting:  # the longest common rest
                votes.update((old, new) for old in fitting)
                break
    ((old, new), count), *_ = votes.most_common(1) or [(("", ""), 0)]
    if 2 * count <= len(lacking):
        return {}
    unchanged = (name for name in headers if name in wanted and _renamed(name, {old: new}) not in wanted)
    exceptions = dict.fromkeys(f"{name.partition('.')[0]}." for name in unchanged if name.startswith(old))
    return {old: new} | {prefix: prefix for prefix in exceptions}


def _divisions(name: str) -> list[tuple[str, str]]:
    """Return the prefixes of a name, each with the rest: the empty one first."""
    words = name.split(".")
    most = min(MOST_WORDS, len(words) - 2)
    return [("".join(f"{word}." for word in words[:k]), ".".join(words[k:])) for k in range(max(0, most) + 1)]
