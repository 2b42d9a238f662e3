"""Claim: time grows linearly with layers, by no more than the width's square, and for tsv linearly with models.

One matrix of T models is merged in memory on one thread, in float32, by `merge_state_dicts`; one quantity at a time is
raised from T = 4 models, k = 16 directions per task and a width of 512, and the exponent of time is fitted on a
logarithmic scale. Task vectors have singular values i^-0.7, Kronecker factors eigenvalues 1/i. `--project` prints what
the library's own cost model (`epimer merge --dry-run`) says of 70B x 8 and 405B x 16 models on clusters.

    python benchmarks/growth.py [--methods tsv …] [--project] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from faster_than_fusionbench import factor, task_vector
from result_file import write_result

import epimer
from epimer.methods.rules import is_matrix
from epimer.methods.workspace import Workload
from epimer.plan.time import measured_speeds, seconds, work_of

METHODS = ("average", "ties", "tsv", "iso_c", "regmean", "epimer", "epimer_free", "epimer_kron")
USUAL = {"models": 4, "rank": 16, "width": 512, "layers": 1}
VALUES = {
    "models": (2, 4, 8, 16, 32, 64),
    "rank": (4, 8, 16, 32, 64),
    "width": (256, 512, 1024, 2048),
    "layers": (1, 2, 4, 8),
}
LONGEST = 20.0  # seconds; where one point takes more, no higher one is tried
LLAMAS = {
    "70B x 8": {"models": 8, "hidden": 8192, "inner": 28672, "narrow": 1024, "layers": 80, "vocabulary": 128256},
    "405B x 16": {"models": 16, "hidden": 16384, "inner": 53248, "narrow": 1024, "layers": 126, "vocabulary": 128256},
}
NODES = (4, 16, 64)
CORES = 32  # of a node
DISK = 2e9  # bytes per second of a node, and what all nodes together get is that times their number


def metric(kind: str, D: torch.Tensor) -> Any:
    """Return one task's curvature of a kind."""
    if kind == "diagonal":
        return epimer.Diagonal(D.square())
    return epimer.Kronecker(G=factor(len(D)), A=factor(len(D)))


def seconds_of(method: str, setting: Mapping[str, int]) -> float:
    """Return the time of one merge, the better of two."""
    torch.manual_seed(0)
    names = [f"layers.{i}.weight" for i in range(setting["layers"])]
    base = {name: torch.zeros(setting["width"], setting["width"]) for name in names}
    models = [
        {name: task_vector(setting["width"], setting["width"]) for name in names} for _ in range(setting["models"])
    ]
    row = epimer.describe_method(method)
    given: dict[str, Any] = {"rank": setting["rank"]} if "rank" in row.defaults else {}
    if row.needs_curvature:
        given["curvature"] = [{name: metric(str(row.curvature), D) for name, D in one.items()} for one in models]
    best = math.inf
    for _ in range(2):
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            epimer.merge_state_dicts(base, models, method, **given)
        best = min(best, time.perf_counter() - started)
        if best > LONGEST / 4:
            break
    return best


def exponent(points: Mapping[int, float]) -> float:
    """Return the slope of log time over the upper half of the points."""
    kept = sorted(points.items())[-max(2, (len(points) + 1) // 2) :]
    x, y = (torch.tensor([math.log(pair[i]) for pair in kept], dtype=torch.float64) for i in (0, 1))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def growth(methods: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for every method and quantity."""
    for method in methods:
        for quantity, values in VALUES.items():
            if quantity == "rank" and "rank" not in epimer.describe_method(method).defaults:
                continue
            points: dict[int, float] = {}
            for value in values:
                points[value] = seconds_of(method, {**USUAL, quantity: value})
                if points[value] > LONGEST:
                    break
            yield {"method": method, "grows with": quantity, "exponent": exponent(points), "seconds": points}


def shapes(model: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], int]]:
    """Return the matrices of a Llama: name -> shape and how many there are."""
    wide, inner, narrow, layers = (model[name] for name in ("hidden", "inner", "narrow", "layers"))
    return {
        "layers.0.q_proj.weight": ((wide, wide), 2 * layers),
        "layers.0.k_proj.weight": ((narrow, wide), 2 * layers),
        "layers.0.up_proj.weight": ((inner, wide), 2 * layers),
        "layers.0.down_proj.weight": ((wide, inner), layers),
        "embed_tokens.weight": ((model["vocabulary"], wide), 2),
    }


def projection(method: str, model: Mapping[str, int]) -> dict[str, Any]:
    """Return the core-hours of a merge, the bytes it moves, and its hours on clusters."""
    speeds, work, moved = measured_speeds(torch.device("cpu"), 1), 0.0, 0.0
    for name, (shape, count) in shapes(model).items():
        row = epimer.describe_method(method if is_matrix(name, shape) or method == "ties" else "average")
        kind = row.curvature if row.needs_curvature else "task-gram"
        measured = {"kronecker": sum(side**2 for side in shape), "diagonal": math.prod(shape)}
        factors = 4 * model["models"] * measured[str(kind)] if row.needs_curvature else 0
        load = Workload(shape, model["models"], 4, row.resolve({}), kind, factors)
        work += count * seconds(work_of(row, load), speeds)
        moved += count * (2 * math.prod(shape) * (model["models"] + 2) + factors)  # bf16: base, models and the merge
    hours = {n: (work / (n * CORES) + moved / (n * DISK)) / 3600 for n in NODES}
    return {"method": method, "core_hours": work / 3600, "terabytes": moved / 1e12, "hours": hours}


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--project", action="store_true", help="also what large models would take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, projected = [], []
    for row in growth(options.methods):
        rows.append(row)
        points = ", ".join(f"{value}: {taken:.3f}" for value, taken in row["seconds"].items())
        print(f"{row['method']:12} {row['grows with']:7} ^{row['exponent']:.1f}   {points} s", flush=True)
    if options.project:
        print(
            f"\nprojected: nodes of {CORES} cores as fast as this one's, {DISK / 1e9:g} GB/s of disk each, no waiting"
        )
        for label, model in LLAMAS.items():
            for method in options.methods:
                found = {"models": label, **projection(method, model)}
                projected.append(found)
                hours = ", ".join(f"{n} nodes {value:.2f} h" for n, value in found["hours"].items())
                cost = f"{found['core_hours']:10.1f} core hours, {found['terabytes']:.1f} TB"
                print(f"{label:10} {method:12} {cost}: {hours}", flush=True)
    if options.json:
        write_result(options.json, {"threads": 1, "usual": USUAL, "rows": rows, "projected": projected})


if __name__ == "__main__":
    main()
