"""Try many settings cheaply: one merge per method and rank serves every scale, and nothing is written.

The settings are chosen on validation data and the chosen ones reported on test data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from epimer.diagnosis.fitting import check_kind, find_method
from epimer.errors import ParameterError
from epimer.evaluation.statistics import Scores
from epimer.geometry.metric import Metric
from epimer.geometry.subspace import pairs
from epimer.methods.merge import build_basis, merge_state_dicts
from epimer.methods.registry import Method
from epimer.records import SweepRecord, Trial

SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
METHODS = ("average", "tsv", "iso_c", "epimer_free")
CURVED = {
    "diagonal": ("fisher", "epimer"),
    "kronecker": ("regmean", "epimer_kron"),
    "ekfac": ("epimer_kron",),
    "samples": ("epimer_exact",),
}
STEPS = 20  # of conjugate gradients while settings are compared

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Judged:
    """How a model does on one split."""

    scores: Mapping[str, Tensor]
    """task -> every sample's score, or one number; higher is better"""
    kl: Mapping[str, float] = field(default_factory=dict)
    """task -> mean KL from the task's own model's predictions, where it was asked for"""
    unit: str = "accuracy"
    """what scores are: accuracy, loss or perplexity (minus the loss), or score"""

    def __post_init__(self) -> None:
        for task, scores in self.scores.items():
            if not scores.numel() or not bool(scores.isfinite().all()):
                what = "no score" if not scores.numel() else "a score that is not finite"
                raise ParameterError(f"the merge got {what} on {task!r}; a sweep needs finite numbers to choose by.")

    @property
    def all(self) -> Scores:
        """The scores of all tasks."""
        return Scores(list(self.scores.values()))

    @property
    def order(self) -> tuple[float, float]:
        """What settings are compared by: the average score, then closeness."""
        return self.all.average, -sum(self.kl.values())


Evaluate = Callable[[State, str], Judged]
"""(state dict, "val" or "test") -> scores"""
Way = tuple[str, int | None, Callable[[float], State]]
"""a method, its rank, and its merge at any scale"""


@dataclass(frozen=True)
class Tried:
    """One setting and what it scored."""

    method: str
    rank: int | None
    scale: float
    validation: Judged
    test: Judged | None = None
    """where it is the best of its method and rank"""

    def record(self) -> Trial:
        """Return the record of it."""
        kl = sum(self.validation.kl.values()) / len(self.validation.kl) if self.validation.kl else None
        trial = Trial(
            self.method, self.scale, self.validation.all.average, rank=self.rank, unit=self.validation.unit, kl=kl
        )
        if self.test is None:
            return trial
        scores = self.test.all
        known = any(values.numel() > 1 for values in self.test.scores.values())
        low, high = scores.interval() if known else (None, None)
        tasks = dict(zip(self.test.scores, scores.accuracies, strict=True))
        return replace(trial, average=scores.average, low=low, high=high, worst=scores.worst, tasks=tasks)


