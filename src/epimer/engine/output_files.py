"""The files of a merged model's folder, here or in an object store, compared with the checksums of its record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.file_checksums import read_checksum
from epimer.checkpoints.folder import LARGEST
from epimer.checkpoints.object_store import StoreFile, all_files, explain_store_errors, filesystem, is_store
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.engine.output import RECORD
from epimer.errors import DataError, listed
from epimer.records import Check, MergeRecord, Outcome

OF_THE_HUB = (".gitattributes", ".git/", ".cache/huggingface/")
"""files that the hub and its tools put into a folder, from which nothing is loaded"""


@dataclass(frozen=True)
class OutputFiles:
    """A folder to read: its place, and the file system of its store where it is in one."""

    place: str
    store: Any = None
    path: str = ""
    """of the folder in its store"""

    @classmethod
    def open(cls, out: str | os.PathLike[str]) -> OutputFiles:
        """Return the folder at a path or an address; refuse one that has no record."""
        text = os.fspath(out)
        if is_store(text):
            folder = cls(text.rstrip("/"), *filesystem(text.rstrip("/"), DataError))
        else:
            folder = cls(os.path.abspath(os.path.expanduser(text)))
        if RECORD not in folder.sizes():
            raise DataError(
                f"{text} has no {RECORD}, so nothing says what it should be; give a folder that `epimer merge` or "
                "`epimer extract-lora` made."
            )
        return folder

    def sizes(self) -> dict[str, int]:
        """Return every file in it, by its path there, with its size."""
        with self._explained(self.place):
            if self.store is not None:
                return all_files(self.store, self.path)
            root = Path(self.place)
            paths = sorted(path for path in root.rglob("*") if path.is_file())
            return {path.relative_to(root).as_posix(): path.stat().st_size for path in paths}

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._explained(f"{self.place}/{name}"), self._open(name) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise DataError(f"{self.place}/{name} has more than {LARGEST} bytes, too large for a {name}; remove it.")
        return data

    def checksum(self, name: str, size: int, kind: str) -> tuple[str, dict[str, str]]:
        """Return the checksum of a file, crc32 or sha256 by its `kind`, and those of the tensors in it."""
        where = f"{self.place}/{name}"
        with self._explained(where):
            return read_checksum(partial(self._open, name), size, kind, where)

    def weights(self, name: str) -> Checkpoint:
        """Open one of its safetensors files."""
        if self.store is not None:
            return StoreFile(self.store, f"{self.path}/{name}", f"{self.place}/{name}")
        return SafetensorsFile(Path(self.place) / name)

    def _open(self, name: str) -> BinaryIO:
        if self.store is not None:
            return self.store.open(f"{self.path}/{name}", "rb")
        return (Path(self.place) / name).open("rb")

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        """Turn an error of the system or of the store into one line."""
        if self.store is not None:
            with explain_store_errors(where, "read", DataError):
                yield
            return
        try:
            yield
        except OSError as error:
            raise DataError(f"{where} cannot be read: {error.strerror or error}.") from error


def check_files(folder: OutputFiles, record: MergeRecord) -> list[Check]:
    """Compare every file, and every tensor in the files of weights, with the record; the record itself is left out."""
    sizes = {name: size for name, size in folder.sizes().items() if name != RECORD and not name.startswith(OF_THE_HUB)}
    if not record.checksums:
        why = f"the record of epimer {record.version or '0.1.0'} has no checksums; merge again to have them"
        return [Check(part, Outcome.UNCHECKED, why) for part in ("files", "tensors")]
    changed: list[str] = []
    tensors: dict[str, str] = {}
    for name, expected in record.checksums.items():
        if name in sizes:
            found, inside = folder.checksum(name, sizes[name], expected.partition(":")[0])
            changed += [] if found == expected else [name]
            tensors |= inside
    fine = f"{len(record.checksums)} files of {sum(sizes.values()):,} bytes have the recorded checksums"
    expected_tensors = record.tensor_checksums
    others = [name for name, crc in tensors.items() if name in expected_tensors and expected_tensors[name] != crc]
    return [
        _compared("files", fine, changed, record.checksums, sizes),
        _compared("tensors", f"{len(tensors)} tensors have theirs", others, expected_tensors, tensors),
    ]


def _compared(part: str, fine: str, changed: Sequence[str], expected: Iterable[str], found: Iterable[str]) -> Check:
    """Return the check of names that should be there, some of which are `changed`; `fine` says that all is well."""
    missing, added = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    kinds = ("changed", changed), ("missing", missing), ("not in the record", added)
    problems = [f"{what}: {listed(names)}" for what, names in kinds if names]
    outcome = Outcome.DIFFERS if problems else Outcome.OK
    names = (name.encode(errors="backslashreplace").decode() for name in (*changed, *missing, *added))
    return Check(part, outcome, "; ".join(problems) or fine, tuple(names))


def files_of_tensors(folder: OutputFiles, record: MergeRecord) -> dict[str, Checkpoint]:
    """Return the file of weights that every tensor lies in, by the tensor's name."""
    weights = [name for name in folder.sizes() if record.checksums.get(name, "").startswith("crc32:")]
    return {name: file for file in map(folder.weights, weights) for name in file.headers}
