"""The table of performance over training seeds: each seed's models are merged and scored, then put side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from epimer.atomic_files import check_folder
from epimer.errors import DataError, ParameterError
from epimer.evaluation.open_suite import open_suite
from epimer.evaluation.statistics import sign_flip_p
from epimer.evaluation.suite import Suite, SuiteTask
from epimer.experiments.bench import Bench
from epimer.experiments.paper import EXPERIMENTS
from epimer.experiments.results import Cells, Column, Row, dots, tabulate, text, with_published, write
from epimer.progress import Progress
from epimer.records import Experiment


def run_seeds(
    suite: str, seeds: Sequence[int], folder: Path, *, progress: bool = True, **options: Any
) -> Iterator[tuple[Experiment, list[Path]]]:
    """Run `performance` for every seed of a suite and yield each table, then the one over all seeds, with their files.

    `suite` and `options` are those of `open_suite`; a seed is of the suite's models and of the choice of samples.
    """
    folder = folder.expanduser()
    check_folder(folder)
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds):
        raise ParameterError(f"--seeds needs two different seeds at least, as 0,1,2; got {','.join(map(str, seeds))}.")
    opened = partial(open_suite, suite, progress=progress, **options)
    if _same_models(opened(seed=seeds[0]), opened(seed=seeds[1])):
        raise DataError(
            f"{suite}: its models are the same for every seed, so that there is no spread to report; --seeds is for "
            "suites whose models are trained here, as glyphs8's. Leave it out."
        )
    results: dict[int, Experiment] = {}
    for seed in seeds:
        bench = Bench(opened(seed=seed), seed=seed)
        with Progress(progress, unit="steps") as bar:
            bench.report_progress = bar.begin(f"performance, seed {seed}", None).reach
            results[seed] = with_published(EXPERIMENTS["performance"](bench), bench.suite)
        result = replace(bench.with_provenance(results[seed]), name=f"performance-seed{seed}")
        yield result, write(result, folder)
    total = bench.with_provenance(over_seeds(results, bench.metric, bench.suite.tasks), seeds=seeds)
    yield total, write(total, folder)


def _same_models(one: Suite, two: Suite) -> bool:
    """Whether the first models of two suites are equal."""
    first, second = one.models[0], two.models[0]
    return first.keys() == second.keys() and all(torch.equal(W, second[name]) for name, W in first.items())


def over_seeds(results: Mapping[int, Experiment], metric: str, tasks: Sequence[SuiteTask]) -> Experiment:
    """Return every method's mean over seeds and the spread between them, from each seed's table of performance."""
    by_seed = {seed: {row["method"]: row for row in result.data} for seed, result in results.items()}
    shared = [name for name in next(iter(by_seed.values())) if all(name in rows for rows in by_seed.values())]
    data = [_row(name, by_seed, tasks) for name in shared]
    cells = Cells(metric)
    columns: dict[str, Column] = {
        "method": text("method"),
        "mean ± sd over seeds": lambda row: f"{cells.score('average')(row)} ± {cells.spread('sd')(row)}",
        "each seed": lambda row: ", ".join(cells.score("average")({"average": one}) for one in row["seeds"].values()),
        "worst": cells.score("worst"),
        **{task.name: cells.on_task(task.name) for task in tasks},
        **(cells.comparison("against tsv", tasks) | {"against tsv": partial(_difference, cells)}),
    }
    count = ", ".join(map(str, results))
    notes = [
        f"Seeds {count}: each draws its own data, trains its own base and models, measures curvature on its own "
        "samples and chooses its own scales.",
        f"sd: the standard deviation between seeds. Differences {cells.differences}: their mean, sd, and each seed's.",
        "p over tasks: a sign-flip test over all patterns of signs, on each task's mean difference over seeds; p over "
        "samples, with Holm's correction, are in each seed's own table.",
        "Without one task: the least and the largest difference (average, where nothing is compared) as each task in "
        "turn is left out.",
        *(f"{task.name} is doubtful: {task.doubtful}." for task in tasks if task.doubtful),
        "In the figure lines go from the lowest seed to the highest.",
    ]
    title, figure = f"{metric} over {len(results)} seeds", dots(data, metric, metric=metric)
    return tabulate("performance-seeds", title, columns, data, notes, figure)


def _row(method: str, by_seed: Mapping[int, Mapping[str, Row]], tasks: Sequence[SuiteTask]) -> Row:
    """Return a method's means over seeds, and its differences from what each seed's table compares it with."""
    rows = {seed: table[method] for seed, table in by_seed.items()}
    averages = {seed: row["average"] for seed, row in rows.items()}
    means = {task.name: statistics.fmean(row["tasks"][task.name] for row in rows.values()) for task in tasks}
    row: Row = {"method": method, **_spread(averages), "low": min(averages.values()), "high": max(averages.values())}
    row |= {"worst": min(means.values()), "tasks": means, **_left_out("without", "trusted", means, tasks)}
    row |= {"scales": {seed: one["scale"] for seed, one in rows.items()}} if "scale" in rows[min(rows)] else {}
    if not all("against" in one for one in rows.values()):
        return row | {"reference": any(one.get("reference") for one in rows.values())}
    others = {seed: by_seed[seed][one["against"]] for seed, one in rows.items()}
    ahead = {
        task.name: statistics.fmean(rows[seed]["tasks"][task.name] - others[seed]["tasks"][task.name] for seed in rows)
        for task in tasks
    }
    spread = _spread({seed: one["difference"] for seed, one in rows.items()})
    row |= {"difference": spread["average"], "difference_sd": spread["sd"], "differences": spread["seeds"]}
    row |= {"p_tasks": sign_flip_p(list(ahead.values())), "against": rows[min(rows)]["against"]}
    return row | _left_out("difference_without", "difference_trusted", ahead, tasks)


def _spread(values: Mapping[int, float]) -> Row:
    """Return the mean over seeds, the standard deviation, and every seed's value."""
    return {
        "average": statistics.fmean(values.values()),
        "sd": statistics.stdev(values.values()),
        "seeds": dict(values),
    }


def _left_out(one: str, doubtful: str, values: Mapping[str, float], tasks: Sequence[SuiteTask]) -> Row:
    """Return means over tasks: under `one` without each task in turn, under `doubtful` without doubtful tasks."""
    total, others = sum(values.values()), len(values) - 1
    row: Row = {one: {name: (total - value) / others for name, value in values.items()} if others else {}}
    kept = [values[task.name] for task in tasks if not task.doubtful]
    return row | ({doubtful: statistics.fmean(kept)} if 0 < len(kept) < len(tasks) else {})


def _difference(cells: Cells, row: Row) -> str:
    """Show the mean difference over seeds, its standard deviation and each seed's."""
    if "difference" not in row:
        return ""
    each = ", ".join(map(cells.with_sign, row["differences"].values()))
    return f"{cells.with_sign(row['difference'])} ± {cells.spread('difference_sd')(row)} ({each})"
