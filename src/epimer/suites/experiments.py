"""The paper's experiments and ours, on any suite: each gives rows of plain data, for tables and figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from epimer.geometry.subspace import clamp_rank
from epimer.methods.diagnose import diagnose_state_dicts
from epimer.methods.inputs import matrix_shape
from epimer.methods.rules import is_matrix
from epimer.suites.bench import CANDIDATES, Bench, Candidate, Outcome, references
from epimer.suites.stats import Scores, compare

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
RANKS = (2, 4, 8, 16, 32)
FRACTIONS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZES = (16, 64, 256, 1024)
METRICS = {"diagonal": "epimer", "kronecker": "epimer_kron", "exact": "epimer_exact", "task-gram": "epimer_free"}


@dataclass(frozen=True)
class Result:
    """An experiment's outcome: rows under headings, and what to know when reading them."""

    name: str
    title: str
    headings: Sequence[str]
    rows: list[list[Any]]
    notes: list[str] = field(default_factory=list)
    figure: dict[str, Any] | None = None
    """lines to plot: x label, y label, and per line its points (x, y, low, high)"""

    def markdown(self) -> str:
        """Return the table, in the paper's layout, and the notes."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.headings) + " |", "|" + "---|" * len(self.headings)]
        lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {key: getattr(self, key) for key in ("name", "title", "headings", "rows", "notes", "figure")}


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: float) -> str:
    """Return an accuracy as tables show it."""
    return f"{100 * value:.1f}"


def interval(scores: Scores) -> str:
    """Return an average with its 95% interval."""
    low, high = scores.interval()
    return f"{percent(scores.average)} [{percent(low)}, {percent(high)}]"


def performance(bench: Bench, report: Callable[[str], None] = lambda line: None) -> tuple[Result, list[Outcome]]:
    """Return every method's average and per-task accuracy, at the scale that validation data chose."""
    suite = bench.suite
    headings = [
        "method",
        "average [95%]",
        "worst",
        *(task.name for task in suite.tasks),
        "scale",
        "merge s",
        "p vs tsv",
    ]
    rows: list[list[Any]] = []
    for name, scores in references(bench).items():
        rows.append([name, interval(scores), percent(scores.worst), *map(percent, scores.accuracies), "", "", ""])
        report(name)
    outcomes = []
    for candidate in CANDIDATES:
        outcomes.append(bench.best(candidate))
        report(candidate.name)
    against = next(outcome for outcome in outcomes if outcome.candidate.method == "tsv")
    notes = ["Scale chosen on validation data, everything else reported on test data; intervals by bootstrap."]
    for outcome in outcomes:
        difference, p = compare(outcome.test, against.test)
        shown = "" if outcome is against else f"{100 * difference:+.1f}, p {p:.3f}"
        scores = outcome.test
        rows.append(
            [
                outcome.candidate.name,
                interval(scores),
                percent(scores.worst),
                *map(percent, scores.accuracies),
                f"{outcome.scale:g}" + ("*" if outcome.edge else ""),
                f"{outcome.seconds:.2f}",
                shown,
            ]
        )
    if any(outcome.edge for outcome in outcomes):
        notes.append("* the best scale is the last of the grid; a better one may lie beyond it.")
    notes += [f"Measuring {kind} curvature of all models took {s:.1f} s." for kind, s in bench.seconds.items()]
    return Result("performance", f"{suite.name}: accuracy of merged models", headings, rows, notes), outcomes


def worst_task(bench: Bench) -> Result:
    """Return which task each method serves worst, and by how much it falls short of fine-tuning."""
    own = references(bench)["fine-tuned"].accuracies
    names = [task.name for task in bench.suite.tasks]
    rows = []
    for candidate in CANDIDATES:
        scores = bench.best(candidate).test
        t = min(range(len(names)), key=lambda i: scores.accuracies[i])
        kept = min(a / b for a, b in zip(scores.accuracies, own, strict=True))
        rows.append([candidate.name, percent(scores.average), percent(scores.worst), names[t], percent(kept)])
    headings = ["method", "average", "worst", "worst task", "least share of fine-tuned kept"]
    return Result("worst-task", "Worst task", headings, rows)


