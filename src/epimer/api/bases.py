"""Build the bases that curvature is projected on before the merge that uses them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from epimer.atomic_files import check_new, output_path
from epimer.checkpoints.memory import Model
from epimer.curvature.basis import HEADER, StoredBasis, save_basis
from epimer.engine.basis import KINDS, build_bases
from epimer.engine.options import RunOptions
from epimer.errors import ParameterError, TensorError, short
from epimer.geometry.subspace import Subspace
from epimer.plan.inputs import check_shared_options
from epimer.plan.merge import open_models
from epimer.plan.participants import state_dict_participants
from epimer.progress import Progress
from epimer.recipe.load import RecipeLike, open_recipe
from epimer.recipe.model import Recipe, known_parameters


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
    options = check_shared_options("build_basis", rank=rank, rules=rules)
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
    device: str = "auto",
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
        device: cpu, cuda, cuda:N, or auto for every GPU there is, else the CPU.
        progress: show a bar on a terminal.
        workers: matrices worked on at the same time; by default one per core.
        max_memory: most memory to use, as "3GB"; by default four fifths of what is free.
    """
    out = output_path(out)
    check_new(out, HEADER, overwrite=overwrite)
    loaded, folder = open_recipe(recipe)
    chosen, size = basis_settings(loaded, kind, rank)
    participants = open_models(loaded, folder=folder, progress=progress, measured=False).participants
    with Progress(progress) as bar, torch.no_grad():
        run = RunOptions(device, workers, max_memory=max_memory)
        bases = build_bases(
            participants, loaded.rules, rank=size, kind=chosen, weights=loaded.weights, run=run, progress=bar
        )
        about = {"rank": size, "models": [one.checkpoint.fingerprint for one in participants.all]}
        save_basis(bases, out, about=about, overwrite=overwrite)
    return StoredBasis(out)


def basis_settings(recipe: Recipe, kind: str | None = None, rank: int | None = None) -> tuple[str, Any]:
    """Return the kind and the rank of the basis that a recipe's merge will use, or those that are asked for."""
    known = known_parameters(recipe.merge_method)
    if kind is None and "basis" not in known:
        raise ParameterError(
            f"{recipe.merge_method} is not merged in a basis; take epimer_kron, or `epimer basis --kind`."
        )
    chosen = kind or str(recipe.parameters.get("basis", known["basis"].default))
    if chosen not in KINDS:
        remedy = "set 'basis' under 'parameters', or give `epimer basis` its --kind"
        raise ParameterError(f"a basis is one of {', '.join(KINDS)}, got {chosen!r}; {remedy}.")
    if recipe.slices:
        raise ParameterError("a basis belongs to whole models, not to slices; list 'models'.")
    if recipe.base_model is None:
        raise ParameterError("a basis is made of task vectors, so the recipe needs a base_model.")
    if rank is not None and rank < 1:
        raise ParameterError(f"--rank must be at least 1, got {rank}.")
    return chosen, rank or recipe.parameters.get("rank", known["rank"].default if "rank" in known else 32)
