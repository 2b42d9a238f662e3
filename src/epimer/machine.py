"""What this machine has: memory."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Return the bytes of memory that are free on this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
