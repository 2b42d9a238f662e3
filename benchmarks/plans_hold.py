"""Claim: no merge takes more memory than its plan says, and a plan says at most 1.6 times what is taken.

One matrix of T models is merged through a recipe in a process of its own, for every method, basis, shape and T. What is
taken is the kernel's peak for the process, less what it had before the first tensor was read.

    python benchmarks/plans_hold.py [--methods epimer_kron] [--shapes 768x2688] [--tasks 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from diagnosis_is_quick import step
from safetensors.torch import save_file

import epimer
from epimer.curvature.curvature import Curvature, Provenance
from epimer.engine.memory import resident_memory
from epimer.engine.options import RunOptions
from epimer.engine.output import write_merge
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Samples
from epimer.methods.registry import Method

SHAPES = ["768x768", "768x2688", "2688x768", "3072x768", "1024x4096"]
NAME = "layer.weight"
SAMPLES = (64, 4)  # per-sample gradients and tokens of each
LEAST = 100 << 20  # below this a plan need not be near
MOST = 6e9  # what a case may be planned at
PRUNED = {name: {"density": 0.4} for name in ("mergekit_ties", "mergekit_della", "breadcrumbs_ties")}
PRUNED |= {"sce": {"select_topk": 0.3}, "model_stock": {"filter_wise": True}, "nuslerp": {"nuslerp_flatten": False}}
"""options under which a method does all that it can"""
FEW_STEPS = {"iterations": 2}  # the peak of conjugate gradients does not depend on how many there are


def write_models(place: Path, shape: tuple[int, int], tasks: int, dtype: torch.dtype) -> None:
    """Write a base and models whose task vectors have the spectrum of fine-tuned ones."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    for t in range(tasks + 1):
        W = base if t == 0 else base + step(shape, generator)
        save_file({NAME: W.to(dtype)}, place / f"m{t}.safetensors")


def metric_of(kind: str, shape: tuple[int, int], seed: int) -> Metric:
    """Return curvature of full rank whose values do not matter."""
    (m, n), generator = shape, torch.Generator().manual_seed(seed)

    def factor(size: int) -> torch.Tensor:
        X = torch.randn(size, 64, generator=generator)
        return X @ X.T / 64 + 0.1 * torch.eye(size)

    match kind:
        case "diagonal":
            return Diagonal(torch.rand(shape, generator=generator))
        case "kronecker":
            return Kronecker(A=factor(n), G=factor(m))
        case "ekfac":
            P, Q = (torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for size in shape)
            return EKFAC(S=torch.rand(shape, generator=generator), P=P, Q=Q)
        case _:
            return Samples(
                **{
                    name: torch.randn(*SAMPLES, size, generator=generator)
                    for name, size in zip("gx", shape, strict=True)
                }
            )


