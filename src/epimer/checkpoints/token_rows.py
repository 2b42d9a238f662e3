"""Rows of a table that an adapter trained alone, as PEFT stores them for `trainable_token_indices`.

The file holds the trained rows themselves (PEFT calls them a delta), adapter_config.json which rows of the table they
are: one list, or a list for every module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows

STORED = ".token_adapter.trainable_tokens_delta"


class TokenRows(NamedTuple):
    """Which rows of a table an adapter has."""

    key: str
    """the name of the trained rows, k x d"""
    indices: tuple[int, ...]
    """the row of the table that each of them is"""

    def put_into(self, W: Tensor, adapter: Checkpoint, rows: Rows) -> Tensor:
        """Return a table, or the rows `rows` of it, with the trained rows of the adapter's file in their places."""
        start, stop = (0, len(W)) if rows is None else rows
        places = [place for place, index in enumerate(self.indices) if start <= index < stop]
        if not places:
            return W
        trained = adapter.read(self.key, (places[0], places[-1] + 1))[[place - places[0] for place in places]]
        return W.index_copy(0, torch.tensor([self.indices[place] - start for place in places]), trained.to(W.dtype))


def token_indices(config: Mapping[str, Any], module: str) -> object:
    """Return what adapter_config.json gives as the rows of a module, found by the end of its name as PEFT does."""
    given = config.get("trainable_token_indices")
    if not isinstance(given, dict):
        return given
    fitting = [indices for name, indices in given.items() if module.endswith(name)]
    return fitting[0] if len(fitting) == 1 else None


def indices_problem(indices: object, trained: Tensor, table: Tensor) -> str | None:
    """Say why these are not the indices of trained rows in a table, given the headers of both; None if they are."""
    if not isinstance(indices, list) or any(type(index) is not int for index in indices):
        return f"trainable_token_indices is {repr(indices)[:40]}, expected a list of rows"
    fits = table.dim() == 2 and trained.shape == (len(indices), table.shape[1])
    if not fits or not trained.is_floating_point():
        given = f"{trained.dtype} of shape {tuple(trained.shape)}"
        return f"the file has rows, {given}, for {len(indices)} of a table of shape {tuple(table.shape)}"
    if twice := [index for index, count in Counter(indices).items() if count > 1]:
        return f"trainable_token_indices has row {twice[0]} twice"
    if outside := [index for index in indices if not 0 <= index < len(table)]:
        return f"trainable_token_indices has row {outside[0]}, but the base's table has rows 0 to {len(table) - 1}"
    return None
