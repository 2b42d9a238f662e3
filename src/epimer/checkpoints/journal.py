"""The journal of an unfinished output: what is safely on disk, a line for each entry.

A line is a hash of its entry and of all lines before it, a space, and the entry in JSON. A line that was damaged,
doubled, moved or lost does not verify, nor does any after it: none of them is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from epimer.json_values import json_value


class Journal:
    """A journal that begins with a key, which says what it is of."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.first_line = _line(b"", {"key": key})
        self._hash = b""  # of the last line

    def begin(self) -> None:
        """Start it anew."""
        self.path.unlink(missing_ok=True)  # it may be a link to something else
        self.path.write_bytes(self.first_line)
        self._hash = _hash_of(self.first_line)

    def resume(self) -> list[dict[str, Any]] | None:
        """Return the entries that verify, and remove all after them; None where it has another key, or none."""
        if self.path.is_symlink() or not self.path.is_file():  # a device could be read without end
            return None
        try:
            lines = list(_verified(self.path.read_bytes()))
            if lines[:1] != [self.first_line]:
                return None
            os.truncate(self.path, sum(map(len, lines)))
            self._hash = _hash_of(lines[-1])
            entries = [json_value(line.partition(b" ")[2]) for line in lines[1:]]
            return [entry for entry in entries if isinstance(entry, dict)]
        except (OSError, ValueError):
            return None

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add entries, and sync them to disk."""
        with self.path.open("ab") as file:
            for entry in entries:
                line = _line(self._hash, entry)
                file.write(line)
                self._hash = _hash_of(line)
            file.flush()
            os.fsync(file.fileno())


def _line(before: bytes, entry: dict[str, Any]) -> bytes:
    """Return an entry as the line that follows the one with the hash `before`."""
    text = json.dumps(entry).encode()
    return _chained(before, text) + b" " + text + b"\n"


def _chained(before: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(before + text, digest_size=8).hexdigest().encode()


def _hash_of(line: bytes) -> bytes:
    return line.partition(b" ")[0]


def _verified(data: bytes) -> Iterator[bytes]:
    """Yield the lines of a journal up to the first that does not verify."""
    before = b""
    for line in data.split(b"\n")[:-1]:  # the last one was not written completely
        found, _, text = line.partition(b" ")
        if found != _chained(before, text):
            return
        before = found
        yield line + b"\n"
