"""Which jobs of a merge are handed over together: small ones, and for a GPU matrices of one shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epimer.plan.jobs import Job

SMALL = 1 << 20  # jobs below this many bytes are handed over together
TOGETHER = 1 << 23
STACKED = 1 << 26  # entries of task vectors whose singular vectors are found at once


@dataclass(frozen=True)
class Batch:
    """Small jobs that are done together, so that a norm or a bias does not cost a turn of its own; or one large job."""

    jobs: tuple[Job, ...]
    stacked: bool = False
    """whether they are matrices of one shape whose singular vectors are found at once"""

    @property
    def name(self) -> str:
        """What to call it in an error: its first tensor."""
        return self.jobs[0].name

    @property
    def memory(self) -> int:
        """Bytes in use at once."""
        return sum(job.memory for job in self.jobs)


def batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Group small jobs; a large one stands alone."""
    batch: list[Job] = []
    used = 0
    for job in jobs:
        if batch and (job.memory > SMALL or used > TOGETHER):
            yield Batch(tuple(batch))
            batch = []
            used = 0
        batch.append(job)
        used += job.memory
        if job.memory > SMALL:
            yield Batch(tuple(batch))
            batch = []
            used = 0
    if batch:
        yield Batch(tuple(batch))


def directions(job: Job) -> int:
    """Return how many singular vectors of each model a job begins with, where all of them count; 0 for none."""
    if job.rule != "matrix" or job.method is None or job.method.directions is None:
        return 0
    tasks = len(job.weights)
    return job.method.directions(job.options, job.shape, tasks) if len(job.models) == tasks else 0


def stacks(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Group matrices that begin with as many singular vectors of one shape, some at a time; and small jobs."""
    alike: dict[object, list[Job]] = {}
    for job in jobs:
        if rank := directions(job):
            settings = id(job.method), id(job.options), job.inputs
            alike.setdefault((job.shape, rank, job.precision, *settings), []).append(job)
    yield from batches([job for job in jobs if not directions(job)])
    for group in alike.values():
        size = max(1, STACKED // (len(group[0].weights) * math.prod(group[0].shape)))
        for start in range(0, len(group), size):
            yield Batch(tuple(group[start : start + size]), stacked=True)
