"""`epimer merge`: merge the models of a recipe into a model folder."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from epimer.cli import options, render
from epimer.cli.app import STARTED, app, stoppable
from epimer.cli.mergekit_flags import MergeCommand
from epimer.cli.options import argument, option
from epimer.errors import EpimerError
from epimer.records import MergeRecord

WORK = {
    "start": "starting",
    "plan": "planning",
    "choose": "choosing",
    "measure": "measuring curvature",
    "prepass": "preparing",
    "merge": "merging",
    "write": "writing",
}
"""part of `MergeRecord.timings` -> what to call it"""

if TYPE_CHECKING:
    from epimer.engine.options import RunOptions
    from epimer.plan.jobs import Plan
    from epimer.recipe.documents import Step


@app.command(cls=MergeCommand)
def merge(
    recipe: options.Recipe,
    out: Annotated[str | None, argument("The model folder to make, here or in a store (s3://…, hf://…).")] = None,
    dry_run: Annotated[bool, option("Print the plan and its problems, do nothing.", "--dry-run")] = False,
    device: options.Device = "auto",
    engine: options.Engine = "local",
    address: options.Address = None,
    max_memory: options.MaxMemory = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    lora: Annotated[bool, option("Write a LoRA adapter of the base, as the recipe's output: lora.", "--lora")] = False,
    lora_rank: Annotated[int | None, option("Its rank at most; implies --lora.", default="all of the merge")] = None,
    copy_code: Annotated[bool, option("Copy the base's Python files too, if you trust them.", "--copy-code")] = False,
    hash_inputs: Annotated[
        bool, option("Record the SHA-256 of every input file, for verify.", "--hash-inputs")
    ] = False,
    any_curvature: options.AnyCurvature = False,
    non_finite: Annotated[
        str | None,
        option("On NaN or Inf in a model: error, or skip-tensor to keep the base's.", default="the recipe's, or error"),
    ] = None,
    compat: Annotated[str | None, option("mergekit: its numbers where it departs from the papers.")] = None,
    plugin: options.Plugins = None,
    workers: options.Workers = None,
    threads: Annotated[int, typer.Option(help="Threads for each of them.")] = 1,
    overwrite: options.Overwrite = False,
    intermediate: Annotated[
        str | None,
        option("Where the named merges of a file of several recipes go.", "--intermediate-dir", default="OUT.parts"),
    ] = None,
    push_to_hub: Annotated[str | None, option("Then upload the folder to this model of the hub, ORG/NAME.")] = None,
    record: Annotated[Path | None, option("Also write the record with timings to this file.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Merge the models that a recipe names into a new model folder.

    The folder appears when it is complete. After a kill the same command goes on where it stopped.
    """
    from epimer.api import plan_merge
    from epimer.atomic_files import check_file
    from epimer.engine.options import RunOptions
    from epimer.engine.output import warn_of
    from epimer.engine.store_output import without_places, write_output
    from epimer.recipe.documents import merge_steps
    from epimer.recipe.non_finite import with_non_finite

    options.load_plugins(plugin)
    progress = not (quiet or as_json)
    run = RunOptions(device, workers, threads, max_memory, progress, engine, address)
    _check_order(recipe, out)
    if not out and not (dry_run and out is None):
        raise EpimerError("give the folder to make: epimer merge RECIPE OUT.")
    check_file(record)
    if push_to_hub is not None and not dry_run:
        _check_upload(out or "", push_to_hub)
    steps = merge_steps(recipe, out or "OUT", intermediate, compat=compat)
    starting = time.perf_counter() - STARTED

    def plan_step(step: Step) -> Plan:
        loaded = with_non_finite(step.recipe, non_finite)
        if (lora or lora_rank is not None) and step is steps[-1]:
            loaded = loaded.as_lora(lora_rank)
        with stoppable("nothing was written"):
            plan = plan_merge(
                loaded,
                folder=step.folder,
                run=run,
                any_curvature=any_curvature,
                download=not dry_run,
                before_download=_print_downloads if progress else lambda files: None,
            )
        if push_to_hub is not None:
            plan = without_places(plan)
        return replace(plan, timings={"start": starting, **plan.timings}) if step is steps[0] else plan

    if dry_run:
        if as_json and len(steps) > 1:
            raise EpimerError(
                f"--dry-run --json prints one plan, and {recipe} holds {len(steps)} recipes; leave out --json."
            )
        problems = [_print_dry_run(step, plan_step, run, as_json=as_json, quiet=quiet) for step in steps]
        raise typer.Exit(2 if any(problems) else 0)
    how: dict[str, Any] = {"max_shard_size": max_shard_size, "copy_code": copy_code, "hash_inputs": hash_inputs}
    for step in steps:
        last, plan = step is steps[-1], plan_step(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with stoppable("the same command goes on from here"):
                result = write_output(plan, step.out, run, overwrite=overwrite, **how)
            warn_of(result)
        notes = [*plan.notes, *(str(warning.message) for warning in caught)]
        show = partial(_print_result, result, step.out, notes)
        if last or not as_json:
            render.output(result.to_dict(), show, file=record if last else None, as_json=as_json, quiet=quiet)
    if push_to_hub is not None and out is not None:
        _upload(out, push_to_hub, progress=progress)


def _check_order(recipe: Path, out: str | None) -> None:
    """Refuse a recipe in the place of the output, before the folder in its own place is read."""
    if out is not None and out.endswith((".yaml", ".yml")) and Path(out).is_file() and not recipe.is_file():
        raise EpimerError(f"the recipe comes first: epimer merge {out} {recipe}.")


def _check_upload(out: str, name: str) -> None:
    """Refuse an upload that cannot be, before anything is merged."""
    from epimer.checkpoints.hub_upload import check_upload
    from epimer.checkpoints.object_store import is_store

    if is_store(out):
        raise EpimerError("--push-to-hub uploads a folder of this machine; give one instead of an address as OUT.")
    check_upload(name)


def _upload(out: str, name: str, *, progress: bool) -> None:
    from epimer.checkpoints.hub_upload import upload_folder

    with stoppable(f"{out} is complete; the same command uploads it"):
        place = upload_folder(Path(out).expanduser(), name, progress=progress)
    if progress:
        render.print_text(f"uploaded to {place}")


def _print_dry_run(
    step: Step, plan_step: Callable[[Step], Plan], run: RunOptions, *, as_json: bool, quiet: bool
) -> bool:
    """Print the plan of a merge, unless it reads one that is not made yet; return whether it has problems."""
    if lacking := [place for place in step.reads if not Path(place).is_dir()]:
        render.print_text(f"{step.out} is planned once {', '.join(lacking)} is there: merge without --dry-run.")
        return False
    plan = plan_step(step)
    if not plan.problems:
        try:
            run.budget(plan.parts)
        except EpimerError as error:
            plan.problems.append(error)
    _print_plan(plan, run, as_json=as_json, quiet=quiet)
    return bool(plan.problems)


def _downloads(files: Mapping[str, int]) -> str:
    """Say how much is to be downloaded, and of which models."""
    sizes: Counter[str] = Counter()
    for file, size in files.items():
        sizes[file.rpartition("/")[0]] += size
    return f"{render.size(sizes.total())} (" + ", ".join(f"{name} {render.size(n)}" for name, n in sizes.items()) + ")"


def _print_downloads(files: Mapping[str, int]) -> None:
    typer.echo(f"downloading {_downloads(files)} from the hub", err=True)


def _print_result(record: MergeRecord, out: str, notes: Sequence[str]) -> None:
    if not record.timings:
        return render.print_text(f"{out} is already there, made from the same recipe and models; nothing to do.")
    rules = Counter(tensor.rule for tensor in record.tensors.values())
    counts = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    title = f"[bold]{escape(out)}[/]"
    render.print_text(f"{title}  {record.method}, {len(record.tensors)} tensors ({counts})", markup=True)
    render.print_text("parameters: " + ", ".join(f"{100 * s:.3g}% {rule}" for rule, s in record.shares.items()))
    errors = [tensor.error for tensor in record.tensors.values() if tensor.error is not None]
    if errors:
        render.print_text(f"LoRA: {len(errors)} layers, which leave out at most {max(errors):.3g} of a layer's change")
    written, peak = render.size(sum(record.files.values())), render.size(record.peak_memory or 0)
    parts = ", ".join(
        f"{WORK[name]} {took:.1f}" for name, took in record.timings.items() if name in WORK and took > 0.05
    )
    render.print_text(f"{written} in {record.timings['total']:.1f} s ({parts}), peak memory {peak}")
    render.print_notes(notes)


def _print_plan(plan: Plan, run: RunOptions, *, as_json: bool, quiet: bool) -> None:
    """Print every tensor's rule and what it costs, then all problems."""
    from epimer.plan.time import seconds

    starting = time.perf_counter() - STARTED
    speeds, workers = run.speeds(), len(run.devices)
    problems = [str(problem) for problem in plan.problems]
    tensors: list[dict[str, Any]] = [
        {
            "name": job.name, "rule": "tied" if job.name in plan.ties else job.rule,
            "shape": list(job.template.shape), "dtype": render.dtype(job.template), "reads": job.reads,
            "writes": 0 if job.name in plan.ties else job.writes, "memory": max(part.memory for part in job.parts()),
            "seconds": round(seconds(job.work, speeds), 4),
        }
        for job in plan.jobs
    ]  # fmt: skip
    costs = ("reads", "writes", "memory")
    if as_json:
        totals = {cost: getattr(plan, cost) for cost in costs} | {"seconds": plan.seconds(speeds, workers)}
        totals["starting"] = starting
        totals["downloads"] = sum(plan.participants.downloads.values())
        record = {"method": plan.method.name, "tensors": tensors, "totals": totals}
        return render.print_json({**record, "notes": plan.notes, "problems": problems})
    if tensors and not quiet:
        rows = [
            [
                row["name"],
                row["rule"],
                render.shape(row["shape"]),
                row["dtype"],
                *(render.size(row[c]) for c in costs),
                f"{row['seconds']:.2f} s",
            ]
            for row in tensors
        ]
        render.print_table(["tensor", "rule", "shape", "dtype", "read", "write", "memory", "time"], rows)
        render.print_text(
            f"{plan.method.name} of {len(plan.participants.models)} models: read {render.size(plan.reads)}, "
            f"write {render.size(plan.writes)}, widest tensor needs {render.size(plan.memory)}, "
            f"about {plan.seconds(speeds, workers):.2g} s with {workers} at a time, "
            f"after {starting:.1f} s to start and plan"
        )
        if plan.participants.downloads:
            render.print_text(f"to be downloaded from the hub: {_downloads(plan.participants.downloads)}")
        render.print_notes(plan.notes)
    for problem in problems:
        render.print_text(f"problem: {problem}")
