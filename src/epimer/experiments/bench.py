"""Merge the models of a suite with every method, choose each one's scale on validation data, report on test data."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from epimer.api import build_basis, merge_state_dicts
from epimer.curvature.curvature import Curvature
from epimer.curvature.estimate import estimate_curvature
from epimer.diagnosis.sweep import climb, scaled
from epimer.engine.in_memory import MergedState
from epimer.errors import DataError, EpimerError, EpimerWarning
from epimer.evaluation.metrics import shared_unit
from epimer.evaluation.provenance import provenance
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import State, Suite
from epimer.geometry.metric import Metric
from epimer.methods.registry import added_methods, describe_method
from epimer.records import Experiment, Status

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
COARSE_SCALES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.6, 2.0, 2.6, 3.4)
STEPS = 40  # of conjugate gradients
SAMPLES = 256  # per task, for curvature
RANK = 32  # of bases, where a candidate does not set another
CURVATURE_VERSION = 3  # raised when the estimate changes, so that cached curvature is measured again
CURVATURE_BATCH = 64  # samples in a batch when curvature is measured

Item = TypeVar("Item")


@dataclass(frozen=True)
class Candidate:
    """A way to merge: a method with parameters, under a name."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    kind: str | None = None
    """of curvature; None takes the kind that the method asks for"""
    labels: str = "model"
    """that curvature is measured with: the model's own, or true"""

    @property
    def name(self) -> str:
        return self.label or self.method

    @property
    def rank(self) -> int | None:
        return self.parameters.get("rank", RANK)

    @property
    def curvature(self) -> str | None:
        """The kind of curvature it needs."""
        row = describe_method(self.method)
        return self.kind or (row.curvature if row.needs_curvature else None)

    @property
    def in_subspace(self) -> bool:
        """Whether it merges in a basis of `rank` directions per task, by its parameters or by default."""
        return self._option("basis", "full") != "full"

    @property
    def is_mean(self) -> bool:
        """Whether it aggregates by mean, by its parameters or by default."""
        return self._option("aggregator", "") == "mean"

    def _option(self, name: str, missing: str) -> Any:
        """Return a parameter, the method's default of it, or `missing` where the method has none."""
        defaults = {parameter.name: parameter.default for parameter in describe_method(self.method).parameters}
        return self.parameters.get(name, defaults.get(name, missing))


CANDIDATES = (
    *map(Candidate, ("average", "task_arithmetic", "ties", "dare", "fisher")),
    Candidate("gradient_matching", {"prior": 1e-3}),  # without one its scale cancels, and it is fisher
    Candidate("regmean"),
    Candidate("mats", {"iterations": 20}),  # its authors stop early too
    *map(Candidate, ("wudi", "tsv", "iso_c", "iso_cts", "epimer", "epimer_exact")),
    Candidate("epimer_free", {"iterations": STEPS}),
    Candidate("epimer_kron", {"iterations": STEPS}),
    Candidate("epimer_full", {"iterations": STEPS}),
)


PAPER = {"normalize": "none", "damping": 0.0, "aggregator": "sum"}
AS_PUBLISHED = (
    Candidate("ties", {"elect": "frequency"}, "ties (frequency)"),
    Candidate("epimer", {**PAPER, "jitter": 1e-8}, "epimer (as published)", labels="true"),
    Candidate("epimer", {**PAPER, "jitter": 1e-3}, "epimer (as published, jitter 1e-3)", labels="true"),
)
"""methods as the paper has them: empirical Fisher with true labels, not normalised, and a jitter that it calls small
and gives no number for, so two of them; ties elects signs by their frequency"""


def all_candidates(*, published: bool = True) -> tuple[Candidate, ...]:
    """Return the methods to compare: epimer's own, those of the paper as published, and those that others added."""
    added = [name for name in added_methods() if not describe_method(name).needs_function]
    return (*CANDIDATES, *(AS_PUBLISHED if published else ()), *map(Candidate, added))


@dataclass(frozen=True)
class Outcome:
    """A merge at the scale that validation data chose."""

    candidate: Candidate
    scale: float
    validation: float
    test: Scores
    seconds: float
    """of the merge, without curvature and evaluation"""
    edge: bool
    """the scale is the first or last of the grid, so a better one may lie beyond"""


