"""Merge and sweep recipes with what suites know: `epimer.merge` and `epimer.sweep`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epimer.diagnosis import choice as auto
from epimer.diagnosis.sweep import Sweep
from epimer.engine import merge as engine
from epimer.errors import RecipeError
from epimer.evaluation.judges import Evaluate
from epimer.plan.jobs import make_plan
from epimer.recipe.model import PROVISIONAL, Recipe, open_recipe
from epimer.records import MergeRecord


def sweep(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    evaluation: str,
    *,
    methods: list[str] | None = None,
    scales: list[float] | None = None,
    ranks: list[int] | None = None,
    keep_best: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    any_curvature: bool = False,
    progress: bool = True,
) -> Sweep:
    """Try many settings on the models of a recipe; write the best merge where asked to.

    Args:
        recipe: a YAML file, or its content as a mapping.
        evaluation: see `evaluator`.
        methods: by name; None takes average, tsv, iso_c, epimer_free and those that use the recipe's curvature.
        scales: all are tried; None climbs from 1.
        ranks: directions per task.
        keep_best: the folder to write the winner to.
        overwrite: replace a model folder that epimer made before.
        any_curvature: use curvature even where it was measured on another model.
        progress: show bars on a terminal.
    """
    from epimer.evaluation.judges import evaluator

    given, folder = open_recipe(recipe)

    if keep_best is not None:  # before any work, with the plan of any method
        plan = make_plan(auto.settled(given, PROVISIONAL), folder=folder, progress=progress)
        options = engine.Options(overwrite=overwrite, progress=progress)
        engine.check_output(Path(keep_best).expanduser().absolute(), plan, options)
    judge = evaluator(evaluation, folder, count=len(given.models), progress=progress)
    found = auto.sweep_recipe(
        given, judge, methods=methods, scales=scales, ranks=ranks, folder=folder, progress=progress,
        any_curvature=any_curvature, evaluation=evaluation,
    )  # fmt: skip
    if keep_best is not None:
        best = auto.settled(given, found.best.method, found.best.scale, found.best.rank)
        plan = make_plan(best, folder=folder, progress=progress, any_curvature=any_curvature)
        engine.run(plan, Path(keep_best), engine.Options(overwrite=overwrite, progress=progress))
    return found


def merge(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe, out: str | os.PathLike[str], **options: Any
) -> MergeRecord:
    """Merge the checkpoints that a recipe names into a new model folder; `auto` is chosen first. See `engine.merge`."""
    progress, any_curvature = bool(options.get("progress", True)), bool(options.get("any_curvature", False))
    given, folder = open_recipe(recipe, options.pop("folder", None))
    chosen, _ = resolve(given, folder, progress=progress, any_curvature=any_curvature)
    return engine.merge(chosen, out, folder=folder, **options)


def resolve(
    given: Recipe, folder: Path | None, *, progress: bool = True, any_curvature: bool = False
) -> tuple[Recipe, str]:
    """Return a recipe with nothing left open, and why it is so where something was."""

    def judge(text: str, folder: Path | None) -> Evaluate:
        from epimer.evaluation.judges import evaluator
        from epimer.evaluation.user_code import is_entry_point

        if is_entry_point(text.removeprefix("agreement:")):
            raise RecipeError(
                f"'eval: {text}' names Python code, which a recipe may not run; use `epimer sweep --eval {text}`."
            )
        return evaluator(text, folder, count=len(given.models), progress=progress)

    return auto.resolve(given, evaluator=judge, folder=folder, progress=progress, any_curvature=any_curvature)
