"""Methods from outside: registered in Python or by another package, and then known everywhere."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from commands import run
from dense import close
from epimer import EpimerWarning, ParameterError
from epimer.experiments.bench import AS_PUBLISHED, CANDIDATES, Candidate, all_candidates
from epimer.methods import registry
from epimer.methods.registry import ALIASES, default_forecasts, default_sweep
from epimer.recipe.model import AUTO
from epimer.testing import check_laws, make_base, make_models

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_method.py"
NAME = "block.0.weight"


@dataclass(frozen=True, kw_only=True)
class PowerOptions(epimer.MethodOptions):
    """Options of power_mean."""

    power: Annotated[float, epimer.Option("exponent of the mean", low=0, open_low=True)] = 2.0
    signs: Annotated[Literal["sum", "first"], epimer.Option("whose signs are taken")] = "sum"


def power_mean(layer, options):
    """Return the mean of |D_t|^power, with the signs of the sum."""
    size = sum(w * D.abs() ** options.power for w, D in zip(layer.weights, layer.deltas, strict=True))
    signed = layer.deltas[0] if options.signs == "first" else sum(layer.deltas)
    return epimer.Solution(size ** (1 / options.power) * signed.sign(), note="by powers")


ROW = epimer.Method(
    name="power_mean",
    summary="the power mean of the task vectors",
    equation="|θ - θ0| = (Σ λ_t |D_t|^p)^(1/p)",
    citation="nobody, 2026",
    merge=power_mean,
    options=PowerOptions(power=3.0),
    elementwise=True,
    sweep=True,
    forecast=True,
    counts_models=True,  # signs are those of the sum without weights
    laws=frozenset({"permutation", "copies", "scale_zero"}),
)


@pytest.fixture
def added():
    epimer.register_method(ROW)
    yield ROW
    epimer.unregister_method("power_mean")


@pytest.fixture
def checkpoints(tmp_path):
    base = make_base()
    models = make_models(base, 2)
    for name, state in {"base": base, "one": models[0], "two": models[1]}.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    recipe = {
        "merge_method": "power_mean",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / "one")}, {"model": str(tmp_path / "two")}],
    }
    return recipe, base, models


def expected(base, models, power=3.0):
    deltas = [model[NAME].double() - base[NAME].double() for model in models]
    size = (sum(D.abs() ** power for D in deltas) / len(deltas)) ** (1 / power)
    return base[NAME].double() + size * sum(deltas).sign()


def test_a_registered_method_merges_state_dicts(added):
    base = make_base(torch.float64)
    models = make_models(base)
    merged = epimer.merge_state_dicts(base, models, "power_mean")
    assert close(merged[NAME], expected(base, models))
    assert merged.record.tensors[NAME].note == "by powers"
    assert merged.record.parameters == {"scale": 1.0, "power": 3.0, "signs": "sum", "rules": [], "seed": 0}
    other = epimer.merge_state_dicts(base, models, "power_mean", power=1, scale=0.5)
    assert close(other[NAME], (base[NAME] + expected(base, models, 1.0)) / 2)


def test_its_options_are_checked_as_those_of_any_method(added):
    def refused(**given):
        with pytest.raises(ParameterError) as caught:
            epimer.merge_state_dicts(make_base(), make_models(make_base()), "power_mean", **given)
        return str(caught.value)

    assert refused(power=0) == (
        "The 'power' parameter of power_mean must be a finite number greater than 0. Got 0 instead."
    )
    assert refused(signs="frist") == (
        "The 'signs' parameter of power_mean must be one of 'sum', 'first'. Got 'frist' instead. Did you mean 'first'?"
    )
    assert refused(powr=1) == (
        "power_mean has no parameter 'powr'. Did you mean 'power'? It takes: scale, power, signs, rules, seed."
    )


def test_it_merges_by_a_recipe_and_by_the_command_line(added, checkpoints, tmp_path):
    recipe, base, models = checkpoints
    recipe["parameters"] = {"power": 2.5}
    record = epimer.merge(recipe, tmp_path / "out", progress=False)
    assert record.parameters["power"] == 2.5
    merged = epimer.merge_state_dicts(base, models, "power_mean", power=2.5)[NAME]
    assert record.tensors[NAME].note == "by powers"
    assert close(merged.double(), expected(base, models, 2.5), 1e-6)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = run("merge", tmp_path / "recipe.yaml", tmp_path / "again", "--quiet")
    assert done.code == 0, done.err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    recipe["parameters"] = {"power": -1}
    with pytest.raises(epimer.RecipeError, match="'power' parameter of power_mean must be a finite number greater"):
        epimer.merge(recipe, tmp_path / "bad", progress=False)


def test_the_command_line_describes_it(added):
    shown = run("methods", "power_mean")
    assert (shown.code, shown.out) == (0, f"{ROW}\n")
    assert re.search(r"power +3\.0 +exponent of the mean \(a finite number greater than 0\)", shown.out)
    assert "power_mean" in run("methods").out


def test_sweeps_and_forecasts_take_it(added, checkpoints, tmp_path, monkeypatch):
    recipe, base, models = checkpoints
    (tmp_path / "judge_of_power.py").write_text(
        "def score(state):\n    return {'size': float(state['block.0.weight'].norm())}\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe["merge_method"] = "average"
    found = epimer.sweep(recipe, "judge_of_power:score", methods=["power_mean"], scales=[0.5, 1.0], progress=False)
    assert [(one.method, one.scale) for one in found.tried] == [("power_mean", 0.5), ("power_mean", 1.0)]
    size = float(epimer.merge_state_dicts(base, models, "power_mean")[NAME].norm())
    assert found.tried[1].validation.all.average == pytest.approx(size)
    diagnosis = epimer.diagnose(recipe, methods=["power_mean"], rank=2, progress=False)
    memory = epimer.diagnose_state_dicts(base, models, methods=["power_mean"], rank=2)
    assert list(diagnosis.forecast) == ["power_mean"]
    assert diagnosis.forecast["power_mean"].mean == pytest.approx(memory.forecast["power_mean"].mean)
    assert default_sweep(None)[-1] == default_forecasts("task-gram")[-1] == "power_mean"
    assert all_candidates() == (*CANDIDATES, *AS_PUBLISHED, Candidate("power_mean"))


def test_what_is_tried_by_default_depends_on_the_curvature():
    free = ["average", "tsv", "iso_c", "epimer_free"]
    assert default_sweep(None) == default_sweep("projected") == default_sweep("task-gram") == free
    assert default_sweep("diagonal") == [*free, "fisher", "epimer"]
    assert default_sweep("kronecker") == [*free, "regmean", "epimer_kron"]
    assert default_sweep("ekfac") == [*free, "epimer_kron"]
    assert default_sweep("samples") == [*free, "epimer_exact"]
    free = ["average", "tsv", "epimer_free"]
    assert default_forecasts("task-gram") == default_forecasts("projected") == free
    assert default_forecasts("diagonal") == [*free, "epimer"]
    assert default_forecasts("kronecker") == [*free, "regmean", "epimer_kron"]
    assert default_forecasts("ekfac") == [*free, "epimer_kron"]
    assert default_forecasts("samples") == [*free, "epimer_exact"]


def test_laws_are_checked_for_a_method_that_is_not_registered():
    check_laws(ROW)
    assert "power_mean" not in epimer.list_methods()
    check_laws("tsv")


def test_laws_that_do_not_hold_or_are_not_stated_are_told():
    def problems(row):
        with pytest.raises(AssertionError) as caught:
            check_laws(row)
        assert row.name not in epimer.list_methods()
        return str(caught.value).splitlines()

    first = replace(ROW, options=PowerOptions(signs="first"), counts_models=False)
    assert re.fullmatch(
        r"power_mean breaks the law 'permutation' \(the order of the models does not matter\), which it states: "
        r"'block\.0\.weight' differs by [\d.]+ of its norm\.",
        *problems(first),
    )
    assert problems(replace(ROW, laws=frozenset({"permutation", "copies"}))) == [
        "power_mean obeys the law 'scale_zero' (scale 0 returns the base); add it to its laws."
    ]
    assert problems(replace(ROW, laws=ROW.laws | {"gravity"})) == [
        "power_mean states the law 'gravity', which does not exist."
    ]
    assert problems(replace(ROW, laws=ROW.laws | {"curvature_scale"})) == [
        "power_mean breaks the law 'curvature_scale' (each model's curvature may be in units of its own), "
        "which it states: it uses no measured curvature."
    ]


def test_collisions_and_words_with_another_meaning_are_refused(added):
    def refused(method):
        with pytest.raises(ParameterError) as caught:
            epimer.register_method(method)
        return str(caught.value)

    here = __name__
    assert refused(ROW) == f"There are two methods 'power_mean': one from {here}, one from {here}; rename one of them."
    assert refused(replace(ROW, name="tsv")) == (
        f"There are two methods 'tsv': one from epimer, one from {here}; rename one of them."
    )
    assert set(registry.RESERVED) == {AUTO, *ALIASES}
    assert refused(replace(ROW, name="auto")).startswith("A method cannot be called 'auto'")
    assert refused(power_mean).startswith("A method is registered as an epimer.Method. Got <function")
    with pytest.raises(ParameterError, match="'tsv' was not added"):
        epimer.unregister_method("tsv")
    with pytest.raises(ParameterError, match="'nothing' was not added"):
        epimer.unregister_method("nothing")


@pytest.mark.parametrize("name", epimer.list_methods())
def test_an_equation_names_the_scale_and_the_calibration(name):
    """α multiplies every method's merge, and γ every singular value where calibration is on by default."""
    row = epimer.describe_method(name)
    assert "α" in row.equation
    assert ("γ" in row.equation) == (row.defaults.get("calibrate") is not None)


