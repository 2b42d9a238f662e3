"""A data-free diagnosis of eight ViT-B/32-shaped models: seconds, against reading the files and one merge by tsv.

Task vectors have the spectrum of fine-tuned ones (σ_i falling as 1/i^0.7, then noise). 3.1 GB of files are made.

    python benchmarks/diagnosis_is_quick.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from result_file import write_result
from safetensors.torch import load_file, save_file

import epimer

LAYERS, WIDTH, TASKS = 12, 768, 8


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of CLIP's ViT-B/32 vision tower."""
    found: dict[str, tuple[int, ...]] = {"embeddings.patch_embedding.weight": (WIDTH, 3, 32, 32)}
    for i in range(LAYERS):
        at = f"encoder.layers.{i}."
        for part in ("q", "k", "v", "out"):
            found |= {f"{at}self_attn.{part}_proj.weight": (WIDTH, WIDTH), f"{at}self_attn.{part}_proj.bias": (WIDTH,)}
        found |= {f"{at}mlp.fc1.weight": (4 * WIDTH, WIDTH), f"{at}mlp.fc2.weight": (WIDTH, 4 * WIDTH)}
        found |= {f"{at}layer_norm1.weight": (WIDTH,), f"{at}layer_norm2.weight": (WIDTH,)}
    return found


def step(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a task vector: leading directions over noise, a twentieth of the base's size."""
    if len(shape) != 2:
        return 1e-3 * torch.randn(shape, generator=generator)
    m, n = shape
    k = 64
    left, right = (torch.linalg.qr(torch.randn(d, k, generator=generator)).Q for d in (m, n))
    leading = (left * torch.arange(1, k + 1).pow(-0.7)) @ right.T
    noise = torch.randn(m, n, generator=generator)
    return 0.05 * (leading / leading.norm() + 0.6 * noise / noise.norm()) * n**0.5


def main() -> None:
    """Make the files, diagnose them, and print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("base", *(f"task{t}" for t in range(TASKS)))]
        generator = torch.Generator().manual_seed(0)
        base = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes().items()}
        for folder in folders:
            folder.mkdir()
            moved = folder.name != "base"
            state = {name: W + step(tuple(W.shape), generator) if moved else W for name, W in base.items()}
            save_file(state, folder / "model.safetensors")
            (folder / "config.json").write_text('{"model_type": "clip_vision_model"}')
        recipe = {"merge_method": "tsv", "parameters": {"rank": 32}, "base_model": str(folders[0])}
        recipe["models"] = [{"model": str(folder)} for folder in folders[1:]]
        started = time.perf_counter()
        for folder in folders:
            sum(float(W.sum()) for W in load_file(folder / "model.safetensors").values())
        read = time.perf_counter() - started
        started = time.perf_counter()
        found = epimer.diagnose(recipe, methods=["average", "tsv", "epimer_free"], progress=False)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        epimer.merge(recipe, Path(place) / "out", progress=False)
        merged = time.perf_counter() - started
        size = len(json.dumps(found.to_dict()))
    row = {"diagnosis s": seconds, "merge by tsv s": merged, "reading s": read, "json bytes": size}
    print(
        f"diagnosis {seconds:.1f} s (limit 60), {seconds / merged:.1f}x a merge by tsv, {seconds / read:.1f}x reading"
    )
    print({name: round(one.mean, 3) for name, one in found.forecast.items()})
    if given.json:
        write_result(given.json, row, seed=0)


if __name__ == "__main__":
    main()
