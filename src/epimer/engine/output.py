"""Carry out a plan into a model folder, which appears whole or not at all and goes on where a killed run stopped."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import epimer
from epimer.atomic_files import explain_os_errors, output_path
from epimer.checkpoints.adapter_files import adapters_of
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.file_checksums import data_checksum, hash_files
from epimer.checkpoints.folder import DIFFUSERS, parse_json
from epimer.checkpoints.hub import HUB_NAME, fetch_code
from epimer.checkpoints.sentence_modules import sentence_files
from epimer.checkpoints.sidecar_files import (
    RECIPE,
    code_files,
    left_behind,
    names_code,
    read_sidecar,
    sidecar_files,
)
from epimer.checkpoints.writer import Draft, Shard, as_json, plan_shards, recover, shard_index
from epimer.checksums import sealed
from epimer.engine.in_memory import all_records, joined, prepare
from epimer.engine.memory import parse_size, peak_memory
from epimer.engine.merge import MergeWalk
from epimer.engine.model_card import model_card
from epimer.engine.modules import merged_modules
from epimer.engine.options import RunOptions
from epimer.engine.protocol import Engine
from epimer.engine.written import WritingWalk, remove_parcels
from epimer.errors import DataError, EpimerError, EpimerWarning, OutputError, listed, warn
from epimer.methods.plugins import plugin_of_method
from epimer.methods.registry import Prepared
from epimer.plan.jobs import Plan
from epimer.plan.participants import Participants, recipe_from
from epimer.progress import Progress
from epimer.records import MergeRecord, Status, TensorRecord, checked

RECORD = "epimer.json"
MOST = 0.5  # share of the changed parameters that a merge may leave as they were without a warning


MergeAll = Callable[[Plan, Engine, Draft, Prepared | None, Progress], dict[str, TensorRecord]]
"""writes every tensor of a plan to a draft and returns their records"""


def write_merge(
    plan: Plan,
    out: Path,
    run: RunOptions,
    *,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    copy_code: bool = False,
    hash_inputs: bool = False,
) -> MergeRecord:
    """Carry out a plan into a model folder, or find that it has been carried out."""
    plan.check()
    engine = run.start(plan.parts)
    shards = plan_shards(plan.outputs, plan.ties, parse_size(max_shard_size, "max_shard_size"), _stem(plan))
    sidecars = _sidecars(plan, shards, copy_code=copy_code)
    return write_files(
        plan, out, run, engine, shards, sidecars, _merge_all, overwrite=overwrite, hash_inputs=hash_inputs
    )


def write_files(
    plan: Plan,
    out: Path,
    run: RunOptions,
    engine: Engine,
    shards: list[Shard],
    sidecars: dict[str, bytes],
    merge_all: MergeAll,
    *,
    overwrite: bool,
    hash_inputs: bool = False,
) -> MergeRecord:
    """Carry out a plan into the files of a folder, or find that it has been carried out.

    With `hash_inputs` the record tells the SHA-256 of every file that is read, which takes another reading of them.
    """
    started = time.perf_counter()
    sidecars = sidecars | {RECIPE: plan.public_recipe().encode()}
    out = output_path(out)
    recover(out)
    record = finished(out, plan, shards, sidecars)
    if record is not None and (record.input_files is not None or not hash_inputs):
        return record
    check_output(out, plan.participants, overwrite=overwrite, plan=plan)
    key = _key(plan, shards, engine.devices[0].type, run.threads)
    draft = Draft(out, shards, key, lambda: check_output(out, plan.participants, overwrite=overwrite))
    with draft.opened(), Progress(run.progress) as progress:
        try:
            hashes = hash_input_files(plan, len(engine.devices), progress) if hash_inputs else None
            prepared = _prepare(plan, engine, draft, progress)
            before = time.perf_counter()
            records = merge_all(plan, engine, draft, prepared, progress)
            now = time.perf_counter()
            files = {shard.file: shard.size for shard in shards} | {file: len(data) for file, data in sidecars.items()}
            record = merge_record(plan, prepared, records, files=files)
            sidecars = sidecars | {"README.md": model_card(plan, record).encode()}
            weights, tensors = draft.checksums()
            record = replace(
                record,
                checksums=weights | {file: data_checksum(data) for file, data in sidecars.items()},
                tensor_checksums=tensors,
                input_files=hashes,
                places=None
                if plan.recipe is None
                else recipe_from(plan.recipe, plan.participants, plan.tokenizer, out),
                environment=environment(engine.devices[0].type, run.threads),
            )
            for file, data in sidecars.items():
                draft.add(file, data)
            draft.add(RECORD, as_json(sealed(record.lasting())))
            draft.publish()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            draft.discard()
            raise
    parts = {**plan.timings, "prepass": before - started, "merge": now - before, "write": time.perf_counter() - now}
    return replace(record, timings={**parts, "total": sum(parts.values())}, peak_memory=peak_memory())


def environment(device: str, threads: int) -> dict[str, str]:
    """Return what the last digits of a merge depend on, apart from the processor itself."""
    return {"torch": torch.__version__, "device": device, "threads": str(threads)}


def hash_input_files(plan: Plan, workers: int, progress: Progress) -> tuple[tuple[str, str], ...]:
    """Return the name, without its path, and the SHA-256 of every file of the models, curvature and basis."""
    names: dict[Path, str] = {}
    models = [(one.name, one) for one in plan.participants.checkpoints]
    for name, one in (*models, *_measured(plan)):
        if not one.files or one.downloads:
            raise OutputError(f"{one.where} is not on this disk, so it cannot be hashed; download it first.")
        names |= {file: f"{name}/{file.name}" for file in one.files if file not in names}
    with explain_os_errors(next(iter(names)), "read"):
        stage = progress.begin("hashing the inputs", sum(file.stat().st_size for file in names))
    return tuple(zip(names.values(), hash_files(list(names), workers, stage.advance), strict=True))


def _measured(plan: Plan) -> list[tuple[str, Checkpoint]]:
    """Return the files of curvature and bases, each with its folder's name."""
    return [(one.files[0].resolve().parent.name, one) for one in plan.measured_files]


