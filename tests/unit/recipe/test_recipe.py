"""Recipes: what a YAML file means for each tensor, and one exact line for everything that can be wrong with it."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import epimer
from epimer.errors import EpimerError, RecipeError
from epimer.recipe.load import load_recipe
from epimer.recipe.model import Filtered, ModelEntry, Recipe, Settings, depths

METHODS = f"`epimer methods` lists all {len(epimer.list_methods())}"

TIES = """\
models:
  - model: psmathur/orca_mini_v3_13b
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: garage-bAInd/Platypus2-13B
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: WizardLM/WizardMath-13B-V1.0
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: TheBloke/Llama-2-13B-fp16
parameters:
  normalize: true
dtype: float16
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> Recipe:
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        return load_recipe("recipe.yaml")

    return read


def message(load, text):
    with pytest.raises(RecipeError) as caught:
        load(text)
    line = str(caught.value)
    assert "\n" not in line
    return line


def recipe(method="ties", *, models=("a", "b"), base="base", **rest):
    data = {"merge_method": method, "models": [m if isinstance(m, dict) else {"model": m} for m in models]}
    return load_recipe(data | ({"base_model": base} if base else {}) | rest)


def refused(*args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        recipe(*args, **kwargs)
    return str(caught.value)


# -- what a recipe means


def test_a_recipe_of_mergekits_own_examples(load):
    found = load(TIES)
    assert found.merge_method == "ties"
    assert found.base_model == "TheBloke/Llama-2-13B-fp16"
    assert [entry.model for entry in found.models] == [
        "psmathur/orca_mini_v3_13b",
        "garage-bAInd/Platypus2-13B",
        "WizardLM/WizardMath-13B-V1.0",
    ]
    assert (found.normalize_weights, found.dtype, found.out_dtype) == (True, "float16", None)
    assert (found.tokenizer_source, found.rules, found.parameters) == (None, (), {})
    assert found.varying() == {"weight", "density"}

    mlp = found.settings("model.layers.0.mlp.up_proj.weight", 0.0)
    assert mlp == Settings({"density": [1.0, 0.5, 0.33]}, [1.0, 0.0, 0.5])
    attention = found.settings("model.layers.39.self_attn.q_proj.weight", 1.0)
    assert attention == Settings({"density": [0.1, 0.5, 0.33]}, [1.0, 1.0, 0.0])
    half = found.settings("model.layers.20.mlp.up_proj.weight", 0.5)
    assert half.parameters["density"] == pytest.approx([0.7, 0.5, 0.33])
    assert half.weights == pytest.approx([1.0, 0.5, 0.5])  # halfway between 0.3 and 0.7


@pytest.mark.parametrize(
    ("t", "expected"), [(0, 1.0), (0.25, 0.85), (0.5, 0.7), (0.75, 0.4), (1, 0.1), (1 / 3, 1 - 0.3 * 2 / 3)]
)
def test_a_gradient_is_linear_between_its_numbers(t, expected):
    assert recipe(parameters={"density": [1, 0.7, 0.1]}).settings("x", t).parameters["density"] == pytest.approx(
        expected
    )


def test_a_gradient_of_one_number_is_that_number():
    found = recipe(parameters={"density": [0.3]})
    assert [found.settings("x", t).parameters["density"] for t in (0, 0.4, 1)] == [0.3] * 3
    assert found.varying() == frozenset()


def test_the_first_filter_that_matches_wins_and_its_value_may_be_a_gradient():
    filters = [
        {"filter": "self_attn", "value": [0, 0.5, 1]},
        {"filter": "attn", "value": 0.9},
        {"filter": "mlp", "value": 0.25},
        {"filter": "*", "value": 0.6},
        {"filter": "norm", "value": 7},
    ]
    found = recipe(parameters={"scale": filters})
    at = {name: found.settings(name, 0.75).parameters["scale"] for name in ("h.3.self_attn.q", "attn", "mlp", "norm")}
    assert at == {"h.3.self_attn.q": 0.75, "attn": 0.9, "mlp": 0.25, "norm": 0.6}
    assert found.varying() == {"scale"}


def test_without_a_matching_filter_a_parameter_falls_back_to_the_recipes_then_to_its_default():
    own = {"model": "a", "parameters": {"density": [{"filter": "mlp", "value": 0.9}]}}
    shared = {"density": [{"filter": "attn", "value": 0.4}]}
    found = recipe(models=[own, "b"], parameters=shared)
    assert found.settings("mlp", 0).parameters == {"density": [0.9, 0.2]}  # the default of ties is 0.2
    assert found.settings("attn", 0).parameters == {"density": [0.4, 0.4]}
    assert found.settings("norm", 0).parameters == {"density": [0.2, 0.2]}
    assert recipe("dare", parameters=shared).settings("norm", 0).parameters == {"density": 0.5}


def test_without_a_matching_filter_a_weight_is_an_error_with_tensor_and_model():
    found = recipe(models=["a", {"model": "b", "parameters": {"weight": 2}}],
                   parameters={"weight": [{"filter": "mlp", "value": 1}]})  # fmt: skip
    assert found.settings("x.mlp", 0).weights == [1.0, 2.0]
    assert found.varying() == frozenset()  # where there is a weight it is the same
    with pytest.raises(RecipeError) as caught:
        found.settings("x.norm", 0)
    assert str(caught.value) == (
        "recipe: no filter of the 'weight' of 'a' matches the tensor 'x.norm'; add an entry without a filter."
    )


def test_models_may_be_plain_names(load):
    short = load("merge_method: ties\nbase_model: b\nmodels: [b, a, org/c]\n")
    long = load("merge_method: ties\nbase_model: b\nmodels: [{model: a}, {model: org/c}]\n")
    assert short == long
    assert [entry.model for entry in short.models] == ["a", "org/c"]


@pytest.mark.parametrize(("alias", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_short_names_of_dtypes(load, alias, dtype):
    loaded = load(f"merge_method: linear\nmodels: [a]\ndtype: {alias}\nout_dtype: {alias}\n")
    assert (loaded.dtype, loaded.out_dtype) == (dtype, dtype)


def test_a_models_value_prevails_over_the_recipes():
    found = recipe(models=["a", {"model": "b", "parameters": {"density": 0.9, "weight": 3}}],
                   parameters={"density": 0.4, "weight": 1, "elect": "frequency"})  # fmt: skip
    assert found.settings("x", 0) == Settings({"density": [0.4, 0.9], "elect": "frequency"}, [1.0, 3.0])


def test_a_value_that_no_model_has_of_its_own_stays_a_scalar():
    assert recipe(parameters={"density": 0.4}).settings("x", 0) == Settings({"density": 0.4}, None)
    assert recipe().settings("x", 0) == Settings({}, None)


def test_varying_sees_what_is_overridden_and_what_is_constant():
    gradient = {"density": [0.1, 0.9], "weight": [0.5, 0.5]}
    own = [{"model": name, "parameters": {"density": 0.5}} for name in "ab"]
    assert recipe(parameters=gradient).varying() == {"density"}
    assert recipe(models=own, parameters=gradient).varying() == frozenset()
    assert recipe(models=[own[0], "b"], parameters=gradient).varying() == {"density"}
    default = [{"filter": "mlp", "value": 0.2}]
    assert recipe(parameters={"density": default}).varying() == frozenset()  # 0.2 is the default anyway


STEPS = {  # what mergekit 0.1.5 takes from a, b, … in each layer, by layers
    2: {2: "ab", 3: "aab", 5: "aaaab"},
    3: {2: "ac", 3: "abc", 4: "aabc", 5: "aabbc", 7: "aaabbbc"},
    4: {2: "ad", 4: "abcd", 5: "aabcd", 7: "aabbccd", 8: "aaabbccd"},
}


@pytest.mark.parametrize("count", STEPS)
def test_a_gradient_over_words_steps_through_them_and_the_last_is_for_the_last_layer(count):
    every = ["mass", "frequency", "frequency", "mass"][:count]
    found = recipe(parameters={"elect": every})
    for layers, letters in STEPS[count].items():
        names = [f"model.layers.{i}.w" for i in range(layers)]
        t = depths(names)
        expected = [every["abcd".index(letter)] for letter in letters]
        assert [found.settings(name, t[name]).parameters["elect"] for name in names] == expected
    assert found.settings("lm_head", 0).parameters == {"elect": "mass"}
    assert found.varying() == {"elect"}
    assert load_recipe(found.to_dict()) == found


def test_truths_are_words_too_and_filters_may_have_gradients_over_words():
    found = recipe("nuslerp", models=["a", "b"], parameters={"nuslerp_row_wise": [1.0, False]})
    assert [found.settings("x", t).parameters["nuslerp_row_wise"] for t in (0, 0.9, 1)] == [True, True, False]
    filters = [{"filter": "mlp", "value": ["frequency", "mass"]}, {"value": "mass"}]
    found = recipe(parameters={"elect": filters})
    at = [found.settings(name, t).parameters["elect"] for name in ("mlp", "attn") for t in (0.4, 1)]
    assert at == ["frequency", "mass", "mass", "mass"]


def test_integers_are_rounded_between_the_numbers_of_a_gradient():
    found = recipe("epimer_free", parameters={"rank": [8, 17]})
    assert [found.settings("x", t).parameters["rank"] for t in (0, 0.3, 0.6, 1)] == [8, 11, 13, 17]  # 10.7, 13.4
    assert all(type(found.settings("x", t).parameters["rank"]) is int for t in (0, 0.3, 1))


def test_choices_vary_through_filters_and_none_is_a_value_where_a_method_has_it():
    found = recipe("epimer_free", parameters={
        "basis": [{"filter": "attn", "value": "tagged"}],
        "aggregator": [{"filter": "attn", "value": "sum"}, {"value": "mean"}],
        "rank": None,
        "normalize": "none",
        "seed": 3,
    })  # fmt: skip
    assert found.settings("attn", 0).parameters == {
        "basis": "tagged", "aggregator": "sum", "rank": None, "normalize": "none", "seed": 3
    }  # fmt: skip
    assert found.settings("mlp", 0).parameters["basis"] == "tensor"  # the default of epimer_free
    assert found.varying() == {"basis", "aggregator"}
    assert found.normalize_weights is None


@pytest.mark.parametrize("key", ["parameters.scale", "parameters.lambda", "scale"])
def test_scale_has_three_spellings(key):
    rest = {"scale": [0, 1]} if key == "scale" else {"parameters": {key.split(".")[1]: [0, 1]}}
    found = recipe(**rest)
    assert found.parameters == {"scale": (0.0, 1.0)}
    assert found.settings("x", 0.5).parameters == {"scale": 0.5}


@pytest.mark.parametrize(("given", "meant"), [(True, True), (False, False), (1.0, True), (0, False)])
def test_normalize_as_a_bool_is_about_weights(given, meant):
    for method in ("ties", "fisher"):  # fisher has a normalize of its own, which takes words
        found = recipe(method, parameters={"normalize": given})
        assert found.normalize_weights is meant
        assert found.parameters == {}


def test_normalize_as_a_word_is_about_curvature():
    found = recipe("fisher", parameters={"normalize": "trace"})
    assert found.normalize_weights is None
    assert found.settings("x", 0).parameters == {"normalize": "trace"}


def test_aliases_of_mergekit():
    assert recipe("linear", base=None).merge_method == "average"
    assert recipe("dare_linear").merge_method == "dare"


def test_samples_are_one_number_per_model_and_no_gradient():
    found = recipe("gradient_matching", parameters={"samples": [100, "2e2"]})
    assert [found.settings("x", t).parameters["samples"] for t in (0, 1)] == [[100.0, 200.0]] * 2
    assert found.varying() == frozenset()
    assert load_recipe(found.to_dict()) == found


def test_negative_weights_where_the_method_takes_them():
    assert recipe("task_arithmetic", parameters={"weight": -0.5}).settings("x", 0).weights == [-0.5, -0.5]


def test_the_base_listed_among_the_models_is_dropped_where_the_method_has_one():
    assert recipe(models=["a", "base", "b"]).models == (ModelEntry(model="a"), ModelEntry(model="b"))
    weighted = [{"model": "base"}, {"model": "a", "parameters": {"weight": 1}}]
    assert recipe(models=weighted).settings("x", 0).weights == [1.0]
    assert [entry.model for entry in recipe("average", models=["a", "base"]).models] == ["a", "base"]
    assert [entry.model for entry in recipe(models=["a", "a"]).models] == ["a", "a"]


def test_curvature_per_model_or_as_a_list():
    each = recipe("epimer", models=[{"model": "a", "curvature": "fa"}, "b"])
    assert [entry.curvature for entry in each.models] == ["fa", None]
    listed = recipe("epimer", models=["base", "a", "b"], curvature=["fa", None])
    assert listed == each


def test_rules_as_pairs_or_as_a_mapping():
    pairs = recipe(rules=[["*.bias", "copy"], ["lm_head.*", "average"]])
    assert pairs.rules == (("*.bias", "copy"), ("lm_head.*", "average"))
    assert recipe(rules={"*.bias": "copy", "lm_head.*": "average"}) == pairs


# -- depths


def test_depths_of_a_llama_in_model_order_and_sorted_by_name():
    names = ["model.embed_tokens.weight"]
    names += [f"model.layers.{i}.{part}.weight" for i in range(5) for part in ("mlp", "self_attn")]
    names += ["model.norm.weight", "lm_head.weight"]
    expected = {"model.embed_tokens.weight": 0.0, "model.norm.weight": 0.0, "lm_head.weight": 0.0}
    expected |= {f"model.layers.{i}.{part}.weight": i / 4 for i in range(5) for part in ("mlp", "self_attn")}
    assert depths(names) == expected
    assert depths(sorted(names)) == expected


def test_depths_count_the_layers_of_each_prefix_apart():
    names = [
        "wte.weight",
        "h.0.attn.c_attn.1.w",
        "h.11.attn.w",
        "encoder.layer.2.x",
        "encoder.layer.4.x",
        "ln_f.weight",
    ]
    assert depths(names) == {
        "wte.weight": 0, "h.0.attn.c_attn.1.w": 0, "h.11.attn.w": 1, "encoder.layer.2.x": 0.5, "encoder.layer.4.x": 1,
        "ln_f.weight": 0,
    }  # fmt: skip


def test_depths_of_tensors_of_no_layer():
    assert depths(["stem", "blocks.0.w", "blocks.2.w", "norm", "pos_embed", "wpe.weight"]) == {
        "stem": 0, "blocks.0.w": 0, "blocks.2.w": 1, "norm": 0, "pos_embed": 0, "wpe.weight": 0
    }  # fmt: skip
    assert depths(["layers.0.w", "head"]) == {"layers.0.w": 1, "head": 0}  # one layer
    assert depths(["w", "b", "lm_head"]) == {"w": 0, "b": 0, "lm_head": 0}  # none
    assert depths(["0.weight", "2.weight", "layer1.w"]) == {"0.weight": 0, "2.weight": 1, "layer1.w": 0}
    assert depths([]) == {}


# -- writing a recipe


def everything() -> Recipe:
    return recipe(
        "average",
        base="/home/me/base",
        models=[
            {"model": "/home/me/a", "parameters": {"weight": [0, 1]}, "curvature": "/home/me/fa"},
            {"model": "org/b@main", "parameters": {"weight": [{"filter": "mlp", "value": [1e-5, 2]}, {"value": 3}]}},
        ],
        parameters={"lambda": 0.7, "normalize": True},
        dtype="bfloat16",
        out_dtype="float16",
        tokenizer_source="/home/me/a",
        rules={"*.bias": "copy"},
    )


def test_a_base_beside_mergekits_linear_is_refused_unless_it_is_listed():
    with pytest.raises(RecipeError, match="mergekit's linear counts base_model as one more model: list it"):
        recipe("linear", base="x", models=[{"model": "a"}, {"model": "b"}])
    assert len(recipe("linear", base="a", models=[{"model": "a"}, {"model": "b"}]).models) == 2


def test_to_dict_is_canonical_and_reads_back():
    assert everything().to_dict() == {
        "merge_method": "average",
        "base_model": "/home/me/base",
        "models": [
            {"model": "/home/me/a", "parameters": {"weight": [0.0, 1.0]}, "curvature": "/home/me/fa"},
            {
                "model": "org/b@main",
                "parameters": {"weight": [{"filter": "mlp", "value": [1e-5, 2.0]}, {"value": 3.0}]},
            },
        ],
        "parameters": {"scale": 0.7, "normalize": True},
        "dtype": "bfloat16",
        "out_dtype": "float16",
        "tokenizer_source": "/home/me/a",
        "rules": [["*.bias", "copy"]],
    }
    assert load_recipe(everything().to_dict()) == everything()


@pytest.mark.parametrize("text", [TIES, "merge_method: nan\nmodels: [{model: a}]\n",
    "merge_method: epimer_free\nbase_model: b\nmodels: [{model: a}]\nparameters: {rank: null, seed: 4}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {normalize: no}\n"])  # fmt: skip
def test_yaml_reads_back_to_an_equal_recipe(load, text):
    found = load(text)
    assert load_recipe(found.to_dict()) == found
    assert load(found.to_yaml()) == found


def test_to_yaml_shows_no_path_that_is_renamed(load):
    rename = {"/home/me/base": "base", "/home/me/a": "a", "/home/me/fa": "curvature of a"}
    text = everything().to_yaml(rename)
    assert "/home" not in text
    assert yaml.safe_load(text) == load(text).to_dict()
    assert (
        text
        == """\
merge_method: average
base_model: base
models:
- model: a
  parameters:
    weight: [0.0, 1.0]
  curvature: curvature of a
- model: org/b@main
  parameters:
    weight:
    - filter: mlp
      value: [1.0e-05, 2.0]
    - {value: 3.0}
parameters: {scale: 0.7, normalize: true}
dtype: bfloat16
out_dtype: float16
tokenizer_source: a
rules:
- ['*.bias', copy]
"""
    )


# -- what a recipe leaves open


@pytest.mark.parametrize(("given", "auto"), [
    ({"merge_method": "auto"}, ("merge_method",)),
    ({"scale": "auto"}, ("scale",)),
    ({"parameters": {"scale": "auto", "density": 0.5}}, ("scale",)),
    ({"merge_method": "auto", "scale": "auto"}, ("merge_method", "scale")),
    ({"merge_method": "auto", "parameters": {"scale": "auto", "rank": 4}}, ("merge_method", "scale")),
    ({"scale": 0.5}, ()),
])  # fmt: skip
def test_what_is_auto_is_kept_open_and_reads_back(load, given, auto):
    data = {"merge_method": "ties", "base_model": "b", "models": [{"model": "a"}], "eval": "suite.yaml"} | given
    found = load_recipe(data)
    assert (found.auto, found.eval) == (auto, "suite.yaml")
    assert "scale" not in found.parameters or not auto
    assert {k: v for k, v in found.parameters.items() if k != "scale"} == {
        k: v for k, v in given.get("parameters", {}).items() if k != "scale"
    }
    plain = found.to_dict()
    assert {key: plain.get(key) for key in ("merge_method", "scale", "eval")} == {
        "merge_method": data["merge_method"], "scale": "auto" if "scale" in auto else None, "eval": "suite.yaml",
    }  # fmt: skip
    assert load_recipe(plain) == found
    assert load(found.to_yaml()) == found
    assert load(yaml.safe_dump(data)) == found


def test_rounds_and_refinement_read_back_and_stay_when_the_rest_is_settled(load):
    data = {"merge_method": "epimer_kron", "base_model": "b", "models": [{"model": "a", "curvature": "c"}]}
    found = load_recipe(data | {"rounds": 1, "refine": 8, "scale": "auto"})
    assert (found.rounds, found.refine) == (1, 8)
    assert load(found.to_yaml()) == found
    settled = found.settled("tsv", 0.7)
    assert (settled.rounds, settled.refine, settled.models[0].curvature) == (1, 8, "c")  # refined by its inputs
    plain = load_recipe(data | {"rounds": None, "refine": 0})
    assert (plain.rounds, plain.refine, plain.settled("tsv").models[0].curvature) == (0, 0, None)
    assert not {"rounds", "refine"} & plain.to_dict().keys()


def test_a_recipe_with_nothing_open_says_nothing_of_it():
    assert not {"auto", "eval"} & recipe().to_dict().keys()
    assert (recipe().auto, recipe().eval) == ((), None)


@pytest.mark.parametrize(("given", "open"), [
    ({"merge_method": "auto"}, "merge_method"),
    ({"scale": "auto"}, "scale"),
    ({"merge_method": "auto", "scale": "auto"}, "merge_method and scale"),
])  # fmt: skip
def test_a_recipe_that_leaves_something_open_is_not_planned(given, open):
    from epimer.plan.merge import check_settled

    found = load_recipe({"merge_method": "tsv", "base_model": "b", "models": [{"model": "a"}]} | given)
    with pytest.raises(RecipeError) as caught:
        check_settled(found)
    assert str(caught.value) == f"the recipe leaves {open} open; `epimer merge` or epimer.merge choose it."


@pytest.mark.parametrize(("text", "expected"), [
    ("merge_method: ties\nevl: s.yaml\n", "2: unknown key 'evl'. Did you mean 'eval'?"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\neval: 3\n", "4: eval must be text"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\neval: [s.yaml]\n", "4: eval must be text"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nscale: atuo\n",
     "4: The 'scale' parameter of ties must be a finite number. Got 'atuo' instead."),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nparameters: {density: auto}\n",
     "4: The 'density' parameter of ties must be a finite number"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a, parameters: {scale: auto}}]\n",
     "3: 'scale' holds for all models"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nparameters: [scale]\n",
     "4: parameters must be a mapping"),
    ("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\nparameters: auto\n", "4: parameters must be a mapping"),
    ("merge_method: atuo\nbase_model: b\nmodels: [{model: a}]\n", "1: There is no method 'atuo'. Did you mean 'auto'?"),
    ("merge_method: auto\nmodels: [{model: a}]\n", "1: a recipe with 'auto' needs the base model"),
    ("merge_method: auto\nbase_model: b\nmodels: [{model: a}]\nparameters: {densty: 1}\n",
     "4: unknown key 'densty' in parameters of auto"),
    *((f"merge_method: ties\nbase_model: b\nmodels: [{{model: a}}]\nscale: {one}\nparameters: {{{key}: {two}}}\n",
       "5: scale is given twice: scale, parameters.scale and lambda are one; keep one.")
      for one, key, two in (("auto", "scale", 0.5), ("auto", "scale", "auto"), (0.5, "scale", "auto"),
                            ("auto", "lambda", 0.5), ("", "scale", "auto, lambda: 0.5"))),
])  # fmt: skip
def test_mistakes_with_what_is_left_open(load, text, expected):
    assert message(load, text).startswith(f"recipe.yaml:{expected}")


