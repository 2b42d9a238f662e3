"""Write a model folder completely or not at all, and resume where a killed run stopped.

Until it is complete, a folder `out` is kept in `.out.epimer/model` next to it, with a journal of the tensors that are
safely on disk. Every tensor's offset is known from the start, so they may come in any order and none stays in memory.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from epimer.atomic_files import (
    atomic_file,
    check_draft,
    draft_path,
    explain_os_errors,
    held_folder,
    keep_old_or_new,
    remove,
    remove_folder,
    sync,
)
from epimer.checkpoints.checkpoint import nbytes
from epimer.checkpoints.file_checksums import (
    BLOCK,
    join_crc,
    read_checksum,
    read_crc,
    spelled_crc,
    weights_checksum,
)
from epimer.checkpoints.journal import Journal
from epimer.checkpoints.safetensors import as_bytes, encode_header, tensor_checksum
from epimer.errors import DataError, OutputError, listed
from epimer.records import TensorRecord, checked

OURS = ("journal.jsonl", "model", "old", "gone", "parcels")
FLUSH_BYTES = 1 << 26  # so that little is left to sync when the last tensor is written
FLUSH_SECONDS = 1.0
PART = 1 << 20  # bytes per write call: workers wait for each other in each; of 2 MB, ext4 was seen to take far longer


@dataclass(frozen=True)
class Shard:
    """One file of the output: its header and where each of its tensors begins."""

    file: str
    header: bytes
    starts: dict[str, int]
    size: int


def plan_shards(tensors: Mapping[str, Tensor], ties: Mapping[str, str], most: int, stem: str = "model") -> list[Shard]:
    """Divide tensors over files of at most `most` bytes (one tensor may exceed it), in their order.

    A name that shares another's tensor is not stored: the metadata of its file says so, as safetensors' own
    `save_model` does it. The files' names begin with `stem`.
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
        file = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors"
        # Wide dtypes first: then every tensor begins at a multiple of its own element size.
        ordered = dict(sorted(group.items(), key=lambda item: -item[1].element_size()))
        shared = {name: twin for name, twin in ties.items() if twin in group}
        header, starts = encode_header(ordered, {"format": "pt", **shared})
        shards.append(Shard(file, header, starts, len(header) + sum(map(nbytes, group.values()))))
    return shards


def shard_index(shards: list[Shard], tensors: Mapping[str, Tensor]) -> bytes | None:
    """Return the index of a sharded model; None where one file holds it."""
    if len(shards) == 1:
        return None
    owner = {name: shard.file for shard in shards for name in shard.starts}
    total_size = sum(nbytes(tensors[name]) for name in owner)
    weight_map = {name: owner[name] for name in tensors if name in owner}
    return as_json({"metadata": {"total_size": total_size}, "weight_map": weight_map})


def as_json(value: Any) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class WrittenPart:
    """An entry of a journal: a tensor, or a part of one, that is in its place."""

    key: str
    name: str
    """of the tensor in the file"""
    skip: int
    """bytes of the tensor that come before"""
    bytes: int
    crc: int
    record: TensorRecord


@dataclass(frozen=True)
class Written:
    """Bytes of a tensor that a worker wrote: to their place in the draft, or to a parcel that the draft collects."""

    bytes: int = 0
    crc: int = 0
    parcel: Path | None = None
    """a file that no other process writes, complete and synced; None if the bytes are in their place"""
    start: int = 0
    """where in the parcel they begin"""


