"""One recipe file through mergekit's command line and through epimer: the same tensors.

mergekit runs in a process of its own and only its output is looked at. Runs in an environment of its own:
`make conformance`.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import epimer
from peer_mergekit import run_mergekit

if importlib.util.find_spec("mergekit") is None:
    pytest.skip("mergekit is installed by `make conformance`", allow_module_level=True)

LINEAR = """
merge_method: linear
models:
  - {model: base, parameters: {weight: 0.7}}
  - {model: a, parameters: {weight: 0.3}}
  - {model: b, parameters: {weight: 0.5}}
"""
ARITHMETIC = """
merge_method: task_arithmetic
base_model: base
models:
  - {model: a, parameters: {weight: 0.3}}
  - {model: b, parameters: {weight: 0.5}}
  - {model: c, parameters: {weight: 0.9}}
"""
RECIPES = {
    "linear": LINEAR,
    "linear, normalised": LINEAR + "parameters: {normalize: true}",
    "linear, not normalised": LINEAR + "parameters: {normalize: 0.0}",
    "linear, the base listed": LINEAR + "base_model: base",
    "linear, the base listed, not normalised": LINEAR + "base_model: base\nparameters: {normalize: false}",
    "linear, gradients": """
merge_method: linear
models:
  - {model: a, parameters: {weight: [0, 0.5, 1]}}
  - {model: b, parameters: {weight: [1, 0.25]}}
  - {model: c, parameters: {weight: [0.1, 0.9, 0.3, 0.4, 0.2, 0.7]}}
""",
    "linear, gradients, not normalised": """
merge_method: linear
models:
  - {model: a, parameters: {weight: [1, 0.5, 0.125]}}
  - {model: b, parameters: {weight: [0.2, 1]}}
parameters: {normalize: false}
""",
    "linear, gradients over one layer": """
merge_method: linear
models:
  - {model: single/base, parameters: {weight: [0.2, 0.5, 1]}}
  - {model: single/a, parameters: {weight: [0.9, 0.1]}}
""",
    "linear, filters": """
merge_method: linear
models:
  - model: a
    parameters:
      weight:
        - {filter: up_proj, value: 0.1}
        - {filter: mlp, value: [0.2, 0.6]}
        - {filter: lm_head, value: 0.8}
        - {filter: layers.1, value: 0.4}
        - {filter: "*", value: [0.1, 0.9, 0.3]}
  - model: b
    parameters: {weight: [{filter: self_attn, value: 0.7}]}
parameters: {weight: [{filter: norm, value: 0.15}, {value: [0.35, 0.45]}]}
""",
    "linear, tied": """
merge_method: linear
models:
  - {model: tied/a, parameters: {weight: 0.3}}
  - {model: tied/b, parameters: {weight: [{filter: embed, value: 0.2}, {filter: lm_head, value: 5}, {value: 0.9}]}}
""",
    "linear, in double precision": LINEAR + "dtype: float64",
    "linear, halves into singles": LINEAR.replace("model: ", "model: half/") + "dtype: float32",
    "task_arithmetic": ARITHMETIC,
    "task_arithmetic, not normalised": ARITHMETIC + "parameters: {normalize: false}",
    "task_arithmetic, normalised": ARITHMETIC + "parameters: {normalize: true}",
    "task_arithmetic, lambda": ARITHMETIC + "parameters: {lambda: 0.7}",
    "task_arithmetic, lambda, normalised": ARITHMETIC + "parameters: {lambda: 0.7, normalize: true}",
    "task_arithmetic, the base listed": """
merge_method: task_arithmetic
base_model: base
models: [{model: base}, {model: a, parameters: {weight: 0.3}}, {model: b}]
parameters: {weight: 0.5, normalize: true}
""",
    "task_arithmetic, a negative weight": ARITHMETIC.replace("0.3", "-0.3"),
    "task_arithmetic, a negative weight, normalised": ARITHMETIC.replace("0.3", "-0.3")
    + "parameters: {normalize: true}",
    "task_arithmetic, gradients": """
merge_method: task_arithmetic
base_model: base
models:
  - {model: a, parameters: {weight: [0, 0.5, 1]}}
  - {model: b, parameters: {weight: [1, -0.5]}}
parameters: {lambda: [0.2, 0.9, 0.4, 0.6, 0.8]}
""",
    "task_arithmetic, gradients, normalised": """