def recipe_of(place: Path, row: Method, kind: str | None, tasks: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of one case."""
    count = tasks if row.models[1] is None else min(tasks, row.models[1])
    models = [{"model": str(place / f"m{t}.safetensors")} for t in range(1, count + 1)]
    if kind is not None:
        models = [model | {"curvature": str(place / f"{kind}{t % 2}")} for t, model in enumerate(models)]
    base = {"base_model": str(place / "m0.safetensors")}
    return {"merge_method": row.name, "parameters": dict(parameters), "models": models} | base


def cases(rows: Sequence[Method]) -> Iterator[tuple[Method, str | None, dict[str, Any]]]:
    """Yield every method with the kind of curvature and the options to merge under."""
    for row in rows:
        kind = row.curvature if row.needs_curvature else None
        if "basis" not in row.defaults:
            yield row, kind, PRUNED.get(row.name, {})
        for basis in ("tagged", "tensor", "full") if "basis" in row.defaults else ():
            few = FEW_STEPS if basis == "full" or kind in ("diagonal", "samples") else {}
            yield row, kind, {"basis": basis} | few
        if row.name == "tsv":
            yield row, None, {"rank": 32}
        if row.name == "epimer":
            yield row, kind, {"projection_tol": 0}
        if row.name == "epimer_kron":
            for basis in ("tagged", "tensor"):
                yield row, "ekfac", {"basis": basis} | FEW_STEPS


def measure(recipe: dict[str, Any], place: Path) -> tuple[int, int]:
    """Return the bytes that a merge of this process is planned at and those it takes."""
    from epimer.api import plan_merge

    plan = plan_merge(recipe, any_curvature=True)
    plan.check()
    X = torch.randn(256, 256, dtype=torch.float64)
    for warm_up in (X, X.float()):  # loads libraries
        torch.linalg.eigh(warm_up @ warm_up.T), torch.linalg.svd(warm_up), torch.linalg.qr(warm_up)
    before = resident_memory()
    Path("/proc/self/clear_refs").write_text("5")  # starts the kernel's peak anew
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_merge(plan, place / "out", RunOptions("cpu", workers=1, max_memory="1TB"), overwrite=True)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return plan.memory, peak - before


def measure_apart(recipe: dict[str, Any], place: Path) -> tuple[int, int]:
    """Return what `measure` returns in a process of its own."""
    file = place / "recipe.json"
    file.write_text(json.dumps(recipe))
    command = [sys.executable, __file__, "--one", str(file)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    planned, taken = map(int, done.stdout.split())
    return planned, taken


def planned(recipe: dict[str, Any]) -> int:
    """Return the bytes that a merge is planned at."""
    from epimer.api import plan_merge

    return plan_merge(recipe, any_curvature=True).memory


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every case."""
    names = options.methods or [name for name in epimer.list_methods() if name not in ("greedy_soup", "auto")]
    rows = [epimer.describe_method(name) for name in names]
    for text in options.shapes:
        shape = tuple(map(int, text.split("x")))
        for tasks in options.tasks:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                write_models(place, shape, tasks, getattr(torch, options.dtype))
                for row, kind, parameters in cases(rows):
                    if options.bases and (parameters.get("basis") not in options.bases or kind == "ekfac"):
                        continue
                    for seed in (0, 1) if kind is not None and not (place / f"{kind}0").exists() else ():
                        metric = metric_of(kind, shape, seed)
                        Curvature({NAME: metric}, Provenance(kind)).save(place / f"{kind}{seed}")
                    recipe = recipe_of(place, row, kind, tasks, parameters)
                    if planned(recipe) > MOST:
                        print(f"{row.name} {parameters} {text} T = {tasks}: left out, too wide to measure here")
                        continue
                    plan, taken = measure_apart(recipe, place)
                    basis = parameters.get("basis", row.defaults.get("basis"))
                    told = {"method": row.name, "curvature": kind, "basis": basis}
                    yield told | {
                        "rank": parameters.get("rank", row.defaults.get("rank")), "shape": text, "tasks": tasks,
                        "dtype": options.dtype, "options": parameters, "planned": plan, "taken": taken,
                    }  # fmt: skip


def main() -> None:
    """Measure every case, print plan against peak, and fail where a plan did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--bases", nargs="+", choices=["tagged", "tensor", "full"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tasks", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        print(*measure(json.loads(options.one.read_text()), options.one.parent))
        return
    found = []
    for row in compare(options):
        found.append(row)
        ratio = row["planned"] / row["taken"]
        verdict = "" if row["taken"] < LEAST or 1 <= ratio <= 1.6 else "  <-"
        what = f"{row['method']} {row['curvature'] or ''} {row['basis'] or ''}"
        sizes = f"planned {row['planned'] / 2**20:6.0f} MiB, taken {row['taken'] / 2**20:6.0f}, {ratio:5.2f}x"
        print(f"{what:40} {row['shape']:>9} T = {row['tasks']} {row['dtype']}  {sizes}{verdict}", flush=True)
        if options.json:  # as far as it has come
            lines = ",\n".join(json.dumps(one) for one in found)
            options.json.write_text(f'{{"date": "{date.today()}", "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
