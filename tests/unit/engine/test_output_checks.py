"""No output holds what its dtype cannot: every way to make a tensor refuses it by name; what is lost in one is told."""

import json
import warnings

import pytest
import safetensors.torch
import torch

import epimer
from epimer.errors import EpimerWarning
from epimer.methods.registry import describe_method, list_methods
from epimer.testing import usual_count
from models import make_base, make_models, needs

NARROW = {torch.float16: 65504.0, torch.bfloat16: 3.3895313892515355e38}


def beyond(dtype: torch.dtype, shape=(24, 20)) -> torch.Tensor:
    """Return a finite float32 tensor whose last entry alone rounds to Inf in `dtype`."""
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    W[(-1,) * len(shape)] = 1.003 * NARROW[dtype]
    assert bool(W.isfinite().all())
    assert int(W.to(dtype).isinf().sum()) == 1
    return W


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rule", ["matrix", "average", "statistic", "copy"])
def test_a_tensor_that_leaves_its_dtype_is_refused(tmp_path, rule, dtype):
    """The output's dtype is narrower than the models': every rule finds the one entry that does not fit."""
    name = {"statistic": "norm.running_mean"}.get(rule, "a.weight")
    wide = beyond(dtype, (40,) if rule == "statistic" else (24, 20))
    for folder in ("base", "one", "two"):
        (tmp_path / folder).mkdir()
        safetensors.torch.save_file({name: wide, "b.bias": torch.ones(3)}, tmp_path / folder / "model.safetensors")
    models = [{"model": str(tmp_path / folder)} for folder in ("one", "two")]
    recipe = {"merge_method": "tsv", "base_model": str(tmp_path / "base"), "models": models}
    recipe |= {"out_dtype": str(dtype).removeprefix("torch.")}
    recipe |= {"rules": {"a.weight": rule}} if rule != "statistic" else {}
    with pytest.raises(epimer.TensorError, match=rf"'{name}' does not fit in {dtype}"):
        epimer.merge(recipe, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", [m for m in list_methods() if describe_method(m).models[1] != 1])
def test_every_method_keeps_its_output_in_range(method):
    """Models in float32 twice as large as float16 goes, onto a base in float16: no method writes Inf."""
    base = make_base(torch.float16)
    widened = {name: W.float() if W.is_floating_point() else W for name, W in base.items()}
    count = usual_count(describe_method(method))
    models = make_models(widened, count)
    for model in models:
        model["block.0.weight"] = 1.3e5 * torch.sign(model["block.0.weight"]) * (1 + model["block.0.weight"].abs() / 10)
    merged = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        try:
            merged = epimer.merge_state_dicts(base, models, method, **needs(method, base, count))
        except epimer.TensorError as error:
            text = str(error)
            assert text.startswith("the merged 'block.0.weight' does not fit in torch.float16; lower scale")
    if merged is not None:  # a method may have shrunk or pruned it
        assert all(bool(W.isfinite().all()) for W in merged.values() if W.is_floating_point())
        assert merged["block.0.weight"].dtype == torch.float16
        assert not torch.equal(merged["block.0.weight"], base["block.0.weight"])


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv"])
def test_factors_of_an_adapter_that_leave_their_dtype_are_refused(tmp_path, method):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["layer"], "bias": "none"}
    (tmp_path / "base").mkdir()
    safetensors.torch.save_file({"layer.weight": torch.zeros(24, 16)}, tmp_path / "base" / "model.safetensors")
    for t in range(2):
        generator, folder = torch.Generator().manual_seed(t), tmp_path / f"lora{t}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config))
        factors = {"A": torch.randn(2, 16, generator=generator), "B": torch.randn(24, 2, generator=generator)}
        named = {f"base_model.model.layer.lora_{side}.weight": W for side, W in factors.items()}
        safetensors.torch.save_file(named, folder / "adapter_model.safetensors")
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / f'lora{t}'}"} for t in range(2)]
    recipe = {"merge_method": method, "base_model": str(tmp_path / "base"), "models": models, "output": "lora"}
    recipe |= {"out_dtype": "float16", "parameters": {"scale": 1e10}}
    with pytest.raises(epimer.TensorError, match=r"'layer\.weight' does not fit in torch\.float16; lower scale"):
        epimer.merge(recipe, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_change_that_is_lost_in_the_outputs_dtype_is_told_by_tensor(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = {name: 1 + torch.rand(30, 20, generator=generator).bfloat16() for name in ("a.weight", "b.weight")}
    tuned = {"a.weight": base["a.weight"].float() + 1e-6, "b.weight": base["b.weight"].float() + 0.1}
    with pytest.warns(EpimerWarning, match="what models changed in 'a.weight' is lost in the merge") as caught:
        merged = epimer.merge_state_dicts(base, [tuned, tuned], "task_arithmetic")
    assert len(caught) == 1
    assert merged.record.lost == ("a.weight",)
    assert merged.record.untouched == 0.5
    assert torch.equal(merged["a.weight"], base["a.weight"])
    assert [one.unchanged for one in merged.record.tensors.values()] == [True, False]
    assert epimer.MergeRecord.from_dict(merged.record.to_dict()) == merged.record
    frozen = {**tuned, "a.weight": base["a.weight"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epimer.merge_state_dicts(base, [frozen, frozen], "task_arithmetic").record.lost is None
        assert "lost" not in epimer.merge_state_dicts(base, [frozen, frozen], "task_arithmetic").record.to_dict()


def test_what_ties_trims_is_meant_to_be_the_bases(tmp_path):
    base = {"a.weight": torch.ones(20, 20), "b.weight": torch.ones(20, 20)}
    tuned = {"a.weight": base["a.weight"] + 1e-4, "b.weight": base["b.weight"] + 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = epimer.merge_state_dicts(base, [tuned, tuned], "ties", density=0.4)
    assert merged.record.tensors["a.weight"].unchanged
    assert merged.record.lost is None
