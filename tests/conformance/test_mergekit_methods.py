"""Every method of mergekit 0.1.5 under `compat: mergekit`, on four architectures: the same tensors.

What draws random numbers is compared by the share it keeps and by the mean and variance of what it adds to the base.
mergekit runs in a process of its own and only its output is looked at. Runs in an environment of its own:
`make conformance`.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import epimer
from epimer.methods.registry import ALIASES, MERGEKIT
from peer_mergekit import run_mergekit

if importlib.util.find_spec("mergekit") is None:
    pytest.skip("mergekit is installed by `make conformance`", allow_module_level=True)

TWO = "models: [{model: base}, {model: a}]\nbase_model: base\n"
TASKS = """base_model: base
models:
  - {model: base, parameters: {weight: 1.0}}
  - {model: a, parameters: {weight: 0.3}}
  - {model: b, parameters: {weight: 0.5}}
  - {model: c, parameters: {weight: 0.9}}
"""
PLAIN = "base_model: base\nmodels: [{model: a}, {model: b}, {model: c}]\n"
PAIR = "models: [{model: a, parameters: {weight: [0, 0.4, 1]}}, {model: b, parameters: {weight: 0.6}}]\n"
TRIMMED = """base_model: base
models:
  - {model: a, parameters: {weight: 0.3, density: 0.4}}
  - {model: b, parameters: {weight: [0.5, 0.1], density: [0.2, 0.9]}}
  - {model: c, parameters: {weight: 0.9}}