merge_method: task_arithmetic
base_model: base
models:
  - {model: a, parameters: {weight: [0, 0.5, 1]}}
  - {model: b, parameters: {weight: [1, 0.5]}}
parameters: {normalize: true, lambda: [{filter: mlp, value: [0.5, 1]}, {filter: norm, value: 0}, {value: [1, 0.5]}]}
""",
    "task_arithmetic, tied": """
merge_method: task_arithmetic
base_model: tied/base
models:
  - {model: tied/a, parameters: {weight: 0.3}}
  - {model: tied/b, parameters: {weight: [{filter: embed, value: 0.2}, {filter: lm_head, value: 5}, {value: 0.9}]}}
""",
    "task_arithmetic, in double precision": ARITHMETIC + "dtype: float64\nout_dtype: float32",
    "slices, stacked": """
merge_method: linear
parameters: {weight: 1}
slices:
  - sources: [{model: a, layer_range: [0, 3]}]
  - sources: [{model: b, layer_range: [1, 4]}]
  - sources: [{model: a, layer_range: [2, 4]}]
""",
    "slices, merged with gradients": """
merge_method: linear
parameters: {weight: [0.5, 1]}
slices:
  - sources:
      - {model: a, layer_range: [0, 3], parameters: {weight: [0, 0.3, 1]}}
      - {model: b, layer_range: [1, 4], parameters: {weight: [{filter: mlp, value: [1, 0.25]}, {value: 0.2}]}}
  - sources: [{model: c, layer_range: [3, 4]}, {model: a, layer_range: [0, 1]}]
""",
    "slices, numbers of sources differ": """
merge_method: linear
slices:
  - sources: [{model: a, layer_range: [0, 1], parameters: {weight: 0.4}}, {model: c, layer_range: [1, 2]}]
  - sources:
      - {model: b, layer_range: [1, 3], parameters: {weight: 0.2}}
      - {model: c, layer_range: [1, 3]}
      - {model: a, layer_range: [0, 2]}
    parameters: {weight: 0.7}
  - sources: [{model: c, layer_range: [3, 4]}, {model: b, layer_range: [3, 4]}]
parameters: {weight: 1}
""",
    "slices, task_arithmetic": """
merge_method: task_arithmetic
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [0, 2]}
      - {model: a, layer_range: [0, 2], parameters: {weight: 0.3}}
      - {model: b, layer_range: [1, 3], parameters: {weight: [0.1, 0.6]}}
    parameters: {lambda: 0.5}
  - sources:
      - {model: c, layer_range: [0, 4], parameters: {weight: [1, 0.5, 0]}}
      - {model: base, layer_range: [0, 4]}
""",
    "slices, tied": """
merge_method: linear
parameters: {weight: 1}
slices:
  - sources: [{model: tied/a, layer_range: [0, 2]}]
  - sources: [{model: tied/b, layer_range: [1, 3]}]
""",
    "modules": """
merge_method: linear
modules:
  default:
    slices:
      - sources: [{model: a, layer_range: [0, 2], parameters: {weight: 1}}]
      - sources: [{model: b, layer_range: [2, 4], parameters: {weight: 1}}]
""",
    "modules of whole models": """
merge_method: linear
modules:
  default:
    models: [{model: a, parameters: {weight: [0, 1]}}, {model: b, parameters: {weight: 0.5}}]