class Draft:
    """An unfinished model folder. `done` tells what an earlier, killed run has already written."""

    def __init__(self, out: Path, shards: list[Shard], key: str, check: Callable[[], None] = lambda: None) -> None:
        self.out, self.shards = out, shards
        self.check = check
        """refuses to replace what is at `out`; called again when the folder is about to appear"""
        self.root = draft_path(out)
        self.folder, self.old = self.root / "model", self.root / "old"
        self.parcels = self.root / "parcels"
        self.journal = Journal(self.root / "journal.jsonl", key)
        self.place = {name: (shard, start) for shard in shards for name, start in shard.starts.items()}
        self.done: dict[str, TensorRecord] = {}
        self.notes: dict[str, Any] = {}
        self.crcs: dict[str, dict[int, tuple[int, int]]] = {}
        """name -> where in the tensor each part begins -> its bytes and CRC-32"""
        self._files: dict[str, int] = {}
        self._pending: list[dict[str, Any]] = []
        self._bytes, self._flushed = 0, time.monotonic()

    @contextmanager
    def opened(self) -> Iterator[Draft]:
        """Hold the draft alone; what was written stays for the next run unless `discard` is called."""
        with explain_os_errors(self.root, "made"):
            self.out.parent.mkdir(parents=True, exist_ok=True)
        with explain_os_errors(self.out, "written"), held_folder(self.root, self.out, "merge"):
            check_draft(self.root)
            if foreign := sorted(path.name for path in self.root.iterdir() if path.name not in OURS):
                raise OutputError(f"{self.root} holds {foreign[0]!r}, which epimer did not put there; move it away.")
            try:
                try:
                    self._begin()
                except OSError:
                    self.discard()
                    raise
                yield self
            finally:
                self._close()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _begin(self) -> None:
        remove_folder(self.parcels)  # of workers whose driver was killed
        if not self._restore():
            remove_folder(self.folder)
            self.journal.begin()
            self.folder.mkdir()
        for shard in self.shards:
            file = os.open(self.folder / shard.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            self._files[shard.file] = file
            if os.fstat(file).st_size != shard.size:
                _reserve(file, shard.size)
            write_at(file, shard.header, 0)

    def _restore(self) -> bool:
        """Restore the tensors that the journal lists and that are on disk; False if it is another merge's."""
        entries = self.journal.resume()
        if entries is None or not self.folder.is_dir():
            return False
        files = {shard.file for shard in self.shards}
        for path in self.folder.iterdir():  # what comes next to the weights is written anew
            if path.name not in files:
                remove(path)
        for entry in entries:
            if "note" in entry:
                self.notes[str(entry["note"])] = entry.get("value")
                continue
            with suppress(DataError):  # what does not fit the schema is made again
                part = checked(WrittenPart, entry, str(self.journal.path))
                if self._checksum(part) == part.crc:
                    self.done[part.key] = part.record
                    self.crcs.setdefault(part.name, {})[part.skip] = part.bytes, part.crc
        return True

    def _checksum(self, part: WrittenPart) -> int | None:
        """Return the checksum of what is on disk in the place of a part; None where that is no place."""
        shard, start = self.place.get(part.name, (None, 0))
        if shard is None or not 0 <= part.skip <= part.skip + part.bytes <= shard.size - start:
            return None
        try:
            with (self.folder / shard.file).open("rb") as file:
                file.seek(start + part.skip)
                size, crc = read_crc(file, part.bytes)
        except OSError:
            return None
        return crc if size == part.bytes else None

    def note(self, key: str, value: Any) -> None:
        """Keep a plain value for the next run."""
        self.notes[key] = value
        self._pending.append({"note": key, "value": value})
        self.flush()

    def put(self, name: str, W: Tensor, record: TensorRecord) -> None:
        """Write one small tensor to its place; done after the next flush."""
        shard, start = self.place[name]
        data = memoryview(as_bytes(W.contiguous()))
        write_at(self._files[shard.file], data, start)
        self.wrote(name, name, 0, Written(len(data), zlib.crc32(data)), record)

    def wrote(self, key: str, name: str, skip: int, written: Written, record: TensorRecord) -> None:
        """Take note of a part of a tensor, and copy it from its parcel to its place; done after the next flush."""
        if written.parcel is not None:
            self._collect(name, skip, written, written.parcel)
        part = WrittenPart(key, name, skip, written.bytes, written.crc, record)
        self._pending.append({**vars(part), "record": asdict(record)})
        self.crcs.setdefault(name, {})[skip] = written.bytes, written.crc
        self._bytes += written.bytes
        if self._bytes >= FLUSH_BYTES or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def _collect(self, name: str, skip: int, written: Written, parcel: Path) -> None:
        """Copy a part from its parcel to its place, and compare its checksum with the worker's.

        The parcel is opened after the worker has closed it: then even a disk without coherent caches has all its bytes.
        """
        shard, start = self.place[name]
        crc, done = 0, 0
        try:
            with parcel.open("rb", buffering=0) as file:
                file.seek(written.start)
                while block := file.read(min(BLOCK, written.bytes - done)):
                    write_at(self._files[shard.file], block, start + skip + done)
                    crc, done = zlib.crc32(block, crc), done + len(block)
        except FileNotFoundError:
            done = 0
        if (done, crc) != (written.bytes, written.crc):
            raise OutputError(
                f"{parcel} has {done} bytes of {name!r} with checksum {spelled_crc(crc)}; the worker wrote "
                f"{written.bytes} with {spelled_crc(written.crc)}. Put the output on a disk that every machine sees "
                "under this path, and where a file is complete for all once it is synced and closed."
            )

    def read_back(self) -> None:
        """Read all weights from the disk, not from this machine's cache, and compare them with their checksums."""
        self.flush()
        files, tensors = self.checksums()
        for shard in self.shards:
            path, file = self.folder / shard.file, self._files[shard.file]
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            crc, inside = read_checksum(partial(_open_to_read, path), shard.size, "crc32", str(path))
            if crc != files[shard.file]:
                differing = [name for name in shard.starts if inside.get(name) != tensors[name]]
                raise OutputError(
                    f"the disk does not return what was written to {path}: {listed(differing) or 'its header'} differs "
                    "from its checksum. Nothing was published; check the disk, or choose another, and run again."
                )

    def checksums(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the checksums of the files of weights and of the tensors in them, once all are in their places."""
        parts = {name: [crc for _, crc in sorted(self.crcs[name].items())] for name in self.place}
        files = {one.file: weights_checksum(one.header, one.starts, parts) for one in self.shards}
        return files, {name: spelled_crc(join_crc(each)[1]) for name, each in parts.items()}

    def flush(self) -> None:
        """Sync what was written to disk, then record it in the journal."""
        if not self._pending:
            return
        for file in self._files.values():
            os.fdatasync(file)
        self.journal.append(self._pending)
        self._pending, self._bytes, self._flushed = [], 0, time.monotonic()

    def add(self, file: str, data: bytes) -> None:
        """Write a small file next to the weights, or in a folder there."""
        place = self.folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(place, [data])
        if place.parent != self.folder:
            sync(place.parent)

    def publish(self) -> None:
        """Move the finished folder to its name."""
        self.flush()
        with explain_os_errors(self.out, "written"):
            for file in self._files.values():
                os.fsync(file)
            sync(self.folder)
            self.check()
            try:
                if self.out.exists() and any(self.out.iterdir()):
                    self.out.rename(self.old)
                self.folder.rename(self.out)
                sync(self.out.parent)
            finally:
                finish_replacement(self.out)

    def discard(self) -> None:
        """Remove what was written so far."""
        self._close()  # removing folders takes file handles, of which there may be too few
        finish_replacement(self.out)
        remove_folder(self.root)


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors in memory as the bytes of one safetensors file."""
    (shard,) = plan_shards(tensors, {}, 1 << 62)
    return b"".join([shard.header, *(bytes(as_bytes(tensors[name].contiguous())) for name in shard.starts)])


def save_tensors(
    target: Path,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str] | None = None,
    *,
    read: Callable[[Tensor], Tensor] = lambda W: W.cpu().contiguous(),
    check: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Write tensors, of any device, to one safetensors file, which appears complete or not at all.

    `read` turns one into contiguous memory as it is written; `check` is called before the file appears.

    Returns:
        The checksum of every tensor that was written.
    """
    (shard,) = plan_shards(tensors, ties or {}, 1 << 62)
    checksums: dict[str, str] = {}

    def data() -> Iterator[Any]:
        for name in shard.starts:
            W = read(tensors[name])
            checksums[name] = tensor_checksum(W)
            yield as_bytes(W)

    with atomic_file(target, check) as draft, draft.open("wb") as file:
        file.writelines(chain([shard.header], data()))
    return checksums


def recover(out: Path) -> None:
    """Finish the replacement of an output by a run that was killed, unless another run is at work."""
    root = draft_path(out)
    with suppress(OSError, OutputError), held_folder(root, out, "merge", make=False):
        check_draft(root)
        finish_replacement(out)


def finish_replacement(out: Path) -> None:
    """Restore the old output if the new one did not appear; otherwise remove the old one and the draft."""
    root = draft_path(out)
    keep_old_or_new(out, root / "old", root / "gone")
    left = {path.name for path in root.iterdir()} if root.is_dir() else set()
    if root.is_dir() and "model" not in left and left <= {*OURS} and os.path.lexists(out):
        remove_folder(root)


def _reserve(file: int, size: int) -> None:
    """Allocate the disk space now, so that a full disk is noticed before any work is done."""
    os.ftruncate(file, size)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of some bytes at an offset of an open file."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(file, view[done : done + PART], offset + done)


def _open_to_read(path: Path) -> BinaryIO:
    return path.open("rb")


def _write_synced(path: Path, chunks: Iterable[Any]) -> None:
    with path.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
