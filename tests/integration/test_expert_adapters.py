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


def test_they_merge_into_a_model(tmp_path):
    """Half of the difference of one adapter, with the experts stored as they were."""
    save(tmp_path, mixtral)
    base = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")}
    model = {"model": f"{tmp_path / 'base'}+{tmp_path / 'adapter'}", "parameters": {"weight": 0.5}}
    epimer.merge({**base, "models": [model]}, tmp_path / "out", progress=False)
    before, after, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged", "out"))
    for name, W in merged.items():
        assert torch.allclose(W, (before[name] + after[name]) / 2, rtol=1e-5, atol=1e-6), name


def load(folder: Path | str) -> torch.nn.Module:
    how = {"dtype": torch.float64, "experts_implementation": "eager"}  # the only one in float64
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how)


def recipe_of(tmp_path: Path, build, method: str, configs: list[dict], **more) -> dict:
    """Save one adapter per config, in float64, and return the recipe that merges them."""
    models = []
    for seed, config in enumerate(configs):
        folder = save(tmp_path / str(seed), build, seed, **config)
        for path in (folder / "base", folder / "adapter"):
            file = next(path.glob("*.safetensors"))
            save_file({name: W.double() for name, W in load_file(file).items()}, file, {"format": "pt"})
        models.append({"model": f"{tmp_path / '0' / 'base'}+{folder / 'adapter'}", "parameters": {"weight": 0.7}})
    return {"merge_method": method, "base_model": str(tmp_path / "0" / "base"), "models": models, **more}


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12) % 15).logits


