"""Divide a measurement into passes over the data, each of some tensors, so that the sums of one pass fit in memory.

Between passes finished tensors leave the accelerator for the host's memory, or for a file where that is too small.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.atomic_files import explain_os_errors
from epimer.curvature.kinds import tensors_of
from epimer.errors import EpimerWarning, TooLargeError, warn
from epimer.geometry.metric import Metric
from epimer.machine import available_memory
from epimer.plain_text import format_size

SHARE = 0.6  # of the free memory that sums may take; the model's activations take the rest
WRITTEN = 2  # times that curvature which is measured on disk is written: as it is finished, and when it is saved
BASIS = "in a basis of the models to merge they are small: `epimer basis RECIPE BASIS`, then --basis BASIS (basis=)"
REMEDY = (
    ". Say which merge it is for, --recipe recipe.yaml (a function as basis=): it is then measured in a basis of the "
    "models to merge, where it is small. Or choose tensors with --layers (layers=)."
)


@dataclass(frozen=True)
class Passes:
    """Which tensors are measured in each pass over the data, and where they go when it is over."""

    groups: list[list[str]]
    folder: Path | None
    """where finished tensors are kept in files; None where memory holds all of them"""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[str]]:
        return iter(self.groups)

    def keep(self, metric: Any) -> Metric:
        """Return a finished tensor's curvature out of the way of later passes; that of a single pass stays."""
        if len(self) == 1:
            return metric
        folder, values = self.folder, tensors_of(metric)
        moved = {name: W.cpu() if folder is None else in_file(W, folder) for name, W in values.items()}
        return replace(metric, **moved)


def plan_passes(sizes: Mapping[str, int], device: torch.device, passes: int | None, scratch: Path | None) -> Passes:
    """Divide tensors, with the bytes of each one's sums, into passes over the data.

    Args:
        sizes: tensor -> bytes of its sums.
        device: where they are summed.
        passes: how many; None takes as many as the free memory asks for, and warns where that is more than one.
        scratch: folder for what the host's memory cannot hold; None takes the system's folder for temporary files.
    """
    needed, free = sum(sizes.values()), free_memory(device)
    groups = divide(sizes, passes or max(1, math.ceil(needed / (SHARE * max(1, free)))))
    host, folder = free_memory(torch.device("cpu")), None
    if len(groups) > 1 and needed > SHARE * host:
        folder = Path(tempfile.gettempdir()) if scratch is None else scratch
        _check_disk(needed, host, folder)
    if passes is None and len(groups) > 1:
        place = "" if folder is None else ", finished ones being kept on disk"
        size = f"the sums of {len(sizes)} tensors take {format_size(needed)} and {format_size(free)} of memory are free"
        measured = f"they are measured in {len(groups)} passes over the data (--passes, passes=){place}"
        warn(EpimerWarning(f"{size}: {measured}; {BASIS}."))
    return Passes(groups, folder)


def divide(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide names, in their order, into at most `count` groups of about the same size together."""
    groups: list[list[str]] = [[] for _ in range(count)]
    total, before = max(1, sum(sizes.values())), 0
    for name, size in sizes.items():
        groups[min(count - 1, int(count * (before + size / 2) / total))].append(name)
        before += size
    return [group for group in groups if group]


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take: of the accelerator's memory, or its share of the host's."""
    if device.type != "cuda":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share it
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _check_disk(needed: int, host: int, folder: Path) -> None:
    """Refuse what fits neither in memory nor on disk, before anything is measured."""
    room = shutil.disk_usage(folder).free
    if WRITTEN * needed > room:
        free = f"{format_size(host)} of memory and {format_size(room)} of disk at {folder} are free"
        taken = f"the curvature takes {format_size(needed)}, {WRITTEN} times that on disk, to be measured and saved"
        raise TooLargeError(f"{taken}; {free}", REMEDY)


def in_file(value: Tensor, folder: Path) -> Tensor:
    """Return a copy of a tensor that lies in a file without a name, which ends with the tensor.

    The system may write its pages to disk and take them from memory, and reads them again when they are used.
    """
    if not value.numel():
        return value.cpu()
    with explain_os_errors(folder, "written"), _nameless_file(folder) as (handle, path):
        os.posix_fallocate(handle, 0, value.nbytes)  # a full disk is an error here, and a crash in a mapping
        stored = torch.from_file(path, shared=True, size=value.numel(), dtype=value.dtype)
    return stored.view(value.shape).copy_(value)


@contextmanager
def _nameless_file(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield a file that ends with its last use, and a path that opens it; a process that is killed leaves nothing."""
    named = ""
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (AttributeError, OSError):  # the system, or the file system, has no files without names
        handle, named = tempfile.mkstemp(dir=folder)
    try:
        yield handle, named or f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
        if named:
            os.unlink(named)