def test_recipes_are_frozen_and_closed():
    found = recipe()
    with pytest.raises(ValidationError, match="frozen"):
        found.dtype = "float32"
    with pytest.raises(ValidationError, match="extra"):
        Recipe(merge_method="average", models=(ModelEntry(model="a"),), densty=1)
    with pytest.raises(ValidationError):
        Filtered(filter=3, value=1)


# -- YAML itself


def test_numbers_and_booleans_of_yaml_1_1(load):
    found = load("merge_method: ties\nbase_model: b\nmodels: [{model: a}]\n"
                 "parameters: {density: 1e-3, scale: ['5e-1', 1e0], normalize: off, seed: '7'}\n")  # fmt: skip
    assert found.parameters == {"density": 0.001, "scale": (0.5, 1.0), "seed": 7}
    assert found.normalize_weights is False


def test_anchors_and_merge_keys(load):
    found = load("""\
merge_method: ties
base_model: b
models:
  - &first
    model: a
    parameters: &p {weight: 1, density: 0.5}
  - <<: *first
    model: c
  - model: d
    parameters: {<<: [{weight: 2}, *p], density: 0.1}
""")
    assert [entry.model for entry in found.models] == ["a", "c", "d"]
    assert found.settings("x", 0) == Settings({"density": [0.5, 0.5, 0.1]}, [1.0, 1.0, 2.0])