def same_as_the_model(recipe: dict, tmp_path: Path) -> dict[str, epimer.TensorRecord]:
    """Merge into a model and into an adapter; compare tensors, and what PEFT and transformers compute of them."""
    epimer.merge(recipe, tmp_path / "whole", progress=False)
    record = epimer.merge({**recipe, "output": "lora"}, tmp_path / "lora", progress=False)
    base = recipe["base_model"]
    whole, read = open_checkpoint(str(tmp_path / "whole")), open_checkpoint(f"{base}+{tmp_path / 'lora'}")
    dense = [
        {n: one.read(n) for n in one.headers} for one in map(open_checkpoint, (m["model"] for m in recipe["models"]))
    ]
    start, weights = open_checkpoint(base), [model["parameters"]["weight"] for model in recipe["models"]]
    before = {name: start.read(name) for name in start.headers}
    expected = epimer.merge_state_dicts(before, dense, recipe["merge_method"], weights=weights)
    for name in whole.headers:
        assert torch.allclose(whole.read(name), expected[name], rtol=1e-9, atol=1e-9), name
        assert torch.allclose(read.read(name), whole.read(name), rtol=1e-9, atol=1e-9), name
    network = load(base)
    before = logits_of(network)
    adapted = peft.PeftModel.from_pretrained(network, tmp_path / "lora")
    expected = logits_of(load(tmp_path / "whole"))
    assert torch.allclose(logits_of(adapted), expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(before, expected, atol=1e-3)
    return record.tensors


DOWN, UP = ["mlp.experts.down_proj"], ["mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("build", "method"),
    [(mixtral, "task_arithmetic"), (mixtral, "tsv"), (mixtral, "epimer_free"), (qwen, "iso_c"), (gpt_oss, "tsv")],
)
def test_an_adapter_of_several_is_their_merge(build, method, tmp_path):
    """Of other ranks and scalings, in float64: the merge of the same recipe into a model, and PEFT's forward pass."""
    configs = [{}, {"r": 3, "use_rslora": True}, {"rank_pattern": {"down_proj": 1}, "alpha_pattern": {"down_proj": 5}}]
    recipe = recipe_of(tmp_path, build, method, configs)
    records = same_as_the_model(recipe, tmp_path)
    again = epimer.verify(tmp_path / "lora", recipe={**recipe, "output": "lora"}, sample=None, progress=False)
    assert again.verified, again
    assert sum("experts" in name for name in records) == (4 if build is gpt_oss else 2 * 9)
    assert max(record.error or 0 for record in records.values()) < 1e-9


@pytest.mark.parametrize(
    ("build", "targets"), [(mixtral, (DOWN, BOTH)), (mixtral, (UP, DOWN)), (gpt_oss, (UP, DOWN)), (gpt_oss, (UP, UP))]
)
def test_adapters_of_different_stacks(build, targets, tmp_path):
    """PEFT calls the factors of a stack otherwise when the module's other stack has some too."""
    configs = [{"target_parameters": list(one)} for one in targets]
    same_as_the_model(recipe_of(tmp_path, build, "tsv", configs), tmp_path)


def test_square_experts(tmp_path, monkeypatch):
    """gpt-oss has such; the sides of its other stack tell those of this one."""
    monkeypatch.setitem(SIZES, "intermediate_size", 16)  # down_proj is 16 x 16
    same_as_the_model(recipe_of(tmp_path, gpt_oss, "tsv", [{}, {}]), tmp_path)
    save(tmp_path / "one", gpt_oss, target_parameters=DOWN)
    with pytest.raises(epimer.CheckpointError, match="fit none of the base's tensors"):
        open_checkpoint(f"{tmp_path / 'one' / 'base'}+{tmp_path / 'one' / 'adapter'}")


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
@pytest.mark.parametrize("method", ["tsv", "ties"])
def test_at_a_rank_it_is_the_nearest_to_the_merge(build, method, tmp_path):
    """Of every expert's matrix in the network, with what the file stores apart joined, by its singular values."""
    recipe = recipe_of(tmp_path, build, method, [{}, {}])
    epimer.merge(recipe, tmp_path / "whole", progress=False)
    record = epimer.merge({**recipe, "output": "lora", "lora_rank": 2}, tmp_path / "lora", progress=False)
    base = load(recipe["base_model"])
    whole = load(tmp_path / "whole")
    before = {name: W.detach().clone() for name, W in base.named_parameters()}
    adapted = dict(peft.PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload().named_parameters())
    worst = 0.0
    for name, W in whole.named_parameters():
        if ".experts." in name and W.dim() == 3:
            for D, found in zip(W.detach() - before[name], adapted[name].detach() - before[name], strict=True):
                U, sigma, V = torch.linalg.svd(D)
                nearest = (U[:, :2] * sigma[:2]) @ V[:2]
                assert (found - nearest).norm() < 1e-5 * D.norm(), name
                worst = max(worst, float(sigma[2:].norm() / sigma.norm()))
    errors = [one.error for name, one in record.tensors.items() if ".experts." in name]
    assert max(errors) == pytest.approx(worst, rel=1e-3)
    assert worst > 0.1


def test_methods_without_bounded_rank_are_refused_without_a_rank(tmp_path):
    recipe = recipe_of(tmp_path, gpt_oss, "ties", [{}, {}], output="lora")
    with pytest.raises(epimer.EpimerError, match=r"ties does not keep the rank of adapters.*give lora_rank"):
        epimer.merge(recipe, tmp_path / "out", progress=False)


@pytest.mark.parametrize("build", [mixtral, qwen, gpt_oss])
def test_an_extracted_adapter_of_a_mixture_is_the_tuned_model(build, tmp_path):
    """At full rank all of it: attention, experts and the router; PEFT's forward pass is the tuned model's."""
    save(tmp_path, build)
    tuned = load(tmp_path / "merged")
    with torch.no_grad():
        for name, W in tuned.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                W += 0.1
    tuned.float().save_pretrained(tmp_path / "merged")
    epimer.extract_lora(str(tmp_path / "merged"), str(tmp_path / "base"), tmp_path / "out", 16, progress=False)
    whole = open_checkpoint(str(tmp_path / "merged"))
    read = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    for name in whole.headers:
        assert torch.allclose(read.read(name), whole.read(name), rtol=1e-4, atol=1e-5), name
    network = load(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(network, tmp_path / "out")
    assert torch.allclose(logits_of(adapted), logits_of(tuned.double()), rtol=1e-3, atol=1e-4)


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
