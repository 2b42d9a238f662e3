"""What this machine has: memory, or too little of it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

NO_MEMORY = re.compile(
    "DefaultCPUAllocator|CUDA error: out of memory|ALLOC_FAILED|bad_alloc|can't start new thread"
    "|could not create a primitive(?! descriptor)"  # oneDNN's, where a descriptor is what it does not know
)
"""words of the RuntimeErrors by which torch and Python say that memory could not be had: there is no class for it"""
ROOT = Path("/")


def available_memory() -> int:
    """Return the bytes of memory that are free on this machine, or in the container that this process runs in."""
    try:
        lines = (ROOT / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, *_left_to_control_groups())


def _left_to_control_groups() -> Iterator[int]:
    """Yield what each of Linux' control groups around this process may still take (version 2, as containers have)."""
    yield 1 << 63
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
        own = Path(next(line.split(":", 2)[2] for line in lines if line.startswith("0::")).lstrip("/"))
    except (OSError, StopIteration):
        return
    for group in (own, *own.parents):
        folder = ROOT / "sys/fs/cgroup" / group
        try:
            most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit, which is the word max, or no such group
            continue
        yield max(0, most - used + int(stat.get("inactive_file", 0)))  # a file's pages are given back when asked for


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: Python's, torch's or the system's."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    known = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)  # torch's, which is not imported
    return known or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None)
