"""Bases and adapters made by PEFT, on disk, and what PEFT makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epimer

PEFT_REMARKS = [
    # Remarks of PEFT on settings that are meant here; all are about what PEFT itself does with them.
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but the target module is `torch:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True` and the tied_target:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging:UserWarning"),
]

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TOKENS = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2, **TOKENS}
RANK = 4


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS))


def gpt2(**more) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **more))


def gpt2_classifier() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(num_labels=3, **GPT2))


def bert() -> nn.Module:
    config = transformers.BertConfig(max_position_embeddings=24, num_labels=3, vocab_size=60, **SIZES)
    return transformers.BertForSequenceClassification(config)


class Convolutions(nn.Module):
    """What is no transformer: convolutions of one and two dimensions, a table, a map."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(6, 10, 3)
        self.two = nn.Conv2d(5, 8, (3, 2))
        self.point = nn.Conv2d(8, 7, 1)
        self.table = nn.Embedding(12, 9)
        self.map = nn.Linear(9, 4)


def save_base(folder: Path, build, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = build().to(dtype)
    if isinstance(model, transformers.PreTrainedModel):
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")
    return model


def save_adapter(base: nn.Module, folder: Path, seed: int = 1, size: float = 0.1, **config) -> None:
    """Save an adapter in which nothing is zero: whatever PEFT would train is moved, B with it."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
        adapted = peft.get_peft_model(copied(base), peft.LoraConfig(**{"r": RANK, "lora_alpha": 6, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for W in adapted.parameters():
            if W.requires_grad:
                W += size * torch.randn(W.shape, generator=generator).to(W)
    adapted.save_pretrained(folder)


def copied(model: nn.Module) -> nn.Module:
    """Return a model of its own with the same weights."""
    other = type(model)(model.config) if isinstance(model, transformers.PreTrainedModel) else type(model)()
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).dtype)


def unloaded(base: nn.Module, adapter: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return what PEFT makes of base and adapter, read back from disk."""
    model = copied(base)
    model = model if dtype is None else model.to(dtype)
    merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return {name: W.detach().clone() for name, W in merged.state_dict().items()}


ADAPTERS = {
    "llama": (
        llama,
        [
            {"target_modules": ["q_proj", "down_proj"]},
            {"target_modules": ["q_proj", "up_proj", "down_proj"], "use_rslora": True},
            {"target_modules": ["v_proj", "q_proj"], "modules_to_save": ["norm"]},
        ],
    ),
    "gpt2": (
        gpt2,
        [
            {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
            {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "all"},
            {"target_modules": ["c_proj", "wte"], "fan_in_fan_out": True, "r": 6},
        ],
    ),
}


class Adapters:
    """A base, adapters of it on disk, and what each makes of the base in float64, by PEFT."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
        build, configs = ADAPTERS[family]
        self.folder, self.path = folder, folder / "base"
        self.model = save_base(self.path, build, dtype)
        self.base = {name: W.double() for name, W in load_file(self.path / "model.safetensors").items()}
        self.texts, self.dense = [], []
        for t, config in enumerate(configs):
            save_adapter(self.model, folder / f"adapter{t}", seed=t + 1, **config)
            self.texts.append(f"{self.path}+{folder / f'adapter{t}'}")
            exact = unloaded(self.model, folder / f"adapter{t}", torch.float64)
            self.dense.append({name: exact[name] for name in self.base})

    def merged(self, method: str, models: list[str] | None = None, **parameters) -> dict[str, Tensor]:
        """Return what `epimer.merge` makes of the adapters, or of other models."""
        given = {
            "merge_method": method,
            "base_model": str(self.path),
            "models": [{"model": text} for text in models or self.texts],
            "parameters": parameters,
        }
        epimer.merge(given, self.folder / "out", progress=False)
        return load_file(self.folder / "out" / "model.safetensors")

    def close(self, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
        """Assert that a merge moved every tensor as expected, up to a share of the way it moved."""
        assert found.keys() == expected.keys()
        for name, W in expected.items():
            moved = torch.linalg.vector_norm(W - self.base[name])
            error = torch.linalg.vector_norm(found[name].double() - W)
            assert error <= tolerance * moved, f"{name}: {error / moved:.1e}"


def llava() -> nn.Module:
    text = transformers.LlamaConfig(**SIZES, **TOKENS)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision))


def qwen_vl() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {**SIZES, **TOKENS, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS)
    )
