"""Checking every output tensor, finite, in range and not the base's again, costs an average under 4% of its CPU time.

A checkpoint of 0.5 GB is merged, and the CPU time within the checks is divided by that of the whole merge; the least
share of several merges is taken. Guarded decompositions are timed against torch's own, which they return bit by bit
where the first try succeeds.

    python benchmarks/checks_cost_little.py [--gigabytes 0.5] [--repeats 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from result_file import write_result
from safetensors.torch import save_file

import epimer
from epimer.engine import merge, weighted_sums
from epimer.geometry import decompositions

SIDE = 4096
CASES = (("average", torch.float32), ("average", torch.bfloat16))


def main() -> None:
    """Print the share of the time that checks take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for row in chain(_decompositions(), (_merges(*case, given.gigabytes, given.repeats) for case in CASES)):
        rows.append(row)
        print(row, flush=True)
    if given.json:
        write_result(given.json, {"rows": rows}, seed=0)


@contextmanager
def _timed(spent: list[float]) -> Iterator[None]:
    """Add the CPU time within every check of outputs to `spent`."""
    places = ((weighted_sums, "nonfinite"), (merge, "equals_base"), (merge, "nonfinite"))
    kept = [getattr(module, name) for module, name in places]

    def timed(check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = check(*arguments)
            spent.append(time.thread_time() - started)
            return result

        return run

    for (module, name), check in zip(places, kept, strict=True):
        setattr(module, name, timed(check))
    try:
        yield
    finally:
        for (module, name), check in zip(places, kept, strict=True):
            setattr(module, name, check)


def _merges(method: str, dtype: torch.dtype, gigabytes: float, repeats: int) -> dict[str, object]:
    """Return the CPU time of a merge and of the checks in it, where they took the least share."""
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        here, rows = Path(folder), int(gigabytes * 2**30 / SIDE / dtype.itemsize / 4)
        for t, name in enumerate(("base", "one", "two")):
            generator = torch.Generator().manual_seed(t)
            state = {f"{i}.weight": torch.randn(rows, SIDE, generator=generator).to(dtype) for i in range(4)}
            (here / name).mkdir()
            save_file(state, here / name / "model.safetensors")
        models = [{"model": str(here / name)} for name in ("one", "two")]
        recipe = {"merge_method": method, "base_model": str(here / "base"), "models": models}
        for _ in range(repeats + 1):  # the first reads the files into memory
            shutil.rmtree(here / "out", ignore_errors=True)
            spent: list[float] = []
            started = time.process_time()
            with _timed(spent):
                epimer.merge(recipe, here / "out", progress=False, workers=1)
            found.append((sum(spent), time.process_time() - started))
    checks, whole = min(found[1:], key=lambda pair: pair[0] / pair[1])
    name = f"{method}, {str(dtype).removeprefix('torch.')}"
    return {"case": name, "checks": checks, "merge": whole, "share": checks / whole}


def _decompositions() -> list[dict[str, object]]:
    """Return the least time of guarded decompositions and of torch's own."""
    rows: list[dict[str, object]] = []
    for n in (16, 64):  # what is added to a larger one is lost in its noise
        A = torch.randn(2 * n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        H = A.T @ A
        for name, guarded, own, matrix in (
            ("eigh", decompositions.eigh, torch.linalg.eigh, H),
            ("svd", decompositions.thin_svd, lambda M: torch.linalg.svd(M, full_matrices=False), A),
            ("qr", decompositions.qr, torch.linalg.qr, A),
        ):
            best = {"guarded": float("inf"), "own": float("inf")}
            for _ in range(40000 // n):
                for kind, decompose in (("guarded", guarded), ("own", own)):
                    started = time.perf_counter()
                    decompose(matrix)
                    best[kind] = min(best[kind], time.perf_counter() - started)
            rows.append({"case": f"{name} {n}", **best, "added": best["guarded"] - best["own"]})
    return rows


if __name__ == "__main__":
    main()
