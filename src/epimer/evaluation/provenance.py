"""The origin of a result: the code, the machine, the command and the settings."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import epimer

SOURCE = Path(__file__).parents[1]


def provenance(**settings: Any) -> dict[str, Any]:
    """Return the origin of a result: commit, versions, date, machine, command, and the settings that it depends on.

    Args:
        settings: plain values, such as `seed` and `samples`, which are returned beside the others.
    """
    return {
        "epimer": epimer.__version__,
        **source_state(SOURCE),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
        "machine": machine(),
        "command": command(sys.argv),
        **settings,
    }


def source_state(package: Path) -> dict[str, Any]:
    """Return the commit that a package's source is at, and whether its code differs from that commit.

    Args:
        package: the folder of the package. It counts as a checkout only if git tracks it, because an installed package
            often lies in a folder of some other repository.

    Returns:
        `commit` and `dirty`; both are None outside a checkout.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    # Results that an earlier benchmark wrote are no change of the code.
    code = (".", ":(top)benchmarks", ":(top,exclude)benchmarks/results")
    changes = _git(package, "status", "--porcelain", "--", *code)
    return {"commit": _git(package, "rev-parse", "HEAD"), "dirty": changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder, or None if it fails or git is not installed."""
    try:
        completed = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()


def machine() -> dict[str, Any]:
    """Return the names of the processor and of the GPU in use (None: none), and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {"cpu": _cpu_name(), "cores": cores, "gpu": gpu}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command(arguments: Sequence[str]) -> str:
    """Return a command line as one would type it.

    Absolute paths are cut to their names, because results are published.

    Examples:
        >>> command(["/usr/lib/epimer/__main__.py", "bench", "--out=/home/me/results", "-o", "my results"])
        "epimer bench --out=results -o 'my results'"
    """
    program = Path(arguments[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *map(_without_folders, arguments[1:])])


def _without_folders(argument: str) -> str:
    """Return a command's argument, with an absolute path (also one behind `=`) cut to its last part."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if os.path.isabs(value) else value)
