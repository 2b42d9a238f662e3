"""The table of methods: one row each, from epimer itself, from other packages or from the user's own code.

A row says what a method needs, what it obeys and which options it takes; everything else is derived from it. This
module imports no torch: rows are loaded when the table is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from epimer.errors import EpimerWarning, ParameterError, nearest, short, warn
from epimer.geometry.kinds import SERVES
from epimer.methods.options import MethodOptions, Parameter, parameters_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from epimer.geometry.metric import Metric
    from epimer.geometry.solution import Solution
    from epimer.geometry.subspace import Basis, Tagged
    from epimer.methods.workspace import Workload

BUILT_IN = tuple(
    f"epimer.methods.{module}"
    for module in ("averaging", "pruning", "spherical", "selection", "spectral", "full_space", "frechet")
)
GROUP = "epimer.methods"
"""the entry points of other packages: each names a Method, or a list of them"""
ALIASES = {"linear": "average", "dare_linear": "dare"}
"""mergekit's name -> ours, where they are not the same"""
MERGEKIT = (
    "average", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare", "dare_ties",
    "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "sce", "ram", "ramplus_tl", "model_stock", "nearswap",
    "arcee_fusion", "passthrough",
)  # fmt: skip
"""the methods that mergekit 0.1.5 has too"""
MERGEKIT_LAMBDA = (
    "task_arithmetic", "ties", "dare", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear",
)  # fmt: skip
"""those of them that mergekit multiplies by `lambda`; it ignores that parameter elsewhere"""
COMPAT = ("mergekit",)
"""the programs whose numbers can be had where they differ from the papers'"""
RESERVED = ("auto", *ALIASES)
"""words that recipes give another meaning"""
ARGUMENTS = ("base", "models", "method", "weights", "weight", "lambda", "curvature", "device", "compat",
             "non_finite")  # fmt: skip
"""words that merge_state_dicts and recipes take themselves, so that no option can have them"""

NORMALIZE = ("normalize", "normalize_weights")
"""options that, if they are False, leave weights as given"""

OptionsT = TypeVar("OptionsT", bound=MethodOptions, default=Any)


@dataclass(frozen=True)
class Layer:
    """One tensor as a method sees it."""

    name: str
    deltas: list[Tensor]
    """task vectors, float32 or float64; m x n where the rule is matrix; LowRank in a method that is `factored`"""
    weights: list[float]
    """λ_t, summing to 1; as given for methods with absolute weights"""
    metrics: list[Metric] = field(default_factory=list)
    """each task's curvature, of a kind that the method accepts"""
    base_metric: Metric | None = None
    basis: Basis | None = None
    """a basis that was built ahead and is to be used for this tensor"""
    atoms: Tagged | None = None
    """the tagged basis of `Method.directions`, where it was found together with other layers'"""
    context: list[Any] | None = None
    """what the method's pre-pass found out about each model"""
    inputs: int = 1
    """the dimension of the stored tensor that the layer's inputs belong to: 1, or 0 for GPT-2's Conv1D"""
    base: Tensor | None = None
    """the base's tensor in the task vectors' precision, where the method `uses_base`; None where there is none"""
    whole_shape: tuple[int, int] | None = None
    """the tensor's own shape where `deltas` are small cores C_t of D_t = P C_t Qᵀ, P and Q with orthonormal columns"""

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the whole tensor's task vectors, which ranks and means of singular values are counted from."""
        return self.whole_shape or self.deltas[0].shape

    @property
    def inputs_first(self) -> bool:
        """Whether dimension 0 of the stored tensor belongs to the layer's inputs, by its name or by its curvature."""
        return not self.inputs or any(getattr(metric, "inputs", 1) == 0 for metric in self.metrics)


@dataclass(frozen=True)
class Prepass:
    """All tensors of the models, for what a method must know before its first tensor."""

    tensors: Callable[..., Iterator[tuple[str, Tensor | None, list[Tensor]]]]
    """iterate over name, base tensor and the models' tensors, as often as needed; with `entries=`, over blocks of rows
    of about so many entries where they can be read alone, which takes less memory and time"""
    weights: list[float]
    average: Callable[[list[float]], dict[str, Tensor]]
    """returns the models' average under given λ, as a state dict"""
    entries: int
    """how many entries `tensors` has in all, per model"""
    dtype: torch.dtype
    """the precision to compute in: float64 if any tensor is, else float32"""
    workers: int = 1
    """how many threads may work on it at once"""
    sample: Callable[[], Iterator[tuple[Tensor | None, list[Tensor]]]] | None = None
    """iterate over a small share of all entries, of the base and of the models; None where that costs as much as all"""