@dataclass(eq=False)
class Bench:
    """A suite with the curvature of its models, measured once and cached."""

    suite: Suite
    samples: int = SAMPLES
    """per task, for curvature"""
    seed: int = 0
    """of the choice of these samples"""
    keep: bool = True
    """whether curvature is cached in the suite's folder between runs"""
    scales: Sequence[float] = SCALES
    """the grid to choose from, ascending; of a mean, T times as far"""
    ahead: int = 2
    """worse scales in a row after which the search along the grid stops"""

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """kind of curvature -> the time it took to measure"""
        self.winner: Outcome | None = None
        """the best on validation data so far"""
        self.model: State = {}
        """the winner's merged model"""
        self.report_progress: Callable[[int, int, str], None] = lambda done, total, item: None
        """called with the steps of an experiment that are done, their total, and the name of the next one"""
        self._warned: dict[str, list[str]] = {}
        """text of a warning -> the methods whose merges gave it"""
        self._outcomes: dict[str, Outcome] = {}
        self._curvature: dict[str, list[Curvature]] = {}
        self._bases: dict[int | None, tuple[dict[str, Any], float]] = {}

    def each(self, items: Iterable[Item], name: Callable[[Item], str] = str) -> Iterator[Item]:
        """Yield the steps of an experiment and report progress before each."""
        steps = list(items)
        for done, item in enumerate(steps):
            self.report_progress(done, len(steps), name(item))
            yield item
        self.report_progress(len(steps), len(steps), "")

    @property
    def notes(self) -> list[str]:
        """The warnings of merges, each once, after the methods that it is about."""
        return [f"{', '.join(methods)}: {text}" if methods else text for text, methods in self._warned.items()]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all candidates so far, in the order in which they were merged."""
        return list(self._outcomes.values())

    @cached_property
    def metric(self) -> str:
        return shared_unit(self.suite)

    def with_provenance(self, result: Experiment, *notes: str, seeds: Sequence[int] = ()) -> Experiment:
        """Return a result with the suite's name and its provenance."""
        seed: Any = list(seeds) or self.seed
        origin = provenance(seed=seed, samples=self.samples, threads=torch.get_num_threads())
        by = f"seeds {', '.join(map(str, seeds))}" if seeds else f"seed {self.seed}"
        note = (
            f"Made by epimer {origin['epimer']} with torch {origin['torch']} on {origin['date']}; {by}, "
            f"curvature of {self.samples} samples per task at most, unless the table says otherwise."
        )
        suite, notes = self.suite.name, (*result.notes, *notes, note)
        title = f"{suite}: {result.title}"
        return replace(result, title=title, suite=suite, metric=self.metric, made=origin, notes=list(notes))

    @cached_property
    def states(self) -> list[dict[str, Tensor]]:
        """The fine-tuned models."""
        return [dict(model) for model in self.suite.models]

    @cached_property
    def base_average(self) -> float:
        """The base's average on validation data."""
        suite = self.suite.trusted
        return Scores([suite.finite_scores(suite.base, task, "val") for task in suite.tasks]).average

    def validation(self, state: State) -> float:
        """Return the average on validation data that scales are chosen by: without doubtful tasks."""
        return Scores(self.suite.trusted.scores(state, "val")).average

    def grid(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the scales to choose from; a mean's go on to T times the last, as on matrices sum is T · mean."""
        further = [round(len(self.states) * scale, 6) for scale in self.scales] if candidate.is_mean else []
        return (*self.scales, *(scale for scale in further if scale > self.scales[-1]))

    def basis(self, rank: int | None) -> dict[str, Any]:
        """Return the models' tagged basis, built once."""
        if rank not in self._bases:
            started = time.perf_counter()
            basis = dict(build_basis(dict(self.suite.base), self.states, rank=rank))
            self._bases[rank] = basis, time.perf_counter() - started
        return self._bases[rank][0]

    def basis_seconds(self, candidate: Candidate) -> float:
        """Return the time that a candidate's basis took, where it is built before the merge."""
        if candidate.curvature != "samples":
            return 0.0
        self.basis(candidate.rank)
        return self._bases[candidate.rank][1]

    def curvature(self, kind: str, rank: int | None = RANK, labels: str = "model") -> list[Curvature]:
        """Return every model's curvature on its own task, measured or from an earlier run.

        Per-sample gradients (kind samples) are kept in the basis of `rank` only.
        """
        basis = self.basis(rank) if kind == "samples" else None
        by = "" if labels == "model" else f"-{labels}"
        key = f"{kind}{by}-{self.samples}-{self.seed}" + (f"-{rank}" if basis else "") + f"-v{CURVATURE_VERSION}"
        if key not in self._curvature:
            started = time.perf_counter()
            measured = [self._load_or_measure(t, key, kind, labels, basis) for t in range(len(self.states))]
            self._curvature[key] = measured
            self.seconds[kind + by] = time.perf_counter() - started
        return self._curvature[key]

    def _load_or_measure(self, t: int, key: str, kind: str, labels: str, basis: dict[str, Any] | None) -> Curvature:
        task = self.suite.tasks[t]
        folder = self.suite.folder / "curvature" / key / task.name if self.keep and self.suite.folder else None
        if folder is not None and (folder / "curvature.json").is_file():
            try:
                return Curvature.load(folder)
            except EpimerError as error:
                raise DataError(f"{error} Delete {folder}, and it is measured again.") from error
        data = task.splits["train"]
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.seed))[: self.samples]
        network, names = self.suite.network(self.states[t], task), self.suite.names and self.suite.names(task)
        names = names or {name: name for name, _ in network.named_parameters() if name in self.suite.base}
        curvature = estimate_curvature(
            network,
            data.batches(CURVATURE_BATCH, order),
            task.loss,
            kind=kind,
            labels=labels,
            samples=None,
            basis=None if basis is None else {name: basis[stored] for name, stored in names.items() if stored in basis},
            seed=self.seed,
            layers=list(names),
            progress=False,
        )
        curvature = curvature if self.suite.names is None else curvature.renamed(names)
        if folder is not None:
            curvature.save(folder)
        return curvature

    def merge(self, candidate: Candidate, models: Sequence[int] | None = None, **parameters: Any) -> MergedState:
        """Merge all models of the suite, or those with the indices `models`."""
        chosen = range(len(self.states)) if models is None else models
        parameters = {**candidate.parameters, **parameters}
        curvature: list[Mapping[str, Metric]] | None = None
        if candidate.curvature is not None:
            rank = parameters.get("rank", RANK)
            measured = self.curvature(candidate.curvature, rank, candidate.labels)
            curvature = [measured[t] for t in chosen]
            if candidate.curvature == "samples":
                parameters["basis"] = self.basis(rank)
        base, states = dict(self.suite.base), [self.states[t] for t in chosen]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EpimerWarning)
            merged = merge_state_dicts(base, states, candidate.method, curvature=curvature, **parameters)
        messages = [warning.message for warning in caught if isinstance(warning.message, EpimerWarning)]
        expected = Status.STALLED if "iterations" in parameters else None
        for message in (message for message in messages if message.status != expected):
            methods = self._warned.setdefault(message.text, [])
            if message.method and message.method not in methods:
                methods.append(message.method)
        return merged

    def scaled(self, merged: State, scale: float) -> dict[str, Tensor]:
        """Return base + scale · (merged - base)."""
        return scaled(self.suite.base, merged, scale)

    def at_scales(self, candidate: Candidate) -> Callable[[float], State]:
        """Return the merge at any scale: all from one, where the merged delta is proportional to it."""
        merged = self.merge(candidate)
        linear = describe_method(candidate.method).linear_in_scale
        return lambda scale: self.scaled(merged, scale) if linear else self.merge(candidate, scale=scale)

    def score(self, state: State, split: str) -> Scores:
        """Return a model's scores on every task; refuse NaN and Inf."""
        return Scores([self.suite.finite_scores(state, task, split) for task in self.suite.tasks])

    def at(self, candidate: Candidate, scale: float) -> Scores:
        """Return the test scores of a merge at a scale that is not chosen."""
        return self.score(self.merge(candidate, scale=scale), "test")

    def best(self, candidate: Candidate) -> Outcome:
        """Merge once, take the scale that is best on validation data, and report on test data; computed once.

        Where the merged delta is proportional to the scale, all scales share one merge; the search climbs from 1.
        """
        key = repr(candidate)
        if key not in self._outcomes:
            self._outcomes[key] = self._best(candidate)
        return self._outcomes[key]

    def _best(self, candidate: Candidate) -> Outcome:
        if candidate.curvature is not None:
            self.curvature(candidate.curvature, candidate.rank, candidate.labels)
        started = time.perf_counter()
        merged_at = self.at_scales(candidate)
        seconds = time.perf_counter() - started + self.basis_seconds(candidate)
        validation: dict[float, float] = {}

        def average_at(scale: float) -> float:
            if scale not in validation:
                average = self.validation(merged_at(scale))
                validation[scale] = average if math.isfinite(average) else -math.inf  # never chosen
            return validation[scale]

        grid = self.grid(candidate)
        scale = climb(average_at, grid, self.ahead)
        if validation[scale] < self.base_average:  # far too long at 1, where the slope is flat: try the whole grid
            scale = max(grid, key=average_at)
        state = merged_at(scale)
        edge = scale in (grid[0], grid[-1])
        outcome = Outcome(candidate, scale, validation[scale], self.score(state, "test"), seconds, edge)
        if self.winner is None or outcome.validation > self.winner.validation:
            self.winner, self.model = outcome, state
        return outcome


def references(bench: Bench) -> dict[str, Scores]:
    """Return the test scores of the base, with each task's head, and of each fine-tuned model on its own task."""
    suite = bench.suite
    tuned = [suite.finite_scores(state, task, "test") for state, task in zip(bench.states, suite.tasks, strict=True)]
    return {suite.untrained: bench.score(suite.base, "test"), "fine-tuned": Scores(tuned)}
