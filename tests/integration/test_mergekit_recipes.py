"""Recipes as people have them, for mergekit: they run unchanged, on stand-ins of the models that they name.

The stand-ins are Llamas with eight layers. A recipe runs where it says so itself; names of models are those of folders.
Every result is a model that transformers loads whole, with the layers that the recipe asks for, and finite.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

WORDS = [f"w{i}" for i in range(38)]
LAYERS = 8
NAMES = ("ancestor", "orca", "platypus", "wizard")

PER_MODEL = """
models:
  - {{model: orca, parameters: {{weight: 0.5, {first}}}}}
  - {{model: platypus, parameters: {{weight: 0.3, {second}}}}}
merge_method: {method}
base_model: ancestor
parameters: {{{others}}}
dtype: bfloat16
"""


def per_model(method: str, first: str = "density: 0.5", second: str = "density: 0.6", others: str = "") -> str:
    return PER_MODEL.format(method=method, first=first, second=second, others=others)


TWO_SLICES = """
slices:
  - sources:
      - {model: orca, layer_range: [0, 4]}
      - {model: platypus, layer_range: [0, 4]}
  - sources:
      - {model: orca, layer_range: [4, 8]}
      - {model: platypus, layer_range: [4, 8]}
"""

RECIPES = {
    # of the kinds of mergekit's own six examples
    "example: linear": """
models:
  - model: orca
    parameters:
      weight: 1.0
  - model: wizard
    parameters:
      weight: 0.3
  - model: platypus
    parameters:
      weight: 0.5
merge_method: linear
dtype: float16
""",
    "example: ties with gradients and filters": """
