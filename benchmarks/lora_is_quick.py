"""Claim: eight adapters of rank 16 of a 7B model merge into one adapter in under a minute on 2 cores, within 2 GB.

Adapters of all linear layers of a Llama with 32 layers of 4096 x 11008 are drawn at random. The base is a file with a
header and a hole: no weights are there to be read. The command line merges the adapters into one; the peak is what the
kernel reports for that process, and so is the time that it computed, which others on the machine do not lengthen.
`--layers 2` tries it small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from result_file import write_result

from epimer.checkpoints.checkpoint import header
from epimer.checkpoints.writer import plan_shards, save_tensors

HIDDEN, INNER, VOCABULARY = 4096, 11008, 32000
LINEAR = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
METHODS = ("task_arithmetic", "tsv", "iso_c", "epimer_free")
MINUTE, MEMORY = 60.0, 2e9


def modules(layers: int) -> dict[str, tuple[int, int]]:
    """Return the linear layers of the model, outputs x inputs."""
    return {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in LINEAR.items()}


def write_base(folder: Path, layers: int) -> int:
    """Write the base: a header, and a hole where its weights would be. Return its size."""
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": header((VOCABULARY, HIDDEN), torch.bfloat16)}
    tensors |= {f"{name}.weight": header(shape, torch.bfloat16) for name, shape in modules(layers).items()}
    tensors |= {"model.norm.weight": header((HIDDEN,), torch.bfloat16)}
    tensors |= {"lm_head.weight": header((VOCABULARY, HIDDEN), torch.bfloat16)}
    (shard,) = plan_shards(tensors, {}, 1 << 62)
    path = folder / shard.file
    path.write_bytes(shard.header)
    os.truncate(path, shard.size)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return shard.size


def write_adapter(folder: Path, layers: int, rank: int, seed: int) -> int:
    """Write an adapter of random factors in bfloat16; return its size."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (m, n) in modules(layers).items():
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, n, generator=generator).div_(64).bfloat16()
        tensors[f"{stem}.lora_B.weight"] = torch.randn(m, rank, generator=generator).div_(64).bfloat16()
    save_tensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*LINEAR]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return (folder / "adapter_model.safetensors").stat().st_size


def measure(folder: Path, method: str, tasks: int, rank: int | None) -> dict[str, Any]:
    """Merge by the command line; return its seconds, its peak memory and what it wrote."""
    models = [{"model": f"{folder / 'base'}+{folder / f'adapter{t}'}"} for t in range(tasks)]
    recipe = {"merge_method": method, "base_model": str(folder / "base"), "models": models, "output": "lora"}
    recipe |= {} if rank is None else {"lora_rank": rank}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = folder / "out"
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_maxrss, used.ru_utime + used.ru_stime); sys.exit(done.returncode)"
    )
    merge = [sys.executable, "-m", "epimer", "merge", str(folder / "recipe.yaml"), str(out), "--quiet", "--overwrite"]
    merge += ["--workers", "2"]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *merge], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    peak, computed = done.stdout.split()[-2:]
    written = (out / "adapter_model.safetensors").stat().st_size
    found = {"seconds": seconds, "computed": float(computed), "peak": int(peak) * 1024, "written": written}
    return {"method": method, "lora_rank": rank, **found}


def main() -> None:
    """Measure every method, print one line each, and say whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folder", type=Path, help="where to work; by default the folder for temporary files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place)
        base = write_base(folder / "base", args.layers)
        size, *_ = [write_adapter(folder / f"adapter{t}", args.layers, args.rank, t) for t in range(args.tasks)]
        print(f"base {base / 1e9:.1f} GB (a hole), {args.tasks} adapters of {size / 1e6:.0f} MB")
        for method in args.methods.split(","):
            for rank in (None, args.rank):
                row = measure(folder, method, args.tasks, rank)
                row |= {"time_share": row["seconds"] / MINUTE, "memory_share": row["peak"] / MEMORY}
                rows.append(row)
                shown = "exact" if rank is None else f"rank {rank}"
                times = f"{row['seconds']:6.1f} s ({row['computed']:.0f} s of one core)"
                sizes = f"peak {row['peak'] / 1e9:.2f} GB  wrote {row['written'] / 1e6:.0f} MB"
                shares = f"{row['time_share']:.2f} of 60 s, {row['memory_share']:.2f} of 2 GB"
                print(f"{method:16} {shown:8} {times}  {sizes}  ({shares})")
    if args.json:
        about = {"layers": args.layers, "tasks": args.tasks, "rank": args.rank}
        write_result(args.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
