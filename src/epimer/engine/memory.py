"""How much memory there is, how much is used, and how much the jobs of a walk may take together."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from epimer.checkpoints.checkpoint import KEPT
from epimer.errors import ParameterError
from epimer.machine import available_memory
from epimer.plain_text import format_size
from epimer.plan.memory import METHOD

M_MMAP_THRESHOLD = -3  # glibc's name for it
SLACK = (1 << 26) + KEPT  # bytes kept free for what is not counted: Python, headers, the journal, unused pages
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

Room = Callable[[str, int], AbstractContextManager[None]]
"""a job's name and the bytes it will take, more than planned -> a block in which it may"""
ROOM: ContextVar[Room] = ContextVar("room", default=lambda name, needed: nullcontext())
"""how the job that is worked on gets more memory than planned"""


def memory_budget(max_memory: str | int | None, jobs: Iterable[Any], *, elsewhere: bool = False) -> int:
    """Return the bytes that jobs may take together; refuse a job that needs more than the limit, or than is free.

    Args:
        max_memory: most memory of the whole process, as "3GB"; None takes four fifths of what is free, or what the
            widest job needs.
        jobs: each with its `name` and `memory`, and perhaps `smaller()`: settings that take less, and their bytes.
        elsewhere: jobs are computed in a device's own memory, so that they may need more than is free here.
    """
    widest = max(jobs, key=lambda job: job.memory, default=None)
    needed = 0 if widest is None else widest.memory
    if max_memory is None:
        free = available_memory()
        if widest is not None and needed > free and not elsewhere:
            raise ParameterError(
                f"{widest.name!r} needs {format_size(needed)} of memory and {format_size(free)} are free; "
                f"{_remedy(widest, free)}."
            )
        if needed > free // 4:
            return_freed_memory()
        return max(int(0.8 * free), needed)
    return_freed_memory()
    most, used = parse_size(max_memory, "max_memory"), resident_memory() + SLACK
    if widest is not None and used + needed > most:
        raise ParameterError(
            f"max_memory of {format_size(most)} is too little: {widest.name!r} needs {format_size(needed)} "
            f"beside {format_size(used)} for Python and torch; give {(used + needed) / 1e9 + 0.01:.2f}GB"
            f"{_otherwise(widest, most - used)}."
        )
    return most - used


def _remedy(job: Any, free: int) -> str:
    """Return what to do where a job needs more than is free."""
    fitting = _fitting(job, free)
    if fitting:
        return f"take {' or '.join(fitting)}"
    return f"free some{_in_parts(job) or ', or take a method that needs less'}"


def _otherwise(job: Any, free: int) -> str:
    """Return what else to do where a job needs more than a limit."""
    return "".join(f", or take {setting}" for setting in _fitting(job, free)) or _in_parts(job)


def _in_parts(job: Any) -> str:
    """Return the rule under which a tensor takes little memory, if it does not have such a rule."""
    return "" if getattr(job, "entrywise", True) else f", or give {job.name!r} the rule 'average', which takes parts"


def _fitting(job: Any, free: int) -> list[str]:
    """Return the nearest value of each setting under which a job fits into the bytes that are free.

    Another method is named only where no setting of the job's own is enough.
    """
    fitting: dict[str, str] = {}
    for setting, value, needed in getattr(job, "smaller", tuple)():
        if needed <= free:
            fitting.setdefault(setting, f"{setting}: {value} ({format_size(needed)})")
    if len(fitting) > 1:
        fitting.pop(METHOD, None)
    return list(fitting.values())


def parse_size(text: str | int, name: str) -> int:
    """Return a size like 5GB or 512MiB in bytes."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if not match or not float(match[1]) > 0 or match[2] not in UNITS:
        raise ParameterError(f"The {name!r} parameter must be a size like 5GB or 512MiB. Got {text!r} instead.")
    return int(float(match[1]) * UNITS[match[2]])


def resident_memory() -> int:
    """Return the bytes this process has in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """Return the most bytes this process has had in memory so far.

    `ru_maxrss` also counts what the parent had in memory when it started this process; VmHWM does not.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def return_freed_memory() -> None:
    """Let the C library give every freed block of a megabyte or more back at once, not keep it for later."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
