"""Write a model folder whole or not at all, and go on where a killed run stopped.

While it is made, a folder `out` lives in `.out.epimer/model` beside it, with a journal of the tensors that are safely
on disk. Every tensor's place is known from the start, so they may come in any order and none is held in memory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.checkpoints.checkpoint import nbytes
from epimer.checkpoints.safetensors import PART, as_bytes, encode_header
from epimer.errors import OutputError

OURS = ("journal.jsonl", "model", "old", "gone")
FLUSH_BYTES = 1 << 28
FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Shard:
    """One file of the output: its header and where each of its tensors begins."""

    file: str
    header: bytes
    starts: dict[str, int]
    size: int


def lay_out(tensors: Mapping[str, Tensor], ties: Mapping[str, str], most: int) -> list[Shard]:
    """Divide tensors over files of at most `most` bytes (one tensor may exceed it), in their order.

    A name that shares another's tensor is not stored: the metadata of its file says so, as safetensors' own
    `save_model` does it.
    """
    groups: list[dict[str, Tensor]] = [{}]
    room = most
    for name, W in tensors.items():
        if name in ties:
            continue
        if groups[-1] and nbytes(W) > room:
            groups.append({})
            room = most
        groups[-1][name] = W
        room -= nbytes(W)
    shards = []
    for i, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        # Wide dtypes first: then every tensor begins at a multiple of its own element size.
        ordered = dict(sorted(group.items(), key=lambda item: -item[1].element_size()))
        shared = {name: twin for name, twin in ties.items() if twin in group}
        header, starts = encode_header(ordered, {"format": "pt", **shared})
        shards.append(Shard(file, header, starts, len(header) + sum(map(nbytes, group.values()))))
    return shards


def index_of(shards: list[Shard], tensors: Mapping[str, Tensor]) -> bytes | None:
    """Return the index of a sharded model; None where one file holds it."""
    if len(shards) == 1:
        return None
    owner = {name: shard.file for shard in shards for name in shard.starts}
    table = {
        "metadata": {"total_size": sum(nbytes(tensors[name]) for name in owner)},
        "weight_map": {name: owner[name] for name in tensors if name in owner},
    }
    return as_json(table)


def as_json(value: Any) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


class Draft:
    """A model folder in the making. `done` tells what an earlier, killed run has already written."""

    def __init__(self, out: Path, shards: list[Shard], key: str, check: Callable[[], None] = lambda: None) -> None:
        self.out, self.shards, self.key = out, shards, key
        self.check = check
        """refuses to replace what is at `out`; asked again when the folder is about to appear"""
        self.root = draft_of(out)
        self.folder, self.old, self.journal = self.root / "model", self.root / "old", self.root / "journal.jsonl"
        self.place = {name: (shard, start) for shard in shards for name, start in shard.starts.items()}
        self.done: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, Any] = {}
        self._files: dict[str, int] = {}
        self._pending: list[dict[str, Any]] = []
        self._bytes, self._flushed = 0, time.monotonic()

    @contextmanager
    def opened(self) -> Iterator[Draft]:
        """Hold the draft alone; what was written stays for the next run unless `discard` is called."""
        with explained(self.root, "made"):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(exist_ok=True)
            foreign = sorted(path.name for path in self.root.iterdir() if path.name not in OURS)
            if foreign:
                raise OutputError(f"{self.root} holds {foreign[0]!r}, which epimer did not put there; move it away.")
            lock = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(
                    f"another merge is writing {self.out}; wait for it, or choose another name."
                ) from error
            with explained(self.out, "written"):
                try:
                    self._begin()
                except OSError:
                    self.discard()
                    raise
                yield self
        finally:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
            os.close(lock)

    def _begin(self) -> None:
        if not self._restore():
            shutil.rmtree(self.folder, ignore_errors=True)
            with self.journal.open("wb") as journal:
                journal.write(_line({"key": self.key}))
            self.folder.mkdir()
        for shard in self.shards:
            file = os.open(self.folder / shard.file, os.O_RDWR | os.O_CREAT, 0o666)
            self._files[shard.file] = file
            if os.fstat(file).st_size != shard.size:
                _reserve(file, shard.size)
            _write(file, shard.header, 0)

    def _restore(self) -> bool:
        """Take up what the journal says is on disk and what is indeed there; False if it is another merge's."""
        try:
            entries, whole = _readable(self.journal.read_bytes())
            os.truncate(self.journal, whole)
        except OSError:
            return False
        if not entries or entries[0] != {"key": self.key} or not self.folder.is_dir():
            return False
        for entry in entries[1:]:
            if "note" in entry:
                self.notes[entry["note"]] = entry["value"]
            elif entry.get("name") in self.place and self._checksum(entry) == entry["crc"]:
                self.done[entry["key"]] = entry["record"]
        return True

    def _checksum(self, entry: Mapping[str, Any]) -> int | None:
        shard, start = self.place[entry["name"]]
        crc, size = 0, entry["bytes"]
        try:
            with (self.folder / shard.file).open("rb") as file:
                file.seek(start + entry["skip"])
                while size and (part := file.read(min(size, 1 << 24))):
                    crc = zlib.crc32(part, crc)
                    size -= len(part)
        except OSError:
            return None
        return None if size else crc

    def note(self, key: str, value: Any) -> None:
        """Keep a plain value for the next run."""
        self.notes[key] = value
        self._pending.append({"note": key, "value": value})
        self.flush()

    def put(self, key: str, name: str, skip: int, W: Tensor, record: dict[str, Any]) -> None:
        """Write one tensor, or the part of it that is `key`, `skip` bytes into its place; done after the next flush."""
        shard, start = self.place[name]
        data = memoryview(as_bytes(W.contiguous()))
        _write(self._files[shard.file], data, start + skip)
        written = {"key": key, "name": name, "skip": skip, "bytes": len(data), "crc": zlib.crc32(data)}
        self._pending.append({**written, "record": record})
        self._bytes += len(data)
        if self._bytes >= FLUSH_BYTES or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make sure that what was written is on disk, then say so in the journal."""
        if not self._pending:
            return
        for file in self._files.values():
            os.fdatasync(file)
        with self.journal.open("ab") as journal:
            journal.write(b"".join(map(_line, self._pending)))
            journal.flush()
            os.fsync(journal.fileno())
        self._pending, self._bytes, self._flushed = [], 0, time.monotonic()

    def add(self, file: str, data: bytes) -> None:
        """Write a small file beside the weights."""
        target = self.folder / file
        with target.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())

    def publish(self) -> None:
        """Let the folder appear under its name."""
        self.flush()
        with explained(self.out, "written"):
            for file in self._files.values():
                os.fsync(file)
            _sync(self.folder)
            self.check()
            if self.out.exists() and any(self.out.iterdir()):
                self.out.rename(self.old)
            self.folder.rename(self.out)
            _sync(self.out.parent)
            settle(self.out)

    def discard(self) -> None:
        """Remove what was written so far."""
        settle(self.out)
        shutil.rmtree(self.root, ignore_errors=True)


def save_tensors(target: Path, tensors: Mapping[str, Tensor], ties: Mapping[str, str] | None = None) -> None:
    """Write tensors in memory to one safetensors file, which appears whole or not at all."""
    (shard,) = lay_out(tensors, ties or {}, 1 << 62)
    with whole_file(target) as draft, draft.open("wb") as file:
        file.write(shard.header)
        for name in shard.starts:
            file.write(as_bytes(tensors[name].contiguous()))
        file.flush()
        os.fsync(file.fileno())


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    if path is not None and (path.is_dir() or not path.expanduser().parent.is_dir()):
        why = "it is a folder; name a file" if path.is_dir() else f"there is no folder {path.parent}; make it first"
        raise OutputError(f"{path} cannot be written: {why}.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that could not be made or written into, before any work is done for it."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise OutputError(f"{folder} cannot be written: {there} is no folder; choose another place.")
    if not os.access(there, os.W_OK):
        raise OutputError(f"{folder} cannot be written: {there} may not be changed; choose another place.")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a file to write, which takes its name when all of it is there."""
    draft = draft_of(path)
    with explained(path, "written"):
        try:
            yield draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def check_new(out: Path, marker: str, *, overwrite: bool) -> None:
    """Refuse to write where something else is; a folder that holds `marker` may be replaced if `overwrite` says so."""
    out = out.expanduser()
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / marker).is_file():
        raise OutputError(f"{out} exists and is not a folder with {marker}; choose another name.")
    if not overwrite:
        raise OutputError(f"{out} exists; choose another name, or pass --overwrite to replace it.")


