"""The page of what epimer really measures: trained networks, their experiments, a diagnosis and merges of them."""

import json
import re

import pytest

import epimer
from epimer.api import sweep_state_dicts as sweep
from epimer.evaluation.judges import SplitScores
from epimer.experiments import paper as experiments
from epimer.experiments.bench import Bench
from epimer.experiments.results import write
from epimer.report.page import build
from epimer.report.read import read_records
from trained import make_suite


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(make_suite(tmp_path_factory.mktemp("suite")), samples=64, scales=(0.5, 1.0, 2.0))


def judge(bench):
    names = [task.name for task in bench.suite.tasks]
    return lambda state, split: SplitScores(dict(zip(names, bench.suite.scores(state, split), strict=True)))


@pytest.fixture(scope="module")
def folder(bench, tmp_path_factory):
    """A folder as `epimer bench`, `epimer diagnose` and `epimer merge` fill it."""
    folder = tmp_path_factory.mktemp("found")
    names = ("performance", "worst-task", "alpha", "eta", "tasks")
    for result in [*(experiments.EXPERIMENTS[name](bench) for name in names), experiments.landscape(bench, grid=6)]:
        write(bench.with_provenance(result), folder)
    base, names = dict(bench.suite.base), [task.name for task in bench.suite.tasks]
    found = epimer.diagnose_state_dicts(base, bench.states, rank=4, names=names)
    (folder / "diagnosis.json").write_text(json.dumps(found.to_dict()))
    tried = sweep(base, bench.states, judge(bench), methods=["average", "tsv"], scales=(0.5, 1.0), evaluation="small")
    (folder / "sweep.json").write_text(json.dumps(tried.to_dict()))
    (folder / "merged").mkdir()
    record = epimer.merge_state_dicts(base, bench.states, "tsv", rank=4).record
    (folder / "merged" / "epimer.json").write_text(json.dumps(record.lasting()))
    (folder / "merged" / "config.json").write_text("{}")
    return folder


def test_records_are_read_back_as_they_were_found(bench, folder):
    records = read_records([folder])
    performance = records.performances[0].record
    result = experiments.performance(bench)
    assert [score.method for score in performance.scores] == [row["method"] for row in result.data]
    assert [score.average for score in performance.scores] == [row["average"] for row in result.data]
    assert performance.winner.method == bench.winner.candidate.name
    assert (performance.suite, performance.against) == ("small", "tsv")
    diagnosis = records.diagnoses[0].record
    again = epimer.diagnose_state_dicts(dict(bench.suite.base), bench.states, rank=4, names=list(diagnosis.models))
    assert diagnosis.total.eta == pytest.approx(again.total.eta)
    assert diagnosis.layers.keys() == again.layers.keys()
    tried = records.sweeps[0].record
    assert {(one.method, one.scale) for one in tried.data} == {(m, s) for m in ("average", "tsv") for s in (0.5, 1.0)}
    assert tried.best.validation == max(one.validation for one in tried.data)
    assert records.merges[0].record.method == "tsv"


def test_the_page_shows_them(bench, folder):
    page = build(read_records([folder]))
    row = next(row for row in experiments.performance(bench).data if row["method"] == bench.winner.candidate.name)
    summary = page.partition('id="methods"')[0]
    assert f">{100 * row['average']:.1f}%<" in summary
    assert f">{100 * row['worst']:.1f}%<" in summary
    assert "small: three models merged into one" in summary
    figures = set(re.findall(r'<figure id="([^"]+)"', page))
    assert {
        "averages",
        "task-task0",
        "alpha-epimer",
        "eta-margin",
        "landscape-all",
        "landscape-task2",
        "tasks",
    } <= figures
    assert {"forecast", "energy-by-rank", "conflict-cosine", "layers-energy-kept", "sweep-tsv"} <= figures