def merge_record(
    plan: Plan,
    prepared: Prepared | None,
    tensors: dict[str, TensorRecord],
    *,
    files: dict[str, int] | None = None,
) -> MergeRecord:
    """Return the record of a merge; of one in memory it tells the method, its options, the weights and the tensors."""
    first = next((job for job in plan.jobs if job.method is not None), None)
    shown = {} if first is None else {name: _plain(value) for name, value in plan.method.values(first.options).items()}
    weights = (prepared and prepared.weights) or (first.weights if first is not None else ())
    known: dict[str, Any] = {"unlabelled": plan.unlabelled, "choices": plan.choices, "inputs": plan.inputs}
    known["untouched"], unchanged = _untouched(plan.participants, tensors)
    trims = {job.name for job in plan.jobs if job.rule == "elementwise" and not job.is_weighted_sum}
    known["lost"] = tuple(name for name in unchanged if name not in trims) or None  # what is trimmed is meant to be
    plugin = plugin_of_method(plan.method.name)
    if plugin is not None:
        known["plugin"] = (plugin.path.name, plugin.sha256)
    if plan.recipe is not None:
        known |= {
            "models": tuple((one.checkpoint.name, one.checkpoint.fingerprint) for one in plan.participants.all),
            "measured": tuple((name, one.fingerprint) for name, one in _measured(plan)),
            "recipe": plan.public_recipe(),
            "notes": plan.recipe.notes,
            "request": plan.request,
            "files": files or {},
            "version": epimer.__version__,
            "dtypes": _parameters_by_dtype(plan),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "peak_memory": peak_memory(),
        }
    return MergeRecord(plan.method.name, shown, tuple(weights), tensors, **known)