def test_options_that_cannot_be_described_are_refused():
    def refused(annotation, name="own"):
        own = dataclass(frozen=True, kw_only=True)(
            type("Own", (epimer.MethodOptions,), {"__annotations__": {name: annotation}, name: 1.0})
        )
        with pytest.raises(ParameterError) as caught:
            epimer.register_method(replace(ROW, options=own()))
        return str(caught.value)

    assert refused(float) == "The option 'own' must be annotated as Annotated[type, epimer.Option(help)]."
    unknown = Annotated[set[Any], epimer.Option("help")]
    assert refused(unknown).startswith("The type of the option 'own' is not one that options can have")
    assert refused(Annotated[float, epimer.Option("help")], "weights") == (
        "An option of power_mean cannot be called 'weights': a merge has that argument."
    )
    assert refused(Annotated[float, epimer.Option("")]) == "Every option of power_mean needs a help text."


PACKAGE = """
import epimer

def twice(layer, options):
    return epimer.Solution(2 * sum(w * D for w, D in zip(layer.weights, layer.deltas)))

def row(name):
    return epimer.Method(name=name, summary="twice the mean", equation="2 mean", citation="nobody", merge=twice,
                         options=epimer.MethodOptions(), elementwise=True)

TWICE = [row("twice"), row("thrice")]
TSV = row("tsv")
"""


