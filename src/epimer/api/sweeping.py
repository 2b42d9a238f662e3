"""Try many settings of a merge and compare them, from folders or from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epimer.checkpoints.memory import Model, state_of
from epimer.checkpoints.writer import recover
from epimer.engine.options import RunOptions, in_memory
from epimer.engine.output import check_output, warn_of
from epimer.engine.store_output import write_folder
from epimer.engine.threads import torch_threads
from epimer.errors import RecipeError
from epimer.geometry.metric import Metric
from epimer.methods.registry import Method
from epimer.plan.adapter import plan_adapter
from epimer.plan.curvature_inputs import kind_of
from epimer.plan.inputs import check_shared_options
from epimer.plan.jobs import Plan
from epimer.plan.merge import open_models, plan_recipe, plan_state_dicts
from epimer.plan.participants import state_dict_participants
from epimer.recipe.load import RecipeLike, open_recipe

if TYPE_CHECKING:  # a merge starts sooner without it: imported where it is used
    from epimer.diagnosis.sweep import Sweep
    from epimer.evaluation.judges import Evaluate

STEPS = 20  # of conjugate gradients while settings of models in memory are compared


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
    device: str = "auto",
    engine: str = "local",
    address: str | None = None,
    progress: bool = True,
    workers: int | None = None,
    max_memory: str | int | None = None,
    found: Callable[[Sweep], None] = lambda result: None,
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
        device: of merges and of the networks that are compared: cpu, cuda, cuda:N, or auto for every GPU there is, else
            the CPU.
        engine: local, or ray for a cluster whose machines share a disk (docs/cluster.md).
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine.
        progress: show bars on a terminal.
        workers: tensors merged at the same time, and threads of the networks; by default one per core.
        max_memory: most memory for merging, as "3GB"; by default four fifths of what is free. What an evaluation other
            than by kept inputs takes comes on top.
        found: called with the result before the best merge is written, which thus is the last to appear.
    """
    from epimer.diagnosis.choice import INPUTS, inputs_of
    from epimer.diagnosis.sweep import sweep_recipe
    from epimer.evaluation.judges import by_agreement, evaluator

    run = RunOptions(device, workers, 1, max_memory, progress, engine, address)
    loaded, folder = open_recipe(recipe)
    opened = open_models(loaded, folder=folder, progress=progress, any_curvature=any_curvature)
    if keep_best is not None:  # before any work
        place = Path(keep_best).expanduser().absolute()
        recover(place)
        check_output(place, opened.participants, overwrite=overwrite)
    inputs, held = inputs_of(loaded, opened, folder, run) if evaluation is None else (None, 0)
    if evaluation is None and inputs is None:
        raise RecipeError(
            "a sweep needs something to compare merges by: --eval, or curvature of every model that kept its inputs."
        )
    where = str(run.network_device)
    judge = (
        by_agreement(inputs) if inputs else evaluator(evaluation or "", folder, count=len(loaded.models), device=where)
    )
    with torch_threads(run.network_threads):
        result = sweep_recipe(
            loaded,
            opened,
            judge,
            methods=methods,
            scales=scales,
            ranks=ranks,
            evaluation=evaluation or INPUTS,
            run=run,
            held=held,
        )
    found(result)
    if keep_best is not None:
        best = loaded.settled(result.best.method, result.best.scale, result.best.rank)
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
    from epimer.diagnosis.sweep import Merges, check_methods, directions_per_task, sweep_plans

    rows = check_methods(methods, kind_of(curvature))
    participants = state_dict_participants(base, models)
    run = in_memory(torch.device("cpu"), len(participants.template.headers))
    merges = Merges(participants, check_shared_options("a sweep", rules=rules)["rules"], run)

    def plan(row: Method, rank: int | None, scale: float) -> Plan:
        options = {"scale": scale, "rules": rules} | ({"iterations": STEPS} if "iterations" in row.defaults else {})
        options |= dict((parameters or {}).get(row.name, {})) | ({} if rank is None else {"rank": rank})
        measured = curvature if row.needs_curvature else None
        return plan_state_dicts(participants, row, row.resolve(options), weights, measured)

    def shown_rank(row: Method, rank: int | None) -> int | None:
        given = {} if rank is None else {"rank": rank}
        return directions_per_task(row, {**(parameters or {}).get(row.name, {}), **given})

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
