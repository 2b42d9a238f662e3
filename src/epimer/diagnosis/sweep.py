"""Try many settings cheaply: models are read once, one merge per method and rank serves every scale.

The settings are chosen on validation data and the chosen ones reported on test data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.checkpoints.memory import Cached
from epimer.engine.basis import build_bases
from epimer.engine.in_memory import merge_in_memory
from epimer.engine.memory import memory_budget
from epimer.engine.options import RunOptions
from epimer.errors import EpimerError, EpimerWarning, ParameterError, RecipeError
from epimer.evaluation.judges import Evaluate, SplitScores
from epimer.evaluation.suite import State
from epimer.geometry.linalg import as_compute_dtype
from epimer.geometry.subspace import Basis, Tagged, tensor_product
from epimer.methods.frechet import FrechetOptions
from epimer.methods.registry import Method, default_sweep, describe_method
from epimer.plan.adapter import plan_adapter
from epimer.plan.inputs import assign_rules
from epimer.plan.jobs import Job, Plan
from epimer.plan.merge import OpenedModels, plan_recipe
from epimer.plan.participants import Participants
from epimer.progress import Progress
from epimer.recipe.model import Recipe
from epimer.records import SweepRecord, Trial

SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
CLIMB = 5  # scales that a climb tries at least: 1, and two that are worse on either side

Way = tuple[str, int | None, Callable[[float], State]]
"""a method, its rank, and its merge at any scale"""
Partial = frozenset[tuple[str, tuple[int, ...]]]
"""the tensors in which some models have weight 0, each with the models that take part"""
Search = Callable[[Callable[[float], float], Sequence[float]], float]
"""the value of a scale, and a grid -> the best point of it"""
Planner = Callable[[Method, int | None, float], Plan]
"""a method, its rank and a scale -> the plan of that merge"""
ReportProgress = Callable[[int, int, str], None]
"""called after every setting with how many were tried, how many there are at least, and the last of them"""


@dataclass(frozen=True)
class Tried:
    """One setting and what it scored."""

    method: str
    rank: int | None
    scale: float
    validation: SplitScores
    test: SplitScores | None = None
    """where it is the best of its method and rank"""

    def record(self) -> Trial:
        """Return the record of it."""
        kl = sum(self.validation.kl.values()) / len(self.validation.kl) if self.validation.kl else None
        trial = Trial(
            self.method, self.scale, self.validation.trusted.average, rank=self.rank, unit=self.validation.unit, kl=kl
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


class Merges:
    """Merges of the same models by many methods: tensors are read once and kept, bases are built once per rank."""

    def __init__(
        self, participants: Participants, rules: Sequence[tuple[str, str]], run: RunOptions, widest: int = 0
    ) -> None:
        self.rules, self.run = rules, run
        budget = memory_budget(run.max_memory, ())
        self.participants = participants.kept_in_memory(min(budget // 2, budget - widest))  # beside the widest merge
        self._bases: dict[tuple[int | None, Partial], dict[str, Tagged]] = {}

    def merge(self, plan: Plan) -> dict[str, Tensor]:
        """Carry out a plan of these models and return the merged tensors."""
        if plan.basis is None:
            partial = frozenset(
                (job.name, tuple(job.models)) for job in plan.jobs if len(job.models) < len(job.weights)
            )
            plan = replace(plan, jobs=[self._sharing(job, partial) for job in plan.jobs])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpimerWarning)
            return merge_in_memory(plan, self.run.start(plan.parts, self._to_come()))[0]

    def _to_come(self) -> int:
        """Return the bytes of the models that will be kept in memory and are not there yet."""
        return sum(one.to_come for one in self.participants.checkpoints if isinstance(one, Cached))

    def _sharing(self, job: Job, partial: Partial) -> Job:
        """Return a job that is merged in a basis which other methods use too."""
        options = job.options
        if job.rule != "matrix" or not isinstance(options, FrechetOptions) or options.basis not in ("tagged", "tensor"):
            return job
        atoms = self._atoms(options.rank, partial)
        bases: Mapping[str, Basis] = atoms
        if options.basis == "tensor":
            names = [part.matrix for part in job.members()] if job.stacked else [job.name]
            bases = {name: tensor_product(atoms[name]) for name in names if name in atoms}
        return replace(job, options=replace(options, basis=bases))

    def _atoms(self, rank: int | None, partial: Partial) -> dict[str, Tagged]:
        """Return the tagged basis of every matrix, built once per rank."""
        key, models, tasks = (rank, partial), dict(partial), range(len(self.participants.models))

        def weights(name: str, depth: float) -> list[float]:
            return [float(t in models.get(name, tasks)) for t in tasks]

        if key not in self._bases:
            built = build_bases(self.participants, self.rules, rank=rank, kind="tagged", weights=weights, run=self.run)
            self._bases[key] = {name: basis for name, basis in built if isinstance(basis, Tagged)}
        return self._bases[key]


def sweep_plans(
    merges: Merges,
    rows: Sequence[Method],
    planner: Planner,
    base: State,
    evaluate: Evaluate,
    *,
    ranks: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
    shown_rank: Callable[[Method, int | None], int | None] = lambda row, rank: rank,
    evaluation: str = "a function",
    progress: ReportProgress = lambda done, total, line: None,
    search: Search | None = None,
    reported: str = "test",
) -> Sweep:
    """Merge in every way, take each one's best scale on validation data, and report that on test data.

    Args:
        merges: of the models.
        rows: the methods to try.
        planner: plans one of them.
        base: the ancestor's tensors, as the merged ones are.
        evaluate: scores a state dict on "val" or "test".
        ranks: directions per task, for methods that have them; None takes each method's own.
        scales: all are tried; None climbs from 1 along a grid until two in a row are worse.
        shown_rank: what the table says of a method's rank.
        evaluation: what to call the evaluation.
        progress: called after every setting.
        search: finds the best of a grid of scales; None climbs.
        reported: the split that the best are reported on; "val" scores nothing else.
    """
    check_memory(merges.run, rows, ranks, planner)
    cautions: dict[str, None] = {}
    settings = _settings(rows, ranks)

    def ways() -> Iterator[Way]:
        for row, rank in settings:

            def at(scale: float, row: Method = row, rank: int | None = rank) -> State:
                plan = planner(row, rank, scale)
                cautions.update(dict.fromkeys(plan.cautions))
                return merges.merge(plan)

            yield row.name, shown_rank(row, rank), at_scales(row, base, at)

    sweep = compare(
        ways(),
        len(settings),
        evaluate,
        scales=scales,
        evaluation=evaluation,
        progress=progress,
        search=search,
        reported=reported,
    )
    return replace(sweep, notes=[*sweep.notes, *cautions])


def directions_per_task(row: Method, parameters: Mapping[str, Any]) -> int | None:
    """Return the rank of a merge, given or by default; None if the method takes every direction."""
    values = {**row.defaults, **parameters}
    rank = values.get("rank")
    if values.get("basis") == "full" and "rank" not in parameters:
        return None  # a default that has no effect
    return rank if isinstance(rank, int) else None


def _settings(rows: Sequence[Method], ranks: Sequence[int] | None) -> list[tuple[Method, int | None]]:
    """Return every method with every rank that it is tried at."""
    return [(row, rank) for row in rows for rank in ((ranks or (None,)) if "rank" in row.defaults else (None,))]


def check_memory(run: RunOptions, rows: Sequence[Method], ranks: Sequence[int] | None, planner: Planner) -> int:
    """Refuse merges that need more memory than there is, before any work; return the bytes that the widest needs."""
    widest = 0
    for row, rank in _settings(rows, ranks):
        plan = planner(row, rank, 1.0)
        run.budget(plan.parts)
        widest = max(widest, plan.memory)
    return widest


def trials_at_least(rows: Sequence[Method], ranks: Sequence[int] | None, scales: Sequence[float] | None) -> int:
    """Return how many settings a sweep tries: all of them where scales are given, else the fewest that climbs try."""
    return len(_settings(rows, ranks)) * _scales_at_least(scales)


def _scales_at_least(scales: Sequence[float] | None) -> int:
    return len(set(scales)) if scales else CLIMB


def compare(
    ways: Iterable[Way],
    count: int,
    evaluate: Evaluate,
    *,
    scales: Sequence[float] | None = None,
    evaluation: str = "a function",
    progress: ReportProgress = lambda done, total, line: None,
    search: Search | None = None,
    reported: str = "test",
) -> Sweep:
    """Score all `count` ways to merge, at every scale on validation data, and each one's best on `reported`."""
    for scale in scales or ():
        if not math.isfinite(scale):
            raise ParameterError(f"a scale must be a finite number, got {scale}.")
    tried: list[Tried] = []
    least = _scales_at_least(scales)
    for left, (method, rank, at) in zip(reversed(range(count)), ways, strict=True):
        known: dict[float, SplitScores] = {}
        to_come = left * least

        def score(
            scale: float, method: str = method, at: Any = at, known: Any = known, to_come: int = to_come
        ) -> float:
            if scale not in known:
                known[scale] = evaluate(at(scale), "val")
                total = len(tried) + max(len(known), least) + to_come
                progress(len(tried) + len(known), total, f"{method}, scale {scale:g}")
            order: float = known[scale].order
            return order

        best = max(scales, key=score) if scales else (search or climb)(score, SCALES)
        final = known[best] if reported == "val" else evaluate(at(best), reported)
        for scale, scores in sorted(known.items()):
            tried.append(Tried(method, rank, scale, scores, final if scale == best else None))
    notes = []
    if not scales and any(one.scale in (SCALES[0], SCALES[-1]) for one in tried if one.test is not None):
        notes.append("a best scale is the last of the grid; a better one may lie beyond it.")
    return Sweep(tried, evaluation, notes)


