"""Read `slices` and `modules` of a recipe: which layers of which models are stacked, with parameters for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from epimer.recipe.model import Slice, Source, Value
from epimer.recipe.yaml_lines import Location, spell

if TYPE_CHECKING:
    from epimer.recipe.load import Reader

WHOLE_MODEL = "default"
"""what mergekit calls the only module of a model"""


def read_slices(reader: Reader, data: Mapping[str, Any], base: str | None) -> tuple[Slice, ...]:
    """Return the slices of a recipe, which has 'slices' or 'modules' instead of 'models'."""
    given = [key for key in ("models", "slices", "modules") if key in data]
    if len(given) > 1:
        raise reader.error((given[1],), f"{given[0]!r} and {given[1]!r} both say what is merged; keep one of them.")
    if "curvature" in data or "basis" in data:
        key = "curvature" if "curvature" in data else "basis"
        raise reader.error((key,), f"{key!r} belongs to whole models, not to {given[0]}; list 'models', or remove it.")
    if given[0] == "slices":
        return tuple(_slices(reader, ("slices",), data["slices"], "", base))
    modules = data["modules"]
    if not isinstance(modules, dict) or not modules:
        raise reader.wrong(("modules",), modules, "a mapping of modules to their slices or models")
    slices: list[Slice] = []
    for module, raw in modules.items():
        path, name = ("modules", str(module)), "" if module == WHOLE_MODEL else str(module)
        one = reader.mapping(path, raw, ("slices", "models"), {})
        if len(one) != 1:
            raise reader.error(path, f"{spell(path)} needs either 'slices' or 'models'.")
        if "slices" in one:
            slices += _slices(reader, (*path, "slices"), one["slices"], name, base)
        else:
            slices.append(_slice(reader, path, {"sources": one["models"]}, name, base, "models"))
    return tuple(slices)


def _slices(reader: Reader, path: Location, raw: Any, module: str, base: str | None) -> Iterator[Slice]:
    if not isinstance(raw, list) or not raw:
        raise reader.wrong(path, raw, "a list of slices, each with the key 'sources'")
    for k, item in enumerate(raw):
        yield _slice(reader, (*path, k), item, module, base, "sources")


def _slice(reader: Reader, path: Location, raw: Any, module: str, base: str | None, key: str) -> Slice:
    """Return one slice; `key` is what its sources are called in the file."""
    data = reader.mapping(path, raw, ("sources", "parameters"), {})
    sources, where = data.get("sources"), (*path, key)
    if not isinstance(sources, list) or not sources:
        raise reader.wrong(where, sources, "a list of models, each with the key 'model'")
    ranged, alone = key == "sources", len(sources) == 1
    found = [_source(reader, (*where, i), item, ranged=ranged, alone=alone) for i, item in enumerate(sources)]
    for i, source in enumerate(found):
        if reader.needs_base and source.model == base:
            reader.note_base((*where, i), source.parameters)
    ranges = [source.layer_range for source in found if source.layer_range]
    if len({stop - start for start, stop in ranges}) > 1:
        shown = ", ".join(map(str, map(list, ranges)))
        raise reader.error(path, f"{spell(path)} has layer ranges of different lengths ({shown}); make them equal.")
    if reader.needs_base and base not in [source.model for source in found] and len(set(ranges)) > 1:
        remedy = "add the base model with its own layer_range to the sources."
        raise reader.error(path, f"{spell(path)} does not say which layers of the base belong to it; {remedy}")
    return Slice(module=module, sources=tuple(found), parameters=_parameters(reader, path, data.get("parameters")))


def _source(reader: Reader, path: Location, raw: Any, *, ranged: bool, alone: bool) -> Source:
    data = reader.mapping(path, raw, ("model", "layer_range", "parameters") if ranged else ("model", "parameters"), {})
    model = reader.text((*path, "model"), data.get("model"))
    if model is None:
        raise reader.error(path, f"{spell(path)} has no 'model'.")
    limits, place = data.get("layer_range"), (*path, "layer_range")
    whole = isinstance(limits, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in limits)
    if ranged and not (whole and len(limits) == 2 and 0 <= limits[0] < limits[1]):
        raise reader.wrong(place, limits, "the first layer and one past the last, as [0, 16]")
    parameters = reader.own_parameters((*path, "parameters"), data.get("parameters"), alone=alone)
    return Source(model=model, layer_range=(limits[0], limits[1]) if ranged else None, parameters=parameters)


def _parameters(reader: Reader, path: Location, raw: Any) -> dict[str, Value]:
    """Return the parameters of a slice, which prevail over the recipe's."""
    where, parameters = (*path, "parameters"), dict[str, Value]()
    for key, value in reader.mapping(
        where, reader.accepted(raw or {}), [*reader.known, "lambda"], reader.refused
    ).items():
        name = "scale" if key == "lambda" else str(key)
        if name in parameters:
            raise reader.error((*where, key), "scale is given twice: scale and lambda are one; keep one.")
        parameters[name] = reader.value((*where, key), name, value)
    return parameters
