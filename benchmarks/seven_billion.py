"""Claim: models of 7B's shape merge on two cores within the planned memory, in about the planned time.

Bf16 models and their base with Llama-2-7B's matrices (4096 wide, 11008 inside), as many of its 32 layers as `--layers`
says, are written with random weights and merged through the command line at `--max-memory`. Task vectors have singular
values that fall as i^-0.7 over 512 directions, and as much noise as a tenth of that. Memory and time that
`epimer merge --dry-run` plans stand beside what was measured; the time of all 32 layers is 32 times that of one.

    python benchmarks/seven_billion.py [--layers 2] [--methods average tsv] [--max-memory 6GB] [--json FILE]
    python benchmarks/seven_billion.py --layers 32 --models 3 --device cuda --max-memory 40GB --folder /dev/shm
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import memory_is_flat
import torch
from memory_is_flat import peak_of, shapes
from result_file import write_result

from epimer.checkpoints.writer import save_tensors

HIDDEN, INNER, VOCABULARY, LAYERS, DIRECTIONS = 4096, 11008, 4096, 32, 512
EPIMER = [sys.executable, "-m", "epimer"]


def write_model(folder: Path, layers: int, seed: int, device: str) -> int:
    """Write the base (seed 0), or it with task vectors; layers have the same ones, rolled by their depth."""
    folder.mkdir()
    generator, tensors = torch.Generator(device), {}
    moved: dict[tuple[int, ...], torch.Tensor] = {}
    for i, (name, shape) in enumerate(shapes(layers).items()):
        W = 0.02 * torch.randn(shape, generator=generator.manual_seed(i), device=device)
        if seed and len(shape) == 2:
            if shape not in moved:
                moved[shape] = task_vector(*shape, generator.manual_seed(1000 * seed + len(moved)), device)
            W += torch.roll(moved[shape], i, dims=0)
        tensors[name] = W.bfloat16().cpu()
    save_tensors(folder / "model.safetensors", tensors)
    return (folder / "model.safetensors").stat().st_size


def task_vector(m: int, n: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Return a matrix a twentieth as large as the base's, with falling singular values and some noise."""
    left, right = (torch.randn(side, DIRECTIONS, generator=generator, device=device) for side in (m, n))
    D = (left * torch.arange(1, DIRECTIONS + 1, device=device) ** -0.7) @ right.T
    noise = torch.randn(m, n, generator=generator, device=device)
    D = D / D.norm() + 0.1 * noise / noise.norm()
    return D * (0.05 * 0.02 * math.sqrt(m * n))


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
    parser.add_argument("--models", type=int, default=4, help="the base apart")
    parser.add_argument("--device", default="cpu", help="where models are made and merged")
    parser.add_argument("--max-memory", default="6GB")
    parser.add_argument("--folder", type=Path, help="where there is room for all models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory_is_flat.HIDDEN, memory_is_flat.INNER, memory_is_flat.VOCABULARY = HIDDEN, INNER, VOCABULARY
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        sizes = [write_model(root / f"m{t}", options.layers, t, options.device) for t in range(options.models + 1)]
        for method in options.methods:
            rank = {"rank": 32} if method in ("tsv", "epimer_free") else {}
            recipe = {
                "merge_method": method,
                "base_model": str(root / "m0"),
                "models": [{"model": str(root / f"m{t}")} for t in range(1, options.models + 1)],
                **({"parameters": rank} if rank else {}),
            }
            (root / "recipe.yaml").write_text(json.dumps(recipe))
            limits = ["--max-memory", options.max_memory, "--device", options.device]
            totals = planned([*EPIMER, "merge", str(root / "recipe.yaml"), *limits])
            out = root / f"out-{method}"
            peak, seconds = peak_of([*EPIMER, "merge", str(root / "recipe.yaml"), str(out), "--quiet", *limits])
            shutil.rmtree(out)
            limit = float(options.max_memory.removesuffix("GB")) * 1e9
            row = {"method": method, "model_gb": max(sizes) / 1e9, "peak_gb": peak / 1e9, "of_limit": peak / limit}
            row |= {"seconds": seconds, "layers_per_second": options.layers / seconds, "planned": totals}
            row |= {"minutes_of_all_layers": seconds / options.layers * LAYERS / 60}
            rows.append(row)
            expected = totals["seconds"] + totals["starting"]
            speed = f"{row['layers_per_second']:.3f} layers/s, all 32 in {row['minutes_of_all_layers']:.1f} min"
            peaked = f"peak {peak / 1e9:.2f} GB of {options.max_memory}"
            print(f"{method:12} {seconds:7.1f} s (planned {expected:.1f}), {speed}; {peaked}", flush=True)
            if options.json:
                about = {"layers": options.layers, "models": options.models, "device": options.device}
                write_result(options.json, {**about, "limit": options.max_memory, "rows": rows})
    assert all(row["of_limit"] < 1 for row in rows), "a merge went over its limit"


if __name__ == "__main__":
    main()
