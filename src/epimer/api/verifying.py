"""Verify that a merged model's folder is what its record says: its files, its inputs, and tensors computed again."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from epimer.api.merging import plan_merge
from epimer.checkpoints.folder import FORMATS
from epimer.checkpoints.hub import HUB_NAME, is_hub_id
from epimer.checksums import HASH
from epimer.engine.options import RunOptions
from epimer.engine.output import RECORD, environment, hash_input_files
from epimer.engine.output_files import OutputFiles, check_files, files_of_tensors
from epimer.engine.recompute import GPU_TOLERANCE, TOLERANCE, difference, recompute
from epimer.errors import DataError, EpimerError, ParameterError, listed
from epimer.json_values import json_value
from epimer.methods.plugins import plugin_of_method
from epimer.plan.jobs import Plan
from epimer.progress import Progress
from epimer.recipe.load import RecipeLike, load_recipe, open_recipe
from epimer.recipe.model import UNION, Recipe
from epimer.records import Check, MergeRecord, Outcome, Verification

REMEDY = "give the recipe, with the models' paths, as --recipe"


def verify(
    out: str | os.PathLike[str],
    *,
    recipe: RecipeLike | None = None,
    sample: int | None = 8,
    seed: int = 0,
    tolerance: float | None = None,
    files_only: bool = False,
    device: str | None = None,
    workers: int | None = None,
    max_memory: str | int | None = None,
    progress: bool = False,
) -> Verification:
    """Check that a folder which a merge wrote is what its record says, part by part.

    Args:
        out: the folder, or its address in an object store.
        recipe: the one that it was made from, or one like it with the paths that models have here. Without it the
            record's own recipe is taken, whose models are looked for in the current folder and beside `out`.
        sample: how many tensors to compute again; None for all.
        seed: which ones.
        tolerance: how far they may be from those in the folder, relative to what the merge changed; 0 asks for the same
            bytes. By default `TOLERANCE`, or `GPU_TOLERANCE` where a GPU merged and a CPU computes, or the reverse.
        files_only: check the folder alone, without its inputs.
        device: where to compute; by default the kind of device that the record names, where there is one here.
        workers: tensors computed at the same time; by default one per core.
        max_memory: most memory to use, as "3GB".
        progress: show a bar on a terminal.

    Returns:
        Every part's check; `verified` says whether all were made and nothing differs.
    """
    if sample is not None and sample < 0:
        raise ParameterError(f"The 'sample' parameter of verify must be at least 0. Got {sample} instead.")
    if tolerance is not None and not tolerance >= 0:
        raise ParameterError(f"The 'tolerance' parameter of verify must be at least 0. Got {tolerance} instead.")
    folder = OutputFiles.open(out)
    record, first = read_record(folder)
    parts = () if files_only else ("inputs", *(("recomputed",) if sample != 0 else ()))
    if record is None:
        rest = [Check(part, Outcome.UNCHECKED, "the record is damaged") for part in ("files", "tensors", *parts)]
        return Verification(folder.place, (first, *rest))
    checks = [first, *check_files(folder, record)]
    if not files_only:
        run = _run_options(record, device, workers, max_memory, progress=progress)
        if tolerance is None:
            elsewhere = record.environment.get("device", "cpu") != run.devices[0].type
            tolerance = GPU_TOLERANCE if elsewhere else TOLERANCE
        checks += _check_merge(folder, record, recipe, parts, sample, seed, tolerance, run)
    return Verification(folder.place, tuple(checks))


def read_record(folder: OutputFiles) -> tuple[MergeRecord | None, Check]:
    """Return the record in a folder, None where it cannot be read, and its check against its own hash."""
    data = folder.read(RECORD)
    try:
        record = MergeRecord.from_json(data, RECORD)  # which compares its hash
    except DataError as error:
        return None, Check("record", Outcome.DIFFERS, str(error).rstrip("."), (RECORD,))
    if HASH not in json_value(data):
        return record, Check("record", Outcome.UNCHECKED, f"{RECORD} holds no hash of itself, as epimer writes now")
    counts = f"{len(record.tensors)} tensors of {len(record.models)} inputs by {record.method}"
    return record, Check("record", Outcome.OK, f"{RECORD} has the hash that it says: {counts}")


def _run_options(
    record: MergeRecord, device: str | None, workers: int | None, max_memory: str | int | None, *, progress: bool
) -> RunOptions:
    """Return options under which the recorded bytes come out again, as far as this machine has what it takes."""
    recorded = record.environment.get("device", "cpu")
    there = recorded == "cpu" or (recorded == "cuda" and torch.cuda.is_available())
    threads = record.environment.get("threads", "1")
    count = int(threads) if threads.isdecimal() and len(threads) < 4 else 1
    cores = os.cpu_count() or 1
    return RunOptions(
        device or (recorded if there else "cpu"), workers, max(1, min(count, cores)), max_memory, progress
    )


def _check_merge(
    folder: OutputFiles,
    record: MergeRecord,
    given: RecipeLike | None,
    parts: Sequence[str],
    sample: int | None,
    seed: int,
    tolerance: float,
    run: RunOptions,
) -> list[Check]:
    """Check the inputs, and tensors that are computed of them again."""
    if (problem := _check_plugin(record)) is not None:
        return [problem, *(Check(part, Outcome.UNCHECKED, "the method is not here") for part in parts[1:])]
    try:
        recipe, where = _recorded_recipe(record), None
        if given is not None:
            original, where = open_recipe(given)
            recipe = with_places(recipe, original)
        elif folder.store is not None:
            recipe = found_here(recipe, [Path.cwd()])
        else:
            out = Path(os.path.abspath(folder.place))
            placed = _loaded_recipe(record.places) if record.places else recipe
            recipe = found_here(placed, [Path.cwd(), out.parent], out if record.places else None)
        settled = recipe.model_copy(update={"rounds": 0, "refine": 0, "eval": None})
        plan = plan_merge(settled, folder=where, any_curvature=True, download=record.input_files is not None)
        plan.check()
        inputs = _check_inputs(plan, record, run)
    except EpimerError as error:
        return [Check(part, Outcome.UNCHECKED, str(error).rstrip(".")) for part in parts]
    if "recomputed" not in parts:
        return [inputs]
    if inputs.outcome == Outcome.DIFFERS:
        return [inputs, Check("recomputed", Outcome.UNCHECKED, "the inputs are not those that were merged")]
    if recipe.rounds or recipe.refine:
        why = "with rounds or refine a merge depends on networks that are run, which is not repeated"
        return [inputs, Check("recomputed", Outcome.UNCHECKED, why)]
    return [inputs, _check_tensors(plan, folder, record, sample, seed, tolerance, run)]


def _check_plugin(record: MergeRecord) -> Check | None:
    """Return a check that fails if the method is from a plugin that is not loaded, or is another file; None if not."""
    if record.plugin is None:
        return None
    name, sha256 = record.plugin
    loaded = plugin_of_method(record.method)
    if loaded is None:
        text = f"{record.method} is a method of {name} (SHA-256 {sha256}); give that file as --plugin"
        return Check("inputs", Outcome.UNCHECKED, text, (name,))
    if loaded.sha256 != sha256:
        text = f"{loaded.path.name} has another SHA-256 than the recorded {name}, which is {sha256}"
        return Check("inputs", Outcome.DIFFERS, text, (name,))
    return None


def _recorded_recipe(record: MergeRecord) -> Recipe:
    """Return the recipe of a record."""
    if not record.recipe:
        raise DataError("the record holds no recipe.")
    return _loaded_recipe(record.recipe)


def _loaded_recipe(text: str) -> Recipe:
    """Return a recipe that a record holds as YAML."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "recipe.yaml"
        file.write_bytes(text.encode(errors="surrogatepass"))
        try:
            recipe = load_recipe(file)
        except EpimerError as error:
            raise DataError(f"the record's recipe: {str(error).removeprefix(str(file))}") from error
    if recipe.auto:
        raise DataError(f"the record's recipe leaves {' and '.join(recipe.auto)} open, which no merge does.")
    return recipe


