"""A merge whose tensors are written by the worker that computes them, each to its byte range of the unfinished output.

So writing is shared out as computing is, and rows are gone before the next ones are merged in their place.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from epimer.checkpoints.safetensors import as_bytes
from epimer.checkpoints.writer import Draft, write_at
from epimer.engine.batches import Batch
from epimer.engine.merge import MergeWalk
from epimer.engine.task_vectors import Tensors
from epimer.errors import OutputError
from epimer.plan.jobs import Job
from epimer.records import TensorRecord


class Written(NamedTuple):
    """What was written in the place of a tensor."""

    bytes: int
    crc: int


class WritingWalk:
    """Merges tensors and writes each to its place on a disk that all workers share; the driver gets records only."""

    def __init__(self, walk: MergeWalk, draft: Draft, *, sync: bool, names: Mapping[str, str] | None = None) -> None:
        """Create a walk; with `sync`, what it has done is safely on disk, or else the driver sees to that.

        `names` tells what tensors are called in the output, where that is not their own name.
        """
        self.walk, self.jobs, self.sync = walk, walk.jobs, sync
        self.folder, self.journal, self.first_line = draft.folder, draft.journal.path, draft.journal.first_line
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
        files: dict[str, int] = {}
        written = {job.key: Written(0, 0) for job in batch.jobs}

        def write(job: Job, W: Tensor) -> None:
            name, start = self.places[job.name]
            if not files:
                self._check_run()  # a run that begins from now on has files of its own, or wants the same bytes
            if name not in files:
                files[name] = _open(self.folder / name)
            data, (size, crc) = memoryview(as_bytes(W.contiguous())), written[job.key]
            write_at(files[name], data, start + job.skip + size)
            written[job.key] = Written(size + len(data), zlib.crc32(data, crc))

        try:
            records = self.walk.work_into(write, batch, loaded, device)
            for file in files.values() if self.sync else ():
                os.fdatasync(file)
        finally:
            for file in files.values():
                os.close(file)
        return [(job, written[job.key], record) for job, record in zip(batch.jobs, records, strict=True)]

    def _check_run(self) -> None:
        """Refuse to write into what another run has begun since: this job's driver is gone then."""
        try:
            with self.journal.open("rb") as file:
                ours = file.read(len(self.first_line)) == self.first_line
        except OSError as error:
            raise _not_shared(self.journal, error) from error
        if not ours:
            raise OutputError(f"{self.folder} now belongs to another merge; its driver goes on alone.")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY)
    except OSError as error:
        raise _not_shared(path, error) from error


def _not_shared(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path} cannot be written on {os.uname().nodename} ({error.strerror}); put the output on a disk that every "
        "machine sees under this path."
    )
