"""Several recipes in one file: each a merge, by whose name the others can use it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.errors import RecipeError
from epimer.recipe.documents import load_recipes, merge_steps
from epimer.recipe.load import load_recipe

FILE = """
merge_method: linear
models:
  - {model: first, parameters: {weight: 0.25}}
  - {model: second, parameters: {weight: 0.75}}
dtype: float64
---
name: second
merge_method: task_arithmetic
base_model: a
models: [{model: first, parameters: {weight: 0.5}}]
dtype: float64
---
name: first
merge_method: linear
models: [{model: a}, {model: b}]
dtype: float64
"""


@pytest.fixture
def models(tmp_path):
    states = {}
    for seed, name in enumerate("ab"):
        draw = torch.Generator().manual_seed(seed)
        states[name] = {"l.0.weight": torch.randn(4, 3, generator=draw, dtype=torch.float64)}
        (tmp_path / name).mkdir()
        save_file(states[name], tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "x"}))
    return {name: state["l.0.weight"] for name, state in states.items()}


def expected(models):
    first = (models["a"] + models["b"]) / 2
    second = models["a"] + 0.5 * (first - models["a"])
    return {"first": first, "second": second, "": 0.25 * first + 0.75 * second}


def write(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text.lstrip("\n"))
    return tmp_path / "recipe.yaml"


def test_each_merge_can_be_used_by_the_others(models, tmp_path):
    record = epimer.merge(write(tmp_path, FILE), tmp_path / "out", progress=False)
    places = {"": tmp_path / "out", "first": tmp_path / "out.parts/first", "second": tmp_path / "out.parts/second"}
    for name, W in expected(models).items():
        found = load_file(places[name] / "model.safetensors")["l.0.weight"]
        torch.testing.assert_close(found, W, rtol=1e-14, atol=1e-14)
    assert str(tmp_path) not in (tmp_path / "out" / "epimer.json").read_text()
    assert "model: second" in record.recipe


def test_where_all_have_names_the_output_is_a_folder_of_folders(models, tmp_path):
    epimer.merge(write(tmp_path, FILE.split("---", 1)[1]), tmp_path / "out", progress=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")) == [
        "first", "second",
    ]  # fmt: skip


def test_named_merges_go_where_they_are_told_to(models, tmp_path):
    steps = merge_steps(write(tmp_path, FILE), "out", "there")
    assert [step.out for step in steps] == ["there/first", "there/second", "out"]
    assert [step.reads for step in steps] == [[], ["there/first"], ["there/first", "there/second"]]


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("name: first", "name: second", "13: two recipes of the file have the name 'second'; rename one."),
    ("name: first\n", "", "13: two recipes of the file have no 'name'; only the one that goes to OUT can lack it."),
    ("{model: b}", "{model: second}",
     "1: recipes build on each other in a circle: second on first on second; break it."),
    ("name: first", "name: ../first",
     "13: name must be the name of a folder: letters and digits, then also spaces and . _ -. Got '../first' instead."),
    ("weight: 0.5", "wieght: 0.5",
     "10: unknown key 'wieght' in models[0].parameters. Did you mean 'weight'? Known: weight."),
    ("name: first\n", "name: first\nname: x\n", "14: the key 'name' is given twice, first in line 13."),
])  # fmt: skip
def test_errors_have_the_line_in_the_file(tmp_path, monkeypatch, old, new, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, FILE.replace(old, new))
    with pytest.raises(RecipeError) as error:
        load_recipes("recipe.yaml")
    assert str(error.value) == f"recipe.yaml:{expected}"


def test_what_takes_one_recipe_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, FILE)
    with pytest.raises(RecipeError) as error:
        load_recipe("recipe.yaml")
    assert str(error.value) == (
        "recipe.yaml:7: the file holds 3 recipes, which only `epimer merge` takes; expected one."
    )


def test_empty_documents_are_no_recipes(tmp_path):
    assert len(load_recipes(write(tmp_path, "---\n" + FILE.split("---")[2] + "---\n# nothing\n"))) == 1
