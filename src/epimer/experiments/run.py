"""Run experiments on a suite and write their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epimer.atomic_files import check_folder
from epimer.errors import DataError, ParameterError, nearest
from epimer.evaluation.open_suite import open_suite
from epimer.experiments.basins import WITHOUT_SUITE
from epimer.experiments.bench import Bench
from epimer.experiments.paper import EXPERIMENTS, unfinished_performance
from epimer.experiments.results import with_published, write
from epimer.progress import Progress
from epimer.records import Experiment
from epimer.score_format import LOSSES

SPLITS = {"train": "measures curvature", "val": "chooses", "test": "reports"}
"""split -> what an experiment does with it"""
NEEDED_SPLITS = {"alpha": ("train", "test"), "cost": ("train",)}
"""which splits an experiment reads, where it is not all three"""


def run_experiments(
    suite: str, names: Sequence[str], folder: Path, *, seed: int = 0, progress: bool = True, **options: Any
) -> Iterator[tuple[Experiment, list[Path]]]:
    """Run experiments in turn and yield each result with the files it was written to in `folder`.

    The name `all` leaves out those that do not fit the suite, and those that need none. `suite` and `options` are those
    of `open_suite`; `seed` is of the suite and of the choice of samples. If `performance` is interrupted, the methods
    that were finished are yielded as `performance-unfinished` before the exception is raised again.
    """
    folder, every = folder.expanduser(), "all" in names
    check_folder(folder)
    chosen = list(EXPERIMENTS) if every else list(dict.fromkeys(names))
    for name in chosen:
        if name not in EXPERIMENTS and name not in WITHOUT_SUITE:
            every_name = (*EXPERIMENTS, *WITHOUT_SUITE)
            hint, known = nearest(name, every_name), ", ".join(every_name)
            raise ParameterError(f"There is no experiment {name!r}.{hint} Experiments: {known}, all.")
    for name in (name for name in chosen if name in WITHOUT_SUITE):
        result = WITHOUT_SUITE[name]()
        yield result, write(result, folder)
    chosen = [name for name in chosen if name in EXPERIMENTS]
    if not chosen:
        return
    bench = Bench(open_suite(suite, seed=seed, progress=progress, **options), seed=seed)
    problems = {name: problem for name in chosen if (problem := _problem(bench, name))}
    if problems and not (every and len(problems) < len(chosen)):
        raise DataError(f"{bench.suite.name}: {next(iter(problems.values()))}.")
    left_out = [f"Left out: {problem}." for problem in problems.values()]
    for name in (name for name in chosen if name not in problems):
        try:
            with Progress(progress, unit="steps") as bar:
                bench.report_progress = bar.begin(name, None).reach
                result = with_published(EXPERIMENTS[name](bench), bench.suite)
        except BaseException:  # a signal above all, but the finished methods of a failure are worth as much
            unfinished = unfinished_performance(bench) if name == "performance" else None
            if unfinished is not None:
                unfinished = bench.with_provenance(unfinished)
                yield unfinished, write(unfinished, folder)
            raise
        result, left_out = bench.with_provenance(result, *left_out), []  # noted with the first result only
        yield result, write(result, folder)


def _problem(bench: Bench, experiment: str) -> str:
    """Return why an experiment cannot be run on a suite, or nothing."""
    suite = bench.suite
    for task in suite.tasks:
        for split in NEEDED_SPLITS.get(experiment, tuple(SPLITS)):
            if split not in task.splits:
                return (
                    f"task {task.name!r} has no {split} data, on which {experiment!r} {SPLITS[split]}; add it "
                    "(`epimer eval` needs only test)"
                )
    least = 3 if experiment == "landscape" else 2
    if len(suite.tasks) < least:
        return f"{experiment!r} needs {least} tasks at least, each with its model, and there are {len(suite.tasks)}"
    if experiment == "worst-task" and bench.metric in LOSSES:
        return (
            f"'worst-task' tells what share of fine-tuning's score is kept, and a {bench.metric} has none; "
            "leave it out, or take another metric"
        )
    return ""
