"""Merge checkpoints: recipe in, model folder out."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import re
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import epimer
from epimer.checkpoints.sidecar_files import carried, code_files
from epimer.checkpoints.writer import Draft, Shard, as_json, draft_of, explained, index_of, lay_out, settle
from epimer.engine.card import model_card
from epimer.engine.threads import Runner
from epimer.errors import EpimerError, OutputError, ParameterError, listed
from epimer.methods.merge import check_device, plain, tied, warn_of
from epimer.methods.registry import Prepared
from epimer.plan.jobs import Plan, make_plan
from epimer.progress import Progress
from epimer.recipe.model import Recipe, open_recipe
from epimer.records import MergeRecord, TensorRecord

RECORD = "epimer.json"
INDEX = "model.safetensors.index.json"
ENGINES = ("local",)
M_MMAP_THRESHOLD = -3  # glibc's name for it
SLACK = 1 << 26  # bytes kept free for what is not counted: Python, headers, the journal
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Options:
    """How to run a merge; none of it changes what is computed but for the device's rounding."""

    device: str = "auto"
    workers: int | None = None
    threads: int = 1
    max_memory: str | int | None = None
    max_shard_size: str | int = "5GB"
    overwrite: bool = False
    progress: bool = True


def merge(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
    engine: str = "local",
    progress: bool = True,
    overwrite: bool = False,
    any_curvature: bool = False,
    max_shard_size: str | int = "5GB",
    max_memory: str | int | None = None,
    workers: int | None = None,
    threads: int = 1,
    folder: Path | None = None,
) -> MergeRecord:
    """Merge the checkpoints that a recipe names into a new model folder.

    Args:
        recipe: a YAML file, or its content as a mapping.
        out: the folder to make; it appears when it is complete, and not before.
        device: cpu, cuda, cuda:N, or auto for every GPU there is, else the CPU.
        engine: local.
        progress: show a bar on a terminal.
        overwrite: replace a model folder that epimer made before.
        any_curvature: use curvature even where it was measured on another model.
        max_shard_size: largest file of weights, as "5GB".
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
        workers: tensors merged at the same time; by default one per core.
        threads: threads within each of them. Results do not depend on `workers`; they may, in their last digit, on
            `threads` and `device`.
        folder: where relative paths of a recipe that is no file are looked for too.
    """
    if engine not in ENGINES:
        raise ParameterError(f"There is no engine {engine!r}; engines: {', '.join(ENGINES)}.")
    options = Options(device, workers, threads, max_memory, max_shard_size, overwrite, progress)
    plan = plan_recipe(recipe, progress=progress, any_curvature=any_curvature, folder=folder)
    return run(plan, Path(out), options)


def plan_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    *,
    progress: bool = False,
    any_curvature: bool = False,
    folder: Path | None = None,
) -> Plan:
    """Read a recipe and plan its merge; relative paths are looked for in `folder` too, by default the recipe's own."""
    given, folder = open_recipe(recipe, folder)
    return make_plan(given, folder=folder, progress=progress, any_curvature=any_curvature)


def run(plan: Plan, out: Path, options: Options) -> MergeRecord:
    """Carry out a plan, or find that it has been carried out."""
    started = time.perf_counter()
    check_plan(plan)
    devices = _devices(options)
    memory = check_memory(plan, options)
    shards = lay_out(plan.outputs, plan.ties, parse_size(options.max_shard_size, "max_shard_size"))
    beside = _beside(plan, shards)
    out = Path(os.path.abspath(out.expanduser()))
    _settle(out)
    if (found := finished(out, plan, shards, beside)) is not None:
        return found
    check_output(out, plan, options)
    runner = Runner(plan, devices, threads=options.threads, memory=memory)
    key = _key(plan, shards, devices[0].type, options.threads)
    draft = Draft(out, shards, key, lambda: check_output(out, plan, options))
    with draft.opened(), Progress(options.progress) as progress:
        try:
            prepared = _prepare(plan, runner, draft, progress)
            before = time.perf_counter()
            records = _merge_all(plan, runner, draft, progress)
            now = time.perf_counter()
            timings = {"prepass": before - started, "merge": now - before, "total": now - started}
            record = _record(plan, prepared, records, shards, beside, timings)
            _publish(plan, draft, record, beside)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            draft.discard()
            raise
    warn_of(plan.method.name, record.tensors)
    return record


