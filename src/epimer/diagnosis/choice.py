"""Choose what a recipe leaves open: by validation data, by inputs without labels, or as its diagnosis advises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epimer.curvature.collectors import WIDEST
from epimer.diagnosis.advice import choice
from epimer.diagnosis.diagnose import diagnose_recipe
from epimer.diagnosis.rounds import climb_by_inputs, improve, judge_of_scales, samples_of, scale_inputs
from epimer.diagnosis.suite_merge import applied, refinable
from epimer.diagnosis.sweep import Merges, as_adapters, at_scales, sweep_recipe
from epimer.engine.memory import memory_budget
from epimer.engine.options import RunOptions
from epimer.errors import RecipeError
from epimer.evaluation.judges import Evaluate, evaluator
from epimer.evaluation.suite import State, Suite
from epimer.evaluation.unlabelled import sources_of, suite_of_inputs
from epimer.evaluation.user_code import is_entry_point
from epimer.geometry.linalg import as_compute_dtype
from epimer.methods.registry import default_forecasts, describe_method
from epimer.plan.adapter import plan_adapter
from epimer.plan.inputs import check_weights
from epimer.plan.jobs import Plan
from epimer.plan.merge import OpenedModels, plan_recipe
from epimer.plan.participants import locate
from epimer.progress import Progress
from epimer.recipe.model import Recipe
from epimer.score_format import format_score

Choice = tuple[Recipe, str]
"""a recipe with nothing left open, and why it is so"""


MERGES = 3  # copies of the model in float32 while merges are compared: the base, the merge, and at the chosen scale
INPUTS = "inputs without labels"
"""what an evaluation by the inputs that were kept with curvature is called"""


def judge_of(recipe: Recipe, folder: Path | None, run: RunOptions) -> Evaluate | None:
    """Return what a recipe's `eval` names, where something is to be chosen by it."""
    if not recipe.auto or recipe.eval is None:
        return None
    if is_entry_point(recipe.eval.removeprefix("agreement:")):
        raise RecipeError(
            f"'eval: {recipe.eval}' names Python code, which a recipe may not run; "
            f"use `epimer sweep --eval {recipe.eval}`."
        )
    device = str(run.network_device)
    return evaluator(recipe.eval, folder, count=len(recipe.models), device=device, progress=run.progress)


@dataclass(frozen=True)
class Judging:
    """Memory that is held while merges are compared by kept inputs, as limits are compared with it."""

    memory: int
    name: str = "comparing merges by inputs"


def inputs_of(recipe: Recipe, opened: OpenedModels, folder: Path | None, run: RunOptions) -> tuple[Suite | None, int]:
    """Return the recipe's tasks on the inputs that were kept with their curvature, and the bytes that their use takes.

    There is no suite if there are no inputs. Of the networks as many are kept in memory as the limit has room for; if
    not even one has, that is refused.
    """
    if not opened.curvatures or len(opened.curvatures) != len(recipe.models):
        return None, 0
    models = [locate(entry.model, folder) for entry in recipe.models]
    sources = sources_of(models, opened.participants, opened.curvatures)
    if sources is None:
        return None, 0
    device = run.network_device
    networks = [source.network_bytes if device.type == "cpu" else 0 for source in sources]
    beside = sum(source.held_bytes for source in sources) + max(source.batch_bytes for source in sources)
    beside += MERGES * sum(4 * W.numel() for W in opened.participants.template.headers.values())
    beside += _measured_bytes(recipe, opened)
    limit = None if run.engine == "ray" else run.max_memory  # a cluster's limit is not this machine's
    room = memory_budget(limit, [Judging(max(networks) + beside)]) - beside
    suite = suite_of_inputs(models, opened.participants, opened.curvatures, device=str(device), most=room)
    return suite, beside + min(sum(networks), room)