def ranks_of(bench: Bench, wanted: Sequence[int] = RANKS) -> list[int]:
    """Return a grid of ranks, cut at floor(d / T) of the suite's narrowest matrix."""
    shapes = [matrix_shape(W) for name, W in bench.suite.base.items() if is_matrix(name, W.shape)]
    most = min(clamp_rank(shape, len(bench.states), None) for shape in shapes)
    return sorted({min(k, most) for k in wanted if min(k, most) > 0})


def alpha(bench: Bench) -> Result:
    """Return accuracy over α, rank and aggregator: the paper's sensitivity."""
    tasks = len(bench.states)
    rows, lines = [], {}
    for method in ("epimer", "epimer_kron"):
        for k in ranks_of(bench, (4, 16, 32)):
            for aggregator in ("sum", "mean"):
                merged = bench.merge(Candidate(method), rank=k, aggregator=aggregator)
                points = []
                for scale in (*ALPHAS, tasks**-0.5):
                    scores = bench.score(bench.scaled(merged, scale), "test")
                    rows.append([method, k, aggregator, f"{scale:.3f}", interval(scores), percent(scores.worst)])
                    points.append((scale, scores.average, *scores.interval()))
                lines[f"{method}, k = {k}, {aggregator}"] = sorted(points)
    headings = ["method", "k", "aggregator", "α", "average [95%]", "worst"]
    notes = ["α is fixed here, not chosen; 1/√T is the last of each group.", "k is cut at floor(d/T)."]
    figure = {"x": "α", "y": "average accuracy", "lines": lines}
    return Result("alpha", "Sensitivity to α", headings, rows, notes, figure)


def eta(bench: Bench) -> Result:
    """Return η under three normalisations, and the accuracy margin of curvature over the flat merge, by rank."""
    rows, points = [], []
    for k in ranks_of(bench):
        found = diagnose_state_dicts(
            dict(bench.suite.base), bench.states, curvature=bench.curvature("diagonal"), rank=k
        ).total
        curved = bench.best(Candidate("epimer", {"rank": k})).test
        flat = bench.best(Candidate("tsv", {"rank": k, "coefficients": "projected"})).test
        margin, p = compare(curved, flat)
        rows.append([k, found.eta, found.eta_unit_trace, found.eta_fraction, f"{100 * margin:+.1f}", f"{p:.3f}"])
        points.append((k, margin, margin, margin))
    headings = ["k", "η (mean diagonal 1)", "η (trace 1)", "η / F(x̄)", "margin over the flat merge", "p"]
    notes = ["Margin: epimer minus tsv with coefficients projected, its limit for flat curvature, at the same rank."]
    figure = {"x": "k", "y": "accuracy margin", "lines": {"epimer - tsv (projected)": points}}
    return Result("eta", "η against rank", headings, rows, notes, figure)


def fisher_fraction(bench: Bench) -> Result:
    """Return accuracy against the share of the training data that the Fisher information is measured on."""
    return _by_samples(bench, "fisher-fraction", "Share of the data", list(_shares(bench)), (0, 1, 2))


def samples(bench: Bench) -> Result:
    """Return accuracy against the number of samples per task."""
    counts = [(f"{count}", count) for count in SIZES]
    return _by_samples(bench, "samples", "Samples per task", counts, (0, 1, 2))


def _shares(bench: Bench) -> Iterator[tuple[str, int]]:
    size = min(len(task.splits["train"]) for task in bench.suite.tasks)
    for share in FRACTIONS:
        yield f"{100 * share:g}%", max(1, round(share * size))


