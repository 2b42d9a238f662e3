"""Slices: layers of several models on top of each other, renumbered, with a config that counts them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.errors import EpimerError
from epimer.recipe.load import load_recipe

LAYERS = 4
KINDS = ["full_attention", "sliding_attention", "full_attention", "linear_attention"]


def gpt(seed: int, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """A model whose layers have other names than Llama's, with a head of numbered layers."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    state = {"transformer.wte.weight": random(12, 6), "transformer.wpe.weight": random(5, 6)}
    for i in range(layers):
        for name, shape in {
            "attn.weight": (6, 6),
            "attn.bias": (6,),
            "mlp.weight": (8, 6),
            "mlp.experts.1.w": (4, 6),
        }.items():
            state[f"transformer.h.{i}.{name}"] = random(*shape)
    return state | {"transformer.ln_f.weight": random(6), "score.0.weight": random(3, 6), "score.0.bias": random(3)}


@pytest.fixture
def models(tmp_path):
    """Save models in folders; return their tensors in float64."""
    states = {}
    for seed, name in enumerate(("base", "a", "b", "deep")):
        layers = 6 if name == "deep" else LAYERS
        states[name] = gpt(seed, layers)
        (tmp_path / name).mkdir()
        save_file(states[name], tmp_path / name / "model.safetensors")
        config = {"n_layer": layers, "n_head": 4, "sub_config": {"num_hidden_layers": layers}}
        config |= {} if name == "deep" else {"layer_types": KINDS}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: {key: W.double() for key, W in state.items()} for name, state in states.items()}


@pytest.fixture
def merge(tmp_path, models):
    """Merge a recipe; return its tensors and its config."""

    def merged(**recipe):
        epimer.merge({"dtype": "float64", **recipe}, tmp_path / "out", folder=tmp_path, progress=False, overwrite=True)
        return load_file(tmp_path / "out" / "model.safetensors"), json.loads((tmp_path / "out/config.json").read_text())

    return merged


def source(model, start, stop, **parameters):
    return {"model": model, "layer_range": [start, stop], "parameters": parameters}


def layer(state, number):
    start = f"transformer.h.{number}."
    return {name.removeprefix(start): W for name, W in state.items() if name.startswith(start)}


STACK = [{"sources": [source("a", 0, 3)]}, {"sources": [source("b", 1, 4)]}, {"sources": [source("a", 3, 4)]}]


