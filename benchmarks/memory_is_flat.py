"""Claim: a merge's peak memory depends on the widest tensor and the limit set, not on the size of the models.

Eight bf16 models and their base, Llama-shaped with more and more layers, are merged through the command line at
`--max-memory`; the peak is what the kernel reports for the process. The control is what the models weigh.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from result_file import write_result

from epimer.checkpoints.writer import save_tensors

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama of this depth."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{prefix}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            found[f"{prefix}.mlp.{name}.weight"] = (INNER, HIDDEN)
        found[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        found[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path, layers: int, seed: int) -> int:
    """Write a model of random numbers, taken from one block at places that differ between models."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    largest = max(map(math.prod, shapes(layers).values()))
    block = (0.02 * torch.randn(largest + 4096, generator=generator)).bfloat16()
    tensors = {
        name: block[997 * i % 4096 :][: math.prod(shape)].view(shape)
        for i, (name, shape) in enumerate(shapes(layers).items())
    }
    save_tensors(folder / "model.safetensors", tensors)
    return (folder / "model.safetensors").stat().st_size


def peak_of(command: list[str]) -> tuple[float, float]:
    """Run a command; return its peak memory in bytes and its seconds."""
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1]) * 1024, time.perf_counter() - started


def main() -> None:
    """Measure the peaks and print them as ratios to the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 6, 12])
    parser.add_argument("--methods", nargs="+", default=["task_arithmetic", "ties"])
    parser.add_argument("--max-memory", default="3GB")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for all models")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    rows = []
    for layers in args.layers:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            root = Path(name)
            size = max(write_model(root / f"m{t}", layers, t) for t in range(args.models + 1))
            for method in args.methods:
                recipe = {
                    "merge_method": method,
                    "base_model": str(root / "m0"),
                    "models": [{"model": str(root / f"m{t}")} for t in range(1, args.models + 1)],
                }
                (root / "recipe.yaml").write_text(json.dumps(recipe))
                command = [str(Path(sys.executable).with_name("epimer")), "merge", str(root / "recipe.yaml")]
                command += [str(root / f"out-{method}"), "--max-memory", args.max_memory, "--quiet"]
                peak, seconds = peak_of(command)
                limit = float(args.max_memory.removesuffix("GB")) * 1e9
                rows.append(
                    {
                        "method": method,
                        "model_gb": round(size / 1e9, 3),
                        "peak_gb": round(peak / 1e9, 3),
                        "of_limit": round(peak / limit, 3),
                        "of_all_models": round(peak / (size * (args.models + 1)), 3),
                        "seconds": round(seconds, 1),
                        "read_mb_per_s": round(size * (args.models + 1) / seconds / 1e6),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    assert all(row["of_limit"] < 1 for row in rows), "a merge went over its limit"
    if args.save:
        target = Path(__file__).parent / "results" / f"memory_is_flat-{date.today()}.json"
        write_result(target, {"limit": args.max_memory, "models": args.models, "rows": rows})


if __name__ == "__main__":
    main()
