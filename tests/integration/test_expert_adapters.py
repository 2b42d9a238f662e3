"""Adapters of stacked experts (`target_parameters`) are read as PEFT merges them, and refused where that is unclear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import epimer
from epimer.checkpoints import open_checkpoint

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 12, "vocab_size": 15, "max_position_embeddings": 16, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 3}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixtral():
    """Experts that its file stores apart: w1, w3 and w2."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS))


def gpt_oss():
    """Experts that its file stores as (E, in, out)."""
    layers = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **EXPERTS, **layers))


def qwen():
    """Experts that its file stores apart: gate_proj, up_proj and down_proj."""
    sizes = {"moe_intermediate_size": 10, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **sizes))


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.usefixtures("no_progress_bars"),
]


def save(folder: Path, build, seed: int = 1, **config) -> Path:
    """Save a base, an adapter of random numbers on it, and what PEFT merges of them."""
    torch.manual_seed(0)
    model = build()
    model.save_pretrained(folder / "base")
    torch.manual_seed(seed)
    given = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": BOTH, **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**given, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder


def compared(folder: Path) -> int:
    """Compare base+adapter with what PEFT merged, by whole tensors, rows and factors; return how many it changes."""
    base, merged = (open_checkpoint(str(folder / name)) for name in ("base", "merged"))
    read = open_checkpoint(f"{folder / 'base'}+{folder / 'adapter'}")
    changed = 0
    assert read.headers.keys() == merged.headers.keys()
    for name in merged.headers:
        expected, before = merged.read(name), base.read(name)
        assert torch.allclose(read.read(name), expected, rtol=1e-6, atol=1e-7), name
        assert torch.allclose(read.read(name, (1, 3)), expected[1:3], rtol=1e-6, atol=1e-7), name
        delta = read.delta(name, base)
        if delta is not None:
            dense = before + delta.dense().reshape(before.shape)
            assert torch.allclose(dense, expected, rtol=1e-6, atol=1e-7), name
            assert read.delta_rank(name, base) == delta.B.shape[1]
        changed += not torch.equal(expected, before)
    return changed


@pytest.mark.parametrize(
    ("build", "config", "changed"),
    [
        (mixtral, {}, 2 * (1 + 9)),
        (mixtral, {"target_parameters": ["mlp.experts.down_proj"], "use_rslora": True}, 2 * (1 + 3)),
        (mixtral, {"rank_pattern": {"gate_up_proj": 4}, "alpha_pattern": {"gate_up_proj": 16}}, 2 * (1 + 9)),
        (qwen, {}, 2 * (1 + 9)),
        (gpt_oss, {}, 2 * (1 + 2)),
        (gpt_oss, {"target_parameters": ["experts.gate_up_proj"], "target_modules": ["o_proj"]}, 2 * (1 + 1)),
    ],
)
def test_base_and_adapter_are_what_peft_merges(build, config, changed, tmp_path):
    assert compared(save(tmp_path, build, **config)) == changed


def test_they_merge_into_a_model_and_not_into_an_adapter(tmp_path):
    """Half of the difference of one adapter, with the experts stored as they were; as an adapter it is refused."""
    save(tmp_path, mixtral)
    base = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")}
    model = {"model": f"{tmp_path / 'base'}+{tmp_path / 'adapter'}", "parameters": {"weight": 0.5}}
    epimer.merge({**base, "models": [model]}, tmp_path / "out", progress=False)
    before, after, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged", "out"))
    for name, W in merged.items():
        assert torch.allclose(W, (before[name] + after[name]) / 2, rtol=1e-5, atol=1e-6), name
    with pytest.raises(epimer.EpimerError, match=r"change stacked experts \(.*w1.weight.*remove 'output'"):
        epimer.merge({**base, "models": [model], "output": "lora"}, tmp_path / "lora", progress=False)


def test_an_extracted_adapter_of_a_mixture_is_read_back(tmp_path):
    """What an adapter of it can hold (attention, router) is the tuned model's; experts are named as left out."""
    save(tmp_path, mixtral)
    with pytest.warns(epimer.EpimerWarning, match="not in the adapter: .*experts"):
        epimer.extract_lora(str(tmp_path / "merged"), str(tmp_path / "base"), tmp_path / "out", 16, progress=False)
    tuned, base = (open_checkpoint(str(tmp_path / name)) for name in ("merged", "base"))
    read = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    for name in tuned.headers:
        expected = base.read(name) if ".experts." in name else tuned.read(name)
        assert torch.allclose(read.read(name), expected, rtol=1e-4, atol=1e-5), name


def test_what_cannot_be_told_is_refused(tmp_path):
    """Factors that fit no expert, and experts that are as wide as high, whose sides the file does not tell apart."""
    save(tmp_path, gpt_oss)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(file)
    where = f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"
    key = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    save_file({**factors, key: factors[key][:, :-1].clone()}, file)
    with pytest.raises(epimer.CheckpointError, match=r"target_parameters\), which fit none.*merge_and_unload"):
        open_checkpoint(where)
    save_file({**factors, key: factors[key][:-1].clone()}, file)
    with pytest.raises(epimer.CheckpointError, match=r"target_parameters\).*merge_and_unload"):
        open_checkpoint(where)
    save_file({**factors, key: torch.tensor(1.0)}, file)
    with pytest.raises(epimer.CheckpointError, match=r"target_parameters\), which fit none"):
        open_checkpoint(where)
    config = tmp_path / "adapter" / "adapter_config.json"
    save_file(factors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_parameters": None}))
    with pytest.raises(epimer.CheckpointError, match="belongs to no tensor"):
        open_checkpoint(where)


def test_square_experts_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "intermediate_size", 16)  # down_proj is 16 x 16
    save(tmp_path, gpt_oss)
    with pytest.raises(epimer.CheckpointError, match="fit none of the base's tensors"):
        open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}")
