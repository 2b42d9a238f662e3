"""The public functions: open, plan, run on an engine, and hand the result over, from folders or from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from epimer.checkpoints.memory import Model, copy_with, state_of
from epimer.checkpoints.writer import check_new
from epimer.curvature.basis import HEADER, StoredBasis, save_basis
from epimer.engine.basis import KINDS, build_bases
from epimer.engine.merge import MergedState, merge_in_memory
from epimer.engine.options import RunOptions, in_memory
from epimer.engine.output import check_output, merge_record, warn_of
from epimer.engine.store_output import write_folder, write_output
from epimer.engine.threads import check_device
from epimer.errors import EpimerWarning, ParameterError, RecipeError, TensorError, short, warn
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Subspace, Tagged
from epimer.methods.options import RULES_PARAMETER
from epimer.methods.registry import Method, compatible_method
from epimer.plan.adapter import plan_adapter
from epimer.plan.curvature_inputs import python_curvatures
from epimer.plan.inputs import check_weights
from epimer.plan.jobs import Plan
from epimer.plan.merge import open_models, plan_recipe, plan_state_dicts
from epimer.plan.participants import state_dict_participants
from epimer.progress import Progress
from epimer.recipe.documents import merge_steps
from epimer.recipe.load import open_recipe
from epimer.recipe.model import AUTO, Recipe, extraction, known_parameters
from epimer.records import Diagnosis, MergeRecord

if TYPE_CHECKING:  # what a plain merge does not need is imported where it is used, so that a merge starts sooner
    from epimer.diagnosis.diagnose import Methods
    from epimer.diagnosis.sweep import Sweep
    from epimer.evaluation.judges import Evaluate

RecipeLike = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""a YAML file, its content as a mapping, or a loaded recipe"""
STEPS = 20  # of conjugate gradients while settings of models in memory are compared


