"""Quantised checkpoints: codes are never averaged as if they were numbers."""

import json

import pytest
import safetensors.torch
import torch
import yaml

import epimer
from commands import assert_done, assert_refused, run
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.hub import needed
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.errors import CheckpointError

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
    assert "skip" not in ran.err
    assert "copy" not in ran.err
    assert not (tmp_path / "out").exists()


def test_one_packed_model_among_plain_ones_is_refused(tmp_path):
    for name in ("base", "one"):
        save(tmp_path / name, [{WEIGHT: torch.ones(16, 16)}])
    save(tmp_path / "two", [{f"{LAYER}{ending}": W for ending, W in PACKED["GPTQ"][0].items()}])
    assert_refused(run("merge", write_recipe(tmp_path), tmp_path / "out"), "models[1]", "GPTQ")


def test_packed_weights_of_state_dicts_are_refused():
    state = {WEIGHT: integers(16, 16, dtype=torch.int8), f"{LAYER}.SCB": torch.ones(16)}
    with pytest.raises(epimer.CheckpointError, match=r"base is quantised \(bitsandbytes 8 bit\)"):
        epimer.merge_state_dicts(state, [state, state], "average")


def test_packed_weights_can_be_looked_at(tmp_path):
    state = {f"{LAYER}{ending}": W for ending, W in PACKED["AWQ"][0].items()}
    save(tmp_path / "base", [state])
    ran = run("inspect", tmp_path / "base")
    assert ran.code == 0
    assert f"{LAYER}.qweight" in ran.out


# name -> bits per entry, as safetensors' own list of dtypes has them
DTYPES_WITHOUT_TORCH = {"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}


@pytest.mark.parametrize(("dtype", "bits"), DTYPES_WITHOUT_TORCH.items())
def test_dtypes_that_torch_does_not_compute_with_are_listed_and_refused_by_name(tmp_path, dtype, bits):
    size = 3 * 8 * bits // 8
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
        header = json.dumps({"w": {"dtype": dtype, "shape": [3, 8], "data_offsets": [0, size]}}).encode()
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(size)))
    with safetensors.safe_open(file, "pt") as peer:
        assert (peer.get_slice("w").get_dtype(), peer.get_slice("w").get_shape()) == (dtype, [3, 8])
    (tensor,) = json.loads(assert_done(run("inspect", tmp_path / "base", "--json")))["tensors"]
    assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == (dtype, [3, 8], size)
    assert_refused(
        run("merge", write_recipe(tmp_path), tmp_path / "out"), f"is quantised ({dtype} in 'w')", "dequantise"
    )
    with pytest.raises(CheckpointError, match=f"'w' is {dtype}"):
        SafetensorsFile(file).read("w")


@pytest.mark.parametrize("place", ["file", "folder"])
def test_gguf_is_refused_by_name(tmp_path, place):
    for name in ("one", "two"):
        save(tmp_path / name, [{WEIGHT: torch.ones(16, 16)}])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    base = "base/model-Q4_K_M.gguf" if place == "file" else "base"
    ran = run("merge", write_recipe(tmp_path, base_model=base), tmp_path / "out")
    assert_refused(ran, "model-Q4_K_M.gguf is a GGUF file", "gguf_file=")


def test_a_hub_repository_of_gguf_files_is_refused_before_anything_is_fetched():
    with pytest.raises(epimer.CheckpointError, match=r"org/name/b\.Q8_0\.gguf is a GGUF file"):
        needed(["README.md", "config.json", "b.Q8_0.gguf"], "org/name")


# FP8.

