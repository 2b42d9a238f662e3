"""The table of methods: for each its parameters, what it needs, its equation and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from epimer.errors import ParameterError, nearest, short
from epimer.geometry.linalg import Delta
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import Subspace
from epimer.methods.rules import RULES

BASES = ("tagged", "tensor", "full")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method: its type, its range, its default and what it means."""

    name: str
    kind: str
    """number, integer, choice, numbers, callable, mapping, basis or rules"""
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
    def expected(self) -> str:
        """Say what a valid value is."""
        if self.kind == "choice":
            text = "one of " + ", ".join(repr(choice) for choice in self.choices)
        elif self.kind in ("number", "integer"):
            noun = "a finite number" if self.kind == "number" else "an integer"
            above = "" if self.low is None else f" {'greater than' if self.open_low else 'at least'} {self.low:g}"
            below = "" if self.high is None else f"{' and' if above else ''} at most {self.high:g}"
            text = noun + above + below
        else:
            text = {
                "numbers": "a list of numbers, one per model, none negative",
                "callable": "a function that takes a state dict and returns a score (higher is better)",
                "mapping": "a mapping from tensor names to epimer.Diagonal",
                "basis": "'tagged', 'tensor', 'full' or a mapping from tensor names to bases (epimer.build_basis)",
                "rules": "a list of (name pattern, rule) pairs with rules " + ", ".join(RULES),
            }[self.kind]
        return (
            text
            + (", or a list of them, one per model" if self.per_model else "")
            + (" or None" if self.optional else "")
        )

    def check(self, method: str, value: Any) -> Any:
        """Return `value` as a plain number, list or object if it is valid, else say what is expected."""
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
        match self.kind:
            case "number":
                return float(value)
            case "integer":
                return int(value)
            case "numbers":
                return [float(x) for x in value]
        return value

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


@dataclass(frozen=True)
class Layer:
    """One tensor as a method sees it."""

    name: str
    deltas: list[Tensor]
    """task vectors, float32 or float64; m x n where the rule is matrix; LowRank in a method that is `factored`"""
    weights: list[float]
    """λ_t, summing to 1; as given for methods with absolute weights"""
    metrics: list[Metric] = field(default_factory=list)
    base_metric: Metric | None = None
    basis: Subspace | None = None
    """a basis the caller fixed for this tensor"""
    context: Any = None
    """what the method's pre-pass found"""


@dataclass(frozen=True)
class Outcome:
    """A merged task vector and how it came about."""

    delta: Delta
    status: str = "exact"
    residual: float = 0.0
    eta: float | None = None
    rank: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Prepass:
    """The whole model, for what a method must know before its first tensor."""

    tensors: Callable[[], Iterator[tuple[str, Tensor | None, list[Tensor]]]]
    """iterate over name, base tensor and the models' tensors, as often as needed"""
    weights: list[float]
    average: Callable[[list[float]], dict[str, Tensor]]
    """the models' average under given λ, as a state dict"""
    entries: int
    """how many entries `tensors` has in all, per model"""
    dtype: torch.dtype
    """the precision to compute in: float64 if any tensor is, else float32"""
    workers: int = 1
    """how many threads may work on it at once"""


@dataclass(frozen=True)
class Prepared:
    """What a pre-pass found: other weights, or a context handed to every layer."""

    weights: list[float] | None = None
    """None where every tensor keeps its own"""
    context: Any = None


@dataclass(frozen=True)
class Method:
    """One row of the registry."""

    name: str
    summary: str
    equation: str
    citation: str
    merge: Callable[[Layer, Any], Outcome]
    parameters: tuple[Parameter, ...]
    needs_base: bool
    curvature: str | None = None
    """diagonal, kronecker, samples, task-gram (needs no data) or None"""
    elementwise: bool = False
    """acts on every floating-point tensor entry by entry, instead of on matrices"""
    entrywise: bool = False
    """merges each entry without a look at the tensor's other ones, so that a part can be merged alone"""
    absolute_weights: bool = False
    """uses the weights as given, instead of scaled to sum 1"""
    prepare: Callable[[Prepass, Any], Prepared] | None = None
    passes: int = 1
    """how often the pre-pass reads float32 models"""
    whole_model: frozenset[str] = frozenset()
    """parameters that the pre-pass reads, so that they cannot differ between tensors"""
    workspace: tuple[float, float] = (0.0, 4.0)
    """memory a merge was measured to take beside its task vectors: tensors per model, and tensors in any case"""
    squares: bool = False
    """forms matrices of the longer side squared, so that its workspace grows with the tensor's aspect ratio"""
    factored: bool = False
    """takes task vectors of low rank as they are, where its basis is not the full space"""
    laws: frozenset[str] = frozenset()
    """which of the laws in tests/laws it obeys at its defaults"""

    @property
    def needs_curvature(self) -> bool:
        """Whether a merge needs curvature that was measured on data."""
        return self.curvature not in (None, "task-gram")

    def resolve(self, given: Mapping[str, Any]) -> Any:
        """Return all parameters as attributes, the given ones checked, the rest at their defaults."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                raise ParameterError(
                    f"{self.name} has no parameter {name!r}.{nearest(name, known)} It takes: {', '.join(known)}."
                )
        return SimpleNamespace(
            **{
                name: parameter.check(self.name, given[name]) if name in given else parameter.default
                for name, parameter in known.items()
            }
        )

    def __str__(self) -> str:
        needs = [
            "a base model" if self.needs_base else "",
            f"{self.curvature} curvature" if self.needs_curvature else "",
        ]
        lines = [
            f"{self.name}: {self.summary}",
            f"  equation  {self.equation}",
            f"  needs     {' and '.join(filter(None, needs)) or 'only the models'}",
            f"  citation  {self.citation}",
            "  parameters",
        ]
        lines += [f"    {p.name:<16} {p.default!r:<12} {p.meaning} ({p.expected})" for p in self.parameters]
        return "\n".join(lines)


_HOMES = ("epimer.methods.averaging", "epimer.methods.spectral", "epimer.methods.frechet")


@cache
def methods() -> dict[str, Method]:
    """Return the registry, in the order the methods are documented."""
    table: dict[str, Method] = {}
    for module in _HOMES:
        for method in import_module(module).METHODS:
            assert method.name not in table, f"method {method.name!r} is registered twice"
            table[method.name] = method
    return table


def list_methods() -> list[str]:
    """Return the names of all merging methods."""
    return list(methods())


def describe_method(name: str) -> Method:
    """Return what there is to know of a method: parameters, needs, equation, citation."""
    table = methods()
    if not isinstance(name, str) or name not in table:
        hint = nearest(name, table) if isinstance(name, str) else ""
        raise ParameterError(f"There is no method {short(name)}.{hint} Methods: {', '.join(table)}.")
    return table[name]


def each(value: Any, tasks: int) -> list[Any]:
    """Return a parameter's value for every model."""
    return list(value) if isinstance(value, list | tuple) else [value] * tasks


def scale(low: float | None = None) -> Parameter:
    """Return the parameter every method has: the paper's α."""
    return Parameter("scale", "number", 1.0, "multiplies the merged delta, the paper's α; 0 returns the base", low=low)


CHOSEN = "epimer_free"
RULES_PARAMETER = Parameter(
    "rules", "rules", (), "which tensors are matrix, average, fisher, copy or skip, by name pattern"
)
COMMON = (
    RULES_PARAMETER,
    Parameter("seed", "integer", 0, "seed of whatever is random in the method", low=0),
)