# --- merge ---


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

    Returns:
        The record of the merge; of several, the last one's.
    """
    run = RunOptions(device, workers, threads, max_memory, progress, engine, address)
    for step in merge_steps(recipe, out, intermediate, folder, compat):
        plan = plan_merge(step.recipe, folder=step.folder, progress=progress, any_curvature=any_curvature)
        how: dict[str, Any] = {"max_shard_size": max_shard_size, "copy_code": copy_code}
        record = write_output(plan, step.out, run, overwrite=overwrite, **how)
        for note in plan.notes:
            warn(EpimerWarning(note))
        warn_of(record)
    return record


def plan_merge(
    recipe: RecipeLike,
    *,
    folder: Path | None = None,
    progress: bool = False,
    any_curvature: bool = False,
    compat: str | None = None,
    download: bool = True,
    before_download: Callable[[Mapping[str, int]], None] = lambda files: None,
) -> Plan:
    """Open what a recipe names, choose what it leaves to `auto`, and plan its merge; problems are collected.

    Models on the hub are planned from their headers first, and downloaded where that shows no problem, after a call of
    `before_download` with the files and their bytes. Without `download` they stay there, unless something is chosen.
    """
    loaded, folder = open_recipe(recipe, folder, compat)
    chosen = loaded.auto or loaded.rounds or loaded.refine
    if not chosen:
        opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature, download=False)
        plan = plan_adapter(plan_recipe(loaded, opened))
        downloads = opened.participants.downloads
        if plan.problems or not downloads or not download:
            return plan
        before_download(downloads)
    opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature)
    if not chosen:
        return plan_adapter(plan_recipe(loaded, opened))
    from epimer.diagnosis.choice import choose_and_plan

    return choose_and_plan(loaded, opened, folder, RunOptions(progress=progress))


def extract_lora(
    finetuned: str, base: str, out: str | os.PathLike[str], rank: int, *, dtype: str | None = None, **options: Any
) -> MergeRecord:
    """Write what a model learnt since its base as a LoRA adapter: of every linear layer the best that a rank can hold.

    What is no linear layer and moved is written whole; the record tells every layer's relative error. `options` are
    those of `merge`: device, progress, overwrite, max_memory, workers, threads.
    """
    return merge(extraction(finetuned, base, rank, dtype), out, **options)


@torch.no_grad()
def merge_state_dicts(
    base: Model | None,
    models: Sequence[Model],
    method: str = "epimer_free",
    *,
    weights: Sequence[float] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    device: str | torch.device | None = None,
    compat: str | None = None,
    **parameters: Any,
) -> MergedState:
    """Merge models fine-tuned from one base; the result has base's names, shapes and dtypes.

    Args:
        base: the ancestor, a state dict or an nn.Module; None where the method needs none.
        models: the fine-tuned models, with base's names and shapes.
        method: one of `list_methods()`, or mergekit's name of it; by default the best one that needs neither data nor
            curvature.
        weights: one per model; scaled to sum 1, except in task_arithmetic and the like, and with normalize=False.
        curvature: one mapping per model from tensor name to Diagonal, Kronecker, Samples or Projected.
        device: where to compute; by default where base is.
        compat: "mergekit" gives the numbers of mergekit 0.1.5 where it departs from the papers (docs/recipes.md).
        **parameters: the method's own, see `describe_method(method)`.

    Returns:
        The merged state dict; its `record` tells each tensor's rule, rank, status and residual.
    """
    row = compatible_method(method, compat)
    options = row.resolve(parameters)
    where = None if device is None else check_device(device)
    plan = plan_state_dicts(state_dict_participants(base, models), row, options, weights, curvature)
    where = where or next((job.device for job in plan.jobs), torch.device("cpu"))
    tensors, records, prepared = merge_in_memory(plan, in_memory(where, len(plan.parts)).start(plan.parts))
    record = merge_record(plan, prepared, records)
    for note in plan.notes:
        warn(EpimerWarning(note))
    warn_of(record)
    return MergedState(tensors, record)


def merge_models(base: nn.Module, models: Sequence[Model], method: str = "epimer_free", **settings: Any) -> nn.Module:
    """Merge models fine-tuned from one base into a live model: a copy of base with the merged weights.

    Tied parameters stay tied, and what the merge leaves out is base's. Base and models are not changed.

    Args:
        base: the ancestor.
        models: the fine-tuned models, modules or state dicts, with base's names and shapes.
        method: one of `list_methods()`.
        **settings: `weights`, `curvature`, `device` and the method's own, as in `merge_state_dicts`.
    """
    if not isinstance(base, nn.Module):
        raise TensorError(f"merge_models copies base, an nn.Module, got {type(base).__name__}; take merge_state_dicts.")
    return copy_with(base, merge_state_dicts(base, models, method, **settings))


# --- diagnose ---


def diagnose(
    recipe: RecipeLike,
    *,
    rank: int | None = None,
    methods: Sequence[str] | None = None,
    damping: float = 1e-2,
    engine: str = "local",
    address: str | None = None,
    progress: bool = True,
    any_curvature: bool = False,
    workers: int | None = None,
    max_memory: str | int | None = None,
    folder: Path | None = None,
) -> Diagnosis:
    """Diagnose the models of a recipe before they are merged; every model is read once, layer by layer.

    Args:
        recipe: a YAML file, or its content as a mapping; where its models have curvature, that is used.
        rank: directions per task; by default what the recipe says, or 32.
        methods: merges to forecast, by name; by default average, tsv, epimer_free, those that use this curvature, and
            the recipe's own.
        damping: added to each projected curvature of mean diagonal 1.
        engine: local, or ray for a cluster whose machines share a disk (docs/cluster.md).
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine.
        progress: show a bar on a terminal.
        any_curvature: use curvature even where it was measured on another model.
        workers: matrices looked at at the same time; by default one per core.
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
        folder: where relative paths of a recipe that is no file are looked for too.
    """
    from epimer.diagnosis.diagnose import diagnose_recipe

    run = RunOptions(workers=workers, max_memory=max_memory, progress=progress, engine=engine, address=address)
    loaded, folder = open_recipe(recipe, folder)
    if loaded.base_model is None:
        raise ParameterError("a diagnosis is of task vectors, so the recipe needs a base_model.")
    opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature)
    return diagnose_recipe(loaded, opened, rank=rank, methods=methods, damping=damping, run=run)


def diagnose_state_dicts(
    base: Model,
    models: Sequence[Model],
    *,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    rank: int | None = 32,
    weights: Sequence[float] | None = None,
    basis: Mapping[str, Tagged] | None = None,
    damping: float = 1e-2,
    rules: Sequence[tuple[str, str]] = (),
    methods: Methods | None = None,
    names: Sequence[str] | None = None,
) -> Diagnosis:
    """Say, per matrix and in total, how tasks conflict, what curvature would gain and what merges would lose.

    Args:
        base: the ancestor.
        models: the fine-tuned models.
        curvature: as in `merge_state_dicts`; None takes each task vector's own Gram matrices.
        rank: directions per task of the tagged basis; None is floor(min(m, n) / T).
        weights: one per model.
        basis: the bases that projected curvature was measured on.
        damping: added to each projected curvature of mean diagonal 1.
        rules: which tensors are matrices, by name pattern.
        methods: merges to forecast, by name, or a mapping from names to parameters; None takes average, tsv,
            epimer_free and those that use this curvature.
        names: what to call the models.
    """
    from epimer.diagnosis.diagnose import diagnose_models

    options = _checked("a diagnosis", rank=rank, damping=damping, rules=rules)
    if basis is not None and not isinstance(basis, Mapping):
        raise ParameterError(f"basis must be a mapping from tensor names to bases or None. Got {short(basis)} instead.")
    participants = state_dict_participants(base, models)
    tasks = len(participants.models)
    shares = check_weights(weights, tasks, "a diagnosis")
    return diagnose_models(
        participants,
        lambda name, depth: shares,
        curvatures=python_curvatures(curvature, participants.models),
        bases=basis,
        rules=options["rules"],
        rank=options["rank"],
        damping=options["damping"],
        methods=methods,
        names=names if names is not None else [f"model {t}" for t in range(tasks)],
    )


def _checked(user: str, **options: Any) -> dict[str, Any]:
    """Return options that the methods with curvature share, each checked."""
    known = {**known_parameters(AUTO), "rules": RULES_PARAMETER}
    return {name: known[name].check(user, value) for name, value in options.items()}


# --- sweep ---


def sweep(
    recipe: RecipeLike,
    evaluation: str | None = None,
    *,
    methods: list[str] | None = None,
    scales: list[float] | None = None,
    ranks: list[int] | None = None,
    keep_best: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    any_curvature: bool = False,
    engine: str = "local",
    address: str | None = None,
    progress: bool = True,
    workers: int | None = None,
    max_memory: str | int | None = None,
) -> Sweep:
    """Try many settings on the models of a recipe; write the best merge where asked to.

    Args:
        recipe: a YAML file, or its content as a mapping.
        evaluation: see `epimer.evaluation.judges.evaluator`; None compares with each task's own model on the inputs
            that were kept with the curvature.
        methods: by name; None takes average, tsv, iso_c, epimer_free and those that use the recipe's curvature.
        scales: all are tried; None climbs from 1.
        ranks: directions per task.
        keep_best: the folder to write the winner to.
        overwrite: replace a model folder that epimer made before.
        any_curvature: use curvature even where it was measured on another model.
        engine: local, or ray for a cluster whose machines share a disk (docs/cluster.md).
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine.
        progress: show bars on a terminal.
        workers: tensors merged at the same time; by default one per core.
        max_memory: most memory for merging, as "3GB"; by default four fifths of what is free. What the evaluation takes
            comes on top.
    """
    from epimer.diagnosis.choice import INPUTS, inputs_of
    from epimer.diagnosis.sweep import sweep_recipe
    from epimer.evaluation.judges import by_agreement, evaluator

    run = RunOptions(workers=workers, max_memory=max_memory, progress=progress, engine=engine, address=address)
    loaded, folder = open_recipe(recipe)
    opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature)
    if keep_best is not None:  # before any work
        check_output(Path(keep_best).expanduser().absolute(), opened.participants, overwrite=overwrite)
    inputs = inputs_of(loaded, opened, folder) if evaluation is None else None
    if evaluation is None and inputs is None:
        raise RecipeError(
            "a sweep needs something to compare merges by: --eval, or curvature of every model that kept its inputs."
        )
    judge = by_agreement(inputs) if inputs else evaluator(evaluation or "", folder, count=len(loaded.models))
    result = sweep_recipe(
        loaded,
        opened,
        judge,
        methods=methods,
        scales=scales,
        ranks=ranks,
        evaluation=evaluation or INPUTS,
        run=run,
    )
    if keep_best is not None:
        best = loaded.settled(result.best.method, result.best.scale, result.best.rank)
        run = replace(run, device="auto")
        plan = plan_adapter(plan_recipe(best, opened))
        warn_of(write_folder(plan, Path(keep_best), run, overwrite=overwrite))
    return result


@torch.no_grad()
def sweep_state_dicts(
    base: Model,
    models: Sequence[Model],
    evaluate: Evaluate,
    *,
    methods: Sequence[str] | None = None,
    scales: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    weights: Sequence[float] | None = None,
    rules: Sequence[tuple[str, str]] = (),
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    evaluation: str = "a function",
    progress: Callable[[str], None] = lambda done: None,
) -> Sweep:
    """Merge in every way, take each one's best scale on validation data, and report that on test data.

    Args:
        base: the ancestor.
        models: the fine-tuned models.
        evaluate: scores a state dict on "val" or "test".
        methods: by name; None takes average, tsv, iso_c, epimer_free and those that use the curvature.
        scales: all are tried; None climbs from 1 along a grid until two in a row are worse.
        ranks: directions per task, for methods that have them; None takes each method's own.
        curvature: as in `merge_state_dicts`.
        weights: one per model.
        rules: which tensors are merged how.
        parameters: method -> parameters it is merged with.
        evaluation: what to call the evaluation.
        progress: called with a line after every setting.
    """
    from epimer.diagnosis.sweep import Merges, check_methods, sweep_plans

    kind = None if curvature is None else next((m.kind for one in curvature for m in one.values()), None)
    rows = check_methods(methods, kind)
    participants = state_dict_participants(base, models)
    run = in_memory(torch.device("cpu"), len(participants.template.headers))
    merges = Merges(participants, _checked("a sweep", rules=rules)["rules"], run)

    def plan(row: Method, rank: int | None, scale: float) -> Plan:
        options = {"scale": scale, "rules": rules} | ({"iterations": STEPS} if "iterations" in row.defaults else {})
        options |= dict((parameters or {}).get(row.name, {})) | ({} if rank is None else {"rank": rank})
        measured = curvature if row.needs_curvature else None
        return plan_state_dicts(participants, row, row.resolve(options), weights, measured)

    def shown_rank(row: Method, rank: int | None) -> int | None:
        return rank if rank is not None else (parameters or {}).get(row.name, {}).get("rank")

    return sweep_plans(
        merges,
        rows,
        plan,
        dict(state_of(base)),
        evaluate,
        ranks=ranks,
        scales=scales,
        shown_rank=shown_rank,
        evaluation=evaluation,
        progress=lambda done, total, line: progress(line),
    )


# --- bases ---


@torch.no_grad()
def build_basis(
    base: Model,
    models: Sequence[Model],
    *,
    rank: int | None = 32,
    basis: str = "tagged",
    rules: Sequence[tuple[str, str]] = (),
) -> dict[str, Subspace]:
    """Return the basis of every matrix, by name, to project curvature on before the merge that uses it."""
    options = _checked("build_basis", rank=rank, rules=rules)
    if basis not in KINDS:
        raise ParameterError(
            f"The 'basis' parameter of build_basis must be 'tagged' or 'tensor'. Got {short(basis)} instead."
        )
    participants = state_dict_participants(base, models)
    if participants.base is None:
        raise TensorError("a basis needs the base model that the others were fine-tuned from; pass base.")
    return dict(build_bases(participants, options["rules"], rank=options["rank"], kind=basis))


def make_basis(
    recipe: RecipeLike,
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    workers: int | None = None,
    max_memory: str | int | None = None,
) -> StoredBasis:
    """Build the basis that a recipe's merge will use, and write it to a folder.

    Args:
        recipe: a YAML file, or its content as a mapping; its curvature need not exist yet.
        out: the folder to make.
        kind: tagged or tensor; by default what the recipe's method takes.
        rank: directions per task; by default what the recipe says.
        overwrite: replace a basis folder.
        progress: show a bar on a terminal.
        workers: matrices worked on at the same time; by default one per core.
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
    """
    out = Path(os.path.abspath(Path(out).expanduser()))
    check_new(out, HEADER, overwrite=overwrite)
    loaded, folder = open_recipe(recipe)
    known = known_parameters(loaded.merge_method)
    if kind is None and "basis" not in known:
        raise ParameterError(f"{loaded.merge_method} is not merged in a basis; take epimer_kron, or say --kind.")
    chosen = kind or str(loaded.parameters.get("basis", known["basis"].default))
    if chosen not in KINDS:
        raise ParameterError(f"a basis is one of {', '.join(KINDS)}, got {chosen!r}; say which with --kind.")
    if loaded.base_model is None:
        raise ParameterError("a basis is made of task vectors, so the recipe needs a base_model.")
    if rank is not None and rank < 1:
        raise ParameterError(f"--rank must be at least 1, got {rank}.")
    size: Any = rank or loaded.parameters.get("rank", known["rank"].default if "rank" in known else 32)
    participants = open_models(loaded, folder=folder, progress=progress, measured=False).participants
    with Progress(progress) as bar, torch.no_grad():
        run = RunOptions(workers=workers, max_memory=max_memory)
        bases = build_bases(
            participants, loaded.rules, rank=size, kind=chosen, weights=loaded.weights, run=run, progress=bar
        )
        about = {"rank": size, "models": [one.checkpoint.fingerprint for one in participants.all]}
        save_basis(bases, out, about=about, overwrite=overwrite)
    return StoredBasis(out)
