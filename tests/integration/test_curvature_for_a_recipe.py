"""`epimer curvature --recipe`: whole factors where they fit, else in a basis that the merge finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import epimer
from epimer.curvature import passes
from epimer.engine import curvature_shards
from epimer.engine.options import RunOptions
from epimer.engine.parcels import pack, unpack
from epimer.engine.threads import Threads
from epimer.errors import TooLargeError

pytest.importorskip("transformers")

import tiny
from commands import ENVIRONMENT, assert_done, assert_refused, run

pytestmark = pytest.mark.usefixtures("no_progress_bars")
NAMES = ("base", "one", "two", "three")
SMALL = 8000  # bytes of memory: too few for whole factors, enough for projected ones
Disk = namedtuple("Disk", "free")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny.make_llamas(root, NAMES, 0.1)
    tiny.write_rows(root, "animal")
    return root


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    for name in (*NAMES, "animal-train.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def too_large(monkeypatch) -> None:
    """Leave so little memory and disk that whole factors are refused."""
    monkeypatch.setattr(passes, "available_memory", lambda: SMALL)
    monkeypatch.setattr(passes.shutil, "disk_usage", lambda _: Disk(free=100))


def on(model: str, out: str | None = None, *more: object) -> list[object]:
    data = ["--task", "causal-lm", "--data", "animal-train.jsonl", "--text", "sentence", "--samples", 8]
    return ["curvature", model, *data, "--out", out or f"{model}.curv", *more]


def write(file: str, names: tuple[str, ...] = ("one", "two"), rank: int | None = 2, **keys: object) -> str:
    """Write the recipe of a merge of models with curvature."""
    models = [{"model": name, "curvature": f"{name}.curv"} for name in names]
    parameters = {} if rank is None else {"parameters": {"rank": rank}}
    recipe = {"merge_method": "epimer_kron", "base_model": "base", "models": models, **parameters, **keys}
    Path(file).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return file


def header(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "curvature.json").read_text())


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def assert_left(*names: str) -> None:
    """The folder has these beside the inputs, and no draft."""
    assert sorted({*os.listdir()} - {*NAMES, "animal-train.jsonl"}) == sorted(names)


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize("names", [("one", "two"), ("one", "two", "three")])
def test_what_fits_nowhere_is_measured_in_a_basis_that_the_merge_finds(here, names):
    recipe = write("r.yaml", names)
    built = None
    for name in names:
        note, told, *_ = assert_done(run(*on(name, None, "--recipe", recipe))).splitlines()
        place = "curvature is measured in r.basis, the basis of the models of r.yaml, and their merge finds it."
        assert note.startswith("note: the curvature takes " if built is None else "note: the recipe's basis is")
        assert note.endswith(place)
        assert told.startswith(f"{name}.curv: projected kronecker of 7 tensors")
        built = built or contents("r.basis")
        assert contents("r.basis") == built
    assert_left("r.yaml", "r.basis", *(f"{name}.curv" for name in names))
    assert_done(run("merge", recipe, "found", "-q"))
    # the same by hand
    assert_done(run("basis", recipe, "by-hand", "-q"))
    assert contents("by-hand") == built
    for name in names:
        assert_done(run(*on(name, f"hand/{name}.curv", "--basis", "by-hand", "-q")))
        assert (
            load_file(f"hand/{name}.curv/curvature.safetensors").keys()
            == load_file(f"{name}.curv/curvature.safetensors").keys()
        )
        assert (Path("hand") / f"{name}.curv/curvature.safetensors").read_bytes() == Path(
            f"{name}.curv/curvature.safetensors"
        ).read_bytes()
    models = [{"model": name, "curvature": f"hand/{name}.curv"} for name in names]
    named = write("named.yaml", names, models=models, basis="by-hand")
    assert_done(run("merge", named, "expected", "-q"))
    assert (here / "found/model.safetensors").read_bytes() == (here / "expected/model.safetensors").read_bytes()
    base, merged = (load_file(f"{folder}/model.safetensors") for folder in ("base", "found"))
    assert any(not torch.equal(base[name], merged[name]) for name in base)
    record = json.loads((here / "found/epimer.json").read_text())
    assert yaml.safe_load(record["recipe"])["basis"] == "r.basis"
    assert epimer.verify("found").verified


def test_whole_factors_are_measured_where_they_fit(here):
    recipe = write("r.yaml")
    printed = assert_done(run(*on("one", None, "--recipe", recipe)))
    assert printed == assert_done(run(*on("one", "alone"))).replace("alone: ", "one.curv: ")
    assert contents("one.curv") == contents("alone")
    assert_left("r.yaml", "one.curv", "alone")
    assert_done(run(*on("two", None, "--recipe", write("r.yaml", merge_method="regmean", parameters={}))))
    assert_left("r.yaml", "one.curv", "two.curv", "alone")


def test_models_are_measured_alike_once_the_basis_is_there(here, monkeypatch):
    recipe = write("r.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(passes, "available_memory", lambda: SMALL)
        patch.setattr(passes.shutil, "disk_usage", lambda _: Disk(free=100))
        assert_done(run(*on("one", None, "--recipe", recipe)))
    assert "projected kronecker" in assert_done(run(*on("two", None, "--recipe", recipe)))
    assert_done(run("merge", recipe, "out", "-q"))
    assert_done(run(*on("two", None, "--overwrite")))
    words = ("one.curv is kronecker curvature", "two.curv is not on the same basis", "measure all models alike")
    assert_refused(run("merge", recipe, "other"), *words)


@pytest.mark.usefixtures("too_large")
def test_a_model_that_the_recipe_does_not_merge_is_refused(here):
    recipe = write("r.yaml")
    words = ("three is none of the models that r.yaml merges ('one', 'two')", "leave --recipe out")
    assert_refused(run(*on("three", None, "--recipe", recipe)), *words)
    assert_refused(run(*on("base", None, "--recipe", recipe)), "base is none of the models")
    assert_left("r.yaml")
    Path("copy").mkdir()
    for file in Path("one").iterdir():
        shutil.copy(file, "copy")
    assert "projected" in assert_done(run(*on("copy", None, "--recipe", recipe)))  # the same model, called otherwise


@pytest.mark.usefixtures("too_large")
def test_a_changed_recipe_is_not_mixed_up(here):
    recipe = write("r.yaml")
    for name in ("one", "two"):
        assert_done(run(*on(name, None, "--recipe", recipe, "-q")))
    before = contents("r.basis")
    left = ("r.yaml", "r.basis", "one.curv", "two.curv")
    remedy = "remove it, or name another folder under 'basis', and measure all models of the recipe"
    again = on("one", "again", "--recipe", recipe)
    write("r.yaml", ("one", "three"))
    assert_refused(run(*again), "r.basis was built from other models, or in another order", remedy)
    assert_refused(run("merge", write("r.yaml", ("two", "one")), "out"), "r.basis was built from other models, or in")
    write("r.yaml", rank=3)
    assert_refused(run(*again), "r.basis was built with rank 2, the recipe says 3", remedy)
    assert_refused(run("merge", recipe, "out"), "r.basis was built with rank 2, the recipe says 3")
    write("r.yaml", rank=None)
    assert_refused(run(*again), "r.basis is tensor of rank 2, the recipe means tensor of rank 32", remedy)
    assert_left(*left)
    assert contents("r.basis") == before
    other = write("other.yaml", rank=3)
    assert "in other.basis" in assert_done(run(*on("one", "again", "--recipe", other)))
    models = [{"model": "one", "curvature": "again"}, {"model": "two", "curvature": "two.curv"}]
    assert_refused(run("merge", write("mixed.yaml", models=models), "out"), "two.curv is not on the same basis")


@pytest.mark.usefixtures("too_large")
def test_a_basis_that_the_recipe_names_is_used_or_built_there(here):
    assert_done(run("basis", write("r.yaml", rank=None), "mine", "--rank", 3, "-q"))
    recipe = write("r.yaml", rank=None, basis="mine")
    for name in ("one", "two"):
        assert "measured in mine, " in assert_done(run(*on(name, None, "--recipe", recipe)))
    assert_done(run("merge", recipe, "out", "-q"))
    assert_left("r.yaml", "mine", "one.curv", "two.curv", "out")
    Path("sub").mkdir()
    models = [{"model": str(here / name)} for name in ("one", "two")]
    below = write("sub/r.yaml", models=models, base_model=str(here / "base"), basis="new")
    assert "measured in sub/new, " in assert_done(run(*on("one", "sub/one.curv", "--recipe", below)))
    assert sorted(os.listdir("sub")) == ["new", "one.curv", "r.yaml"]


@pytest.mark.usefixtures("too_large")
def test_a_basis_is_found_beside_the_curvature_or_the_recipe_and_refused_where_it_is_gone(here):
    recipe = write("r.yaml")
    for name in ("one", "two"):
        assert_done(run(*on(name, None, "--recipe", recipe, "-q")))
    assert header("one.curv")["basis_folder"] == "r.basis"
    Path("away").mkdir()
    for name in ("one.curv", "two.curv", "r.basis"):
        Path(name).rename(f"away/{name}")
    models = [{"model": name, "curvature": f"away/{name}.curv"} for name in ("one", "two")]
    moved = write("other.yaml", models=models)
    assert_done(run("merge", moved, "beside-curvature", "-q"))
    Path("away/r.basis").rename("r.basis")
    assert_done(run("merge", moved, "beside-recipe", "-q"))
    assert_done(run("diagnose", moved, "-q"))
    outputs = [load_file(f"{out}/model.safetensors") for out in ("beside-curvature", "beside-recipe")]
    assert all(torch.equal(W, outputs[1][name]) for name, W in outputs[0].items())
    Path("r.basis").rename("moved")
    words = ("away/one.curv is projected on a basis that is not here; it was 'r.basis'", "its folder under 'basis'")
    assert_refused(run("merge", moved, "out"), *words)
    assert_done(run("basis", write("o.yaml", ("one", "three")), "r.basis", "-q"))  # another of that name
    assert_refused(run("merge", moved, "out"), *words)
    write("other.yaml", models=models, basis="moved")
    assert_done(run("merge", moved, "out", "-q"))


@pytest.mark.parametrize("name", ["../r.basis", "/tmp/r.basis", "..", ".", "a/b", 3])
def test_a_folder_that_names_its_basis_by_a_path_is_refused(here, name):
    assert_done(run("basis", write("r.yaml"), "b", "-q"))
    assert_done(run(*on("one", None, "--basis", "b", "-q")))
    changed = {key: value for key, value in header("one.curv").items() if key != "sha256"} | {"basis_folder": name}
    Path("one.curv/curvature.json").write_text(json.dumps(changed))
    with pytest.raises(epimer.CurvatureError, match=r"curvature\.json: basis_folder"):
        epimer.Curvature.load("one.curv")
    del changed["basis_folder"]  # as earlier versions wrote it
    Path("one.curv/curvature.json").write_text(json.dumps(changed))
    assert epimer.Curvature.load("one.curv").provenance.basis_folder is None


@pytest.mark.usefixtures("too_large")
def test_what_a_recipe_cannot_help(here):
    recipe = write("r.yaml")
    assert_refused(run(*on("one")), "the curvature takes ", "--recipe recipe.yaml", "--layers")
    assert_refused(run(*on("one", None, "--recipe", recipe, "--basis", "b")), "give either --basis or --recipe")
    assert_refused(run(*on("one", None, "--recipe", "no.yaml")), "Cannot read the recipe 'no.yaml'")
    kind = ("--recipe", recipe, "--kind", "ekfac")
    assert_refused(run(*on("one", None, *kind)), "the curvature takes", "--kind ekfac has no form in a basis")
    for method, words in (("fisher", "fisher is not merged in a basis"), ("mats", "got 'full'; set 'basis' under")):
        unable = write("r.yaml", merge_method=method, parameters={})
        assert_refused(run(*on("one", None, "--recipe", unable)), words)
    Path("r.basis").write_text("mine")
    assert_refused(run(*on("one", None, "--recipe", write("r.yaml"))), "r.basis exists and is not a folder with")
    assert_left("r.yaml", "r.basis")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_kinds_that_are_measured_in_a_basis_only_take_the_recipes(here):
    recipe = write("r.yaml", merge_method="epimer_exact")
    printed = assert_done(run(*on("one", None, "--recipe", recipe, "--kind", "ggn", "--layers", "*q_proj*")))
    assert "--kind ggn is measured in a basis only: curvature is measured in r.basis" in printed
    assert "one.curv: projected ggn of 1 tensors" in printed


@pytest.mark.usefixtures("too_large")
def test_parts_of_the_data_on_a_cluster_are_measured_in_the_basis(here, monkeypatch):
    recipe = write("r.yaml")
    engine = Threads([torch.device("cpu")], threads=1, memory=1 << 30)
    monkeypatch.setattr(curvature_shards, "one_per_machine", lambda *_: engine)  # whose workers have this memory
    monkeypatch.setattr(RunOptions, "__post_init__", lambda _: None)
    ran = run(*on("one", None, "--recipe", recipe, "--engine", "ray", "--shards", 2))
    assert "one.curv: projected kronecker of 7 tensors" in assert_done(ran)
    assert_done(run(*on("one", "by-hand", "--basis", "r.basis", "--engine", "ray", "--shards", 2)))
    assert contents("one.curv") == contents("by-hand")
    assert_left("r.yaml", "r.basis", "one.curv", "by-hand")


def test_a_workers_refusal_is_the_drivers(tmp_path):
    sent = TooLargeError("it takes 3 GB", ". Take less.")
    found = unpack(pack(sent, tmp_path, "0", load=lambda *_: None))
    assert (type(found), str(found), found.problem) == (TooLargeError, "it takes 3 GB. Take less.", "it takes 3 GB")


RANK = """
import os, sys
from collections import namedtuple
from epimer import cli
from epimer.curvature import passes

