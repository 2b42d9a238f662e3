"""Files as they were when they were opened: what is changed, cut or removed while it is read is refused, not mixed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from epimer.errors import CheckpointError, EpimerError

PART = 1 << 30  # bytes per read call; Linux takes at most 2 GiB
REMEDIES = {
    errno.EMFILE: "; raise the limit (ulimit -n), or take fewer --workers",
    errno.ENFILE: "; close other programs",
    errno.EIO: "; the disk failed: copy the file to another",
    errno.ESTALE: "; the network's disk lost it: run the command again",
    errno.ENOMEM: "; free some memory",
}


def reason(error: OSError) -> str:
    """Return why a file cannot be read and, where that is not the file's own fault, what to do."""
    return f"{error.strerror or error}{REMEDIES.get(error.errno or 0, '')}"


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a file, with all links followed, lies in a folder; a ValueError where no file can have its name.

    The hub's cache keeps the files of a repository as links into a folder beside that, which is taken for its own.
    """
    root = folder.resolve()
    for place in (root, *root.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith(("models--", "datasets--")):
            root = place.parent.parent
            break
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be followed") from error


class OpenedFile:
    """A file that is opened anew for every read, which must find it as the first one did."""

    def __init__(self, path: Path, where: str, failure: type[EpimerError] = CheckpointError) -> None:
        self.path, self.where, self.failure = path, where, failure
        self.version: tuple[int, int] | None = None
        self.inode: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another machine may number in another way."""
        return {**self.__dict__, "inode": None}

    @contextmanager
    def open(self, *, buffering: int = -1) -> Iterator[BinaryIO]:
        """Open the file to read from it; refuse what was read if the file is not the one that was opened first."""
        first = self.version is None
        try:
            with self.path.open("rb", buffering) as file:
                if first:
                    self._note(file.fileno())
                yield file
                self._check(os.fstat(file.fileno()))
        except OSError as error:
            gone = isinstance(error, FileNotFoundError) and not first
            remedy = "; it was removed while it was in use: put it back, and run the command again" if gone else ""
            raise self.failure(f"{self.where} cannot be read: {reason(error)}{remedy}.") from error

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Read as many bytes as a buffer has, from an offset on."""
        with self.open(buffering=0) as file:
            self._fill(file, buffer, offset)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """Read some ranges of bytes, each given by its start and its end."""
        parts = [bytearray(stop - start) for start, stop in ranges]
        with self.open(buffering=0) as file:
            for part, (start, _) in zip(parts, ranges, strict=True):
                self._fill(file, memoryview(part), start)
        return parts

    def _fill(self, file: BinaryIO, buffer: memoryview, offset: int) -> None:
        file.seek(offset)
        while buffer:
            count = file.readinto(buffer[:PART])  # type: ignore[attr-defined]
            if not count:
                raise self.failure(f"{self.where} ends too early: it was cut while being read; copy it again.")
            buffer = buffer[count:]

    def _note(self, handle: int) -> None:
        now = os.fstat(handle)
        self.version, self.inode = _version(now), now.st_ino

    def _check(self, now: os.stat_result) -> None:
        if _version(now) != self.version or now.st_ino != (self.inode or now.st_ino):
            problem = "was changed while it was in use; run the command again once nothing writes to it"
            raise self.failure(f"{self.where} {problem}.")


def _version(now: os.stat_result) -> tuple[int, int]:
    return now.st_size, now.st_mtime_ns // 1000  # some file systems round times