def with_places(recorded: Recipe, given: Recipe) -> Recipe:
    """Return the recorded recipe with the paths of another one of the same models, place by place."""
    if len(recorded.models) != len(given.models) or len(recorded.slices) != len(given.slices):
        raise DataError("the recipe that was given has not as many models, or slices, as the record's.")

    def placed(one: Any, other: Any, *keys: str) -> Any:
        return one.model_copy(update={key: getattr(other, key) for key in keys if getattr(one, key) is not None})

    pairs = zip(recorded.models, given.models, strict=True)
    changes: dict[str, Any] = {"models": tuple(placed(*pair, "model", "curvature") for pair in pairs)}
    slices = []
    for one, other in zip(recorded.slices, given.slices, strict=True):
        if len(one.sources) != len(other.sources):
            raise DataError("the recipe that was given has not as many sources in its slices as the record's.")
        sources = tuple(placed(*pair, "model") for pair in zip(one.sources, other.sources, strict=True))
        slices.append(one.model_copy(update={"sources": sources}))
    recipe = recorded.model_copy(update={**changes, "slices": tuple(slices)})
    return placed(recipe, given, "base_model", "basis", "tokenizer_source", "tokenizer")


def found_here(recipe: Recipe, folders: Sequence[Path], out: Path | None = None) -> Recipe:
    """Return a recipe with the paths of its inputs.

    A model of the hub keeps its name, which has the commit. What is not found is refused.

    Args:
        recipe: has names without paths, or paths relative to `out`.
        folders: where inputs are looked for by their names, if not at their paths.
        out: the output's folder, where the recipe has paths.
    """
    places: dict[str, str] = {}
    for name in input_names(recipe):
        on_hub = _is_on_hub(recipe, name)
        last = name if out is None or on_hub else Path(name).name
        tried = [f"{folder / last}{suffix}" for folder in folders for suffix in ("", *FORMATS)]
        tried = tried if out is None else [os.path.normpath(out / name), *tried]
        places[name] = next((path for path in tried if os.path.exists(path)), name if on_hub else "")
    if missing := [Path(name).name for name, place in places.items() if not place]:
        raise DataError(f"{listed(missing)} not found here or beside the folder; {REMEDY}.")
    return with_paths(recipe, places)


