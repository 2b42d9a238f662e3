"""The paper's experiments and ours, on any suite: each gives rows of plain data, for tables and figures."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

import torch

from epimer.api import diagnose_state_dicts
from epimer.diagnosis.landscape import landscape as survey
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import Suite
from epimer.experiments.bench import CANDIDATES, RANK, STEPS, Bench, Candidate, all_candidates, references
from epimer.experiments.results import (
    Cells,
    Row,
    against,
    dots,
    edge_notes,
    number,
    share,
    starred_scale,
    summary,
    tabulate,
    text,
)
from epimer.geometry.subspace import clamp_rank
from epimer.methods.rules import is_matrix, matrix_shape
from epimer.records import Experiment, Lines

ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
RANKS = (2, 4, 8, 16, 32)
FRACTIONS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZES = (16, 64, 256, 1024)
SEEDS = (0, 1, 2)
COARSER = (0.3, 0.5, 0.7, 1.0, 1.3, 1.75, 2.5)  # scales, where many merges are compared
METRICS = {"diagonal": "epimer", "kronecker": "epimer_kron", "exact": "epimer_exact", "task-gram": "epimer_free"}
SHOWN = ("average", "tsv", "epimer", "epimer_kron")  # merges marked in a landscape
GRID, SEEN = 21, 100  # points along a side of a landscape; samples per task that its losses are taken over

MATCHED = Candidate("tsv", {"rank": RANK}, f"tsv, k = {RANK}")


def performance(bench: Bench, candidates: Sequence[Candidate] | None = None) -> Experiment:
    """Return every method's average and per-task scores, at the scale that validation data chose."""
    suite, cells = bench.suite, Cells(bench.metric)
    candidates = all_candidates() if candidates is None else candidates
    names = [task.name for task in suite.tasks]
    data: list[Row] = [
        {"method": name, "reference": True, **summary(scores, names)} for name, scores in references(bench).items()
    ]
    largest = _largest_rank(bench)
    if largest > RANK:  # else tsv's own rank is the same
        candidates = [*candidates, MATCHED]
    outcomes = [bench.best(candidate) for candidate in bench.each(candidates, attrgetter("name"))]
    first = next((outcome for outcome in outcomes if outcome.candidate.name == "tsv"), outcomes[0])
    matched = outcomes[-1] if candidates[-1] is MATCHED else first
    for outcome in outcomes:
        row = {"method": outcome.candidate.name, **summary(outcome.test, names), "scale": outcome.scale}
        row |= {"edge": outcome.edge, "seconds": outcome.seconds, "validation": outcome.validation}
        other = matched if outcome.candidate.in_subspace else first
        if outcome is not other:
            row |= against(outcome.test, other.test)
        data.append(row)
    best = bench.winner.candidate.name if bench.winner else ""
    notes = [
        "Scale chosen on validation data, climbing from 1 both ways while it gains; everything else reported on test "
        "data; 95% intervals by bootstrap.",
        *_early_stops(candidates),
        f"Differences against {first.candidate.name} {cells.differences}, with 95% intervals and p of a paired "
        f"sign-flip test over test samples; epimer's methods against it at their own rank, {min(RANK, largest)}.",
        f"Best on validation data: {best}.",
    ]
    notes += edge_notes(data)
    notes += [f"Measuring {kind} curvature took {s:.1f} s." for kind, s in bench.seconds.items() if s >= 0.1]
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        **{name: cells.on_task(name) for name in names},
        "scale": starred_scale,
        "merge s": number("seconds", ".2f"),
        f"against {first.candidate.name}": cells.difference,
    }
    title, figure = f"{bench.metric} of merged models", dots(data, bench.metric, metric=bench.metric)
    return tabulate("performance", title, columns, data, notes + bench.notes, figure)


def _early_stops(candidates: Sequence[Candidate]) -> list[str]:
    """Return a note on the solves that are stopped early."""
    steps = {c.name: c.parameters["iterations"] for c in candidates if "iterations" in c.parameters}
    listed = ", ".join(f"{count} steps in {name}" for name, count in steps.items())
    return [f"Conjugate gradients stop after {listed}."] if listed else []


