"""NaN and Inf: in a model they are refused, or that tensor is left as the base has it; in an output they never are."""

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

import epimer
from commands import assert_refused, run
from models import make_base, make_models

NAN, INF = float("nan"), float("inf")


def save(folder: str, state) -> None:
    Path(folder).mkdir(exist_ok=True)
    safetensors.torch.save_file(state, Path(folder) / "model.safetensors")


def change(folder: str, edit) -> None:
    state = safetensors.torch.load_file(Path(folder) / "model.safetensors")
    edit(state)
    save(folder, state)


def recipe(method: str = "task_arithmetic", **more) -> dict:
    models = [{"model": "one"}, {"model": "two"}]
    written = {"merge_method": method, "base_model": "base", "models": models, **more}
    Path("recipe.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    return written


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a base and two models; the second has two NaN in a matrix and an Inf in a bias."""
    monkeypatch.chdir(tmp_path)
    base = make_base()
    for name, state in zip(("base", "one", "two"), (base, *make_models(base, 2)), strict=True):
        save(name, state)
    change("two", lambda state: state["block.1.weight"][3, 4:6].fill_(NAN))
    change("two", lambda state: state["block.0.bias"][7].fill_(INF))
    recipe()
    return tmp_path


WHERE = {
    "block.1.weight": "models[1] (two)['block.1.weight'] holds NaN or Inf in 2 of 540 entries, the first at [3, 4]",
    "block.0.bias": "models[1] (two)['block.0.bias'] holds NaN or Inf in 1 of 24 entries, the first at [7]",
}


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv", "epimer_free"])
def test_an_error_names_model_tensor_count_and_first_position(here, method):
    recipe(method)
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "repair or leave out that model, or say `non_finite: skip-tensor`")
    assert any(text in ran.err for text in WHERE.values())
    assert ran.code == 2
    assert not Path("out").exists()


def test_the_position_is_the_tensors_own_where_it_is_read_in_parts(here):
    for name in ("base", "one", "two"):
        save(name, {"wide": torch.zeros(3000, 2000)})
    change("two", lambda state: state["wide"][2999, 1998:].fill_(INF))
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "['wide'] holds NaN or Inf in 2 of 6000000 entries, the first at [2999, 1998]")


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "nan", "tsv", "epimer_free"])
@pytest.mark.parametrize("given", ["recipe", "flag", "python"])
def test_tensors_are_left_as_the_base_has_them_by_choice(here, method, given):
    written = recipe(method, **({"non_finite": "skip-tensor"} if given == "recipe" else {}))
    if given == "python":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            epimer.merge(written, "out", progress=False, non_finite="skip-tensor")
        printed = " ".join(str(one.message) for one in caught)
    else:
        ran = run("merge", "recipe.yaml", "out", *(["--non-finite", "skip-tensor"] if given == "flag" else []))
        assert ran.code == 0, ran.err
        printed = " ".join(ran.out.split())
    assert f"2 tensors are left as the base has them: {WHERE['block.0.bias']}" in printed.replace("\n", " ")
    merged, base = (safetensors.torch.load_file(f"{name}/model.safetensors") for name in ("out", "base"))
    assert all(bool(W.isfinite().all()) for W in merged.values())
    assert all(torch.equal(merged[name], base[name]) for name in WHERE)
    assert not any(torch.equal(merged[name], base[name]) for name in ("block.0.weight", "conv.weight"))
    record = json.loads(Path("out/epimer.json").read_text(encoding="utf-8"))
    assert {name: record["tensors"][name]["note"] for name in WHERE} == WHERE
    told = {name for name, one in record["tensors"].items() if one["status"] == "non-finite"}
    assert told == {*WHERE}
    assert yaml.safe_load(record["recipe"])["non_finite"] == "skip-tensor"
    assert record["untouched"] > 0


def test_the_other_tensors_are_merged_as_without_the_damage(here):
    recipe("tsv", non_finite="skip-tensor")
    assert run("merge", "recipe.yaml", "out").code == 0
    change("two", lambda state: state.update(make_models(make_base(), 2)[1]))
    recipe("tsv")
    assert run("merge", "recipe.yaml", "whole").code == 0
    merged, whole = (safetensors.torch.load_file(f"{name}/model.safetensors") for name in ("out", "whole"))
    assert {name for name in whole if not torch.equal(merged[name], whole[name])} == {*WHERE}


def test_a_dry_run_tells_what_would_be_left(here):
    recipe(non_finite="skip-tensor")
    ran = run("merge", "recipe.yaml", "--dry-run", "--json")
    plan = json.loads(ran.out)
    assert {row["name"] for row in plan["tensors"] if row["rule"] == "copy"} == {*WHERE, "steps", "empty"}
    assert any("left as the base has them" in note for note in plan["notes"])


def test_the_report_shows_it(here):
    recipe(non_finite="skip-tensor")
    run("merge", "recipe.yaml", "out")
    assert run("report", "out", "-o", "page.html").code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "non-finite" in page
    assert "holds NaN or Inf in 2 of 540 entries" in page


@pytest.mark.parametrize("kept", ["nothing", "its tensor"])
def test_a_base_that_is_not_finite_itself_is_an_error_still(here, kept):
    change("base", lambda state: state["conv.weight"][0, 0, 0].fill_(INF))
    recipe(non_finite="skip-tensor", **({} if kept == "nothing" else {"rules": {"conv.*": "copy"}}))
    ran = run("merge", "recipe.yaml", "out")
    if kept == "nothing":
        assert_refused(ran, "base['conv.weight'] holds NaN or Inf in 2 of 48 entries, the first at [0, 0, 0, 0]")
        assert "repair the base" in ran.err
    else:  # Inf can be meant, as in a mask: who copies it gets it, and the record tells
        record = json.loads(Path("out/epimer.json").read_text(encoding="utf-8"))["tensors"]["conv.weight"]
        assert (record["status"], record["rule"]) == ("non-finite", "copy")


def test_nan_is_not_even_copied(here):
    change("base", lambda state: state["conv.weight"][0, 0, 0].fill_(NAN))
    recipe(non_finite="skip-tensor", rules={"conv.*": "copy"})
    ran = run("merge", "recipe.yaml", "out")
    assert_refused(ran, "base['conv.weight'] holds NaN or Inf in 2 of 48 entries", "give it the rule 'skip'")
    assert not Path("out").exists()


def test_without_a_base_there_is_nothing_to_keep():
    models = [{"a.weight": torch.ones(4, 3)}, {"a.weight": torch.full((4, 3), NAN)}]
    with pytest.raises(epimer.TensorError, match=r"models\[1\]\['a.weight'\] holds NaN .* there is no base"):
        epimer.merge_state_dicts(None, models, "average", non_finite="skip-tensor")


def test_state_dicts_take_the_same_choice():
    base = {"a.weight": torch.ones(4, 3), "b.weight": torch.ones(4, 3)}
    models = [{name: 2 * W for name, W in base.items()}, {name: 3 * W for name, W in base.items()}]
    models[1]["a.weight"][1, 2] = NAN
    with pytest.raises(epimer.TensorError, match=r"models\[1\].* 1 of 12 entries, the first at \[1, 2\]"):
        epimer.merge_state_dicts(base, models, "average")
    with pytest.warns(epimer.EpimerWarning, match="1 tensors are left as the base has them"):
        merged = epimer.merge_state_dicts(base, models, "average", non_finite="skip-tensor")
    assert torch.equal(merged["a.weight"], base["a.weight"])
    assert torch.equal(merged["b.weight"], torch.full((4, 3), 2.5))
    with pytest.raises(epimer.ParameterError, match="'non_finite' parameter must be 'error' or 'skip-tensor'"):
        epimer.merge_state_dicts(base, models, "average", non_finite="skip")


def test_an_unknown_choice_is_refused(here):
    recipe(non_finite="ignore")
    assert_refused(run("merge", "recipe.yaml", "out"), "non_finite", "one of error, skip-tensor")
    recipe()
    assert_refused(run("merge", "recipe.yaml", "out", "--non-finite", "ignore"), "'error' or 'skip-tensor'")
