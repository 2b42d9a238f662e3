"""Claim: the time that a dry run prints for a merge is within a factor of two of what it takes.

One matrix of T models is merged in memory by every method; its estimate is what `epimer merge --dry-run` prints for it.
Merges that are estimated at more than `--most` seconds are listed and not run.

    python benchmarks/estimates_hold.py [--methods tsv mats] [--shapes 768x3072] [--tasks 3] [--most 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epimer
from epimer.geometry.metric import Diagonal, Kronecker, Metric, Samples
from epimer.plan.merge import plan_state_dicts
from epimer.plan.participants import state_dict_participants
from epimer.plan.time import measured_speeds

SHAPES = ["768x3072", "4096x4096", "4096x14336"]
NAME = "layer.weight"
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


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every method and shape."""
    names = options.methods or [name for name in epimer.list_methods() if name not in ("greedy_soup", "auto")]
    rows = [epimer.describe_method(name) for name in names]
    rows.sort(key=lambda row: (row.needs_curvature, str(row.curvature)))  # so that one kind is in memory at a time
    speeds = measured_speeds(torch.device("cpu"), 1)
    print("seconds per unit:", {kernel: f"{speed:.1e}" for kernel, speed in speeds.items()})
    for text in options.shapes:
        shape: Any = tuple(map(int, text.split("x")))
        generator = torch.Generator().manual_seed(0)
        base = {NAME: 0.02 * torch.randn(shape, generator=generator)}
        models = [{NAME: base[NAME] + task_vector(*shape, generator)} for _ in range(options.tasks)]
        kind, curvature = None, None
        for row in rows:
            if row.needs_curvature and row.curvature != kind:
                kind, curvature = row.curvature, None
                curvature = [{NAME: curvature_of(str(kind), shape, generator)} for _ in models]
            used = curvature if row.needs_curvature else None
            merged = models[: row.models[1]]
            participants = state_dict_participants(base, merged)
            plan = plan_state_dicts(participants, row, row.resolve({}), None, used)
            told = {"method": row.name, "shape": text, "tasks": len(merged), "memory": plan.memory}
            told["estimated"] = plan.seconds(speeds, 1)
            if told["estimated"] > options.most:
                yield told | {"taken": None}
                continue
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                epimer.merge_state_dicts(base, merged, row.name, curvature=used)
            yield told | {"taken": time.perf_counter() - started}


def main() -> None:
    """Measure every case, and print estimate against time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--most", type=float, default=60.0, help="seconds of the longest merge that is run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the workers of a merge have
    found = []
    for row in compare(options):
        found.append(row)
        what = f"{row['method']:20} {row['shape']:>11} T = {row['tasks']}  {row['memory'] / 1e9:6.2f} GB planned"
        if row["taken"] is None:
            print(f"{what}  estimated {row['estimated']:8.2f} s, not run", flush=True)
            continue
        ratio = row["estimated"] / row["taken"]
        verdict = "" if 0.5 <= ratio <= 2 or row["taken"] < 0.05 else "  <-"
        print(
            f"{what}  estimated {row['estimated']:8.2f} s, taken {row['taken']:8.2f}, {ratio:5.2f}x{verdict}",
            flush=True,
        )
        if options.json:
            about = {"date": date.today().isoformat(), "torch": torch.__version__, "cores": os.cpu_count()}
            options.json.write_text(json.dumps({**about, "threads": 1, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