def check_plan(plan: Plan) -> None:
    """Refuse a plan with problems."""
    if plan.problems:
        first, more = plan.problems[0], len(plan.problems) - 1
        raise first if not more else type(first)(f"{first} ({more} more: see epimer merge --dry-run)")
    if not plan.jobs:
        raise EpimerError("there is nothing to write: the rules skip every tensor.")


def check_memory(plan: Plan, options: Options) -> int:
    """Return the bytes that jobs may take in all; refuse a limit that the widest tensor exceeds."""
    if options.max_memory is None:
        most = int(0.8 * _available())
        return max(most, plan.memory)
    _return_freed_memory()
    most, used = parse_size(options.max_memory, "max_memory"), _resident() + SLACK
    if used + plan.memory > most:
        widest = max(plan.parts, key=lambda job: job.memory)
        raise ParameterError(
            f"max_memory of {most / 1e9:.2f} GB is too little: {widest.name!r} needs {widest.memory / 1e9:.2f} GB "
            f"beside {used / 1e9:.2f} GB for Python and torch; give {(used + widest.memory) / 1e9 + 0.01:.2f}GB."
        )
    return most - used


def parse_size(text: str | int, name: str) -> int:
    """Return a size like 5GB or 512MiB in bytes."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if not match or not float(match[1]) > 0 or match[2] not in UNITS:
        raise ParameterError(f"The {name!r} parameter must be a size like 5GB or 512MiB. Got {text!r} instead.")
    return int(float(match[1]) * UNITS[match[2]])


def finished(out: Path, plan: Plan, shards: list[Shard], beside: dict[str, bytes]) -> MergeRecord | None:
    """Return the record of an output that is already what the plan would make."""
    record = _recorded(out)
    sizes = {shard.file: shard.size for shard in shards}
    if record is None or record.request != plan.request or not sizes.items() <= record.files.items():
        return None
    try:
        there = all((out / file).stat().st_size == size for file, size in record.files.items())
        there = there and all((out / file).read_bytes() == data for file, data in beside.items())
    except OSError:
        return None
    return record if there else None


def _recorded(out: Path) -> MergeRecord | None:
    """Return the record in a folder, if epimer made it."""
    try:
        return MergeRecord.from_dict(json.loads((out / RECORD).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_output(out: Path, plan: Plan, options: Options) -> None:
    """Refuse to write over what is there, unless it was asked for and is ours."""
    real = out.resolve()
    for one in plan.checkpoints:
        for file in one.files:
            if file.resolve().is_relative_to(real):
                raise OutputError(f"{out} holds {one.where}, which the merge reads; choose another output.")
    if not os.path.lexists(out):
        return
    if out.is_symlink():
        raise OutputError(f"{out} is a link; give the folder itself.")
    if not out.is_dir():
        raise OutputError(f"{out} is a file; the output is a folder: choose another name.")
    with explained(out, "read"):
        content = {path.name for path in out.iterdir()}
    if not content:
        return
    if not options.overwrite:
        raise OutputError(
            f"{out} exists and holds something else, or another version's; choose another name, or pass --overwrite."
        )
    record = _recorded(out)
    if record is None:
        raise OutputError(f"{out} was not made by epimer, so it is not replaced; remove it yourself first.")
    ours = {*record.files, RECORD, "README.md"}
    if content - ours:
        raise OutputError(
            f"{out} also holds {listed(sorted(content - ours))}, which epimer did not make; move it away."
        )


def _settle(out: Path) -> None:
    """Tidy up after a run that was killed while it replaced an output, unless another one is at work."""
    with suppress(OSError):
        lock = os.open(draft_of(out), os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            settle(out)
        finally:
            os.close(lock)


def _devices(options: Options) -> list[torch.device]:
    """Return the device of every worker."""
    for name, value in (("threads", options.threads), ("workers", options.workers)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ParameterError(f"The {name!r} parameter must be an integer at least 1. Got {value!r} instead.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "auto":
        names = [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
    elif options.device == "cuda" and gpus > 1:
        names = [f"cuda:{i}" for i in range(gpus)]
    else:
        names = [options.device]
    found = [device for name in names if (device := check_device(name)) is not None]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, cores // options.threads) if found[0].type == "cpu" else 2
    count = options.workers or each * len(found)
    return [found[i % len(found)] for i in range(count)]


def _prepare(plan: Plan, runner: Runner, draft: Draft, progress: Progress) -> Prepared | None:
    """Do the method's pre-pass, or take it from an earlier run's journal."""
    if plan.method.prepare is None:
        return None
    if "prepared" in draft.notes:
        runner.prepared = Prepared(**draft.notes["prepared"])
    else:
        reads = plan.method.passes * sum(job.reads for job in plan.merged)
        runner.prepared = runner.prepare(progress.begin("looking at the whole model", reads))
        if runner.prepared is not None:
            draft.note("prepared", asdict(runner.prepared))
    return runner.prepared


def _merge_all(plan: Plan, runner: Runner, draft: Draft, progress: Progress) -> dict[str, TensorRecord]:
    made = {key: _tensor_record(given) for key, given in draft.done.items()}
    stage = progress.begin("merging", plan.reads)
    stage.advance(sum(job.reads for job in plan.parts if job.key in made), "")
    for job, result, record in runner.results([job for job in plan.parts if job.key not in made]):
        draft.put(job.key, job.name, job.skip, result, asdict(record))
        made[job.key] = record
        stage.advance(job.reads, job.key)
    draft.flush()
    records: dict[str, TensorRecord] = {}
    for job in plan.parts:
        records[job.name] = _joined(records.get(job.name), made[job.key])
    for name, W in plan.skipped.items():
        records[name] = TensorRecord("skip", tuple(W.shape))
    for name, twin in plan.ties.items():
        records[name] = tied(records[twin], twin)
    order = {**plan.outputs, **plan.skipped}
    return {name: records[name] for name in order}


def _joined(one: TensorRecord | None, other: TensorRecord) -> TensorRecord:
    """Return the record of a tensor that was made in two parts."""
    if one is None:
        return other
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    return replace(one, shape=shape, seconds=(one.seconds or 0) + (other.seconds or 0))


def _tensor_record(given: dict[str, Any]) -> TensorRecord:
    return TensorRecord(**{**given, "shape": tuple(given["shape"])})


def _record(
    plan: Plan,
    prepared: Prepared | None,
    tensors: dict[str, TensorRecord],
    shards: list[Shard],
    beside: dict[str, bytes],
    timings: dict[str, float],
) -> MergeRecord:
    settings = [job.setting for job in plan.jobs if job.setting is not None]
    shown = {key: plain(value) for key, value in settings[0].method.values(settings[0].p).items()} if settings else {}
    weights = (prepared and prepared.weights) or (settings[0].weights if settings else ())
    return MergeRecord(
        method=plan.method.name,
        parameters=shown,
        weights=tuple(weights),
        tensors=tensors,
        models=tuple((role.checkpoint.name, role.checkpoint.fingerprint) for role in plan.roles),
        recipe=plan.public_recipe(),
        request=plan.request,
        files={shard.file: shard.size for shard in shards} | {file: len(data) for file, data in beside.items()},
        version=epimer.__version__,
        timings=timings,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _beside(plan: Plan, shards: list[Shard]) -> dict[str, bytes]:
    """Return the index and the files that are carried over; note those that are not."""
    dtypes = {str(job.template.dtype).removeprefix("torch.") for job in plan.jobs if job.template.is_floating_point()}
    files = carried(plan.donor.folder, plan.tokenizer, dtypes.pop() if len(dtypes) == 1 else None)
    if (index := index_of(shards, plan.outputs)) is not None:
        files[INDEX] = index
    left = code_files(plan.donor.folder)
    if left:
        plan.notes.append(f"Python files are not copied: {', '.join(left)}; add them yourself if you trust them.")
    return files


def _publish(plan: Plan, draft: Draft, record: MergeRecord, beside: dict[str, bytes]) -> None:
    for file, data in beside.items():
        draft.add(file, data)
    draft.add("README.md", model_card(plan, record).encode())
    draft.add(RECORD, as_json(record.lasting()))
    draft.publish()


def _key(plan: Plan, shards: list[Shard], device: str, threads: int) -> str:
    """Return a hash of all that the bytes of a half-made output depend on."""
    state = [role.checkpoint.state for role in plan.roles] + [one.state for one in plan.beside]
    how = [plan.request, state, [shard.size for shard in shards], device, threads, torch.__version__]
    return hashlib.blake2b(json.dumps(how).encode(), digest_size=16).hexdigest()


def _return_freed_memory() -> None:
    """Let the C library give every freed block of four megabytes or more back at once, not keep it for later."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 22)


def _resident() -> int:
    """Return the bytes this process has in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _available() -> int:
    """Return the bytes of memory that are free on this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