@pytest.fixture
def installed(tmp_path):
    """Install a package by hand: a module and the metadata that pip would write."""
    site = tmp_path / "site"
    info = site / "doubling-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "doubling.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[epimer.methods]\na = doubling:TWICE\nb = doubling:TSV\nc = doubling:MISSING\n"
    )

    def epimer_command(*arguments):
        paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src")])])
        return subprocess.run(
            [sys.executable, "-m", "epimer", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return epimer_command


@pytest.mark.slow
def test_an_installed_package_adds_methods_and_a_broken_one_is_told_and_skipped(installed, checkpoints, tmp_path):
    shown = installed("methods", "twice")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("twice: twice the mean\n")
    warned = [line for line in shown.stderr.splitlines() if "doubling" in line]
    assert len(warned) == 2
    assert "methods of the package doubling (entry point 'b') are left out: There are two methods 'tsv'" in warned[0]
    assert "one from epimer, one from doubling" in warned[0]
    assert "methods of the package doubling (entry point 'c') are left out: AttributeError" in warned[1]
    recipe, base, models = checkpoints
    recipe["merge_method"] = "thrice"
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = installed("merge", tmp_path / "recipe.yaml", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    merged = epimer.merge_state_dicts(base, models, "average", scale=2)[NAME]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[NAME], merged)


def test_a_broken_entry_point_is_one_warning(monkeypatch):
    class Point:
        name, value, dist = "x", "nowhere:X", None

        def load(self):
            raise ImportError("no module named nowhere")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "epimer.methods" else [])
    monkeypatch.setattr(registry, "_METHODS", {})
    monkeypatch.setattr(registry, "_ORIGINS", {})
    with pytest.warns(EpimerWarning, match="methods of the package nowhere:X") as caught:
        assert len(registry.list_methods()) == 35
    assert len(caught) == 1


def test_the_registry_itself_does_not_import_torch():
    code = (
        "import sys, epimer; epimer.register_method, epimer.Method, epimer.Solution; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_adds_a_method_in_25_lines():
    spec = importlib.util.spec_from_file_location("own_method", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["own_method"] = example
    try:
        spec.loader.exec_module(example)
        example.main()
        base = {"w": torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).double()}
        models = [{"w": base["w"] + torch.eye(30, 20)}, {"w": base["w"] + torch.ones(30, 20)}]
        merged = epimer.merge_state_dicts(base, models, "stock_with_floor")["w"]
        cosine = 20 / (20 * 600) ** 0.5
        share = 2 * cosine / (1 + cosine)
        assert close(merged - base["w"], share * (torch.eye(30, 20) + 1).double() / 2, 1e-6)
        least = epimer.merge_state_dicts(base, models, "stock_with_floor", least=0.9)["w"]
        assert close(least - base["w"], 0.9 * (torch.eye(30, 20) + 1).double() / 2, 1e-6)
    finally:
        del sys.modules["own_method"]
        epimer.unregister_method("stock_with_floor")
    source = EXAMPLE.read_text(encoding="utf-8")
    adding = [
        node
        for node in ast.parse(source).body[1:]
        if getattr(node, "name", "") != "main" and not isinstance(node, ast.If)
    ]
    code = "\n".join(ast.get_source_segment(source, node) for node in adding).splitlines()
    code = [line for line in code if line.strip() and not line.strip().startswith('"""')]
    assert 0 < len(code) <= 25