@dataclass(frozen=True)
class Prepared:
    """The result of a pre-pass: other weights, or a context of each model handed to every layer."""

    weights: list[float] | None = None
    """None where every tensor keeps its own"""
    context: list[Any] | None = None
    """one entry per model"""


def _never(options: MethodOptions) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Generic[OptionsT]):
    """One row of the registry."""

    name: str
    summary: str
    equation: str
    citation: str
    merge: Callable[[Layer, OptionsT], Solution]
    """returns the merged task vector of one layer; scale is applied by the caller"""
    options: OptionsT
    """the method's options at their defaults"""
    needs_base: bool = True
    uses_base: bool = False
    """looks at the base's own tensor, and not at task vectors alone"""
    optional_base: bool = False
    """merges task vectors where there is a base, which is then none of the models, and else the models themselves"""
    ignores_base: bool = False
    """merges the models themselves even where there is a base, of which the output gets config and names"""
    models: tuple[int, int | None] = (1, None)
    """the fewest and the most models it merges, the base apart"""
    curvature: str | None = None
    """diagonal, kronecker, samples, task-gram (needs no data) or None"""
    accepts: tuple[str, ...] = ()
    """kinds of measured curvature it can work with; by default only `curvature` itself"""
    elementwise: bool = False
    """acts on every floating-point tensor entry by entry, instead of on matrices"""
    separable: bool = False
    """merges each entry independently of the tensor's others, so that a tensor can be merged in parts"""
    absolute_weights: bool = False
    """uses the weights as given, instead of scaled to sum 1"""
    sums_models: bool = False
    """with mergekit's `normalize: false`, adds up the models themselves under the weights as given"""
    linear_in_scale: bool = True
    """its merged delta is proportional to `scale`, so that one merge gives those at all scales"""
    caution: Callable[[OptionsT], str] | None = None
    """returns what to warn of before a merge with some options; nothing where all is well"""
    sweep: bool = False
    """a sweep tries it by default"""
    forecast: bool = False
    """a diagnosis forecasts it by default"""
    default_for: tuple[str, ...] = ()
    """kinds of measured curvature that it is taken for where no method is named"""
    advised_without_data: bool = False
    """a diagnosis advises it where no two-sided curvature was measured; it is taken where no method is named"""
    prepare: Callable[[Prepass, OptionsT], Prepared] | None = None
    passes: int = 1
    """how often the pre-pass reads float32 models, as a rule"""
    whole_model: frozenset[str] = frozenset()
    """options that the pre-pass reads, so that they cannot differ between tensors"""
    workspace: tuple[float, float] | Callable[[Workload], int] = (0.0, 4.0)
    """memory of a merge apart from its task vectors and curvature: tensors per model and tensors in any case, or a
    function of a tensor's size and options that returns bytes"""
    sweeps: int = 1
    """how often it goes over each task vector, where the workspace is not a function; for the time it takes"""
    selects: int = 0
    """how often a k-th largest entry of each task vector is searched for, which counts for the time it takes"""
    sorts: int = 0
    """how often the rows of each task vector are sorted"""
    draws: int = 0
    """how many random numbers are drawn for every entry of each task vector"""
    squares: bool = False
    """tensors of the workspace have the longer side twice"""
    factored: bool = False
    """takes task vectors of low rank as they are, where its basis is not the full space"""
    equivariant: bool = False
    """merges P C_t Qᵀ to P (merge of C_t) Qᵀ for P and Q with orthonormal columns, given `Layer.shape`; task vectors of
    low rank are then merged in the small space that their factors span"""
    bounded_rank: Callable[[OptionsT], bool] = _never
    """whether, with some options, a merge has no other columns than its task vectors have (no other rows where inputs
    are stored first), so that its rank is at most the sum of theirs"""
    directions: Callable[[OptionsT, Sequence[int], int], int] | None = None
    """with some options, for a shape and a number of models: how many singular vectors of each model a merge begins
    with, as a tagged basis, 0 for none; on a GPU those of many layers are found at once and given as `Layer.atoms`"""
    merge_stack: Callable[[Sequence[Layer], OptionsT], list[Solution | None]] | None = None
    """merges layers of one shape at once, with their `atoms`, as a GPU likes it; None stands for a layer that needs
    more care, which `merge` has"""
    laws: frozenset[str] = frozenset()
    """which of the laws in epimer.testing it obeys at its defaults"""
    counts_models: bool = False
    """whether a model counts as one of T however small its weight, so that the merge at a weight near 0 is not the
    merge without that model"""
    mergekit: Method | None = None
    """the row that gives the numbers of mergekit 0.1.5, where they are others; its summary says how they differ"""

    def weight_caution(self, weights: Sequence[float]) -> str | None:
        """Return a warning if a model has a tiny weight and yet counts as one of the models, else None."""
        total = sum(abs(weight) for weight in weights)
        tiny = [t for t, weight in enumerate(weights) if 0 < abs(weight) * len(weights) < TINY_WEIGHT * total]
        if not self.counts_models or not tiny:
            return None
        return (
            f"models[{tiny[0]}] has next to no weight, but {self.name} counts it as one of {len(weights)} models all "
            "the same; give it weight 0 to leave it out."
        )

    @property
    def needs_curvature(self) -> bool:
        """Whether a merge needs curvature that was measured on data."""
        return self.curvature not in (None, "task-gram")

    @property
    def needs_function(self) -> bool:
        """Whether an option is a Python function, which recipes, sweeps and forecasts cannot give."""
        return any(parameter.kind == "callable" for parameter in self.parameters)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The options with their types, ranges, defaults and meanings: scale, the method's own, rules, seed."""
        return parameters_of(self.options)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options' default values, by name."""
        return self.values(self.options)

    def values(self, options: OptionsT) -> dict[str, Any]:
        """Return the values of options by name, in the order of `parameters`."""
        return {parameter.name: getattr(options, parameter.name) for parameter in self.parameters}

    def resolve(self, given: Mapping[str, Any]) -> OptionsT:
        """Return the method's options with the given values, each checked; the rest are at their defaults."""
        known = {parameter.name: parameter for parameter in self.parameters}
        if unknown := [name for name in given if name not in known]:
            hint = nearest(unknown[0], known)
            raise ParameterError(f"{self.name} has no parameter {unknown[0]!r}.{hint} It takes: {', '.join(known)}.")
        checked = {name: known[name].check(self.name, given[name]) for name in known if name in given}
        try:
            return replace(self.options, **checked)
        except ParameterError as error:  # options that do not go together
            raise ParameterError(f"{self.name}: {error}") from None

    def options_of(self, options: OptionsT, models: Sequence[int]) -> OptionsT:
        """Return the options of a merge of some of the models: lists with one entry per model have theirs alone."""
        values = self.values(options)
        names = [p.name for p in self.parameters if p.one_per_model and isinstance(values[p.name], list)]
        kept: dict[str, Any] = {name: [values[name][t] for t in models] for name in names}
        return replace(options, **kept)

    def weights_as_given(self, options: OptionsT) -> bool:
        """Whether weights are used as given, by the method itself or because its `normalize` is off."""
        return self.absolute_weights or any(getattr(options, name, None) is False for name in NORMALIZE)

    @property
    def normalizes(self) -> bool:
        """Whether it has an option by which it takes a mean or a sum, so that mergekit's `normalize` is for it."""
        return isinstance(self.defaults.get("normalize"), bool)

    def check_models(self, weights: Sequence[float]) -> None:
        """Refuse to merge fewer models than the method can, or more of those that have a weight."""
        (fewest, most), count = self.models, sum(1 for weight in weights if weight) or len(weights)
        if len(weights) >= fewest and (most is None or count <= most):
            return
        amount = f"exactly {fewest}" if fewest == most else f"at least {fewest}" if most is None else f"at most {most}"
        noun = "model" if (most or fewest) == 1 else "models"
        where = " with the base" if self.needs_base and most == 1 else ""
        remedy = "; take one of them as the base." if where and count == 2 else "."
        raise ParameterError(f"{self.name} merges {amount} {noun}{where}, and there are {count}{remedy}")

    def departs_from_mergekit(self, given: Collection[str]) -> bool:
        """Whether mergekit has other numbers, if the options in `given` are the same in both."""
        if self.mergekit is None:
            return False
        others = {name for name, value in self.mergekit.defaults.items() if self.defaults.get(name, value) != value}
        return self.mergekit.merge is not self.merge or not others <= set(given)

    @property
    def accepted(self) -> tuple[str, ...]:
        """All kinds of measured curvature it can work with: those of its row, and those that may stand in for one."""
        own = self.accepts or ((self.curvature,) if self.curvature is not None and self.needs_curvature else ())
        return tuple(dict.fromkeys((*own, *(kind for kind, served in SERVES.items() if set(served) & set(own)))))

    def takes(self, kind: str | None) -> bool:
        """Whether curvature of a kind, known in the full space, is what the method needs, if it needs any."""
        return not self.needs_curvature or (kind in self.accepted and kind != "projected")

    def check_kind(self, kind: str | None) -> None:
        """Refuse to go on where the method needs curvature and this is not the kind."""
        if not self.takes(kind):
            have = "there is none" if kind is None else f"there is {kind}"
            remedy = f"measure it, or leave {self.name} out"
            raise ParameterError(f"{self.name} needs {self.curvature} curvature, and {have}; {remedy}.")

    def __str__(self) -> str:
        needs = ["a base model"] * self.needs_base + [f"{self.curvature} curvature"] * self.needs_curvature
        lines = [
            f"{self.name}: {self.summary}",
            f"  equation  {self.equation}",
            f"  needs     {' and '.join(needs) or 'only the models'}",
            f"  citation  {self.citation}",
        ]
        if self.counts_models:
            lines.append(f"  weights   {COUNTS_MODELS}")
        lines.append("  parameters")
        lines += [f"    {p.name:<16} {p.default!r:<12} {p.meaning} ({p.expected})" for p in self.parameters]
        return "\n".join(lines)


