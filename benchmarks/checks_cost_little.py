"""Checking every output tensor, finite, in range and different from the base, costs a merge under 2% of its time.

A checkpoint of 0.5 GB is merged with all checks and with none, in turn and in one process; what is compared is the
least CPU time of each, which other work on the machine does not stretch. The checks are taken out from outside: epimer
has no switch for that. Guarded decompositions are timed against torch's own, which they return bit by bit where the
first try succeeds.

    python benchmarks/checks_cost_little.py [--gigabytes 0.5] [--repeats 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

import epimer
from epimer.engine import merge, weighted_sums
from epimer.geometry import decompositions

SIDE = 4096
CASES = (("average", torch.float32), ("average", torch.bfloat16), ("task_arithmetic", torch.bfloat16))


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
        given.json.write_text(json.dumps(rows, indent=1))


@contextmanager
def _unchecked() -> Iterator[None]:
    """Take every check of outputs out of a merge."""
    kept = weighted_sums._fits, merge.equals_base, merge.nonfinite
    weighted_sums._fits = lambda x, rounded: True
    merge.equals_base = lambda result, base: False
    merge.nonfinite = lambda x: 0
    try:
        yield
    finally:
        weighted_sums._fits, merge.equals_base, merge.nonfinite = kept


def _merges(method: str, dtype: torch.dtype, gigabytes: float, repeats: int) -> dict[str, object]:
    """Return the least time of a merge with and without checks."""
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
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
            for kind, seconds in times.items():
                shutil.rmtree(here / "out", ignore_errors=True)
                started = time.process_time()
                if kind == "checked":
                    epimer.merge(recipe, here / "out", progress=False, workers=1)
                else:
                    with _unchecked():
                        epimer.merge(recipe, here / "out", progress=False, workers=1)
                seconds.append(time.process_time() - started)
    checked, unchecked = (min(times[kind][1:]) for kind in ("checked", "unchecked"))
    name = f"{method}, {str(dtype).removeprefix('torch.')}"
    return {"case": name, "checked": checked, "unchecked": unchecked, "share": checked / unchecked - 1}


def _decompositions() -> list[dict[str, object]]:
    """Return the least time of guarded decompositions and of torch's own."""
    rows: list[dict[str, object]] = []
    for n in (16, 64, 256):
        A = torch.randn(2 * n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        H = A.T @ A
        for name, guarded, own, matrix in (
            ("eigh", decompositions.eigh, torch.linalg.eigh, H),
            ("svd", decompositions.thin_svd, lambda M: torch.linalg.svd(M, full_matrices=False), A),
            ("qr", decompositions.qr, torch.linalg.qr, A),
        ):
            best = {"checked": float("inf"), "unchecked": float("inf")}
            for _ in range(max(20, 40000 // n**2)):
                for kind, decompose in (("checked", guarded), ("unchecked", own)):
                    started = time.perf_counter()
                    decompose(matrix)
                    best[kind] = min(best[kind], time.perf_counter() - started)
            rows.append({"case": f"{name} {n}", **best, "share": best["checked"] / best["unchecked"] - 1})
    return rows


if __name__ == "__main__":
    main()
