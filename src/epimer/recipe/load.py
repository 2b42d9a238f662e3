"""Read a recipe from a YAML file in mergekit's dialect, and check every key and value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epimer.errors import ParameterError, RecipeError
from epimer.recipe.model import AUTO, Filtered, ModelEntry, Recipe, Scalar, Slice, Source, Value, Word, known_parameters
from epimer.recipe.non_finite import ERROR, NON_FINITE
from epimer.recipe.slices import read_slices
from epimer.recipe.tokenizer import read_chat_template, read_tokenizer
from epimer.recipe.yaml_lines import Location, YamlFile, plain_data, spell

if TYPE_CHECKING:
    from epimer.methods.options import Parameter
    from epimer.methods.registry import Method

RecipeLike = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""a YAML file, its content as a mapping, or a loaded recipe"""
NAME = re.compile(r"\w[\w. -]*")
DTYPES = ("float64", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source", "curvature",
        "basis", "rules", "scale", "eval", "rounds", "refine", "output", "lora_rank", "slices", "modules", "tokenizer",
        "chat_template", "name", "compat", "non_finite")  # fmt: skip
ENTRY_KEYS = ("model", "parameters", "curvature", "prefix")
CHOICES = {"dtype": DTYPES, "out_dtype": DTYPES, "output": ("model", "lora"), "non_finite": NON_FINITE}
OWN_KEYS = {"curvature", "basis", "rules", "scale", "eval", "rounds", "refine", "output", "lora_rank", "non_finite"}
"""which no file of mergekit has"""
TWICE = "scale is given twice: scale, parameters.scale and lambda are one; keep one."
NOT_OUR_PARAMETERS = {
    "rescale": "this method never rescales; remove 'rescale', or for ties add 'compat: mergekit'.",
    "rescale_norm": "'rescale_norm' is not in mergekit 0.1.5 any more; remove it, or say 'rescale: true' or false.",
    "rules": "'rules' is a key of the recipe itself; move it out of 'parameters'.",
}
ACCEPTED = {"int8_mask": "int8_mask has no effect here: masks are no smaller or larger for it."}
"""mergekit's parameters that change no number"""
COUNTS_BASE = ("linear", "karcher")
"""mergekit's methods to which base_model is one more model"""


def open_recipe(
    source: RecipeLike,
    folder: Path | None = None,
    compat: str | None = None,
) -> tuple[Recipe, Path | None]:
    """Return a recipe, and where its relative paths are looked for too: the folder of its file, or `folder`.

    `compat` says whose numbers are wanted whatever the recipe says of that.
    """
    if isinstance(source, Recipe):
        return source if compat is None else load_recipe(source.to_dict(), compat), folder
    return load_recipe(source, compat), folder if isinstance(source, Mapping) else Path(source).parent


def load_recipe(source: str | os.PathLike[str] | Mapping[str, Any], compat: str | None = None) -> Recipe:
    """Read a recipe from a YAML file, or from the mapping such a file holds, and check all of it."""
    if isinstance(source, Mapping):
        return Reader(YamlFile(None), compat).recipe(plain_data(source))
    recipes = read_recipes(source, compat)
    if len(recipes) > 1:
        raise recipes[1][0].error(
            (), f"the file holds {len(recipes)} recipes, which only `epimer merge` takes; expected one."
        )
    return recipes[0][1]


def read_recipes(source: str | os.PathLike[str], compat: str | None = None) -> list[tuple[YamlFile, Recipe]]:
    """Return the recipes of a YAML file in its order, each with its lines."""
    if not isinstance(source, str | os.PathLike):
        raise RecipeError(f"A recipe is a path to a YAML file or a mapping, got {type(source).__name__}.")
    file = YamlFile(os.fspath(source))
    documents = file.read_all() or [(file, None)]
    return [(part, Reader(part, compat).recipe(data)) for part, data in documents]