def _measured_bytes(recipe: Recipe, opened: OpenedModels) -> int:
    """Return the bytes of the Kronecker factors that rounds and refinement hold: at the merge, and before it."""
    if not (recipe.rounds or recipe.refine):
        return 0
    matrices = [W for W in opened.participants.template.headers.values() if W.dim() > 1]
    factors = sum(4 * (len(W) ** 2 + W[0].numel() ** 2) for W in matrices if max(len(W), W[0].numel()) <= WIDEST)
    return len(recipe.models) * factors * (2 if recipe.rounds else 1)


def scaled_in_rounds(recipe: Recipe) -> bool:
    """Whether inputs without labels choose the scale in every round, `improved_plan` that is, and nothing before."""
    return "scale" in recipe.auto and recipe.eval is None and bool(recipe.rounds or recipe.refine)


def choose_and_plan(recipe: Recipe, opened: OpenedModels, folder: Path | None, run: RunOptions) -> Plan:
    """Choose what a recipe leaves open, do its rounds and its refinement, and plan its merge.

    What its `eval` names chooses; without one the inputs that were kept with curvature, without these a diagnosis.

    Args:
        recipe: as it was written.
        opened: what it names.
        folder: where relative paths are looked for too.
        run: where and within which limits.
    """
    again = recipe.rounds or recipe.refine
    inputs, held = None, 0
    if again or (recipe.auto and recipe.eval is None):
        inputs, held = inputs_of(recipe, opened, folder, run)
    if again and inputs is None:
        raise RecipeError(
            "'rounds' and 'refine' need the inputs that curvature was measured on; measure it for every model with "
            "`epimer curvature`, which keeps them, and name the folders under 'curvature'."
        )
    judge = judge_of(recipe, folder, run) or (judge_of_scales(inputs) if inputs else None)
    chosen, why = resolve(recipe, opened, judge, run, held)
    if again and inputs is not None:
        plan = improved_plan(recipe, chosen, opened, inputs, run, held)
    else:
        plan = plan_recipe(chosen, opened)
    plan = plan_adapter(plan)
    if why and inputs is not None:
        uses = {"scale": scale_inputs(inputs), **(plan.inputs or {})}
        plan = replace(plan, unlabelled=samples_of(inputs), inputs=uses, choices=(why, *plan.choices))
    if why:
        plan.notes.append(f"auto took {why}.")
    plan.notes.extend(line for line in plan.choices if line != why)
    return plan


def improved_plan(
    recipe: Recipe, chosen: Recipe, opened: OpenedModels, suite: Suite, run: RunOptions, held: int
) -> Plan:
    """Plan a recipe's merge after its rounds of measuring at the merge and its refinement.

    Args:
        recipe: as it was written; where it leaves the scale open and names no evaluation, every round chooses it.
        chosen: the same with nothing left open.
        opened: what it names.
        suite: its tasks on inputs without labels.
        run: where and within which limits.
        held: the bytes that using these inputs takes.
    """
    row, free = describe_method(chosen.merge_method), scaled_in_rounds(recipe)
    merges = Merges(opened.participants, chosen.rules, run, max(held, plan_recipe(chosen, opened).memory))
    opened = replace(opened, participants=merges.participants)
    template, given = merges.participants.template, opened.curvatures
    base = {name: as_compute_dtype(template.read(name)) for name in template.headers}

    def plan(curvatures: Any, scale: float, **more: Any) -> Plan:
        settled = chosen.settled(row.name, scale) if free else chosen
        planned = plan_recipe(settled.model_copy(update=more), replace(opened, curvatures=curvatures))
        planned.check()
        return planned

    def merge_with(curvatures: Any) -> Callable[[float], State]:
        def at(scale: float) -> State:
            return merges.merge(plan(curvatures, scale, dtype=None, out_dtype="float32"))

        return at_scales(row, base, at) if free else at

    measurable = row.curvature == "kronecker"
    with Progress(run.progress, unit="steps") as bar:
        stage = bar.begin("improving by inputs", 1 + recipe.rounds + recipe.refine)
        improved = improve(
            suite,
            merge_with,
            given,
            check_weights(chosen.weights("", 0.0), len(chosen.models), "a refinement") if recipe.refine else [],
            scale=None if free else 1.0,
            rounds=recipe.rounds if measurable else 0,
            steps=recipe.refine,
            refinable=refinable(plan(given, 1.0)),
            progress=lambda line: stage.advance(1, line),
        )
    if recipe.rounds and not measurable:
        improved.notes.insert(0, f"rounds were left out: {row.name} does not use kronecker curvature.")
    if improved.curvatures is not given:
        for measured, first in zip(improved.curvatures, given or (), strict=True):
            measured.file = first.file  # what the merge depends on, so that another measurement is another merge
    fields = applied(improved, samples_of(suite)) | {"timings": {"measure": improved.measuring}}
    return replace(plan(improved.curvatures, improved.scale), **fields)


