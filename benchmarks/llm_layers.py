"""Claim: every method merges one layer of an 8B and a 70B model within its plan, or is refused with what to do instead.

One matrix of T bfloat16 models is merged by every method as its defaults have it, by one thread, each in a process of
its own, under the limit that its plan names. Planned memory and time are what `epimer merge --dry-run` prints; taken is
the kernel's peak for the process, less what it had before the first tensor was read. What the plan refuses within
`--max-memory` is not run: its words are printed, and the first setting it proposes is tried. Merges that are planned to
take over `--longest` seconds are not run either. Factors wider than 16384 are kept in a basis only: methods that take
them get projected ones there. The last lines say by how much memory grows with each task, in units of its task vector
and curvature in float32; copies in float64 would make it 2 or more.

    python benchmarks/llm_layers.py --plan-only                            # all plans, from files without data: seconds
    python benchmarks/llm_layers.py --shapes 4096x14336 --tasks 3 --longest 60 --max-memory 8GB [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from plans_hold import NAME, SAMPLES, measure_apart, metric_of, recipe_of, write_models, write_projected
from result_file import write_result

import epimer
from epimer.api import plan_merge
from epimer.curvature.collectors import WIDEST
from epimer.curvature.curvature import Curvature, Provenance
from epimer.curvature.format import FORMAT, HEADER, NUMBERS
from epimer.engine.options import RunOptions
from epimer.errors import EpimerError
from epimer.methods.registry import Method
from epimer.plan.memory import METHOD
from epimer.plan.time import Speeds

SHAPES, PROJECTED = ["4096x14336", "8192x28672"], "kronecker-tensor"
IN_A_BASIS = ("epimer_kron", "mats")  # methods that are also merged with projected factors
Shape = tuple[int, int]


class Inputs:
    """The files of one shape and number of tasks, written when a case needs them."""

    def __init__(self, place: Path, shape: Shape, tasks: int, *, empty: bool) -> None:
        """Write the models; `empty` files have headers and no data on disk, which is enough for a plan."""
        self.place, self.shape, self.tasks, self.empty = place, shape, tasks, empty
        if empty:
            for t in range(tasks + 1):
                write_empty(place / f"m{t}.safetensors", {NAME: shape}, "BF16")
        else:
            write_models(place, shape, tasks, torch.bfloat16)

    def recipe(self, row: Method, kind: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe of one case; its curvature is written if it is not there."""
        if kind is not None and not (self.place / f"{kind}0").exists():
            for seed in (0, 1):
                self._write_curvature(kind, seed)
        return recipe_of(self.place, row, kind, self.tasks, parameters)

    def _write_curvature(self, kind: str, seed: int) -> None:
        (m, n), folder = self.shape, self.place / f"{kind}{seed}"
        if kind == PROJECTED:
            write_projected(self.place, "kronecker", "tensor", self.shape, self.tasks, seed)
        elif kind == "kronecker" and max(self.shape) > WIDEST:  # as a measurement leaves it out
            why = f"a factor of side {max(self.shape)} is too large to keep without --basis (basis=)"
            other = {"other.weight": metric_of(kind, (4, 4), seed)}
            Curvature(other, Provenance(kind, left_out={NAME: why})).save(folder)
        elif self.empty:
            shapes = {"diagonal": {"F": (m, n)}, "kronecker": {"A": (n, n), "G": (m, m)}}
            shapes["samples"] = {"g": (*SAMPLES, m), "x": (*SAMPLES, n)}
            folder.mkdir()
            (folder / HEADER).write_text(json.dumps({"format": FORMAT, **asdict(Provenance(kind))}))
            write_empty(folder / NUMBERS, {f"{NAME}.{part}": shape for part, shape in shapes[kind].items()}, "F32")
        else:
            Curvature({NAME: metric_of(kind, self.shape, seed)}, Provenance(kind)).save(folder)


