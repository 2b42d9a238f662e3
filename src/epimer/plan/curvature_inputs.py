"""The curvature and the basis that a recipe names: open them, and check that they belong to its models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature
from epimer.curvature.format import open_curvature, stored_fingerprint
from epimer.errors import CurvatureError, EpimerError
from epimer.plan.participants import Role
from epimer.recipe.model import Recipe


def placed(text: str, folder: Path | None) -> str:
    """Return a path that exists here or, failing that, beside the recipe; other names as they are."""
    if folder is None or os.path.exists(os.path.expanduser(text)):
        return text
    if os.path.exists(folder / text):
        return str(folder / text)
    parts = [part.strip() for part in text.split("+")]
    return text if len(parts) == 1 else "+".join(placed(part, folder) for part in parts)


def open_curvatures(recipe: Recipe, folder: Path | None, problems: list[EpimerError]) -> list[Curvature] | None:
    """Open the curvature of every model, where the recipe gives it."""
    given = [entry.curvature for entry in recipe.models]
    if all(path is None for path in given):
        return None
    found = []
    for t, path in enumerate(given):
        if path is None:
            problems.append(CurvatureError(f"models[{t}] has no curvature, while others have; measure it for all."))
            continue
        try:
            found.append(open_curvature(Path(placed(path, folder)).expanduser(), path))
        except EpimerError as error:
            problems.append(type(error)(f"curvature of models[{t}]: {error}"))
    return found


def check_models(
    roles: Sequence[Role],
    curvatures: Sequence[Curvature],
    problems: list[EpimerError],
    notes: list[str],
    *,
    any_curvature: bool,
) -> None:
    """Refuse curvature that was measured on another model, unless it was asked for."""
    for role, curvature in zip(roles, curvatures or (), strict=False):
        names = {name: stored_under(name, role, curvature) for name in curvature}
        if curvature.provenance.model in (None, stored_fingerprint(role.checkpoint, names)):
            continue
        foreign = [name for name, stored in names.items() if stored not in role.checkpoint.headers]
        if foreign:
            problems.append(
                CurvatureError(
                    f"{curvature.where} is of {foreign[0]!r}, which {role.label} does not hold: names in memory may "
                    "differ from those on disk; measure it with `epimer curvature`."
                )
            )
            continue
        wrong = f"{curvature.where} was measured on another model than {role.label}"
        if any_curvature:
            notes.append(f"{wrong}; it is used as you asked.")
        else:
            problems.append(CurvatureError(f"{wrong}; measure it on this one, or pass --any-curvature."))


def stored_under(name: str, role: Role, curvature: Curvature) -> str:
    """Return the name under which a checkpoint holds a tensor that may have several."""
    aliases = [alias for alias, twin in curvature.provenance.ties.items() if twin == name]
    known = (found for found in (role.stored.get(name, name), *aliases) if found in role.checkpoint.headers)
    return next(known, name)


def open_basis(recipe: Recipe, folder: Path | None, problems: list[EpimerError]) -> StoredBasis | None:
    """Open the basis that a recipe names."""
    if recipe.basis is None:
        return None
    try:
        return StoredBasis(Path(placed(recipe.basis, folder)).expanduser(), recipe.basis)
    except EpimerError as error:
        problems.append(type(error)(f"basis: {error}"))
        return None


def check_curvatures(curvatures: list[Curvature], basis: StoredBasis | None, problems: list[EpimerError]) -> None:
    """Refuse curvature of several kinds, and projected curvature whose basis is not the merge's."""
    for curvature in curvatures:
        first, about = curvatures[0], curvature.provenance
        if (about.kind, about.basis) != (first.kind, first.provenance.basis):
            other = curvature.kind if about.kind != first.kind else "on another basis"
            problems.append(
                CurvatureError(
                    f"{first.where} is {first.kind} curvature, {curvature.where} is {other}; measure all models alike."
                )
            )
        elif about.basis is not None and (basis is None or basis.fingerprint != about.basis):
            remedy = "name its folder under 'basis'" if basis is None else "measure it on this one"
            problems.append(CurvatureError(f"{curvature.where} is projected on a basis that is not here; {remedy}."))


def check_basis(basis: StoredBasis, recipe: Recipe, models: list[str], problems: list[EpimerError]) -> None:
    """Refuse a basis that was built from other models, or otherwise than the recipe says."""
    if basis.models is not None and basis.models != models:  # in their order: atoms are owned by number
        problems.append(
            CurvatureError(
                f"{basis.where} was built from other models, or in another order; make it with `epimer basis`."
            )
        )
    for key, built in (("rank", basis.rank), ("basis", basis.kind)):
        asked = recipe.parameters.get(key, built)
        if built is not None and asked != built:
            problems.append(
                CurvatureError(f"{basis.where} was built with {key} {built}, the recipe says {asked}; build it again.")
            )