COUNTS_MODELS = "a model counts as one of T however small its weight is; only weight 0 leaves it out"
TINY_WEIGHT = 0.01  # of an equal share

_METHODS: dict[str, Method] = {}
"""filled when it is first used: epimer's own in the order they are documented, then those of others"""
_ORIGINS: dict[str, str] = {}
"""the package or module of every method that is not epimer's own"""
_LOCK = RLock()


def _methods() -> dict[str, Method]:
    with _LOCK:
        if not _METHODS:  # a package may ask for methods while its own are loaded
            own = [method for module in BUILT_IN for method in import_module(module).METHODS]
            rows = [row for method in own for row in (method, method.mergekit) if row is not None]
            _METHODS.update((row.name, row) for row in rows)
            for point in entry_points(group=GROUP):
                _load(point)
        return _METHODS


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist is not None else point.value
    try:
        loaded = point.load()
        for method in loaded if isinstance(loaded, Sequence) else [loaded]:
            _add(method, package)
    except Exception as error:
        reason = short(error) if not isinstance(error, ParameterError) else str(error).rstrip(".")
        text = f"methods of the package {package} (entry point {point.name!r}) are left out: {reason}."
        warn(EpimerWarning(text))


def _add(method: Method, origin: str) -> None:
    """Add a method, or raise why it cannot be added."""
    with _LOCK:
        _check_row(method)
        if method.name in _methods():
            first = _ORIGINS.get(method.name, "epimer")
            raise ParameterError(
                f"There are two methods {method.name!r}: one from {first}, one from {origin}; rename one of them."
            )
        _METHODS[method.name], _ORIGINS[method.name] = method, origin