models:
  - model: orca
    parameters:
      density: [1, 0.7, 0.1] # falls from the first layer to the last
      weight: 1.0
  - model: platypus
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1]
  - model: wizard
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: ancestor
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
    "example: ties of two": """
models:
  - model: orca
    parameters:
      density: 0.5
      weight: 0.5
  - model: platypus
    parameters:
      density: 0.5
      weight: 0.5
merge_method: ties
base_model: ancestor
parameters:
  normalize: false
  int8_mask: true
dtype: float16
""",
    "example: slerp with gradients": """
slices:
  - sources:
      - model: orca
        layer_range: [0, 8]
      - model: platypus
        layer_range: [0, 8]
merge_method: slerp
base_model: orca
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # all others
dtype: float16
""",
    "example: passthrough": """
slices:
  - sources:
    - model: orca
      layer_range: [0, 6]
  - sources:
    - model: platypus
      layer_range: [4, 8]
merge_method: passthrough
dtype: float16
""",
    "example: arcee_fusion": """
models:
  - model: orca
  - model: platypus
merge_method: arcee_fusion
base_model: orca
dtype: bfloat16
""",
    # every method, as its papers and model cards write it
    "slerp, models": """
models: [{model: orca}, {model: platypus}]
merge_method: slerp
base_model: orca
parameters: {t: 0.4}
""",
    "nuslerp": """
models:
  - {model: orca, parameters: {weight: 0.4}}
  - {model: platypus, parameters: {weight: 0.6}}
merge_method: nuslerp
base_model: ancestor
parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}
""",
    "nuslerp without a base": """
models:
  - {model: orca, parameters: {weight: 0.4}}
  - {model: platypus, parameters: {weight: 0.6}}
merge_method: nuslerp
""",
    "multislerp": """
models:
  - {model: orca, parameters: {weight: 0.4}}
  - {model: platypus, parameters: {weight: 0.4}}
  - {model: wizard, parameters: {weight: 0.2}}
merge_method: multislerp
parameters: {normalize_weights: true, eps: 1e-8}
""",
    "karcher": """
models: [{model: orca}, {model: platypus}, {model: wizard}]
merge_method: karcher
parameters: {max_iter: 20, tol: 1e-6}
""",
    "task_arithmetic": per_model("task_arithmetic", "density: 1", "density: 1", "lambda: 0.8").replace(
        ", density: 1", ""
    ),
    "dare_linear": per_model("dare_linear", others="rescale: true, int8_mask: true"),
    "dare_ties": per_model("dare_ties", others="int8_mask: true, normalize: false, lambda: 0.9"),
    "breadcrumbs": per_model("breadcrumbs", "density: 0.9, gamma: 0.01", "density: 0.8, gamma: 0.02"),
    "breadcrumbs_ties": per_model("breadcrumbs_ties", "density: 0.9, gamma: 0.01", "density: 0.8, gamma: 0.02"),
    "della": per_model("della", "density: 0.5, epsilon: 0.1", "density: 0.6, epsilon: 0.15", "lambda: 0.9"),
    "della_linear": per_model("della_linear", "density: 0.5, epsilon: 0.1", "density: 0.6, epsilon: 0.05"),
    "sce": """
models: [{model: orca}, {model: platypus}, {model: wizard}]
merge_method: sce
base_model: ancestor
parameters: {select_topk: 0.5}
dtype: bfloat16
""",
    "ram": """
models: [{model: orca}, {model: platypus}]
merge_method: ram
base_model: ancestor
parameters: {epsilon: 1e-5}
""",
    "ramplus_tl": """
models: [{model: orca}, {model: platypus}]
merge_method: ramplus_tl
base_model: ancestor
parameters: {epsilon: 1e-5, r: 0.1, alpha: 0.2}
""",
    "model_stock": """
models: [{model: orca}, {model: platypus}, {model: wizard}]
merge_method: model_stock
base_model: ancestor
parameters: {filter_wise: false}
dtype: bfloat16
""",
    "nearswap": """
models: [{model: platypus}]
merge_method: nearswap
base_model: orca
parameters: {t: 0.001}
""",
    "passthrough of one model, scaled": """
models:
  - model: orca
    parameters: {scale: [{filter: o_proj, value: 0.9}, {value: 1}]}
merge_method: passthrough
""",
    # the syntax around methods
    "slices of two": TWO_SLICES + "merge_method: slerp\nbase_model: orca\nparameters: {t: [0.2, 0.8]}\n",
    "slices with parameters of their own": """
slices:
  - sources:
      - {model: orca, layer_range: [0, 4], parameters: {weight: 0.7}}
      - {model: platypus, layer_range: [0, 4], parameters: {weight: 0.3}}
  - sources:
      - {model: orca, layer_range: [4, 8], parameters: {weight: 0.2}}
      - {model: platypus, layer_range: [4, 8], parameters: {weight: 0.8}}
merge_method: linear
""",
    "slices of task vectors": TWO_SLICES
    + "merge_method: task_arithmetic\nbase_model: ancestor\nparameters: {weight: 0.5}\n",
    "a stack with repeated layers": """
slices:
  - sources: [{model: orca, layer_range: [0, 4]}]
  - sources: [{model: platypus, layer_range: [2, 6]}]
  - sources: [{model: orca, layer_range: [4, 8]}]
merge_method: passthrough
dtype: bfloat16
""",
    "a stack that quiets copies": """
slices:
  - sources:
      - model: orca
        layer_range: [0, 6]
  - sources:
      - model: orca
        layer_range: [4, 8]
        parameters:
          scale:
            - {filter: o_proj, value: 0.0}
            - {filter: down_proj, value: 0.0}
            - {value: 1.0}
merge_method: passthrough
""",
    "the base listed with parameters": """
models:
  - {model: ancestor, parameters: {weight: 1.0}}
  - {model: orca, parameters: {weight: 0.6, density: 0.5}}
  - {model: platypus, parameters: {weight: 0.4, density: 0.5}}
merge_method: ties
base_model: ancestor
""",
    "the base listed without": """
models:
  - model: ancestor
    # no parameters necessary for base model
  - model: orca
    parameters: {density: 0.53, weight: 0.4}
  - model: platypus
    parameters: {density: 0.53, weight: 0.3}
  - model: wizard
    parameters: {density: 0.53, weight: 0.3}
merge_method: dare_ties
base_model: ancestor
parameters:
  int8_mask: true
dtype: bfloat16
""",
    "weights by filter and gradient": """
models:
  - model: orca
    parameters:
      weight:
        - {filter: q_proj, value: [0.1, 0.9]}
        - {filter: embed_tokens, value: 0.5}
        - {filter: lm_head, value: 1}
        - {value: 0.4}
  - model: platypus
    parameters: {weight: [0, 0.25, 1]}
merge_method: linear
parameters: {normalize: true}
""",
    "tokenizer_source: base": per_model("ties") + "tokenizer_source: base\n",
    "tokenizer_source: union": """
models:
  - {model: chatty, parameters: {weight: 0.5}}
  - {model: orca, parameters: {weight: 0.5}}
merge_method: linear
tokenizer_source: union
""",
    "tokenizer: a source and tokens": """
models:
  - {model: chatty, parameters: {weight: 0.5, density: 0.5}}
  - {model: orca, parameters: {weight: 0.5, density: 0.5}}
merge_method: dare_ties
base_model: ancestor
tokenizer:
  source: union
  tokens:
    <|im_start|>: {source: chatty}
    <|im_end|>: {source: chatty, force: true}
""",
    "chat_template": per_model("dare_linear") + "chat_template: chatml\n",
    "modules": """
modules:
  default:
    slices:
      - sources:
          - {model: orca, layer_range: [0, 8]}
          - {model: platypus, layer_range: [0, 8]}
merge_method: slerp
base_model: orca
parameters: {t: 0.5}
""",
    "out_dtype": per_model("ties").replace("dtype: bfloat16", "dtype: float32\nout_dtype: bfloat16"),
    "a LoRA on its model": """
models:
  - {model: ancestor+lora, parameters: {weight: 1.0}}
  - {model: orca, parameters: {weight: 0.5}}
merge_method: task_arithmetic
base_model: ancestor
""",
    "several documents": """
name: first
models:
  - {model: orca, parameters: {weight: 0.5}}
  - {model: platypus, parameters: {weight: 0.5}}
merge_method: linear
---
models:
  - {model: first, parameters: {weight: 0.5, density: 0.5}}
  - {model: wizard, parameters: {weight: 0.5, density: 0.5}}
merge_method: ties
base_model: ancestor
dtype: bfloat16
""",
    "an empty parameters, a name with spaces": """
name: my merge
models:
  - model: orca
    parameters: {}
  - model: platypus
merge_method: linear
parameters: {weight: 0.5}
""",
}
MORE_LAYERS = {"example: passthrough": 10, "a stack with repeated layers": 12, "a stack that quiets copies": 10}