@dataclass(frozen=True)
class Sweep:
    """All settings that were tried."""

    tried: list[Tried]
    evaluation: str
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Tried:
        """The best on validation data."""
        return max(self.finalists, key=lambda one: one.validation.order)

    @property
    def finalists(self) -> list[Tried]:
        """The best of every method and rank."""
        return [one for one in self.tried if one.test is not None]

    def record(self) -> SweepRecord:
        """Return the record of it."""
        return SweepRecord(self.evaluation, [one.record() for one in self.tried], self.best.record(), self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON-ready values."""
        return self.record().to_dict()


def sweep(
    base: State,
    models: Sequence[State],
    evaluate: Evaluate,
    *,
    methods: Sequence[str] | None = None,
    scales: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    curvature: Sequence[Mapping[str, Metric]] | None = None,
    weights: Sequence[float] | None = None,
    rules: Sequence[tuple[str, str]] = (),
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    evaluation: str = "a function",
    progress: Callable[[str], None] = lambda done: None,
) -> Sweep:
    """Merge in every way, take each one's best scale on validation data, and report that on test data.

    Args:
        base: the ancestor.
        models: the fine-tuned models.
        evaluate: scores a state dict on "val" or "test".
        methods: by name; None takes average, tsv, iso_c, epimer_free and those that use the curvature.
        scales: all are tried; None climbs from 1 along a grid until two in a row are worse.
        ranks: directions per task, for methods that have them; None takes each method's own.
        curvature: as in `merge_state_dicts`.
        weights: one per model.
        rules: which tensors are merged how.
        parameters: method -> parameters it is merged with.
        evaluation: what to call the evaluation.
        progress: called with a line after every setting.
    """
    kind = None if curvature is None else next((m.kind for one in curvature for m in one.values()), None)
    rows = check_methods(methods, kind)
    bases: dict[int | None, dict[str, Any]] = {}

    def ways() -> Iterator[Way]:
        for row in rows:
            named = {parameter.name: parameter for parameter in row.parameters}
            for rank in (ranks or (None,)) if "rank" in named else (None,):
                given: dict[str, Any] = {**(parameters or {}).get(row.name, {})}
                if rank is not None:
                    given["rank"] = rank
                if "iterations" in named:
                    given.setdefault("iterations", STEPS)
                shape = str(given.get("basis", named["basis"].default)) if "basis" in named else ""
                if shape in ("tagged", "tensor"):
                    size = given.get("rank", named["rank"].default)
                    given["basis"] = shared_basis(bases, base, models, size, shape, rules)
                given |= {"curvature": curvature if row.needs_curvature else None, "weights": weights, "rules": rules}
                merged = partial(merge_state_dicts, dict(base), [dict(model) for model in models], row.name, **given)
                yield row.name, given.get("rank"), at_scales(row.name, base, lambda scale, m=merged: m(scale=scale))  # type: ignore[misc]

    return compare(ways(), evaluate, scales=scales, evaluation=evaluation, progress=progress)


def compare(
    ways: Iterable[Way],
    evaluate: Evaluate,
    *,
    scales: Sequence[float] | None = None,
    evaluation: str = "a function",
    progress: Callable[[str], None] = lambda done: None,
) -> Sweep:
    """Score every way to merge at every scale on validation data, and each one's best on test data."""
    for scale in scales or ():
        if not math.isfinite(scale):
            raise ParameterError(f"a scale must be a finite number, got {scale}.")
    tried: list[Tried] = []
    for method, rank, at in ways:
        found: dict[float, Judged] = {}

        def score(scale: float, method: str = method, at: Any = at, found: Any = found) -> tuple[float, float]:
            if scale not in found:
                found[scale] = evaluate(at(scale), "val")
                progress(f"{method}, scale {scale:g}")
            order: tuple[float, float] = found[scale].order
            return order

        best = max(scales, key=score) if scales else climb(score, SCALES)
        for scale, judged in sorted(found.items()):
            tried.append(Tried(method, rank, scale, judged, evaluate(at(scale), "test") if scale == best else None))
    notes = []
    if not scales and any(one.scale in (SCALES[0], SCALES[-1]) for one in tried if one.test is not None):
        notes.append("a best scale is the last of the grid; a better one may lie beyond it.")
    return Sweep(tried, evaluation, notes)


def at_scales(method: str, base: State, merged: Callable[[float], State]) -> Callable[[float], State]:
    """Return the merge at any scale, all from one; where scale sits inside a fraction, each from its own."""
    if method == "gradient_matching":
        return merged
    whole = merged(1.0)

    return lambda scale: whole if scale == 1.0 else scaled(base, whole, scale)


def scaled(base: State, merged: State, scale: float) -> dict[str, Tensor]:
    """Return base + scale · (merged - base); what the base lacks, or is no float, is the merge's."""
    return {
        name: base[name] + scale * (W - base[name]) if name in base and W.is_floating_point() else W
        for name, W in merged.items()
    }


def shared_basis(
    known: dict[int | None, dict[str, Any]], base: State, models: Sequence[State], rank: int | None, shape: str,
    rules: Sequence[tuple[str, str]],
) -> dict[str, Any]:  # fmt: skip
    """Return the models' basis, built once for every rank."""
    if rank not in known:
        known[rank] = dict(build_basis(dict(base), [dict(model) for model in models], rank=rank, rules=rules))
    atoms = known[rank]
    return atoms if shape == "tagged" else {name: pairs(one) for name, one in atoms.items()}


def check_methods(methods: Sequence[str] | None, kind: str | None) -> list[Method]:
    """Return the methods to try; refuse those that cannot be."""
    wanted = methods if methods is not None else (*METHODS, *CURVED.get(kind or "", ()))
    rows = []
    for name in wanted:
        row = find_method(name)
        if any(parameter.kind == "callable" for parameter in row.parameters):
            raise ParameterError(f"{name} chooses by a function of its own; leave it out of a sweep.")
        check_kind(row, kind)
        rows.append(row)
    return rows


def climb(value: Callable[[float], Any], grid: Sequence[float], ahead: int = 2) -> float:
    """Return the best point of a grid, climbing both ways from 1 until `ahead` in a row are worse."""
    start = min(range(len(grid)), key=lambda i: abs(grid[i] - 1.0))
    best = start
    for step in (1, -1):
        i, misses = start + step, 0
        while 0 <= i < len(grid) and misses < ahead:
            if value(grid[i]) > value(grid[best]):
                best, misses = i, 0
            else:
                misses += 1
            i += step
    return grid[best]
