"""Choose what a recipe leaves open (`merge_method: auto`, `scale: auto`): by forecast or on validation data."""

from __future__ import annotations

from epimer.diagnosis.advice import choice
from epimer.diagnosis.diagnose import diagnose_recipe
from epimer.diagnosis.sweep import sweep_recipe
from epimer.engine.options import RunOptions
from epimer.errors import RecipeError
from epimer.evaluation.judges import Evaluate
from epimer.methods.registry import describe_method
from epimer.plan.merge import OpenedModels
from epimer.recipe.model import Recipe
from epimer.score_format import format_score

Choice = tuple[Recipe, str]
"""a recipe with nothing left open, and why it is so"""


def resolve(recipe: Recipe, opened: OpenedModels, evaluate: Evaluate | None, run: RunOptions) -> Choice:
    """Choose what a recipe leaves open: on validation data where there is an evaluation, else by forecast."""
    if not recipe.auto:
        return recipe, ""
    if recipe.base_model is None:
        raise RecipeError("a recipe with 'auto' needs the base model that the others were fine-tuned from.")
    if evaluate is not None:
        return by_sweep(recipe, opened, evaluate, run)
    return by_forecast(recipe, opened, run)


def by_forecast(recipe: Recipe, opened: OpenedModels, run: RunOptions) -> Choice:
    """Choose by what the diagnosis forecasts."""
    methods = None if "merge_method" in recipe.auto else [recipe.merge_method]
    diagnosis = diagnose_recipe(recipe, opened, methods=methods, run=run)
    if not diagnosis.forecast:
        raise RecipeError("projected curvature is known inside its basis only, so nothing can be forecast; add 'eval'.")
    method, scale = choice(diagnosis, scaled="scale" in recipe.auto)
    forecast, row = diagnosis.forecast[method], describe_method(method)
    under = f" ({diagnosis.curvature} curvature)"
    if "scale" not in recipe.auto:
        return recipe.settled(method), f"{method}: the lowest forecast, {forecast.mean:.2f}{under}"
    if row.absolute_weights:  # forecast for weights that sum to 1
        scale = round(scale / _total_weight(recipe), 4)
    why = f"{method} at scale {scale:g}: the lowest forecast, {forecast.mean_at_scale:.2f}{under}"
    return recipe.settled(method, scale), why


def _total_weight(recipe: Recipe) -> float:
    if "weight" in recipe.varying():
        raise RecipeError("weights differ between tensors, so no scale can be forecast; add 'eval', or give a scale.")
    return sum(recipe.settings("", 0.0).weights or [1.0])


def by_sweep(recipe: Recipe, opened: OpenedModels, evaluate: Evaluate, run: RunOptions) -> Choice:
    """Choose on validation data."""
    free = "scale" in recipe.auto
    found = sweep_recipe(
        recipe,
        opened,
        evaluate,
        methods=None if "merge_method" in recipe.auto else [recipe.merge_method],
        scales=None if free else [1.0],
        keep_scale=not free,
        run=run,
        evaluation=recipe.eval or "",
    )
    best = found.best
    why = f"{format_score(best.validation.unit, best.validation.trusted.average)} on validation data of {recipe.eval}"
    if not free:
        return recipe.settled(best.method), f"{best.method}: {why}"
    return recipe.settled(best.method, best.scale), f"{best.method} at scale {best.scale:g}: {why}"
