"""Performance over training seeds: means, spreads and differences, recomputed from each seed's own table."""

import itertools
import json
import statistics
from dataclasses import replace

import pytest

from epimer.errors import DataError, ParameterError
from epimer.evaluation import open_suite
from epimer.experiments import paper, seeds
from epimer.experiments.bench import Candidate
from trained import make_suite

pytestmark = pytest.mark.slow
METHODS = [Candidate("tsv"), Candidate("average"), Candidate("epimer_free")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Three seeds of the small suite, through the same path as `epimer bench glyphs8 --seeds 0,1,2`."""
    place = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(open_suite.SUITES, "small", "loader")
        patch.setattr(open_suite, "_loader", lambda name: lambda seed, progress: make_suite(None, seed=seed))
        patch.setitem(paper.EXPERIMENTS, "performance", lambda bench: paper.performance(bench, METHODS))
        results = list(seeds.run_seeds("small", [0, 1, 2], place, progress=False))
    return [result for result, _ in results], place


def test_each_seed_has_its_table_and_all_have_one(ran):
    results, place = ran
    assert [one.name for one in results] == [*(f"performance-seed{seed}" for seed in range(3)), "performance-seeds"]
    for one in results:
        assert json.loads((place / f"{one.name}.json").read_text())["rows"] == one.rows
    assert results[-1].made["seed"] == [0, 1, 2]
    assert "seeds 0, 1, 2" in results[-1].notes[-1]
    assert results[0].data[2]["average"] != results[1].data[2]["average"]


def test_means_and_spreads_are_those_of_the_seeds(ran):
    *tables, total = ran[0]
    for i, row in enumerate(total.data):
        own = [table.data[i] for table in tables]
        averages = [one["average"] for one in own]
        assert row["average"] == pytest.approx(sum(averages) / 3)
        assert row["sd"] == pytest.approx(statistics.stdev(averages))
        assert list(row["seeds"].values()) == averages
        assert row["without"]["task1"] == pytest.approx(sum(one["without"]["task1"] for one in own) / 3)
        if "difference" in row:
            differences = [one["difference"] for one in own]
            assert list(row["differences"].values()) == differences
            assert row["difference_sd"] == pytest.approx(statistics.stdev(differences))
            ahead = [
                sum(one["tasks"][task] - table.data[2]["tasks"][task] for one, table in zip(own, tables, strict=True))
                for task in row["tasks"]
            ]
            flips = [
                sum(s * d for s, d in zip(signs, ahead, strict=True)) for signs in itertools.product((1, -1), repeat=3)
            ]
            assert row["p_tasks"] == sum(abs(flip) >= abs(sum(ahead)) - 1e-9 for flip in flips) / 8
            assert sum(row["difference_without"].values()) / 3 == pytest.approx(row["difference"])
    assert ["difference" in row for row in total.data] == [False, False, False, True, True]
    assert f"{100 * total.data[3]['difference']:+.1f} ± " in total.rows[3][total.headings.index("against tsv")]


def test_doubtful_tasks_are_left_out_beside_the_mean(ran):
    *tables, _ = ran[0]
    tasks = make_suite(None).tasks
    total = seeds.over_seeds(dict(enumerate(tables)), "accuracy", [replace(tasks[0], doubtful="so"), *tasks[1:]])
    row = total.data[3]
    assert row["trusted"] == pytest.approx((row["tasks"]["task1"] + row["tasks"]["task2"]) / 2)
    assert row["difference_trusted"] == pytest.approx(row["difference_without"]["task0"])
    assert "without task0" in total.headings


def test_what_has_no_spread_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ParameterError, match="two different seeds"):
        next(seeds.run_seeds("glyphs8", [1, 1], tmp_path))
    same = make_suite(None)
    monkeypatch.setattr(seeds, "open_suite", lambda name, **options: same)
    with pytest.raises(DataError, match="the same for every seed"):
        next(seeds.run_seeds("glyphs8", [0, 1], tmp_path))
