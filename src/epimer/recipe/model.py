"""A recipe: models, a method with its options, rules; every value is evaluated for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from epimer.errors import ParameterError, RecipeError
from epimer.layer_names import before_layers, module_of, split_layer
from epimer.recipe.non_finite import ERROR

if TYPE_CHECKING:  # the registry imports torch; functions import it when they must know the methods
    from epimer.methods.options import Parameter
    from epimer.methods.registry import Method

AUTO = "auto"
UNION = "union"

Word = bool | int | float | str
Scalar = Word | None


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Filtered(_Frozen):
    """A value for the tensors whose name contains `filter`; for all where there is none."""

    filter: str | None = None
    value: Scalar | tuple[Word, ...]


Value = Scalar | tuple[Word, ...] | tuple[Filtered, ...]
"""One value for all tensors, a gradient over the layers, or the first filter that matches."""


class ModelEntry(_Frozen):
    """One fine-tuned model: where it is, and what holds for it alone."""

    model: str
    parameters: dict[str, Value] = {}
    curvature: str | None = None
    prefix: dict[str, str] = {}
    """what the names of its tensors begin with -> what the base has in its place"""


class Source(_Frozen):
    """Layers of a model that go into a slice: from the first to one before the last; all where there is no range."""

    model: str
    layer_range: tuple[int, int] | None = None
    parameters: dict[str, Value] = {}


class Slice(_Frozen):
    """Layers of the output, each merged of one layer of every source; slices are stacked in their order."""

    module: str = ""
    """the part of the model whose layers they are, a word of its tensors' names; "" for the whole model"""
    sources: tuple[Source, ...]
    parameters: dict[str, Value] = {}

    @property
    def length(self) -> int | None:
        """How many layers it has; None for all of a model's."""
        layers = self.sources[0].layer_range
        return None if layers is None else layers[1] - layers[0]


class TokenSource(_Frozen):
    """Where the row of a token comes from in models that lack it, or in all with `force`: zeros without a model."""

    model: str | None = None
    token: str | None = None
    """the token of that model; None for the same"""
    token_id: int | None = None
    force: bool = False


class TokenizerOptions(_Frozen):
    """How the embeddings of models with different tokenizers are brought to one vocabulary."""

    tokens: dict[str, TokenSource] = {}
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True)
class Settings:
    """The parameters and weights of one tensor."""

    parameters: dict[str, Any]
    """by name; a list with one entry per model where a model has a value of its own"""
    weights: list[float] | None


