"""A model in FP8 is to epimer what transformers dequantises it to, and its merge is a plain model to transformers."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from commands import run
from epimer.checkpoints import open_checkpoint

transformers = pytest.importorskip("transformers")

BLOCK = 128


def quantise(W):
    """Return a matrix as codes in float8 and one scale per block of 128 x 128."""
    rows, columns = (-(-size // BLOCK) for size in W.shape)
    codes, scales = torch.empty(W.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = W[place].abs().max() / 448
            codes[place] = (W[place] / scales[i, j]).to(codes.dtype)
    return codes, scales


def save(folder, seed):
    """Save a tiny Llama in FP8 as DeepSeek stores such models."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "proj" in name]:
        state[name], state[f"{name}_scale_inv"] = quantise(state[name].float())
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": quantization}))


def test_fp8_is_read_as_transformers_dequantises_it_and_merges_to_a_plain_model(tmp_path):
    dequantise = transformers.FineGrainedFP8Config(dequantize=True)
    states = []
    for seed, name in enumerate(("base", "one", "two")):
        save(tmp_path / name, seed)
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, quantization_config=dequantise)
        states.append(model.state_dict())
        checkpoint = open_checkpoint(str(tmp_path / name))
        assert checkpoint.headers.keys() == states[-1].keys()
        for key, W in states[-1].items():
            assert torch.equal(checkpoint.read(key).to(torch.bfloat16), W), key
    recipe = {"merge_method": "average", "base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run("merge", tmp_path / "recipe.yaml", tmp_path / "out").code == 0
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    for key, W in model.state_dict().items():
        mean = (states[1][key].double() + states[2][key].double()) / 2
        largest = torch.maximum(states[1][key].abs(), states[2][key].abs()).double()  # rounded by transformers
        assert ((W.double() - mean).abs() <= 2**-7 * largest).all(), key
