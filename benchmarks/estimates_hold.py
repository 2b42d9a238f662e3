"""Claim: the time that a dry run prints for a merge is within a factor of two of what it takes.

Some matrices of T models are merged from files into files by every method, by one worker with one thread; the estimate
is what `epimer merge --dry-run` prints for it, on speeds measured right before. The files are in the page cache: a
disk's speed is no part of it. What is taken is the least of up to three merges, since others' load only adds to it;
"computed" is the processor time of that merge. Merges that are estimated at more than `--most` seconds are not run.
Where others use the machine, `--processor` measures speeds and merges by processor time, which they disturb less.

    python benchmarks/estimates_hold.py [--methods tsv mats] [--shapes 768x3072] [--tasks 3] [--most 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from result_file import write_result
from safetensors.torch import save_file
from torch import Tensor

import epimer
from epimer.api import plan_merge
from epimer.curvature.curvature import Curvature, Provenance
from epimer.engine.options import RunOptions
from epimer.engine.output import write_merge
from epimer.evaluation.provenance import SOURCE, source_state
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Samples
from epimer.methods.registry import Method
from epimer.plan import time as plan_time
from epimer.plan.time import measured_speeds

SHAPES = ["768x3072", "1024x4096"]
PRUNED = {name: {"density": 0.4} for name in ("mergekit_ties", "mergekit_della", "mergekit_breadcrumbs")}
PRUNED |= {"sce": {"select_topk": 0.3}}
"""options under which a method does all that it can"""
LONG = 2.0  # seconds of a merge that is not repeated
DIRECTIONS = 256  # of a task vector that are more than noise
SAMPLES = (64, 4)  # per-sample gradients and tokens of each


def task_vector(m: int, n: int, generator: torch.Generator) -> Tensor:
    """Return a matrix whose leading singular values fall as i^-0.7, on noise."""
    falling = torch.arange(1, DIRECTIONS + 1) ** -0.7
    U, V = (torch.randn(size, DIRECTIONS, generator=generator) for size in (m, n))
    return 0.02 / (m * n) ** 0.5 * ((U * falling) @ V.T + 0.1 * torch.randn(m, n, generator=generator))


def factor(size: int, generator: torch.Generator) -> Tensor:
    """Return a Kronecker factor of 256 samples with a falling spectrum, on noise."""
    X = torch.randn(256, size, generator=generator) * torch.arange(1, size + 1) ** -0.5
    return X.T @ X / 256 + 1e-4 * torch.eye(size)


def curvature_of(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Metric:
    """Return one task's curvature of a kind."""
    m, n = shape
    if kind == "diagonal":
        return Diagonal(torch.outer(torch.rand(m, generator=generator), torch.rand(n, generator=generator)))
    if kind == "kronecker":
        return Kronecker(A=factor(n, generator), G=factor(m, generator))
    g, x = (torch.randn(*SAMPLES, size, generator=generator) for size in (m, n))
    return Samples(g=g, x=x)


def write_inputs(place: Path, shape: tuple[int, int], tasks: int, layers: int) -> None:
    """Write a base and its models as m0, m1, …, each with some matrices."""
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.weight": 0.02 * torch.randn(shape, generator=generator) for i in range(layers)}
    save_file(base, place / "m0.safetensors")
    for t in range(1, tasks + 1):
        model = {name: W + task_vector(*shape, generator) for name, W in base.items()}
        save_file(model, place / f"m{t}.safetensors")


def recipe_of(place: Path, row: Method, shape: tuple[int, int], tasks: int, layers: int) -> dict[str, Any]:
    """Return the recipe of one case; curvature is written where it is not there."""
    count = tasks if row.models[1] is None else min(tasks, row.models[1])
    models = [{"model": str(place / f"m{t}.safetensors")} for t in range(1, count + 1)]
    if row.needs_curvature:
        kind = str(row.curvature)
        for t, model in enumerate(models):
            folder = place / f"{kind}{t}"
            if not folder.exists():
                generator = torch.Generator().manual_seed(t)
                metrics = {f"layers.{i}.weight": curvature_of(kind, shape, generator) for i in range(layers)}
                Curvature(metrics, Provenance(kind)).save(folder)
            model["curvature"] = str(folder)
    recipe = {"merge_method": row.name, "base_model": str(place / "m0.safetensors"), "models": models}
    return recipe | {"parameters": PRUNED.get(row.name, {})}


def least_seconds(recipe: dict[str, Any], out: Path, run: RunOptions) -> tuple[float, float]:
    """Return the least time of up to three merges, and the processor time of that one."""
    times: list[tuple[float, float]] = []
    while len(times) < 3 and (not times or times[-1][0] < LONG):
        plan = plan_merge(recipe, any_curvature=True)
        shutil.rmtree(out, ignore_errors=True)
        started, computed = time.perf_counter(), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_merge(plan, out, run)
        times.append((time.perf_counter() - started, time.process_time() - computed))
    return min(times)


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every method and shape."""
    names = options.methods or [name for name in epimer.list_methods() if name != "greedy_soup"]
    rows = [epimer.describe_method(name) for name in names]
    run = RunOptions("cpu", workers=1)
    for text in options.shapes:
        shape: Any = tuple(map(int, text.split("x")))
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            write_inputs(place, shape, options.tasks, options.layers)
            for row in rows:
                recipe = recipe_of(place, row, shape, options.tasks, options.layers)
                measured_speeds.cache_clear()
                plan, speeds = plan_merge(recipe, any_curvature=True), run.speeds()
                told = {"method": row.name, "shape": text, "tasks": len(recipe["models"]), "layers": options.layers}
                told |= {"options": recipe["parameters"], "estimated": plan.seconds(speeds, 1)}
                taken, computed = None, None
                if told["estimated"] <= options.most:
                    taken, computed = least_seconds(recipe, place / "out", run)
                    taken = computed if options.processor else taken
                yield told | {"taken": taken, "computed": computed}


def main() -> None:
    """Measure every case, and print estimate against time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2, help="matrices of a model")
    parser.add_argument("--most", type=float, default=60.0, help="seconds of the longest merge that is run")
    parser.add_argument("--processor", action="store_true", help="count processor time, also where speeds are measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the workers of a merge have
    if options.processor:
        plan_time.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    there = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    found = {(row["method"], row["shape"], row["tasks"]): row for row in there}
    commit = source_state(SOURCE)["commit"]  # of each row, as the file may have rows of earlier runs
    for row in compare(options):
        row["commit"] = commit
        found[row["method"], row["shape"], row["tasks"]] = row
        what = f"{row['method']:20} {row['shape']:>11} T = {row['tasks']}  estimated {row['estimated']:8.2f} s"
        if row["taken"] is None:
            print(f"{what}, not run", flush=True)
        else:
            ratio = row["estimated"] / row["taken"]
            print(f"{what}, taken {row['taken']:8.2f}, {ratio:5.2f}x{'' if 0.5 <= ratio <= 2 else '  <-'}", flush=True)
        if options.json:  # as far as it has come; cases that the file has already are replaced
            about = {"clock": "processor" if options.processor else "wall", "threads": 1}
            write_result(options.json, {**about, "rows": list(found.values())}, seed=0)


if __name__ == "__main__":
    main()
