"""The checkpoints that the slices of a recipe describe: layers of the models it names, stacked and renumbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.layers import LayerRange, Stacked, layer_count
from epimer.errors import RecipeError
from epimer.layer_names import module_of
from epimer.recipe.model import Recipe, Slice, Source, needs_base


def stack_sources(
    recipe: Recipe, base: Checkpoint | None, opened: Mapping[str, Checkpoint]
) -> tuple[Checkpoint | None, list[Checkpoint], Checkpoint | None]:
    """Return the base and the models of a recipe with slices, and the checkpoint whose config the output gets.

    Model `i` has the layers of the i-th source of every slice; where a slice has fewer, those of its first, which have
    no weight there, or the base's. A method that takes no differences has no base: that is then only asked for config.
    """
    for k, place in enumerate(recipe.slices):
        for i, source in enumerate(place.sources):
            _check_range(recipe, source, opened[source.model], place.module, f"slices[{k}].sources[{i}]")
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

    models = [stacked(partial(of_model, i)) for i in range(len(recipe.models))]
    return None if based is None else stacked(of_base), models, None if based else models[0]


def _check_range(recipe: Recipe, source: Source, checkpoint: Checkpoint, module: str, label: str) -> None:
    """Refuse layers that a source does not have."""
    if source.layer_range is None:
        return
    modules = tuple(dict.fromkeys(place.module for place in recipe.slices))
    names = [name for name in checkpoint.headers if module_of(name, modules) == module]
    count, asked = layer_count(checkpoint, names), list(source.layer_range)
    if asked[1] > count:
        raise RecipeError(f"{label} has layer_range {asked}, and {source.model} has only {count} layers.")
