"""The demonstration: build or load the embedded suite, merge its models in every way, keep the best one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from epimer.checkpoints.writer import (
    as_json,
    check_file,
    check_folder,
    check_new,
    save_tensors,
    whole_file,
    whole_folder,
)
from epimer.diagnosis.diagnose import diagnose_state_dicts
from epimer.evaluation.suite import Suite
from epimer.experiments.bench import CANDIDATES, COARSE, Bench, Outcome
from epimer.experiments.glyphs8.build import load
from epimer.experiments.glyphs8.train import Settings
from epimer.experiments.output import write
from epimer.experiments.paper import performance
from epimer.progress import Progress
from epimer.records import Diagnosis, Experiment

FILES = ("performance.json", "performance.md", "performance.svg", "diagnosis.json", "report.html")
MARKER = "merge.json"  # of a merged model, which a later run may replace
VAL, TEST = 100, 400  # samples per task; `epimer bench` takes all


@dataclass(frozen=True)
class Demo:
    """What the demonstration found and where it lies."""

    result: Experiment
    best: Outcome
    diagnosis: Diagnosis
    files: list[Path]
    model: Path
    models: Path
    """where those that were merged lie"""
    seconds: float


def run(folder: Path, *, progress: bool = True, settings: Settings | None = None) -> Demo:
    """Run the demonstration; `folder` gets the table, what could be known beforehand, and one merged model."""
    started = time.perf_counter()
    check_output(folder)
    suite = load(progress=progress, settings=settings)
    bench = Bench(suite.some(val=VAL, test=TEST), scales=COARSE, ahead=1)
    with Progress(progress, unit="steps") as bar:
        bench.watch = bar.begin("merging", len(CANDIDATES)).reach
        result = performance(bench)
        names = [task.name for task in suite.tasks]
        diagnosis = bar.begin("diagnosis", 1)
        found = diagnose_state_dicts(
            dict(suite.base), bench.states, curvature=bench.curvature("kronecker"), names=names
        )
        diagnosis.advance(1, "")
    some = f"The first {VAL} validation and {TEST} test images per task; `epimer bench` takes all."
    result = bench.signed(result, some)
    assert bench.winner is not None
    files = [*write(result, folder), folder / "diagnosis.json"]
    with whole_file(files[-1]) as draft:
        draft.write_bytes(as_json(found.to_dict()))
    model = save_model(suite, bench.winner, bench.model, folder / "merged")
    assert suite.folder is not None
    return Demo(result, bench.winner, found, files, model, suite.folder, time.perf_counter() - started)


def check_output(folder: Path) -> None:
    """Refuse a folder that could not take all that the demonstration writes, before any work is done for it."""
    check_folder(folder)
    check_new(folder / "merged", MARKER, overwrite=True)
    for name in FILES if folder.is_dir() else ():
        check_file(folder / name)


def save_model(suite: Suite, outcome: Outcome, state: Mapping[str, Tensor], folder: Path) -> Path:
    """Write a merged model as a folder like those of the models it was made of."""
    assert suite.folder is not None
    about = {"suite": suite.name, "method": outcome.candidate.name, "scale": outcome.scale}
    config = (suite.folder / "base" / "config.json").read_bytes()
    with whole_folder(folder, MARKER, overwrite=True) as draft:
        save_tensors(draft / "model.safetensors", dict(state))
        (draft / "config.json").write_bytes(config)
        (draft / MARKER).write_bytes(as_json(about))
    return folder
