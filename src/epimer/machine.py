"""What this machine has: memory, or too little of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "ALLOC_FAILED", "bad_alloc", "can't start new thread")
"""words of the RuntimeErrors by which torch and Python say that memory could not be had: there is no class for it"""


def available_memory() -> int:
    """Return the bytes of memory that are free on this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: Python's, torch's or the system's."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    known = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)  # torch's, which is not imported
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))
