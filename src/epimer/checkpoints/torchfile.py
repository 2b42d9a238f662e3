"""Read PyTorch files: tensors by name, or a whole module, of which the tensors are taken and nothing is executed."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows, header, is_text, sample_bytes
from epimer.checkpoints.safe_unpickle import module_tensors
from epimer.errors import CheckpointError, listed

REMAP = 1 << 28  # bytes read through a mapping before it is made anew, which gives its pages back


class TorchFile(Checkpoint):
    """A state dict or a module saved with `torch.save`, mapped rather than loaded."""

    def __init__(self, path: Path, where: str = "") -> None:
        self.path, self.files, self.where, self.name = path, [path], where or str(path), path.stem
        self._lock, self._touched = Lock(), 0
        self._tensors = load_tensors(path, self.where)
        self.headers = {name: header(W.shape, W.dtype) for name, W in self._tensors.items()}
        self.ties = find_ties(self._tensors)

    def read(self, name: str, rows: Rows = None) -> Tensor:
        with self._lock:
            if self._touched > REMAP:
                self._tensors, self._touched = load_tensors(self.path, self.where), 0
            self._touched += self.size(name)  # of the whole tensor, which is no less
            mapped = self._tensors[name] if rows is None else self._tensors[name][slice(*rows)]
        return mapped.clone(memory_format=torch.contiguous_format)

    def sample(self, name: str) -> bytes:
        return sample_bytes(self._tensors[name])


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that share the tensor of an earlier one."""
    first: dict[tuple[object, ...], str] = {}
    ties = {}
    for name, W in tensors.items():
        twin = first.setdefault((W.data_ptr(), W.device, W.dtype, W.shape, W.stride()), name)
        if twin != name and W.numel():
            ties[name] = twin
    return ties


def load_tensors(path: Path, where: str, *, key: str | None = None, mapped: bool = True) -> dict[str, Tensor]:
    """Return the state dict in a torch file, or that of the module in it, under `key` if it is nested."""
    try:
        loaded = load(path, where, mapped=mapped)
    except CheckpointError as error:
        holds_objects = isinstance(error.__cause__, pickle.UnpicklingError)
        loaded, key = module_tensors(path, where, key) if holds_objects else None, None
        if loaded is None:
            raise
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            inside = listed(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
            raise CheckpointError(f"{where} has no entry {key!r}; it holds {inside}.")
        loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__}, expected a state dict: names to tensors.")
    for name, value in loaded.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values()):
            raise CheckpointError(
                f"{where} keeps its state dict under {name!r}; take it out: "
                f"epimer convert {path.name} {path.stem}.safetensors --key {name}"
            )
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{where}: {name!r} is a {type(value).__name__}, expected only tensors; save those.")
        if not is_text(name):
            raise CheckpointError(f"{where}: {name!r} is not text that can be written down; rename it.")
        if problem := not_dense(value):
            raise CheckpointError(f"{where}: {name!r} {problem}.")
    return {name: value.detach().resolve_conj().resolve_neg() for name, value in loaded.items()}


def not_dense(value: Tensor) -> str | None:
    """Say why a tensor cannot be read as plain numbers, or None."""
    if value.is_quantized or value.is_meta or value.is_nested:
        return "is quantized, nested or without data, expected a dense tensor"
    if value.layout != torch.strided:
        return f"is stored as {value.layout}, expected a dense tensor"
    if value.nbytes > value.untyped_storage().nbytes():
        return "claims more entries than are stored; save it contiguous"
    return None


def load(path: Path, where: str, *, mapped: bool, save: str = "model.state_dict()") -> Any:
    """Return what a torch file holds; `save` is what to save instead where that would have to be executed."""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                start = file.read(8)
            if start == b"version ":
                raise CheckpointError(f"{where} is a Git LFS pointer, not the weights; run `git lfs pull` there.")
            if start.startswith(b"PK"):
                raise CheckpointError(f"{where} is cut short; copy or download it again.")
            if mapped:
                raise CheckpointError(
                    f"{where} is not in torch's zip format (old, or cut short), so it cannot be read tensor by tensor; "
                    f"convert it: epimer convert {path.name} {path.stem}.safetensors"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} holds Python objects that would have to be executed to be read, which epimer never does; "
            f"where you trust the file, load it and save the tensors alone: torch.save({save}, path)."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch raises whatever a damaged file makes it stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{where} is damaged or not a torch file ({reason}); download it again.") from error