@contextmanager
def whole_folder(out: Path, marker: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Make a folder of files that appears under its name when the block ends well, and not at all otherwise.

    Only a folder that holds `marker`, so one of the same kind, is replaced, and only if `overwrite` says so.
    """
    out = Path(os.path.abspath(out.expanduser()))
    draft, old = out.parent / f".{out.name}.epimer-draft", out.parent / f".{out.name}.epimer-old"
    with explained(out, "written"):
        if old.exists() and not os.path.lexists(out):  # a run was killed between two renames
            old.rename(out)
        check_new(out, marker, overwrite=overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            for file in draft.iterdir():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            _sync(draft)
            check_new(out, marker, overwrite=overwrite)
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            draft.rename(out)
            _sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            if old.exists() and not os.path.lexists(out):
                old.rename(out)
            shutil.rmtree(draft, ignore_errors=True)
            raise


def settle(out: Path) -> None:
    """End what a run began when it let its output appear: bring the old one back, or let it and the draft go."""
    root = draft_of(out)
    old, gone = root / "old", root / "gone"
    if old.exists() and not os.path.lexists(out):
        old.rename(out)
    elif old.exists():
        shutil.rmtree(gone, ignore_errors=True)
        old.rename(gone)  # so that half of it is never taken for the old output
        shutil.rmtree(gone)
    left = {path.name for path in root.iterdir()} if root.is_dir() else set()
    if "journal.jsonl" in left and "model" not in left and left <= {*OURS} and os.path.lexists(out):
        shutil.rmtree(root)


def draft_of(out: Path) -> Path:
    """Return where an output lives while it is made."""
    return out.parent / f".{out.name}.epimer"


@contextmanager
def explained(path: Path, verb: str) -> Iterator[None]:
    """Say in one line why the system did not let a file be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
            reason = f"the disk is full ({free / 1e9:.2f} GB free); make room, or choose another place"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"its folder may not be written to ({error.strerror}); choose another place"
        elif error.errno == errno.EMFILE:
            reason = "it has more files than may be open at once; take a larger --max-shard-size"
        else:
            reason = f"{error.strerror or error}; choose another place"
        raise OutputError(f"{path} cannot be {verb}: {reason}.") from error


def _reserve(file: int, size: int) -> None:
    """Take the disk space now, so that a full disk is found before any work is done."""
    os.ftruncate(file, size)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(file, view[done : done + PART], offset + done)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(entry: Any) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _readable(journal: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the journal's entries up to the first that was not written whole, and the bytes they take."""
    entries, whole = [], 0
    for line in journal.splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(entry, dict):
            break
        entries.append(entry)
        whole += len(line)
    return entries, whole
