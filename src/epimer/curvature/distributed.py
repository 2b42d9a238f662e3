"""The processes of torchrun or accelerate: each rank measures its own part of the data, and the results are added."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist

from epimer.errors import EpimerError

T = TypeVar("T")

TIMEOUT = timedelta(hours=12)  # for the slowest rank


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_first_rank(work: Callable[[], T]) -> T:
    """Return, on every rank, what `work` returns on the first one; an error of its input is raised on all of them."""
    rank, count = ranks()
    outcome: list[T | EpimerError | None] = [None]
    if rank == 0:
        try:
            outcome[0] = work()
        except EpimerError as error:
            outcome[0] = error
    if count > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], EpimerError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def first_of_ranks(value: T | None) -> T | None:
    """Return, on every rank, the value of the first rank that has one; all ranks must call it."""
    _, count = ranks()
    values: list[T | None] = [value] * count
    if count > 1:
        dist.all_gather_object(values, value)
    return next((one for one in values if one is not None), None)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group of torchrun or accelerate, where one of them started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave() -> None:
    """End a process of several, when all output is written, without the interpreter's shutdown.

    A rank can abort in that shutdown while gloo's threads are still ending; torchrun then reports the run as failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
