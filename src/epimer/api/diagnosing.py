"""Diagnose models before they are merged, from folders or from memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epimer.checkpoints.memory import Model
from epimer.engine.options import RunOptions
from epimer.errors import ParameterError, short
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Tagged
from epimer.plan.curvature_inputs import python_curvatures
from epimer.plan.inputs import check_shared_options, check_weights
from epimer.plan.merge import open_models
from epimer.plan.participants import state_dict_participants
from epimer.recipe.load import RecipeLike, open_recipe
from epimer.records import Diagnosis

if TYPE_CHECKING:  # a merge starts sooner without it: imported where it is used
    from epimer.diagnosis.diagnose import Methods


def diagnose(
    recipe: RecipeLike,
    *,
    rank: int | None = None,
    methods: Sequence[str] | None = None,
    damping: float = 1e-2,
    device: str = "auto",
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
        device: cpu, cuda, cuda:N, or auto for every GPU there is, else the CPU.
        engine: local, or ray for a cluster whose machines share a disk (docs/cluster.md).
        address: of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine.
        progress: show a bar on a terminal.
        any_curvature: use curvature even where it was measured on another model.
        workers: matrices looked at at the same time; by default one per core.
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
        folder: where relative paths of a recipe that is no file are looked for too.
    """
    from epimer.diagnosis.diagnose import diagnose_recipe

    run = RunOptions(device, workers, 1, max_memory, progress, engine, address)
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

    options = check_shared_options("a diagnosis", rank=rank, damping=damping, rules=rules)
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
