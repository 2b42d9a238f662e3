"""Read PyTorch files: tensors by name, or a whole module, of which the tensors are taken and nothing is executed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows, allocate, header, is_text, sample_bytes, sample_ranges
from epimer.checkpoints.safe_unpickle import check_pickles, is_zip, module_tensors
from epimer.checkpoints.safetensors import as_bytes
from epimer.errors import CheckpointError, first_line, listed, short
from epimer.opened_files import OpenedFile, reason


class TorchFile(Checkpoint):
    """A state dict or a module saved with `torch.save`, whose tensors are read one by one."""

    def __init__(self, path: Path, where: str = "") -> None:
        self.path, self.files, self.where, self.name = path, [path], where or str(path), path.stem
        self._load()
        self.headers = {name: header(W.shape, W.dtype) for name, W in self._mapped.items()}
        self.ties = find_ties(self._mapped)

    def _load(self) -> None:
        self._file = OpenedFile(self.path, self.where)
        with self._file.open():
            self._mapped = load_tensors(self.path, self.where)
        self._regions = mapped_regions(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what holds in this process only."""
        return {**self.__dict__, "_mapped": None, "_regions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._load()

    def read(self, name: str, rows: Rows = None) -> Tensor:
        mapped = self._mapped[name] if rows is None else self._mapped[name][slice(*rows)]
        return read_mapped(mapped, self._file, self._regions)

    def sample(self, name: str) -> bytes:
        mapped = self._mapped[name]
        if not mapped.is_contiguous():
            return sample_bytes(self.read(name))
        flat = mapped.reshape(-1).view(torch.uint8)
        parts = (flat[start:stop] for start, stop in sample_ranges(len(flat)))
        return b"".join(bytes(as_bytes(read_mapped(part, self._file, self._regions))) for part in parts)


Regions = list[tuple[int, int, int]]
"""of memory that a file is mapped to: (first address, one past the last, offset in the file)"""


def mapped_regions(path: Path) -> Regions:
    """Return where a file is mapped into this process; nothing where the system does not tell."""
    inode, regions = str(path.stat().st_ino), []
    with suppress(OSError), open("/proc/self/maps") as lines:
        for addresses, _, offset, _, number, *_ in map(str.split, lines):
            if number == inode:
                start, stop = (int(address, 16) for address in addresses.split("-"))
                regions.append((start, stop, int(offset, 16)))
    return regions


def read_mapped(W: Tensor, file: OpenedFile, regions: Regions) -> Tensor:
    """Return a copy of a tensor in a mapped file by reading the file, not its pages in memory.

    A process that touches a mapped page which the file no longer has, as another process cut it, is ended by the
    system; and pages that were touched count as this process's memory.
    """
    start = W.data_ptr()
    region = next((one for one in regions if one[0] <= start < one[1]), None)
    if region is None or not W.numel():
        return W.clone(memory_format=torch.contiguous_format)
    spanned = 1 + sum((n - 1) * step for n, step in zip(W.shape, W.stride(), strict=True))
    copied = allocate((spanned,), W.dtype)
    file.fill(memoryview(as_bytes(copied)), start - region[0] + region[2])
    return copied.as_strided(W.shape, W.stride()).contiguous()


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
            inside = listed(loaded) if isinstance(loaded, Mapping) else type(loaded).__name__
            raise CheckpointError(f"{where} has no entry {key!r}; it holds {inside}.")
        loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__}, expected a state dict: names to tensors.")
    for name, value in loaded.items():
        _check_entry(name, value, path, where)
    return {name: value.detach().resolve_conj().resolve_neg() for name, value in loaded.items()}


def _check_entry(name: Any, value: Any, path: Path, where: str) -> None:
    """Refuse an entry of a state dict that is no tensor of plain numbers under a name."""
    nested = isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values())
    if nested and isinstance(name, str):
        raise CheckpointError(
            f"{where} keeps its state dict under {name!r}; take it out: "
            f"epimer convert {path.name} {path.stem}.safetensors --key {name}"
        )
    if not isinstance(name, str) or not isinstance(value, Tensor):
        raise CheckpointError(f"{where}: {short(name)} is a {type(value).__name__}, expected only tensors; save those.")
    if not is_text(name):
        raise CheckpointError(f"{where}: {name!r} is not text that can be written down; rename it.")
    if problem := not_dense(value):
        raise CheckpointError(f"{where}: {name!r} {problem}.")


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
        if not is_zip(path):
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
        check_pickles(path)  # before torch, which unpacks what is compressed and hashes whatever is a key
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {reason(error)}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} holds Python objects that would have to be executed to be read, which epimer never does; "
            f"where you trust the file, load it and save the tensors alone: torch.save({save}, path)."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch raises whatever a damaged file makes it stumble over
        problem = f"{where} is damaged or not a torch file ({first_line(error)})"
        raise CheckpointError(f"{problem}; download it again.") from error
