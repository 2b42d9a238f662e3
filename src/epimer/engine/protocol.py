"""The contract of an engine: a map over independent jobs, in their order, within a memory budget.

A walk says what is read for a job, what is computed from it, and what the job costs; an engine decides when and where.
Merges, diagnoses, bases and sweeps are walks; threads on this machine are the first engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch


class Sized(Protocol):
    """A job, as an engine sees it."""

    @property
    def memory(self) -> int:
        """Bytes in use at once from the reading of the job until its result is consumed."""
        ...


JobT = TypeVar("JobT", bound=Sized)
LoadedT = TypeVar("LoadedT")
ResultT = TypeVar("ResultT", covariant=True)


class Walk(Protocol[JobT, LoadedT, ResultT]):
    """Independent jobs, what is read for each, and what is computed from that."""

    @property
    def jobs(self) -> Sequence[JobT]:
        """The jobs, in the order in which results are wanted."""
        ...

    def read(self, job: JobT) -> LoadedT:
        """Read and check a job's inputs; called ahead of `work`, for one job at a time."""
        ...

    def work(self, job: JobT, loaded: LoadedT, device: torch.device) -> ResultT:
        """Compute a job's result from what was read; several jobs may be worked on at once."""
        ...


class Engine(Protocol):
    """Runs walks."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """Where jobs are computed, one entry per job at a time."""
        ...

    def map(self, walk: Walk[JobT, LoadedT, ResultT]) -> Iterator[tuple[JobT, ResultT]]:
        """Yield every job with its result, in the order of the jobs.

        A job's memory counts as free when the next result is asked for. The first error, in the order of the jobs, is
        raised in its place, and ends the walk.
        """
        ...
