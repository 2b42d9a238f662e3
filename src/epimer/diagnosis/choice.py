"""Diagnose and sweep the models of a recipe, and choose by that what it leaves open (`auto`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from epimer.diagnosis.advice import choice
from epimer.diagnosis.diagnose import diagnose_models, forecasts
from epimer.diagnosis.sweep import Merges, Sweep, check_methods, sweep_plans
from epimer.engine.options import RunOptions
from epimer.errors import ParameterError, RecipeError
from epimer.evaluation.judges import Evaluate
from epimer.geometry.linalg import as_compute_dtype
from epimer.geometry.subspace import Basis, Tagged, atoms_of
from epimer.methods.registry import Method, default_forecasts, describe_method
from epimer.plan.inputs import assign_rules, check_weights
from epimer.plan.jobs import Plan
from epimer.plan.merge import OpenedModels, plan_recipe
from epimer.plan.participants import public_recipe
from epimer.progress import Progress
from epimer.recipe.model import AUTO, Recipe, known_parameters
from epimer.records import Diagnosis
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
        return settled(recipe, method), f"{method}: the lowest forecast, {forecast.mean:.2f}{under}"
    if row.absolute_weights:  # forecast for weights that sum to 1
        scale = round(scale / _total_weight(recipe), 4)
    why = f"{method} at scale {scale:g}: the lowest forecast, {forecast.mean_at_scale:.2f}{under}"
    return settled(recipe, method, scale), why


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
    why = f"{format_score(best.validation.unit, best.validation.all.average)} on validation data of {recipe.eval}"
    if not free:
        return settled(recipe, best.method), f"{best.method}: {why}"
    return settled(recipe, best.method, best.scale), f"{best.method} at scale {best.scale:g}: {why}"


def settled(recipe: Recipe, method: str, scale: float | None = None, rank: int | None = None) -> Recipe:
    """Return the recipe with a method, and a scale and a rank where they are given: exactly what a sweep merges.

    The recipe's parameters are for its own method, or for whichever is chosen where it leaves that open; weights are
    for all.
    """
    row = describe_method(method)
    own = "merge_method" in recipe.auto or method == recipe.merge_method
    known = {*(row.defaults if own else ()), "weight"}
    parameters = {key: value for key, value in recipe.parameters.items() if key in known}
    if not own and scale is None and "scale" in recipe.parameters:
        parameters["scale"] = recipe.parameters["scale"]
    if scale is not None:
        parameters.pop("scale", None)
        parameters |= {} if scale == 1.0 else {"scale": scale}
    if rank is not None:
        parameters["rank"] = rank
    models = []
    for entry in recipe.models:
        kept: dict[str, Any] = {"parameters": {k: v for k, v in entry.parameters.items() if k in known}}
        models.append(entry.model_copy(update=kept if row.needs_curvature else {**kept, "curvature": None}))
    return recipe.model_copy(
        update={
            "merge_method": method,
            "parameters": parameters,
            "models": tuple(models),
            "auto": (),
            "eval": None,
            "basis": recipe.basis if row.needs_curvature else None,
            "normalize_weights": recipe.normalize_weights if own else None,
        }
    )


def diagnose_recipe(
    recipe: Recipe,
    opened: OpenedModels,
    *,
    rank: int | None = None,
    methods: Sequence[str] | None = None,
    damping: float = 1e-2,
    run: RunOptions,
) -> Diagnosis:
    """Diagnose opened models as a recipe has them; see `epimer.diagnose`."""
    if opened.problems:
        raise opened.problems[0]
    participants, tasks = opened.participants, len(recipe.models)

    def weights(name: str, depth: float) -> list[float]:
        return check_weights(recipe.settings(name, depth).weights, tasks, "a diagnosis")

    def wanted(kind: str) -> dict[str, dict[str, Any]]:
        chosen: dict[str, dict[str, Any]] = {
            name: {} for name in (_usual_forecasts(recipe, kind) if methods is None else methods)
        }
        if recipe.merge_method in chosen and not recipe.auto:
            plain = {key: value for key, value in recipe.parameters.items() if not isinstance(value, tuple)}
            chosen[recipe.merge_method] = {k: v for k, v in plain.items() if k not in ("weight", "scale", "rank")}
        return chosen

    bases = None if opened.basis is None else _Atoms(opened.basis)
    return diagnose_models(
        participants,
        weights,
        curvatures=opened.curvatures,
        kind="task-gram" if opened.kind is None else opened.kind,
        bases=bases,
        rules=recipe.rules,
        rank=_rank(recipe, rank),
        damping=damping,
        methods=wanted,
        names=_names(recipe),
        base=Path(recipe.base_model or "base").name,
        recipe=public_recipe(recipe, participants, opened.tokenizer),
        run=run,
    )


class _Atoms(Mapping[str, Tagged]):
    """The tagged atoms of stored bases, read when they are asked for; a tensor basis holds those it was built from."""

    def __init__(self, bases: Mapping[str, Basis]) -> None:
        self.bases = bases

    def __getitem__(self, name: str) -> Tagged:
        return atoms_of(self.bases[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.bases)

    def __len__(self) -> int:
        return len(self.bases)


def _usual_forecasts(recipe: Recipe, kind: str) -> list[str]:
    """Return the methods to forecast for a recipe: the usual ones, and its own where that can be done."""
    usual = default_forecasts(kind)
    if recipe.merge_method == AUTO:
        return usual
    try:
        forecasts([recipe.merge_method], kind)
    except ParameterError:
        return usual
    return list(dict.fromkeys([*usual, recipe.merge_method]))


def _rank(recipe: Recipe, asked: int | None) -> int | None:
    """Return the rank to diagnose at: what was asked for, the recipe's, or 32."""
    if asked is not None:
        return int(known_parameters(AUTO)["rank"].check("a diagnosis", asked))
    known, rank = known_parameters(recipe.merge_method), recipe.parameters.get("rank")
    return 32 if rank is None or "rank" not in known else known["rank"].check(recipe.merge_method, rank)


