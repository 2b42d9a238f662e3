"""Recipes that leave something open: `merge_method: auto`, `scale: auto`; chosen here, before anything is planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.diagnosis.advice import choice
from epimer.diagnosis.diagnose import diagnose
from epimer.diagnosis.sweep import Evaluate, Sweep, sweep
from epimer.engine.merge import check_plan
from epimer.errors import RecipeError
from epimer.methods.registry import describe_method
from epimer.methods.rules import matching
from epimer.plan import Plan, make_plan
from epimer.progress import Progress
from epimer.recipe import PROVISIONAL, Recipe, load_recipe

Choice = tuple[Recipe, str]
"""a recipe with nothing left open, and why it is so"""


def resolve(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    *,
    evaluator: Callable[[str, Path | None], Evaluate] | None = None,
    progress: bool = True,
    any_curvature: bool = False,
) -> Choice:
    """Choose what a recipe leaves open: on validation data where it names an `eval`, else by forecast."""
    folder = None if isinstance(recipe, Mapping | Recipe) else Path(recipe).parent
    given = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if not given.auto:
        return given, ""
    if given.base_model is None:
        raise RecipeError("a recipe with 'auto' needs the base model that the others were fine-tuned from.")
    if given.eval is not None and evaluator is not None:
        evaluate = evaluator(given.eval, folder)
        return by_sweep(given, evaluate, folder=folder, progress=progress, any_curvature=any_curvature)
    return by_forecast(given, folder, progress=progress, any_curvature=any_curvature)


def by_forecast(given: Recipe, folder: Path | None, *, progress: bool, any_curvature: bool) -> Choice:
    """Choose by what the diagnosis forecasts."""
    wanted = None if "merge_method" in given.auto else [given.merge_method]
    found = diagnose(given, methods=wanted, progress=progress, any_curvature=any_curvature, folder=folder)
    method, scale = choice(found)
    forecast = found.forecast[method]
    scale = scale if "scale" in given.auto else 1.0
    lost = forecast.mean_at_scale if "scale" in given.auto else forecast.mean
    why = f"{method} at scale {scale:g}: the lowest forecast, {lost:.2f} ({found.curvature} curvature)"
    return settled(given, method, scale), why


def by_sweep(given: Recipe, evaluate: Evaluate, *, folder: Path | None, progress: bool, any_curvature: bool) -> Choice:
    """Choose on validation data."""
    methods = None if "merge_method" in given.auto else [given.merge_method]
    scales = None if "scale" in given.auto else [1.0]
    found = sweep_recipe(
        given, evaluate, methods=methods, scales=scales, folder=folder, progress=progress, any_curvature=any_curvature,
        evaluation=given.eval or "",
    )  # fmt: skip
    best = found.best
    shown = f"{100 * best.validation.all.average:.1f} on validation data of {given.eval}"
    return settled(given, best.method, best.scale), f"{best.method} at scale {best.scale:g}: {shown}"


def settled(given: Recipe, method: str, scale: float, rank: int | None = None) -> Recipe:
    """Return the recipe with a method and a scale; parameters that the method does not know are dropped."""
    known = {parameter.name for parameter in describe_method(method).parameters} | {"weight"}
    parameters = {key: value for key, value in given.parameters.items() if key in known}
    if scale != 1.0:
        parameters["scale"] = scale
    if rank is not None:
        parameters["rank"] = rank
    update: dict[str, Any] = {"merge_method": method, "parameters": parameters, "auto": ()}
    if not describe_method(method).needs_curvature:
        update["models"] = tuple(entry.model_copy(update={"curvature": None}) for entry in given.models)
        update["basis"] = None
    return given.model_copy(update=update)


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
) -> Sweep:
    """Sweep the models of a recipe, held in memory."""
    if given.base_model is None:
        raise RecipeError("a sweep scales task vectors, so the recipe needs a base_model.")
    models = tuple(entry.model_copy(update={"parameters": {}}) for entry in given.models)
    neutral = given.model_copy(
        update={
            "merge_method": PROVISIONAL,
            "parameters": {},
            "models": models,
            "basis": None,
            "auto": (),
            "normalize_weights": None,
        }
    )
    plan = make_plan(neutral, folder=folder, progress=progress, any_curvature=any_curvature)
    check_plan(plan)
    base, *tuned = _states(plan, progress)
    weights = given.settings("", 0.0).weights if "weight" in _given(given) else None
    own = {key: value for key, value in given.parameters.items() if key not in ("weight", "scale")}
    with Progress(progress, unit="settings") as bar:
        stage = bar.begin("trying", None)
        return sweep(
            base,
            tuned,
            evaluate,
            methods=methods,
            scales=scales,
            ranks=ranks,
            curvature=plan.curvatures,
            weights=weights,
            rules=[pair for pair in given.rules if any(matching(name, [pair]) for name in base)],  # others are not read
            parameters={} if given.auto else {given.merge_method: own},
            evaluation=evaluation,
            progress=lambda line: stage.advance(1, line),
        )


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
                    state[name] = role.read(name)
                stage.advance(1, name)
    return states
