"""Files of several recipes: each may build on the merges of the others by their names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from epimer.recipe.load import RecipeLike, open_recipe, read_recipes
from epimer.recipe.model import Recipe


class Step(NamedTuple):
    """One merge of a file: its recipe, where it goes, and which outputs of the same file it reads."""

    recipe: Recipe
    out: str
    reads: list[str]
    folder: Path | None
    """where relative paths are looked for too"""


def merge_steps(
    source: RecipeLike,
    out: str | os.PathLike[str],
    intermediate: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
    compat: str | None = None,
) -> list[Step]:
    """Return the merges of a recipe, or of a file of several, in the order in which they can be done.

    The recipe without a name goes to `out`, those with one to folders of their names: in `intermediate`, by default
    `out` with the suffix .parts, or in `out` itself where all have names.
    """
    if isinstance(source, Mapping | Recipe):
        recipe, folder = open_recipe(source, folder, compat)
        return [Step(recipe, os.fspath(out), [], folder)]
    recipes = load_recipes(source, compat)
    if len(recipes) == 1:
        return [Step(recipes[0], os.fspath(out), [], Path(source).parent)]
    whole = all(recipe.name for recipe in recipes)
    parts = os.fspath(intermediate or (out if whole else f"{os.fspath(out).rstrip('/')}.parts"))
    places = {recipe.name: f"{parts}/{recipe.name}" for recipe in recipes if recipe.name}
    steps = []
    for recipe in recipes:
        target = places[recipe.name] if recipe.name else os.fspath(out)
        reads = [place for name, place in places.items() if name in recipe.model_names]
        steps.append(Step(recipe.renamed(places), target, reads, Path(source).parent))
    return steps


def load_recipes(source: str | os.PathLike[str], compat: str | None = None) -> list[Recipe]:
    """Read all recipes of a YAML file, each after those whose merges it builds on, and the one without a name last."""
    recipes = read_recipes(source, compat)
    names: list[str | None] = []
    for file, recipe in recipes:
        if recipe.name is None and None in names:
            raise file.error((), "two recipes of the file have no 'name'; only the one that goes to OUT can lack it.")
        if recipe.name in names:
            raise file.error(("name",), f"two recipes of the file have the name {recipe.name!r}; rename one.")
        names.append(recipe.name)
    ordered: list[Recipe] = []
    left = recipes
    while left:
        waiting = {recipe.name for _, recipe in left}
        ready = [pair for pair in left if not pair[1].model_names & waiting]
        if not ready:
            file, circle = left[0][0], _circle(left[0][1], [recipe for _, recipe in left])
            raise file.error((), f"recipes build on each other in a circle: {' on '.join(circle)}; break it.")
        ordered += [recipe for _, recipe in ready]
        left = [pair for pair in left if pair not in ready]
    return sorted(ordered, key=lambda recipe: recipe.name is None)  # the output's own record is the last


def _circle(recipe: Recipe, left: list[Recipe]) -> list[str]:
    """Return names of recipes each of which builds on the next, from one to itself again."""
    path: list[str] = []
    while True:
        recipe = next(one for one in left if one.name in recipe.model_names)
        name = recipe.name or ""
        if name in path:
            return [*path[path.index(name) :], name]
        path.append(name)
