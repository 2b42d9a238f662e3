"""Merge checkpoints into a folder, and state dicts or modules in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from epimer.checkpoints.memory import Model, copy_with
from epimer.engine.in_memory import MergedState, merge_in_memory
from epimer.engine.options import RunOptions, in_memory
from epimer.engine.output import merge_record, warn_of
from epimer.engine.store_output import write_output
from epimer.engine.threads import check_device, torch_threads
from epimer.errors import EpimerWarning, TensorError, warn
from epimer.geometry.metric import Metric
from epimer.methods.registry import compatible_method, default_method
from epimer.plan.adapter import plan_adapter
from epimer.plan.curvature_inputs import kind_of
from epimer.plan.jobs import Plan
from epimer.plan.merge import open_models, plan_recipe, plan_state_dicts
from epimer.plan.participants import state_dict_participants
from epimer.recipe.documents import merge_steps
from epimer.recipe.load import RecipeLike, open_recipe
from epimer.recipe.model import extraction
from epimer.recipe.non_finite import with_non_finite
from epimer.records import MergeRecord


def merge(
    recipe: RecipeLike,
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
    engine: str = "local",
    address: str | None = None,
    progress: bool = True,
    overwrite: bool = False,
    any_curvature: bool = False,
    max_shard_size: str | int = "5GB",
    copy_code: bool = False,
    max_memory: str | int | None = None,
    workers: int | None = None,
    threads: int = 1,
    folder: Path | None = None,
    intermediate: str | os.PathLike[str] | None = None,
    compat: str | None = None,
    hash_inputs: bool = False,
    non_finite: str | None = None,
) -> MergeRecord:
    """Merge the checkpoints that a recipe names into a new model folder; what it leaves to `auto` is chosen first.

    Args:
        recipe: a YAML file, or its content as a mapping.
        out: the folder to make; it appears when it is complete, and not before. Or an object store's address.
        device: cpu, cuda, cuda:N, or auto for every GPU there is, else the CPU.
        engine: local, or ray for a cluster whose machines share a disk (docs/cluster.md).
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine.
        progress: show a bar on a terminal.
        overwrite: replace a model folder that epimer made before.
        any_curvature: use curvature even where it was measured on another model.
        max_shard_size: largest file of weights, as "5GB".
        copy_code: copy the base's Python files and keep the auto_map that names them; nothing in them is run.
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
        workers: tensors merged at the same time; by default one per core.
        threads: threads within each of them. Results do not depend on `workers`; they may, in their last digit, on
            `threads` and `device`.
        folder: where relative paths of a recipe that is no file are looked for too.
        intermediate: where the merges with names go, of a file of several recipes; by default OUT.parts.
        compat: "mergekit" gives the numbers of mergekit 0.1.5 where it departs from the papers (docs/recipes.md).
        hash_inputs: read every input once more and record the SHA-256 of its files, for `verify`.
        non_finite: instead of the recipe's: "error" refuses NaN and Inf in a model, "skip-tensor" leaves a tensor
            that has them as the base has it.

    Returns:
        The record of the merge; of several, the last one's.
    """
    run = RunOptions(device, workers, threads, max_memory, progress, engine, address)
    for step in merge_steps(recipe, out, intermediate, folder, compat):
        loaded = with_non_finite(step.recipe, non_finite)
        plan = plan_merge(loaded, folder=step.folder, run=run, any_curvature=any_curvature)
        how: dict[str, Any] = {"max_shard_size": max_shard_size, "copy_code": copy_code, "hash_inputs": hash_inputs}
        record = write_output(plan, step.out, run, overwrite=overwrite, **how)
        for note in plan.notes:
            warn(EpimerWarning(note))
        warn_of(record)
    return record


def plan_merge(
    recipe: RecipeLike,
    *,
    folder: Path | None = None,
    run: RunOptions | None = None,
    any_curvature: bool = False,
    compat: str | None = None,
    download: bool = True,
    before_download: Callable[[Mapping[str, int]], None] = lambda files: None,
) -> Plan:
    """Open what a recipe names, choose what it leaves to `auto`, and plan its merge; problems are collected.

    Models on the hub are planned from their headers first, and downloaded where that shows no problem, after a call of
    `before_download` with the files and their bytes. Without `download` they stay there, unless something is chosen.
    `run` says where and within which limits `auto` is chosen; by default on the CPU.
    """
    started = time.perf_counter()
    run = run or RunOptions()
    progress = run.progress

    def timed(plan: Plan, opening: float | None = None) -> Plan:
        """Return the plan with the seconds that went into it: `opening` of them, or all, opened and planned."""
        spent = time.perf_counter() - started
        measuring = plan.timings.get("measure", 0.0)
        chosen = {} if opening is None else {"choose": spent - opening - measuring}
        return replace(plan, timings={"plan": spent if opening is None else opening, **chosen, **plan.timings})

    loaded, folder = open_recipe(recipe, folder, compat)
    chosen = loaded.auto or loaded.rounds or loaded.refine
    if not chosen:
        opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature, download=False)
        plan = plan_adapter(plan_recipe(loaded, opened))
        downloads = opened.participants.downloads
        if plan.problems or not downloads or not download:
            return timed(plan)
        before_download(downloads)
    opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature)
    if not chosen:
        return timed(plan_adapter(plan_recipe(loaded, opened)))
    opening = time.perf_counter() - started
    from epimer.diagnosis.choice import choose_and_plan

    with torch_threads(run.network_threads):
        return timed(choose_and_plan(loaded, opened, folder, run), opening)


def extract_lora(
    finetuned: str, base: str, out: str | os.PathLike[str], rank: int, *, dtype: str | None = None, **options: Any
) -> MergeRecord:
    """Write what a model learnt since its base as a LoRA adapter: of every linear layer the best that a rank can hold.

    What is no linear layer and moved is written whole; the record tells every layer's relative error. `options` are
    those of `merge`: device, progress, overwrite, max_memory, workers, threads.
    """
    try:
        return merge(extraction(finetuned, base, rank, dtype), out, **options)
    except TensorError as error:
        recipe = "rules and non_finite are for recipes: to use them, write one with `output: lora` (docs/lora.md)"
        raise TensorError(f"{error} Here, {recipe}.") from error


@torch.no_grad()
def merge_state_dicts(
    base: Model | None,
    models: Sequence[Model],
    method: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    device: str | torch.device | None = None,
    compat: str | None = None,
    non_finite: str = "error",
    **parameters: Any,
) -> MergedState:
    """Merge models fine-tuned from one base; the result has base's names, shapes and dtypes.

    Args:
        base: the ancestor, a state dict or an nn.Module; None where the method needs none.
        models: the fine-tuned models, with base's names and shapes.
        method: one of `list_methods()`, or mergekit's name of it; by default the one for this curvature: epimer_kron,
            epimer or epimer_exact, and epimer_free without any.
        weights: one per model; scaled to sum 1, except in task_arithmetic and the like, and with normalize=False.
        curvature: one mapping per model from tensor name to Diagonal, Kronecker, Samples or Projected.
        device: where to compute; by default where base is.
        compat: "mergekit" gives the numbers of mergekit 0.1.5 where it departs from the papers (docs/recipes.md).
        non_finite: what to do about NaN or Inf in a model: "error", or "skip-tensor" to leave that tensor as base's.
        **parameters: the method's own, see `describe_method(method)`.

    Returns:
        The merged state dict; its `record` tells each tensor's rule, rank, status and residual.
    """
    row = compatible_method(method if method is not None else default_method(kind_of(curvature)), compat)
    options = row.resolve(parameters)
    where = None if device is None else check_device(device)
    plan = plan_state_dicts(state_dict_participants(base, models, non_finite), row, options, weights, curvature)
    where = where or next((job.device for job in plan.jobs), torch.device("cpu"))
    tensors, records, prepared = merge_in_memory(plan, in_memory(where, len(plan.parts)).start(plan.parts))
    record = merge_record(plan, prepared, records)
    for note in plan.notes:
        warn(EpimerWarning(note))
    warn_of(record)
    return MergedState(tensors, record)


def merge_models(base: nn.Module, models: Sequence[Model], method: str | None = None, **settings: Any) -> nn.Module:
    """Merge models fine-tuned from one base into a live model: a copy of base with the merged weights.

    Tied parameters stay tied, and what the merge leaves out is base's. Base and models are not changed.

    Args:
        base: the ancestor.
        models: the fine-tuned models, modules or state dicts, with base's names and shapes.
        method: as in `merge_state_dicts`.
        **settings: `weights`, `curvature`, `device` and the method's own, as in `merge_state_dicts`.
    """
    if not isinstance(base, nn.Module):
        raise TensorError(f"merge_models copies base, an nn.Module, got {type(base).__name__}; take merge_state_dicts.")
    return copy_with(base, merge_state_dicts(base, models, method, **settings))
