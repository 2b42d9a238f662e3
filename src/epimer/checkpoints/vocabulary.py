"""A checkpoint whose rows of embeddings and heads follow another tokenizer than its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows, header
from epimer.geometry.linalg import LowRank
from epimer.layer_names import before_layers, split_layer

Origin = tuple[tuple[Checkpoint, int], ...]
"""rows of checkpoints whose mean is a row of a table; a row of zeros where there is none"""
NOT_OF_TOKENS = ("position", "wpe", "token_type")


class Aligned(Checkpoint):
    """A checkpoint with tables of other rows: row i of each is the mean of the rows that `origins[i]` names.

    Other checkpoints have their tables under the same names; one without a head of its own uses its embeddings.
    """

    def __init__(self, source: Checkpoint, tables: Sequence[str], origins: Sequence[Origin]) -> None:
        self.source, self.name, self.where, self.folder = source, source.name, source.where, source.folder
        self.files, self.streams, self.in_memory = source.files, source.streams, source.in_memory
        self.tables, self.origins, self.ties = frozenset(tables), list(origins), source.ties
        self.rows = {source.headers[name].shape[0] for name in tables}
        self.headers = {
            name: header((len(origins), *W.shape[1:]), W.dtype) if name in self.tables else W
            for name, W in source.headers.items()
        }
        self.others = list({id(one): one for origin in origins for one, _ in origin if one is not source}.values())
        places = [[(id(one) == id(source), self._number(one), i) for one, i in origin] for origin in origins]
        self.order = hashlib.blake2b(repr(places).encode(), digest_size=16).digest()

    def _number(self, one: Checkpoint) -> int:
        return next((i for i, other in enumerate(self.others) if other is one), -1)

    def read(self, name: str, rows: Rows = None) -> Tensor:
        if name not in self.tables:
            return self.source.read(name, rows)
        W = self.headers[name] if rows is None else self.headers[name][slice(*rows)]
        found = torch.zeros(W.shape, dtype=W.dtype)
        origins = self.origins if rows is None else self.origins[slice(*rows)]
        for first, one, start, count in _runs(origins):
            found[first : first + count] = one.read(_table(one, name), (start, start + count)).to(W.dtype)
        for i, origin in enumerate(origins):
            if len(origin) > 1:
                each = [one.read(_table(one, name), (j, j + 1)).double() for one, j in origin]
                found[i] = torch.stack(each).mean(0)[0].to(W.dtype)
        return found

    def prefetch(self, name: str, rows: Rows = None) -> None:
        if name not in self.tables:
            self.source.prefetch(name, rows)

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        if name in self.tables:
            return None
        return self.source.delta(name, base.source if isinstance(base, Aligned) else base, rows)

    def size(self, name: str) -> int:
        return super().size(name) if name in self.tables else self.source.size(name)

    def problem(self, name: str) -> str | None:
        return self.source.problem(name)

    def sample(self, name: str) -> bytes:
        if name not in self.tables:
            return self.source.sample(name)
        others = (one.sample(_table(one, name)) for one in self.others)
        return b"".join([self.source.sample(name), self.order, *others])

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return [entry for one in (self.source, *self.others) for entry in one.state]

    @property
    def folders(self) -> list[Path]:
        return self.source.folders

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.source.tokenizer_folder

    def adapted_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the number of rows as the size of the vocabulary."""
        return _with_vocabulary(self.source.adapted_config(config), self.rows, len(self.origins))


def _with_vocabulary(config: Mapping[str, Any], old: set[int], size: int) -> dict[str, Any]:
    return {
        key: _with_vocabulary(value, old, size)
        if isinstance(value, dict)
        else size
        if key == "vocab_size" and value in old
        else value
        for key, value in config.items()
    }


def _table(one: Checkpoint, name: str) -> str:
    """Return the name of a checkpoint's table: its embeddings where it has no head of its own."""
    return (
        name if name in one.headers else next(other for other in token_tables(one.headers, 0) if before_layers(other))
    )


def _runs(origins: Sequence[Origin]) -> Iterator[tuple[int, Checkpoint, int, int]]:
    """Yield (first row, checkpoint, its first row, how many) of the rows that lie together in one checkpoint."""
    i = 0
    while i < len(origins):
        if len(origins[i]) != 1:
            i += 1
            continue
        (one, start), count = origins[i][0], 1
        while i + count < len(origins) and origins[i + count] == ((one, start + count),):
            count += 1
        yield i, one, start, count
        i += count


def token_tables(headers: Mapping[str, Tensor], tokens: int) -> list[str]:
    """Return the tensors with a row for every token: embeddings of no layer with enough rows, and what is as long.

    `tokens` is one more than the largest id.
    """
    outside = {name: W for name, W in headers.items() if split_layer(name) is None and W.dim()}
    lengths = {
        W.shape[0]
        for name, W in outside.items()
        if W.dim() == 2 and W.shape[0] >= tokens and before_layers(name) and not _of_other_things(name)
    }
    return [
        name
        for name, W in outside.items()
        if W.shape[0] in lengths and (W.dim() == 2 or name.endswith("bias")) and not _of_other_things(name)
    ]


def _of_other_things(name: str) -> bool:
    return any(word in name for word in NOT_OF_TOKENS)