Disk = namedtuple("Disk", "free")
passes.available_memory = lambda: 8000 if os.environ["RANK"] == "1" else 1 << 30  # too little on one rank
passes.shutil.disk_usage = lambda _: Disk(free=100)
sys.argv[0] = "epimer"
cli.main()
"""


@pytest.mark.slow
def test_ranks_are_measured_in_one_basis_where_one_of_them_has_no_room(here):
    recipe = write("r.yaml")
    Path("rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py"]

    def start(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*torchrun, *map(str, arguments)]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False)

    done = start(*on("one", None, "--recipe", recipe))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("curvature is measured in r.basis") == 1
    assert done.stdout.count("one.curv: projected kronecker of 7 tensors") == 1
    done = start(*on("one", "by-hand", "--basis", "r.basis"))
    assert done.returncode == 0, done.stderr
    assert contents("one.curv") == contents("by-hand")
    done = start(*on("three", None, "--recipe", recipe))
    assert done.returncode
    assert "three is none of the models" in done.stderr
    assert_left("r.yaml", "r.basis", "rank.py", "one.curv", "by-hand")


# in Python


def test_a_function_gives_the_basis_where_the_whole_fits_nowhere(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30)).double()
    base = {name: W.detach() for name, W in model.named_parameters()}
    models = [{name: W + 0.1 * torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    data = [(torch.randn(6, 40, dtype=torch.float64), torch.randint(30, (6,)))]
    built = []

    def basis():
        built.append(epimer.build_basis(base, models, rank=2, basis="tensor"))
        return built[-1]

    def measured(**options):
        loss = torch.nn.CrossEntropyLoss(reduction="sum")
        return epimer.estimate_curvature(model, iter(data), loss, **options)

    assert measured(basis=basis).provenance.basis is None
    assert not built
    monkeypatch.setattr(passes, "available_memory", lambda: SMALL)
    monkeypatch.setattr(passes.shutil, "disk_usage", lambda _: Disk(free=100))
    with pytest.raises(TooLargeError, match="a function as basis="):
        measured()
    found = measured(basis=basis)
    (given,) = built
    expected = measured(basis=given)
    assert found.provenance == expected.provenance
    assert list(found) == list(expected) == ["0.weight", "2.weight"]
    assert torch.equal(found["0.weight"].A, expected["0.weight"].A)
    merged = epimer.merge_state_dicts(base, models, "epimer_kron", curvature=[found, found], rank=2)
    assert not torch.equal(merged["0.weight"], base["0.weight"])
