"""Claim: no merge takes more memory than its plan says, and a plan says at most 1.5 times what is taken.

One matrix of T models is merged through a recipe in a process of its own: by every method and its mergekit form, in
every basis it takes, under every kind of curvature it accepts, at two shapes and two numbers of models. What is taken
is the kernel's peak for the process, under the limit that the plan names, less what it had before the first tensor was
read: other people's load does not change it. The shapes are those of ViT-B's and ViT-L's MLPs: each task vector has 9
and 17 MB, so that what Python and libraries take beside is little, and the full space is decomposed in seconds.

    python benchmarks/plans_hold.py [--methods epimer_kron] [--shapes 768x2688] [--tasks 8] [--json FILE]

With `--json`, cases that the file has already are measured again and replaced, or left as they are with `--missing`:
it can be run in pieces.
`--json FILE --table` prints what the file has, as a table of the worst ratios, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diagnosis_is_quick import step
from projected_is_small import orthonormal
from result_file import write_result
from safetensors.torch import save_file

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.curvature.basis import save_basis
from epimer.curvature.curvature import Curvature, Provenance
from epimer.engine.memory import SLACK, peak_memory, resident_memory
from epimer.engine.options import RunOptions
from epimer.engine.output import write_merge
from epimer.evaluation.provenance import SOURCE, source_state
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Projected, Samples
from epimer.geometry.subspace import Tagged, tensor_product
from epimer.methods.registry import Method

SHAPES, TASKS = ["768x3072", "1024x4096"], [4, 8]
NAME, RANK = "layer.weight", 32
BASES = ("tagged", "tensor", "full")
SAMPLES = (64, 4)  # per-sample gradients and tokens of each
MOST = 1.5  # times what is taken that a plan may say
WIDEST = 9e9  # bytes that a case may be planned at
LEEWAY = 1 << 22  # bytes beyond the plan that the limit of a process allows
PRUNING = ("ties", "dare", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear")
PRUNED: dict[str, dict[str, Any]] = {f"mergekit_{name}": {"density": 0.4} for name in PRUNING}
PRUNED |= {"sce": {"select_topk": 0.3}, "model_stock": {"filter_wise": True}, "nuslerp": {"nuslerp_flatten": False}}
"""options under which a method does all that it can"""
OTHERWISE: dict[str, tuple[dict[str, Any], ...]] = {
    "tsv": ({"rank": RANK},),
    "epimer": ({"projection_tol": 0},),
    "epimer_kron": ({"anchor": "tsv"}, {"anchor": "iso_c"}, {"calibrate": 1.0}),
    "epimer_free": ({"calibrate": None},),
}
"""options that take other memory than the defaults"""
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


def write_curvature(place: Path, kind: str, shape: tuple[int, int], tasks: int) -> None:
    """Write two folders of curvature, which the models take in turn; `projected-…` also writes its basis."""
    kind, _, basis = kind.partition("-")
    for seed in (0, 1):
        if basis:
            write_projected(place, kind, basis, shape, tasks, seed)
        else:
            Curvature({NAME: metric_of(kind, shape, seed)}, Provenance(kind)).save(place / f"{kind}{seed}")


def write_projected(place: Path, kind: str, basis: str, shape: tuple[int, int], tasks: int, seed: int) -> None:
    """Write curvature measured in a random basis of these models, which is written with the first.

    Kronecker factors are projected on either kind of basis, other kinds on tagged atoms, as one p x p matrix.
    """
    width, name = min(RANK * tasks, *shape), f"{kind}-{basis}"
    torch.manual_seed(0)
    U, V = (orthonormal(side, width, "cpu") for side in shape)
    atoms = Tagged(U, V, torch.linspace(2, 1, width), torch.arange(width) * tasks // width)
    built = tensor_product(atoms) if basis == "tensor" else atoms
    if not seed:
        models = [open_checkpoint(str(place / f"m{t}.safetensors")) for t in range(tasks + 1)]
        about = {"rank": RANK, "models": [model.fingerprint for model in models]}
        save_basis([(NAME, built)], place / f"{name}-basis", about=about)
    X = torch.randn(3, width, 2 * width, generator=torch.Generator().manual_seed(seed))
    G, A, H = X @ X.mT / (2 * width)
    metric = Projected(A=A, G=G, basis=built) if kind == "kronecker" else Projected(H=H, basis=built)
    fingerprint = json.loads((place / f"{name}-basis" / "basis.json").read_text())["fingerprint"]
    Curvature({NAME: metric}, Provenance(kind, basis=fingerprint)).save(place / f"{name}{seed}")


def recipe_of(place: Path, row: Method, kind: str | None, tasks: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of one case, whose curvature, if any, lies in folders named by its kind."""
    count = tasks if row.models[1] is None else min(tasks, row.models[1])
    models = [{"model": str(place / f"m{t}.safetensors")} for t in range(1, count + 1)]
    recipe: dict[str, Any] = {"merge_method": row.name, "base_model": str(place / "m0.safetensors")}
    if kind is not None:
        models = [model | {"curvature": str(place / f"{kind}{t % 2}")} for t, model in enumerate(models)]
        if "-" in kind:
            recipe["basis"] = str(place / f"{kind}-basis")
            parameters = {name: value for name, value in parameters.items() if name != "basis"}
    return recipe | {"models": models, "parameters": dict(parameters)}