class Recipe(_Frozen):
    """A merge in canonical spelling: mergekit's aliases are resolved, every value is checked."""

    merge_method: str
    base_model: str | None = None
    models: tuple[ModelEntry, ...]
    """the models to merge; with slices, what each of their sources stands for in turn"""
    slices: tuple[Slice, ...] = ()
    """the layers of the output, where they are not simply those of the models"""
    parameters: dict[str, Value] = {}
    """for all models; with `weight` where it is given for all"""
    normalize_weights: bool | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str | None = None
    """whose tokenizer, chat template and generation settings the output gets: base, a model, a folder; None: see
    `plan.settings_source`"""
    tokenizer: TokenizerOptions | None = None
    """what mergekit's `tokenizer` says besides the source"""
    chat_template: str | None = None
    """the template itself, or auto for that of most models"""
    basis: str | None = None
    """a folder made by `epimer basis`, to merge in instead of a basis of its own"""
    rules: tuple[tuple[str, str], ...] = ()
    auto: tuple[str, ...] = ()
    """what is to be chosen before planning: merge_method, scale, or both"""
    eval: str | None = None
    """the suite on whose validation data they are chosen; without it by the curvature's inputs, or by a diagnosis"""
    rounds: int = 0
    """how often curvature is measured again at the merge, on the inputs that were kept with it"""
    refine: int = 0
    """natural-gradient steps at most towards each task's own model, on the same inputs"""
    output: str = "model"
    """model, or lora: a PEFT adapter of the base instead of a whole model"""
    lora_rank: int | None = None
    """the rank of the adapter's layers at most; None keeps all of a merge whose rank is bounded"""
    non_finite: str = ERROR
    """error, or skip-tensor: a tensor with NaN or Inf in a model is left as the base has it"""
    name: str | None = None
    """what the other recipes of the same file call the merged model"""
    notes: tuple[str, ...] = Field(default=(), exclude=True)
    """what the file says that has another meaning here, or none"""
    spoken: dict[str, str] = Field(default={}, exclude=True)
    """base_model or models[t] -> what errors call it where no user wrote the recipe"""

    def settings(self, name: str, t: float) -> Settings:
        """Return the parameters and weights of the tensor `name` at depth `t` (from `depths`)."""
        place, t = self.slice_of(name, t)
        parameters: dict[str, Any] = {}
        for key, own in self._keys().items():
            each = [self._at(key, i, place, name, t) for i in range(len(self.models) if own else 1)]
            parameters[key] = each if own else each[0]
        weights = parameters.pop("weight", None)
        return Settings(parameters, weights if place is None else self._weights_in(place, weights))

    def weights(self, name: str, t: float) -> list[float]:
        """Return the models' weights for the tensor `name` at depth `t`; 1 each where the recipe gives none."""
        return self.settings(name, t).weights or [1.0] * len(self.models)

    def settled(self, method: str, scale: float | None = None, rank: int | None = None) -> Recipe:
        """Return the recipe with a method, and a scale and a rank where they are given: exactly what a sweep merges.

        The recipe's parameters are for its own method, or for whichever is chosen where it leaves that open; weights
        are for all.
        """
        from epimer.methods.registry import describe_method

        row = describe_method(method)
        measured = row.needs_curvature or self.rounds or self.refine  # which take the inputs kept with curvature
        own = "merge_method" in self.auto or method == self.merge_method
        known = {*(row.defaults if own else ()), "weight"}
        parameters = {key: value for key, value in self.parameters.items() if key in known}
        if not own and scale is None and "scale" in self.parameters:
            parameters["scale"] = self.parameters["scale"]
        if scale is not None:
            parameters.pop("scale", None)
            parameters |= {} if scale == 1.0 else {"scale": scale}
        if rank is not None:
            parameters["rank"] = rank

        def only_known(one: Any, **more: Any) -> Any:
            return one.model_copy(
                update={"parameters": {k: v for k, v in one.parameters.items() if k in known}, **more}
            )

        unmeasured = {} if measured else {"curvature": None}
        return self.model_copy(
            update={
                "merge_method": method,
                "parameters": parameters,
                "models": tuple(only_known(entry, **unmeasured) for entry in self.models),
                "slices": tuple(only_known(one, sources=tuple(map(only_known, one.sources))) for one in self.slices),
                "auto": (),
                "eval": None,
                "basis": self.basis if row.needs_curvature else None,
                "normalize_weights": self.normalize_weights if own else None,
                "notes": self.notes if own else (),
            }
        )

    def as_lora(self, rank: int | None) -> Recipe:
        """Return the recipe with a LoRA adapter as its output, of a rank at most or of all that the merge has."""
        from epimer.recipe.load import load_recipe

        more = {"output": "lora"} | ({} if rank is None else {"lora_rank": rank})
        return load_recipe(self.to_dict() | more)

    def renamed(self, names: Mapping[str, str]) -> Recipe:
        """Return the recipe with models, also under an adapter, that are called otherwise."""

        def rename(text: str | None) -> str | None:
            return text and "+".join(names.get(part.strip(), part) for part in text.split("+"))

        def renaming(one: Any) -> Any:
            return one.model_copy(update={"model": rename(one.model)})

        slices = [one.model_copy(update={"sources": tuple(map(renaming, one.sources))}) for one in self.slices]
        places: dict[str, Any] = {key: rename(getattr(self, key)) for key in ("base_model", "tokenizer_source")}
        if self.tokenizer is not None:
            tokens = {token: renaming(one) for token, one in self.tokenizer.tokens.items()}
            places["tokenizer"] = self.tokenizer.model_copy(update={"tokens": tokens})
        return self.model_copy(update={"models": tuple(map(renaming, self.models)), "slices": tuple(slices), **places})

    @property
    def sources(self) -> dict[str, str]:
        """The models that are merged, by where the recipe lists them."""
        if not self.slices:
            return {f"models[{t}]": entry.model for t, entry in enumerate(self.models)}
        return {
            f"slices[{k}].sources[{i}]": source.model
            for k, place in enumerate(self.slices)
            for i, source in enumerate(place.sources)
        }

    @property
    def model_names(self) -> set[str]:
        """The models that the recipe names, adapters apart from what is under them."""
        others = [text for text in (self.base_model, self.tokenizer_source) if text is not None]
        entries = [*self.sources.values(), *others]
        return {part.strip() for text in entries for part in text.split("+")}

    def merged_sources(self, place: Slice) -> list[Source]:
        """Return the sources of a slice without the base, where the method takes differences from that."""
        based = needs_base(self.merge_method)
        return [source for source in place.sources if not (based and source.model == self.base_model)]

    def slice_of(self, name: str, t: float) -> tuple[Slice | None, float]:
        """Return the slice that a tensor of the output belongs to, and how deep it lies in it."""
        if not self.slices:
            return None, t
        module = module_of(name, tuple(dict.fromkeys(place.module for place in self.slices)))
        places, part = [place for place in self.slices if place.module == module], split_layer(name)
        if part is None:
            return places[0 if before_layers(name) else -1], 0.0
        below = 0
        for place in places:
            if place.length is None:
                return place, t
            if part.number < below + place.length:
                return place, (part.number - below) / (place.length - 1) if place.length > 1 else 1.0
            below += place.length
        return places[-1], 0.0

    def _weights_in(self, place: Slice, weights: list[float] | None) -> list[float] | None:
        """Return the weights in a slice: 0 for sources that others have and it lacks."""
        count, most = len(self.merged_sources(place)), len(self.models)
        if count in (0, most):
            return weights
        return [*(weights[:count] if weights else [1 / count] * count), *[0.0] * (most - count)]

    def varying(self) -> frozenset[str]:
        """Return the names of the parameters, `weight` included, that differ between tensors."""
        known, names = known_parameters(self.merge_method), set()
        for key, i in product(self._keys(), range(len(self.models))):
            inside = [place for place in self.slices if i < len(self.merged_sources(place))]
            places: list[Slice | None] = [*inside] or [None]
            leaves = [entry.value for place in places for entry in self._options(key, i, place)]
            values = {x for leaf in leaves for x in (leaf if isinstance(leaf, tuple) else (leaf,))}
            if len(values) > 1 and known[key].kind != "numbers":
                names.add(key)
        return frozenset(names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `load_recipe` reads back to an equal recipe."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        if self.slices:
            del data["models"]
            _regroup(data)
        if self.tokenizer is not None:
            data["tokenizer"] = tokenizer_data(self.tokenizer, data.pop("tokenizer_source", None))
        if (normalize := data.pop("normalize_weights", None)) is not None:
            data["parameters"] = data.get("parameters", {}) | {"normalize": normalize}
        for key in data.pop("auto", ()):
            data[key] = AUTO
        return data

    def to_yaml(self, rename: Mapping[str, str] | None = None) -> str:
        """Return `to_dict` as YAML, with models, base, curvature and tokenizer shown as `rename` has them."""
        data = self.to_dict()
        modules = data.get("modules", {"": data})
        slices = [place for module in modules.values() for place in module.get("slices", ())]
        tokens = data.get("tokenizer", {}).get("tokens", {}).values()
        sources = [one["source"] for one in tokens if isinstance(one.get("source"), dict)]
        places = (*tokens, *sources, *([data["tokenizer"]] if "tokenizer" in data else ()))
        for place in places:
            for key in {"source", "model"} & place.keys():
                place[key] = place[key] if isinstance(place[key], dict) else (rename or {}).get(place[key], place[key])
        for place in (data, *data.get("models", ()), *(source for one in slices for source in one["sources"])):
            for key in {"base_model", "tokenizer_source", "model", "curvature", "basis", "eval"} & place.keys():
                place[key] = (rename or {}).get(place[key], place[key])
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)

    def _keys(self) -> dict[str, bool]:
        """Return the parameters that the recipe sets, each with whether it has a value per model."""
        entries = [source for place in self.slices for source in self.merged_sources(place)] or self.models
        own = {key for entry in entries for key in entry.parameters}
        shared = dict.fromkeys([*self.parameters, *(key for place in self.slices for key in place.parameters)])
        known = known_parameters(self.merge_method)  # what the only source of a slice has need not be per model
        each = {key: (key in own and known[key].per_model) or key == "weight" for key in own}
        return {key: each.get(key, key == "weight") for key in [*shared, *sorted(own - shared.keys())]}

    def _options(self, key: str, i: int, place: Slice | None) -> list[Filtered]:
        """Return the values that `key` can have for model `i`: its own, then its slice's, the recipe's, the default."""
        levels = [self.parameters]
        if place is None:
            levels.insert(0, self.models[i].parameters)
        else:
            sources = self.merged_sources(place)
            levels = [sources[i].parameters if i < len(sources) else {}, place.parameters, *levels]
        values = [level[key] for level in levels if key in level]
        if key != "weight":
            values.append(known_parameters(self.merge_method)[key].default)
        options: list[Filtered] = []
        for entry in chain.from_iterable(map(_entries, values)):
            options.append(entry)
            if entry.filter is None:
                break
        return options

    def _at(self, key: str, i: int, place: Slice | None, name: str, t: float) -> Any:
        options = self._options(key, i, place)
        fits = [entry.value for entry in options if entry.filter is None or entry.filter in name]
        if key == "weight" and place is not None and i >= len(self.merged_sources(place)):
            return fits[0] if fits and not isinstance(fits[0], tuple) else 1.0  # it has no say there
        if not fits:
            raise RecipeError(
                f"recipe: no filter of the {key!r} of {self.models[i].model!r} matches the tensor {name!r}; "
                "add an entry without a filter."
            )
        kind = known_parameters(self.merge_method)[key].kind
        if not isinstance(fits[0], tuple):
            return fits[0]
        return list(fits[0]) if kind == "numbers" else _along_gradient(fits[0], kind, t)


