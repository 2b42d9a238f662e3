"""mergekit's numbers by a key of the recipe, by an option of the command and by an argument in Python: the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from commands import run
from epimer.errors import EpimerWarning

RECIPE = "merge_method: ties\nbase_model: m0\nmodels: [{model: m1}, {model: m2}]\nparameters: {density: 0.3}\n"


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = {"wide": torch.randn(40, 30), "narrow": torch.randn(50) / 100}
    states = [base, *({name: W + 0.1 * W.std() * torch.randn_like(W) for name, W in base.items()} for _ in range(2))]
    for t, state in enumerate(states):
        (tmp_path / f"m{t}").mkdir()
        save_file(state, tmp_path / f"m{t}" / "model.safetensors")
        (tmp_path / f"m{t}" / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "compat.yaml").write_text(RECIPE + "compat: mergekit\n")
    return states


def test_key_option_and_argument_give_the_same_numbers(models):
    expected = epimer.merge_state_dicts(models[0], models[1:], "ties", density=0.3, compat="mergekit")
    epimer.merge("compat.yaml", "key", progress=False)
    epimer.merge("recipe.yaml", "argument", progress=False, compat="mergekit")
    assert run("merge", "recipe.yaml", "option", "--compat", "mergekit").code == 0
    for out in ("key", "argument", "option"):
        merged = load_file(f"{out}/model.safetensors")
        assert all(torch.equal(merged[name], expected[name]) for name in expected)
        record = json.loads(Path(out, "epimer.json").read_text())
        assert (record["method"], record["notes"]) == ("mergekit_ties", [])


def test_without_it_one_line_tells_the_difference_on_the_terminal_and_in_the_record(models):
    with pytest.warns(EpimerWarning, match="`compat: mergekit` gives ties as mergekit") as caught:
        record = epimer.merge("recipe.yaml", "python", progress=False)
    assert len([one for one in caught if "compat" in str(one.message)]) == 1
    (note,) = record.notes
    done = run("merge", "recipe.yaml", "terminal")
    assert " ".join(done.out.split()).count(note) == 1
    assert json.loads(Path("terminal/epimer.json").read_text())["notes"] == [note]
    expected = epimer.merge_state_dicts(models[0], models[1:], "ties", density=0.3)
    merged = load_file("terminal/model.safetensors")
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.parametrize("method", ["sce", "karcher", "ties"])
def test_lambda_has_the_effect_that_mergekit_gives_it(models, tmp_path, method):
    """mergekit multiplies the sums of task arithmetic's family by lambda, and ignores it in every other method."""
    text = f"merge_method: {method}\nbase_model: m0\nmodels: [{{model: m1}}, {{model: m2}}]\ncompat: mergekit\n"
    if method == "karcher":
        text = text.replace("[", "[{model: m0}, ")
    (tmp_path / "plain.yaml").write_text(text)
    (tmp_path / "scaled.yaml").write_text(text + "parameters: {lambda: 0.5}\n")
    epimer.merge("plain.yaml", "plain", progress=False)
    epimer.merge("scaled.yaml", "scaled", progress=False)
    plain, scaled = (load_file(f"{out}/model.safetensors") for out in ("plain", "scaled"))
    notes = json.loads(Path("scaled", "epimer.json").read_text())["notes"]
    if method == "ties":
        assert all(torch.allclose(2 * (scaled[k] - W), plain[k] - W, atol=1e-5) for k, W in models[0].items())
        assert notes == []
    else:
        assert all(torch.equal(scaled[k], W) for k, W in plain.items())
        assert notes == ["lambda has no effect: mergekit ignores it in this method; scale has its effect."]


@pytest.mark.parametrize(
    ("text", "method", "count", "given"),
    [
        ("models: [{model: m0}, {model: m1}]\nparameters: {t: 0.3}", "slerp", 1, {"t": 0.3}),
        ("models: [{model: m1}, {model: m2}]\nparameters: {lambda: 0.5, max_iter: 3}", "karcher", 2,
         {"scale": 0.5, "max_iter": 3}),
        ("models: [{model: m1}, {model: m2}]\nparameters: {normalize: true, density: 0.6, gamma: 0.1}",
         "breadcrumbs_ties", 2, {"normalize": True, "density": 0.6, "gamma": 0.1}),
        ("models: [{model: m1, parameters: {epsilon: 0.1}}, {model: m2, parameters: {density: 0.7}}]", "della", 2,
         {"epsilon": [0.1, 0.15], "density": [0.5, 0.7]}),
    ],
)  # fmt: skip
def test_a_recipe_and_python_agree(models, tmp_path, text, method, count, given):
    (tmp_path / "other.yaml").write_text(f"merge_method: {method}\nbase_model: m0\n{text}\n")
    epimer.merge("other.yaml", "out", progress=False)
    expected = epimer.merge_state_dicts(models[0], models[1 : 1 + count], method, **given)
    merged = load_file("out/model.safetensors")
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
