"""The demo: build or load glyphs8, merge its models with every method, diagnose them, write the best merge."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from epimer.api import diagnose_state_dicts
from epimer.atomic_files import atomic_file, atomic_folder, check_file, check_folder, check_new
from epimer.checkpoints.writer import as_json, save_tensors
from epimer.evaluation.suite import Suite
from epimer.experiments.bench import COARSE_SCALES, Bench, Outcome, all_candidates
from epimer.experiments.glyphs8.build import load
from epimer.experiments.glyphs8.train import Settings
from epimer.experiments.paper import performance
from epimer.experiments.results import write
from epimer.progress import Progress
from epimer.records import Diagnosis, Experiment

FILES = ("performance.json", "performance.md", "performance.svg", "diagnosis.json", "report.html")
MARKER = "merge.json"  # in a folder that a later run may replace
VAL, TEST = 100, 400  # samples per task; `epimer bench` takes all


@dataclass(frozen=True)
class Demo:
    """Results of the demo, and where they were written."""

    result: Experiment
    best: Outcome
    diagnosis: Diagnosis
    files: list[Path]
    model: Path
    models: Path
    """the folder of the models that were merged"""
    seconds: float


def run(folder: Path, *, progress: bool = True, settings: Settings | None = None) -> Demo:
    """Run the demo and write the table of performance, the diagnosis and the best merged model into `folder`."""
    started = time.perf_counter()
    check_output(folder)
    suite = load(progress=progress, settings=settings)
    bench = Bench(suite.truncated(val=VAL, test=TEST), scales=COARSE_SCALES, ahead=1)
    with Progress(progress, unit="steps") as bar:
        candidates = all_candidates(published=False)
        bench.report_progress = bar.begin("merging", len(candidates)).reach
        result = performance(bench, candidates)
        names = [task.name for task in suite.tasks]
        stage = bar.begin("diagnosis", 1)
        curvature = bench.curvature("kronecker")
        diagnosis = diagnose_state_dicts(dict(suite.base), bench.states, curvature=curvature, names=names)
        stage.advance(1, "")
    note = f"The first {VAL} validation and {TEST} test images per task; `epimer bench` takes all."
    result = bench.with_provenance(result, note)
    assert bench.winner is not None
    assert suite.folder is not None
    files = [*write(result, folder), folder / "diagnosis.json"]
    with atomic_file(files[-1]) as draft:
        draft.write_bytes(as_json(diagnosis.to_dict()))
    model = save_model(suite, bench.winner, bench.model, folder / "merged")
    return Demo(result, bench.winner, diagnosis, files, model, suite.folder, time.perf_counter() - started)


def check_output(folder: Path) -> None:
    """Refuse a folder where one of the demo's files cannot be written."""
    check_folder(folder)
    check_new(folder / "merged", MARKER, overwrite=True)
    for name in FILES if folder.is_dir() else ():
        check_file(folder / name)


def save_model(suite: Suite, outcome: Outcome, state: Mapping[str, Tensor], folder: Path) -> Path:
    """Write a merged model as a folder like those of the fine-tuned models."""
    assert suite.folder is not None
    about = {"suite": suite.name, "method": outcome.candidate.name, "scale": outcome.scale}
    config = (suite.folder / "base" / "config.json").read_bytes()
    with atomic_folder(folder, MARKER, overwrite=True) as draft:
        save_tensors(draft / "model.safetensors", dict(state))
        (draft / "config.json").write_bytes(config)
        (draft / MARKER).write_bytes(as_json(about))
    return folder
