"""Options of methods: typed dataclasses, from whose annotations names, ranges, error messages and docs are derived."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from inspect import get_annotations
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from epimer.errors import ParameterError, nearest, short
from epimer.methods.rules import RULES

BASES = ("tagged", "tensor", "full")
SIMPLE = {float: "number", int: "integer", bool: "boolean", list: "numbers", Callable: "callable", Mapping: "mapping"}
Rules = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Option:
    """What the type of an option does not say: its meaning and its range."""

    help: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """`low` itself is not valid"""
    per_model: bool = False
    """a list with one value per model is valid too"""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The options that every method has; a method's own are those of a subclass, a frozen dataclass too.

    A field is annotated with its type and an `Option`: ``Annotated[float, Option("share kept", low=0, high=1)]``.
    Types are float, int, bool, a Literal of strings, list[float] (one per model), a Callable or a Mapping; ``| None``
    makes None valid.
    """

    scale: Annotated[float, Option("multiplies the merged delta, the paper's α; 0 returns the base")] = 1.0
    rules: Annotated[Rules, Option("which tensors are matrix, average, fisher, copy or skip, by name pattern")] = ()
    seed: Annotated[int, Option("seed of whatever is random in the method", low=0)] = 0


@dataclass(frozen=True)
class Parameter:
    """One option of a method: its type, its range, its default and what it means."""

    name: str
    kind: str
    """number, integer, boolean, choice, numbers, callable, mapping, basis or rules"""
    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    choices: tuple[str, ...] = ()
    optional: bool = False
    """None is a valid value"""
    per_model: bool = False
    """a list with one value per model is valid too"""

    @property
    def one_per_model(self) -> bool:
        """Whether a list as its value has one entry per model."""
        return self.per_model or self.kind == "numbers"

    @property
    def expected(self) -> str:
        """What a valid value is, in words."""
        if self.kind == "choice":
            text = "one of " + ", ".join(repr(choice) for choice in self.choices)
        elif self.kind in ("number", "integer"):
            noun = "a finite number" if self.kind == "number" else "an integer"
            above = "" if self.low is None else f" {'greater than' if self.open_low else 'at least'} {self.low:g}"
            below = "" if self.high is None else f"{' and' if above else ''} at most {self.high:g}"
            text = noun + above + below
        else:
            text = {
                "boolean": "True or False",
                "numbers": "a list of numbers, one per model, none negative",
                "callable": "a function that takes a state dict and returns a score (higher is better)",
                "mapping": "a mapping from tensor names to epimer.Diagonal",
                "basis": "'tagged', 'tensor', 'full' or a mapping from tensor names to bases (epimer.build_basis)",
                "rules": "a list of (name pattern, rule) pairs with rules " + ", ".join(RULES),
            }[self.kind]
        several = ", or a list of them, one per model" if self.per_model else ""
        return text + several + (" or None" if self.optional else "")

    def check(self, method: str, value: Any) -> Any:
        """Return `value` as a plain number, list or object if it is valid; raise what is expected if it is not."""
        if value is None and self.optional:
            return None
        if self.kind == "rules" and isinstance(value, list | tuple):
            for pair in value:
                if not _is_rule(pair):
                    known = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], str)
                    raise self._refusal(method, pair, nearest(pair[1], RULES) if known else "")
            return [tuple(pair) for pair in value]
        if self.per_model and isinstance(value, list | tuple):
            return [replace(self, per_model=False).check(method, item) for item in value]
        if not self._fits(value):
            choices = self.choices or (BASES if self.kind == "basis" else ())
            raise self._refusal(method, value, nearest(value, choices) if isinstance(value, str) else "")
        if self.kind == "numbers":
            return [float(x) for x in value]
        convert = {"number": float, "integer": int}.get(self.kind)
        return value if convert is None else convert(value)

    def _refusal(self, method: str, value: Any, hint: str) -> ParameterError:
        return ParameterError(
            f"The {self.name!r} parameter of {method} must be {self.expected}. Got {short(value)} instead.{hint}"
        )

    def _fits(self, value: Any) -> bool:
        match self.kind:
            case "choice":
                return isinstance(value, str) and value in self.choices
            case "number":
                return is_number(value) and self._in_range(float(value))
            case "integer":
                return isinstance(value, Integral) and is_number(value) and self._in_range(float(value))
            case "boolean":
                return isinstance(value, bool)
            case "numbers":
                return isinstance(value, Sized) and all(is_number(x) and x >= 0 for x in value)  # type: ignore[attr-defined]
            case "callable":
                return callable(value)
            case "basis":
                return isinstance(value, Mapping) or (isinstance(value, str) and value in BASES)
            case "mapping":
                return isinstance(value, Mapping)
            case _:  # rules, checked pair by pair
                return False

    def _in_range(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        return self.high is None or value <= self.high


def parameters_of(options: MethodOptions) -> tuple[Parameter, ...]:
    """Return the parameters that an instance of options describes, its values being the defaults.

    The order is scale, the method's own (a subclass before its parents), rules, seed.
    """
    hints = get_type_hints(type(options), include_extras=True)
    classes = [one for one in type(options).__mro__ if issubclass(one, MethodOptions) and one is not MethodOptions]
    own = [name for one in classes for name in get_annotations(one)]
    names = dict.fromkeys(["scale", *(name for name in own if name not in ("rules", "seed")), "rules", "seed"])
    return tuple(_parameter(name, hints[name], getattr(options, name)) for name in names)


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    option = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Option)), None)
    if option is None:
        raise ParameterError(f"The option {name!r} must be annotated as Annotated[type, epimer.Option(help)].")
    plain = get_args(hint)[0]
    types = list(get_args(plain)) if get_origin(plain) in (Union, UnionType) else [plain]
    optional = type(None) in types
    implied = (type(None), list[float] if option.per_model else None)
    kind, choices = _kind(name, [one for one in types if one not in implied])
    return Parameter(
        name, kind, default, option.help, option.low, option.high, option.open_low, choices, optional, option.per_model
    )


def _kind(name: str, types: list[Any]) -> tuple[str, tuple[str, ...]]:
    """Return a parameter's kind and its choices, from the types it may have."""
    origins = [get_origin(one) or one for one in types]
    if origins == [Literal]:
        return "choice", get_args(types[0])
    if types == [Rules]:
        return "rules", ()
    if origins == [Literal, Mapping]:
        return "basis", ()
    if len(origins) != 1 or origins[0] not in SIMPLE:
        raise ParameterError(f"The type of the option {name!r} is not one that options can have (see MethodOptions).")
    return SIMPLE[origins[0]], ()


def _is_rule(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and pair[1] in RULES


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number, and not a bool."""
    if not isinstance(value, Real) or value is True or value is False:
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def per_model(value: Any, tasks: int) -> list[Any]:
    """Return an option's value for every model."""
    return list(value) if isinstance(value, list | tuple) else [value] * tasks


RULES_PARAMETER = next(parameter for parameter in parameters_of(MethodOptions()) if parameter.name == "rules")