def test_a_wrong_value_that_was_merged_in_has_the_line_it_stands_in(load):
    text = (
        "merge_method: ties\nbase_model: b\nmodels:\n- &m\n  model: a\n  parameters:\n    density: [1, 2]\n- {<<: *m}\n"
    )
    assert message(load, text).startswith("recipe.yaml:7: models[0].parameters.density[1]: The 'density'")
    own = text.replace("[1, 2]", "1") + "- <<: *m\n  parameters:\n    density:\n    - 1\n    - 2\n"
    assert message(load, own).startswith("recipe.yaml:13: models[2].parameters.density[1]: The 'density'")


def test_a_byte_order_mark_and_windows_lines(load):
    assert load("\ufeff" + TIES.replace("\n", "\r\n")) == load(TIES)


def test_the_file_may_be_a_path_and_the_error_names_it(tmp_path):
    path = tmp_path / "my recipe.yaml"
    path.write_text("merge_method: linear\nmodels: []\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == (
        f"{path}:2: models must be a list of models: each a name or a path, or a mapping with 'model'. Got [] instead."
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("no/such.yaml")
    assert str(caught.value) == "Cannot read the recipe 'no/such.yaml': No such file or directory."
    with pytest.raises(RecipeError, match=r"^Cannot read the recipe .*: Is a directory\.$"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"^Cannot read the recipe 'a\\x00b': embedded null byte\.$"):
        load_recipe("a\0b")
    with pytest.raises(RecipeError, match=r"^A recipe is a path to a YAML file or a mapping, got int\.$"):
        load_recipe(3)
    assert issubclass(RecipeError, EpimerError)


TOO_LARGE = (
    "recipe.yaml:1: too large to be a recipe: more than 1,000,000 bytes or 10,000 values "
    "(an alias counts each time it is used), or nested without end."
)


def bomb(first: str, each: str) -> str:
    levels = "abcdefghij"
    lines = [f"a: &a {first}"] + [f"{b}: &{b} " + each.format(", ".join([f"*{a}"] * 10)) for a, b in pairwise(levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [
    bomb("[1]", "[{}]"),
    bomb("{}", "{{<<: [{}]}}"),
    "models: &m [*m]",
    "models: &m {<<: *m}",
    "[" * 400_000,
    "[" + "1," * 400_000 + "1]",
    "# " + "x" * 1_000_000,
    "é" * 500_001,
], ids=["aliases", "merges", "itself", "merges itself", "deep", "wide", "long", "cut character"])  # fmt: skip
def test_files_that_would_exhaust_the_machine(load, text):
    assert message(load, text) == TOO_LARGE


def test_a_bomb_as_a_key_is_not_even_looked_at(load):
    text = "? " + bomb("[1]", "[{}]").replace("\n", "\n  ") + "\n: 1\n"
    assert message(load, text) == "recipe.yaml:1: a key must be text."


def test_not_utf8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_bytes(b"merge_method: ties\nmodels: \xff\xfe\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert str(caught.value) == "recipe.yaml:2: not UTF-8 text; save the file as UTF-8."


TAIL = "models: [{model: a}]\nbase_model: b\n"


@pytest.mark.parametrize(("text", "expected"), [
    ("", "1: the recipe is empty; it needs at least merge_method and models."),
    ("# nothing\n", "1: the recipe is empty; it needs at least merge_method and models."),
    ("{}", "1: the recipe is empty; it needs at least merge_method and models."),
    ("- a\n", "1: a recipe must be a mapping with keys among merge_method, base_model, models, parameters, dtype, "
              "out_dtype, tokenizer_source, curvature, basis, rules, scale, eval, rounds, refine, output, "
              "lora_rank, slices, modules, tokenizer, chat_template, name, compat, non_finite. Got ['a'] instead."),
    ("merge_method: ties\nmodels: [a\ndtype: x\n", "3: not valid YAML: expected ',' or ']', but got ':'."),
    ("a: b: c\n", "1: not valid YAML: mapping values are not allowed here."),
    ("a: 1\n\tb: 2\n", "2: not valid YAML: found character '\\t' that cannot start any token."),
    ("a: 1\nb: \x01\n", "2: not valid YAML: special characters are not allowed."),
    ("a: 1\nrules:\n  *.bias: copy\n", "3: not valid YAML: expected alphabetic or numeric character, but found '.'. "
                                       "Quote text that begins with '*'."),
    ("rules: [[*bias, copy]]", "1: not valid YAML: found undefined alias 'bias'. Quote text that begins with '*'."),
    ("dtype: float16\nscale: 1\ndtype: float32\n", "3: the key 'dtype' is given twice, first in line 1."),
    ("models:\n- model: a\n  model: b\n", "3: the key 'model' is given twice, first in line 2."),
    ("dtype: !!python/object/apply:os.getcwd []\n", "1: the YAML tag 'python/object/apply:os.getcwd' is not allowed in "
                                                    "a recipe."),
    ("dtype: !mine x\n", "1: the YAML tag '!mine' is not allowed in a recipe."),
    ("dtype: !!set {a}\n", "1: the YAML tag 'set' is not allowed in a recipe."),
    ("a: 1\n? [b]\n: 1\n", "2: a key must be text."),
    ("scale: !!int x\n", "1: scale must be a YAML int. Got 'x' instead."),
    ("scale: !!bool x\n", "1: scale must be a YAML bool. Got 'x' instead."),
    ("scale: !!int ''\n", "1: scale must be a YAML int. Got '' instead."),
    ("a: 1\n<<: 3\n", "1: the YAML key '<<' takes a mapping or a list of mappings."),
])  # fmt: skip
def test_yaml_that_is_no_recipe(load, text, expected):
    assert message(load, text) == f"recipe.yaml:{expected}"


# -- what can be wrong in a recipe

KNOWN = "weight, scale, density, elect, seed, lambda, normalize"


@pytest.mark.parametrize(("text", "expected"), [
    # keys
    ("merge_metod: ties\n" + TAIL, "1: unknown key 'merge_metod'. Did you mean 'merge_method'? Known: merge_method, "
     "base_model, models, parameters, dtype, out_dtype, tokenizer_source, curvature, basis, rules, scale, eval, "
     "rounds, refine, output, lora_rank, slices, modules, tokenizer, chat_template, name, compat, non_finite."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  seed: 1\n  densty: 0.5\n",
     f"6: unknown key 'densty' in parameters of ties. Did you mean 'density'? Known: {KNOWN}."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  wieght: 1\n",
     "5: unknown key 'wieght' in models[0]. Known: model, parameters, curvature, prefix."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters:\n    wieght: 1\n",
     "6: unknown key 'wieght' in models[0].parameters. Did you mean 'weight'? Known: weight, density."),
    ("merge_method: ties\n" + TAIL + "scale:\n- filter: a\n  valu: 1\n",
     "6: unknown key 'valu' in scale[0]. Did you mean 'value'? Known: filter, value."),
    ("on: 1\n", "1: unknown key 'on'. Did you mean 'rounds'? Known: merge_method, base_model, models, parameters, "
     "dtype, out_dtype, tokenizer_source, curvature, basis, rules, scale, eval, rounds, refine, output, lora_rank, "
     "slices, modules, tokenizer, chat_template, name, compat, non_finite."),
    # mergekit's
    ("merge_method: ties\n" + TAIL + "parameters:\n  rescale: true\n", "5: this method never rescales; remove "
     "'rescale', or for ties add 'compat: mergekit'."),
    ("merge_method: dare_linear\n" + TAIL + "parameters:\n  rescale_norm: l1\n", "5: 'rescale_norm' is not in mergekit "
     "0.1.5 any more; remove it, or say 'rescale: true' or false."),
    ("merge_method: ties\n" + TAIL + "compat: fusionbench\n",
     "4: compat must be one of mergekit. Got 'fusionbench' instead."),
    ("merge_method: tsv\n" + TAIL + "compat: mergekit\n",
     "4: compat: mergekit has no meaning to tsv, which mergekit does not have; remove it."),
    ("merge_method: auto\n" + TAIL + "compat: mergekit\n",
     "4: compat is for one of mergekit's methods, not for 'auto'; remove it."),
    ("compat: mergekit\nmerge_method: karcher\n" + TAIL,
     "4: mergekit's karcher counts base_model as one more model: list it under models, or remove it."),
    # method
    (TAIL, f"1: the recipe has no 'merge_method'; {METHODS}."),
    ("merge_method: tis\n" + TAIL, f"1: There is no method 'tis'. Did you mean 'ties'? {METHODS}."),
    ("merge_method: 3\n" + TAIL,
     "1: merge_method must be text (in quotes if it looks like a number or a yes or no). Got 3 instead."),
    # models
    ("merge_method: linear\n", "1: models must be a list of models: each a name or a path, or a mapping with 'model'. "
     "Got None instead."),
    ("merge_method: linear\nmodels: a\n",
     "2: models must be a list of models: each a name or a path, or a mapping with 'model'. Got 'a' instead."),
    ("merge_method: linear\nmodels:\n- model: a\n- 7\n",
     "4: models[1] must be a mapping with keys among model, parameters, curvature, prefix. Got 7 instead."),
    ("merge_method: linear\nmodels:\n- model: a\n- curvature: b\n", "4: models[1] has no 'model'."),
    ("merge_method: linear\nmodels:\n- model: 7\n",
     "3: models[0].model must be text (in quotes if it looks like a number or a yes or no). Got 7 instead."),
    ("merge_method: linear\nmodels:\n- model: ' '\n",
     "3: models[0].model must be text (in quotes if it looks like a number or a yes or no). Got ' ' instead."),
    ("merge_method: linear\nmodels:\n- model: a\n  parameters: []\n",
     "4: models[0].parameters must be a mapping with keys among weight. Got [] instead."),
    ("merge_method: ties\nmodels: [{model: a}]\n",
     "1: ties needs the base model that the others were fine-tuned from; add 'base_model'."),
    ("merge_method: ties\nbase_model: yes\nmodels: [{model: a}]\n",
     "2: base_model must be text (in quotes if it looks like a number or a yes or no). Got True instead."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n- model: b\n  curvature: f\n",
     "5: models[1] is the base model, which ties does not merge; remove it from 'models'."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: b\n",
     "3: models lists only the base model; add the models to merge."),
    ("merge_method: linear\nmodels:\n- model: a\n- model: b\n  parameters: {weight: 1}\n",
     "3: models[0] has no weight, others have one; give every model a weight, or one for all in the recipe's "
     "'parameters'."),
    # parameters in another place
    ("merge_method: ties\n" + TAIL + "lambda: 1\n", "4: 'lambda' is a parameter; move it to 'parameters'."),
    ("merge_method: ties\n" + TAIL + "density: 0.3\n", "4: 'density' is a parameter; move it to 'parameters'."),
    ("merge_method: linear\nmodels:\n- model: a\n  weight: 1\n",
     "4: 'weight' is a parameter; move it to 'models[0].parameters'."),
    ("merge_method: linear\nmodels:\n- model: a\n  prefix: model.\n",
     "4: models[0].prefix must be a mapping of the model's prefix to the base's, as {base_model.: ''}. "
     "Got 'model.' instead."),
    # what holds for all models
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters: {elect: mass}\n",
     "5: 'elect' holds for all models; move it to the recipe's 'parameters'."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters: {lambda: 1}\n",
     "5: 'lambda' holds for all models; move it to the recipe's 'parameters'."),
    ("merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters:\n    normalize: true\n",
     "6: 'normalize' holds for all models; move it to the recipe's 'parameters'."),
    # parameters
    ("merge_method: ties\n" + TAIL + "parameters: 3\n",
     f"4: parameters must be a mapping with keys among {KNOWN}. Got 3 instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {rules: []}\n",
     "4: 'rules' is a key of the recipe itself; move it out of 'parameters'."),
    ("merge_method: greedy_soup\n" + TAIL + "parameters: {evaluate: f}\n",
     "4: 'evaluate' of greedy_soup can be given only from Python, not in a recipe."),
    ("merge_method: gradient_matching\n" + TAIL + "parameters: {base_curvature: f}\n",
     "4: 'base_curvature' of gradient_matching can be given only from Python, not in a recipe."),
    ("merge_method: gradient_matching\n" + TAIL + "parameters: {samples: [1, 2]}\n",
     "4: parameters.samples must be a list with one number per model (1). Got [1, 2] instead."),
    ("merge_method: gradient_matching\n" + TAIL + "parameters: {samples: 3}\n",
     "4: The 'samples' parameter of gradient_matching must be a list of numbers, one per model, none negative or None. "
     "Got 3 instead."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  scale: 1\n  lambda: 1\n",
     "6: scale is given twice: scale, parameters.scale and lambda are one; keep one."),
    ("scale: 1\nmerge_method: ties\n" + TAIL + "parameters:\n  lambda: 1\n",
     "1: scale is given twice: scale, parameters.scale and lambda are one; keep one."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  normalize: trace\n",
     "5: parameters.normalize must be true or false: whether weights are scaled to sum 1. Got 'trace' instead."),
    ("merge_method: fisher\n" + TAIL + "parameters:\n  normalize: trac\n",
     "5: The 'normalize' parameter of fisher must be one of 'trace', 'common', 'none'. Got 'trac' instead. "
     "Did you mean 'trace'?"),
    ("merge_method: epimer\n" + TAIL + "parameters: {basis: tagd}\n",
     "4: The 'basis' parameter of epimer must be one of 'tagged', 'tensor', 'full'. Got 'tagd' instead. "
     "Did you mean 'tagged'?"),
    ("merge_method: epimer\n" + TAIL + "parameters: {basis: {w: full}}\n",
     "4: The 'basis' parameter of epimer must be one of 'tagged', 'tensor', 'full'. Got {'w': 'full'} instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {elect: [mass, frequncy]}\n",
     "4: parameters.elect[1]: The 'elect' parameter of ties must be one of 'mass', 'frequency'. "
     "Got 'frequncy' instead. Did you mean 'frequency'?"),
    ("merge_method: ties\n" + TAIL + "parameters: {elect: [mass, [frequency]]}\n",
     "4: parameters.elect[1]: The 'elect' parameter of ties must be one of 'mass', 'frequency'. "
     "Got ['frequency'] instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {elect: []}\n",
     "4: parameters.elect must be one of 'mass', 'frequency', or a list of such over the layers, "
     "or a list of {filter: ..., value: ...}. Got [] instead."),
    ("merge_method: ties\n" + TAIL + "chat_template: vicuna\n",
     "4: chat_template must be auto, alpaca, chatml, exaone, llama3, mistral, or the text of a Jinja template: "
     "paste that of a model's chat_template.jinja or tokenizer_config.json. Got 'vicuna' instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {seed: [1, 2]}\n",
     "4: parameters.seed must be one integer for all tensors. Got [1, 2] instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {seed: 1.5}\n",
     "4: The 'seed' parameter of ties must be an integer at least 0. Got 1.5 instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {density: no}\n", "4: The 'density' parameter of ties must be a "
     "finite number greater than 0 and at most 1. Got False instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {density: null}\n", "4: The 'density' parameter of ties must be a "
     "finite number greater than 0 and at most 1. Got None instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {scale: .inf}\n",
     "4: The 'scale' parameter of ties must be a finite number. Got inf instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {scale: nan}\n",
     "4: The 'scale' parameter of ties must be a finite number. Got nan instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {weight: -1}\n",
     "4: The 'weight' parameter of ties must be a finite number at least 0. Got -1 instead."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  density:\n  - 1\n  - half\n",
     "7: parameters.density[1]: The 'density' parameter of ties must be a finite number greater than 0 and at most 1. "
     "Got 'half' instead."),
    ("merge_method: ties\n" + TAIL + "parameters: {density: []}\n",
     "4: parameters.density must be a finite number greater than 0 and at most 1, or a list of such over the layers, "
     "or a list of {filter: ..., value: ...}. Got [] instead."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  scale:\n  - 1\n  - {value: 1}\n", "7: parameters.scale[1]: The "
     "'scale' parameter of ties must be a finite number. Got {'value': 1} instead."),
    ("merge_method: ties\n" + TAIL + "parameters:\n  scale:\n  - filter: a\n    value:\n    - 1\n    - x\n",
     "9: parameters.scale[0].value[1]: The 'scale' parameter of ties must be a finite number. Got 'x' instead."),
    ("merge_method: ties\n" + TAIL + "scale:\n- filter: a\n", "5: scale[0] has no 'value'."),
    ("merge_method: ties\n" + TAIL + "scale:\n- filter: 3\n  value: 1\n", "5: scale[0].filter must be text (in quotes "
     "if it looks like a number or a yes or no). Got 3 instead."),
    ("merge_method: ties\n" + TAIL + "scale: {filter: a, value: 1}\n",
     "4: The 'scale' parameter of ties must be a finite number. Got {'filter': 'a', 'value': 1} instead."),
    # the rest
    ("merge_method: ties\n" + TAIL + "dtype: torch.float32\n",
     "4: dtype must be one of float64, float32, float16, bfloat16. Got 'torch.float32' instead."),
    ("merge_method: ties\n" + TAIL + "out_dtype: [int8]\n",
     "4: out_dtype must be one of float64, float32, float16, bfloat16. Got ['int8'] instead."),
    ("merge_method: ties\n" + TAIL + "tokenizer_source: 1\n", "4: tokenizer_source must be text (in quotes if it looks "
     "like a number or a yes or no). Got 1 instead."),
    ("merge_method: ties\n" + TAIL + "rules: copy\n", "4: rules must be a list of [pattern, rule] pairs, or a mapping "
     "of patterns to rules. Got 'copy' instead."),
    ("merge_method: ties\n" + TAIL + "rules:\n- ['*.bias', copy]\n- [x, coppy]\n", "6: The 'rules' parameter of ties "
     "must be a list of (name pattern, rule) pairs with rules matrix, average, fisher, copy, skip. "
     "Got ['x', 'coppy'] instead. Did you mean 'copy'?"),
    ("merge_method: ties\n" + TAIL + "rules:\n  '*.bias': copy\n  x: 3\n", "6: The 'rules' parameter of ties must be a "
     "list of (name pattern, rule) pairs with rules matrix, average, fisher, copy, skip. Got ['x', 3] instead."),
    ("merge_method: epimer\n" + TAIL + "curvature: [a, b]\n",
     "4: curvature must be a list with one path per model (1), in their order. Got ['a', 'b'] instead."),
    ("merge_method: epimer\n" + TAIL + "curvature: a\n",
     "4: curvature must be a list with one path per model (1), in their order. Got 'a' instead."),
    ("merge_method: epimer\n" + TAIL + "curvature:\n- 1\n", "5: curvature[0] must be text (in quotes if it looks like "
     "a number or a yes or no). Got 1 instead."),
    ("merge_method: epimer\nbase_model: b\nmodels: [{model: a, curvature: f}]\ncurvature: [f]\n",
     "4: curvature is given here and in models[0]; remove one of the two."),
])  # fmt: skip
def test_one_line_for_every_mistake(load, text, expected):
    assert message(load, text) == f"recipe.yaml:{expected}"


def test_a_mapping_has_no_lines_but_the_same_words():
    assert refused(parameters={"densty": 1}) == (
        f"recipe: unknown key 'densty' in parameters of ties. Did you mean 'density'? Known: {KNOWN}."
    )
    assert refused(models=["a", {"model": "b", "parameters": {"density": 2}}]) == (
        "recipe: models[1].parameters.density: The 'density' parameter of ties must be a finite number greater than 0 "
        "and at most 1. Got 2 instead."
    )
    with pytest.raises(RecipeError, match=r"^recipe: unknown key '3'\. Known: "):
        load_recipe({3: 1})


@pytest.mark.parametrize("method", epimer.list_methods())
def test_every_parameter_of_every_method_is_read_or_refused(method):
    """A new kind of parameter must be thought of here: its default either reads back or is named as Python's."""
    for parameter in epimer.describe_method(method).parameters:
        given = {parameter.name: parameter.default}
        if parameter.kind in ("callable", "mapping"):
            assert "only from Python" in refused(method, parameters=given)
        elif parameter.kind == "rules":
            assert "move it out of 'parameters'" in refused(method, parameters=given)
        elif (parameter.name, parameter.kind) == ("normalize", "boolean"):
            assert recipe(method, parameters=given).normalize_weights is parameter.default
        else:
            assert recipe(method, parameters=given).settings("x", 0.3).parameters == given


def test_importing_the_module_does_not_import_torch():
    code = "import sys, epimer.recipe.load; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WORDS = st.sampled_from(
    ["a", "base", "mlp", "*", "mass", "trace", "tagged", "copy", "0.5", "1e-3", "float16", "auto", "", "\n"]
)
SCALARS = st.none() | st.booleans() | st.integers(-1, 40) | st.floats() | WORDS
KEYS = [*"abc", "model", "curvature", "parameters", "filter", "value", "weight", "density", "scale", "lambda", "elect",
        "normalize", "basis", "rank", "samples", "seed", "rules", 3]  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)