def worst_task(bench: Bench) -> Experiment:
    """Return which task each method serves worst, and by how much it falls short of fine-tuning."""
    own, cells = references(bench)["fine-tuned"].accuracies, Cells(bench.metric)
    names = [task.name for task in bench.suite.tasks]
    data = []
    for candidate in bench.each(CANDIDATES, attrgetter("name")):
        scores = bench.best(candidate).test
        t = min(range(len(names)), key=lambda i: scores.accuracies[i])
        shares = [a / b for a, b in zip(scores.accuracies, own, strict=True) if b > 0]
        kept = min(shares) if len(shares) == len(own) else None  # a score that is not positive has no shares
        data.append({"method": candidate.name, **summary(scores, names), "worst task": names[t], "kept": kept})
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "worst [95%]": cells.worst,
        "worst task": text("worst task"),
        "least share of fine-tuned kept": share("kept"),
    }
    of_worst = [row | dict(zip(("low", "high"), row["intervals"][row["worst task"]], strict=True)) for row in data]
    figure = dots(of_worst, bench.metric, ("worst", "average"), metric=bench.metric)
    return tabulate("worst-task", "Worst task", columns, data, [], figure)


def ranks_of(bench: Bench, wanted: Sequence[int] = RANKS) -> list[int]:
    """Return a grid of ranks, cut at floor(d / T) of the widest matrices; narrower ones are cut in the merge."""
    most = _largest_rank(bench)
    return sorted({min(k, most) for k in wanted if min(k, most) > 0})


def _largest_rank(bench: Bench) -> int:
    """Return floor(d / T) of the widest matrix."""
    shapes = [matrix_shape(W) for name, W in bench.suite.base.items() if is_matrix(name, W.shape)]
    return max(clamp_rank(shape, len(bench.states), None) for shape in shapes)


