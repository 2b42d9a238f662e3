"""The interface of a checkpoint: names, shapes and dtypes first, then one tensor at a time."""

from __future__ import annotations

import hashlib
import math
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epimer.checkpoints.page_locked import PINNED, page_locked
from epimer.errors import CheckpointError
from epimer.geometry.linalg import LowRank
from epimer.opened_files import reason

Rows = tuple[int, int] | None
"""which rows of a tensor: (first, one past the last), or all of it"""

BLOCK = 1 << 26  # bytes of two tensors that are compared at a time
LARGE = 1 << 20  # bytes from which a tensor gets pages of its own
KEPT = 1 << 25  # bytes of unused pages that are kept for the next tensors
PACKED_BITS = {"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
"""dtypes of safetensors that torch does not compute with -> bits per entry; headers have uint8 in their place"""
SAMPLE = 4096  # bytes at the start, in the middle and at the end of a tensor that enter its fingerprint


class Checkpoint(ABC):
    """Named tensors. Nothing is read but headers until `read` is called; reading is safe from several threads."""

    name: str
    """what to call it where paths must not be shown: a folder's name or a hub id with its commit"""
    where: str
    """what to call it in an error: the path or id the user gave"""
    folder: Path | None = None
    """where its config and tokenizer lie, if it is a folder"""
    headers: dict[str, Tensor]
    """meta tensors: shapes and dtypes without data, in the order of the file"""
    ties: Mapping[str, str] = {}
    """name -> the name it shares its tensor with; both are in `headers`"""
    packed: Mapping[str, str] = {}
    """name -> safetensors' name of a dtype that no version of torch computes with; such tensors can only be listed"""
    in_memory: bool = False
    """whether `read` returns tensors that others hold too, and that must not be written to"""
    files: Sequence[Path] = ()
    """the files the tensors lie in"""
    downloads: Mapping[str, int] = {}
    """those of them that are still on the hub -> their bytes"""
    streams: bool = False
    """whether some rows of a tensor are read at the cost of their bytes, so that it can be read piece by piece"""

    @abstractmethod
    def read(self, name: str, rows: Rows = None) -> Tensor:
        """Return one tensor, or some of its rows, in memory of its own."""

    def prefetch(self, name: str, rows: Rows = None) -> None:
        """Let the system load a tensor, or some of its rows, that will be read soon; returns at once."""
        return None

    def delta(self, name: str, base: Checkpoint, rows: Rows = None) -> LowRank | None:
        """Return a tensor's difference from `base` as factors where it is stored so; None where it must be computed."""
        return None

    def delta_rank(self, name: str, base: Checkpoint) -> int | None:
        """Return the rank of what `delta` returns, 0 where a tensor is the base's; None where that returns None."""
        return None

    def problem(self, name: str) -> str | None:
        """Say why a tensor cannot be used as plain numbers, or None; files are checked when they are opened."""
        return None

    def shares(self, name: str, twin: str) -> bool:
        """Whether two names stand for one tensor."""
        return self.ties.get(name, name) == self.ties.get(twin, twin)

    def sample(self, name: str) -> bytes:
        """Return some bytes of a tensor, from its start, middle and end."""
        return sample_bytes(self.read(name))

    @property
    def folders(self) -> list[Path]:
        """The folders of all models that it is made of, its own first."""
        return [] if self.folder is None else [self.folder]

    def adapted_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of its folder's config.json as its tensors need it."""
        return dict(config)

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where its tokenizer and chat template lie: beside its config, or with an adapter that was saved with one."""
        return self.folder

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every name, dtype and shape and of a sample of every tensor, whatever files they lie in."""
        digest = hashlib.blake2b(digest_size=16)
        first: dict[str, str] = {}  # of a group of tied names, whichever the file keeps
        for name in sorted(self.headers):
            if first.setdefault(self.ties.get(name, name), name) == name:
                digest.update(f"{name}\0{self.fingerprints[name]}\0".encode())
        return digest.hexdigest()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of every tensor: its dtype, its shape and a sample of its data."""
        contents = {
            name: f"{W.dtype}\0{tuple(W.shape)}\0".encode() + self.sample(name) for name, W in self.headers.items()
        }
        return {name: hashlib.blake2b(content, digest_size=8).hexdigest() for name, content in contents.items()}

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        """Each file's name, size and time of change or version: if one differs, the file was written to."""
        try:
            return [(file.name, (now := file.stat()).st_size, now.st_mtime_ns) for file in self.files]
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be read: {reason(error)}.") from error

    def size(self, name: str) -> int:
        """Return the bytes that a tensor has once it is read."""
        return nbytes(self.headers[name]) * PACKED_BITS.get(self.packed.get(name, ""), 8) // 8

    def equal(self, name: str, other: Checkpoint, twin: str) -> bool:
        """Whether two tensors are the same, compared some rows at a time."""
        W, V = self.headers[name], other.headers[twin]
        if W.shape != V.shape or W.dtype != V.dtype or self.sample(name) != other.sample(twin):
            return False
        if not W.dim():
            return True
        step = max(1, BLOCK // max(1, nbytes(W[:1])))
        blocks = [(start, min(start + step, len(W))) for start in range(0, len(W), step)]
        return all(torch.equal(self.read(name, rows), other.read(twin, rows)) for rows in blocks)


def is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_embedding(name: str) -> bool:
    """Whether a tensor is by its name a table of embeddings, which models may share with their head."""
    return any(word in name for word in ("embed", "wte", "shared"))


def nbytes(W: Tensor) -> int:
    """Return the bytes a tensor of this shape and dtype has."""
    return W.numel() * W.element_size()


@lru_cache(maxsize=10_000)
def header(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor without data, the same one for the same shape and dtype: a model may have a million of them."""
    return torch.empty(shape, dtype=dtype, device="meta")


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate uninitialised memory for a tensor; large ones get pages that others no longer need, or new ones."""
    return allocate_with_bytes(shape, dtype)[0]


def allocate_with_bytes(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, memoryview]:
    """Allocate as `allocate` does; return the tensor and the bytes that it lies in."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype), memoryview(b"")
    size = count * dtype.itemsize
    if size >= LARGE and (most := PINNED.get()) and (room := page_locked.take(size, most)) is not None:
        return room.view(dtype).reshape(shape), room.numpy().data
    paged = size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE")
    buffer = _PAGES.take(size) if paged else np.empty(size, np.uint8).data
    return torch.frombuffer(buffer, dtype=dtype, count=count).reshape(shape), buffer[:size]


def release_unused_pages() -> None:
    """Give the pages that wait for a tensor back to the system, where the next tensors have other sizes."""
    _PAGES.release()


class Pages:
    """Memory of large tensors that are gone, kept for the next ones: new pages cost more than the reading into them.

    At most `most` bytes are kept; what has waited longest is given back to the system first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._free: list[mmap.mmap] = []
        self._lock = Lock()

    @property
    def kept(self) -> int:
        """The bytes that wait for a tensor."""
        return sum(map(len, self._free))

    def take(self, size: int) -> memoryview:
        """Return at least `size` bytes, which come back when the last tensor on them is gone."""
        with self._lock:
            fitting = [i for i, pages in enumerate(self._free) if size <= len(pages) <= 2 * size]
            place = min(fitting, key=lambda i: len(self._free[i]), default=None)
            pages = self._free.pop(place) if place is not None else None
        if pages is None:
            try:
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"{size} bytes cannot be had") from error
            pages.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(pages)
        weakref.finalize(view, self._give_back, pages).atexit = False
        return view

    def release(self) -> None:
        """Give all that waits back to the system."""
        with self._lock:
            self._free.clear()

    def _give_back(self, pages: mmap.mmap) -> None:
        # Garbage may be collected, and so this be called, while this very thread is in `take`: never wait here.
        if self._lock.acquire(blocking=False):
            self._free.append(pages)
            while self.kept > self.most:
                del self._free[0]
            self._lock.release()


_PAGES = Pages(KEPT)


def sample_ranges(size: int) -> list[tuple[int, int]]:
    """Return the (start, stop) byte ranges of a tensor of `size` bytes that enter its fingerprint."""
    if size <= 3 * SAMPLE:
        return [(0, size)]
    middle = size // 2
    return [(0, SAMPLE), (middle, middle + SAMPLE), (size - SAMPLE, size)]


def sample_bytes(W: Tensor) -> bytes:
    """Return the bytes of a tensor that enter its fingerprint."""
    flat = W.contiguous().reshape(-1).view(torch.uint8)
    return b"".join(flat[start:stop].cpu().numpy().tobytes() for start, stop in sample_ranges(flat.numel()))


class ShardedCheckpoint(Checkpoint):
    """Several files that together hold one model."""

    def __init__(self, name: str, where: str, shards: Sequence[Checkpoint], folder: Path) -> None:
        self.name, self.where, self.folder, self.shards = name, where, folder, shards
        self.files = [file for shard in shards for file in shard.files]
        self.downloads = {file: size for shard in shards for file, size in shard.downloads.items()}
        self.streams = all(shard.streams for shard in shards)
        self.packed = {name: dtype for shard in shards for name, dtype in shard.packed.items()}
        self.owner: dict[str, Checkpoint] = {}
        self.headers, self.ties = {}, {}
        for part in shards:
            for name, W in part.headers.items():
                if name in self.owner:
                    raise CheckpointError(
                        f"{self.where}: {name!r} is in both {self.owner[name].where} and {part.where}; "
                        "remove the shard that is left over from another save."
                    )
                self.owner[name], self.headers[name] = part, W
            self.ties = {**self.ties, **part.ties}

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return [entry for shard in self.shards for entry in shard.state]

    def read(self, name: str, rows: Rows = None) -> Tensor:
        return self.owner[name].read(name, rows)

    def prefetch(self, name: str, rows: Rows = None) -> None:
        self.owner[name].prefetch(name, rows)

    def sample(self, name: str) -> bytes:
        return self.owner[name].sample(name)
