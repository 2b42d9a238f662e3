"""A merge whose tensors are written by the worker that computes them, so that the driver handles records only.

So writing is shared out as computing is, and rows are gone before the next ones are merged in their place.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import nbytes
from epimer.checkpoints.safetensors import as_bytes
from epimer.checkpoints.writer import Draft, Written, write_at
from epimer.engine.batches import Batch
from epimer.engine.merge import MergeWalk
from epimer.engine.task_vectors import Tensors
from epimer.errors import OutputError
from epimer.plan.jobs import Job
from epimer.records import TensorRecord


class WritingWalk:
    """Merges tensors and writes each where it is computed.

    On the driver's machine, each goes to its byte range in the draft. Machines without a common page cache must not
    write to one file: each writes back whole pages, with old bytes beside its own. There, every batch is written to a
    new file, a parcel, which is synced and closed before the driver hears of it.
    """

    def __init__(
        self, walk: MergeWalk, draft: Draft, *, parcels: Path | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        """Create a walk.

        Args:
            walk: merges the tensors.
            draft: the unfinished output.
            parcels: the folder for parcels; None to write to the draft.
            names: the names of tensors in the output, if they differ.
        """
        self.walk, self.jobs, self.parcels = walk, walk.jobs, parcels
        self.folder = draft.folder
        stored = {job.name: (names or {}).get(job.name, job.name) for batch in walk.jobs for job in batch.jobs}
        places = {name: draft.place[one] for name, one in stored.items()}
        self.places = {name: (shard.file, start) for name, (shard, start) in places.items()}

    def read(self, batch: Batch) -> list[Tensors]:
        """Read the tensors, the curvature and the basis of every job."""
        return self.walk.read(batch)

    def work(
        self, batch: Batch, loaded: list[Tensors], device: torch.device
    ) -> list[tuple[Job, Written, TensorRecord]]:
        """Merge the tensors of every job and write them."""
        files: dict[Path, int] = {}
        places = self._places(batch)
        parts = {job.key: (0, 0) for job in batch.jobs}

        def write(job: Job, W: Tensor) -> None:
            path, start = places[job.key]
            if path not in files:
                files[path] = self._open(path)
            data, (size, crc) = memoryview(as_bytes(W.contiguous())), parts[job.key]
            write_at(files[path], data, start + size)
            parts[job.key] = size + len(data), zlib.crc32(data, crc)

        try:
            records = self.walk.work_into(write, batch, loaded, device)
            for file in files.values() if self.parcels else ():
                os.fsync(file)
        finally:
            for file in files.values():
                os.close(file)
        written = [Written(*parts[job.key], *(places[job.key] if self.parcels else ())) for job in batch.jobs]
        return list(zip(batch.jobs, written, records, strict=True))

    def _places(self, batch: Batch) -> dict[str, tuple[Path, int]]:
        """Return the file that every job is written to, and where in it."""
        if self.parcels is None:
            ranges = {job.key: (self.places[job.name], job.skip) for job in batch.jobs}
            return {key: (self.folder / file, start + skip) for key, ((file, start), skip) in ranges.items()}
        parcel = self.parcels / f"{uuid4().hex}.bin"  # a job that is tried again has another
        starts = accumulate((nbytes(job.template) for job in batch.jobs), initial=0)
        return {job.key: (parcel, start) for job, start in zip(batch.jobs, starts, strict=False)}

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if self.parcels else 0), 0o666)
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written on {os.uname().nodename} ({error.strerror}); put the output on a disk that "
                "every machine sees under this path."
            ) from error


def remove_parcels(written: Iterable[Written]) -> None:
    """Remove the parcels of a batch, all of whose parts the draft has collected."""
    for parcel in {part.parcel for part in written if part.parcel is not None}:
        parcel.unlink()
