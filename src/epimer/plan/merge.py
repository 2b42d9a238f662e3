"""From a recipe, or from state dicts in Python, to a plan; models are opened once and planned many times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from epimer.checkpoints.sidecar_files import vocabulary
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.errors import EpimerError, ParameterError, RecipeError, TensorError
from epimer.methods.registry import Method, describe_method
from epimer.plan.ancestry import ancestry_notes
from epimer.plan.cards import agreed_card
from epimer.plan.compatibility import compare_folders
from epimer.plan.curvature_inputs import (
    basis_problems,
    check_measured_models,
    follow_tokens,
    kind_problems,
    open_measured,
    python_curvatures,
)
from epimer.plan.inputs import check_options, check_weights
from epimer.plan.jobs import Plan, SettingsOf, plan_jobs
from epimer.plan.participants import Participants, equal_models, open_participants, tied_updates
from epimer.plan.settings_source import chat_template_files, settings_source
from epimer.recipe.model import Recipe


@dataclass(frozen=True)
class OpenedModels:
    """Everything that a recipe names, opened and compared once: a sweep plans many merges of it."""

    participants: Participants
    tokenizer: Path | None
    generation: Path | None
    """the folder whose settings for generating the output gets"""
    curvatures: list[Curvature] | None
    basis: StoredBasis | None
    problems: Sequence[EpimerError]
    """why curvature or basis cannot be used"""
    notes: Sequence[str]
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """files of the output's tokenizer that no folder has"""

    @property
    def kind(self) -> str | None:
        """The kind of curvature there is, if any."""
        return self.curvatures[0].kind if self.curvatures else None

    @cached_property
    def ancestry_notes(self) -> list[str]:
        """Warnings about models that were probably not fine-tuned from the base."""
        return ancestry_notes(self.participants)


def open_models(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    progress: bool = False,
    any_curvature: bool = False,
    measured: bool = True,
    download: bool = True,
) -> OpenedModels:
    """Open the models that a recipe names, with curvature and basis if `measured`, and check that they fit together.

    Relative paths that do not exist here are looked for in `folder`. With `any_curvature`, curvature that was measured
    on another model is used, and noted. Without `download` weights that are on the hub stay there, and are read there.
    """
    missing: list[EpimerError] = []
    notes: list[str] = []
    participants, tokenizer, words = open_participants(
        recipe, folder, missing, notes, progress=progress, download=download
    )
    curvatures, basis = open_measured(recipe, folder, missing) if measured else (None, None)
    if missing or participants is None:
        text = "; also ".join(str(problem).rstrip(".") for problem in missing)
        raise EpimerError(text if text.endswith("?") else f"{text}.")
    problems: list[EpimerError] = []
    notes += [*equal_models(participants), *tied_updates(participants), *agreed_card(participants)[1]]
    own = tokenizer
    tokenizer, generation = settings_source(participants, recipe.tokenizer_source, tokenizer, notes)
    files = words.files if words.files and (tokenizer is None or vocabulary(tokenizer) != words.tokens) else {}
    tokenizer = own if files else tokenizer
    files = chat_template_files(recipe.chat_template, participants, tokenizer, files)
    compare_folders(participants, tokenizer, recipe.rules, problems, notes, aligned=bool(words.tokens))
    check_measured_models(participants.models, curvatures or [], problems, notes, any_curvature=any_curvature)
    problems += kind_problems(curvatures or [], basis)
    problems += [] if basis is None else basis_problems(basis, recipe, participants)
    curvatures = follow_tokens(participants.models, curvatures)
    return OpenedModels(participants, tokenizer, generation, curvatures, basis, problems, notes, files)


def plan_recipe(recipe: Recipe, opened: OpenedModels) -> Plan:
    """Plan the merge of opened models as a recipe says; problems are collected, not raised."""
    check_settled(recipe)
    recipe, method = _tensorwise(recipe, describe_method(recipe.merge_method))
    participants = opened.participants
    # mergekit's `normalize: false` sums the models themselves, so there is nothing to take differences from.
    if method.ignores_base or (method.sums_models and recipe.normalize_weights is False):
        participants = participants.without_base()
    if participants.base is not None and not recipe.slices:  # layers of slices may come from other places of the base
        recipe = recipe.model_copy(update={"notes": (*recipe.notes, *opened.ancestry_notes)})
    projected = method.needs_curvature and "basis" in method.defaults
    basis = opened.basis if recipe.basis is not None or projected else None
    if basis is not None and recipe.basis is None:  # the curvature named it
        recipe = recipe.model_copy(update={"basis": basis.where})
    curvatures = opened.curvatures if any(entry.curvature for entry in recipe.models) else None
    plan = plan_jobs(
        participants,
        method,
        _recipe_settings(recipe, method, participants, basis),
        recipe.rules,
        curvatures,
        problems=[*opened.problems, *_recipe_problems(recipe, method)],
        notes=[*opened.notes, *recipe.notes],
        recipe=recipe,
    )
    return replace(
        plan,
        basis=basis,
        tokenizer=opened.tokenizer,
        generation=opened.generation,
        tokenizer_files=opened.tokenizer_files,
    )