ANY = st.fixed_dictionaries(
    {
        "merge_method": st.sampled_from(epimer.list_methods()) | SCALARS,
        "models": st.lists(st.fixed_dictionaries({"model": WORDS}, optional={"parameters": VALUES}), max_size=3),
    },
    optional=dict.fromkeys(("scale", "rules", "dtype", "curvature", "tokenizer_source", "eval"), VALUES)
    | {"base_model": WORDS, "parameters": st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2) | VALUES},
)


@settings(max_examples=150, deadline=None)
@given(ANY)
def test_whatever_is_given_is_a_recipe_that_reads_back_or_one_line(data):
    found, refusal = None, ""
    try:
        found = load_recipe(data)
    except RecipeError as error:
        refusal = str(error)
    if found is None:
        assert refusal.startswith("recipe: ")
        assert "\n" not in refusal
    else:
        assert load_recipe(found.to_dict()) == found
        assert load_recipe(yaml.safe_load(found.to_yaml())) == found


def test_a_file_of_mergekits_is_told_once_how_its_numbers_would_differ():
    (note,) = recipe("ties", parameters={"density": 0.5}).notes
    assert note == (
        "ties is the published form; `compat: mergekit` gives ties as mergekit 0.1.5 has it: every tensor is trimmed "
        "by itself, all is kept by default (density 1), an even vote counts as +."
    )
    assert recipe("ties", rules={"*.bias": "copy"}).notes == ()  # no file of mergekit's
    assert recipe("ties", compat="mergekit").notes == ()
    assert recipe("breadcrumbs", parameters={"density": 0.5}).notes == ()  # only the default differs
    assert len(recipe("breadcrumbs").notes) == 1
    assert recipe("task_arithmetic").notes == recipe("ram").notes == ()
    assert "gives only config and names; list it under models if it is one." in recipe("karcher").notes[0]


