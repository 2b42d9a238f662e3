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
from epimer.experiments.bench import (
    AS_PUBLISHED,
    CANDIDATES,
    RANK,
    STEPS,
    Bench,
    Candidate,
    Outcome,
    all_candidates,
    references,
)
from epimer.experiments.results import (
    Cells,
    Row,
    against,
    comparison_notes,
    correct_for_number,
    dots,
    edge_notes,
    number,
    share,
    starred_scale,
    summary,
    tabulate,
    text,
)
from epimer.experiments.unlabelled import unlabelled
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

TSV = Candidate("tsv")
MATCHED = Candidate("tsv", {"rank": RANK}, f"tsv, k = {RANK}")


def performance(bench: Bench, candidates: Sequence[Candidate] | None = None) -> Experiment:
    """Return every method's average and per-task scores, at the scale that validation data chose."""
    candidates = all_candidates() if candidates is None else candidates
    if _largest_rank(bench) > RANK:  # else tsv's own rank is the same
        candidates = [*candidates, MATCHED]
    outcomes = [bench.best(candidate) for candidate in bench.each(candidates, attrgetter("name"))]
    return _performance_table(bench, outcomes)


def unfinished_performance(bench: Bench) -> Experiment | None:
    """Return the table of the methods that were finished when `performance` was interrupted; None if none was."""
    wanted = (*all_candidates(), MATCHED)  # earlier experiments leave outcomes of other settings
    outcomes = [outcome for outcome in bench.outcomes if outcome.candidate in wanted]
    if not outcomes:
        return None
    result = _performance_table(bench, outcomes)
    note = f"Interrupted: only the {len(outcomes)} methods that were finished by then."
    return replace(result, name="performance-unfinished", notes=[note, *result.notes])


def _performance_table(bench: Bench, outcomes: Sequence[Outcome]) -> Experiment:
    """Return the table of some methods' outcomes, beside the base and the fine-tuned models."""
    suite, cells = bench.suite, Cells(bench.metric)
    candidates = [outcome.candidate for outcome in outcomes]
    largest = _largest_rank(bench)
    data: list[Row] = [
        {"method": name, "reference": True, **summary(scores, suite.tasks)}
        for name, scores in references(bench).items()
    ]
    first = next((outcome for outcome in outcomes if outcome.candidate.name == "tsv"), outcomes[0])
    matched = outcomes[-1] if candidates[-1] is MATCHED else first
    for outcome in outcomes:
        row = {"method": outcome.candidate.name, **summary(outcome.test, suite.tasks), "scale": outcome.scale}
        row |= {"edge": outcome.edge, "seconds": outcome.seconds, "validation": outcome.validation}
        other = matched if outcome.candidate.in_subspace else first
        if outcome is not other:
            row |= {"against": other.candidate.name, **against(outcome.test, other.test, suite.tasks)}
        data.append(row)
    correct_for_number(data)
    best = max(outcomes, key=attrgetter("validation")).candidate.name
    notes = [
        "Scale chosen on validation data, climbing from 1 both ways while it gains; everything else reported on test "
        "data; 95% intervals by bootstrap.",
        *_early_stops(candidates),
        *comparison_notes(bench.metric, data, suite.tasks),
        f"epimer's methods are compared with {first.candidate.name} at their own rank, {min(RANK, largest)}.",
        *_published_notes(candidates),
        f"Best on validation data: {best}.",
    ]
    notes += edge_notes(data)
    notes += [f"Measuring {kind} curvature took {s:.1f} s." for kind, s in bench.seconds.items() if s >= 0.1]
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        **{task.name: cells.on_task(task.name) for task in suite.tasks},
        "scale": starred_scale,
        "merge s": number("seconds", ".2f"),
        **cells.comparison(f"against {first.candidate.name}", suite.tasks),
    }
    title, figure = f"{bench.metric} of merged models", dots(data, bench.metric, metric=bench.metric)
    return tabulate("performance", title, columns, data, notes + bench.notes, figure)


def _early_stops(candidates: Sequence[Candidate]) -> list[str]:
    """Return a note on the solves that are stopped early."""
    steps = {c.name: c.parameters["iterations"] for c in candidates if "iterations" in c.parameters}
    listed = ", ".join(f"{count} steps in {name}" for name, count in steps.items())
    return [f"Conjugate gradients stop after {listed}."] if listed else []