def _check_row(method: Any) -> None:
    """Refuse what is not a method, and names that mean something else."""
    if not isinstance(method, Method):
        raise ParameterError(f"A method is registered as an epimer.Method. Got {short(method)} instead.")
    if not isinstance(method.options, MethodOptions):
        raise ParameterError(f"The options of {method.name} must be an instance of a subclass of MethodOptions.")
    if not method.name.isidentifier() or method.name in RESERVED:
        raise ParameterError(
            f"A method cannot be called {method.name!r}; take a Python name, not {', '.join(RESERVED)}."
        )
    if taken := [one.name for one in fields(method.options) if one.name in ARGUMENTS]:
        raise ParameterError(f"An option of {method.name} cannot be called {taken[0]!r}: a merge has that argument.")
    if not all(parameter.meaning for parameter in method.parameters):  # derives them all, and so checks their types
        raise ParameterError(f"Every option of {method.name} needs a help text.")


def register_method(method: Method) -> Method:
    """Add a method under its name; recipes, commands, sweeps, forecasts and benches then know it.

    Another package does the same with an entry point of the group "epimer.methods" that names a `Method`.
    `epimer.testing.check_laws(method)` checks what its row claims.
    """
    _add(method, getattr(getattr(method, "merge", None), "__module__", "unknown"))
    return method