SHAPE, BLOCK = (300, 200), (128, 128)
SCALES = {  # how the scales are called, and their shape
    "tensor": ("_scale", ()),
    "tensor of one": ("_scale", (1,)),
    "channel": ("_scale", (300, 1)),
    "flat channel": ("_scale", (300,)),
    "block": ("_scale_inv", (3, 2)),
}
FP8 = {
    "tensor": {"quant_method": "fp8"},
    "tensor of one": None,
    "channel": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    "flat channel": None,
    "block": {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
}


def fp8_state(granularity, seed, dtype=torch.float8_e4m3fn):
    """Return a layer in FP8 with its scales, and its weight in float64, scaled entry by entry."""
    generator = torch.Generator().manual_seed(seed)
    ending, shape = SCALES[granularity]
    codes = (50 * torch.randn(SHAPE, generator=generator)).to(dtype)
    scale = 1e-3 * (0.5 + torch.rand(shape, generator=generator))
    rows = [i // BLOCK[0] if granularity == "block" else i for i in range(SHAPE[0])]
    columns = [j // BLOCK[1] if granularity == "block" else 0 for j in range(SHAPE[1])]
    each = scale.double().expand(300, 1) if scale.numel() == 1 else scale.double().reshape(scale.shape[0], -1)
    dense = codes.double() * each[rows][:, columns]
    state = {
        WEIGHT: codes,
        WEIGHT + ending: scale,
        f"{LAYER}.input_scale": torch.tensor(0.5),
        "model.norm.weight": torch.randn(8, generator=generator).to(torch.bfloat16),
    }
    return state, dense


def merged_state(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
@pytest.mark.parametrize("granularity", SCALES)
def test_fp8_is_dequantised_and_written_as_bfloat16(tmp_path, granularity, dtype):
    dense = []
    config = {"torch_dtype": "bfloat16", "quantization_config": FP8[granularity]}
    for t, name in enumerate(("base", "one", "two")):
        state, W = fp8_state(granularity, t, dtype)
        save(tmp_path / name, [state], config if FP8[granularity] else None)
        dense.append(W)
    ran = run("merge", write_recipe(tmp_path), tmp_path / "out")
    assert ran.code == 0, ran.err
    merged = merged_state(tmp_path / "out")
    assert set(merged) == {WEIGHT, "model.norm.weight"}
    assert merged[WEIGHT].dtype == torch.bfloat16
    mean = (dense[1] + dense[2]) / 2
    assert ((merged[WEIGHT].double() - mean).abs() <= 2**-8 * mean.abs() + 1e-6).all()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["model_type"] == "llama"


def test_scales_in_another_shard_are_found_and_the_recipe_says_the_dtype(tmp_path):
    dense = []
    for t, name in enumerate(("base", "one", "two")):
        state, W = fp8_state("block", t)
        save(
            tmp_path / name,
            [{k: v for k, v in state.items() if "scale" not in k}, {k: v for k, v in state.items() if "scale" in k}],
        )
        dense.append(W)
    ran = run("merge", write_recipe(tmp_path, dtype="float32"), tmp_path / "out")
    assert ran.code == 0, ran.err
    merged = merged_state(tmp_path / "out")
    assert merged[WEIGHT].dtype == torch.float32
    error = (merged[WEIGHT].double() - (dense[1] + dense[2]) / 2).abs()
    assert (error <= 1e-6 * torch.stack(dense).abs().sum(0)).all()


def test_models_in_fp8_and_a_plain_base_fit_together(tmp_path):
    state, dense = fp8_state("channel", 0)
    save(tmp_path / "base", [{WEIGHT: torch.zeros(SHAPE), "model.norm.weight": torch.zeros(8)}])
    for name in ("one", "two"):
        save(tmp_path / name, [state], {"quantization_config": FP8["channel"]})
    assert run("merge", write_recipe(tmp_path), tmp_path / "out").code == 0
    merged = merged_state(tmp_path / "out")
    assert merged[WEIGHT].dtype == torch.float32
    assert torch.allclose(merged[WEIGHT].double(), dense, rtol=1e-6, atol=0)


def test_adapters_change_a_base_in_fp8_by_what_they_add(tmp_path):
    state, dense = fp8_state("block", 0)
    save(tmp_path / "base", [state], {"quantization_config": FP8["block"]})
    total = dense.clone()
    for t, name in enumerate(("one", "two")):
        generator = torch.Generator().manual_seed(t)
        A, B = torch.randn(4, 200, generator=generator), torch.randn(300, 4, generator=generator)
        (tmp_path / name).mkdir()
        factors = {f"base_model.model.{LAYER}.lora_A.weight": A, f"base_model.model.{LAYER}.lora_B.weight": B}
        safetensors.torch.save_file(factors, tmp_path / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        total += 0.5 * 2 * (B.double() @ A.double())
    models = [{"model": "base+one"}, {"model": "base+two"}]
    ran = run("merge", write_recipe(tmp_path, models=models, dtype="float32"), tmp_path / "out")
    assert ran.code == 0, ran.err
    error = (merged_state(tmp_path / "out")[WEIGHT].double() - total).abs()
    assert (error <= 1e-6 * dense.abs() + 1e-5).all()


@pytest.mark.parametrize("granularity", SCALES)
def test_rows_of_fp8_are_those_of_the_whole(tmp_path, granularity):
    state, _ = fp8_state(granularity, 0)
    save(tmp_path / "base", [state])
    model = open_checkpoint(str(tmp_path / "base"))
    whole = model.read(WEIGHT)
    for rows in ((0, 300), (0, 1), (100, 131), (127, 129), (299, 300)):
        assert torch.equal(model.read(WEIGHT, rows), whole[slice(*rows)])


def test_state_dicts_in_fp8_are_dequantised():
    (base, _), (one, first), (two, second) = (fp8_state("channel", t) for t in range(3))
    merged = epimer.merge_state_dicts(base, [one, two], "average")
    assert set(merged) == {WEIGHT, "model.norm.weight"}
    assert torch.allclose(merged[WEIGHT].double(), (first + second) / 2, atol=2**-7 * float(first.abs().max()))
    assert one[WEIGHT].dtype == torch.float8_e4m3fn


def test_scales_tell_models_with_the_same_codes_apart(tmp_path):
    state, _ = fp8_state("tensor", 0)
    save(tmp_path / "one", [state])
    save(tmp_path / "two", [state | {f"{WEIGHT}_scale": torch.tensor(0.1)}])
    one, two = (open_checkpoint(str(tmp_path / name)) for name in ("one", "two"))
    assert one.fingerprint != two.fingerprint


def test_plain_numbers_in_float8_need_no_scale(tmp_path):
    codes = fp8_state("tensor", 0)[0][WEIGHT]
    save(tmp_path / "base", [{WEIGHT: codes}])
    model = open_checkpoint(str(tmp_path / "base"))
    assert torch.equal(model.read(WEIGHT), codes.to(torch.bfloat16))
    assert model.headers[WEIGHT].dtype == torch.bfloat16


def test_fp8_whose_scales_are_missing_or_do_not_fit_is_refused(tmp_path):
    state, _ = fp8_state("block", 0)
    save(tmp_path / "lost", [{WEIGHT: state[WEIGHT]}], {"quantization_config": FP8["block"]})
    save(tmp_path / "misfit", [{WEIGHT: state[WEIGHT], f"{WEIGHT}_scale": torch.ones(7, 2)}])
    save(tmp_path / "shifted", [state | {f"{WEIGHT}_zero_point": torch.ones(1)}])
    with pytest.raises(epimer.CheckpointError, match="without their scales"):
        open_checkpoint(str(tmp_path / "lost"))
    with pytest.raises(epimer.CheckpointError, match=r"has shape \(7, 2\).*\(300, 200\)"):
        open_checkpoint(str(tmp_path / "misfit"))
    save(tmp_path / "exponents", [{WEIGHT: state[WEIGHT], f"{WEIGHT}_scale": integers(3, 2, dtype=torch.uint8)}])
    with pytest.raises(epimer.CheckpointError, match=r"is torch\.uint8, expected scales in floating point"):
        open_checkpoint(str(tmp_path / "exponents"))
    with pytest.raises(epimer.CheckpointError, match="zero points"):
        open_checkpoint(str(tmp_path / "shifted"))


@pytest.mark.parametrize("last", ["scale_weight", "qscale_weight", "scale", "weight_dequant_scale"])
def test_fp8_with_scales_of_another_name_is_no_plain_numbers(tmp_path, last):
    state, _ = fp8_state("tensor", 0)
    scale = WEIGHT.removesuffix("weight") + last
    save(tmp_path / "other", [{WEIGHT: state[WEIGHT], scale: torch.tensor(0.1)}])
    with pytest.raises(epimer.CheckpointError, match=f"in FP8 beside '{scale}'.*rename"):
        open_checkpoint(str(tmp_path / "other"))