def _published_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return a note on what `as published` means, where a candidate is."""
    if not any("as published" in candidate.name for candidate in candidates):
        return []
    return [
        "As published: the empirical Fisher with true labels, no normalisation, no damping; the paper calls its jitter "
        "small and gives no number, so 1e-8, and 1e-3 in a row of its own. The row epimer is ours: labels drawn from "
        "the model, mean diagonal 1, damping 0.01."
    ]


def _rival(bench: Bench, candidate: Candidate) -> Candidate:
    """Return what a candidate is compared with: tsv, at the same rank where it merges in a basis."""
    return MATCHED if candidate.in_subspace and _largest_rank(bench) > RANK else TSV


def worst_task(bench: Bench) -> Experiment:
    """Return which task each method serves worst, and by how much it falls short of fine-tuning."""
    own, cells = references(bench)["fine-tuned"].accuracies, Cells(bench.metric)
    tasks = bench.suite.tasks
    names = [task.name for task in tasks]
    data = []
    for candidate in bench.each(all_candidates(), attrgetter("name")):
        scores = bench.best(candidate).test
        t = min(range(len(names)), key=lambda i: scores.accuracies[i])
        shares = [a / b for a, b in zip(scores.accuracies, own, strict=True) if b > 0]
        kept = min(shares) if len(shares) == len(own) else None  # a score that is not positive has no shares
        row = {"method": candidate.name, **summary(scores, tasks), "worst task": names[t], "kept": kept}
        rival = bench.best(_rival(bench, candidate)).test
        data.append(row if rival is scores else row | against(scores, rival, tasks))
    correct_for_number(data)
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "worst [95%]": cells.worst,
        "worst task": text("worst task"),
        "least share of fine-tuned kept": share("kept"),
        **cells.comparison("average against tsv", tasks),
    }
    of_worst = [row | dict(zip(("low", "high"), row["intervals"][row["worst task"]], strict=True)) for row in data]
    figure = dots(of_worst, bench.metric, ("worst", "average"), metric=bench.metric)
    notes = comparison_notes(bench.metric, data, tasks)
    return tabulate("worst-task", "Worst task", columns, data, notes, figure)


def ranks_of(bench: Bench, wanted: Sequence[int] = RANKS) -> list[int]:
    """Return a grid of ranks, cut at floor(d / T) of the widest matrices; narrower ones are cut in the merge."""
    most = _largest_rank(bench)
    return sorted({min(k, most) for k in wanted if min(k, most) > 0})


def _largest_rank(bench: Bench) -> int:
    """Return floor(d / T) of the widest matrix."""
    shapes = [matrix_shape(W) for name, W in bench.suite.base.items() if is_matrix(name, W.shape)]
    return max(clamp_rank(shape, len(bench.states), None) for shape in shapes)


def alpha(bench: Bench) -> Experiment:
    """Return scores over α, rank and aggregator, beside those of TSV-M: the paper's sensitivity."""
    tasks, T, cells = bench.suite.tasks, len(bench.states), Cells(bench.metric)
    data, lines = [], Lines("α", f"average {bench.metric}", metric=bench.metric, log=True)
    alphas, ranks = sorted({*ALPHAS, T**-0.5}), ranks_of(bench, (4, 16, 32))
    as_far = [(a, a) for a in alphas] + [
        (T * a, a) for a in alphas if T * a > alphas[-1]
    ]  # on matrices sum is T · mean
    curved = itertools.product((Candidate("epimer"), Candidate("epimer_kron")), ranks, ("sum", "mean"))
    published = next(candidate for candidate in AS_PUBLISHED if candidate.method == "epimer")
    merges = [*itertools.product((TSV, published), ranks, ("",)), *curved]
    flat: dict[tuple[int, float], Scores] = {}
    for candidate, k, aggregator in bench.each(merges, lambda step: f"{step[0].name}, k = {step[1]}, {step[2]}"):
        method, parameters = candidate.name, {"rank": k, **({"aggregator": aggregator} if aggregator else {})}
        merged = bench.merge(replace(candidate, parameters={**candidate.parameters, **parameters}))
        for scale, reach in as_far if aggregator == "mean" else [(a, a) for a in alphas]:
            scores = bench.score(bench.scaled(merged, scale), "test")
            row = {"method": method, "k": k, "aggregator": aggregator, "alpha": scale, **summary(scores, tasks)}
            other = flat.setdefault((k, reach), scores)  # the first merges are tsv's
            data.append(row if other is scores else row | against(scores, other, tasks))
            name = f"{method}, k = {k}" + (f", {aggregator}" if aggregator else "")
            lines.add(name, scale, row["average"], row["low"], row["high"])
    correct_for_number(data)
    columns = {
        "method": text("method"),
        "k": text("k"),
        "aggregator": text("aggregator"),
        "α": number("alpha"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        **cells.comparison("against tsv", tasks),
    }
    notes = [
        f"α is fixed here, not chosen; {T**-0.5:.3g} is 1/√T. k is cut at floor(d/T).",
        "Compared with tsv at the same k and α. mean goes on to T times the last α, as on matrices sum is T · mean, "
        "and is compared there with tsv at α/T.",
        *comparison_notes(bench.metric, data, tasks),
    ]
    return tabulate("alpha", "Sensitivity to α", columns, data, notes, lines)


def eta(bench: Bench) -> Experiment:
    """Return η under three normalisations, and the margin of curvature over the flat merge, by rank."""
    cells, tasks = Cells(bench.metric), bench.suite.tasks
    data, margins, etas = [], Lines("k", cells.margin), Lines("k", "η / F(x̄)")
    base, curvature = dict(bench.suite.base), bench.curvature("diagonal")
    for k in bench.each(ranks_of(bench), "k = {}".format):
        total = diagnose_state_dicts(base, bench.states, curvature=curvature, rank=k, methods=()).total
        curved = bench.best(Candidate("epimer", {"rank": k})).test
        flat = bench.best(Candidate("tsv", {"rank": k, "coefficients": "projected"})).test
        row: Row = {"k": k, "eta": total.eta, "eta_unit_trace": total.eta_unit_trace}
        row |= {"eta_fraction": total.eta_fraction, **summary(curved, tasks), **against(curved, flat, tasks)}
        data.append(row)
        margins.add("epimer - tsv (projected)", k, row["difference"], *row["between"])
        etas.add("η / F(x̄)", k, total.eta_fraction)
    columns = {
        "k": text("k"),
        "η (mean diagonal 1)": number("eta"),
        "η (trace 1)": number("eta_unit_trace"),
        "η / F(x̄)": number("eta_fraction"),
        "epimer [95%]": cells.interval,
        **cells.comparison("margin over the flat merge", tasks),
    }
    correct_for_number(data)
    notes = [
        "Margin: epimer minus tsv with coefficients projected, its limit for flat curvature, at the same rank.",
        *comparison_notes(bench.metric, data, tasks),
    ]
    return tabulate("eta", "η against rank", columns, data, notes, replace(margins, beside=etas))


def fisher_fraction(bench: Bench) -> Experiment:
    """Return scores against the share of the training data that the Fisher information is measured on."""
    fewest = _fewest(bench)
    counts = [(f"{100 * part:g}%", max(1, round(part * fewest))) for part in FRACTIONS]
    notes = [
        f"100% is what the task with the fewest samples has, {fewest}, of every task.",
        "As published: at α = 1, as in the paper's own study; the others at the scale that validation data chose.",
    ]
    published = [candidate for candidate in AS_PUBLISHED if candidate.method == "epimer"]
    return _by_samples(bench, "fisher-fraction", "Share of the data", counts, published, *notes)


def samples(bench: Bench) -> Experiment:
    """Return scores against the number of samples per task."""
    sizes = sorted({min(size, _fewest(bench)) for size in SIZES})
    return _by_samples(bench, "samples", "Samples per task", [(str(size), size) for size in sizes])


def _fewest(bench: Bench) -> int:
    """Return how many training samples every task has at least."""
    return min(len(task.splits["train"]) for task in bench.suite.tasks)


def _by_samples(
    bench: Bench, name: str, what: str, counts: list[tuple[str, int]], at_one: Sequence[Candidate] = (), *notes: str
) -> Experiment:
    """Return scores against samples: of three methods at their best scales, and of others at scale 1."""
    cells, tasks = Cells(bench.metric), bench.suite.tasks
    data, lines = [], Lines("samples per task", f"average {bench.metric}", metric=bench.metric, log=True)
    flat = bench.best(MATCHED).test
    candidates = [*map(Candidate, ("fisher", "epimer", "epimer_kron")), *at_one]
    benches: list[Bench] = []
    steps = list(itertools.product(counts, candidates))
    for (label, count), one in bench.each(steps, lambda step: f"{step[1].name}, {step[0][1]} samples"):
        if one is candidates[0]:  # all methods share what is measured
            benches = [Bench(bench.suite, samples=count, seed=seed, keep=False) for seed in SEEDS]
        by_seed = [seeded.at(one, 1.0) if one in at_one else seeded.best(one).test for seeded in benches]
        by_task = zip(*(scores.values for scores in by_seed), strict=True)
        mean = Scores([torch.stack(list(values)).mean(0) for values in by_task])
        row: Row = {"method": one.name, "part": label, "samples": count, **summary(mean, tasks)}
        row |= against(mean, flat, tasks)
        row["error over tasks"] = statistics.stdev(mean.accuracies) / len(tasks) ** 0.5
        row["error over seeds"] = statistics.stdev(scores.average for scores in by_seed) / len(by_seed) ** 0.5
        data.append(row)
        lines.add(one.name, count, row["average"], row["low"], row["high"])
    order = [candidate.name for candidate in candidates]
    data.sort(key=lambda row: order.index(row["method"]))
    correct_for_number(data)
    columns = {
        "method": text("method"),
        what: text("part"),
        "samples": text("samples"),
        "average [95%]": cells.interval,
        "s.e. over tasks": cells.spread("error over tasks"),
        "s.e. over seeds": cells.spread("error over seeds"),
        **cells.comparison(f"against tsv, k = {RANK}", tasks),
    }
    remarks = [
        f"Means over {len(SEEDS)} seeds, which choose the samples; 95% intervals by bootstrap over test samples.",
        *comparison_notes(bench.metric, data, tasks),
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
    tasks, cells = bench.suite.tasks, Cells(bench.metric)
    data = []
    grid = itertools.product(METRICS, ("tagged", "tensor", "full"), ("mean", "sum", "anchored"), (0.01, 0.3, 1.0))
    steps = [step for step in grid if step[:2] not in (("exact", "tensor"), ("exact", "full"))]
    flat = bench.best(MATCHED).test
    for metric, basis, aggregator, damping in bench.each(steps, "{0[0]}, {0[1]}, {0[2]}, {0[3]}".format):
        parameters = {"basis": basis, "aggregator": aggregator, "damping": damping, "iterations": STEPS}
        outcome = bench.best(Candidate(METRICS[metric], parameters))
        row = {"metric": metric, **parameters, "scale": outcome.scale, "validation": outcome.validation}
        row |= {"edge": outcome.edge, **against(outcome.test, flat, tasks)}
        data.append({**row, **summary(outcome.test, tasks)})
    correct_for_number(data)
    columns = {
        "metric": text("metric"),
        "subspace": text("basis"),
        "aggregator": text("aggregator"),
        "damping": number("damping"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        "scale": starred_scale,
        **cells.comparison(f"against tsv, k = {RANK}", tasks),
    }
    best: dict[str, Row] = {}
    for row in data:
        name = f"{row['metric']}, {row['basis']}, {row['aggregator']}"
        if name not in best or row["validation"] > best[name]["validation"]:
            best[name] = {**row, "method": name}
    notes = [
        f"Conjugate gradients stop after {STEPS} steps.",
        "Exact curvature is kept in the tagged subspace only.",
        "Scales of mean go on to T times the last, as on matrices sum is T · mean.",
        *comparison_notes(bench.metric, data, tasks),
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
            return Scores((part.trusted if split == "val" else part).scores(bench.scaled(merged, scale), split))

        scale = max(COARSER, key=lambda s: at(s, "val").average)
        reached[method, count] = at(scale, "test")
        row = summary(reached[method, count], part.tasks)
        by = against(reached[method, count], reached["tsv", count], part.tasks) if method != "tsv" else {}
        data.append({"method": method, "T": count, "scale": scale, **row, **by})
        lines.add(method, count, row["average"], row["low"], row["high"])
    correct_for_number(data)
    notes = [
        f"Scale: the best of {', '.join(f'{scale:g}' for scale in COARSER)} on validation data.",
        *comparison_notes(bench.metric, data, bench.suite.tasks),
    ]
    columns = {
        "method": text("method"),
        "T": text("T"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        "scale": number("scale"),
        **cells.comparison("against tsv", bench.suite.tasks),
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
    "unlabelled": unlabelled,
}
"""by name, as the paper has them and then ours"""