def cases(rows: Sequence[Method]) -> Iterator[tuple[Method, str | None, dict[str, Any]]]:
    """Yield every method with each kind of curvature, basis and other options to merge under.

    `kind-basis` is curvature of that kind, measured in a basis that was built ahead.
    """
    for row in rows:
        kinds = row.accepted if row.needs_curvature else (None,)
        if "basis" not in row.defaults:
            for kind in kinds:
                yield row, kind, PRUNED.get(row.name, {})
        for kind in kinds if "basis" in row.defaults else ():
            if kind == "projected":
                for basis in BASES[:2] if row.curvature == "kronecker" else BASES[:1]:
                    yield row, f"{row.curvature}-{basis}", {"basis": basis} | FEW_STEPS
                continue
            for basis in BASES:
                yield row, kind, {"basis": basis} | FEW_STEPS
        yield from ((row, row.curvature if row.needs_curvature else None, more) for more in OTHERWISE.get(row.name, ()))


def measure(recipe: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the bytes that a merge is planned at and those that this process takes, under the limit of its plan."""
    from epimer.api import plan_merge

    plan = plan_merge(recipe, any_curvature=True)
    plan.check()
    X = torch.randn(256, 256, dtype=torch.float64)
    for warm_up in (X, X.float()):  # loads libraries
        torch.linalg.eigh(warm_up @ warm_up.T), torch.linalg.svd(warm_up), torch.linalg.qr(warm_up)
    before, files = resident_memory(), pages_of_files()
    run = RunOptions("cpu", workers=1, max_memory=before + SLACK + plan.memory + LEEWAY)
    Path("/proc/self/clear_refs").write_text("5")  # starts the kernel's peak anew
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = write_merge(plan, place / "out", run, overwrite=True)
    seconds, peak, told = time.perf_counter() - started, peak_memory(), record.tensors[NAME]
    dropped = max(0, files - pages_of_files())  # libraries' pages that the system took back meanwhile
    sizes = {"planned": plan.memory, "taken": peak - before + dropped, "peak": peak, "seconds": seconds}
    return sizes | {"status": told.status, "residual": told.residual}


def pages_of_files() -> int:
    """Return the bytes of files, such as libraries, that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def measure_apart(recipe: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return what `measure` returns in a process of its own."""
    file = place / "recipe.json"
    file.write_text(json.dumps(recipe))
    command = [sys.executable, __file__, "--one", str(file)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def planned(recipe: dict[str, Any]) -> int:
    """Return the bytes that a merge is planned at."""
    from epimer.api import plan_merge

    return plan_merge(recipe, any_curvature=True).memory


def compare(options: argparse.Namespace, known: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for every case that is not known yet."""
    listed = [epimer.describe_method(name) for name in epimer.list_methods() if name != "greedy_soup"]
    rows = [form for row in listed for form in (row, row.mergekit) if form is not None]
    rows = [epimer.describe_method(name) for name in options.methods] if options.methods else rows
    for text in options.shapes:
        m, n = map(int, text.split("x"))
        for tasks in options.tasks:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                write_models(place, (m, n), tasks, getattr(torch, options.dtype))
                for row, kind, parameters in cases(rows):
                    basis = parameters.get("basis", row.defaults.get("basis"))
                    if (options.bases and basis not in options.bases) or (options.kinds and kind not in options.kinds):
                        continue
                    told = {"method": row.name, "curvature": kind, "basis": basis, "shape": text, "tasks": tasks}
                    told |= {"dtype": options.dtype, "options": parameters}
                    if what(told) in known:
                        continue
                    if kind is not None and not (place / f"{kind}0").exists():
                        write_curvature(place, kind, (m, n), tasks)
                    recipe = recipe_of(place, row, kind, tasks, parameters)
                    if planned(recipe) > WIDEST:
                        print(f"{what(told)}: left out, too wide to measure here")
                        continue
                    measured = measure_apart(recipe, place)
                    told["models"] = len(recipe["models"])
                    yield told | {key: measured[key] for key in ("planned", "taken")}


def what(row: Mapping[str, Any]) -> str:
    """Return a case in words."""
    others = (f"{name} {value}" for name, value in row["options"].items() if name not in ("basis", *FEW_STEPS))
    case = " ".join(filter(None, (row["method"], row["curvature"], row["basis"], *others)))
    return f"{case:55} {row['shape']:>9} T = {row['tasks']} {row['dtype']}"


def line(row: Mapping[str, Any]) -> str:
    """Return a case with its plan and its peak; one whose plan did not hold is marked."""
    ratio = row["planned"] / row["taken"]
    sizes = f"planned {row['planned'] / 2**20:6.0f} MiB, taken {row['taken'] / 2**20:6.0f}, {ratio:5.2f}x"
    return f"{what(row)}  {sizes}{'' if 1 <= ratio <= MOST else '  <-'}"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many plans held, with the least and the largest ratio of plan to peak."""
    ratios = sorted((row["planned"] / row["taken"], what(row)) for row in rows)
    above = sum(ratio < 1 for ratio, _ in ratios)
    wide = sum(ratio > MOST for ratio, _ in ratios)
    (least, tightest), (largest, loosest) = ratios[0], ratios[-1]
    return (
        f"{len(rows)} cases: {above} took more than planned, {wide} were planned at over {MOST} times what they took\n"
        f"least    {least:.2f}x  {tightest}\nmedian   {ratios[len(ratios) // 2][0]:.2f}x\n"
        f"largest  {largest:.2f}x  {loosest}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the least and the largest ratio of every method, basis and kind, as a Markdown table."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        others = (f"{name} {value}" for name, value in row["options"].items() if name not in ("basis", *FEW_STEPS))
        case = ", ".join(filter(None, (row["curvature"], row["basis"], *others)))
        ratios.setdefault((row["method"], case), []).append(row["planned"] / row["taken"])
    by_method: dict[str, list[str]] = {}
    for (method, case), found in ratios.items():
        span = f"{min(found):.2f} to {max(found):.2f}"
        by_method.setdefault(method, []).append(f"{case} {span}" if case else span)
    lines = [f"| `{method}` | {'; '.join(found)} |" for method, found in by_method.items()]
    return "\n".join(["| method | planned / taken, least and largest |", "|---|---|", *lines])


def main() -> None:
    """Measure every case, print plan against peak, and fail where a plan did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--bases", nargs="+", choices=BASES)
    parser.add_argument("--kinds", nargs="+", help="of curvature, or kind-basis for those measured in a basis")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tasks", nargs="+", type=int, default=TASKS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--missing", action="store_true", help="measure only what the JSON file does not have")
    parser.add_argument("--table", action="store_true", help="of what the JSON file has; nothing is measured")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one.read_text()), options.one.parent)))
        return
    there = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    found = {what(row): row for row in there}
    if options.table:
        print(table(there), summary(there), sep="\n\n")
        return
    measured = []
    commit = source_state(SOURCE)["commit"]  # of each row, as the file may have rows of earlier runs
    for row in compare(options, found if options.missing else ()):
        row["commit"] = commit
        measured.append(row)
        found[what(row)] = row
        print(line(row), flush=True)
        if options.json:  # as far as it has come
            write_result(options.json, {"rows": list(found.values())})
    print(summary(measured) if measured else "nothing was measured")
    if any(not 1 <= row["planned"] / row["taken"] <= MOST for row in measured):
        sys.exit(1)


if __name__ == "__main__":
    main()