def at_scales(row: Method, base: State, merged: Callable[[float], State]) -> Callable[[float], State]:
    """Return the merge at any scale, all from one; where scale sits inside a fraction, each from its own."""
    if not row.linear_in_scale:
        return merged
    whole = merged(1.0)

    return lambda scale: whole if scale == 1.0 else lazily_scaled(base, whole, scale)


def scaled(base: State, merged: State, scale: float) -> dict[str, Tensor]:
    """Return base + scale · (merged - base); what the base lacks, or is no float, is the merge's."""
    return dict(lazily_scaled(base, merged, scale))


def lazily_scaled(base: State, merged: State, scale: float) -> LazyTensors:
    """Return base + scale · (merged - base), each tensor computed when it is accessed."""

    def read(name: str) -> Tensor:
        W = merged[name]
        return base[name] + scale * (W - base[name]) if name in base and W.is_floating_point() else W

    return LazyTensors(merged, read)


def check_methods(methods: Sequence[str] | None, kind: str | None) -> list[Method]:
    """Return the methods to try; refuse those that cannot be."""
    rows = []
    for name in methods if methods is not None else default_sweep(kind):
        row = describe_method(name)
        if row.needs_function:
            raise ParameterError(f"{name} chooses by a function of its own; leave it out of a sweep.")
        row.check_kind(kind)
        rows.append(row)
    return rows