def test_compat_takes_mergekits_form_of_a_method_with_its_own_parameters():
    found = recipe("ties", compat="mergekit", parameters={"rescale": True, "density": [0.2, 0.9], "normalize": 0.0})
    assert (found.merge_method, found.normalize_weights) == ("mergekit_ties", False)
    assert found.settings("x", 0.5).parameters == {"rescale": True, "density": pytest.approx(0.55)}
    assert load_recipe(found.to_dict()) == found
    assert recipe("linear", base=None, compat="mergekit").merge_method == "average"
    given = {"merge_method": "dare_linear", "base_model": "b", "models": [{"model": "a"}]}
    assert load_recipe(given, "mergekit").merge_method == "mergekit_dare"
    assert load_recipe(given | {"compat": "mergekit"}) == load_recipe(given, "mergekit")


def test_what_changes_no_number_is_accepted_and_noted():
    int8 = "int8_mask has no effect here: masks are no smaller or larger for it."
    assert recipe("task_arithmetic", parameters={"int8_mask": True}).notes == (int8,)
    models = [{"model": "a", "parameters": {"int8_mask": 1}}, {"model": "b"}]
    assert recipe("task_arithmetic", models=models).notes == (int8,)
    assert recipe("ties", parameters={"rescale": False}).settings("x", 0).parameters == {}
    listed = [{"model": "base", "parameters": {"weight": 1, "density": 0.5}}, {"model": "a"}, {"model": "b"}]
    found = recipe("dare", models=listed, compat="mergekit")
    assert found.notes == ("models[0] is the base model: its own density, weight changes nothing, as in mergekit.",)
    assert [entry.model for entry in found.models] == ["a", "b"]
    assert [entry.model for entry in recipe("nuslerp", models=["base", "a", "b"]).models] == ["a", "b"]


