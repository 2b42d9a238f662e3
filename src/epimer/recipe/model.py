"""A recipe: models, a method with its options, rules; every value is evaluated for each tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from epimer.errors import RecipeError

if TYPE_CHECKING:  # the registry imports torch; functions import it when they must know the methods
    from epimer.methods.options import Parameter
    from epimer.methods.registry import Method

AUTO = "auto"
LAYER = re.compile(r"((?:[^.]*\.)*?)([0-9]+)(?:\.|\Z)")
"""the start of a tensor's name up to its first integer, and the integer"""

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
    """The parameters and weights of one tensor."""

    parameters: dict[str, Any]
    """by name; a list with one entry per model where a model has a value of its own"""
    weights: list[float] | None


class Recipe(_Frozen):
    """A merge in canonical spelling: mergekit's aliases are resolved, every value is checked."""

    merge_method: str
    base_model: str | None = None
    models: tuple[ModelEntry, ...]
    parameters: dict[str, Value] = {}
    """for all models; with `weight` where it is given for all"""
    normalize_weights: bool | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str | None = None
    """whose tokenizer, chat template and generation settings the output gets: base, a model, a folder; None: see
    `plan.settings_source`"""
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
    notes: tuple[str, ...] = Field(default=(), exclude=True)
    """what the file says that has another meaning here, or none"""

    def settings(self, name: str, t: float) -> Settings:
        """Return the parameters and weights of the tensor `name` at depth `t` (from `depths`)."""
        parameters: dict[str, Any] = {}
        for key, own in self._keys().items():
            each = [self._at(key, model, name, t) for model in (self.models if own else self.models[:1])]
            parameters[key] = each if own else each[0]
        return Settings(parameters, weights=parameters.pop("weight", None))

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
        models = []
        for entry in self.models:
            kept: dict[str, Any] = {"parameters": {k: v for k, v in entry.parameters.items() if k in known}}
            models.append(entry.model_copy(update=kept if measured else {**kept, "curvature": None}))
        return self.model_copy(
            update={
                "merge_method": method,
                "parameters": parameters,
                "models": tuple(models),
                "auto": (),
                "eval": None,
                "basis": self.basis if row.needs_curvature else None,
                "normalize_weights": self.normalize_weights if own else None,
                "notes": self.notes if own else (),
            }
        )

    def varying(self) -> frozenset[str]:
        """Return the names of the parameters, `weight` included, that differ between tensors."""
        known, names = known_parameters(self.merge_method), set()
        for key, model in product(self._keys(), self.models):
            leaves = [entry.value for entry in self._options(key, model)]
            values = {x for leaf in leaves for x in (leaf if isinstance(leaf, tuple) else (leaf,))}
            if len(values) > 1 and known[key].kind != "numbers":
                names.add(key)
        return frozenset(names)

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

    def _keys(self) -> dict[str, bool]:
        """Return the parameters that the recipe sets, each with whether it has a value per model."""
        own = {key for model in self.models for key in model.parameters}
        return {key: key in own or key == "weight" for key in [*self.parameters, *sorted(own - self.parameters.keys())]}

    def _options(self, key: str, model: ModelEntry) -> list[Filtered]:
        """Return the values that `key` can have for a model: its own, then the recipe's, then the default."""
        values = [level[key] for level in (model.parameters, self.parameters) if key in level]
        if key != "weight":
            values.append(known_parameters(self.merge_method)[key].default)
        options: list[Filtered] = []
        for entry in chain.from_iterable(map(_entries, values)):
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
        leaf, kind = fits[0], known_parameters(self.merge_method)[key].kind
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
    layers = {name: (match[1], int(match[2])) for name in names if (match := LAYER.match(name))}
    last: dict[str, int] = {}
    for prefix, layer in layers.values():
        last[prefix] = max(last.get(prefix, 0), layer)
    depth = {name: layer / last[prefix] if last[prefix] else 1.0 for name, (prefix, layer) in layers.items()}
    return {name: depth.get(name, 0.0) for name in names}


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