def input_names(recipe: Recipe) -> list[str]:
    """Return what a recipe calls its models, adapters apart from what is under them, its curvature and its basis."""
    keyword = recipe.tokenizer_source in ("base", UNION)
    models = (recipe.model_copy(update={"tokenizer_source": None}) if keyword else recipe).model_names
    measured = [one for one in (recipe.basis, *(entry.curvature for entry in recipe.models)) if one is not None]
    return [*sorted(models), *measured]


def with_paths(recipe: Recipe, paths: Mapping[str, str]) -> Recipe:
    """Return a recipe with the paths of what it calls by these names."""
    entries = (one.model_copy(update={"curvature": paths.get(one.curvature or "")}) for one in recipe.models)
    changes = {"models": tuple(entries), "basis": paths.get(recipe.basis or "")}
    located = recipe.model_copy(update=changes).renamed(paths)
    keyword = recipe.tokenizer_source in ("base", UNION)
    return located.model_copy(update={"tokenizer_source": recipe.tokenizer_source}) if keyword else located


def _is_on_hub(recipe: Recipe, name: str) -> bool:
    """Whether a name is that of a model of the hub with its commit, or of a tokenizer there."""
    tokenizer = name == recipe.tokenizer_source and is_hub_id(name) and "/" in name
    return HUB_NAME.fullmatch(name) is not None or tokenizer