def test_parameters_of_a_base_that_slices_list_are_noted():
    sources = [
        {"model": "base", "layer_range": [0, 2], "parameters": {"weight": 1, "density": 0.5}},
        {"model": "a", "layer_range": [0, 2], "parameters": {"weight": 1}},
    ]
    given = {"merge_method": "ties", "base_model": "base", "compat": "mergekit"}
    found = load_recipe(given | {"slices": [{"sources": sources}]})
    why = "is the base model: its own density, weight changes nothing, as in mergekit."
    assert found.notes == (f"slices[0].sources[0] {why}",)
    modules = {"decoder": {"models": [{k: v for k, v in one.items() if k != "layer_range"} for one in sources]}}
    assert load_recipe(given | {"modules": modules}).notes == (f"modules.decoder.models[0] {why}",)
    sources[0].pop("parameters")
    assert load_recipe(given | {"slices": [{"sources": sources}]}).notes == ()


def test_a_models_own_gamma_and_epsilon_and_the_only_models_parameters():
    models = [{"model": "a", "parameters": {"gamma": 0.2, "density": 0.3}}, {"model": "b"}]
    found = recipe("breadcrumbs", models=models, parameters={"density": 0.5}).settings("x", 0).parameters
    assert found == {"density": [0.3, 0.5], "gamma": [0.2, 0.01]}
    scale = [{"filter": "mlp", "value": 0}, {"value": 0.5}]
    alone = [{"model": "a", "parameters": {"scale": scale}}]
    found = recipe("passthrough", models=alone, base=None)
    assert [found.settings(name, 0).parameters for name in ("mlp.w", "w")] == [{"scale": 0.0}, {"scale": 0.5}]
    assert found.models[0].parameters == {}


