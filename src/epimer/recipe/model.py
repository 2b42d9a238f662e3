"""A merge as a YAML file in mergekit's dialect: read it, check every word of it, evaluate it for each tensor."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict

from epimer.errors import ParameterError, RecipeError, nearest
from epimer.recipe.yaml_lines import Path, Source, spell

if TYPE_CHECKING:  # the registry imports torch; functions import it when they must know the methods
    from epimer.methods.options import Parameter
    from epimer.methods.registry import Method

DTYPES = ("float64", "float32", "float16", "bfloat16")
ALIASES = {"linear": "average", "dare_linear": "dare"}
KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source", "curvature",
        "basis", "rules", "scale", "eval")  # fmt: skip
AUTO = "auto"
TWICE = "scale is given twice: scale, parameters.scale and lambda are one; keep one."
PROVISIONAL = "epimer_free"  # what an unchosen method stands for: it needs the models and nothing else
NOT_OURS = {
    "slices": "mergekit's 'slices' stacks layers of several models, which is not done here; list whole 'models'.",
    "modules": "mergekit's 'modules' merges the parts of a model apart, which is not done here; list whole 'models'.",
    "tokenizer": "mergekit's 'tokenizer' builds a new one, which is not done here; name one in 'tokenizer_source'.",
    "chat_template": "mergekit's 'chat_template' is not supported; set it in the merged model's tokenizer files.",
}
NOT_OUR_PARAMETERS = {
    "int8_mask": "mergekit's 'int8_mask' has no effect here; remove it.",
    "rescale": "mergekit's 'rescale' has no effect here: dare always rescales by 1/density, ties never; remove it.",
    "rescale_norm": "mergekit's 'rescale_norm' has no effect here: dare always rescales by 1/density; remove it.",
    "rules": "'rules' is a key of the recipe itself; move it out of 'parameters'.",
}
NOT_OUR_METHODS = {  # mergekit's method -> the nearest ones here
    "slerp": "average", "nuslerp": "average", "multislerp": "average", "karcher": "average", "model_stock": "average",
    "nearswap": "average", "passthrough": "", "dare_ties": "dare, ties", "della": "dare, ties",
    "della_linear": "dare", "breadcrumbs": "task_arithmetic", "breadcrumbs_ties": "ties", "sce": "ties",
    "arcee_fusion": "ties",
}  # fmt: skip

Scalar = bool | int | float | str | None


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Filtered(_Frozen):
    """A value for the tensors whose name contains `filter`; for all where there is none."""

    filter: str | None = None
    value: Scalar | tuple[int | float, ...]


Value = Scalar | tuple[int | float, ...] | tuple[Filtered, ...]
"""One value for all tensors, a gradient over the layers, or the first filter that matches."""


class ModelEntry(_Frozen):
    """One fine-tuned model: where it is, and what holds for it alone."""

    model: str
    parameters: dict[str, Value] = {}
    curvature: str | None = None


@dataclass(frozen=True)
class Settings:
    """What a recipe says of one tensor."""

    parameters: dict[str, Any]
    """by name; a list with one entry per model where a model has a value of its own"""
    weights: list[float] | None


class Recipe(_Frozen):
    """What the user wants, in canonical spelling: mergekit's aliases are resolved, every value is checked."""

    merge_method: str
    base_model: str | None = None
    models: tuple[ModelEntry, ...]
    parameters: dict[str, Value] = {}
    """for all models; with `weight` where it is given for all"""
    normalize_weights: bool | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str = "base"
    basis: str | None = None
    """a folder made by `epimer basis`, to merge in instead of a basis of its own"""
    rules: tuple[tuple[str, str], ...] = ()
    auto: tuple[str, ...] = ()
    """what is to be chosen before planning: merge_method, scale, or both"""
    eval: str | None = None
    """the suite on whose validation data they are chosen; without it by forecast"""

    def settings(self, name: str, t: float) -> Settings:
        """Return the parameters and weights of the tensor `name` at depth `t` (from `depths`)."""
        parameters: dict[str, Any] = {}
        for key, own in self._keys().items():
            each = [self._at(key, model, name, t) for model in (self.models if own else self.models[:1])]
            parameters[key] = each if own else each[0]
        weights = parameters.pop("weight", None)
        return Settings(parameters, weights)

    def varying(self) -> frozenset[str]:
        """Return the names of the parameters, `weight` included, that differ between tensors."""
        known = _known(self.merge_method)
        found = set()
        for key in self._keys():
            for model in self.models:
                leaves = [entry.value for entry in self._options(key, model)]
                values = {x for leaf in leaves for x in (leaf if isinstance(leaf, tuple) else (leaf,))}
                if len(values) > 1 and known[key].kind != "numbers":
                    found.add(key)
        return frozenset(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `load_recipe` reads back to an equal recipe."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        if (normalize := data.pop("normalize_weights", None)) is not None:
            data["parameters"] = data.get("parameters", {}) | {"normalize": normalize}
        for key in data.pop("auto", ()):
            data[key] = AUTO
        return data

    def to_yaml(self, rename: Mapping[str, str] | None = None) -> str:
        """Return `to_dict` as YAML, with models, base, curvature and tokenizer shown as `rename` has them."""
        data = self.to_dict()
        for place in (data, *data["models"]):
            for key in {"base_model", "tokenizer_source", "model", "curvature", "basis", "eval"} & place.keys():
                place[key] = (rename or {}).get(place[key], place[key])
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)

    def plain(self, parameters: Mapping[str, Value] | None = None, *, weights: bool = False, **update: Any) -> Recipe:
        """Return a recipe of the same models whose method needs nothing but them: what it merges is not of interest.

        `weights` keeps those of the models; `update` changes other fields.
        """
        own = ("weight",) if weights else ()
        given = (self.parameters, *(model.parameters for model in self.models))
        kept = [{key: one[key] for key in own if key in one} for one in given]
        models = [
            entry.model_copy(update={"parameters": one}) for entry, one in zip(self.models, kept[1:], strict=True)
        ]
        fields = {"parameters": {**kept[0], **(parameters or {})}, "models": tuple(models), "normalize_weights": None}
        return self.model_copy(update={"merge_method": PROVISIONAL, **fields, **update})

    def _keys(self) -> dict[str, bool]:
        """Return the parameters that are given, each with whether it has a value per model."""
        own = {key for model in self.models for key in model.parameters}
        return {key: key in own or key == "weight" for key in [*self.parameters, *sorted(own - self.parameters.keys())]}

    def _options(self, key: str, model: ModelEntry) -> list[Filtered]:
        """Return what `key` may be for a model, in order: its own, the recipe's, the default; none out of reach."""
        given = [values[key] for values in (model.parameters, self.parameters) if key in values]
        if key != "weight":
            given.append(_known(self.merge_method)[key].default)
        options: list[Filtered] = []
        for entry in chain.from_iterable(map(_entries, given)):
            options.append(entry)
            if entry.filter is None:
                break
        return options

    def _at(self, key: str, model: ModelEntry, name: str, t: float) -> Any:
        fits = [entry.value for entry in self._options(key, model) if entry.filter is None or entry.filter in name]
        if not fits:
            raise RecipeError(
                f"recipe: no filter of the {key!r} of {model.model!r} matches the tensor {name!r}; "
                "add an entry without a filter."
            )
        leaf, kind = fits[0], _known(self.merge_method)[key].kind
        if not isinstance(leaf, tuple) or kind == "numbers":
            return list(leaf) if isinstance(leaf, tuple) else leaf
        position = t * (len(leaf) - 1)
        low = int(position)
        high, part = min(low + 1, len(leaf) - 1), position - low
        value = (1 - part) * leaf[low] + part * leaf[high]
        return round(value) if kind == "integer" else value