def resolve(recipe: Recipe, opened: OpenedModels, evaluate: Evaluate | None, run: RunOptions, held: int = 0) -> Choice:
    """Choose what a recipe leaves open: by an evaluation where there is one, else by a diagnosis."""
    if not recipe.auto:
        return recipe, ""
    if recipe.base_model is None:
        raise RecipeError("a recipe with 'auto' needs the base model that the others were fine-tuned from.")
    if scaled_in_rounds(recipe) and "merge_method" not in recipe.auto:
        return recipe.settled(recipe.merge_method), ""
    if evaluate is not None:
        return by_sweep(recipe, opened, evaluate, run, held)
    return by_diagnosis(recipe, opened, run)


def by_diagnosis(recipe: Recipe, opened: OpenedModels, run: RunOptions) -> Choice:
    """Choose what the diagnosis advises."""
    required = "merge_method" not in recipe.auto
    names = [recipe.merge_method] if required else default_forecasts(opened.kind or "task-gram")
    rows, _ = as_adapters(recipe, opened, [describe_method(name) for name in names], None, required=required)
    diagnosis = diagnose_recipe(recipe, opened, methods=[row.name for row in rows], run=run)
    if not diagnosis.forecast:
        raise RecipeError("projected curvature is known inside its basis only, so nothing can be forecast; add 'eval'.")
    free = "scale" in recipe.auto
    method, scale, why = choice(diagnosis, scaled=free)
    why = f"{why} ({diagnosis.curvature} curvature)"
    if not free:
        return recipe.settled(method), f"{method}: {why}"
    if describe_method(method).absolute_weights:  # forecast for weights that sum to 1
        scale = round(scale / _total_weight(recipe), 4)
    return recipe.settled(method, scale), f"{method} at scale {scale:g}: {why}"


def _total_weight(recipe: Recipe) -> float:
    if "weight" in recipe.varying():
        raise RecipeError("weights differ between tensors, so no scale can be forecast; add 'eval', or give a scale.")
    return sum(recipe.settings("", 0.0).weights or [1.0])


def by_sweep(recipe: Recipe, opened: OpenedModels, evaluate: Evaluate, run: RunOptions, held: int = 0) -> Choice:
    """Choose on validation data."""
    free = "scale" in recipe.auto
    sweep = sweep_recipe(
        recipe,
        opened,
        evaluate,
        methods=None if "merge_method" in recipe.auto else [recipe.merge_method],
        scales=None if free else [1.0],
        keep_scale=not free,
        run=run,
        evaluation=recipe.eval or INPUTS,
        held=held,
        search=climb_by_inputs if recipe.eval is None else None,
        reported="val",
    )
    best = sweep.best
    why = f"{format_score(best.validation.unit, best.validation.trusted.average)} on validation data of {recipe.eval}"
    if recipe.eval is None:
        why = f"divergence {1 - best.validation.order:.3f} from the models on their {INPUTS}"
    if not free or scaled_in_rounds(recipe):
        return recipe.settled(best.method), f"{best.method}: {why}"
    return recipe.settled(best.method, best.scale), f"{best.method} at scale {best.scale:g}: {why}"