def _along_gradient(values: tuple[Word, ...], kind: str, t: float) -> Any:
    """Return what a gradient over the layers is at depth `t`: numbers between two of its values, words the former."""
    position = t * (len(values) - 1)
    low = int(position)
    if kind not in ("number", "integer"):
        return values[low]
    here, following = float(values[low]), float(values[min(low + 1, len(values) - 1)])
    value = (1 - (position - low)) * here + (position - low) * following
    return round(value) if kind == "integer" else value


def extraction(finetuned: str, base: str, rank: int, dtype: str | None = None) -> Recipe:
    """Return the recipe of an adapter that is one model's difference from its base."""
    from epimer.recipe.load import DTYPE_ALIASES, DTYPES, load_recipe

    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ParameterError(f"The 'rank' parameter of extract_lora must be an integer at least 1. Got {rank} instead.")
    if dtype not in (None, *DTYPES, *DTYPE_ALIASES):
        expected = f"one of {', '.join(DTYPES)}"
        raise ParameterError(f"The 'dtype' parameter of extract_lora must be {expected}. Got {dtype!r} instead.")
    if finetuned == base:
        raise ParameterError(f"the fine-tuned model and the base are both {base}; give two models.")
    models = {"base_model": base, "models": [{"model": finetuned}]}
    output = {"output": "lora", "lora_rank": rank, **({} if dtype is None else {"dtype": dtype})}
    recipe = load_recipe({"merge_method": "task_arithmetic", **models, **output})
    spoken = {"base_model": "the base", "models[0]": "the fine-tuned model"}
    return recipe.model_copy(update={"spoken": spoken})


