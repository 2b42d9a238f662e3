"""Faults brought about in real processes of every command that writes, and what may be left behind by them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file, save_file

SERVER = Path(__file__).with_name("fault_server.py")
LONGEST = 120.0  # seconds; a command that hangs is a failure, not the end of the tests
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SERVER.parent), os.environ.get("PYTHONPATH")])),
}  # fmt: skip
CPUINFO = re.compile(r"^.*(?:/proc/cpuinfo|/sys/devices/system/cpu).*\n", re.MULTILINE)
"""what torch prints where it cannot read about the processor, as with too few file handles"""
MEASURED = re.compile(
    rb'"(?:(?:peak_memory|seconds)": (?:[\d.]+|null)|timings": \{[^}]*\}|(?:date|commit|dirty|cpu)": [^,\n]*)'
    rb"|\b\d{4}-\d\d-\d\d\b"
)
"""what a record tells of a run, not of its result: how long it took, its date, and its commit, which takes a process"""
EMPTY = "an empty folder"
RULES = [["cls.*", "copy"], ["classifier.*", "skip"]]
SUITE = """
import torch
from torch import nn
from epimer import Split, Suite, SuiteTask

def network(state, task):
    made = nn.Linear(2, 2)
    made.load_state_dict(dict(state))
    return made.eval()

def make():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    splits = [dict.fromkeys(("train", "val", "test"), Split(x, (x[:, i] > 0).long())) for i in (0, 1)]
    tasks = [SuiteTask(f"column{i}", ["low", "high"], splits[i]) for i in (0, 1)]
    states = [{"weight": torch.eye(2) * s, "bias": torch.zeros(2)} for s in (1.0, 2.0, 3.0)]
    return Suite("columns", states[0], states[1:], tasks, network)
"""


class Ran(NamedTuple):
    """What a process did."""

    code: int
    out: str
    err: str
    moments: list[str]
    seconds: float


class Commands:
    """Runs commands that meet a fault."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.temporary = scratch, scratch / "tmp"
        self.temporary.mkdir()
        environment = {**ENVIRONMENT, "TMPDIR": str(self.temporary)}
        self.server = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n"

    def run(
        self,
        folder: Path,
        *command: object,
        at: int | None = None,
        after: float | None = None,
        fault: str | None = None,
        reads: bool = False,
        limits: dict[str, int] | None = None,
        clock: bool = False,
        environment: dict[str, str] | None = None,
    ) -> Ran:
        """Run a command in a folder, with a fault at a moment or after some seconds; see `fault_server`.

        Args:
            folder: where it runs.
            command: its arguments.
            at: the number of the moment at which the fault happens.
            after: the seconds after which it happens, where that is a signal.
            fault: a signal's name, or that of an error that the system then answers with; or what happens to a file
                then, as "cut base.bin".
            reads: whether opening a file to read it is a moment too.
            limits: of the system, as {"NOFILE": 20}; that of AS is what may be added.
            clock: whether the clock jumps.
            environment: what is added to it.
        """
        out, err, log = (self.scratch / name for name in ("out", "err", "log"))
        log.unlink(missing_ok=True)
        case = {
            "folder": str(folder), "command": list(map(str, command)), "at": at, "after": after, "fault": fault,
            "reads": reads, "limits": limits or {}, "clock": clock, "environment": environment or {},
            "longest": LONGEST, "out": str(out), "err": str(err), "log": str(log),
        }  # fmt: skip
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(case) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        moments = log.read_text().splitlines() if log.exists() else []
        return Ran(answer["code"], out.read_text(), CPUINFO.sub("", err.read_text()), moments, answer["seconds"])

    def close(self) -> None:
        """End the server."""
        with self.server:
            self.server.communicate(timeout=LONGEST)


@dataclass(frozen=True)
class Command:
    """A command that writes: what it is given, what it makes, and what is there before."""

    arguments: tuple[str, ...]
    makes: tuple[str, ...]
    """files and folders that appear whole or not at all"""
    before: tuple[str, ...] = ()
    """a command that is run first, whose results this one replaces"""
    drafts: tuple[str, ...] = ()
    """what may stay for the next run where this one was stopped"""
    environment: dict[str, str] = field(default_factory=dict)


