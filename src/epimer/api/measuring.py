"""Measure curvature for a merge: whole where that fits, else in the basis of the models that its recipe names."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from epimer.api.bases import basis_settings, make_basis
from epimer.atomic_files import draft_path, explain_os_errors, held, remove_folder
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.vocabulary import Aligned
from epimer.curvature.basis import HEADER, StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.curvature.distributed import on_first_rank, process_group
from epimer.curvature.kinds import KINDS
from epimer.curvature.measure import Request, check_request, measure, warn_of_few
from epimer.engine.curvature_shards import measure_on_cluster
from epimer.engine.options import RunOptions
from epimer.errors import CurvatureError, EpimerWarning, ParameterError, TooLargeError, listed, warn
from epimer.plan.curvature_inputs import basis_misfits
from epimer.plan.merge import open_models
from epimer.plan.participants import Participants, locate
from epimer.recipe.load import open_recipe
from epimer.recipe.model import Recipe


def measure_curvature(request: Request, run: RunOptions, shards: int | None = None) -> Curvature | None:
    """Measure and save curvature; return it, or None on every rank of torch.distributed but the first.

    With a recipe it is measured in the basis of the recipe's models where that is there already, as a merge takes all
    models alike; else whole or, where that would fit neither in memory nor on disk, in the basis, which is then built.
    """

    def measured(request: Request) -> Curvature | None:
        curvature = measure(request) if run.engine == "local" else measure_on_cluster(request, run, shards)
        if curvature is not None:
            warn_of_few(request, curvature)
        return curvature

    if request.recipe is None:
        return measured(request)
    check_request(request)
    with process_group():
        basis, kind = open_recipe_basis(request, request.recipe), KINDS[request.kind or "kronecker"]
        why = "the recipe's basis is there"
        if not kind.bases or not on_first_rank(basis.exists):
            why = f"--kind {request.kind} is measured in a basis only"
            if kind.collector is not None:
                try:
                    return measured(request)
                except TooLargeError as error:
                    why = error.problem
            if not kind.bases:
                raise CurvatureError(f"{why}. --kind {request.kind} has no form in a basis; take kronecker.")
            gc.collect()  # the refused measurement's model, so that it is not there twice
            on_first_rank(basis.build)
        told = f"curvature is measured in {basis.place}, the basis of the models of {request.recipe}"
        warn(EpimerWarning(f"{why}: {told}, and their merge finds it."))
        return measured(replace(request, recipe=None, basis=basis.place))


@dataclass(frozen=True)
class RecipeBasis:
    """The basis of a recipe's models: where it lies or will lie, and what it must be of."""

    file: Path
    recipe: Recipe
    participants: Participants
    place: Path
    progress: bool

    def exists(self) -> bool:
        """Whether a basis of these models lies at its place, and their merge takes one."""
        with suppress(ParameterError):
            return (self.place / HEADER).is_file() and self._misfit(StoredBasis(self.place)) is None
        return False

    def build(self) -> None:
        """Build the basis, unless it is there when another process that builds it has ended."""
        lock = draft_path(self.place)
        with explain_os_errors(self.place, "written"):
            self.place.parent.mkdir(parents=True, exist_ok=True)
            with held(lock, self.place, folder=True, wait=True):
                try:
                    self._build()
                finally:
                    remove_folder(lock)

    def _build(self) -> None:
        if not (self.place / HEADER).is_file():
            make_basis(self.file, self.place, progress=self.progress)
        elif misfit := self._misfit(StoredBasis(self.place)):
            remedy = "remove it, or name another folder under 'basis', and measure all models of the recipe"
            raise CurvatureError(f"{misfit}; {remedy}.")

    def _misfit(self, basis: StoredBasis) -> str | None:
        """Tell what a basis is not as the recipe says; where the recipe does not name it, also by its defaults."""
        misfit = next(basis_misfits(basis, self.recipe, self.participants), None)
        if misfit is None and self.recipe.basis is None:
            kind, rank = basis_settings(self.recipe)
            if (basis.kind, basis.rank) != (kind, rank):
                misfit = f"{basis.where} is {basis.kind} of rank {basis.rank}, the recipe means {kind} of rank {rank}"
        return misfit


def open_recipe_basis(request: Request, file: Path) -> RecipeBasis:
    """Open the models of a recipe, of which the one to be measured must be one; no weights are downloaded."""
    recipe, folder = open_recipe(file)
    participants = open_models(recipe, folder=folder, measured=False, download=False).participants
    models = [one.checkpoint for one in participants.models]
    known = {(one.source if isinstance(one, Aligned) else one).fingerprint for one in models}
    if open_checkpoint(request.model, download=False).fingerprint not in known:
        named = listed(entry.model for entry in recipe.models)
        problem = f"{request.model} is none of the models that {file} merges ({named})"
        raise ParameterError(f"{problem}; give the recipe of a merge of this model, or leave --recipe out.")
    if recipe.basis is None:
        place = file.with_suffix(".basis")
    else:
        named = os.path.expanduser(locate(recipe.basis, folder))
        place = Path(named) if os.path.exists(named) else file.parent / named
    return RecipeBasis(file, recipe, participants, place, request.progress)