"""
T = "parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {filter: mlp, value: 0.7}, {value: 0.35}]}\n"
RECIPES = {
    "linear": "merge_method: linear\n" + TASKS,
    "slerp": "merge_method: slerp\n" + TWO + T,
    "slerp, from the second": "merge_method: slerp\nmodels: [{model: a}, {model: b}]\nbase_model: b\n" + T,
    "nuslerp": "merge_method: nuslerp\n" + PAIR,
    "nuslerp, task vectors": "merge_method: nuslerp\nbase_model: base\n" + PAIR,
    "nuslerp, rows": "merge_method: nuslerp\nbase_model: base\n" + PAIR + "parameters: {nuslerp_flatten: false}\n",
    "nuslerp, columns": "merge_method: nuslerp\n" + PAIR
    + "parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n",
    "nuslerp, truths over the layers": "merge_method: nuslerp\n" + PAIR
    + "parameters: {nuslerp_flatten: [true, false, true], nuslerp_row_wise: [false, true]}\n",
    "multislerp": "merge_method: multislerp\n" + TASKS.replace("base_model: base\n", ""),
    "multislerp, task vectors": "merge_method: multislerp\n" + TASKS,
    "multislerp, weights as given": "merge_method: multislerp\n" + TASKS + "parameters: {normalize_weights: false}\n",
    "karcher": "merge_method: karcher\nmodels: [{model: base}, {model: a}, {model: b}]\n",
    "karcher, two steps": "merge_method: karcher\nmodels: [{model: a}, {model: b}, {model: c}]\n"
    "parameters: {max_iter: 2, tol: 1.0e-9}\n",
    "task_arithmetic": "merge_method: task_arithmetic\n" + TASKS + "parameters: {lambda: 0.8, int8_mask: true}\n",
    "ties": "merge_method: ties\n" + TASKS,
    "ties, density": "merge_method: ties\n"
    + TRIMMED + "parameters: {normalize: true, int8_mask: true, density: 0.53}\n",
    "ties, added up": "merge_method: ties\n" + TRIMMED + "parameters: {normalize: 0.0, rescale: true, lambda: 0.7}\n",
    "breadcrumbs": "merge_method: breadcrumbs\n" + TRIMMED + "parameters: {density: 0.7, gamma: 0.05}\n",
    "breadcrumbs, by default": "merge_method: breadcrumbs\n" + TASKS,
    "breadcrumbs, gamma": "merge_method: breadcrumbs\n"
    + TRIMMED.replace("density: 0.4", "density: 0.4, gamma: [0.0, 0.7]") + "parameters: {normalize: true}\n",
    "breadcrumbs_ties": "merge_method: breadcrumbs_ties\n" + TRIMMED + "parameters: {gamma: 0.05, rescale: true}\n",
    "breadcrumbs_ties, normalised": "merge_method: breadcrumbs_ties\n" + TRIMMED + "parameters: {normalize: true}\n",
    "dare_linear, all kept": "merge_method: dare_linear\n" + TASKS,
    "dare_ties, all kept": "merge_method: dare_ties\n" + TASKS + "parameters: {lambda: 1.3}\n",
    "della, all kept": "merge_method: della\n" + TASKS,
    "della_linear, all kept": "merge_method: della_linear\n" + TASKS + "parameters: {normalize: true}\n",
    "sce": "merge_method: sce\n" + PLAIN,
    "sce, selected": "merge_method: sce\n" + PLAIN + "parameters: {select_topk: 0.3, int8_mask: true}\n",
    "ram": "merge_method: ram\n" + PLAIN,
    "ram, epsilon": "merge_method: ram\n" + PLAIN + "parameters: {epsilon: 0.2}\n",
    "ramplus_tl": "merge_method: ramplus_tl\n" + PLAIN + "parameters: {epsilon: 0.2}\n",
    "ramplus_tl, stronger": "merge_method: ramplus_tl\n" + PLAIN + "parameters: {epsilon: 0.4, r: 0.7, alpha: 0.9}\n",
    "model_stock": "merge_method: model_stock\n" + PLAIN,
    "model_stock, rows": "merge_method: model_stock\n" + PLAIN + "parameters: {filter_wise: true}\n",
    "nearswap": "merge_method: nearswap\n" + TWO + "parameters: {t: 0.1}\n",
    "arcee_fusion": "merge_method: arcee_fusion\n" + TWO,
    "passthrough": "merge_method: passthrough\nmodels: [{model: a}]\n",
    "passthrough, scaled": "merge_method: passthrough\nmodels:\n  - model: a\n    parameters:\n      scale:\n"
    "        - {filter: mlp, value: 0.0}\n        - {value: 0.5}\n",
}  # fmt: skip
NEAR = ("slerp", "nuslerp", "karcher", "multislerp", "sce", "model_stock", "ties, density")
"""also with models that moved little, where mergekit's thresholds decide; in double precision, as the angles that its
karcher takes in float32 are rounded to nothing there"""
RELATED = ("slerp", "nuslerp, task vectors", "multislerp, task vectors", "ties", "sce", "model_stock", "karcher")
"""also with models 768 wide whose steps have cosines of .3 to .9; in float32 mergekit itself is up to 2.5e-5 off, so
both are compared in double precision, and ours in float32 with mergekit's in double precision"""
DOUBLE = ", in double precision"
RANDOM = {
    "dare_linear": "merge_method: dare_linear\n{}parameters: {{density: 0.3}}\n",
    "dare_linear, not rescaled": "merge_method: dare_linear\n{}parameters: {{density: 0.6, rescale: false}}\n",
    "dare_ties": "merge_method: dare_ties\n{}parameters: {{density: 0.4, normalize: true}}\n",
    "della": "merge_method: della\n{}parameters: {{density: 0.6, epsilon: 0.25}}\n",
    "della_linear": "merge_method: della_linear\n{}parameters: {{density: 0.5, epsilon: 0.3}}\n",
}
FAMILIES = ("llama", "mistral", "qwen2", "gpt2")


def network(family: str, width: int):
    import transformers as hf

    common = {"vocab_size": 40, "hidden_size": width, "intermediate_size": 3 * width // 2, "num_hidden_layers": 3}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    match family:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**common))
        case "mistral":
            return hf.MistralForCausalLM(hf.MistralConfig(**common, sliding_window=8))
        case "qwen2":
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(**common, tie_word_embeddings=True))
        case _:
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_positions=16, n_embd=width, n_layer=3, n_head=4))


