"""Recipes that leave something open: `merge_method: auto`, `scale: auto`; chosen here, before anything is planned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from epimer.diagnosis.advice import choice
from epimer.diagnosis.diagnose import diagnose
from epimer.diagnosis.sweep import Sweep, Way, at_scales, check_methods, compare, shared_basis
from epimer.engine.merge import check_plan
from epimer.engine.threads import Runner
from epimer.errors import EpimerWarning, RecipeError
from epimer.evaluation.judges import Evaluate
from epimer.evaluation.suite import State
from epimer.geometry.linalg import working
from epimer.methods.registry import describe_method
from epimer.methods.rules import matching
from epimer.plan.jobs import Job, Plan, make_plan
from epimer.progress import Progress
from epimer.recipe.model import Recipe, open_recipe
from epimer.score_format import format_score

Choice = tuple[Recipe, str]
"""a recipe with nothing left open, and why it is so"""


def resolve(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    *,
    evaluator: Callable[[str, Path | None], Evaluate] | None = None,
    progress: bool = True,
    any_curvature: bool = False,
    folder: Path | None = None,
) -> Choice:
    """Choose what a recipe leaves open: on validation data where it names an `eval`, else by forecast."""
    given, folder = open_recipe(recipe, folder)
    if not given.auto:
        return given, ""
    if given.base_model is None:
        raise RecipeError("a recipe with 'auto' needs the base model that the others were fine-tuned from.")
    if given.eval is None:
        return by_forecast(given, folder, progress=progress, any_curvature=any_curvature)
    if evaluator is None:
        raise RecipeError("the recipe's 'eval' needs epimer.merge or `epimer merge` to open it.")
    evaluate = evaluator(given.eval, folder)
    return by_sweep(given, evaluate, folder=folder, progress=progress, any_curvature=any_curvature)


def by_forecast(given: Recipe, folder: Path | None, *, progress: bool, any_curvature: bool) -> Choice:
    """Choose by what the diagnosis forecasts."""
    wanted = None if "merge_method" in given.auto else [given.merge_method]
    found = diagnose(given, methods=wanted, progress=progress, any_curvature=any_curvature, folder=folder)
    if not found.forecast:
        raise RecipeError("projected curvature is known inside its basis only, so nothing can be forecast; add 'eval'.")
    method, scale = choice(found, scaled="scale" in given.auto)
    forecast, row = found.forecast[method], describe_method(method)
    under = f" ({found.curvature} curvature)"
    if "scale" not in given.auto:
        return settled(given, method), f"{method}: the lowest forecast, {forecast.mean:.2f}{under}"
    if row.absolute_weights:  # forecast for weights that sum to 1
        scale = round(scale / _total_weight(given), 4)
    why = f"{method} at scale {scale:g}: the lowest forecast, {forecast.mean_at_scale:.2f}{under}"
    return settled(given, method, scale), why


def _total_weight(given: Recipe) -> float:
    if "weight" in given.varying():
        raise RecipeError("weights differ between tensors, so no scale can be forecast; add 'eval', or give a scale.")
    weights = given.settings("", 0.0).weights if "weight" in _given(given) else None
    return sum(weights) if weights else 1.0


def by_sweep(given: Recipe, evaluate: Evaluate, *, folder: Path | None, progress: bool, any_curvature: bool) -> Choice:
    """Choose on validation data."""
    methods = None if "merge_method" in given.auto else [given.merge_method]
    free = "scale" in given.auto
    found = sweep_recipe(
        given, evaluate, methods=methods, scales=None if free else [1.0], folder=folder, progress=progress,
        any_curvature=any_curvature, evaluation=given.eval or "", keep_scale=not free,
    )  # fmt: skip
    best = found.best
    why = f"{format_score(best.validation.unit, best.validation.all.average)} on validation data of {given.eval}"
    if not free:
        return settled(given, best.method), f"{best.method}: {why}"
    return settled(given, best.method, best.scale), f"{best.method} at scale {best.scale:g}: {why}"


def settled(given: Recipe, method: str, scale: float | None = None, rank: int | None = None) -> Recipe:
    """Return the recipe with a method, and a scale and a rank where they are given: exactly what a sweep merges.

    The recipe's parameters are for its own method, or for whichever is chosen where it leaves that open; weights are
    for all.
    """
    row = describe_method(method)
    own = "merge_method" in given.auto or method == given.merge_method
    known = ({parameter.name for parameter in row.parameters} if own else set()) | {"weight"}
    parameters = {key: value for key, value in given.parameters.items() if key in known}
    if not own and scale is None and "scale" in given.parameters:
        parameters["scale"] = given.parameters["scale"]
    if scale is not None:
        parameters.pop("scale", None)
        parameters |= {} if scale == 1.0 else {"scale": scale}
    if rank is not None:
        parameters["rank"] = rank
    models = []
    for entry in given.models:
        kept: dict[str, Any] = {"parameters": {k: v for k, v in entry.parameters.items() if k in known}}
        models.append(entry.model_copy(update=kept if row.needs_curvature else {**kept, "curvature": None}))
    return given.model_copy(
        update={
            "merge_method": method,
            "parameters": parameters,
            "models": tuple(models),
            "auto": (),
            "eval": None,
            "basis": given.basis if row.needs_curvature else None,
            "normalize_weights": given.normalize_weights if own else None,
        }
    )


def sweep_recipe(
    given: Recipe,
    evaluate: Evaluate,
    *,
    methods: Sequence[str] | None = None,
    scales: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    folder: Path | None = None,
    progress: bool = True,
    any_curvature: bool = False,
    evaluation: str = "",
    keep_scale: bool = False,
) -> Sweep:
    """Sweep the models of a recipe: every setting is merged by the engine as `settled` would have it, into memory.

    `keep_scale` leaves the recipe's own scale in place, and scales multiply it.
    """
    if given.base_model is None:
        raise RecipeError("a sweep scales task vectors, so the recipe needs a base_model.")
    neutral = given.plain(auto=(), eval=None)
    first = make_plan(neutral, folder=folder, progress=progress, any_curvature=any_curvature)
    check_plan(first)
    rows = check_methods(methods, None if first.curvatures is None else first.curvatures[0].kind)
    base, *tuned = _states(first, progress)
    bases: dict[int | None, dict[str, Any]] = {}
    rules = [pair for pair in given.rules if any(matching(name, [pair]) for name in base)]  # others are not read

    def merged(method: str, rank: int | None, scale: float) -> State:
        recipe = settled(given, method, None if keep_scale else scale, rank)
        plan = make_plan(
            recipe.model_copy(update={"dtype": None, "out_dtype": "float32"}),
            folder=folder,
            any_curvature=any_curvature,
        )
        check_plan(plan)

        def basis(rank: int | None, shape: str) -> dict[str, Any]:
            return shared_basis(bases, base, tuned, rank, shape, rules)

        return merge_in_memory(plan, basis)

    def ways() -> Iterator[Way]:
        for row in rows:
            named = {parameter.name for parameter in row.parameters}
            for rank in (ranks or (None,)) if "rank" in named else (None,):

                def at(scale: float, name: str = row.name, rank: int | None = rank) -> State:
                    return merged(name, rank, scale)

                shown = rank if rank is not None else settled(given, row.name).parameters.get("rank")
                yield row.name, shown if isinstance(shown, int) else None, at_scales(row.name, base, at)

    with Progress(progress, unit="settings") as bar:
        stage = bar.begin("trying", None)
        return compare(
            ways(), evaluate, scales=scales, evaluation=evaluation, progress=lambda line: stage.advance(1, line)
        )


def merge_in_memory(plan: Plan, basis: Callable[[int | None, str], dict[str, Any]]) -> dict[str, Tensor]:
    """Merge as the engine does, but keep the tensors; bases come from `basis`, by rank and shape, and are shared."""
    jobs = [_sharing(job, basis) if plan.basis is None else job for job in plan.parts]
    runner = Runner(plan, [torch.device("cpu")], threads=torch.get_num_threads(), memory=None)
    runner.prepared = runner.prepare(Progress(False).begin("", None))
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        for job, result, _ in runner.results(jobs):
            parts.setdefault(job.name, []).append((0 if job.rows is None else job.rows[0], result))
    found = {}
    for name, pieces in parts.items():
        whole = [part for _, part in sorted(pieces, key=lambda piece: piece[0])]
        found[name] = whole[0] if len(whole) == 1 else torch.cat(whole)
    return {job.name: found[plan.ties.get(job.name, job.name)].reshape(job.template.shape) for job in plan.jobs}


def _sharing(job: Job, basis: Callable[[int | None, str], dict[str, Any]]) -> Job:
    """Return a job that is merged in a basis which other methods use too."""
    if (
        job.rule != "matrix"
        or job.setting is None
        or getattr(job.setting.p, "basis", "full") not in ("tagged", "tensor")
    ):
        return job
    p = job.setting.p
    return replace(job, setting=replace(job.setting, p=SimpleNamespace(**{**vars(p), "basis": basis(p.rank, p.basis)})))


def _given(recipe: Recipe) -> set[str]:
    return {*recipe.parameters, *(key for entry in recipe.models for key in entry.parameters)}


def _states(plan: Plan, progress: bool) -> list[dict[str, Tensor]]:
    """Read the base and all models."""
    states: list[dict[str, Tensor]] = [{} for _ in plan.roles]
    names = [job.name for job in plan.jobs]
    with Progress(progress, unit="tensors") as bar:
        stage = bar.begin("reading", len(names) * len(states))
        for name in names:
            for state, role in zip(states, plan.roles, strict=True):
                if name in role.headers:
                    W = role.read(name)
                    state[name] = working(W) if W.is_floating_point() else W
                stage.advance(1, name)
    return states