""",
}
# The same merges with results in bfloat16: where the models lie, and the precision that mergekit brings them to.
WEIGHTS, SCALE = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64), 0.7
IN_HALVES = {
    "linear": ARITHMETIC.replace("task_arithmetic\nbase_model: base", "linear"),
    "task_arithmetic": ARITHMETIC + f"parameters: {{normalize: true, lambda: {SCALE}}}\n",
}
HALVES = {
    "stored": ("half/", "", torch.bfloat16),
    "stored and out_dtype": ("half/", "out_dtype: bfloat16", torch.bfloat16),
    "dtype": ("", "dtype: bfloat16", torch.bfloat16),
    "dtype and out_dtype": ("", "dtype: float32\nout_dtype: bfloat16", torch.float32),
}


def make_models(folder: Path) -> None:
    """Save Llama-shaped models: an ancestor and three others, each as they are, halved, tied and with one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for kind, layers, tied, dtype in (
        ("", 4, False, torch.float32),
        ("half", 4, False, torch.bfloat16),
        ("tied", 3, True, torch.float32),
        ("single", 1, False, torch.float32),
    ):
        config = LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype)
        start = {name: torch.randn(W.shape) for name, W in model.named_parameters()}
        for name in ("base", "a", "b", "c"):
            for key, W in model.named_parameters():
                W.data = (start[key] + (0 if name == "base" else 0.3) * torch.randn(W.shape)).to(dtype)
            model.save_pretrained(folder / kind / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mergekit")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def merged(folder):
    """Merge every recipe with mergekit; return what a recipe's name gives here and there."""
    recipes = RECIPES | {
        f"{method} {how}": recipe.replace("model: ", f"model: {where}") + dtypes
        for method, recipe in IN_HALVES.items()
        for how, (where, dtypes, _) in HALVES.items()
    }
    files = {name: folder / f"{i}.yaml" for i, name in enumerate(recipes)}
    for name, file in files.items():
        file.write_text(recipes[name])
    said = run_mergekit(files.values(), folder, "--no-copy-tokenizer")

    def both(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ours, theirs = files[name].with_suffix(".epimer"), files[name].with_suffix(".mergekit")
        assert (theirs / "model.safetensors").exists(), said
        epimer.merge(files[name], ours, progress=False)
        return load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")

    return both


def same_kind(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert {n: (W.shape, W.dtype) for n, W in ours.items()} == {n: (W.shape, W.dtype) for n, W in theirs.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_equal(merged, name):
    """The weights are of order 1, and so is the tolerance's unit; float32 resolves 6e-8 of it."""
    ours, theirs = merged(name)
    same_kind(ours, theirs)
    apart = {key: float((ours[key].double() - theirs[key].double()).abs().max()) for key in theirs}
    assert {key: gap for key, gap in apart.items() if gap > 1e-6} == {}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("slices", "modules"))])
def test_the_config_has_as_many_layers(merged, folder, name):
    merged(name)
    file = folder / f"{list(RECIPES).index(name)}.yaml"
    ours, theirs = (
        json.loads((file.with_suffix(f".{who}") / "config.json").read_text()) for who in ("epimer", "mergekit")
    )
    assert ours["num_hidden_layers"] == theirs["num_hidden_layers"]


def computed(method: str, base: Tensor, models: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the merge of `IN_HALVES` with every number in it, and every step's result, rounded to `dtype`."""
    w, base, models = WEIGHTS.to(dtype).reshape(-1, *[1] * base.dim()), base.to(dtype), models.to(dtype)
    if method == "linear":
        return (w * models).sum(0) / w.sum(0)
    return base + (w * (models - base)).sum(0) / w.sum(0) * SCALE


def ulp(x: Tensor) -> Tensor:
    """Return the distance of neighbours in bfloat16, which keeps 8 bits, at each value."""
    return torch.exp2(torch.frexp(x.abs()).exponent.double() - 8)


@pytest.mark.parametrize("how", HALVES)
@pytest.mark.parametrize("method", IN_HALVES)
def test_bfloat16(folder, merged, method, how):
    """Ours is the exact result rounded once; mergekit's is that of its own precision.

    mergekit brings the models to `dtype` and then computes `task_arithmetic` in it: weights, differences, products,
    sum, quotient, scale and result are each rounded. Its `linear` keeps the weights in float32, and so the arithmetic.
    Its rounding errors are measured against the terms, not their sum: terms that cancel leave their errors behind.
    """
    where, _, precision = HALVES[how]
    ours, theirs = merged(f"{method} {how}")
    same_kind(ours, theirs)
    stored = [load_file(folder / where / model / "model.safetensors") for model in ("base", "a", "b", "c")]
    for key, W in ours.items():
        assert W.dtype == torch.bfloat16
        base, models = stored[0][key], torch.stack([state[key] for state in stored[1:]])
        most = base.double().abs() + models.double().abs().sum(0)
        single = 1e-6 * most  # float32's own rounding
        exact = computed(method, base, models, torch.float64)
        assert ((W.double() - exact).abs() <= ulp(exact) / 2 + single).all(), key
        step = torch.float32 if method == "linear" else precision
        expected = computed(method, base.to(precision), models.to(precision), step).double()
        allowed = ulp(expected) / 2 + single if step == torch.float32 else ulp(most)
        assert ((theirs[key].double() - expected).abs() <= allowed).all(), key