def _number(value: Any) -> Any:
    """Return the number a text spells (to PyYAML ``1e-3`` is a text), anything else as it is."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _spelled(parameter: Parameter, value: Any) -> Any:
    """Return what YAML has for a parameter in the parameter's type: mergekit writes 1.0 for true."""
    if parameter.kind == "boolean" and isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return _number(value) if parameter.kind in ("number", "integer") else value


class Reader:
    """Turns plain data into a recipe; errors tell the line and the remedy."""

    method: Method | None
    """None where the recipe leaves it to be chosen"""
    method_name: str
    """auto where it is to be chosen"""
    needs_base: bool
    known: dict[str, Parameter]

    def __init__(self, source: YamlFile, compat: str | None = None) -> None:
        self.compat, self.notes = compat, dict[str, None]()
        self.error, self.wrong = source.error, source.wrong
        self.mapping, self.text = source.mapping, source.text

    def recipe(self, raw: Any) -> Recipe:
        if raw is None or raw == {}:
            raise self.error((), "the recipe is empty; it needs at least merge_method and models.")
        checked = self.mapping((), raw, KEYS, self.misplaced((), KEYS))
        data = {key: value for key, value in checked.items() if value is not None}
        auto = self.take_auto(data)
        self.method = None if "merge_method" in auto else self.find_method(data)
        if self.method is None and (self.compat or "compat" in data):
            raise self.error(("compat",), "compat is for one of mergekit's methods, not for 'auto'; remove it.")
        self.method_name = AUTO if self.method is None else self.method.name
        self.needs_base = self.method is None or self.method.needs_base
        self.known = known_parameters(self.method_name)
        base = self.text(("base_model",), data.get("base_model"))
        if self.needs_base and base is None:
            who = "a recipe with 'auto'" if self.method is None else self.method_name
            need = f"{who} needs the base model that the others were fine-tuned from; add 'base_model'."
            raise self.error(("merge_method",), need)
        sliced = any(key in data for key in ("slices", "modules"))
        slices = read_slices(self, data, base) if sliced else ()
        models = self.slice_models(slices, base) if sliced else self.models(data, base)
        if not sliced:
            self.check_base(data["merge_method"], base, models)
        parameters, normalize = self.parameters(data, len(models))
        self.hoist(models, parameters)
        self.check_weights(parameters, models, slices, base)
        tokenizer_source, tokenizer = read_tokenizer(self, data)
        for key, words in CHOICES.items():
            if key in data:
                data[key] = DTYPE_ALIASES.get(str(data[key]), data[key])
            if data.get(key, words[0]) not in words:
                raise self.wrong((key,), data[key], f"one of {', '.join(words)}")
        return Recipe(
            merge_method=self.method_name,
            base_model=base,
            models=tuple(models.values()),
            slices=slices,
            parameters=parameters,
            normalize_weights=normalize,
            dtype=data.get("dtype"),
            out_dtype=data.get("out_dtype"),
            tokenizer_source=tokenizer_source,
            tokenizer=tokenizer,
            chat_template=read_chat_template(self, data),
            basis=self.basis(data),
            rules=self.rules(data.get("rules", [])),
            auto=auto,
            eval=self.text(("eval",), data.get("eval")),
            rounds=self.count(data, "rounds"),
            refine=self.count(data, "refine"),
            **self.output(data, base),
            non_finite=data.get("non_finite", ERROR),
            name=self.name(data),
            notes=(*self.notes, *self.departures(data, models, parameters)),
        )

    def output(self, data: Mapping[str, Any], base: str | None) -> dict[str, Any]:
        """Return what is written, a model or a LoRA adapter, and the rank of an adapter where one is given."""
        output, rank = data.get("output", "model"), data.get("lora_rank")
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
            raise self.wrong(("lora_rank",), rank, "an integer at least 1")
        if rank is not None and output != "lora":
            raise self.error(("lora_rank",), "lora_rank is the rank of an adapter; add 'output: lora', or remove it.")
        if output == "lora" and base is None:
            raise self.error(("output",), "a LoRA adapter is one of a base model; add 'base_model'.")
        if output == "lora" and data.get("refine"):
            raise self.error(("refine",), "'refine' changes dense weights, not adapters; remove it, or 'output: lora'.")
        if output == "lora" and (data.get("slices") or data.get("modules")):
            raise self.error(("output",), "an adapter has the base's layers; list whole 'models', or remove 'output'.")
        return {"output": output, "lora_rank": rank}

    def name(self, data: Mapping[str, Any]) -> str | None:
        """Return what other recipes of the file call the merged model, which its folder is called too."""
        name = self.text(("name",), data.get("name"))
        if name is not None and not NAME.fullmatch(name):
            raise self.wrong(("name",), name, "the name of a folder: letters and digits, then also spaces and . _ -")
        return name

    def check_base(self, word: str, base: str | None, models: Mapping[int, ModelEntry]) -> None:
        """Refuse a base that mergekit would count among the models, or note that it is not counted here."""
        if word not in COUNTS_BASE or base is None or base in [entry.model for entry in models.values()]:
            return
        text = f"mergekit's {word} counts base_model as one more model"
        if word == "linear" or self.compat is not None:
            average = ", remove it, or write 'average', which takes only config and names from it"
            other = average if word == "linear" else ", or remove it"
            raise self.error(("base_model",), f"{text}: list it under models{other}.")
        self.notes[f"{text}, here it gives only config and names; list it under models if it is one."] = None

    def hoist(self, models: dict[int, ModelEntry], parameters: dict[str, Value]) -> None:
        """Move what the only model of a method of one model says to the parameters for all."""
        if self.method is None or self.method.models[1] != 1:
            return
        for t, entry in models.items():
            parameters |= {key: value for key, value in entry.parameters.items() if not self.known[key].per_model}
            own = {key: value for key, value in entry.parameters.items() if self.known[key].per_model}
            models[t] = entry.model_copy(update={"parameters": own})

    def departures(
        self, data: Mapping[str, Any], models: Mapping[int, ModelEntry], parameters: Mapping[str, Value]
    ) -> list[str]:
        """Say once how mergekit's numbers would differ, where the file could be one of mergekit's."""
        given = {*parameters, *data.get("parameters", ()), *(key for one in models.values() for key in one.parameters)}
        silent = self.compat is not None or not OWN_KEYS.isdisjoint(data)
        if self.method is None or self.method.mergekit is None or silent:
            return []
        if not self.method.departs_from_mergekit(given):
            return []
        return [f"{self.method_name} is the published form; `compat: mergekit` gives {self.method.mergekit.summary}."]

    def count(self, data: Mapping[str, Any], key: str) -> int:
        """Return how often something is done on the inputs that were kept with curvature; 0 where it is not."""
        value = data.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong((key,), value, "an integer at least 0")
        if not value or self.method is None:
            return value
        if key == "rounds" and self.method.curvature != "kronecker":
            problem = f"measure kronecker curvature again, which {self.method_name} does not use"
            raise self.error((key,), f"{key!r} {problem}; take epimer_kron.")
        if not self.method.needs_base:
            raise self.error(
                (key,), f"{key!r} is for methods with a base, and {self.method_name} needs none; take tsv."
            )
        return value

    @property
    def python_only(self) -> list[str]:
        """The method's parameters that no text can give: functions and mappings."""
        every = () if self.method is None else self.method.parameters
        return [parameter.name for parameter in every if parameter.kind in ("callable", "mapping")]

    def take_auto(self, data: dict[str, Any]) -> tuple[str, ...]:
        """Return which of merge_method and scale are to be chosen, and remove such a scale from `data`."""
        auto = [key for key in ("merge_method", "scale") if data.get(key) == AUTO]
        parameters = data.get("parameters")
        if isinstance(parameters, dict) and AUTO in (parameters.get("scale"), data.get("scale")):
            if ("scale" in data) + len({"scale", "lambda"} & parameters.keys()) > 1:
                raise self.error(("parameters",), TWICE)
            auto = list(dict.fromkeys([*auto, "scale"]))
            data["parameters"] = {key: value for key, value in parameters.items() if key != "scale"}
        if data.get("scale") == AUTO:
            del data["scale"]
        return tuple(auto)

    def basis(self, data: Mapping[str, Any]) -> str | None:
        """Return the folder of a basis that is to be used, where the method has one."""
        folder = self.text(("basis",), data.get("basis"))
        if folder is not None and "basis" not in self.known:
            raise self.error(("basis",), f"{self.method_name} is not merged in a basis; remove 'basis'.")
        if folder in ("tagged", "tensor", "full"):
            raise self.error(("basis",), f"{folder!r} is a kind of basis; it belongs under 'parameters'.")
        return folder

    def find_method(self, data: Mapping[str, Any]) -> Method:
        from epimer.methods.registry import all_methods, compatible_method, describe_method, unknown_method

        name = self.text(("merge_method",), data.get("merge_method"))
        if name is None:
            raise self.error((), f"the recipe has no 'merge_method'; {all_methods()}.")
        try:
            describe_method(name)
        except ParameterError:
            raise self.error(("merge_method",), unknown_method(name, AUTO)) from None
        self.compat = self.compat or self.text(("compat",), data.get("compat"))
        try:
            return compatible_method(name, self.compat)
        except ParameterError as error:
            raise self.error(("compat",) if "compat" in data else (), str(error)) from None

    def models(self, data: Mapping[str, Any], base: str | None) -> dict[int, ModelEntry]:
        """Return the models to merge by their position in the recipe; mergekit's recipes often list the base too."""
        raw = data.get("models")
        if not isinstance(raw, list) or not raw:
            raise self.wrong(("models",), raw, "a list of models: each a name or a path, or a mapping with 'model'")
        models = {t: self.entry(("models", t), item) for t, item in enumerate(raw)}
        for t, entry in list(models.items()):
            apart = self.needs_base or (self.method is not None and self.method.optional_base)
            if apart and entry.model == base:
                if entry.curvature:
                    remedy = f"which {self.method_name} does not merge; remove it from 'models'."
                    raise self.error(("models", t), f"models[{t}] is the base model, {remedy}")
                self.note_base(("models", t), entry.parameters)
                del models[t]
        if not models:
            raise self.error(("models",), "models lists only the base model; add the models to merge.")
        if (paths := data.get("curvature")) is None:
            return models
        if not isinstance(paths, list) or len(paths) != len(models):
            raise self.wrong(("curvature",), paths, f"a list with one path per model ({len(models)}), in their order")
        for (t, entry), (i, path) in zip(models.items(), enumerate(paths), strict=True):
            if entry.curvature is not None:
                raise self.error(("curvature",), f"curvature is given here and in models[{t}]; remove one of the two.")
            models[t] = entry.model_copy(update={"curvature": self.text(("curvature", i), path)})
        return models

    def note_base(self, path: Location, parameters: Mapping[str, Value]) -> None:
        """Note that the parameters of a base that is listed among the models change nothing."""
        if parameters:
            names = ", ".join(sorted(parameters))
            self.notes[f"{spell(path)} is the base model: its own {names} changes nothing, as in mergekit."] = None

    def slice_models(self, slices: tuple[Slice, ...], base: str | None) -> dict[int, ModelEntry]:
        """Return one entry for every source that a slice can have, with the models that stand there in turn."""
        each = [[source.model for source in self.merged(place, base)] for place in slices]
        if not any(each):
            raise self.error(("slices",), "slices list only the base model; add the models to merge.")
        turns = zip_longest(*each)
        return {i: ModelEntry(model=", ".join(dict.fromkeys(filter(None, turn)))) for i, turn in enumerate(turns)}

    def merged(self, place: Slice, base: str | None) -> list[Source]:
        """Return the sources of a slice without the base, where the method takes differences from it."""
        return [source for source in place.sources if not (self.needs_base and source.model == base)]

    def check_weights(
        self,
        parameters: dict[str, Value],
        models: Mapping[int, ModelEntry],
        slices: tuple[Slice, ...],
        base: str | None,
    ) -> None:
        """Refuse weights for some of the models that are merged and not for others."""
        remedy = "give every model a weight, or one for all in the recipe's 'parameters'."
        entries: dict[Location, bool] = {
            ("models", t): "weight" in entry.parameters | parameters for t, entry in models.items() if not slices
        }
        for k, place in enumerate(slices):
            for i, source in enumerate(self.merged(place, base)):
                entries["slices", k, "sources", i] = "weight" in source.parameters | place.parameters | parameters
        lacking = [path for path, weighted in entries.items() if not weighted]
        if 0 < len(lacking) < len(entries):
            raise self.error(lacking[0], f"{spell(lacking[0])} has no weight, others have one; {remedy}")

    @property
    def refused(self) -> dict[str, str]:
        """The parameters that a recipe cannot have, with the reason."""
        only = f"of {self.method_name} can be given only from Python, not in a recipe."
        strange = {key: text for key, text in NOT_OUR_PARAMETERS.items() if key not in self.known}
        return {name: f"{name!r} {only}" for name in self.python_only} | strange

    def own_parameters(self, path: Location, raw: Any, *, alone: bool = False) -> dict[str, Value]:
        """Return the parameters that one model has for itself; if it is `alone`, what holds for all is its own too."""
        alone = alone or (self.method is not None and self.method.models[1] == 1)
        own = [key for key, parameter in self.known.items() if alone or parameter.per_model]
        shared = {*self.python_only, *self.known, "rules", "lambda", "normalize"}.difference(own)
        refused = {key: f"{key!r} holds for all models; move it to the recipe's 'parameters'." for key in shared}
        strange = {key: text for key, text in NOT_OUR_PARAMETERS.items() if key not in own}
        values = self.mapping(path, self.accepted({} if raw is None else raw), own, refused | strange)
        return {key: self.value((*path, key), key, value) for key, value in values.items()}

    def entry(self, path: Location, raw: Any) -> ModelEntry:
        raw = {"model": raw} if isinstance(raw, str) else raw
        data = self.mapping(path, raw, ENTRY_KEYS, self.misplaced(path, ENTRY_KEYS))
        model = self.text((*path, "model"), data.get("model"))
        if model is None:
            raise self.error(path, f"{spell(path)} has no 'model'.")
        return ModelEntry(
            model=model,
            parameters=self.own_parameters((*path, "parameters"), data.get("parameters")),
            curvature=self.text((*path, "curvature"), data.get("curvature")),
            prefix=self.prefix((*path, "prefix"), data.get("prefix")),
        )

    def prefix(self, path: Location, raw: Any) -> dict[str, str]:
        """Return the prefixes of a model's names with what stands in their place in the base's; '' is one too."""
        pairs = {} if raw is None else raw
        if not isinstance(pairs, dict) or not all(isinstance(text, str) for pair in pairs.items() for text in pair):
            raise self.wrong(path, raw, "a mapping of the model's prefix to the base's, as {base_model.: ''}")
        return dict(pairs)

    def misplaced(self, path: Location, keys: Sequence[str]) -> dict[str, str]:
        """Return an error message for every parameter of a method that is no key of the mapping at `path`."""
        from epimer.methods.registry import list_methods

        names = {name for method in list_methods() for name in known_parameters(method)} | {"lambda", "normalize"}
        place = spell((*path, "parameters"))
        return {name: f"{name!r} is a parameter; move it to {place!r}." for name in names.difference(keys)}

    def accepted(self, raw: Any) -> Any:
        """Return parameters without those of mergekit that change no number, which are noted."""
        if not isinstance(raw, dict):
            return raw
        from epimer.methods.registry import MERGEKIT_LAMBDA

        ignored = dict(ACCEPTED)
        if self.compat is not None and self.method_name.removeprefix("mergekit_") not in MERGEKIT_LAMBDA:
            ignored["lambda"] = "lambda has no effect: mergekit ignores it in this method; scale has its effect."
        self.notes |= {text: None for key, text in ignored.items() if key in raw}
        without = {"rescale"} if "rescale" not in self.known and raw.get("rescale") in (False, 0) else set()
        return {key: value for key, value in raw.items() if key not in ignored and key not in without}

    def parameters(self, data: Mapping[str, Any], models: int) -> tuple[dict[str, Value], bool | None]:
        """Return the parameters for all models, and whether to normalise weights (mergekit's `normalize`)."""
        names = dict.fromkeys([*self.known, "lambda", "normalize"])
        where, of = ("parameters",), f" of {self.method_name}"
        raw = self.mapping(where, self.accepted(data.get("parameters", {})), names, self.refused, of)
        values: dict[Location, Any] = {("parameters", key): value for key, value in raw.items()}
        if "scale" in data:
            values["scale",] = data["scale"]
        normalize: bool | None = None
        parameters: dict[str, Value] = {}
        for path, value in values.items():
            name = "scale" if path[-1] == "lambda" else str(path[-1])
            if name in parameters:
                raise self.error(path, TWICE)
            if name == "normalize" and isinstance(value, bool | int | float) and value in (0, 1):
                normalize = bool(value)  # mergekit writes 1.0 for true
            elif name not in self.known:
                raise self.wrong(path, value, "true or false: whether weights are scaled to sum 1")
            else:
                parameters[name] = self.value(path, name, value)
                if self.known[name].kind == "numbers" and value is not None and len(value) != models:
                    raise self.wrong(path, value, f"a list with one number per model ({models})")
        return parameters, normalize

    def rules(self, raw: Any) -> tuple[tuple[str, str], ...]:
        if not isinstance(raw, list | dict):
            raise self.wrong(("rules",), raw, "a list of [pattern, rule] pairs, or a mapping of patterns to rules")
        pairs = [(key, [key, rule]) for key, rule in raw.items()] if isinstance(raw, dict) else list(enumerate(raw))
        from epimer.methods.options import RULES_PARAMETER

        return tuple(self.checked(("rules", key), RULES_PARAMETER, [pair])[0] for key, pair in pairs)

    def value(self, path: Location, name: str, raw: Any) -> Value:
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

    def filtered(self, path: Location, parameter: Parameter, raw: Any) -> Filtered:
        if "value" not in self.mapping(path, raw, ("filter", "value"), {}):
            raise self.error(path, f"{spell(path)} has no 'value'.")
        text = None if raw.get("filter") in ("*", "") else self.text((*path, "filter"), raw.get("filter"))
        return Filtered(filter=text, value=self.leaf((*path, "value"), parameter, raw["value"]))

    def leaf(self, path: Location, parameter: Parameter, raw: Any) -> Scalar | tuple[Word, ...]:
        """Return one value, or what it is over the layers: numbers, or words that are stepped through."""
        if not isinstance(raw, list):
            return self.checked(path, parameter, _spelled(parameter, raw))
        if not raw or None in raw:
            many = "or a list of such over the layers, or a list of {filter: ..., value: ...}"
            raise self.wrong(path, raw, f"{parameter.expected}, {many}")
        return tuple(self.checked((*path, i), parameter, _spelled(parameter, x)) for i, x in enumerate(raw))

    def checked(self, path: Location, parameter: Parameter, value: Any) -> Any:
        try:
            return parameter.check(self.method_name, value)
        except ParameterError as error:
            raise self.error(path, f"{spell(path)}: {error}" if len(path) > 2 else str(error)) from None