def as_adapters(
    recipe: Recipe, opened: OpenedModels, rows: Sequence[Method], ranks: Sequence[int] | None, *, required: bool
) -> tuple[list[Method], list[str]]:
    """Return the methods whose merge can be the adapter that a recipe asks for, and a note on those left out.

    Where the methods are `required`, or none is left, the reason is raised as an error instead. Without `output: lora`
    all are returned.
    """
    if recipe.output != "lora":
        return list(rows), []
    problems: dict[str, EpimerError] = {}
    for row, rank in _settings(rows, ranks):
        plan = plan_adapter(plan_recipe(recipe.settled(row.name, None, rank), opened))
        if plan.problems:
            problems.setdefault(row.name, plan.problems[0])
    kept = [row for row in rows if row.name not in problems]
    if problems and (required or not kept):
        raise next(iter(problems.values()))
    left = f"left out, as their merges have no exact adapter: {', '.join(problems)}; give lora_rank to try them."
    return kept, [left] if problems else []


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


def sweep_recipe(
    recipe: Recipe,
    opened: OpenedModels,
    evaluate: Evaluate,
    *,
    methods: Sequence[str] | None = None,
    scales: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
    keep_scale: bool = False,
    evaluation: str = "",
    run: RunOptions,
    held: int = 0,
    search: Search | None = None,
    reported: str = "test",
) -> Sweep:
    """Sweep opened models: every setting is merged as `settled` would have it, into memory.

    `keep_scale` leaves the recipe's own scale in place, and scales multiply it. `held` are the bytes that evaluating
    takes; `search` and `reported` as in `sweep_plans`.
    """
    if opened.problems:
        raise opened.problems[0]
    if opened.participants.base is None:
        raise RecipeError("a sweep scales task vectors, so the recipe needs a base_model.")
    assigned = assign_rules(opened.participants, recipe.rules).checked()
    rows = check_methods(methods, opened.kind)
    rows, notes = as_adapters(recipe, opened, rows, ranks, required=methods is not None)

    def plan(row: Method, rank: int | None, scale: float) -> Plan:
        chosen = recipe.settled(row.name, None if keep_scale else scale, rank)
        planned = plan_recipe(chosen.model_copy(update={"dtype": None, "out_dtype": "float32"}), opened)
        planned.check()
        return planned

    widest = max(held, check_memory(run, rows, ranks, plan))
    merges = Merges(opened.participants, recipe.rules, run, widest)
    opened = replace(opened, participants=merges.participants)
    base = merges.participants.base
    assert base is not None

    def shown_rank(row: Method, rank: int | None) -> int | None:
        return directions_per_task(row, recipe.settled(row.name, None, rank).parameters)

    names = [name for name, rule in assigned.rules.items() if rule != "skip"]
    tensors = {name: base.read(name) for name in names}
    with Progress(run.progress, unit="settings") as bar:
        stage = bar.begin("trying", trials_at_least(rows, ranks, scales))
        sweep = sweep_plans(
            merges,
            rows,
            plan,
            {name: as_compute_dtype(W) if W.is_floating_point() else W for name, W in tensors.items()},
            evaluate,
            ranks=ranks,
            scales=scales,
            shown_rank=shown_rank,
            evaluation=evaluation,
            progress=stage.reach,
            search=search,
            reported=reported,
        )
    return replace(sweep, notes=[*sweep.notes, *notes])
