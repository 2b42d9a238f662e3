"""Tensors in memory as a checkpoint: a state dict, a module, or another checkpoint whose tensors are kept when read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints.checkpoint import Checkpoint, Rows, nbytes
from epimer.checkpoints.torchfile import find_ties
from epimer.errors import TensorError
from epimer.geometry.linalg import LowRank

Model = Mapping[str, Tensor] | nn.Module
"""a state dict, or a module that has one"""


class StateDict(Checkpoint):
    """A state dict, or a module's. Nothing is copied, so what `read` returns belongs to the caller's models."""

    in_memory = True

    def __init__(self, model: Model, where: str) -> None:
        self.name = self.where = where
        tensors = state_of(model)
        if not isinstance(tensors, Mapping):
            raise TensorError(
                f"{where} must be a mapping from names to tensors, or an nn.Module, got {type(model).__name__}."
            )
        for name, value in tensors.items():
            if not isinstance(name, str):
                raise TensorError(f"{where} has a name {name!r} of type {type(name).__name__}; names must be strings.")
            if not isinstance(value, Tensor):
                raise TensorError(f"{where}[{name!r}] must be a tensor, got {type(value).__name__}.")
            if value.is_nested:  # it has no shape that could be compared
                raise TensorError(f"{where}[{name!r}] must be a dense tensor, got a nested one.")
        self.headers = {name: W.detach() for name, W in tensors.items()}
        self.ties = find_ties({name: W for name, W in self.headers.items() if self.problem(name) is None})

    def problem(self, name: str) -> str | None:
        W = self.headers[name]
        if W.is_meta:
            return "has no data (it is on the meta device)"
        return f"is stored as {W.layout}" if W.layout != torch.strided else None

    def read(self, name: str, rows: Rows = None) -> Tensor:
        W = self.headers[name]
        return W if rows is None else W[slice(*rows)]

    def shares(self, name: str, twin: str) -> bool:
        W, V = self.headers[name], self.headers[twin]
        return super().shares(name, twin) or (W.shape == V.shape and torch.equal(W, V))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile or data parallelism wraps, whose parameters have their own names."""
    module = getattr(module, "_orig_mod", module)
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) else module


def state_of(model: Model) -> Mapping[str, Tensor]:
    """Return the tensors of a module by name, without state that is no tensor; a mapping is returned as it is."""
    if not isinstance(model, nn.Module):
        return model
    return {name: W for name, W in unwrapped(model).state_dict().items() if isinstance(W, Tensor)}


def copy_with(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a deep copy of a module that has the given tensors and no gradients; what is tied stays tied.

    Refused is what the copy could not hold: different tensors for one that is tied, and another dtype.
    """
    module = unwrapped(module)
    own = state_of(module)
    remedy = "take merge_state_dicts, which returns the tensors"
    for name, twin in find_ties(own).items():
        if name in tensors and twin in tensors and not torch.equal(tensors[name], tensors[twin]):
            raise TensorError(
                f"base ties {name!r} to {twin!r}, and the models do not; untie them in base, or {remedy}."
            )
    for name, W in tensors.items():
        if W.dtype != own[name].dtype:
            raise TensorError(f"{name!r} is {own[name].dtype} in base, and its merge is {W.dtype}; {remedy}.")
    made = copy.deepcopy(module)
    made.zero_grad(set_to_none=True)
    made.load_state_dict(tensors, strict=False)  # what is not merged stays base's
    return made


class Cached(Checkpoint):
    """A checkpoint on disk whose tensors stay in memory once they are read, for several merges of the same models."""

    in_memory = True

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.name, self.where, self.folder = source, source.name, source.where, source.folder
        self.headers, self.ties, self.fingerprint = source.headers, source.ties, source.fingerprint
        self.files = source.files
        self._tensors: dict[str, Tensor] = {}
        self._deltas: dict[str, LowRank | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the checkpoint on disk to another process, not the tensors that are in memory here."""
        return _itself, (self.source,)

    @property
    def to_come(self) -> int:
        """The bytes that are not in memory yet."""
        return total_bytes(self) - sum(map(nbytes, self._tensors.values()))

    def read(self, name: str, rows: Rows = None) -> Tensor:
        place = self.ties.get(name, name)
        if place not in self._tensors:
            self._tensors[place] = self.source.read(name)
        W = self._tensors[place]
        return W if rows is None else W[slice(*rows)]

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        if name not in self._deltas:
            self._deltas[name] = self.source.delta(name, base)
        D = self._deltas[name]
        if D is None and rows is not None:  # a stack of experts, each of which may have factors
            return self.source.delta(name, base, rows)
        return D if D is None or rows is None else LowRank(D.B[slice(*rows)], D.A)

    def delta_rank(self, name: str, base: Checkpoint) -> int | None:
        return self.source.delta_rank(name, base)

    def size(self, name: str) -> int:
        return self.source.size(name)

    def sample(self, name: str) -> bytes:
        return self.source.sample(name)

    @property
    def folders(self) -> list[Path]:
        return self.source.folders

    def adapted_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return self.source.adapted_config(config)


def _itself(source: Checkpoint) -> Checkpoint:
    return source


def total_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of all tensors, tied ones counted once."""
    return sum(checkpoint.size(name) for name in checkpoint.headers if name not in checkpoint.ties)