def tokenizer_data(options: TokenizerOptions, source: str | None) -> dict[str, Any]:
    """Return the mapping `tokenizer` as recipes have it."""
    tokens: dict[str, Any] = {}
    for token, one in options.tokens.items():
        where: Any = {"kind": "zero"} if one.model is None else one.model
        if one.token is not None or one.token_id is not None:
            which = {"token": one.token} if one.token_id is None else {"token_id": one.token_id}
            where = {"kind": "model_token", "model": one.model, **which}
        tokens[token] = {"source": where} | ({"force": True} if one.force else {})
    data = {"source": source, "tokens": tokens, "pad_to_multiple_of": options.pad_to_multiple_of}
    return {key: value for key, value in data.items() if value}


def _regroup(data: dict[str, Any]) -> None:
    """Put slices of modules under `modules`, as recipes have them."""
    modules: dict[str, list[Any]] = {}
    for place in data["slices"]:
        modules.setdefault(place.pop("module", ""), []).append(place)
    if modules.keys() != {""}:
        del data["slices"]
        data["modules"] = {module or "default": {"slices": slices} for module, slices in modules.items()}


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
    layers = {name: part[:2] for name in names if (part := split_layer(name))}
    last: dict[str, int] = {}
    for prefix, layer in layers.values():
        last[prefix] = max(last.get(prefix, 0), layer)
    depth = {name: layer / last[prefix] if last[prefix] else 1.0 for name, (prefix, layer) in layers.items()}
    return {name: depth.get(name, 0.0) for name in names}


def needs_base(method: str) -> bool:
    """Whether a method takes differences from a base model."""
    from epimer.methods.registry import describe_method

    return method == AUTO or describe_method(method).needs_base


def known_parameters(method: str) -> dict[str, Parameter]:
    """Return the parameters that a recipe can set for a method or for 'auto', the weight of a model among them."""
    from epimer.methods.registry import describe_method

    return _parameters(None if method == AUTO else describe_method(method))


@cache
def _parameters(method: Method | None) -> dict[str, Parameter]:
    from epimer.methods.frechet import FrechetOptions
    from epimer.methods.options import BASES, Parameter, parameters_of

    low = None if method is not None and method.weights_as_given(method.options) else 0
    weight = Parameter("weight", "number", None, "weight of a model", low=low, per_model=True)
    every = parameters_of(FrechetOptions(basis="tensor")) if method is None else method.parameters
    ours = [p for p in every if p.kind not in ("callable", "mapping", "rules")]
    ours = [p for p in ours if (p.name, p.kind) != ("normalize", "boolean")]  # it is the recipe's `normalize_weights`
    ours = [replace(p, kind="choice", choices=BASES) if p.kind == "basis" else p for p in ours]
    return {p.name: p for p in (weight, *ours)}