def _entries(value: Value) -> tuple[Filtered, ...]:
    if isinstance(value, tuple) and any(isinstance(entry, Filtered) for entry in value):
        return value  # type: ignore[return-value]
    return (Filtered(value=value),)  # type: ignore[arg-type]


def depths(names: Sequence[str]) -> dict[str, float]:
    """Return for each tensor how deep in the model it lies, t in [0, 1]: the argument of gradients.

    The layer of a tensor is the first integer in its dotted name, and t = layer / (layers - 1), the layers being
    counted among the names with the same text before the integer: ``model.layers.3.mlp.weight`` is layer 3 of
    ``model.layers``. As in mergekit, a tensor of no layer (embeddings, the final norm, the head) has t = 0, and an
    only layer has t = 1.
    """
    layers: dict[str, tuple[str, int]] = {}
    last: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isascii() and part.isdigit():
                prefix = ".".join(parts[:i])
                layers[name] = prefix, int(part)
                last[prefix] = max(last.get(prefix, 0), int(part))
                break
    found = dict.fromkeys(names, 0.0)
    for name, (prefix, layer) in layers.items():
        found[name] = layer / last[prefix] if last[prefix] else 1.0
    return found


def open_recipe(
    source: str | os.PathLike[str] | Mapping[str, Any] | Recipe, folder: pathlib.Path | None = None
) -> tuple[Recipe, pathlib.Path | None]:
    """Return a recipe in whatever form it is given, and where its relative paths are looked for too.

    That is the folder of its file; `folder` where it is no file.
    """
    if isinstance(source, Recipe):
        return source, folder
    if isinstance(source, Mapping):
        return load_recipe(source), folder
    return load_recipe(source), pathlib.Path(source).parent