def unregister_method(name: str) -> None:
    """Remove a method that was added by `register_method`."""
    with _LOCK:
        if name not in added_methods():
            raise ParameterError(f"{short(name)} was not added by register_method, so it cannot be removed.")
        del _METHODS[name], _ORIGINS[name]


def list_methods() -> list[str]:
    """Return the names of all merging methods; those of other programs' forms of them (`Method.mergekit`) apart."""
    forms = {row.mergekit.name for row in _methods().values() if row.mergekit is not None}
    return [name for name in _methods() if name not in forms]


def added_methods() -> list[str]:
    """Return the names of the methods that other packages or the user's code added."""
    return [name for name in _methods() if name in _ORIGINS]


def is_installed(name: str) -> bool:
    """Whether a method is epimer's own or an installed package's, so that another process finds it by its name."""
    packages = {point.dist.name for point in entry_points(group=GROUP) if point.dist is not None}
    return name not in _ORIGINS or _ORIGINS[name] in packages


def describe_method(name: str) -> Method:
    """Return a method's row: its parameters, needs, equation and citation. mergekit's names are known too."""
    table = _methods()
    if not isinstance(name, str) or ALIASES.get(name, name) not in table:
        raise ParameterError(unknown_method(name))
    return table[ALIASES.get(name, name)]


def unknown_method(name: object, *more: str) -> str:
    """Return an error message for an unknown method, with the nearest known name or name among `more`."""
    hint = nearest(name, [*_methods(), *ALIASES, *more]) if isinstance(name, str) else ""
    return f"There is no method {short(name)}.{hint} {all_methods()}."


def all_methods() -> str:
    """Return how to list all methods, for error messages."""
    return f"`epimer methods` lists all {len(list_methods())}"


def compatible_method(name: str, compat: str | None) -> Method:
    """Return a method's row, or the one that gives the numbers of another program: `compat` is mergekit or None."""
    row = describe_method(name)
    if compat is None:
        return row
    if compat not in COMPAT:
        raise ParameterError(f"compat must be one of {', '.join(COMPAT)}. Got {short(compat)} instead.")
    forms = {one.mergekit for one in _methods().values()}
    if row.name not in MERGEKIT and row not in forms:
        raise ParameterError(f"compat: {compat} has no meaning to {row.name}, which {compat} does not have; remove it.")
    return row.mergekit or row


def with_mergekit_form(row: Method[OptionsT], differences: str, **changes: Any) -> Method[OptionsT]:
    """Return a row that knows its form in mergekit: the same but for `changes`, which `differences` tells in words."""
    summary = f"{row.name} as mergekit 0.1.5 has it: {differences}"
    same = {"sweep": False, "forecast": False, "advised_without_data": False}
    return replace(row, mergekit=replace(row, name=f"mergekit_{row.name}", summary=summary, **same | changes))


def default_method(kind: str | None) -> str:
    """Return the method to take where none is named, by the kind of curvature there is, if any."""
    kinds = {kind, *SERVES.get(kind or "", ())}
    for row in _methods().values():
        if row.advised_without_data if kind is None else kinds & set(row.default_for):
            return row.name
    raise ParameterError(f"no method is the default for {kind} curvature; name one of {', '.join(list_methods())}.")


def default_sweep(kind: str | None) -> list[str]:
    """Return the methods a sweep tries by default: those without data, then those that take this curvature."""
    return _defaults([row for row in _methods().values() if row.sweep], kind)


def default_forecasts(kind: str | None) -> list[str]:
    """Return the methods a diagnosis forecasts by default: those without data, then those that take this curvature."""
    return _defaults([row for row in _methods().values() if row.forecast], kind)


def _defaults(rows: list[Method], kind: str | None) -> list[str]:
    free = [row.name for row in rows if not row.needs_curvature]
    return free + [row.name for row in rows if row.needs_curvature and row.takes(kind)]
