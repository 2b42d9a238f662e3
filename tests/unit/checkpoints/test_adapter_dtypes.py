"""Adapters whose factors have dtypes of their own: A wider than B, or FP8; merged as the exact product of both."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer

LAYER = "model.layers.0.up"


@pytest.fixture
def models(tmp_path):
    """Return a function that makes a base and two adapters with factors of given dtypes, and returns their recipe."""

    def make(A: torch.dtype, B: torch.dtype, **more) -> dict:
        draw = torch.Generator().manual_seed(0)
        (tmp_path / "base").mkdir()
        save_file({f"{LAYER}.weight": torch.randn(5, 4, generator=draw)}, tmp_path / "base" / "model.safetensors")
        entries = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            factors = {
                f"base_model.model.{LAYER}.lora_A.weight": torch.randn(2, 4, generator=draw).to(A),
                f"base_model.model.{LAYER}.lora_B.weight": torch.randn(5, 2, generator=draw).to(B),
            }
            save_file(factors, tmp_path / name / "adapter_model.safetensors")
            config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
            (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
            entries.append({"model": f"{tmp_path / 'base'}+{tmp_path / name}"})
        return {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base"), "models": entries, **more}

    return make


def change(folder, name) -> torch.Tensor:
    """Return what an adapter adds to the layer, in float64."""
    factors = load_file(folder / name / "adapter_model.safetensors")
    A, B = (factors[f"base_model.model.{LAYER}.lora_{part}.weight"].double() for part in "AB")
    config = json.loads((folder / name / "adapter_config.json").read_text())
    return config["lora_alpha"] / config["r"] * B @ A


WIDE = [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.bfloat16)]
FP8 = [(torch.float8_e4m3fn, torch.float32), (torch.float8_e5m2, torch.bfloat16), (torch.float8_e4m3fn,) * 2]


@pytest.mark.parametrize(("A", "B"), [*WIDE, *FP8])
def test_a_merge_of_factors_of_two_dtypes_is_that_of_their_products(models, tmp_path, A, B):
    epimer.merge(models(A, B), tmp_path / "out", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.weight"].double()
    base = load_file(tmp_path / "base" / "model.safetensors")[f"{LAYER}.weight"].double()
    assert torch.allclose(found, base + (change(tmp_path, "one") + change(tmp_path, "two")) / 2, atol=1e-5)


@pytest.mark.parametrize(("A", "B"), FP8)
def test_factors_in_fp8_become_an_adapter_of_the_next_wider_dtype(models, tmp_path, A, B):
    epimer.merge(models(A, B, output="lora"), tmp_path / "out", progress=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {W.dtype for W in found.values()} == {torch.float32 if torch.float32 == B else torch.bfloat16}
    mean = (change(tmp_path, "one") + change(tmp_path, "two")) / 2
    assert torch.allclose(change(tmp_path, "out"), mean, atol=0.1, rtol=0.02)