MERGE = ("merge", "recipe.yaml", "out", "--max-shard-size", "8KB", "--quiet")
LORA = ("merge", "recipe.yaml", "out", "--lora-rank", "2", "--quiet")
CURVATURE = (
    "curvature", "animal", "--data", "animal-train.jsonl", "--task", "text-classification", "--text", "sentence",
    "--samples", "8", "--batch-size", "4", "-o", "out", "--quiet",
)  # fmt: skip
BASIS = ("basis", "recipe.yaml", "out", "--kind", "tensor", "--rank", "2", "--quiet")
CONVERT = ("convert", "base.bin", "out.safetensors", "--quiet")
SWEEP = (
    "sweep", "recipe.yaml", "--eval", "suite.yaml", "--methods", "average,tsv", "--scale", "1", "--keep-best", "out",
    "--out", "sweep.json", "--quiet",
)  # fmt: skip
COMMANDS = {
    "merge": Command(MERGE, ("out",), drafts=(".out.epimer",)),
    "merge, replacing": Command(
        (*MERGE, "--overwrite"), ("out",), ("merge", "other.yaml", "out", "--quiet"), (".out.epimer",)
    ),
    "merge torch files": Command(("merge", "files.yaml", "out", "--quiet"), ("out",), drafts=(".out.epimer",)),
    "merge, a LoRA": Command(LORA, ("out",), drafts=(".out.epimer",)),
    "merge, a record": Command(
        (*MERGE, "--hash-inputs", "--record", "record.json"), ("out", "record.json"), drafts=(".out.epimer",)
    ),
    "extract-lora": Command(
        ("extract-lora", "tuned", "--base", "base", "-r", "2", "-o", "out", "--quiet"), ("out",),
        drafts=(".out.epimer",),
    ),
    "curvature": Command(CURVATURE, ("out",)),
    "curvature, replacing": Command((*CURVATURE, "--overwrite"), ("out",), (*CURVATURE, "--kind", "diagonal")),
    "basis": Command(BASIS, ("out",)),
    "convert": Command(CONVERT, ("out.safetensors",)),
    "convert, replacing": Command(
        (*CONVERT, "--overwrite"), ("out.safetensors",), ("convert", "animal.bin", "out.safetensors", "--quiet")
    ),
    "sweep": Command(SWEEP, ("out", "sweep.json"), drafts=(".out.epimer",)),
    "diagnose": Command(
        ("diagnose", "recipe.yaml", "--out", "found.json", "--html", "found.html", "--quiet"),
        ("found.json", "found.html"),
    ),
    "report": Command(
        ("report", "records", "-o", "page.html", "--figures", "figures", "--quiet"), ("page.html",)
    ),
    "eval": Command(
        ("eval", "suite.yaml", "--model", "animal", "-o", "scores.json", "--quiet"), ("scores.json",)
    ),
    "bench": Command(("bench", "own_suite:make", "-o", "bench", "--quiet"), ()),
    "demo": Command(("demo", "-o", "demo", "--quiet"), ("demo/merged",), environment={"EPIMER_CACHE": "cache"}),
}  # fmt: skip


