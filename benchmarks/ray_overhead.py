"""What a job on Ray costs beside one on threads: little more than an empty task and a sync of its bytes is the aim.

Two merges, each by threads and by Ray with 1, 2 and 4 workers in the same run: `average` of many 1 MB tensors, whose
jobs are nearly all overhead, and `tsv` of 512 x 512 matrices, whose jobs compute. All Ray workers are processes of this
machine, so that no more than its cores can be gained; the first merge on Ray, which starts it and its workers, is timed
apart. The overhead of a job is its time less that on threads with as many workers as run at once (at most the number of
cores). Outputs are compared byte by byte.

    python benchmarks/ray_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from result_file import write_result
from safetensors.torch import save_file

import epimer

WORKERS, REPEATS = (1, 2, 4), 2
CASES = {"average": ({}, 64, (512, 512)), "tsv": ({"rank": 32}, 12, (512, 512))}


def models(folder: Path, tensors: int, shape: tuple[int, int]) -> dict[str, Any]:
    """Write a base and three models of it; return their part of a recipe."""
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "m0", "m1", "m2"):
        (folder / name).mkdir(parents=True)
        state = {f"layers.{i}.weight": torch.randn(shape, generator=generator) for i in range(tensors)}
        save_file(state, folder / name / "model.safetensors")
    return {"base_model": str(folder / "base"), "models": [{"model": str(folder / f"m{t}")} for t in range(3)]}


def seconds(recipe: dict[str, Any], out: Path, **options: Any) -> float:
    """Return how long the merging takes, without planning, of a merge into a new folder; the least of some."""
    taken = []
    for i in range(REPEATS):
        record = epimer.merge(recipe, out.with_name(f"{out.name}-{i}"), device="cpu", progress=False, **options)
        taken.append(record.timings["merge"])
    return min(taken)


def parts(jobs: int = 100) -> dict[str, float]:
    """Return the milliseconds of an empty task, one after the other, and of writing and syncing a megabyte."""
    empty, data = ray.remote(lambda: b""), os.urandom(1 << 20)
    ray.get(empty.remote())
    now = time.perf_counter()
    for _ in range(jobs):
        ray.get(empty.remote())
    task = time.perf_counter() - now
    file = os.open("synced", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(file, 0, jobs << 20)
    now = time.perf_counter()
    for i in range(jobs):
        os.pwrite(file, data, i << 20)
        os.fdatasync(file)
    synced = time.perf_counter() - now
    os.close(file)
    return {"empty task ms": 1e3 * task / jobs, "write and sync 1 MB ms": 1e3 * synced / jobs}


def main() -> None:
    """Time all of it, and print overheads and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cores, rows, started = len(os.sched_getaffinity(0)), [], {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        now = time.perf_counter()
        ray.init(num_cpus=max(WORKERS), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        started["ray.init s"] = time.perf_counter() - now
        cost, load = parts(), [os.getloadavg()[0]]
        for method, (parameters, tensors, shape) in CASES.items():
            root = Path(place) / method
            recipe = {"merge_method": method, "parameters": parameters, **models(root, tensors, shape)}
            now = time.perf_counter()
            epimer.merge(recipe, root / "first", engine="ray", workers=max(WORKERS), device="cpu", progress=False)
            started[f"first {method} s"] = time.perf_counter() - now
            threads = {n: seconds(recipe, root / f"threads{n}", workers=n) for n in sorted({1, min(2, cores), cores})}
            for workers in WORKERS:
                taken = seconds(recipe, root / f"ray{workers}", engine="ray", workers=workers)
                weights = [root / name / "model.safetensors" for name in ("threads1-0", f"ray{workers}-0")]
                assert weights[0].read_bytes() == weights[1].read_bytes()
                at_once = min(workers, cores)
                alike = threads[max(n for n in threads if n <= at_once)]
                overhead = (taken - alike) * at_once / tensors
                rows.append(
                    {
                        "method": method, "jobs": tensors, "workers": workers, "ray s": taken, "threads s": alike,
                        "ratio": taken / alike, "overhead ms per job": 1e3 * overhead,
                    }
                )  # fmt: skip
                print(
                    f"{method:8} {workers} workers: Ray {taken:6.3f} s, threads {alike:6.3f} s ({taken / alike:.2f}x), "
                    f"{1e3 * overhead:6.2f} ms more per job of {1e3 * alike * at_once / tensors:.2f} ms"
                )
        os.chdir(before)
    load.append(os.getloadavg()[0])
    print(", ".join(f"{name[:-2]} {value:.1f} s" for name, value in started.items()))
    print(
        ", ".join(f"{name[:-3]} {value:.2f} ms" for name, value in cost.items()), f"(load {load[0]:.1f}, {load[1]:.1f})"
    )
    if given.json:
        content = {"started": started, "parts": cost, "load before and after": load, "rows": rows}
        write_result(given.json, content, seed=0, ray=ray.__version__)


if __name__ == "__main__":
    main()