def test_layers_are_stacked_and_renumbered(merge, models):
    out, config = merge(merge_method="linear", slices=[*STACK[:2], {"sources": [source("base", 3, 4)]}])
    origins = [("a", 0), ("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3), ("base", 3)]
    for number, (model, of) in enumerate(origins):
        found, expected = layer(out, number), layer(models[model], of)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), number
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        assert torch.equal(out[name], models["a"][name])
    for name in ("transformer.ln_f.weight", "score.0.weight", "score.0.bias"):
        assert torch.equal(out[name], models["base"][name])
    assert len(out) == 5 + 4 * len(origins)
    assert config["n_layer"] == config["sub_config"]["num_hidden_layers"] == len(origins)
    assert config["n_head"] == 4, "as many as there were layers, but heads"
    assert config["layer_types"] == [KINDS[of] for _, of in origins]


def test_every_slice_is_a_merge_of_its_sources_with_its_own_parameters(merge, models):
    out, config = merge(
        merge_method="linear",
        parameters={"weight": 0.5},
        slices=[
            {"sources": [source("a", 0, 3, weight=[0, 0.3, 1]), source("b", 1, 4)]},
            {"sources": [source("base", 2, 4)]},
            {"sources": [source("b", 0, 1), source("a", 3, 4, weight=0.25), source("base", 0, 1)],
             "parameters": {"weight": [{"filter": "mlp", "value": 1}, {"value": 2}]}},
        ],
    )  # fmt: skip
    a, b, base = (models[name] for name in ("a", "b", "base"))
    for number, weight in enumerate((0, 0.3, 1)):
        for name, W in layer(out, number).items():
            expected = (weight * layer(a, number)[name] + 0.5 * layer(b, number + 1)[name]) / (weight + 0.5)
            torch.testing.assert_close(W, expected, rtol=1e-12, atol=1e-12)
    for number in (3, 4):
        for name, W in layer(out, number).items():
            assert torch.equal(W, layer(base, number - 1)[name])
    for name, W in layer(out, 5).items():
        own = 1 if "mlp" in name else 2
        parts = own * layer(b, 0)[name] + 0.25 * layer(a, 3)[name] + own * layer(base, 0)[name]
        torch.testing.assert_close(W, parts / (2 * own + 0.25), rtol=1e-12, atol=1e-12)
    table, norm = "transformer.wte.weight", "transformer.ln_f.weight"
    torch.testing.assert_close(out[table], b[table], rtol=1e-12, atol=1e-12)  # the weight of `a` is 0 at depth 0
    expected = (2 * b[norm] + 0.25 * a[norm] + 2 * base[norm]) / 4.25
    torch.testing.assert_close(out[norm], expected, rtol=1e-12, atol=1e-12)
    assert config["n_layer"] == 6


@pytest.mark.parametrize("listed", [True, False])
def test_task_vectors_are_taken_from_the_layers_of_the_base(merge, models, listed):
    """Where a slice does not list the base, it is the base's layers of the same range."""
    own = [source("base", 0, 2)] if listed else []
    out, _ = merge(
        merge_method="task_arithmetic",
        base_model="base",
        slices=[
            {"sources": [*own, source("a", 0, 2, weight=0.3), source("b", 0, 2, weight=0.9)]},
            {"sources": [source("base", 1, 2)]},
            {"sources": [source("b", 2, 3, weight=0.5), source("base", 3, 4)]},
        ],
    )
    a, b, base = (models[name] for name in ("a", "b", "base"))
    for number in (0, 1):
        for name, W0 in layer(base, number).items():
            expected = W0 + 0.3 * (layer(a, number)[name] - W0) + 0.9 * (layer(b, number)[name] - W0)
            torch.testing.assert_close(layer(out, number)[name], expected, rtol=1e-12, atol=1e-12)
    for name, W in layer(base, 1).items():
        torch.testing.assert_close(layer(out, 2)[name], W, rtol=1e-12, atol=1e-12)
    for name, W0 in layer(base, 3).items():
        expected = W0 + 0.5 * (layer(b, 2)[name] - W0)
        torch.testing.assert_close(layer(out, 3)[name], expected, rtol=1e-12, atol=1e-12)


def test_the_only_source_of_a_slice_can_have_what_holds_for_all(merge, models):
    """As mergekit's recipes for upscaling do, which scale single tensors of copied layers."""
    scale = [{"filter": "attn", "value": 0}, {"value": 0.5}]
    out, _ = merge(
        merge_method="task_arithmetic",
        base_model="base",
        slices=[{"sources": [source("a", 0, 2, weight=1)]}, {"sources": [source("a", 1, 4, weight=1, scale=scale)]}],
    )
    a, base = models["a"], models["base"]
    for name, W in layer(out, 1).items():
        torch.testing.assert_close(W, layer(a, 1)[name], rtol=1e-12, atol=1e-12)
    for name, W in layer(out, 3).items():
        by = 0 if "attn" in name else 0.5
        W0 = layer(base, 2)[name]
        torch.testing.assert_close(W, W0 + by * (layer(a, 2)[name] - W0), rtol=1e-12, atol=1e-12)


def test_models_of_different_depth_can_be_stacked(merge, models):
    slices = [{"sources": [source("a", 0, 2)]}, {"sources": [source("deep", 4, 6)]}]
    out, config = merge(merge_method="linear", slices=slices)
    for name, W in layer(models["deep"], 5).items():
        assert torch.equal(layer(out, 3)[name], W)
    assert config["n_layer"] == 4


def test_a_module_is_named_by_a_word_of_its_tensors_names(merge, models):
    out, config = merge(
        merge_method="linear",
        modules={
            "transformer": {"slices": [{"sources": [source("a", 0, 1)]}, {"sources": [source("b", 0, 4)]}]},
            "score": {"models": [{"model": "b"}, {"model": "base"}]},
        },
    )
    assert torch.equal(out["transformer.ln_f.weight"], models["b"]["transformer.ln_f.weight"])
    expected = (models["b"]["score.0.weight"] + models["base"]["score.0.weight"]) / 2
    torch.testing.assert_close(out["score.0.weight"], expected, rtol=1e-12, atol=1e-12)
    assert config["n_layer"] == 5


def test_a_recipe_with_slices_reads_back_and_shows_no_paths(merge, models, tmp_path):
    recipe = load_recipe({"merge_method": "linear", "slices": STACK})
    assert load_recipe(recipe.to_dict()) == recipe
    slices = [{"sources": [{**one, "model": str(tmp_path / one["model"])} for one in s["sources"]]} for s in STACK]
    merge(merge_method="linear", slices=slices)
    made = (tmp_path / "out" / "epimer.json").read_text() + (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in made
    assert "model: a" in made


@pytest.mark.parametrize(("recipe", "expected"), [
    ({"slices": []}, "slices must be a list of slices, each with the key 'sources'. Got [] instead."),
    ({"slices": [{"sources": [{"model": "a"}]}]},
     "slices[0].sources[0].layer_range must be the first layer and one past the last, as [0, 16]. Got None instead."),
    ({"slices": [{"sources": [source("a", 2, 2)]}]},
     "slices[0].sources[0].layer_range must be the first layer and one past the last, as [0, 16]. Got [2, 2] instead."),
    ({"slices": [{"sources": [source("a", 0, 2), source("b", 0, 3)]}]},
     "slices[0] has layer ranges of different lengths ([0, 2], [0, 3]); make them equal."),
    ({"slices": STACK, "models": [{"model": "a"}]}, "'models' and 'slices' both say what is merged; keep one of them."),
    ({"slices": STACK, "curvature": ["x"]}, "'curvature' belongs to whole models, not to slices; list 'models', or "
     "remove it."),
    ({"slices": [{"sources": [source("a", 0, 1, weight=1)]}, {"sources": [source("b", 0, 1)]}]},
     "slices[1].sources[0] has no weight, others have one; give every model a weight, or one for all in the recipe's "
     "'parameters'."),
    ({"merge_method": "ties", "base_model": "base", "slices": [{"sources": [source("a", 0, 1), source("b", 1, 2)]}]},
     "slices[0] does not say which layers of the base belong to it; add the base model with its own layer_range to "
     "the sources."),
    ({"modules": {"x": {}}}, "modules.x needs either 'slices' or 'models'."),
])  # fmt: skip
def test_what_can_be_wrong(recipe, expected):
    with pytest.raises(EpimerError) as error:
        load_recipe({"merge_method": "linear", **recipe})
    assert str(error.value) == f"recipe: {expected}"


def test_a_range_beyond_the_layers_is_refused(merge):
    with pytest.raises(EpimerError) as error:
        merge(merge_method="linear", slices=[{"sources": [source("a", 0, 1)]}, {"sources": [source("b", 1, 9)]}])
    assert str(error.value) == "slices: slices[1].sources[0] has layer_range [1, 9], and b has only 4 layers."


def test_several_stacks_of_layers_need_modules(merge, tmp_path):
    state = {f"{part}.block.{i}.{n}": torch.ones(2, 2) for part in ("encoder", "decoder") for i in (0, 1) for n in "pq"}
    (tmp_path / "t5").mkdir()
    save_file(state, tmp_path / "t5" / "model.safetensors")
    with pytest.raises(EpimerError, match=r"several stacks of layers, 'decoder\.block\.' and 'encoder\.block\.'; give"):
        merge(merge_method="linear", slices=[{"sources": [source("t5", 0, 1)]}])
    recipe = {"encoder": {"slices": [{"sources": [source("t5", 0, 1)]}]}, "decoder": {"models": [{"model": "t5"}]}}
    epimer.merge({"merge_method": "linear", "modules": recipe}, tmp_path / "out", folder=tmp_path, progress=False)
    assert {name[:15] for name in load_file(tmp_path / "out" / "model.safetensors")} == {
        "encoder.block.0", "decoder.block.0", "decoder.block.1",
    }  # fmt: skip