def _parameters_by_dtype(plan: Plan) -> dict[str, int]:
    """Return how many parameters of the output have each dtype, the most first."""
    counts: Counter[str] = Counter()
    for name, tensor in plan.outputs.items():
        if name not in plan.ties:
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(counts.most_common())


def _untouched(participants: Participants, tensors: Mapping[str, TensorRecord]) -> tuple[float, list[str]]:
    """Return the share of the parameters that some model has changed and that did not change in the merge.

    With it come the names of the tensors that were merged all the same. Only tensors that did not change in the merge
    are looked at in the models, and of those some entries.
    """
    changed, left, unchanged = 0, 0, list[str]()
    for name, tensor in tensors.items():
        if tensor.rule not in ("copy", "skip") and not tensor.unchanged:
            changed += tensor.parameters
        elif tensor.parameters and participants.moved(name):
            left += tensor.parameters
            unchanged += [name] if tensor.unchanged else []
    return left / (changed + left) if left else 0.0, unchanged


def _plain(value: Any) -> Any:
    """Return an option as it can be written down: what is not plain data is named by its type."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value).__name__


def warn_of(record: MergeRecord) -> None:
    """Warn once per kind of what did not go exactly as asked in a merge."""
    records = record.tensors
    unchanged = [one.unchanged or one.rule in ("copy", "skip") for one in records.values()]
    if records and all(unchanged):
        remedy = "look at the rules, raise scale, or write a wider dtype if the models moved little"
        text = f"the merge equals its base: nothing that the models learnt is in it; {remedy}."
        warn(EpimerWarning(text, method=record.method))
    elif record.untouched > MOST:
        text = (
            f"{record.untouched:.0%} of the parameters that the models changed are copied, skipped or end as they were"
        )
        text = f"{text}; look at the rules, or at scale and dtype."
        warn(EpimerWarning(text, method=record.method))
    elif record.lost:
        text = f"what models changed in {listed(record.lost)} is lost in the merge, which has the base's tensor there"
        warn(EpimerWarning(f"{text}; raise scale, or write a wider dtype.", method=record.method))
    lowered = [name for name, one in records.items() if one.note.startswith("rank") and one.status != Status.TIED]
    if lowered:
        ranks = sorted({rank for name in lowered if (rank := records[name].rank) is not None})
        note = records[lowered[0]].note.partition(";")[0]
        note = note if len(ranks) < 2 else f"{note.rpartition(' ')[0]} {ranks[0]} to {ranks[-1]}"
        text = f"{note} in {listed(lowered)}: floor(min(m, n) / T)."
        warn(EpimerWarning(text, method=record.method))
    for status in (Status.CLAMPED, Status.RETRIED, Status.DAMPED, Status.STALLED):
        names = [name for name, one in records.items() if one.status == status]
        if names:
            text = f"{status.meaning}: {listed(names)}. {status.remedy}".rstrip()
            warn(EpimerWarning(text, status, method=record.method))


def finished(out: Path, plan: Plan, shards: list[Shard], sidecars: dict[str, bytes]) -> MergeRecord | None:
    """Return the record of an output that is already what the plan would make."""
    try:
        record = _recorded(out)
    except EpimerError:
        return None
    sizes = {shard.file: shard.size for shard in shards}
    if record is None or record.request != plan.request or not sizes.items() <= record.files.items():
        return None
    try:
        there = all((out / file).stat().st_size == size for file, size in record.files.items())
        there = there and all((out / file).read_bytes() == data for file, data in sidecars.items())
    except (OSError, ValueError):  # a name that no file can have
        return None
    return record if there else None


def _recorded(out: Path) -> MergeRecord | None:
    """Return the record in a folder; None where there is none."""
    data = read_sidecar(out, RECORD)
    return None if data is None else MergeRecord.from_json(data, str(out / RECORD))


def check_output(out: Path, participants: Participants, *, overwrite: bool, plan: Plan | None = None) -> None:
    """Refuse to write into an input, or over what is there, unless it was asked for and is ours.

    With a `plan`, the error says in what the merge at `out` differs from it.
    """
    real = out.resolve()
    for one in participants.checkpoints:
        for file in one.files:
            if file.resolve().is_relative_to(real):
                raise OutputError(f"{out} holds {one.where}, which the merge reads; choose another output.")
        adapters = [adapter.adapter.files[0].parent for adapter in adapters_of(one)]
        for folder in (*one.folders, *adapters):
            if real.is_relative_to(folder.resolve()):
                raise OutputError(f"{out} lies in {folder}, which the merge reads; choose a folder outside of it.")
    if not os.path.lexists(out):
        return
    if out.is_symlink():
        raise OutputError(f"{out} is a link; give the folder itself.")
    if not out.is_dir():
        raise OutputError(f"{out} is a file; the output is a folder: choose another name.")
    with explain_os_errors(out, "read"):
        content = {path.relative_to(out).as_posix() for path in out.rglob("*") if _is_leaf(path)}
    if not content:
        return
    if not overwrite:
        raise OutputError(f"{out} exists and holds {_found(out, plan)}; choose another name, or pass --overwrite.")
    _check_is_ours(out, content)


def _found(out: Path, plan: Plan | None) -> str:
    """Return a description of a folder that is not the output of `plan`, and in what a merge there differs from it."""
    try:
        record = _recorded(out)
    except EpimerError:
        record = None
    if record is None:
        return "something else, which epimer did not make"
    if plan is None:
        return "another merge"
    models = tuple((one.checkpoint.name, one.checkpoint.fingerprint) for one in plan.participants.all)
    compared = {
        f"epimer ({record.version} made it)": record.version == epimer.__version__,
        "the recipe": record.recipe == plan.public_recipe(),
        "the models": record.models == models,
    }
    changed = [name for name, same in compared.items() if not same]
    since = f": {' and '.join(changed)} changed since" if changed else " with other files or options"
    return f"another merge{since}"


def _check_is_ours(out: Path, content: set[str]) -> None:
    """Refuse to replace a folder with this content unless epimer made all of it, as its record says."""
    try:
        record = _recorded(out)
    except EpimerError as error:
        raise OutputError(f"{out} is not replaced: {error}") from error
    if record is None:
        raise OutputError(f"{out} was not made by epimer, so it is not replaced; remove it yourself first.")
    ours = {*record.files, RECORD, "README.md"}
    if content - ours:
        raise OutputError(
            f"{out} also holds {listed(sorted(content - ours))}, which epimer did not make; move it away."
        )


def _is_leaf(path: Path) -> bool:
    """Whether a path is a file, a link or an empty folder."""
    return path.is_symlink() or not path.is_dir() or not any(path.iterdir())


def _prepare(plan: Plan, engine: Engine, draft: Draft, progress: Progress) -> Prepared | None:
    """Do the method's pre-pass, or take it from an earlier run's journal."""
    if plan.method.prepare is None:
        return None
    if "prepared" in draft.notes:
        return _checked_prepass(draft.notes["prepared"], len(plan.participants.models), str(draft.journal.path))
    reads = plan.method.passes * sum(job.reads for job in plan.merged)
    prepared = prepare(plan, engine, progress.begin("looking at the whole model", reads))
    if prepared is not None:
        draft.note("prepared", asdict(prepared))
    return prepared


def _checked_prepass(data: Any, models: int, where: str) -> Prepared:
    """Return the result of a pre-pass that a journal holds."""
    prepared = checked(Prepared, data, where, "prepared")
    if any(part is not None and len(part) != models for part in (prepared.weights, prepared.context)):
        raise DataError(f"{where}: prepared: expected a value for each of {models} models; run the command again.")
    return prepared


def _merge_all(
    plan: Plan, engine: Engine, draft: Draft, prepared: Prepared | None, progress: Progress
) -> dict[str, TensorRecord]:
    done = dict(draft.done)
    stage = progress.begin("merging", plan.reads)
    stage.advance(sum(job.reads for job in plan.parts if job.key in done), "")
    left = [job.on(engine.devices[0]) for job in plan.parts if job.key not in done]
    remote = getattr(engine, "remote", False)
    if remote:
        draft.parcels.mkdir()
    walk = WritingWalk(MergeWalk(plan, left, prepared, written=True), draft, parcels=draft.parcels if remote else None)
    for _, merged in engine.map(walk):
        for job, written, record in merged:
            draft.wrote(job.key, job.name, job.skip, written, record)
            done[job.key] = record
            stage.advance(job.reads, job.key)
        remove_parcels(written for _, written, _ in merged)
    draft.flush()
    if remote:
        draft.read_back()
    records: dict[str, TensorRecord] = {}
    for job in plan.parts:
        records[job.name] = joined(records.get(job.name), done[job.key])
    return all_records(plan, records)


def _sidecars(plan: Plan, shards: list[Shard], *, copy_code: bool) -> dict[str, bytes]:
    """Return the index and the files that are carried over; note those that are not."""
    dtypes = {str(job.template.dtype).removeprefix("torch.") for job in plan.jobs if job.template.is_floating_point()}
    folder = plan.participants.donor.folder
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    adapt = plan.participants.donor.adapted_config
    if copy_code and HUB_NAME.fullmatch(donor := plan.participants.donor.name.split("+")[0]):
        fetch_code(donor)
    files = sidecar_files(folder, plan.tokenizer, dtype, plan.generation, adapt, copy_code=copy_code)
    files |= {**plan.tokenizer_files, **sentence_files(plan.modules)}
    merged = merged_modules(plan)
    files = {name: data for name, data in files.items() if _weights_beside(name) not in merged} | merged
    if (index := shard_index(shards, plan.outputs)) is not None:
        files[f"{_stem(plan)}.safetensors.index.json"] = index
    plan.notes.extend(_code_notes(folder, plan.tokenizer, copied=copy_code))
    read = [path for one in plan.participants.all for path in one.checkpoint.files]
    if others := left_behind(folder, files, read):
        plan.notes.append(
            f"not carried over from {plan.participants.donor.name}: {listed(others)}; copy what you need."
        )
    return files


def _code_notes(donor: Path | None, tokenizer: Path | None, *, copied: bool) -> Iterator[str]:
    """Say what became of the Python files of a model and of the configs that name them."""
    code = ", ".join(code_files(donor))
    if copied and code:
        yield f"copied, not run: {code}; who loads the model with trust_remote_code runs them."
        return
    naming = [
        name
        for folder, name in ((donor, "config.json"), (tokenizer, "tokenizer_config.json"))
        if folder is not None and (data := read_sidecar(folder, name)) and names_code(parse_json(data, folder / name))
    ]
    if naming and not copied:
        files = f" ({code})" if code else ""
        yield (
            f"auto_map of {' and '.join(naming)} is dropped, as the Python files{files} are not copied; "
            "pass --copy-code if you trust them."
        )
    elif code:
        yield f"Python files are not copied: {code}; pass --copy-code if you trust them."


def _weights_beside(name: str) -> str:
    """Return the file that a module's merged weights are written to, for that of a torch file they replace."""
    return str(Path(name).with_name("model.safetensors")) if name.endswith("/pytorch_model.bin") else name


def _stem(plan: Plan) -> str:
    """Return what the names of the output's weights begin with: as transformers, or as diffusers looks for them."""
    named = any(path.name.startswith(DIFFUSERS) for path in plan.participants.donor.files)
    return DIFFUSERS if named else "model"


def _key(plan: Plan, shards: list[Shard], device: str, threads: int) -> str:
    """Return a hash of all that the bytes of a half-made output depend on."""
    state = [one.checkpoint.state for one in plan.participants.all] + [one.state for one in plan.measured_files]
    sizes = [shard.size for shard in shards]
    how = [plan.request, state, sizes, len(plan.parts), device, threads, torch.__version__]
    return hashlib.blake2b(json.dumps(how).encode(), digest_size=16).hexdigest()