def write_empty(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write a safetensors file whose tensors are holes, which read as zeros and take no room on disk."""
    header: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.Size(shape).numel() * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + start)


def cases(names: list[str]) -> Iterator[tuple[Method, str | None]]:
    """Yield every method with the curvature it takes."""
    for name in names:
        row = epimer.describe_method(name)
        yield row, row.curvature if row.needs_curvature else None
        if name in IN_A_BASIS:
            yield row, PROJECTED


def planned(recipe: dict[str, Any], limit: str | None, speeds: Speeds) -> dict[str, Any]:
    """Return what a dry run tells: memory and time, or the refusal and the first setting that it proposes."""
    try:
        plan = plan_merge(recipe, any_curvature=True)
        plan.check()
    except EpimerError as error:
        return {"refused": str(error)}
    told: dict[str, Any] = {"planned": plan.memory, "planned_seconds": plan.seconds(speeds, 1)}
    told["curvature"] = sum(job.reads for job in plan.jobs) - sum(
        one.checkpoint.headers[NAME].nbytes for one in plan.participants.all
    )
    run = RunOptions("cpu", workers=1, max_memory=limit)
    try:
        run.budget(plan.parts)
    except EpimerError as error:
        room = run.budget([])
        smaller = [(name, value) for name, value, needed in plan.parts[0].smaller() if needed <= room]
        fitting = [(name, value) for name, value in smaller if name != METHOD]  # a method has a row of its own
        return told | {"refused": str(error), "instead": dict(fitting[:1])}
    return told


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every case, and for what is proposed instead of a case that is refused."""
    names = options.methods or [name for name in epimer.list_methods() if name not in ("greedy_soup", "auto")]
    speeds = RunOptions("cpu", workers=1).speeds()
    for text in options.shapes:
        for tasks in options.tasks:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                m, n = map(int, text.split("x"))
                inputs = Inputs(Path(folder), (m, n), tasks, empty=options.plan_only)
                for row, kind in cases(names):
                    parameters: dict[str, Any] = {}
                    while True:
                        recipe = inputs.recipe(row, kind, parameters)
                        told = {"method": row.name, "kind": kind, "options": parameters, "shape": text}
                        told["tasks"] = len(recipe["models"])  # as many as the method takes
                        told |= planned(recipe, options.max_memory, speeds)
                        if "refused" not in told and not options.plan_only:
                            if told["planned_seconds"] <= options.longest:
                                told |= measure_apart(recipe, inputs.place)
                            else:
                                told["not_run"] = f"planned at over {options.longest} s"
                        yield told
                        if not told.get("instead"):
                            break
                        parameters = parameters | told["instead"]


def line(row: dict[str, Any]) -> str:
    """Return a row in words."""
    method = row["method"] + (" in a basis" if row["kind"] == PROJECTED else "")
    method += "".join(f", {name}: {value}" for name, value in row["options"].items())
    what = f"{method:28} {row['shape']:>11} T = {row['tasks']} "
    if "planned" in row:
        what += f" planned {row['planned'] / 1e9:7.2f} GB {row['planned_seconds']:9.1f} s"
    if "refused" in row:
        return f"{what}  refused: {row['refused']}"
    if "taken" not in row:
        return what + (f"  not run: {row['not_run']}" if "not_run" in row else "")
    ratios = f"planned {row['planned'] / row['taken']:.2f}x memory, {row['planned_seconds'] / row['seconds']:.2f}x time"
    return f"{what}, taken {row['taken'] / 1e9:7.2f} GB {row['seconds']:9.1f} s  ({ratios})"


def growth(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield by how much the memory of each case grows with a task, in units of its task vector and curvature."""
    taken: dict[tuple[str, ...], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row.get("taken", row.get("planned")) is not None:
            taken[row["method"], str(row["kind"]), str(row["options"]), row["shape"]][row["tasks"]] = row
    for (method, _, chosen, shape), by_tasks in taken.items():
        few, many = by_tasks[min(by_tasks)], by_tasks[max(by_tasks)]
        added = many["tasks"] - few["tasks"]
        m, n = map(int, shape.split("x"))
        unit = 4 * m * n + many["curvature"] / many["tasks"]
        for key in ("planned", "taken"):
            if added and key in few and key in many:
                grown = (many[key] - few[key]) / added / unit
                yield f"{method} {chosen} {shape}: {key} memory grows by {grown:.2f} task vectors with curvature a task"


def main() -> None:
    """Measure every case, and print plan against what was taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tasks", nargs="+", type=int, default=[3, 8])
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--longest", type=float, default=600, help="planned seconds of the longest merge that is run")
    parser.add_argument("--max-memory", help="of a process, as 8GB; by default what is free")
    parser.add_argument("--folder", type=Path, help="where there is room for the files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for row in compare(options):
        found.append(row)
        print(line(row), flush=True)
        if options.json:  # as far as it has come
            write_result(options.json, {"rows": found})
    for text in growth(found):
        print(text)


if __name__ == "__main__":
    main()
