"""Methods in a file that --plugin names: known to every command, in the record, and asked for by verify."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import epimer
from commands import assert_done, assert_refused, run, start
from epimer.methods.plugins import load_plugin
from epimer.methods.registry import added_methods

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_method.py"
HALF = """
import epimer
from epimer.methods.averaging import METHODS  # which are in the table already

AVERAGE = METHODS[0]

def half(layer, options):
    return epimer.Solution({share} * sum(w * D for w, D in zip(layer.weights, layer.deltas, strict=True)))

HALF = epimer.Method(name="half", summary="half of the mean", equation="x", citation="none", merge=half,
                     options=epimer.MethodOptions(), elementwise=True)
"""


@pytest.fixture(autouse=True)
def only_here():
    """Remove the methods of plugins afterwards, for the commands of these tests run in this process."""
    before = set(added_methods())
    yield
    for name in set(added_methods()) - before:
        epimer.unregister_method(name)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Three models, their base, a recipe of the method `half`, and the file that has it."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(12, 10, generator=generator)
    for i, name in enumerate(("base", "a", "b", "c")):
        (tmp_path / name).mkdir()
        step = 0.1 * i * torch.randn(12, 10, generator=generator)
        save_file({"block.0.weight": base + step}, tmp_path / name / "model.safetensors")
    recipe = {"merge_method": "half", "base_model": "base", "models": [{"model": name} for name in "abc"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "half.py").write_text(HALF.format(share=0.5))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def half_of_the_mean():
    base, *models = (load_file(f"{name}/model.safetensors")["block.0.weight"] for name in ("base", "a", "b", "c"))
    return base + 0.5 * sum(W - base for W in models) / 3


def test_a_merge_in_a_real_process_takes_the_method_and_records_its_file(here):
    assert_refused(start("merge", "recipe.yaml", "out", cwd=here), "There is no method 'half'")
    assert_done(start("merge", "recipe.yaml", "out", "--plugin", "half.py", "-q", cwd=here))
    assert torch.allclose(load_file("out/model.safetensors")["block.0.weight"], half_of_the_mean(), atol=1e-6)
    record = json.loads((here / "out" / "epimer.json").read_text())
    assert record["plugin"] == ["half.py", hashlib.sha256((here / "half.py").read_bytes()).hexdigest()]
    assert str(here) not in (here / "out" / "epimer.json").read_text()
    ran = start("verify", "out", cwd=here)
    assert ran.code == 2
    assert "half is a method of half.py (SHA-256 " in ran.out
    assert "give that file as --plugin" in ran.out
    assert_done(start("verify", "out", "--plugin", "half.py", cwd=here))
    (here / "half.py").write_text(HALF.format(share=0.25))
    ran = start("verify", "out", "--plugin", "half.py", "--json", cwd=here)
    (inputs,) = (check for check in json.loads(ran.out)["checks"] if check["part"] == "inputs")
    assert (ran.code, inputs["outcome"], inputs["names"]) == (2, "differs", ["half.py"])


def test_another_file_is_another_merge(here):
    """A finished folder is left alone only if the method's file is the same."""
    assert_done(run("merge", "recipe.yaml", "out", "--plugin", "half.py", "-q"))
    assert "nothing to do" in assert_done(run("merge", "recipe.yaml", "out", "--plugin", "half.py"))
    (here / "half.py").write_text(HALF.format(share=0.25))
    assert_done(run("merge", "recipe.yaml", "out", "--plugin", "half.py", "--overwrite", "-q"))
    base = load_file("base/model.safetensors")["block.0.weight"]
    quarter = base + (half_of_the_mean() - base) / 2
    assert torch.allclose(load_file("out/model.safetensors")["block.0.weight"], quarter, atol=1e-6)


def test_every_command_that_takes_a_method_takes_a_plugin(here):
    (here / "near_judge.py").write_text(
        "def near(state): return {'t': -float(state['block.0.weight'].square().sum())}\n"
    )
    plugin = ("--plugin", "half.py")
    assert "half of the mean" in assert_done(run("methods", "half", *plugin))
    out = assert_done(run("diagnose", "recipe.yaml", *plugin, "--methods", "half,average"))
    assert "half" in out
    swept = (
        "sweep",
        "recipe.yaml",
        "--eval",
        "near_judge:near",
        "--methods",
        "half",
        "--scale",
        "1,2",
        "--json",
        *plugin,
    )
    rows = json.loads(assert_done(run(*swept)))["data"]
    assert [(row["method"], row["scale"]) for row in rows] == [("half", 1.0), ("half", 2.0)]
    expected = -float(half_of_the_mean().square().sum())
    assert rows[0]["validation"] == pytest.approx(expected, rel=1e-5)
    for command in ("merge", "sweep", "bench", "diagnose", "methods", "verify", "basis", "curvature"):
        assert "--plugin" in re.sub(r"\x1b\[[0-9;]*m", "", run(command, "--help").out)


def test_the_example_is_a_plugin():
    plugin = load_plugin(EXAMPLE)
    assert plugin.methods == ("stock_with_floor",)
    assert load_plugin(EXAMPLE) is plugin
    models = [{"w": torch.full((4, 3), float(i))} for i in (1, 2)]
    merged = epimer.merge_state_dicts({"w": torch.zeros(4, 3)}, models, "stock_with_floor")["w"]
    assert torch.allclose(merged, torch.full((4, 3), 1.5))  # the task vectors are parallel


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1", ("adds no method", "epimer.Method at its top level")),
        ("def f(:", ("SyntaxError", "plugin.py line 1")),
        ("import epimer\n1 / 0", ("ZeroDivisionError: division by zero (plugin.py line 2)",)),
        (HALF.format(share=1).replace('"half"', '"tsv"'), ("two methods 'tsv'", "one from epimer")),
        (None, ("plugin.py cannot be read: No such file",)),
    ],
)
def test_a_file_that_is_no_plugin_is_refused_in_one_line(here, content, words):
    if content is not None:
        (here / "plugin.py").write_text(content)
    before = added_methods()
    assert_refused(run("merge", "recipe.yaml", "out", "--plugin", "plugin.py"), *words)
    assert added_methods() == before
    assert not (here / "out").exists()


def test_a_recipe_cannot_name_a_plugin(here):
    recipe = yaml.safe_load((here / "recipe.yaml").read_text())
    (here / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "plugin": "half.py"}))
    assert_refused(run("merge", "recipe.yaml", "out"), "plugin")
