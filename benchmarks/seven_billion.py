"""Claim: models of 7B's shape merge on two cores within the planned memory, in about the planned time.

Four bf16 models and their base with Llama-2-7B's matrices (4096 wide, 11008 inside), as many of its 32 layers as
`--layers` says, are written with random weights and merged through the command line at `--max-memory`. Memory and time
that `epimer merge --dry-run` plans stand beside what was measured; the time of all 32 layers is 32 times that of one.

    python benchmarks/seven_billion.py [--layers 2] [--methods average tsv] [--max-memory 6GB] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import memory_is_flat
from memory_is_flat import peak_of, write_model

HIDDEN, INNER, VOCABULARY, LAYERS, MODELS = 4096, 11008, 4096, 32, 4


def planned(command: list[str]) -> dict[str, Any]:
    """Return the totals of a dry run."""
    done = subprocess.run([*command, "--dry-run", "--json"], check=False, stdout=subprocess.PIPE, text=True)
    totals: dict[str, Any] = json.loads(done.stdout)["totals"]
    return totals


def main() -> None:
    """Write the models, merge them by every method, and print planned and measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=["average", "ties", "tsv", "iso_c", "epimer_free"])
    parser.add_argument("--max-memory", default="6GB")
    parser.add_argument("--folder", type=Path, help="where there is room for all models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory_is_flat.HIDDEN, memory_is_flat.INNER, memory_is_flat.VOCABULARY = HIDDEN, INNER, VOCABULARY
    epimer, rows = str(Path(sys.executable).with_name("epimer")), []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        size = max(write_model(root / f"m{t}", options.layers, t) for t in range(MODELS + 1))
        for method in options.methods:
            rank = {"rank": 32} if method in ("tsv", "epimer_free") else {}
            recipe = {
                "merge_method": method,
                "base_model": str(root / "m0"),
                "models": [{"model": str(root / f"m{t}")} for t in range(1, MODELS + 1)],
                **({"parameters": rank} if rank else {}),
            }
            (root / "recipe.yaml").write_text(json.dumps(recipe))
            totals = planned([epimer, "merge", str(root / "recipe.yaml"), "--max-memory", options.max_memory])
            command = [epimer, "merge", str(root / "recipe.yaml"), str(root / f"out-{method}"), "--quiet"]
            peak, seconds = peak_of([*command, "--max-memory", options.max_memory])
            limit = float(options.max_memory.removesuffix("GB")) * 1e9
            row = {"method": method, "model_gb": size / 1e9, "peak_gb": peak / 1e9, "of_limit": peak / limit}
            row |= {"seconds": seconds, "layers_per_second": options.layers / seconds, "planned": totals}
            row |= {"minutes_of_all_layers": seconds / options.layers * LAYERS / 60}
            rows.append(row)
            expected = totals.get("seconds", math.nan)
            speed = f"{row['layers_per_second']:.3f} layers/s, all 32 in {row['minutes_of_all_layers']:.1f} min"
            peaked = f"peak {peak / 1e9:.2f} GB of {options.max_memory}"
            print(f"{method:12} {seconds:7.1f} s (planned {expected:.1f}), {speed}; {peaked}", flush=True)
            if options.json:
                about = {"date": date.today().isoformat(), "layers": options.layers, "limit": options.max_memory}
                options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    assert all(row["of_limit"] < 1 for row in rows), "a merge went over its limit"


if __name__ == "__main__":
    main()