def _tensorwise(recipe: Recipe, method: Method) -> tuple[Recipe, Method]:
    """Take mergekit's form of a method, noted, where a parameter differs between tensors that otherwise cannot."""
    differs = recipe.varying() & method.whole_model
    if method.mergekit is None or not differs:
        return recipe, method
    why = f"{sorted(differs)[0]} differs between tensors, which {method.name} as published cannot have"
    note = f"{why}: merged as under `compat: mergekit`, {method.mergekit.summary}."
    kept = [one for one in recipe.notes if method.mergekit.summary not in one]
    changes = {"merge_method": method.mergekit.name, "notes": (*kept, note)}
    return recipe.model_copy(update=changes), method.mergekit


def plan_state_dicts(
    participants: Participants, method: Method, options: Any, weights: Sequence[float] | None, curvature: Any
) -> Plan:
    """Plan a merge in memory with the same options and weights for every tensor; the first problem is raised."""
    tasks = len(participants.models)
    if participants.base is None and method.needs_base:
        raise TensorError(f"{method.name} needs the base model that the others were fine-tuned from; pass base.")
    if method.ignores_base and participants.base is not None:
        participants = participants.without_base()
    check_options(options, method, tasks, based=participants.base is not None)
    settings = options, check_weights(weights, tasks, method.name, absolute=method.weights_as_given(options))
    method.check_models(settings[1])
    curvatures = python_curvatures(curvature, participants.models, method)
    plan = plan_jobs(participants, method, lambda name, depth: settings, options.rules, curvatures)
    if plan.problems:
        raise plan.problems[0]
    return plan


def check_settled(recipe: Recipe) -> None:
    """Refuse a recipe whose method or scale is still to be chosen."""
    if recipe.auto:
        raise RecipeError(
            f"the recipe leaves {' and '.join(recipe.auto)} open; `epimer merge` or epimer.merge choose it."
        )


def _recipe_problems(recipe: Recipe, method: Method) -> Iterator[RecipeError]:
    if constant := recipe.varying() & method.whole_model:
        yield RecipeError(
            f"{method.name} looks at the whole model to use {sorted(constant)[0]!r}, so its value cannot "
            "differ between tensors; give one number."
        )
    if method.needs_function:
        yield RecipeError(f"{method.name} takes a Python function: use merge_state_dicts instead of a recipe.")


def _recipe_settings(
    recipe: Recipe, method: Method, participants: Participants, basis: Mapping[str, Any] | None
) -> SettingsOf:
    """Return a tensor's options and weights as a recipe has them; equal ones are resolved once."""
    resolved: dict[str, tuple[Any, list[float]]] = {}
    tasks = len(participants.models)

    def settings(name: str, depth: float) -> tuple[Any, list[float]]:
        values = recipe.settings(name, depth)
        key = json.dumps([values.parameters, values.weights], sort_keys=True)
        if key not in resolved:
            fixed: dict[str, Any] = {"rules": list(recipe.rules)} | ({} if basis is None else {"basis": basis})
            if method.normalizes and recipe.normalize_weights is not None:
                fixed["normalize"] = recipe.normalize_weights
            options = method.resolve(values.parameters | fixed)
            check_options(options, method, tasks, based=participants.base is not None)
            weights = recipe_weights(recipe, values.weights, tasks, method, options)
            method.check_models(weights)
            resolved[key] = options, weights
        return resolved[key]

    return settings


def recipe_weights(recipe: Recipe, values: list[float] | None, tasks: int, method: Method, options: Any) -> list[float]:
    """Return the weights: scaled to sum 1 or unchanged, as the method or mergekit's `normalize` says."""
    weights = check_weights(values, tasks, method.name, absolute=method.weights_as_given(options))
    if method.normalizes or recipe.normalize_weights is None:
        return weights
    if recipe.normalize_weights is not method.absolute_weights:
        return weights
    if method.absolute_weights:
        if not sum(weights):
            raise ParameterError(f"weights {weights} sum to 0 and cannot be normalised; remove normalize.")
        return [w / sum(weights) for w in weights]
    if not method.sums_models:
        raise ParameterError(
            f"{method.name} takes a mean, so `normalize: false` means nothing to it; remove it, or set scale."
        )
    return [1.0] * tasks if values is None else [float(w) for w in values]