def alpha(bench: Bench) -> Experiment:
    """Return scores over α, rank and aggregator: the paper's sensitivity."""
    names = [task.name for task in bench.suite.tasks]
    cells = Cells(bench.metric)
    data, lines = [], Lines("α", f"average {bench.metric}", metric=bench.metric)
    merges = itertools.product(("epimer", "epimer_kron"), ranks_of(bench, (4, 16, 32)), ("sum", "mean"))
    for method, k, aggregator in bench.each(merges, "{0[0]}, k = {0[1]}, {0[2]}".format):
        merged = bench.merge(Candidate(method), rank=k, aggregator=aggregator)
        for scale in (*ALPHAS, len(bench.states) ** -0.5):
            row = summary(bench.score(bench.scaled(merged, scale), "test"), names)
            data.append({"method": method, "k": k, "aggregator": aggregator, "alpha": scale, **row})
            lines.add(f"{method}, k = {k}, {aggregator}", scale, row["average"], row["low"], row["high"])
    columns = {
        "method": text("method"),
        "k": text("k"),
        "aggregator": text("aggregator"),
        "α": number("alpha"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
    }
    notes = ["α is fixed here, not chosen; 1/√T is the last of each group.", "k is cut at floor(d/T)."]
    return tabulate("alpha", "Sensitivity to α", columns, data, notes, lines)


def eta(bench: Bench) -> Experiment:
    """Return η under three normalisations, and the margin of curvature over the flat merge, by rank."""
    cells, names = Cells(bench.metric), [task.name for task in bench.suite.tasks]
    data, margins, etas = [], Lines("k", cells.margin), Lines("k", "η / F(x̄)")
    base, curvature = dict(bench.suite.base), bench.curvature("diagonal")
    for k in bench.each(ranks_of(bench), "k = {}".format):
        total = diagnose_state_dicts(base, bench.states, curvature=curvature, rank=k, methods=()).total
        curved = bench.best(Candidate("epimer", {"rank": k})).test
        flat = bench.best(Candidate("tsv", {"rank": k, "coefficients": "projected"})).test
        row: Row = {"k": k, "eta": total.eta, "eta_unit_trace": total.eta_unit_trace}
        row |= {"eta_fraction": total.eta_fraction, **summary(curved, names), **against(curved, flat)}
        data.append(row)
        margins.add("epimer - tsv (projected)", k, row["difference"], *row["between"])
        etas.add("η / F(x̄)", k, total.eta_fraction)
    columns = {
        "k": text("k"),
        "η (mean diagonal 1)": number("eta"),
        "η (trace 1)": number("eta_unit_trace"),
        "η / F(x̄)": number("eta_fraction"),
        "epimer [95%]": cells.interval,
        "margin over the flat merge": cells.difference,
    }
    notes = [
        "Margin: epimer minus tsv with coefficients projected, its limit for flat curvature, at the same rank; "
        f"{cells.differences}, with 95% intervals and p of a paired test."
    ]
    return tabulate("eta", "η against rank", columns, data, notes, replace(margins, beside=etas))


def fisher_fraction(bench: Bench) -> Experiment:
    """Return scores against the share of the training data that the Fisher information is measured on."""
    fewest = _fewest(bench)
    counts = [(f"{100 * part:g}%", max(1, round(part * fewest))) for part in FRACTIONS]
    note = f"100% is what the task with the fewest samples has, {fewest}, of every task."
    return _by_samples(bench, "fisher-fraction", "Share of the data", counts, note)


def samples(bench: Bench) -> Experiment:
    """Return scores against the number of samples per task."""
    sizes = sorted({min(size, _fewest(bench)) for size in SIZES})
    return _by_samples(bench, "samples", "Samples per task", [(str(size), size) for size in sizes])


def _fewest(bench: Bench) -> int:
    """Return how many training samples every task has at least."""
    return min(len(task.splits["train"]) for task in bench.suite.tasks)


def _by_samples(bench: Bench, name: str, what: str, counts: list[tuple[str, int]], *notes: str) -> Experiment:
    cells, names = Cells(bench.metric), [task.name for task in bench.suite.tasks]
    data, lines = [], Lines("samples per task", f"average {bench.metric}", metric=bench.metric, log=True)
    flat = bench.best(MATCHED).test
    methods = ("fisher", "epimer", "epimer_kron")
    benches: list[Bench] = []
    for (label, count), method in bench.each(itertools.product(counts, methods), "{0[1]}, {0[0][1]} samples".format):
        if method == methods[0]:  # all methods share what is measured
            benches = [Bench(bench.suite, samples=count, seed=seed, keep=False) for seed in SEEDS]
        by_seed = [seeded.best(Candidate(method)).test for seeded in benches]
        by_task = zip(*(scores.values for scores in by_seed), strict=True)
        mean = Scores([torch.stack(list(values)).mean(0) for values in by_task])
        row: Row = {"method": method, "part": label, "samples": count, **summary(mean, names), **against(mean, flat)}
        row["error over tasks"] = statistics.stdev(mean.accuracies) / len(names) ** 0.5
        row["error over seeds"] = statistics.stdev(scores.average for scores in by_seed) / len(by_seed) ** 0.5
        data.append(row)
        lines.add(method, count, row["average"], row["low"], row["high"])
    data.sort(key=lambda row: methods.index(row["method"]))
    columns = {
        "method": text("method"),
        what: text("part"),
        "samples": text("samples"),
        "average [95%]": cells.interval,
        "s.e. over tasks": cells.spread("error over tasks"),
        "s.e. over seeds": cells.spread("error over seeds"),
        f"against tsv, k = {RANK}": cells.difference,
    }
    remarks = [
        f"Means over {len(SEEDS)} seeds, which choose the samples; 95% intervals by bootstrap over test samples.",
        f"Differences {cells.differences}, with p of a paired test.",
        *notes,
        *(["Standard errors are of the loss."] if bench.metric == "perplexity" else []),
    ]
    return tabulate(name, what, columns, data, remarks, lines)


def cost(bench: Bench, runs: int = 4) -> Experiment:
    """Return the wall-clock time of each method, curvature apart."""
    fresh = Bench(bench.suite, samples=bench.samples, seed=bench.seed, keep=False)  # so that curvature is measured anew
    data: list[Row] = []
    for candidate in bench.each(CANDIDATES, attrgetter("name")):
        if candidate.curvature is not None:
            fresh.curvature(candidate.curvature)
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            fresh.merge(candidate)
            times.append(time.perf_counter() - started + fresh.basis_seconds(candidate))
        row = {"method": candidate.name, "median": statistics.median(times), "least": min(times)}
        data.append({**row, "curvature": candidate.curvature or ""})
    notes = [f"Median of {runs} runs, on {torch.get_num_threads()} threads where the models are on the CPU."]
    notes += _early_stops(CANDIDATES)
    notes += [f"Measuring {kind} curvature of all models took {s:.1f} s." for kind, s in fresh.seconds.items()]
    timings = {"median s": number("median"), "least s": number("least")}
    columns = {"method": text("method"), **timings, "curvature": text("curvature")}
    figure = dots(data, "seconds", ("median", "least"), log=True)
    return tabulate("cost", "Wall-clock time", columns, data, notes, figure)


def metrics(bench: Bench) -> Experiment:
    """Return scores over metric, subspace, aggregator and damping."""
    names, cells = [task.name for task in bench.suite.tasks], Cells(bench.metric)
    data = []
    grid = itertools.product(METRICS, ("tagged", "tensor", "full"), ("mean", "sum", "anchored"), (0.01, 0.3, 1.0))
    steps = [step for step in grid if step[:2] not in (("exact", "tensor"), ("exact", "full"))]
    flat = bench.best(MATCHED).test
    for metric, basis, aggregator, damping in bench.each(steps, "{0[0]}, {0[1]}, {0[2]}, {0[3]}".format):
        parameters = {"basis": basis, "aggregator": aggregator, "damping": damping, "iterations": STEPS}
        outcome = bench.best(Candidate(METRICS[metric], parameters))
        row = {"metric": metric, **parameters, "scale": outcome.scale, "validation": outcome.validation}
        row |= {"edge": outcome.edge, **against(outcome.test, flat)}
        data.append({**row, **summary(outcome.test, names)})
    columns = {
        "metric": text("metric"),
        "subspace": text("basis"),
        "aggregator": text("aggregator"),
        "damping": number("damping"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        "scale": starred_scale,
        f"against tsv, k = {RANK}": cells.difference,
    }
    best: dict[str, Row] = {}
    for row in data:
        name = f"{row['metric']}, {row['basis']}, {row['aggregator']}"
        if name not in best or row["validation"] > best[name]["validation"]:
            best[name] = {**row, "method": name}
    notes = [
        f"Conjugate gradients stop after {STEPS} steps.",
        "Exact curvature is kept in the tagged subspace only.",
        f"Differences {cells.differences}, with 95% intervals and p of a paired test.",
        "The figure has of every metric, subspace and aggregator the damping that is best on validation data.",
        *edge_notes(data),
    ]
    figure = dots(list(best.values()), bench.metric, metric=bench.metric)
    return tabulate("metrics", "Metric x subspace x aggregator", columns, data, notes, figure)


def tasks(bench: Bench) -> Experiment:
    """Return scores against the number of merged models: the first 2, 3, … of the suite."""
    cells = Cells(bench.metric)
    data, lines = [], Lines("merged models", f"average {bench.metric} on their tasks", metric=bench.metric)
    steps = itertools.product(("tsv", "average", "epimer_free", "epimer_kron"), range(2, len(bench.states) + 1))
    reached: dict[tuple[str, int], Scores] = {}
    for method, count in bench.each(steps, "{0[0]}, {0[1]} models".format):
        merged = bench.merge(Candidate(method), models=range(count))
        part = replace(bench.suite, tasks=bench.suite.tasks[:count], models=bench.suite.models[:count])

        def at(scale: float, split: str, merged: Any = merged, part: Suite = part) -> Scores:
            return Scores(part.scores(bench.scaled(merged, scale), split))

        scale = max(COARSER, key=lambda s: at(s, "val").average)
        reached[method, count] = at(scale, "test")
        row = summary(reached[method, count], [task.name for task in part.tasks])
        by = against(reached[method, count], reached["tsv", count]) if method != "tsv" else {}
        data.append({"method": method, "T": count, "scale": scale, **row, **by})
        lines.add(method, count, row["average"], row["low"], row["high"])
    notes = [
        f"Scale: the best of {', '.join(f'{scale:g}' for scale in COARSER)} on validation data.",
        f"Differences {cells.differences}, with 95% intervals and p of a paired test.",
    ]
    columns = {
        "method": text("method"),
        "T": text("T"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        "scale": number("scale"),
        "against tsv": cells.difference,
    }
    return tabulate("tasks", "Number of tasks", columns, data, notes, lines)


def landscape(bench: Bench, grid: int = GRID, seen: int = SEEN) -> Experiment:
    """Return every task's loss on the plane of the fine-tuned models' first two principal components."""
    suite = bench.suite.truncated(test=seen)
    merged: dict[str, Mapping[str, Any]] = {}
    for method in bench.each(SHOWN):
        candidate = Candidate(method)
        merged[method] = bench.scaled(bench.merge(candidate), bench.best(candidate).scale)
    names = [task.name for task in suite.tasks]
    models = dict(zip(names, bench.states, strict=True))
    points, done = 1 + len(models) + len(merged) + grid**2, itertools.count(1)
    plane = survey(
        dict(suite.base), models, lambda state: suite.losses(state, "test"), merged=merged, tasks=names, grid=grid,
        progress=lambda _: bench.report_progress(next(done), points, "losses"),
    )  # fmt: skip
    rows = [asdict(point.record(names)) for point in plane.points]
    data = [{"point": row.pop("name"), **row} for row in rows]
    place = {"a": number("a"), "b": number("b"), "off the plane": number("off")}
    columns = {"model": text("point"), **place, "summed loss": number("joint")}
    notes = [
        f"The plane holds {100 * plane.explained:.0f}% of the fine-tuned models' variance; a model's loss is its own, "
        "which lies off the plane by the share shown.",
        f"Losses over the first {seen} test samples of each task, where it has as many.",
    ]
    return tabulate("landscape", "Loss landscape", columns, data, notes, plane.record())


EXPERIMENTS: dict[str, Callable[[Bench], Experiment]] = {
    "performance": performance,
    "worst-task": worst_task,
    "alpha": alpha,
    "eta": eta,
    "fisher-fraction": fisher_fraction,
    "landscape": landscape,
    "cost": cost,
    "metrics": metrics,
    "samples": samples,
    "tasks": tasks,
}
"""by name, as the paper has them and then ours"""
