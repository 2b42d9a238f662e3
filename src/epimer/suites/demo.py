"""The demonstration: build or load the embedded suite, merge its models in every way, keep the best one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from epimer.checkpoints.writer import as_json, save_tensors, whole_file, whole_folder
from epimer.diagnosis.diagnose import diagnose_state_dicts
from epimer.progress import Progress
from epimer.records import Diagnosis
from epimer.suites.bench import COARSE, Bench, Outcome
from epimer.suites.experiments import performance
from epimer.suites.glyphs.build import load
from epimer.suites.glyphs.train import Settings
from epimer.suites.output import write
from epimer.suites.results import Result
from epimer.suites.suite import Suite

VAL, TEST = 100, 400  # samples per task; `epimer bench` takes all


@dataclass(frozen=True)
class Demo:
    """What the demonstration found and where it lies."""

    result: Result
    best: Outcome
    diagnosis: Diagnosis
    files: list[Path]
    model: Path
    seconds: float


def run(folder: Path, *, progress: bool = True, settings: Settings | None = None) -> Demo:
    """Run the demonstration; `folder` gets the table, what could be known beforehand, and one merged model."""
    started = time.perf_counter()
    suite = load(progress=progress, settings=settings)
    bench = Bench(suite.some(val=VAL, test=TEST), scales=COARSE, ahead=1)
    with Progress(progress, unit="methods") as bar:
        bench.watch = bar.begin("merging", None).reach
        result = performance(bench)
        names = [task.name for task in suite.tasks]
        bar.begin("diagnosis", None)
        found = diagnose_state_dicts(
            dict(suite.base), bench.states, curvature=bench.curvature("kronecker"), names=names
        )
    some = f"The first {VAL} validation and {TEST} test images per task; `epimer bench` takes all."
    result = bench.signed(result, some)
    assert bench.winner is not None
    files = [*write(result, folder), folder / "diagnosis.json"]
    with whole_file(files[-1]) as draft:
        draft.write_bytes(as_json(found.to_dict()))
    model = save_model(suite, bench.winner, bench.model, folder / "merged")
    return Demo(result, bench.winner, found, files, model, time.perf_counter() - started)


def save_model(suite: Suite, outcome: Outcome, state: Mapping[str, Tensor], folder: Path) -> Path:
    """Write a merged model as a folder like those of the models it was made of."""
    assert suite.folder is not None
    about = {"suite": suite.name, "method": outcome.candidate.name, "scale": outcome.scale}
    config = (suite.folder / "base" / "config.json").read_bytes()
    with whole_folder(folder, "merge.json", overwrite=True) as draft:
        save_tensors(draft / "model.safetensors", dict(state))
        (draft / "config.json").write_bytes(config)
        (draft / "merge.json").write_bytes(as_json(about))
    return folder