def make_workshop(folder: Path) -> Path:
    """Fill a folder with models, data, recipes, a suite and records, for every command to work on."""
    import found
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    tiny.make_classifiers(folder)
    (folder / "suite.yaml").write_text(yaml.safe_dump(tiny.suite_of(), sort_keys=False))
    (folder / "own_suite.py").write_text(SUITE)
    found.write_all(folder / "records")
    models = [{"model": task} for task in tiny.TASKS]
    recipe: dict[str, Any] = {"merge_method": "tsv", "base_model": "base", "models": models, "rules": RULES}
    write_yaml(folder / "recipe.yaml", recipe)
    write_yaml(folder / "other.yaml", recipe | {"merge_method": "task_arithmetic"})
    for name in ("base", *tiny.TASKS):
        torch.save(load_file(folder / name / "model.safetensors"), folder / f"{name}.bin")
    shutil.copytree(folder / "base", folder / "tuned")
    noise = torch.Generator().manual_seed(0)
    state = load_file(folder / "base" / "model.safetensors")
    moved = {name: W + 0.1 * torch.randn(W.shape, generator=noise) for name, W in state.items()}
    save_file(moved, folder / "tuned" / "model.safetensors", {"format": "pt"})
    files = [{"model": f"{task}.bin"} for task in tiny.TASKS]
    write_yaml(folder / "files.yaml", recipe | {"base_model": "base.bin", "models": files, "merge_method": "ties"})
    return folder


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def furnish(workshop: Path, folder: Path) -> Path:
    """Make a folder with links to all that is in the workshop."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in workshop.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file that is not a link and of every empty folder, without times that were measured."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or any(one.is_symlink() for one in path.parents if one.is_relative_to(folder)):
            continue
        if path.is_dir():
            if not any(path.iterdir()):
                found[name] = EMPTY
        else:
            found[name] = hashlib.sha256(MEASURED.sub(b"", path.read_bytes())).hexdigest()[:16]
    return found


class Trial:
    """A command that meets faults, in a folder of its own, and what it should make."""

    def __init__(self, commands: Commands, workshop: Path, folder: Path, command: Command) -> None:
        self.commands, self.workshop, self.folder, self.command = commands, workshop, folder, command
        self.inputs: tuple[str, ...] = ()  # that are copies, not links
        self.before = self.start()
        done = self.run()
        assert (done.code, done.out, done.err) == (0, "", ""), done
        self.expected, self.moments, self.seconds = self.contents(), done.moments, done.seconds
        assert self.expected != self.before
        assert not [name for name in self.expected if name.startswith(".") or "/." in name], self.expected

    @property
    def writes(self) -> list[int]:
        """The moments at which something is written; what cannot be removed is left, whoever tries."""
        removals = re.compile(r"os\.remove|os\.rmdir|os\.rename .*[/-]old$")  # a replaced folder is moved, then removed
        return [i for i, one in enumerate(self.moments, 1) if not removals.match(one)]

    @property
    def kinds(self) -> dict[str, list[int]]:
        """The moments at which something is written, by the call that does it."""
        kinds: dict[str, list[int]] = {}
        for moment in self.writes:
            what = self.moments[moment - 1]
            kinds.setdefault("open" if what.startswith("open") else what.split()[0], []).append(moment)
        return kinds

    def start(self) -> dict[str, str]:
        """Begin anew; return what is there before the command."""
        furnish(self.workshop, self.folder)
        self.inputs = ()
        if self.command.before:
            done = self.commands.run(self.folder, *self.command.before)
            assert done.code == 0, done
        return self.contents()

    def contents(self) -> dict[str, str]:
        """Return what the command's folder holds beside its inputs."""
        there = contents(self.folder)
        return {name: one for name, one in there.items() if name.split("/")[0] not in self.inputs}

    def run(self, **fault: Any) -> Ran:
        """Run the command, with a fault or without."""
        return self.commands.run(self.folder, *self.command.arguments, environment=self.command.environment, **fault)

    def meet(self, fault: str = "", **when: Any) -> list[str]:
        """Let the command meet a fault, then run it again; return everything that is wrong."""
        return self.survive([{"fault": fault, **when}])

    def survive(self, faults: list[dict[str, Any]]) -> list[str]:
        """Let runs of the command meet faults, one each, then run it to its end; return everything that is wrong."""
        self.start()
        wrong: list[str] = []
        stopped = killed = False  # what these leave, the next run that comes so far takes over
        for one in faults:
            fault = one["fault"]
            stopped, killed = stopped or fault.startswith("SIG"), killed or fault == "SIGKILL"
            changed = fault.split(" ")[1] if " " in fault else ""
            if changed:
                self._put_back(changed)
            before = self.contents()
            ran = self.run(**one)
            if changed:
                self._put_back(changed)
            outside = "after" in one and ran.code < 0 and not ran.err and self.contents() in (before, self.expected)
            if not outside:  # of the command: Python was starting or ending
                wrong += self._exit(ran, fault)
            wrong += self._left(drafts=stopped, killed=killed)
        again = self.run()
        if (again.code, again.out, again.err) != (0, "", "") and not refused(again):
            wrong.append(f"a last run ended with {again.code}: {again.err.strip()[-300:]}")
        if there := differing(self.contents(), self.expected):
            wrong.append(f"a last run made something else: {there}")
        return wrong

    def _put_back(self, name: str) -> None:
        """Put a copy of an input, which may be changed, in the place of a link to it."""
        top = self.folder / Path(name).parts[0]
        if top.is_symlink():
            top.unlink()
        else:
            shutil.rmtree(top) if top.is_dir() else top.unlink(missing_ok=True)
        source = self.workshop / Path(name).parts[0]
        shutil.copytree(source, top) if source.is_dir() else shutil.copy2(source, top)
        self.inputs = (top.name,)

    def _exit(self, ran: Ran, fault: str) -> list[str]:
        """Say what is wrong with how a command ended."""
        if self.contents() == self.expected and (ran.code == 0 or refused(ran)):
            return []  # it was past the fault, could do without what failed, or found what an earlier run made
        if fault == "SIGKILL":
            return [] if ran.code == -9 else [f"ended with {ran.code}"]
        code, start = {"SIGINT": (130, "stopped"), "SIGTERM": (143, "stopped")}.get(fault, (2, "error: "))
        one_line = ran.err.startswith(start) and ran.err.count("\n") == 1 and not ran.out
        return [] if ran.code == code and one_line else [f"ended with {ran.code}: {ran.err.strip()[-300:]!r}"]

    def _left(self, *, drafts: bool, killed: bool) -> list[str]:
        """Say what is wrong with what a command left behind."""
        there = self.contents()
        temporary = self.commands.temporary.iterdir()
        wrong = [f"left {path}" for path in temporary if not path.name.startswith("torchinductor")]  # torch's cache
        for name, one in there.items():
            first = name.split("/")[0]
            if first.startswith(".") or "/." in name:
                if not killed and not (drafts and first in self.command.drafts):
                    wrong.append(f"left {name}")
            elif one not in (EMPTY, self.before.get(name), self.expected.get(name)):
                wrong.append(f"{name} is something else")
        for place in self.command.makes:
            parts = [under(some, place) for some in (there, self.before, self.expected)]
            if parts[0] and parts[0] not in parts[1:]:
                wrong.append(f"{place} is incomplete")
            if parts[1] and not parts[0] and not killed:
                wrong.append(f"{place} is gone")
        return wrong


def refused(ran: Ran) -> bool:
    """Whether a command did nothing because its output is there."""
    return ran.code == 2 and "choose another name, or pass --overwrite" in ran.err


def under(there: dict[str, str], place: str) -> dict[str, str]:
    """Return what is at a place."""
    return {name: one for name, one in there.items() if name == place or name.startswith(place + "/")}


def differing(there: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the names that two folders do not have in common."""
    return sorted(name for name in {*there, *expected} if there.get(name) != expected.get(name))
