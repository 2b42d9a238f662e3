"""Run commands of epimer that meet a fault, each in a process of its own that is forked with everything imported.

Reads one case per line from stdin, as JSON, and answers each with a line: see `faults.Commands`, which starts this.

A *moment* is a call by which a process changes or looks at the disk: audit events of Python for files under the case's
folder, and `os.pwrite`, `os.fsync` and `os.fdatasync`, which Python does not announce.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
REMOVALS = ("os.remove", "os.rmdir")
METHODS = ("average", "tsv", "epimer_kron")
"""that demo and bench compare"""
UNANNOUNCED = ("pwrite", "fsync", "fdatasync")
IMPORTED = (
    "epimer.cli", "epimer.api", "epimer.curvature.measure", "epimer.diagnosis.sweep", "epimer.engine.curvature_shards",
    "epimer.evaluation.hf_suite", "epimer.evaluation.run_evaluation", "epimer.experiments.demo",
    "epimer.experiments.run", "epimer.experiments.seeds", "epimer.report.write", "rich.table",
    "transformers.models.bert.modeling_bert", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)  # fmt: skip


class Moments:
    """Counts moments of this process, and brings about a fault at one of them."""

    def __init__(self, folder: str, log: str, at: int | None, fault: str | None, reads: bool) -> None:
        self.folder, self.at, self.fault, self.reads = os.path.join(folder, ""), at, fault, reads
        self.count, self.lock = 0, Lock()
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self.announced)
        for name in UNANNOUNCED:
            setattr(os, name, self.watched(name, getattr(os, name)))

    def announced(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(args[0], str | bytes | os.PathLike):
                return
            path, writes = os.fsdecode(args[0]), bool((args[2] or 0) & WRITES)
            if os.path.abspath(path).startswith(self.folder) and (writes or self.reads):
                self.moment("open to write" if writes else "open to read", path)
        elif event in CHANGES:
            path = os.fsdecode(args[0]) if not isinstance(args[0], int) else str(args[0])
            within = os.path.abspath(path).startswith(self.folder) or (event in CHANGES[1:4] and args[-1] != -1)
            if within:
                self.moment(event, path)

    def watched(self, name: str, call: Any) -> Any:
        def watching(*args: Any) -> Any:
            self.moment(name, "")
            return call(*args)

        return watching

    def moment(self, what: str, path: str) -> None:
        with self.lock:
            self.count += 1
            now = self.count
        with suppress(OSError):  # where files may not be that large
            os.write(self.log, f"{what} {path}\n".encode())
        if now != self.at or self.fault is None:
            return
        if what in REMOVALS and hasattr(errno, self.fault):
            self.at = now + 1  # what cannot be removed is left, whoever tries
        elif self.fault.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.fault))
        elif " " in self.fault:
            change_file(*self.fault.split(" "))
        else:
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), path)


def change_file(how: str, name: str) -> None:
    """Do to an input what other processes do to files, here and now."""
    path = Path(name)
    data = path.read_bytes()
    if how == "cut":
        os.truncate(path, len(data) // 2)
    elif how == "rewrite":  # in its place, to the same size
        path.write_bytes(data[: len(data) // 2] + bytes(byte ^ 1 for byte in data[len(data) // 2 :]))
    elif how == "replace":  # by another file of the same size
        path.with_suffix(".new").write_bytes(bytes(byte ^ 1 for byte in data))
        path.with_suffix(".new").replace(path)
    else:
        path.unlink()


def jumping() -> float:
    """Return the time of a clock that jumps, mostly back."""
    return random.random() * 4e9


def run(case: dict[str, Any]) -> None:
    """Run one command in this process, to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(case["folder"])
    for target, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    os.environ |= case["environment"]
    if case["clock"]:
        time.time = jumping
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in case["limits"].items():
        most += used if name == "AS" else 0  # what may be added to what is mapped already
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if case["at"] is not None or case["log"]:
        Moments(case["folder"], case["log"], case["at"], case["fault"], case["reads"])
    time.perf_counter = lambda: 0.0  # so that results hold no times, and can be compared
    sys.argv = ["epimer", *case["command"]]
    from epimer.cli import main

    main()


def leave(run: Any, case: dict[str, Any]) -> None:
    """Run a case and end this process as Python does, but for the clearing of a million objects, which takes long."""
    code: Any = 0
    try:
        run(case)
    except SystemExit as left:
        code = left.code or 0
    except KeyboardInterrupt:  # before the command began, which thus ends as Python does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def small_suites() -> None:
    """Let the suite that is trained here be small and few methods be compared, which takes seconds and not minutes."""
    from epimer.experiments import bench
    from epimer.experiments.glyphs8 import build
    from epimer.experiments.glyphs8.train import TINY

    build.Settings = lambda: TINY  # type: ignore[assignment, misc]
    bench.CANDIDATES = tuple(one for one in bench.CANDIDATES if one.name in METHODS)


def serve() -> None:
    """Answer cases until there are no more."""
    for name in IMPORTED:
        importlib.import_module(name)
    small_suites()
    gc.freeze()
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        case = json.loads(line)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            leave(run, case)
        code = wait(child, case)
        seconds = time.monotonic() - started
        print(json.dumps({"code": code, "seconds": seconds}), flush=True)  # noqa: T201


def wait(child: int, case: dict[str, Any]) -> int:
    """Wait for a process, send it what the case says, and end it where it takes too long; return its exit code."""
    started, sent = time.monotonic(), False
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - started
        if case["after"] is not None and passed >= case["after"] and not sent:
            os.kill(child, getattr(signal, case["fault"]))
            sent = True
        if passed > case["longest"]:
            os.kill(child, signal.SIGKILL)
            Path(case["err"]).write_text("it hung\n")
        time.sleep(0.002)


if __name__ == "__main__":
    serve()
