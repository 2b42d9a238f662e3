"""Merge the models of a suite in every way, choose each method's scale on validation data, report on test data."""

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

from epimer.curvature.curvature import Curvature
from epimer.curvature.estimate import estimate_curvature
from epimer.diagnosis.sweep import climb, scaled
from epimer.errors import DataError, EpimerError, EpimerWarning
from epimer.evaluation.metrics import one_unit
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import Suite
from epimer.geometry.metric import Metric
from epimer.methods.merge import MergedState, build_basis, merge_state_dicts
from epimer.methods.registry import describe_method
from epimer.records import Experiment, provenance

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
COARSE = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.6, 2.0, 2.6, 3.4)
STEPS = 40  # of conjugate gradients; solved to the end, the same merges score the same (docs/glyphs8.md)
SAMPLES = 256  # per task, for curvature
RANK = 32  # of bases, where a candidate does not say otherwise
ESTIMATE = 2  # raised when curvature is estimated in another way, so that what was kept is measured anew
CHUNK = 64  # samples in a batch when curvature is measured

State = Mapping[str, Tensor]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Candidate:
    """A way to merge: a method with parameters, under a name."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    kind: str | None = None
    """of curvature, where it is not what the method asks for by name"""

    @property
    def name(self) -> str:
        """What to call it in a table."""
        return self.label or self.method

    @property
    def rank(self) -> int | None:
        """The rank of its basis."""
        return self.parameters.get("rank", RANK)

    @property
    def curvature(self) -> str | None:
        """The kind of curvature it needs."""
        row = describe_method(self.method)
        return self.kind or (row.curvature if row.needs_curvature else None)


CANDIDATES = (
    Candidate("average"),
    Candidate("task_arithmetic"),
    Candidate("ties"),
    Candidate("dare"),
    Candidate("fisher"),
    Candidate("gradient_matching"),
    Candidate("regmean"),
    Candidate("mats", {"iterations": 20}),  # its authors stop early too
    Candidate("wudi"),
    Candidate("tsv"),
    Candidate("iso_c"),
    Candidate("iso_cts"),
    Candidate("epimer"),
    Candidate("epimer_exact"),
    Candidate("epimer_free", {"iterations": STEPS}),
    Candidate("epimer_kron", {"iterations": STEPS}),
)


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


class Bench:
    """A suite with the curvature of its models, measured once and kept."""

    def __init__(
        self,
        suite: Suite,
        *,
        samples: int = SAMPLES,
        seed: int = 0,
        keep: bool = True,
        scales: Sequence[float] = SCALES,
        ahead: int = 2,
    ) -> None:
        self.suite, self.samples, self.seed, self.keep = suite, samples, seed, keep
        self.scales, self.ahead = sorted(scales), ahead
        self.seconds: dict[str, float] = {}
        """what measuring each kind of curvature took"""
        self.notes: list[str] = []
        """what merges warned of, each once"""
        self.winner: Outcome | None = None
        """the best on validation data so far"""
        self.model: State = {}
        """its merged model"""
        self.watch: Callable[[int, int, str], None] = lambda done, total, item: None
        """told how many steps of an experiment are done, of how many, and what comes next"""
        self._outcomes: dict[str, Outcome] = {}
        self._curvature: dict[str, list[Curvature]] = {}
        self._bases: dict[int | None, tuple[dict[str, Any], float]] = {}

    def each(self, items: Iterable[Item], called: Callable[[Item], str] = str) -> Iterator[Item]:
        """Go through the steps of an experiment, telling whoever watches."""
        steps = list(items)
        for done, item in enumerate(steps):
            self.watch(done, len(steps), called(item))
            yield item
        self.watch(len(steps), len(steps), "")

    @cached_property
    def metric(self) -> str:
        """What all its tasks are measured in."""
        return one_unit(self.suite)

    def signed(self, result: Experiment, *notes: str) -> Experiment:
        """Return a result under the suite's name, with what made it and when."""
        made = provenance(seed=self.seed, samples=self.samples, threads=torch.get_num_threads())
        told = (
            f"Made by epimer {made['epimer']} with torch {made['torch']} on {made['date']}; seed {self.seed}, "
            f"curvature of {self.samples} samples per task at most, unless the table says otherwise."
        )
        return replace(
            result,
            title=f"{self.suite.name}: {result.title}",
            suite=self.suite.name,
            metric=self.metric,
            made=made,
            notes=[*result.notes, *notes, told],
        )

    @cached_property
    def states(self) -> list[dict[str, Tensor]]:
        """The fine-tuned models."""
        return [dict(model) for model in self.suite.models]

    @cached_property
    def unmerged(self) -> float:
        """The base's average on validation data."""
        return self.score(self.suite.base, "val").average

    def basis(self, rank: int | None) -> dict[str, Any]:
        """Return the models' tagged basis, built once."""
        if rank not in self._bases:
            started = time.perf_counter()
            built = dict(build_basis(dict(self.suite.base), self.states, rank=rank))
            self._bases[rank] = built, time.perf_counter() - started
        return self._bases[rank][0]

    def preparing(self, candidate: Candidate) -> float:
        """Return the seconds that a merge's basis took, where it was built beforehand."""
        if candidate.curvature != "samples":
            return 0.0
        self.basis(candidate.rank)
        return self._bases[candidate.rank][1]

    def curvature(self, kind: str, rank: int | None = RANK) -> list[Curvature]:
        """Return every model's curvature on its own task, measured or from an earlier run.

        Per-sample gradients (kind samples) are kept in the basis of `rank` only.
        """
        basis = self.basis(rank) if kind == "samples" else None
        key = f"{kind}-{self.samples}-{self.seed}" + (f"-{rank}" if basis else "") + f"-v{ESTIMATE}"
        if key not in self._curvature:
            started = time.perf_counter()
            self._curvature[key] = [self._measured(t, key, kind, basis) for t in range(len(self.states))]
            self.seconds[kind] = time.perf_counter() - started
        return self._curvature[key]

    def _measured(self, t: int, key: str, kind: str, basis: dict[str, Any] | None) -> Curvature:
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
        found = estimate_curvature(
            network,
            data.batches(CHUNK, order),
            task.loss,
            kind=kind,
            samples=None,
            basis=None if basis is None else {name: basis[stored] for name, stored in names.items() if stored in basis},
            seed=self.seed,
            layers=list(names),
            progress=False,
        )
        found = found if self.suite.names is None else found.renamed(names)
        if folder is not None:
            found.save(folder)
        return found

    def merge(self, candidate: Candidate, models: Sequence[int] | None = None, **parameters: Any) -> MergedState:
        """Merge all models of the suite, or some of them."""
        chosen = range(len(self.states)) if models is None else models
        given = {**candidate.parameters, **parameters}
        curvature: list[Mapping[str, Metric]] | None = None
        if candidate.curvature is not None:
            rank = given.get("rank", RANK)
            curvature = [self.curvature(candidate.curvature, rank)[t] for t in chosen]
            if candidate.curvature == "samples":
                given["basis"] = self.basis(rank)
        some = [self.states[t] for t in chosen]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EpimerWarning)
            merged = merge_state_dicts(dict(self.suite.base), some, candidate.method, curvature=curvature, **given)
        said = [str(warning.message) for warning in caught if issubclass(warning.category, EpimerWarning)]
        said = [note for note in said if "iterations" not in given or "conjugate gradients" not in note]
        self.notes += [note for note in said if note not in self.notes]
        return merged

    def scaled(self, merged: State, scale: float) -> dict[str, Tensor]:
        """Return base + scale · (merged - base)."""
        return scaled(self.suite.base, merged, scale)

    def score(self, state: State, split: str) -> Scores:
        """Return how a model does on every task."""
        return Scores([self.suite.sure_scores(state, task, split) for task in self.suite.tasks])

    def best(self, candidate: Candidate) -> Outcome:
        """Merge once, take the scale that is best on validation data, and report on test data; asked again, remember.

        The merged delta is proportional to the scale, so all scales share one merge; the search climbs from 1.
        """
        asked = repr(candidate)
        if asked not in self._outcomes:
            self._outcomes[asked] = self._best(candidate)
        return self._outcomes[asked]

    def _best(self, candidate: Candidate) -> Outcome:
        if candidate.curvature is not None:
            self.curvature(candidate.curvature, candidate.rank)
        started = time.perf_counter()
        merged = self.merge(candidate)
        seconds = time.perf_counter() - started + self.preparing(candidate)
        validation: dict[float, float] = {}

        def made(scale: float) -> State:
            if candidate.method == "gradient_matching":  # whose scale sits inside a fraction
                return self.merge(candidate, scale=scale)
            return self.scaled(merged, scale)

        def at(scale: float) -> float:
            if scale not in validation:
                average = Scores(self.suite.scores(made(scale), "val")).average
                validation[scale] = average if math.isfinite(average) else -math.inf  # out of range, so no choice
            return validation[scale]

        scale = climb(at, self.scales, self.ahead)
        if validation[scale] < self.unmerged:  # far too long at 1, where a step tells nothing: look everywhere
            scale = max(self.scales, key=at)
        state = made(scale)
        edge = scale in (self.scales[0], self.scales[-1])
        outcome = Outcome(candidate, scale, validation[scale], self.score(state, "test"), seconds, edge)
        if self.winner is None or outcome.validation > self.winner.validation:
            self.winner, self.model = outcome, state
        return outcome


def references(bench: Bench) -> dict[str, Scores]:
    """Return the base with each task's head and each model on its own task."""
    suite = bench.suite
    own = [suite.sure_scores(state, task, "test") for state, task in zip(bench.states, suite.tasks, strict=True)]
    return {suite.untrained: bench.score(suite.base, "test"), "fine-tuned": Scores(own)}
