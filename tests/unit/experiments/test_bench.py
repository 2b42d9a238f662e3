"""The bench on a small suite of real, trained networks: scales chosen on validation data, honest statistics."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch

import epimer
from epimer.diagnosis.sweep import climb
from epimer.errors import DataError
from epimer.evaluation.metrics import CLASSIFIER_SCORES
from epimer.evaluation.statistics import Scores
from epimer.experiments import paper as experiments
from epimer.experiments.bench import CANDIDATES, CURVATURE_VERSION, Bench, Candidate
from epimer.experiments.results import write
from trained import make_suite, network

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def bench(suite):
    return Bench(suite, samples=64)


def test_the_scale_is_chosen_on_validation_and_reported_on_test(suite):
    grid = (0.3, 1.0, 2.0)
    bench = Bench(suite, scales=grid)
    outcome = bench.best(Candidate("tsv"))
    merged = epimer.merge_state_dicts(dict(bench.suite.base), bench.states, "tsv")
    by_scale = {}
    for scale in grid:
        state = {n: W + scale * (merged[n] - W) for n, W in bench.suite.base.items()}
        direct = epimer.merge_state_dicts(dict(bench.suite.base), bench.states, "tsv", scale=scale)
        assert all(torch.allclose(state[n], direct[n], atol=1e-5) for n in state)
        by_scale[scale] = Scores(bench.suite.scores(state, "val")).average
    assert outcome.validation == max(by_scale.values())
    assert by_scale[outcome.scale] == outcome.validation
    again = Scores(bench.suite.scores(bench.model, "test"))
    assert again.accuracies == outcome.test.accuracies
    assert bench.best(Candidate("tsv")) is bench.winner is outcome
    bench.best(Candidate("task_arithmetic"))
    assert bench.winner.validation == max(o.validation for o in bench._outcomes.values())


def test_a_merge_that_is_far_too_long_at_scale_1_is_looked_for_everywhere(suite):
    able = Bench(suite).merge(Candidate("average"), models=[0, 1])  # a base that already knows something
    bench = Bench(replace(suite, base=dict(able)), scales=(5e-7, 1e-6, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3))
    long = bench.best(Candidate("average", {"scale": 1e6}))  # the average itself is at 1e-6
    assert long.scale in (5e-7, 1e-6)
    assert long.validation >= bench.score(bench.merge(Candidate("average")), "val").average


def test_scores_that_are_no_numbers_are_refused_and_never_chosen(suite):
    def broken(state, task):
        made = network(state, task)
        far = (state["one.weight"] - suite.base["one.weight"]).norm() > limit
        return made.requires_grad_(False).apply(lambda m: m.bias.fill_(torch.nan) if far and m is made.head else None)

    tasks = [replace(task, score=CLASSIFIER_SCORES["loss"], metric="loss") for task in suite.tasks]
    merged = Bench(suite).merge(Candidate("average"))
    limit = 1.2 * (merged["one.weight"] - suite.base["one.weight"]).norm()  # where a loss runs out of range
    bench = Bench(replace(suite, tasks=tasks, network=broken))
    assert bench.best(Candidate("average")).scale <= 1.15
    limit = -1.0
    with pytest.raises(DataError, match=r"NaN or Inf as loss on .* of task 'task0'"):
        Bench(replace(suite, tasks=tasks, network=broken)).best(Candidate("average"))


@pytest.mark.parametrize("values", list(itertools.permutations([0.0, 1.0, 2.0, 3.0])))
def test_climbing_finds_the_top_of_a_hill(values):
    grid = [0.5, 1.0, 1.5, 2.0]
    best = climb(dict(zip(grid, values, strict=True)).__getitem__, grid)
    assert values[grid.index(best)] == 3.0


def test_curvature_is_measured_once_and_kept(suite):
    first = Bench(suite, samples=32)
    measured = first.curvature("diagonal")
    again = Bench(suite, samples=32).curvature("diagonal")
    assert first.curvature("diagonal") is measured
    for one, other in zip(measured, again, strict=True):
        assert all(torch.equal(one[name].F, other[name].F) for name in one)
        assert one.provenance.samples == 32
    folder = suite.folder / "curvature" / f"diagonal-32-0-v{CURVATURE_VERSION}" / "task0"
    (folder / "curvature.json").write_text("{}")
    with pytest.raises(DataError, match=re.escape(f"Delete {folder}, and it is measured again.")):
        Bench(suite, samples=32).curvature("diagonal")
    other = Bench(suite, samples=32, seed=1).curvature("diagonal")
    assert not torch.equal(other[0]["two.weight"].F, again[0]["two.weight"].F)


def test_performance_has_every_method_and_the_references(bench):
    result = experiments.performance(bench)
    assert [row[0] for row in result.rows] == ["base", "fine-tuned", *(c.name for c in CANDIDATES)]
    assert all(len(row) == len(result.headings) for row in result.rows)
    assert "| tsv |" in result.markdown()


@pytest.mark.parametrize("name", ["performance", "worst-task", "alpha", "eta", "cost", "tasks", "landscape"])
def test_experiments_write_tables_and_figures(bench, tmp_path, name, monkeypatch):
    told = []
    monkeypatch.setattr(bench, "report_progress", lambda *step: told.append(step))
    result = experiments.landscape(bench, grid=4) if name == "landscape" else experiments.EXPERIMENTS[name](bench)
    assert result.rows
    assert all(len(row) == len(result.headings) for row in result.rows)
    files = write(result, tmp_path)
    assert json.loads(files[0].read_text())["rows"] == json.loads(json.dumps(result.rows))
    assert files[1].read_text().count("\n|") >= len(result.rows)
    assert files[2].read_text().startswith("<?xml")
    done, total, _ = told[-1]
    assert done == total == max(total for _, total, _ in told)
    assert [done for done, of, _ in told if of == total][-total:] == list(range(1, total + 1))


def test_samples_and_metrics(bench, monkeypatch):
    monkeypatch.setattr(experiments, "SIZES", (8, 32))
    monkeypatch.setattr(experiments, "FRACTIONS", (0.05, 0.5))
    assert [row[2] for row in experiments.samples(bench).rows] == ["8", "32"] * 3
    assert [row[2] for row in experiments.fisher_fraction(bench).rows] == ["20", "200"] * 3
    found = experiments.metrics(bench)
    assert len(found.rows) == 3 * 3 * 3 * 3 + 9
    assert len(found.figure.dots) == 3 * 3 * 3 + 3
    best = max((row for row in found.data[:3]), key=lambda row: row["validation"])
    assert found.figure.dots["diagonal, tagged, mean"][0] == best["average"]
