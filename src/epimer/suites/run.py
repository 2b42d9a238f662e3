"""Run experiments on a suite by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from epimer.errors import ParameterError, nearest
from epimer.progress import Progress
from epimer.suites.bench import Bench
from epimer.suites.experiments import EXPERIMENTS, Result
from epimer.suites.output import write
from epimer.suites.suite import Suite

SUITES = ("glyphs8",)


def open_suite(name: str, *, seed: int = 0, progress: bool = True) -> Suite:
    """Build or load a suite."""
    if name not in SUITES:
        raise ParameterError(f"There is no suite {name!r}.{nearest(name, SUITES)} Suites: {', '.join(SUITES)}.")
    from epimer.suites.glyphs.build import load

    return load(seed=seed, progress=progress)


def run_experiments(
    suite: str, names: Sequence[str], folder: Path, *, seed: int = 0, progress: bool = True
) -> Iterator[tuple[Result, list[Path]]]:
    """Run experiments one by one; each is written when it is done."""
    wanted = list(EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))
    for name in wanted:
        if name not in EXPERIMENTS:
            hint, known = nearest(name, EXPERIMENTS), ", ".join(EXPERIMENTS)
            raise ParameterError(f"There is no experiment {name!r}.{hint} Experiments: {known}, all.")
    bench = Bench(open_suite(suite, seed=seed, progress=progress), seed=seed)
    for name in wanted:
        with Progress(progress, unit="experiments") as bar:
            stage = bar.begin(name, None)
            result = EXPERIMENTS[name](bench)
            stage.advance(1, "")
        yield result, write(result, folder.expanduser())
