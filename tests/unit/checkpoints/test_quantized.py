"""Quantised checkpoints: codes are never averaged as if they were numbers."""

import json

import pytest
import safetensors.torch
import torch
import yaml

import epimer
from commands import assert_refused, run

WEIGHT = "model.layers.0.mlp.up_proj.weight"
LAYER = WEIGHT.removesuffix(".weight")


def integers(*shape, dtype=torch.int32, seed=0):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def save(folder, shards, config=None):
    """Write a model folder of one file, or of several with an index, with a config.json."""
    folder.mkdir()
    files = [f"model-{i + 1}.safetensors" for i in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    for file, state in zip(files, shards, strict=True):
        safetensors.torch.save_file(state, folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, state in zip(files, shards, strict=True) for name in state}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))


def write_recipe(folder, **keys):
    recipe = {"merge_method": "average", "base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | keys))
    return folder / "recipe.yaml"


PACKED = {
    "GPTQ": (
        {".qweight": integers(2, 16), ".qzeros": integers(1, 2), ".scales": torch.ones(1, 16), ".g_idx": integers(16)},
        {"quant_method": "gptq", "bits": 4},
    ),
    "AWQ": (
        {".qweight": integers(16, 2), ".qzeros": integers(1, 2), ".scales": torch.ones(1, 16)},
        {"quant_method": "awq", "bits": 4},
    ),
    "bitsandbytes 4 bit": (
        {
            ".weight": integers(128, 1, dtype=torch.uint8),
            ".weight.absmax": torch.ones(4),
            ".weight.quant_map": torch.linspace(-1, 1, 16),
            ".weight.quant_state.bitsandbytes__nf4": integers(40, dtype=torch.uint8),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bitsandbytes 8 bit": (
        {".weight": integers(16, 16, dtype=torch.int8), ".SCB": torch.ones(16)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "compressed-tensors": (
        {".weight": integers(16, 16, dtype=torch.int8), ".weight_scale": torch.ones(16, 1)},
        {"quant_method": "compressed-tensors"},
    ),
    "MXFP4": (
        {".experts_blocks": integers(2, 4, dtype=torch.uint8), ".experts_scales": integers(2, dtype=torch.uint8)},
        {"quant_method": "mxfp4"},
    ),
}


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_refused_with_the_way_out(tmp_path, kind, with_config):
    tensors, config = PACKED[kind]
    state = {f"{LAYER}{ending}": W for ending, W in tensors.items()}
    for name in ("base", "one", "two"):
        save(tmp_path / name, [state], {"quantization_config": config} if with_config else None)
    ran = run("merge", write_recipe(tmp_path), tmp_path / "out")
    named = kind if with_config else {"AWQ": "GPTQ or AWQ", "compressed-tensors": "integer weights"}.get(kind, kind)
    assert_refused(ran, f"base is quantised ({named})", "dequantize()", "bfloat16")
    assert "skip" not in ran.err and "copy" not in ran.err
    assert not (tmp_path / "out").exists()


def test_one_packed_model_among_plain_ones_is_refused(tmp_path):
    for name in ("base", "one"):
        save(tmp_path / name, [{WEIGHT: torch.ones(16, 16)}])
    save(tmp_path / "two", [{f"{LAYER}{ending}": W for ending, W in PACKED["GPTQ"][0].items()}])
    assert_refused(run("merge", write_recipe(tmp_path), tmp_path / "out"), "models[1]", "GPTQ")


def test_packed_weights_of_state_dicts_are_refused():
    state = {WEIGHT: integers(16, 16, dtype=torch.int8), f"{LAYER}.SCB": torch.ones(16)}
    with pytest.raises(epimer.CheckpointError, match="base is quantised .bitsandbytes 8 bit"):
        epimer.merge_state_dicts(state, [state, state], "average")


def test_packed_weights_can_be_looked_at(tmp_path):
    state = {f"{LAYER}{ending}": W for ending, W in PACKED["AWQ"][0].items()}
    save(tmp_path / "base", [state])
    ran = run("inspect", tmp_path / "base")
    assert ran.code == 0 and f"{LAYER}.qweight" in ran.out


@pytest.mark.parametrize("place", ["file", "folder"])
def test_gguf_is_refused_by_name(tmp_path, place):
    for name in ("one", "two"):
        save(tmp_path / name, [{WEIGHT: torch.ones(16, 16)}])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    base = "base/model-Q4_K_M.gguf" if place == "file" else "base"
    ran = run("merge", write_recipe(tmp_path, base_model=base), tmp_path / "out")
    assert_refused(ran, "model-Q4_K_M.gguf is a GGUF file", "gguf_file=")
