"""The main job, end to end: model folders and a recipe in, one model folder out, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from epimer.checkpoints.writer import save_tensors

RECIPE = """\
merge_method: tsv          # any of `epimer methods`
base_model: base
models:
  - model: poet
    parameters: {weight: 0.5}
  - model: chemist
    parameters: {weight: 0.5}
dtype: bfloat16
"""


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a model folder as `save_pretrained` would."""
    folder.mkdir()
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))


def run(*arguments: str, folder: Path) -> None:
    """Run a command and show it."""
    print("\n$ epimer", *arguments, flush=True)
    subprocess.run([Path(sys.executable).with_name("epimer"), *arguments], cwd=folder, check=True)


def main() -> None:
    """Make three small models, look at the plan, merge, look at the result."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (500, 64)}
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": (128, 64) for i in range(3)}
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save(root / "base", base)
        for model in ("poet", "chemist"):
            save(root / model, {n: W + 0.02 * torch.randn_like(W) for n, W in base.items()})
        (root / "recipe.yaml").write_text(RECIPE)
        print(RECIPE)
        run("merge", "recipe.yaml", "--dry-run", folder=root)
        run("merge", "recipe.yaml", "merged", folder=root)
        run("inspect", "merged", folder=root)
        run("merge", "recipe.yaml", "merged", folder=root)


if __name__ == "__main__":
    main()