MODELS = "models: [{model: a}, {model: b}]"


@pytest.mark.parametrize(("text", "expected"), [
    (f"merge_method: linear\n{MODELS}\nparameters: {{scale: 0x{'f' * 4000}}}\n",
     "parameters.scale must be an integer of at most 300 digits."),
    (f"merge_method: linear\n{MODELS}\nparameters: {{scale: {'7' * 4500}}}\n", "parameters.scale must be a YAML int."),
    (f"merge_method: linear\n{MODELS}\nparameters: {{scale: {'7' * 400}}}\n",
     "parameters.scale must be an integer of at most 300 digits."),
    ("merge_method: linear\nmodules: 5\n", "modules must be a mapping of modules to their slices or models. Got 5"),
    ("merge_method: linear\nmodules: [{a: 1}]\n", "modules must be a mapping of modules to their slices or models."),
    (f"merge_method: linear\n{MODELS}\ntokenizer: {{tokens: 3}}\n", "tokenizer.tokens must be a mapping of tokens to"),
    (f"merge_method: linear\n{MODELS}\ntokenizer: {{tokens: [{{a: 1}}]}}\n", "tokenizer.tokens must be a mapping of"),
], ids=["hexadecimal", "digits", "no float", "modules", "list of modules", "tokens", "list of tokens"])  # fmt: skip
def test_values_that_would_end_in_a_traceback(load, text, expected):
    assert expected in message(load, text)


@pytest.mark.parametrize("number", [10**400, -(10**5000)], ids=["400 digits", "5000 digits"])
def test_an_integer_without_end_in_a_mapping(number):
    with pytest.raises(RecipeError, match="an integer must have at most 300 digits"):
        load_recipe({"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": number}}]})