def load_recipe(source: str | os.PathLike[str] | Mapping[str, Any]) -> Recipe:
    """Read a recipe from a YAML file, or from the mapping such a file holds, and check all of it."""
    if isinstance(source, Mapping):
        return _Reader(Source(None)).recipe(_plain(source))
    if not isinstance(source, str | os.PathLike):
        raise RecipeError(f"A recipe is a path to a YAML file or a mapping, got {type(source).__name__}.")
    file = Source(os.fspath(source))
    return _Reader(file).recipe(file.read())


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


def _known(method: str) -> dict[str, Parameter]:
    """Return what a recipe may say of a method: its parameters, and the weight of a model."""
    from epimer.methods.registry import describe_method

    return _parameters(describe_method(method))


@cache
def _parameters(method: Method) -> dict[str, Parameter]:
    from epimer.methods.options import BASES, Parameter

    low = None if method.absolute_weights else 0
    weight = Parameter("weight", "number", None, "weight of a model", low=low, per_model=True)
    ours = [p for p in method.parameters if p.kind not in ("callable", "mapping", "rules")]
    ours = [replace(p, kind="choice", choices=BASES) if p.kind == "basis" else p for p in ours]
    return {p.name: p for p in (weight, *ours)}


def _number(value: Any) -> Any:
    """Return the number a text spells (to PyYAML ``1e-3`` is a text), anything else as it is."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


class _Reader:
    """Turns plain data into a recipe, or says where and what is wrong."""

    method: Method
    called: str
    known: dict[str, Parameter]

    def __init__(self, source: Source) -> None:
        self.error, self.wrong = source.error, source.wrong
        self.mapping, self.text = source.mapping, source.text

    def recipe(self, raw: Any) -> Recipe:
        if raw is None or raw == {}:
            raise self.error((), "the recipe is empty; it needs at least merge_method and models.")
        given = {key: value for key, value in self.mapping((), raw, KEYS, NOT_OURS).items() if value is not None}
        auto = tuple(key for key in ("merge_method", "scale") if given.get(key) == AUTO)
        if isinstance(given.get("parameters"), dict) and AUTO in (given["parameters"].get("scale"), given.get("scale")):
            if ("scale" in given) + len({"scale", "lambda"} & given["parameters"].keys()) > 1:
                raise self.error(("parameters",), TWICE)
            auto = tuple(dict.fromkeys((*auto, "scale")))
            given["parameters"] = {k: v for k, v in given["parameters"].items() if k != "scale"}
        given = {key: PROVISIONAL if key == "merge_method" and key in auto else value
                 for key, value in given.items() if key != "scale" or value != AUTO}  # fmt: skip
        self.method = self.find_method(given)
        self.known, self.called = _known(self.method.name), AUTO if "merge_method" in auto else self.method.name
        base = self.text(("base_model",), given.get("base_model"))
        if self.method.needs_base and base is None:
            who = "a recipe with 'auto'" if self.called == AUTO else self.method.name
            need = f"{who} needs the base model that the others were fine-tuned from; add 'base_model'."
            raise self.error(("merge_method",), need)
        models = self.models(given, base)
        if given["merge_method"] == "linear" and base is not None and base not in [m.model for m in models.values()]:
            remedy = "list it under models, remove it, or write 'average', which takes only config and names from it."
            raise self.error(("base_model",), f"mergekit's linear counts base_model as one more model: {remedy}")
        parameters, normalize = self.parameters(given, len(models))
        lacking = [t for t, entry in models.items() if "weight" not in entry.parameters | parameters]
        if 0 < len(lacking) < len(models):
            remedy = "give every model a weight, or one for all in the recipe's 'parameters'."
            raise self.error(("models", lacking[0]), f"models[{lacking[0]}] has no weight, others have one; {remedy}")
        if given.get("tokenizer_source") == "union":
            remedy = "name a model whose tokenizer is to be used, or 'base'."
            raise self.error(("tokenizer_source",), f"mergekit's tokenizer_source 'union' is not supported; {remedy}")
        for key in ("dtype", "out_dtype"):
            if given.get(key, DTYPES[0]) not in DTYPES:
                raise self.wrong((key,), given[key], f"one of {', '.join(DTYPES)}")
        return Recipe(
            merge_method=self.method.name,
            base_model=base,
            models=tuple(models.values()),
            parameters=parameters,
            normalize_weights=normalize,
            dtype=given.get("dtype"),
            out_dtype=given.get("out_dtype"),
            tokenizer_source=self.text(("tokenizer_source",), given.get("tokenizer_source")) or "base",
            basis=self.basis(given),
            rules=self.rules(given.get("rules", [])),
            auto=auto,
            eval=self.text(("eval",), given.get("eval")),
        )

    def basis(self, given: Mapping[str, Any]) -> str | None:
        """Return the folder of a basis that is to be used, where the method has one."""
        folder = self.text(("basis",), given.get("basis"))
        if folder is not None and "basis" not in self.known:
            raise self.error(("basis",), f"{self.method.name} is not merged in a basis; remove 'basis'.")
        if folder in ("tagged", "tensor", "full"):
            raise self.error(("basis",), f"{folder!r} is a kind of basis; it belongs under 'parameters'.")
        return folder

    def find_method(self, given: Mapping[str, Any]) -> Method:
        from epimer.methods.registry import describe_method, list_methods

        ours = ", ".join(list_methods())
        name = self.text(("merge_method",), given.get("merge_method"))
        if name is None:
            raise self.error((), f"the recipe has no 'merge_method'. Methods: {ours}.")
        if name in NOT_OUR_METHODS and name not in list_methods():
            near = f"; nearest: {NOT_OUR_METHODS[name]}" if NOT_OUR_METHODS[name] else ""
            raise self.error(("merge_method",), f"mergekit's method {name!r} is not one of ours{near}. Ours: {ours}.")
        if name not in list_methods() and name not in ALIASES:
            hint = nearest(name, [*list_methods(), *ALIASES, AUTO])
            raise self.error(("merge_method",), f"There is no method {name!r}.{hint} Methods: {ours}.")
        return describe_method(ALIASES.get(name, name))

    def models(self, given: Mapping[str, Any], base: str | None) -> dict[int, ModelEntry]:
        """Return the models to merge by their position in the recipe; mergekit's recipes often list the base too."""
        raw = given.get("models")
        if not isinstance(raw, list) or not raw:
            raise self.wrong(("models",), raw, "a list of models, each with the key 'model'")
        found = {t: self.entry(("models", t), item) for t, item in enumerate(raw)}
        for t, entry in list(found.items()):
            if self.method.needs_base and entry.model == base:
                if entry.parameters or entry.curvature:
                    remedy = f"which {self.method.name} does not merge; remove it from 'models'."
                    raise self.error(("models", t), f"models[{t}] is the base model, {remedy}")
                del found[t]
        if not found:
            raise self.error(("models",), "models lists only the base model; add the models to merge.")
        if (paths := given.get("curvature")) is None:
            return found
        if not isinstance(paths, list) or len(paths) != len(found):
            raise self.wrong(("curvature",), paths, f"a list with one path per model ({len(found)}), in their order")
        for (t, entry), (i, path) in zip(found.items(), enumerate(paths), strict=True):
            if entry.curvature is not None:
                raise self.error(("curvature",), f"curvature is given here and in models[{t}]; remove one of the two.")
            found[t] = entry.model_copy(update={"curvature": self.text(("curvature", i), path)})
        return found

    def entry(self, path: Path, raw: Any) -> ModelEntry:
        given = self.mapping(path, raw, ("model", "parameters", "curvature"), {})
        model = self.text((*path, "model"), given.get("model"))
        if model is None:
            raise self.error(path, f"{spell(path)} has no 'model'.")
        own = [key for key, parameter in self.known.items() if parameter.per_model]
        shared = {*(p.name for p in self.method.parameters), "lambda", "normalize"}.difference(own)
        refused = {key: f"{key!r} holds for all models; move it to the recipe's 'parameters'." for key in shared}
        inner = (*path, "parameters")
        raw = {} if given.get("parameters") is None else given["parameters"]
        values = self.mapping(inner, raw, own, refused | NOT_OUR_PARAMETERS)
        return ModelEntry(
            model=model,
            parameters={key: self.value((*inner, key), key, value) for key, value in values.items()},
            curvature=self.text((*path, "curvature"), given.get("curvature")),
        )

    def parameters(self, given: Mapping[str, Any], models: int) -> tuple[dict[str, Value], bool | None]:
        """Return the parameters for all models, and whether to normalise weights (mergekit's `normalize`)."""
        only = f"of {self.method.name} can be given only from Python, not in a recipe."
        refused = {p.name: f"{p.name!r} {only}" for p in self.method.parameters if p.kind in ("callable", "mapping")}
        names = dict.fromkeys([*self.known, "lambda", "normalize"])
        where, of = ("parameters",), f" of {self.called}"
        raw = self.mapping(where, given.get("parameters", {}), names, refused | NOT_OUR_PARAMETERS, of)
        values: dict[Path, Any] = {("parameters", key): value for key, value in raw.items()}
        if "scale" in given:
            values["scale",] = given["scale"]
        normalize: bool | None = None
        found: dict[str, Value] = {}
        for path, value in values.items():
            name = "scale" if path[-1] == "lambda" else str(path[-1])
            if name in found:
                raise self.error(path, TWICE)
            if name == "normalize" and isinstance(value, bool | int | float) and value in (0, 1):
                normalize = bool(value)  # mergekit writes 1.0 for true
            elif name not in self.known:
                raise self.wrong(path, value, "true or false: whether weights are scaled to sum 1")
            else:
                found[name] = self.value(path, name, value)
                if self.known[name].kind == "numbers" and value is not None and len(value) != models:
                    raise self.wrong(path, value, f"a list with one number per model ({models})")
        return found, normalize

    def rules(self, raw: Any) -> tuple[tuple[str, str], ...]:
        if not isinstance(raw, list | dict):
            raise self.wrong(("rules",), raw, "a list of [pattern, rule] pairs, or a mapping of patterns to rules")
        pairs = [(key, [key, rule]) for key, rule in raw.items()] if isinstance(raw, dict) else list(enumerate(raw))
        parameter = next(p for p in self.method.parameters if p.name == "rules")
        return tuple(self.checked(("rules", key), parameter, [pair])[0] for key, pair in pairs)

    def value(self, path: Path, name: str, raw: Any) -> Value:
        """Return one value for all tensors, a gradient or filters, with every number in it checked."""
        parameter = replace(self.known[name], per_model=False)  # a list is a gradient here
        if parameter.kind == "numbers":
            checked = self.checked(path, parameter, [_number(x) for x in raw] if isinstance(raw, list) else raw)
            return None if checked is None else tuple(checked)
        if isinstance(raw, list) and name == "seed":
            raise self.wrong(path, raw, "one integer for all tensors")
        if isinstance(raw, list) and raw and all(isinstance(item, dict) for item in raw):
            return tuple(self.filtered((*path, i), parameter, item) for i, item in enumerate(raw))
        return self.leaf(path, parameter, raw)

    def filtered(self, path: Path, parameter: Parameter, raw: Any) -> Filtered:
        if "value" not in self.mapping(path, raw, ("filter", "value"), {}):
            raise self.error(path, f"{spell(path)} has no 'value'.")
        text = None if raw.get("filter") in ("*", "") else self.text((*path, "filter"), raw.get("filter"))
        return Filtered(filter=text, value=self.leaf((*path, "value"), parameter, raw["value"]))

    def leaf(self, path: Path, parameter: Parameter, raw: Any) -> Scalar | tuple[int | float, ...]:
        numeric = parameter.kind in ("number", "integer")
        if not isinstance(raw, list):
            return self.checked(path, parameter, _number(raw) if numeric else raw)
        if not raw or not numeric:
            many = ", or a list of such over the layers" if numeric else ""
            raise self.wrong(path, raw, f"{parameter.expected}{many}, or a list of {{filter: ..., value: ...}}")
        return tuple(self.checked((*path, i), parameter, _number(x)) for i, x in enumerate(raw))

    def checked(self, path: Path, parameter: Parameter, value: Any) -> Any:
        try:
            return parameter.check(self.method.name, value)
        except ParameterError as error:
            raise self.error(path, f"{spell(path)}: {error}" if len(path) > 2 else str(error)) from None
