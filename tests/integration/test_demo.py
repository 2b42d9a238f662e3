"""The demonstration from end to end, on a suite small enough for a test: table, report, and a model to read."""

import json

import pytest
import torch
from safetensors.torch import load_file

import epimer
from commands import run as run_command
from epimer.evaluation.statistics import Scores
from epimer.experiments import demo
from epimer.experiments.bench import CANDIDATES
from epimer.experiments.demo import run
from epimer.experiments.glyphs8.build import load
from epimer.experiments.glyphs8.train import TINY
from epimer.progress import Progress
from epimer.report.write import write_page


@pytest.fixture(scope="module")
def stages():
    """The stages that the demonstration's bar showed: what, and of how many steps."""
    return {}


@pytest.fixture(scope="module")
def made(tmp_path_factory, stages):
    class Watched(Progress):
        def begin(self, what, total):
            stages[what] = total
            return super().begin(what, total)

    place = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPIMER_CACHE", str(place / "cache"))
        patch.setattr(demo, "Progress", Watched)
        return run(place / "out", progress=False, settings=TINY), load(progress=False, settings=TINY), place / "out"


def test_the_demo_compares_every_method_and_keeps_the_best(made):
    found, suite, out = made
    methods = [row["method"] for row in found.result.data]
    assert methods == ["few-shot probe", "fine-tuned", *(candidate.name for candidate in CANDIDATES)]
    assert sorted(path.name for path in out.iterdir()) == [
        "diagnosis.json",
        "merged",
        "performance.json",
        "performance.md",
        "performance.svg",
    ]
    best = max((row for row in found.result.data if "validation" in row), key=lambda row: row["validation"])
    assert found.best.candidate.name == best["method"]
    merged = load_file(out / "merged" / "model.safetensors")
    assert Scores(suite.scores(merged, "test")).average == pytest.approx(best["average"])
    about = json.loads((out / "merged" / "merge.json").read_text())
    assert (about["method"], about["scale"]) == (best["method"], best["scale"])


def test_every_stage_says_of_how_many_steps_it_is(made, stages):
    assert stages == {"merging": len(CANDIDATES), "diagnosis": 1}


def test_where_it_cannot_write_is_said_before_any_work(tmp_path, monkeypatch):
    def work(**options):
        raise AssertionError("it began to work")

    monkeypatch.setattr(demo, "load", work)
    (tmp_path / "file").write_text("mine")
    for name in ("foreign/merged", "taken/report.html", "again/merged"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "foreign" / "merged" / "thesis.txt").write_text("mine")
    (tmp_path / "again" / "merged" / "merge.json").write_text("{}")
    for place, words in {
        "file": "file is no folder",
        "file/deeper": "file is no folder",
        "foreign": "merged exists and is not a folder with merge.json",
        "taken": "report.html cannot be written: it is a folder",
    }.items():
        ran = run_command("demo", "-o", tmp_path / place)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert words in ran.err
    assert "it began to work" in run_command("demo", "-o", tmp_path / "again").err
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["merged"]


def test_what_was_known_beforehand_is_that_of_its_models(made):
    _, suite, out = made
    stored = json.loads((out / "diagnosis.json").read_text())
    assert stored["models"] == [task.name for task in suite.tasks]
    again = epimer.diagnose_state_dicts(dict(suite.base), [dict(model) for model in suite.models])
    assert stored["norms"] == pytest.approx(again.norms)
    assert stored["conflict"]["cosine"] == [pytest.approx(row) for row in again.conflict.cosine]
    assert torch.tensor(stored["forecast"]["tsv"]["tasks"]).isfinite().all()


def test_its_report_names_the_winner(made, tmp_path):
    found, _, _ = made
    page = write_page([found.result.to_dict(), found.diagnosis.to_dict()], tmp_path / "report.html").read_text()
    assert found.best.candidate.name in page
    assert "glyphs8" in page
