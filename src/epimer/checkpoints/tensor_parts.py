"""Folders with several arrays per tensor: a JSON header, and a safetensors file with `<tensor>.<part>` keys."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from epimer.checkpoints.folder import inside, read_json
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.errors import CheckpointError

T = TypeVar("T")


def read_header(folder: Path, file: str, what: str, remedy: str, where: str) -> dict[str, Any]:
    """Return the JSON header in a folder; what is no such folder is refused with its remedy."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{where} is not a {what} folder: it does not exist or is not a folder.")
    if not (folder / file).exists():
        raise CheckpointError(f"{where} is not a {what} folder: it has no {file}; {remedy}.")
    return read_json(inside(folder, file), f"{where}/{file}")


class TensorParts(Mapping[str, T]):
    """Tensor name -> the object that a subclass builds of its parts in a safetensors file, which are read lazily."""

    def __init__(self, path: Path, where: str, known: Container[str]) -> None:
        self.file = SafetensorsFile(path, where)
        self._keys: dict[str, dict[str, str]] = {}
        for key in self.file.headers:
            name, _, part = key.rpartition(".")
            if part in known:
                self._keys.setdefault(name, {})[part] = key

    def read(self, name: str) -> dict[str, Tensor]:
        return {part: self.file.read(key) for part, key in self._keys[name].items()}

    def size(self, name: str) -> int:
        return sum(self.file.size(key) for key in self._keys[name].values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys
