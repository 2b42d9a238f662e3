"""Folders with several arrays per tensor: a JSON header, and a safetensors file with `<tensor>.<part>` keys.

The header holds a hash of itself and a checksum of every array; those of earlier versions have
neither and are read too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from epimer.checkpoints.folder import inside, read_json
from epimer.checkpoints.safetensors import SafetensorsFile, description, tensor_checksum
from epimer.checksums import is_intact
from epimer.errors import CheckpointError, CurvatureError
from epimer.geometry.checks import not_finite

T = TypeVar("T")
CHECKSUMS = "checksums"
"""the key of a header under which it holds the checksum of every array of a file"""


def read_header(folder: Path, file: str, what: str, remedy: str, where: str) -> dict[str, Any]:
    """Return the JSON header in a folder; what is no such folder is refused with its remedy."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{where} is not a {what} folder: it does not exist or is not a folder.")
    if not (folder / file).exists():
        raise CheckpointError(f"{where} is not a {what} folder: it has no {file}; {remedy}.")
    return read_json(inside(folder, file), f"{where}/{file}")


def check_header(header: Mapping[str, Any], where: str, remedy: str) -> None:
    """Refuse a header whose hash does not fit; for after its values were checked, which says more."""
    if not is_intact(header):
        raise CurvatureError(f"{where} was damaged or edited: its sha256 does not fit; {remedy}.")


def check_files(files: Sequence[SafetensorsFile], checksums: Any, remedy: str) -> None:
    """Refuse files whose arrays are not all those of the checksums, where there are checksums."""
    if checksums is not None:
        found = {key: tensor_checksum(file.read(key)) for file in files for key in file.entries}
        if found != checksums:
            raise CurvatureError(f"{files[0].where} is damaged: its checksums do not fit; {remedy}.")


class TensorParts(Mapping[str, T]):
    """Tensor name -> the object that a subclass builds of its parts in a safetensors file, which are read lazily."""

    def __init__(self, path: Path, where: str, known: Collection[str], checksums: Any, remedy: str) -> None:
        """Open a file.

        Args:
            path: the safetensors file.
            where: what messages call it.
            known: the parts that tensors may have.
            checksums: of every array, as the folder's header has them; None where it has none.
            remedy: what to do about damage.
        """
        self.file, self.checksums, self.remedy = SafetensorsFile(path, where), checksums, remedy
        self._keys: dict[str, dict[str, str]] = {}
        for key in self.file.headers:
            name, _, part = key.rpartition(".")
            if part not in known or not name:
                raise CurvatureError(f"{where} holds {key!r}, expected tensors' {', '.join(sorted(known))}; {remedy}.")
            self._keys.setdefault(name, {})[part] = key
        if checksums is not None:
            listed = checksums.items() if isinstance(checksums, dict) else ()
            expected = {key: str(checksum).rpartition(" ")[0] for key, checksum in listed}
            if expected != {key: description(entry.W) for key, entry in self.file.entries.items()}:
                raise CurvatureError(f"{where} has other tensors than its header lists; {remedy}.")

    def headers(self, name: str) -> dict[str, Tensor]:
        """Return the parts of a tensor without their data."""
        return {part: self.file.headers[key] for part, key in self._keys[name].items()}

    def read(self, name: str) -> dict[str, Tensor]:
        """Return the parts of a tensor; refuse those that are damaged or not finite."""
        return {part: self._read(key) for part, key in self._keys[name].items()}

    def _read(self, key: str) -> Tensor:
        W = self.file.read(key)
        if self.checksums is not None and self.checksums[key] != tensor_checksum(W):
            raise CurvatureError(f"{self.file.where}: {key!r} is damaged: its checksum does not fit; {self.remedy}.")
        if problem := not_finite(repr(key), W):
            raise CurvatureError(f"{self.file.where}: {problem}; {self.remedy}.")
        return W

    def size(self, name: str) -> int:
        return sum(self.file.size(key) for key in self._keys[name].values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys
