"""The checkpoints that the slices of a recipe describe: layers of the models it names, stacked and renumbered."""

from __future__ import annotations

from collections.abc import Callable

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.layers import LayerRange, Stacked, layer_count
from epimer.errors import EpimerError, RecipeError
from epimer.layer_names import module_of
from epimer.recipe.model import Recipe, Slice, Source, needs_base

Opening = Callable[[str, str], Checkpoint | None]
"""the name of a model and what to call it in an error -> the checkpoint; None where it cannot be opened"""


def stack_sources(
    recipe: Recipe, base: Checkpoint | None, opening: Opening, problems: list[EpimerError]
) -> tuple[Checkpoint | None, list[Checkpoint | None], Checkpoint | None]:
    """Return the base and the models of a recipe with slices, and the checkpoint whose config the output gets.

    Model `i` has the layers of the i-th source of every slice; where a slice has fewer, those of its first, which have
    no weight there, or the base's. A method that takes no differences has no base: that is then only asked for config.
    """
    opened: dict[str, Checkpoint] = {}
    for k, place in enumerate(recipe.slices):
        for i, source in enumerate(place.sources):
            label = f"slices[{k}].sources[{i}]"
            if source.model not in opened and (checkpoint := opening(source.model, label)) is not None:
                opened[source.model] = checkpoint
            if source.model in opened:
                problems += _range_problems(recipe, source, opened[source.model], place.module, label)
    if problems:
        return None, [], None
    based = base if base is not None and needs_base(recipe.merge_method) else None
    like = base or opened[recipe.slices[0].sources[0].model]

    def stacked(pick: Callable[[Slice], LayerRange]) -> Checkpoint:
        modules: dict[str, list[LayerRange]] = {}
        for place in recipe.slices:
            modules.setdefault(place.module, []).append(pick(place))
        return Stacked(modules, like)

    def of_base(place: Slice) -> LayerRange:
        assert base is not None
        own = [source for source in place.sources if source.model == recipe.base_model]
        return LayerRange(base, *((own or place.sources)[0].layer_range or ()))

    def of_model(i: int, place: Slice) -> LayerRange:
        sources = recipe.merged_sources(place)
        if not sources:
            return of_base(place)
        source = sources[i if i < len(sources) else 0]
        return LayerRange(opened[source.model], *(source.layer_range or ()))

    models: list[Checkpoint | None] = [
        stacked(lambda place, i=i: of_model(i, place)) for i in range(len(recipe.models))
    ]
    return None if based is None else stacked(of_base), models, None if based else models[0]


def _range_problems(
    recipe: Recipe, source: Source, checkpoint: Checkpoint, module: str, label: str
) -> list[EpimerError]:
    """Return why a source cannot give its layers."""
    if source.layer_range is None:
        return []
    modules = tuple(dict.fromkeys(place.module for place in recipe.slices))
    try:
        count = layer_count(checkpoint, [name for name in checkpoint.headers if module_of(name, modules) == module])
    except EpimerError as error:
        return [RecipeError(f"{label}: {error}")]
    if source.layer_range[1] <= count:
        return []
    asked = list(source.layer_range)
    return [RecipeError(f"{label}: layer_range {asked} ends beyond the {count} layers of {source.model}.")]