def _by_samples(bench: Bench, name: str, what: str, counts: list[tuple[str, int]], seeds: Sequence[int]) -> Result:
    rows, lines = [], {}
    for method in ("fisher", "epimer", "epimer_kron"):
        points = []
        for label, count in counts:
            averages, spreads = [], []
            for seed in seeds:
                scores = Bench(bench.suite, samples=count, seed=seed, keep=False).best(Candidate(method)).test
                averages.append(scores.average)
                spreads.append(statistics.stdev(scores.accuracies) / len(scores.accuracies) ** 0.5)
            over_seeds = statistics.stdev(averages) / len(averages) ** 0.5 if len(averages) > 1 else 0.0
            mean = statistics.mean(averages)
            rows.append([method, label, count, percent(mean), percent(statistics.mean(spreads)), percent(over_seeds)])
            points.append((count, mean, mean - 2 * over_seeds, mean + 2 * over_seeds))
        lines[method] = points
    headings = ["method", what, "samples", "average", "s.e. over tasks", "s.e. over seeds"]
    return Result(name, what, headings, rows, [], {"x": "samples per task", "y": "average accuracy", "lines": lines})


def cost(bench: Bench, runs: int = 4) -> Result:
    """Return the wall-clock time of each method, curvature apart."""
    rows = []
    for candidate in CANDIDATES:
        if candidate.curvature is not None:
            bench.curvature(candidate.curvature)
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            bench.merge(candidate)
            times.append(time.perf_counter() - started)
        rows.append([candidate.name, statistics.median(times), min(times), candidate.curvature or ""])
    notes = [f"Median of {runs} runs."]
    notes += [f"Measuring {kind} curvature of all models took {s:.1f} s." for kind, s in bench.seconds.items()]
    return Result("cost", "Wall-clock time", ["method", "median s", "least s", "curvature"], rows, notes)


def metrics(bench: Bench) -> Result:
    """Return accuracy over metric, subspace, aggregator and damping."""
    rows = []
    for metric, method in METRICS.items():
        for basis in ("tagged", "tensor", "full"):
            if metric == "exact" and basis != "tagged":
                continue
            for aggregator in ("mean", "sum", "anchored"):
                for damping in (0.01, 0.3, 1.0):
                    parameters = {"basis": basis, "aggregator": aggregator, "damping": damping}
                    outcome = bench.best(Candidate(method, parameters))
                    shown = interval(outcome.test)
                    rows.append([metric, basis, aggregator, damping, shown, percent(outcome.test.worst), outcome.scale])
    headings = ["metric", "subspace", "aggregator", "damping", "average [95%]", "worst", "scale"]
    return Result("metrics", "Metric x subspace x aggregator", headings, rows)


def tasks(bench: Bench) -> Result:
    """Return accuracy against the number of merged models: the first 2, 3, … of the suite."""
    rows, lines = [], {}
    for method in ("average", "tsv", "epimer_free", "epimer_kron"):
        points = []
        for count in range(2, len(bench.states) + 1):
            merged = bench.merge(Candidate(method), models=range(count))
            some = bench.suite.tasks[:count]

            def right(scale: float, split: str, merged: Any = merged, some: Any = some) -> Scores:
                state = bench.scaled(merged, scale)
                return Scores([bench.suite.scores_on(state, task, split) for task in some])

            scale = max((0.3, 0.5, 0.7, 1.0, 1.3, 1.75, 2.5), key=lambda s: right(s, "val").average)
            scores = right(scale, "test")
            rows.append([method, count, interval(scores), percent(scores.worst), scale])
            points.append((count, scores.average, *scores.interval()))
        lines[method] = points
    figure = {"x": "merged models", "y": "average accuracy on their tasks", "lines": lines}
    return Result("tasks", "Number of tasks", ["method", "T", "average [95%]", "worst", "scale"], rows, [], figure)


EXPERIMENTS: dict[str, Callable[[Bench], Result]] = {
    "performance": lambda bench: performance(bench)[0],
    "worst-task": worst_task,
    "alpha": alpha,
    "eta": eta,
    "fisher-fraction": fisher_fraction,
    "cost": cost,
    "metrics": metrics,
    "samples": samples,
    "tasks": tasks,
}
