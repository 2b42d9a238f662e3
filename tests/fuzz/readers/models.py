"""Tiny models on disk, merges of them, and what must hold of a merged folder."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import epimer
from epimer.checksums import sealed
from epimer.json_values import json_value
from epimer.records import MergeRecord
from fuzz.mutations import damage_content, damage_files

SHAPES = {
    "model.embed_tokens.weight": (6, 4),
    "model.layers.0.up.weight": (5, 4),
    "model.layers.0.up.bias": (5,),
    "model.layers.1.up.weight": (5, 4),
    "model.layers.1.up.bias": (5,),
    "model.norm.weight": (4,),
}
CONFIG = {"model_type": "llama", "dtype": "float32", "vocab_size": 6, "num_hidden_layers": 2, "eos_token_id": 2}


def tensors(seed: int) -> dict[str, Tensor]:
    """Return the state of a model: 0 is the base, others have moved from it."""
    base = torch.Generator().manual_seed(0)
    moved = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=base) + (0.1 * torch.randn(shape, generator=moved) if seed else 0)
        for name, shape in SHAPES.items()
    }


def write_models(folder: Path, *names: str, config: dict[str, Any] | None = None) -> None:
    """Write model folders; the first is the base of the others."""
    for seed, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        save_file(tensors(seed), folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config or CONFIG))


def recipe(folder: Path, method: str = "task_arithmetic", **more: Any) -> dict[str, Any]:
    """Return the recipe of a merge of the models one and two with their base."""
    models = [{"model": str(folder / name)} for name in ("one", "two")]
    return {"merge_method": method, "base_model": str(folder / "base"), "models": models, **more}


def merge(recipe: dict[str, Any], out: Path, **options: Any) -> dict[str, Tensor]:
    """Merge into a folder, check that it is whole, and return its tensors."""
    epimer.merge(recipe, out, progress=False, workers=1, **options)
    return whole(out)


def whole(out: Path) -> dict[str, Tensor]:
    """Return the tensors of a merged folder; assert that they are finite and that every JSON file can be read."""
    found: dict[str, Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        found |= load_file(file)
    assert found, "the merged folder holds no tensor"
    for name, W in found.items():
        assert not W.is_floating_point() or bool(torch.isfinite(W.float()).all()), f"{name!r} is not finite"
    for file in out.rglob("*.json"):
        json.loads(file.read_bytes().decode("utf-8"))
    for file in (out / "README.md", out / "recipe.yaml"):
        if file.exists():
            file.read_bytes().decode("utf-8")
    return found


def merge_and_compare(recipe: dict[str, Any], out: Path, **options: Any) -> None:
    """Merge; all names of the base must be there, with its shapes."""
    found = merge(recipe, out, **options)
    shapes = {name: tuple(W.shape) for name, W in found.items()}
    assert shapes == SHAPES, f"the merge holds {shapes}"


def damage_record(rng: Random, path: Path) -> bool:
    """Damage an epimer.json; whether it has a checksum that fits, which some get that are still records."""
    (damage_files if rng.random() < 0.1 else damage_content)(rng, path)
    if rng.random() < 0.3 and path.is_file():
        try:
            record = json_value(path.read_bytes())
        except ValueError:
            return False
        if isinstance(record, dict):
            path.write_text(json.dumps(sealed(record)))
            return True
    return False


def damage_numbers(rng: Random, path: Path) -> None:
    """Give tensors of a valid file other values, shapes or dtypes."""
    state = load_file(path)
    for name in rng.sample(sorted(state), min(len(state), rng.choice((1, 1, 2)))):
        W, kind = state[name], rng.randrange(9)
        if kind == 0:
            state[name] = torch.full_like(W, rng.choice((0, -1, 1, 2, 100)))
        elif kind == 1 and W.is_floating_point():
            state[name] = torch.full_like(W, rng.choice((float("nan"), float("inf"), 1e38, -1e38, 1e-40)))
        elif kind == 2 and W.numel():
            W = W.clone()
            W.view(-1)[rng.randrange(W.numel())] = rng.choice((-1, 100, 3, 0))
            state[name] = W
        elif kind == 3:
            state[name] = (
                rng.choice(
                    (W.flatten(), W.reshape(1, *W.shape), W[..., :0], torch.zeros(()), W.mT if W.dim() > 1 else W)
                )
                .contiguous()
                .clone()
            )
        elif kind == 4:
            state[name] = torch.cat([W, W]) if W.dim() else W
        elif kind == 5:
            state[name] = W.to(
                rng.choice((torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.bfloat16))
            )
        elif kind == 6:
            del state[name]
        elif kind == 7:
            other = rng.choice(sorted(state))
            state[name] = state[other].clone()
        elif W.is_floating_point():
            state[name] = W * rng.choice((1e30, 1e-30, -1.0))
    if state:
        save_file(state, path)


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files with the same content."""
    names = {path.relative_to(first) for path in first.rglob("*") if path.is_file()}
    others = {path.relative_to(second) for path in second.rglob("*") if path.is_file()}
    same = [name for name in names & others if _content(first / name) == _content(second / name)]
    return names == others and len(same) == len(names)


def _content(path: Path) -> Any:
    """Return what a file says: of a record its values, however they are written, else its bytes."""
    data = path.read_bytes()
    return MergeRecord.from_json(data, path.name).lasting() if path.name == "epimer.json" else data
