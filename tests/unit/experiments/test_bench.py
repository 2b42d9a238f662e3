"""The bench on a small suite of real, trained networks: scales chosen on validation data, honest statistics."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch

import epimer
from epimer.diagnosis import sweep
from epimer.diagnosis.sweep import climb
from epimer.errors import DataError
from epimer.evaluation.metrics import CLASSIFIER_SCORES
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import Split
from epimer.experiments import paper as experiments
from epimer.experiments.bench import (
    AS_PUBLISHED,
    CANDIDATES,
    CURVATURE_VERSION,
    SCALES,
    STEPS,
    Bench,
    Candidate,
    all_candidates,
)
from epimer.experiments.results import write
from epimer.experiments.unlabelled import IMPROVEMENTS
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


def test_a_rank_that_several_methods_lower_is_noted_once(suite):
    bench = Bench(suite)
    for candidate in (Candidate("tsv", {"rank": 99}), Candidate("epimer_free", {"rank": 99}), Candidate("iso_c")):
        bench.merge(candidate)
        bench.merge(candidate, scale=0.5)
    (note,) = bench.notes
    assert note.startswith("tsv, epimer_free: rank 99 lowered to ")
    bench.merge(Candidate("tsv", {"rank": 98}))
    assert [line.split(" lowered")[0] for line in bench.notes] == ["tsv, epimer_free: rank 99", "tsv: rank 98"]


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
    assert [row[0] for row in result.rows] == ["base", "fine-tuned", *(c.name for c in all_candidates())]
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


def test_unlabelled_has_every_methods_scale_and_what_inputs_gain(suite):
    wrong = [
        replace(task, splits={n: Split(s.x, s.y if n != "train" else (s.y + 1) % 3) for n, s in task.splits.items()})
        for task in suite.tasks
    ]
    bench = Bench(replace(suite, tasks=wrong, folder=None), samples=64)  # nothing depends on labels to train by
    result = experiments.EXPERIMENTS["unlabelled"](bench)
    methods = [candidate.name for candidate in CANDIDATES]
    assert [row["method"] for row in result.data] == methods + list(IMPROVEMENTS)
    assert len(result.rows) == len(result.data)
    for row in result.data[: len(methods)]:
        assert row["regret"] == pytest.approx(row["best"] - row["average"])
        assert row["best"] >= max(row["at 1"], row["average"])
    assert any(
        row["best scale"] not in sweep.SCALES for row in result.data[: len(methods)]
    )  # regret is of a finer grid
    tsv = next(row for row in result.data if row["method"] == "tsv")
    state = epimer.merge_state_dicts(suite.base, suite.models, "tsv", scale=tsv["scale"])
    assert tsv["average"] == pytest.approx(Scores(suite.scores(state, "test")).average)
    best = epimer.merge_state_dicts(suite.base, suite.models, "tsv", scale=tsv["best scale"])
    assert tsv["best"] == pytest.approx(Scores(suite.scores(best, "test")).average)
    for row in result.data[len(methods) :]:
        settings = {"samples": 64, "iterations": STEPS, **IMPROVEMENTS[row["method"]]}
        merged = epimer.merge_suite(suite, **settings)
        # batches of another size are rounded otherwise, which may turn a prediction or two
        assert row["average"] == pytest.approx(Scores(suite.scores(merged, "test")).average, abs=0.01)
        assert row["scale"] == merged.record.parameters["scale"]
        assert row["choices"][0] == f"scale {row['scale']:g}, by 48 inputs per task without labels"
        assert len(row["choices"]) == len(merged.record.choices)


def test_samples_and_metrics(bench, monkeypatch):
    monkeypatch.setattr(experiments, "SIZES", (8, 32))
    monkeypatch.setattr(experiments, "FRACTIONS", (0.05, 0.5))
    assert [row[2] for row in experiments.samples(bench).rows] == ["8", "32"] * 3
    assert [row[2] for row in experiments.fisher_fraction(bench).rows] == ["20", "200"] * 5
    found = experiments.metrics(bench)
    assert len(found.rows) == 3 * 3 * 3 * 3 + 9
    assert len(found.figure.dots) == 3 * 3 * 3 + 3
    best = max((row for row in found.data[:3]), key=lambda row: row["validation"])
    assert found.figure.dots["diagonal, tagged, mean"][0] == best["average"]


def test_nothing_is_chosen_by_a_doubtful_task(suite):
    """Validation labels of a task are turned round, so that its own model is the worst there."""
    turned = replace(suite.tasks[0].splits["val"], y=2 - suite.tasks[0].splits["val"].y)
    bad = replace(suite.tasks[0], splits={**suite.tasks[0].splits, "val": turned})
    trusting = Bench(replace(suite, tasks=[bad, *suite.tasks[1:]]), keep=False)
    wary = Bench(replace(suite, tasks=[replace(bad, doubtful="turned round"), *suite.tasks[1:]]), keep=False)
    merged = wary.merge(Candidate("tsv"))
    by_hand = {
        scale: sum(float(suite.scores_on(wary.scaled(merged, scale), task, "val").mean()) for task in suite.tasks[1:])
        / 2
        for scale in SCALES
    }
    outcome = wary.best(Candidate("tsv"))
    assert outcome.validation == pytest.approx(by_hand[outcome.scale]) == pytest.approx(max(by_hand.values()))
    assert trusting.best(Candidate("tsv")).validation != pytest.approx(outcome.validation)
    result = experiments.performance(wary, [Candidate("tsv"), Candidate("average")])
    assert "without task0" in result.headings
    assert "task0 is doubtful: turned round." in result.notes
    row = result.data[-1]
    assert (
        row["trusted"] == pytest.approx((row["tasks"]["task1"] + row["tasks"]["task2"]) / 2) == row["without"]["task0"]
    )
    assert row["difference_trusted"] == pytest.approx(row["difference_without"]["task0"])


def test_differences_are_shown_without_each_task_and_tested_over_tasks(bench):
    result = experiments.performance(bench, [Candidate("tsv"), Candidate("average"), Candidate("ties")])
    _, _, tsv, *others = result.data
    assert result.headings[-3:] == ["against tsv", "p over tasks", "without one task"]
    for row, cells in zip(others, result.rows[3:], strict=True):
        ahead = {task: row["tasks"][task] - tsv["tasks"][task] for task in row["tasks"]}
        total = sum(ahead.values())
        flips = [
            sum(s * d for s, d in zip(signs, ahead.values(), strict=True))
            for signs in itertools.product((1, -1), repeat=3)
        ]
        assert row["p_tasks"] == sum(abs(f) >= abs(total) - 1e-9 for f in flips) / 8
        assert row["difference_without"] == pytest.approx({task: (total - d) / 2 for task, d in ahead.items()})
        assert row["p"] <= row["p_holm"] <= min(1, 2 * max(r["p"] for r in others))
        least = min(row["difference_without"], key=row["difference_without"].get)
        assert cells[-1].startswith(f"{100 * row['difference_without'][least]:+.1f} ({least}) to ")
    assert result.rows[2][-1].count(" to ") == 1  # tsv itself: its averages


def test_a_mean_is_tried_as_far_as_a_sum(bench):
    mean = Candidate("epimer", {"aggregator": "mean"})
    assert bench.grid(Candidate("epimer")) == tuple(SCALES)
    assert bench.grid(mean)[: len(SCALES)] == tuple(SCALES)
    assert bench.grid(mean)[-1] == 3 * SCALES[-1]
    assert list(bench.grid(mean)) == sorted(bench.grid(mean))
    tagged = Candidate("epimer", {"normalize": "none", "aggregator": "mean", "scale": 0.1})  # ten times as short
    assert bench.best(tagged).scale > SCALES[-1]
    rows = [row for row in experiments.alpha(bench).data if row["method"] == "epimer"]
    assert max(row["alpha"] for row in rows if row["aggregator"] == "mean") == 3.0
    assert max(row["alpha"] for row in rows if row["aggregator"] == "sum") == 1.0


def test_epimer_as_published_has_the_empirical_fisher_of_true_labels(suite):
    bench = Bench(suite, samples=32, keep=False)
    _, published, jittered = AS_PUBLISHED
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:32]
    by_hand = []
    for state, task in zip(suite.models, suite.tasks, strict=True):
        squares = 0
        for i in order.tolist():
            made = network(state, task).double()
            loss = torch.nn.functional.cross_entropy(
                made(task.splits["train"].x[i, None].double()), task.splits["train"].y[i, None]
            )
            squares = squares + torch.autograd.grad(loss, made.two.weight)[0] ** 2 / 32
        by_hand.append(squares)
    measured = bench.curvature("diagonal", labels="true")
    for own, theirs in zip(by_hand, measured, strict=True):
        assert torch.allclose(theirs["two.weight"].F.double(), own, rtol=1e-4, atol=1e-9)
    direct = epimer.merge_state_dicts(
        dict(suite.base), bench.states, "epimer", curvature=measured, normalize="none", damping=0, jitter=1e-3
    )
    merged = bench.merge(jittered)
    assert all(torch.equal(merged[name], direct[name]) for name in direct)
    assert any(not torch.equal(merged[name], W) for name, W in bench.merge(published).items())
    assert bench.curvature("diagonal")[0]["two.weight"].F.ne(measured[0]["two.weight"].F).any()
    assert bench.at(jittered, 0.5).accuracies == bench.score(bench.scaled(merged, 0.5), "test").accuracies
