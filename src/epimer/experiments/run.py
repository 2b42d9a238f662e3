"""Run experiments on a suite by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epimer.checkpoints.writer import check_folder
from epimer.errors import DataError, ParameterError, nearest
from epimer.evaluation.suite import Suite
from epimer.evaluation.user_code import call_entry, is_entry
from epimer.experiments.bench import Bench
from epimer.experiments.output import write
from epimer.experiments.paper import EXPERIMENTS
from epimer.experiments.results import with_published
from epimer.progress import Progress
from epimer.records import Experiment
from epimer.score_format import LOSSES

SUITES = ("glyphs8", "clip8")
NEEDS = {"alpha": ("train", "test"), "cost": ("train",)}
"""which splits an experiment reads, where it is not all three"""


def is_file(name: str) -> bool:
    """Whether a suite is named by its YAML file."""
    return name.lower().endswith((".yaml", ".yml"))


def open_suite(
    name: str,
    *,
    seed: int = 0,
    progress: bool = True,
    device: str = "auto",
    keep: bool = True,
    labels: bool = True,
    **options: Any,
) -> Suite:
    """Build or load a suite: by name, by its YAML file, or by `module:function`, a function of one's own.

    `device`, `keep` and `labels` are for YAML files, see `read_suite`; `options` are for clip8, see its `load`.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if name == "clip8":
        from epimer.experiments.clip8.load import load as load_clip8

        return load_clip8(seed=seed, progress=progress, **given)
    if given:
        raise ParameterError(f"--{next(iter(given))} is for the suite clip8; leave it out for {name}.")
    if is_file(name):
        from epimer.evaluation.hf_suite import read_suite

        return read_suite(name, device=device, keep=keep, labels=labels, progress=progress)
    if is_entry(name):
        return call_entry(name)
    if name not in SUITES:
        more = "or give a YAML file, or module:function"
        raise ParameterError(f"There is no suite {name!r}.{nearest(name, SUITES)} Suites: {', '.join(SUITES)}; {more}.")
    from epimer.experiments.glyphs8.build import load

    return load(seed=seed, progress=progress)


def run_experiments(
    suite: str, names: Sequence[str], folder: Path, *, seed: int = 0, progress: bool = True, **options: Any
) -> Iterator[tuple[Experiment, list[Path]]]:
    """Run experiments one by one; each is written when it is done. Options are those of `open_suite`."""
    folder, everything = folder.expanduser(), "all" in names
    check_folder(folder)
    wanted = list(EXPERIMENTS) if everything else list(dict.fromkeys(names))
    for name in wanted:
        if name not in EXPERIMENTS:
            hint, known = nearest(name, EXPERIMENTS), ", ".join(EXPERIMENTS)
            raise ParameterError(f"There is no experiment {name!r}.{hint} Experiments: {known}, all.")
    bench = Bench(open_suite(suite, seed=seed, progress=progress, **options), seed=seed)
    unfit = {name: why for name in wanted if (why := _unfit(bench, name))}
    if unfit and not (everything and len(unfit) < len(wanted)):
        raise DataError(f"{bench.suite.name}: {next(iter(unfit.values()))}.")
    left_out = [f"Left out: {why}." for why in unfit.values()]
    for name in (name for name in wanted if name not in unfit):
        with Progress(progress, unit="steps") as bar:
            bench.watch = bar.begin(name, None).reach
            result = with_published(EXPERIMENTS[name](bench), bench.suite)
        result, left_out = bench.signed(result, *left_out), []  # said once
        yield result, write(result, folder)


def _unfit(bench: Bench, experiment: str) -> str:
    """Return why an experiment cannot be run on a suite, or nothing."""
    suite, measured = bench.suite, bench.metric
    for task in suite.tasks:
        lacking = [split for split in NEEDS.get(experiment, ("train", "val", "test")) if split not in task.splits]
        if lacking:
            use = {"train": "measures curvature", "val": "chooses", "test": "reports"}[lacking[0]]
            return (
                f"task {task.name!r} has no {lacking[0]} data, on which {experiment!r} {use}; add it "
                "(`epimer eval` needs only test)"
            )
    least = 3 if experiment == "landscape" else 2
    if len(suite.tasks) < least:
        return f"{experiment!r} needs {least} tasks at least, each with its model, and there are {len(suite.tasks)}"
    if experiment == "worst-task" and measured in LOSSES:
        return (
            f"'worst-task' tells what share of fine-tuning's score is kept, and a {measured} has none; "
            "leave it out, or take another metric"
        )
    return ""