def _names(recipe: Recipe) -> list[str]:
    """Return what to call the models: the last part of where they are, numbered where that is not enough."""
    short = [Path(entry.model).name or entry.model for entry in recipe.models]
    return [name if short.count(name) == 1 else f"{name} ({t})" for t, name in enumerate(short)]


def sweep_recipe(
    recipe: Recipe,
    opened: OpenedModels,
    evaluate: Evaluate,
    *,
    methods: Sequence[str] | None = None,
    scales: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    keep_scale: bool = False,
    evaluation: str = "",
    run: RunOptions,
) -> Sweep:
    """Sweep opened models: every setting is merged as `settled` would have it, into memory.

    `keep_scale` leaves the recipe's own scale in place, and scales multiply it.
    """
    if opened.problems:
        raise opened.problems[0]
    if opened.participants.base is None:
        raise RecipeError("a sweep scales task vectors, so the recipe needs a base_model.")
    assigned = assign_rules(opened.participants, recipe.rules).checked()
    rows = check_methods(methods, opened.kind)
    merges = Merges(opened.participants, recipe.rules, run)
    opened = replace(opened, participants=merges.participants)
    base = merges.participants.base
    assert base is not None

    def plan(row: Method, rank: int | None, scale: float) -> Plan:
        chosen = settled(recipe, row.name, None if keep_scale else scale, rank)
        planned = plan_recipe(chosen.model_copy(update={"dtype": None, "out_dtype": "float32"}), opened)
        planned.check()
        return planned

    def shown_rank(row: Method, rank: int | None) -> int | None:
        shown = rank if rank is not None else settled(recipe, row.name).parameters.get("rank")
        return shown if isinstance(shown, int) else None

    names = [name for name, rule in assigned.rules.items() if rule != "skip"]
    tensors = {name: base.read(name) for name in names}
    with Progress(run.progress, unit="settings") as bar:
        stage = bar.begin("trying", None)
        return sweep_plans(
            merges,
            rows,
            plan,
            {name: as_compute_dtype(W) if W.is_floating_point() else W for name, W in tensors.items()},
            evaluate,
            ranks=ranks,
            scales=scales,
            shown_rank=shown_rank,
            evaluation=evaluation,
            progress=lambda line: stage.advance(1, line),
        )