def tokenizer(folder: Path, *added: str) -> None:
    words = ["<unk>", "</s>", *WORDS]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="</s>")
    whole.add_tokens(list(added), special_tokens=True)
    whole.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    for seed, (name, rows) in enumerate([*((name, 40) for name in NAMES), ("chatty", 42)]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=40, num_hidden_layers=LAYERS, **sizes)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.resize_token_embeddings(rows)
        torch.manual_seed(seed)
        for W in model.parameters():
            W.data += 0.05 * seed * torch.randn(W.shape).to(W)
        model.save_pretrained(folder / name)
        tokenizer(folder / name, *(("<|im_start|>", "<|im_end|>") if name == "chatty" else ()))
    write_adapter(folder / "lora")
    return folder


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]
    shapes = {"lora_A": (2, 16), "lora_B": (16, 2)}
    torch.manual_seed(9)
    tensors = {f"{name}.{side}.weight": 0.1 * torch.randn(shape) for name in names for side, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "ancestor"}))


@pytest.mark.parametrize("name", RECIPES)
def test_it_runs_unchanged(folder, tmp_path, name, monkeypatch):
    recipe = folder / f"{list(RECIPES).index(name)}.yaml"
    recipe.write_text(RECIPES[name])
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    epimer.merge(recipe, out, progress=False)
    tensors = load_file(out / "model.safetensors")
    assert all(torch.isfinite(W).all() for W in tensors.values())
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_hidden_layers == MORE_LAYERS.get(name, LAYERS)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert len(words) <= model.get_input_embeddings().num_embeddings
    ids = torch.tensor([words.encode("w3 w5 w7")])
    assert torch.isfinite(model(input_ids=ids).logits).all()
    ancestor = load_file(folder / "ancestor" / "model.safetensors")
    assert any(not torch.equal(W, tensors[key]) for key, W in ancestor.items() if W.shape == tensors[key].shape)