def _check_inputs(plan: Plan, record: MergeRecord, run: RunOptions) -> Check:
    """Compare fingerprints, and where the record has them the SHA-256 of all files, with those of the inputs."""
    models = [(one.checkpoint.name, one.checkpoint.fingerprint) for one in plan.participants.all]
    measured = [(one.where, one.fingerprint) for one in plan.measured_files]
    recorded = (*record.models, *record.measured) if record.checksums else record.models
    found = (*models, *measured) if record.checksums else models
    if len(found) != len(recorded):
        return Check("inputs", Outcome.DIFFERS, f"{len(recorded)} are recorded, and the recipe has {len(found)}")
    others = [name for (name, new), (_, old) in zip(found, recorded, strict=True) if new != old]
    if others:
        text = f"another fingerprint than recorded: {listed(others)} (if models are mixed up here, {REMEDY})"
        return Check("inputs", Outcome.DIFFERS, text, tuple(others))
    if record.input_files is None:
        text = f"{len(found)} inputs have the recorded fingerprints (samples of every tensor, not all bytes)"
        return Check("inputs", Outcome.OK, text)
    with Progress(run.progress) as progress:
        files = hash_input_files(plan, len(run.devices), progress)
    if len(files) != len(record.input_files):
        return Check("inputs", Outcome.DIFFERS, f"{len(record.input_files)} files are recorded, here are {len(files)}")
    others = [name for (name, new), (_, old) in zip(files, record.input_files, strict=True) if new != old]
    if others:
        return Check("inputs", Outcome.DIFFERS, f"another SHA-256 than recorded: {listed(others)}", tuple(others))
    text = f"{len(found)} inputs have the recorded fingerprints, and their {len(files)} files the recorded SHA-256"
    return Check("inputs", Outcome.OK, text)


@torch.no_grad()
def _check_tensors(
    plan: Plan,
    folder: OutputFiles,
    record: MergeRecord,
    sample: int | None,
    seed: int,
    tolerance: float,
    run: RunOptions,
) -> Check:
    """Compute some tensors again and compare them with those in the folder."""
    names = [job.name for job in plan.jobs if job.name not in plan.ties]
    chosen = names if sample is None else random.Random(seed).sample(names, min(sample, len(names)))
    gaps: dict[str, float] = {}
    try:
        files = files_of_tensors(folder, record)
        with Progress(run.progress) as progress:
            for job, computed in recompute(plan, {*chosen}, run, progress):
                stored = {name: files[name].read(name) for name in computed if name in files}
                gap = difference(plan, job, stored, computed)
                if gap is not None:
                    gaps[job.name] = gap
    except EpimerError as error:
        return Check("recomputed", Outcome.UNCHECKED, str(error).rstrip("."))
    wrong = [name for name, gap in gaps.items() if gap > tolerance or not tolerance]
    same, largest = len(chosen) - len(gaps), max(gaps.values(), default=0.0)
    if wrong:
        text = f"{len(wrong)} of {len(chosen)} tensors come out otherwise: {listed(wrong)}, by up to {largest:.2g}"
        text = f"{text} of what the merge changed (tolerance {tolerance:g}){_elsewhere(record, run)}"
        return Check("recomputed", Outcome.DIFFERS, text, tuple(wrong), same, largest)
    text = f"{len(chosen)} of {len(names)} tensors come out the same to the last bit"
    if gaps:
        text = f"{len(chosen)} of {len(names)} tensors come out the same, {same} to the last bit, the others within "
        text = f"{text}{largest:.2g} of what the merge changed (tolerance {tolerance:g}){_elsewhere(record, run)}"
    return Check("recomputed", Outcome.OK, text, (), same, largest)


def _elsewhere(record: MergeRecord, run: RunOptions) -> str:
    """Say where the merge was made and this was computed, where that differs."""
    here: Mapping[str, str] = environment(run.devices[0].type, run.threads)
    made = [
        f"{key} {record.environment.get(key, 'unknown')}" for key in here if record.environment.get(key) != here[key]
    ]
    return f"; made with {', '.join(made)}" if made else ""
