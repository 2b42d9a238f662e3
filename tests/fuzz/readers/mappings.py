"""Values of Python that callers give: state dicts, recipes as mappings, and names of things."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import torch

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.curvature.basis import StoredBasis
from epimer.errors import EpimerError
from epimer.recipe.load import load_recipe
from epimer.tasks.data import open_data
from fuzz.harness import Reader
from fuzz.mutations import NAMES, as_python, mutated
from fuzz.readers.models import tensors, write_models
from fuzz.readers.texts import RECIPES

METHODS = ("average", "task_arithmetic", "ties", "slerp", "tsv", "epimer_free", "linear", "iso_c", "dare_ties")
ODD: list[Any] = [
    None,
    3,
    0.5,
    "text",
    b"bytes",
    [],
    {},
    object(),
    (1, 2),
    {1},
    torch.nn.Linear(2, 2),
    lambda: None,
    1j,
]
VALUES = (float("nan"), float("inf"), 1e38, -1e38, 1e-40, 0.0)

_CASES: dict[Path, Any] = {}  # what a case hands from its damage to its reading: values that no file can hold


# state dicts


def _damaged_state(rng: Random, state: dict[Any, Any]) -> Any:
    """Damage a valid state dict in one place."""
    name = rng.choice(sorted(state))
    W, kind = state[name], rng.randrange(14)
    if kind == 0:
        state[name] = rng.choice(ODD)
    elif kind == 1:
        state[rng.choice((*NAMES, 3, None, ("a",), b"x"))] = state.pop(name)
    elif kind == 2:
        del state[name]
    elif kind == 3:
        W = W.clone()
        W.view(-1)[rng.randrange(W.numel())] = rng.choice(VALUES)
        state[name] = W
    elif kind == 4:
        state[name] = rng.choice(
            (W.flatten(), W[..., :0], torch.zeros(()), W.unsqueeze(0), W.mT if W.dim() > 1 else W[::2])
        )
    elif kind == 5:
        dtypes = (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
        state[name] = W.to(rng.choice(dtypes))
    elif kind == 6:
        state[name] = rng.choice(
            (W.to_sparse(), W.to("meta"), W.requires_grad_(), torch.nn.Parameter(W), W.expand(2, *W.shape)[0])
        )
    elif kind == 7:
        state[name] = torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)
    elif kind == 8:
        state[rng.choice(NAMES)] = W.clone()
    elif kind == 9:
        state[name] = state[rng.choice(sorted(state))]  # tied
    elif kind == 10:
        state[name] = torch.full_like(W, rng.choice(VALUES))
    elif kind == 11:
        return rng.choice((*ODD, list(state.items()), {}))
    elif kind == 12:
        state[name] = torch.nested.nested_tensor([W, W])
    else:
        state[name] = W * rng.choice((1e30, 1e-30, 0.0, -1.0))
    return state


def _damage_states(rng: Random, folder: Path) -> None:
    states: list[Any] = [tensors(i) for i in range(3)]
    for i in rng.sample(range(3), rng.choice((1, 1, 2))):
        states[i] = _damaged_state(rng, states[i])
    models: Any = states[1:]
    if rng.random() < 0.05:
        models = rng.choice((*ODD, [], states[1], models * 30, models[:1]))
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        value = as_python(
            mutated(
                rng,
                {
                    "weights": [0.5, 0.5],
                    "scale": 1.0,
                    "rank": 2,
                    "density": 0.5,
                    "seed": 0,
                    "rules": [["*", "average"]],
                },
            )
        )
        options = {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}
        options = {k: v for k, v in options.items() if k.isidentifier() and k not in ("base", "models", "method")}
    method = rng.choice(METHODS) if rng.random() < 0.95 else rng.choice((*NAMES, *ODD))
    _CASES[folder] = (states[0] if rng.random() < 0.9 else rng.choice((None, *ODD)), models, method, options)


def _read_states(folder: Path) -> None:
    base, models, method, options = _CASES.pop(folder, (tensors(0), [tensors(1), tensors(2)], "tsv", {}))
    merged = epimer.merge_state_dicts(base, models, method, **options)
    given = base if base is not None else models[0]
    names = set(given.keys() if isinstance(given, dict) else given.state_dict())
    assert set(merged) == names, f"the merge holds {sorted(map(str, merged))[:8]}"
    for name, W in merged.items():
        assert not W.is_floating_point() or bool(torch.isfinite(W.double()).all()), f"{name!r} is not finite"
    assert merged.record.tensors.keys() == names


# recipes as mappings


def _damage_mapping(rng: Random, folder: Path) -> None:
    value = mutated(rng, RECIPES[rng.choice(tuple(RECIPES))][-1])
    if rng.random() < 0.3 and isinstance(value, dict) and value:
        value[rng.choice(sorted(map(str, value)))] = rng.choice((*ODD, Path("x"), torch.ones(2), float("nan")))
    _CASES[folder] = as_python(value)


def _read_mapping(folder: Path) -> None:
    recipe = load_recipe(_CASES.pop(folder, RECIPES["plain"][0]))
    assert load_recipe(recipe.to_dict()).to_dict() == recipe.to_dict()
    recipe.to_yaml().encode("utf-8")


# names of files and folders


def _build_names(folder: Path) -> None:
    write_models(folder, "base", "one", "two")


def _damage_names(rng: Random, folder: Path) -> None:
    name = rng.choice(NAMES)
    text = rng.choice(
        (
            name,
            f"{folder}/{name}",
            f"{folder}/one/{name}",
            f"{folder}/base+{name}",
            f"{name}+{folder}/one",
            f"{name}.yaml",
            f"memory://{name}",
            f"{name}.safetensors",
            f"{name}.jsonl",
        )
    )
    _CASES[folder] = (rng.randrange(8), text)


def _read_names(folder: Path) -> None:
    which, text = _CASES.pop(folder, (0, str(folder / "one")))
    if which == 0:
        open_checkpoint(text)
    elif which == 1:
        open_data(text)
    elif which == 2:
        load_recipe(text)
    elif which == 3:
        epimer.Curvature.load(text)
    elif which == 4:
        StoredBasis(Path(text))
    elif which == 5:
        from epimer.report.read import read_records

        read_records([text])
    elif which == 6:
        entry = {"model": str(folder / "one"), "curvature": text}
        epimer.merge(
            {"merge_method": "epimer", "base_model": str(folder / "base"), "models": [entry, entry], "basis": text},
            folder / "out",
            progress=False,
        )
    else:
        before = os.getcwd()
        os.chdir(folder)
        try:
            made = {"merge_method": "linear", "models": [{"model": "one"}, {"model": "two"}]}
            if text.startswith(("/", "~", "memory:", "file:", "http")) and not text.startswith(str(folder)):
                raise EpimerError("left out: it would write outside of the case's folder")
            epimer.merge(made, text, progress=False)
        finally:
            os.chdir(before)


READERS = [
    Reader("state-dicts", lambda folder: None, _damage_states, _read_states, share=6),
    Reader("recipe-mapping", lambda folder: None, _damage_mapping, _read_mapping, share=3),
    Reader("names", _build_names, _damage_names, _read_names, share=3),
]
