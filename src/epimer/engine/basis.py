"""Make the basis of a recipe's models before any curvature is measured, so that only what lies in it need be kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.writer import check_new
from epimer.curvature.basis import HEADER, StoredBasis, save_basis
from epimer.engine.merge import check_plan
from epimer.errors import ParameterError
from epimer.geometry.subspace import Basis, clamp_rank, tagged, tensor_product
from epimer.methods.frechet import FrechetOptions
from epimer.methods.inputs import check_finite, matrix_shape, task_vectors
from epimer.methods.registry import describe_method
from epimer.plan.jobs import Job, Plan, make_plan
from epimer.progress import Progress
from epimer.recipe.model import Recipe, open_recipe

KINDS = ("tagged", "tensor")


def make_basis(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> StoredBasis:
    """Build the basis that a recipe's merge will use, and write it to a folder.

    Args:
        recipe: a YAML file, or its content as a mapping; its curvature need not exist yet.
        out: the folder to make.
        kind: tagged or tensor; by default what the recipe's method takes.
        rank: directions per task; by default what the recipe says.
        overwrite: replace a basis folder.
        progress: show a bar on a terminal.
    """
    out = Path(os.path.abspath(Path(out).expanduser()))
    check_new(out, HEADER, overwrite=overwrite)
    given, folder = open_recipe(recipe)
    chosen = kind or _kind(given)
    if chosen not in KINDS:
        raise ParameterError(f"a basis is one of {', '.join(KINDS)}, got {chosen!r}; say which with --kind.")
    if given.base_model is None:
        raise ParameterError("a basis is made of task vectors, so the recipe needs a base_model.")
    if rank is not None and rank < 1:
        raise ParameterError(f"--rank must be at least 1, got {rank}.")
    plan = make_plan(_without_curvature(given, rank), folder=folder, progress=progress)
    check_plan(plan)
    jobs = [job for job in plan.jobs if job.rule == "matrix" and job.name not in plan.ties]
    with Progress(progress) as bar, torch.no_grad():
        stage = bar.begin("building", sum(job.reads for job in jobs))

        def built() -> Iterator[tuple[str, Basis]]:
            for job in jobs:
                basis = _basis(plan, job, chosen)
                if basis is not None:
                    yield job.name, basis
                stage.advance(job.reads, job.name)

        about = {"rank": plan.recipe.parameters["rank"], "models": [role.checkpoint.fingerprint for role in plan.roles]}
        save_basis(built(), out, about=about, overwrite=overwrite)
    return StoredBasis(out)


def _kind(recipe: Recipe) -> str:
    """Return the kind of basis a recipe's method is merged in."""
    defaults = describe_method(recipe.merge_method).defaults
    if "basis" not in defaults:
        raise ParameterError(f"{recipe.merge_method} is not merged in a basis; take epimer_kron, or say --kind.")
    return str(recipe.parameters.get("basis", defaults["basis"]))


def _without_curvature(recipe: Recipe, rank: int | None) -> Recipe:
    """Return a recipe of the same models that needs no curvature: what it merges is not of interest."""
    defaults = describe_method(recipe.merge_method).defaults
    plain = recipe.plain({"rank": rank or recipe.parameters.get("rank", defaults.get("rank", 32))}, basis=None)
    models = tuple(entry.model_copy(update={"curvature": None}) for entry in plain.models)
    return plain.model_copy(update={"models": models})


def _basis(plan: Plan, job: Job, kind: str) -> Basis | None:
    assert plan.base is not None
    assert job.setting is not None
    assert isinstance(job.setting.p, FrechetOptions)
    rank = clamp_rank(matrix_shape(job.template), len(plan.models), job.setting.p.rank)
    if not rank:
        return None
    base, *models = read_all(plan, job)
    atoms = tagged(task_vectors(base, models, matrix=True), rank)
    return atoms if kind == "tagged" else tensor_product(atoms)


def read_all(plan: Plan, job: Job) -> list[Tensor]:
    """Read one tensor of the base and of every model, in the precision it is computed in."""
    tensors = []
    for role in plan.roles:
        tensors.append(role.read(job.name).to(job.precision))
        check_finite(role.label, job.name, tensors[-1])
    return tensors