def save_models(
    folder: Path, family: str, spread: float, width: int = 16, shares: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> None:
    """Save an ancestor and three models that moved by about `spread` of its entries.

    `shares` says how much of each model's step is common to all: the cosine of two steps is the product of theirs.
    """
    torch.manual_seed(0)
    model = network(family, width)
    start = {name: torch.randn(W.shape) for name, W in model.named_parameters()}
    common = {name: torch.randn(W.shape) for name, W in start.items()}
    steps = {"base": None, **dict(zip("abc", shares, strict=True))}
    for name, share in steps.items():
        for key, W in model.named_parameters():
            W.data = start[key].clone()
            if share is not None:
                W.data += spread * (share * common[key] + (1 - share**2) ** 0.5 * torch.randn(W.shape))
        model.save_pretrained(folder / name)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Merge every recipe with mergekit; return what a recipe's name gives here and there, and the base."""
    folder = tmp_path_factory.mktemp("methods")
    for family in FAMILIES:
        save_models(folder / family, family, 0.3)
    save_models(folder / "near", "llama", 5e-4)
    save_models(folder / "wide", "llama", 0.3, width=128)
    save_models(folder / "related", "llama", 0.3, width=768, shares=(0.98, 0.92, 0.33))
    texts = {(family, name): text for family in FAMILIES for name, text in RECIPES.items()}
    texts |= {("near", name): RECIPES[name] + "dtype: float64\n" for name in NEAR}
    texts |= {("related", name): RECIPES[name] for name in RELATED}
    texts |= {("related", name + DOUBLE): RECIPES[name] + "dtype: float64\n" for name in RELATED}
    texts |= {("wide", name): text.format(TASKS) for name, text in RANDOM.items()}
    files = {key: folder / key[0] / f"{i}.yaml" for i, key in enumerate(texts)}
    said = ""
    for key, file in files.items():
        file.write_text(texts[key])
    for place in {key[0] for key in files}:
        chosen = [file for key, file in files.items() if key[0] == place]
        said += run_mergekit(chosen, folder / place, "--no-copy-tokenizer")

    def both(place: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        file = files[place, name]
        ours, theirs = file.with_suffix(".epimer"), file.with_suffix(".mergekit")
        assert (theirs / "model.safetensors").exists(), said
        epimer.merge(file, ours, progress=False, compat="mergekit")
        return tuple(load_file(one / "model.safetensors") for one in (ours, theirs, file.parent / "base"))

    return both


def test_every_method_of_mergekit_is_compared():
    from mergekit.merge_methods.registry import registered_methods

    theirs = {method.spec.name for method in registered_methods()}
    assert {ALIASES.get(name, name) for name in theirs} == set(MERGEKIT)
    compared = {name.partition(",")[0] for name in (*RECIPES, *RANDOM)}
    assert compared == theirs


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return the tensors that differ, by how much: weights are of order 1, and float32 resolves 6e-8 of that."""
    assert {n: (W.shape, W.dtype) for n, W in ours.items()} == {n: (W.shape, W.dtype) for n, W in theirs.items()}
    apart = {key: float((ours[key].double() - theirs[key].double()).abs().max()) for key in theirs}
    return {key: gap for key, gap in apart.items() if gap > 2e-6}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal(merged, family, name):
    ours, theirs, _ = merged(family, name)
    assert differing(ours, theirs) == {}


@pytest.mark.parametrize("name", NEAR)
def test_equal_where_models_moved_little(merged, name):
    ours, theirs, _ = merged("near", name)
    assert differing(ours, theirs) == {}


@pytest.mark.parametrize("name", RELATED)
def test_equal_where_models_are_wide_and_related(merged, name):
    ours, theirs, _ = merged("related", name + DOUBLE)
    assert differing(ours, theirs) == {}
    ours, _, _ = merged("related", name)
    assert differing(ours, {key: W.float() for key, W in theirs.items()}) == {}


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_random_has_the_same_distribution(merged, name):
    """Of 16384 entries and more the share kept is known to 0.4%, mean and variance of the change to about 1%."""
    ours, theirs, base = merged("wide", name)
    for key, W0 in base.items():
        if W0.numel() < 128 * 128:
            continue
        deltas = [(state[key] - W0).double().flatten() for state in (ours, theirs)]
        moved, mean, variance = ([float(f(D)) for D in deltas] for f in (lambda D: (D != 0).double().mean(), torch.mean,
                                                                        torch.var))  # fmt: skip
        assert moved[0] == pytest.approx(moved[1], abs=0.015), key
        assert mean[0] == pytest.approx(mean[1], abs=5 * (variance[1] / W0.numel()) ** 0.5 * 2**0.5), key
        assert variance[0] == pytest.approx(variance[1], rel=0.08), key
