"""Models whose names have another prefix than the base's are merged once the recipe says which."""

import json
import re

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from commands import assert_done, assert_refused, run

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.norm.weight")
HEAD = "lm_head.weight"


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 5 if "mlp" in name else 4, generator=generator) for name in (*NAMES, HEAD)}


def write_recipe(**keys):
    models = [{"model": "one"}, {"model": "two", **keys}]
    recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": models}
    with open("recipe.yaml", "w") as file:
        yaml.safe_dump(recipe, file)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "one", "two")):
        (tmp_path / name).mkdir()
        state = {
            key: W + 0.1 * seed * V for (key, W), V in zip(weights(0).items(), weights(seed).values(), strict=True)
        }
        save_file(state, tmp_path / name / "model.safetensors")
    write_recipe()
    assert_done(run("merge", "recipe.yaml", "expected", "-q"))
    return tmp_path


PREFIXES = {
    "replaced": ("model.", "model.language_model."),
    "added": ("", "base_model.model."),
    "removed": ("model.", ""),
}


@pytest.mark.parametrize(("old", "new"), PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("side", ["model", "base and others"])
def test_the_error_says_which_prefix_to_give_and_with_it_the_merge_is_the_same(here, side, old, new):
    def rename(name):
        return new + name.removeprefix(old) if name.startswith(old) else name

    for folder in ["two"] if side == "model" else ["base", "one"]:
        file = here / folder / "model.safetensors"
        save_file({rename(name): W for name, W in load_file(file).items()}, file)
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "models[1] (two)", "in place of")
    prefix = yaml.safe_load(re.search(r"`prefix: (.*?)`", ran.err)[1])
    found, base = (new, old) if side == "model" else (old, new)
    assert prefix[found] == base
    assert prefix.keys() <= {found, "lm_head."}
    write_recipe(prefix=prefix)
    assert_done(run("merge", "recipe.yaml", "out", "-q"))
    names = {name: name if side == "model" else rename(name) for name in (*NAMES, HEAD)}
    merged, expected = load_file(here / "out/model.safetensors"), load_file(here / "expected/model.safetensors")
    assert {*merged} == {*names.values()}
    assert all(torch.equal(merged[names[name]], expected[name]) for name in expected)
    assert "prefix" in yaml.safe_load(json.loads((here / "out/epimer.json").read_text())["recipe"])["models"][1]
    assert run("verify", "out", "-q").code == 0


def test_a_prefix_that_no_name_has_is_refused(here):
    write_recipe(prefix={"transformer.": "model."})
    assert_refused(run("merge", "recipe.yaml", "out"), "two has no tensor whose name begins with 'transformer.'")


def test_a_prefix_that_makes_two_names_one_is_refused(here):
    write_recipe(prefix={"model.layers.0.": "model.layers.1."})
    assert_refused(run("merge", "recipe.yaml", "out"), "several tensors", "'model.layers.1.mlp.weight'")


def test_models_of_other_layers_are_not_answered_with_a_prefix(here):
    save_file({f"encoder.{i}.attention.weight": torch.ones(3, 2) for i in range(4)}, here / "two/model.safetensors")
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "models[1] (two) has none of base's tensors", "is it a model of this ancestor?")
