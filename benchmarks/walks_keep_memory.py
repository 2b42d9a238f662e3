"""Claim: a diagnosis, a basis and a sweep of eight models keep `--max-memory`, and a sweep reads each model once.

ViT-B-shaped models of a few layers are written, and each command runs with a limit near what the models weigh together.
The peak is what the kernel reports for the process; bytes are what it read from the models' files.

    python benchmarks/walks_keep_memory.py [--layers 3] [--limits 1.2GB 2GB] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import diagnosis_is_quick
import torch
import yaml
from diagnosis_is_quick import TASKS, shapes, step
from memory_is_flat import peak_of
from result_file import write_result
from safetensors.torch import save_file

import epimer
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.engine.memory import parse_size

METHODS, RANKS = ["average", "tsv", "iso_c", "epimer_free"], [8, 16]


def write_models(place: Path) -> list[int]:
    """Write a base and its fine-tuned models; return their sizes."""
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes().items()}
    sizes = []
    for name in ("base", *(f"task{t}" for t in range(TASKS))):
        moved = name != "base"
        state = {key: W + step(tuple(W.shape), generator) if moved else W for key, W in base.items()}
        save_file(state, place / f"{name}.safetensors")
        sizes.append((place / f"{name}.safetensors").stat().st_size)
    return sizes


def bytes_read(place: Path, recipe: Path) -> dict[str, int]:
    """Return what a sweep over 4 methods x 2 ranks reads from each model's file."""
    counts: dict[str, int] = {}
    fill = SafetensorsFile._fill

    def counted(self: SafetensorsFile, buffer: memoryview, offset: int) -> None:
        counts[self.path.name] = counts.get(self.path.name, 0) + len(buffer)
        fill(self, buffer, offset)

    SafetensorsFile._fill = counted  # type: ignore[method-assign]
    (place / "flat_judge.py").write_text(
        "def score(state):\n    return {'one': float(state['encoder.layers.0.mlp.fc1.weight'][0, 0])}\n"
    )
    sys.path.insert(0, str(place))
    try:
        epimer.sweep(recipe, "flat_judge:score", methods=METHODS, ranks=RANKS, scales=[1.0], progress=False)
    finally:
        SafetensorsFile._fill = fill  # type: ignore[method-assign]
    return counts


def main() -> None:
    """Measure peaks and bytes, and print them as ratios to the limit and to the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--limits", nargs="+", default=["1.2GB", "2GB"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    diagnosis_is_quick.LAYERS = options.layers
    results: dict[str, Any] = {"models": TASKS + 1, "layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sizes = write_models(place)
        results["models_gb"] = sum(sizes) / 1e9
        print(f"{TASKS + 1} models of {sizes[0] / 1e9:.2f} GB, {sum(sizes) / 1e9:.2f} GB together")
        recipe = place / "recipe.yaml"
        models = [{"model": f"task{t}.safetensors"} for t in range(TASKS)]
        recipe.write_text(
            yaml.safe_dump({"merge_method": "epimer_free", "base_model": "base.safetensors", "models": models})
        )
        results["peaks"] = []
        for limit in options.limits:
            for name, rest in (("diagnose", []), ("basis", [str(place / f"basis-{limit}")])):
                command = ["epimer", name, str(recipe), *rest, "--max-memory", limit, "-q"]
                peak, seconds = peak_of(command)
                share = peak / parse_size(limit, "limit")
                results["peaks"].append({"command": name, "limit": limit, "peak": peak, "seconds": seconds})
                told = f"peak {peak / 1e9:.2f} GB, {share:.2f} of the limit, {seconds:.0f} s"
                print(f"epimer {name} --max-memory {limit}: {told}")
        counts = bytes_read(place, recipe)
        results["read"] = {name: count / sizes[0] for name, count in counts.items()}
        most = max(results["read"].values())
        print(
            f"sweep of {len(METHODS)} methods x {len(RANKS)} ranks: reads each model's bytes {most:.2f} times at most"
        )
    if options.json:
        write_result(options.json, results, seed=0)


if __name__ == "__main__":
    main()
