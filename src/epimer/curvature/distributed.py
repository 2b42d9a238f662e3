"""The processes of torchrun or accelerate: each rank measures its own part of the data, and the results are added."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

TIMEOUT = timedelta(hours=12)  # for the slowest rank


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


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
