"""Run cases in processes of their own, with time and memory bounded, and tell which of them escaped.

A case is named by its reader, the seed and its number, and is the same wherever and whenever it runs. What a reader may
do with it is to succeed with a result that holds, or to raise one of epimer's own errors, in one line.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

SECONDS = 10.0  # of processor time that a case may take, however busy the machine is
PATIENCE = 100.0  # seconds between looks at a process that does not answer: does it still work?
MEMORY = 400 << 20  # bytes it may use at most
ROOM = 2 << 30  # bytes of address space it may take; more is refused by the system
COMMAND = "PYTHONPATH=src:tests python -m fuzz {reader} --seed {seed} --case {case}"


class TooLongError(BaseException):
    """A case took longer than it may; no reader catches it."""


@dataclass(frozen=True)
class Reader:
    """One thing that epimer reads."""

    name: str
    build: Callable[[Path], None]
    """write valid files into an empty folder"""
    damage: Callable[[Random, Path], None]
    """change some of those files"""
    read: Callable[[Path], None]
    """read the folder as epimer does; an AssertionError says that what came out is wrong"""
    share: int = 2
    """of all cases, relative to the others"""


@dataclass
class Outcome:
    """What became of some cases of one reader."""

    reader: str
    cases: int = 0
    accepted: int = 0
    escapes: list[str] = field(default_factory=list)


def quiet_environment() -> None:
    """Keep every library of a case off the network, on one thread and silent."""
    os.environ.update(
        HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_TELEMETRY="1"
    )
    warnings.simplefilter("ignore")


def run_case(reader: Reader, seed: int, case: int, template: Path) -> str | None:
    """Run one case on a damaged copy of the files in `template`; None where it was accepted, else the error.

    Anything but an error of epimer's in one line is raised.
    """
    from epimer.errors import EpimerError

    folder = Path(tempfile.mkdtemp(prefix="case-", dir=template.parent))
    before = _peak_memory(reset=True)
    try:
        place = folder / "files"
        shutil.copytree(template, place, symlinks=True)
        reader.damage(Random(f"{reader.name} {seed} {case}"), place)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    reader.read(place)
                finally:
                    used = _peak_memory() - before
                    assert used <= MEMORY, f"it used {used / 2**20:.0f} MiB of memory"
        except EpimerError as error:
            text = str(error)
            if len(text.splitlines()) != 1 or any(ord(c) < 32 or ord(c) == 127 for c in text):
                raise AssertionError(f"the error is not one line of text: {text!r:.300}") from error
            return text
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_for_files() -> str | None:
    """Return a folder in memory where there is one: cases write many small files, and sync them."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def serve(reader_name: str, seed: int, first: int, last: int, seconds: float, root: Path, pipe: Any) -> None:
    """Run cases in this process, which has its limits set for that; tell each one's start and end."""
    import torch

    from fuzz.readers import READERS
    from fuzz.readers.faulty import FAULTY

    quiet_environment()
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    signal.signal(signal.SIGPROF, _stop)
    limit = _address_space() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader = (READERS | {FAULTY.name: FAULTY})[reader_name]
    template = root / "template"
    template.mkdir()
    reader.build(template)
    for case in range(first, last):
        pipe.send(("begin", case, ""))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            refused = run_case(reader, seed, case, template)
            answer = ("accepted" if refused is None else "refused", case, "")
        except BaseException as error:  # a case may raise anything
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer = ("escaped", case, _brief(error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLongError("it took too long")


def _peak_memory(*, reset: bool = False) -> int:
    """Return the most bytes that this process had in memory since the last reset; 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _processor_time(pid: int | None) -> float:
    """Return the seconds of processor time that a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 8 << 30


def _brief(error: BaseException) -> str:
    """Return an error and the last line of epimer's that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/epimer/" in f.filename]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = str(error).splitlines()
    return f"{type(error).__name__}{place}: {text[0][:300] if text else ''}"


def run_cases(
    reader: str, seed: int, first: int, last: int, seconds: float = SECONDS, patience: float = PATIENCE
) -> Outcome:
    """Run the cases from `first` to before `last` of a reader; a process that dies or hangs is replaced."""
    outcome = Outcome(reader)
    while first < last:
        for kind, case, text in _answers(reader, seed, first, last, seconds, patience):
            first = case + 1
            outcome.cases += 1
            outcome.accepted += kind == "accepted"
            if kind not in ("accepted", "refused"):
                outcome.escapes.append(f"{text}\n    {COMMAND.format(reader=reader, seed=seed, case=case)}")
    return outcome


def _answers(
    reader: str, seed: int, first: int, last: int, seconds: float, patience: float
) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, case, text) of every case until all are done, or until one ended its process.

    A process that is silent hangs if it uses no processor time, or much more than a case may, out of reach of signals.
    One that others keep from its processor does neither.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fuzz.readers"])
    ours, theirs = context.Pipe(duplex=False)
    root = Path(tempfile.mkdtemp(prefix="epimer-fuzz-", dir=place_for_files()))
    process = context.Process(target=serve, args=(reader, seed, first, last, seconds, root, theirs), daemon=True)
    process.start()
    theirs.close()
    current, began, used = first, 0.0, 0.0
    try:
        while True:
            if not ours.poll(patience):
                before, used = used, _processor_time(process.pid)
                if used > before and used - began < 10 * seconds:
                    continue
                yield "escaped", current, f"it hung: no answer after {used - began:.1f} seconds of processor time"
                return
            began = used = _processor_time(process.pid)
            try:
                kind, case, text = ours.recv()
            except EOFError:
                process.join()
                if current < last:
                    yield "escaped", current, f"its process died with {process.exitcode}"
                return
            if kind == "begin":
                current = case
                continue
            current = case + 1
            yield kind, case, text
    finally:
        process.kill()
        process.join()
        shutil.rmtree(root, ignore_errors=True)  # here, as a process that dies leaves its files


def shares(readers: dict[str, Reader], cases: int) -> dict[str, int]:
    """Divide a number of cases among the readers."""
    total = sum(reader.share for reader in readers.values())
    counts = {name: cases * reader.share // total for name, reader in readers.items()}
    for name in list(counts)[: cases - sum(counts.values())]:
        counts[name] += 1
    return counts


def table(outcomes: list[Outcome]) -> str:
    """Return what became of all cases, a line for each reader."""
    merged: dict[str, Counter[str]] = {}
    for one in outcomes:
        merged.setdefault(one.reader, Counter()).update(
            cases=one.cases, accepted=one.accepted, escaped=len(one.escapes)
        )
    lines = [f"{'reader':24}{'cases':>8}{'accepted':>10}{'refused':>9}{'escaped':>9}"]
    for name, n in {**merged, "all": sum(merged.values(), Counter())}.items():
        refused = n["cases"] - n["accepted"] - n["escaped"]
        lines.append(f"{name:24}{n['cases']:8}{n['accepted']:10}{refused:9}{n['escaped']:9}")
    return "\n".join(lines)
