"""Intervals and the paired test against normal approximations, drawn samples and full enumeration."""

import itertools

import pytest
import torch

from epimer.evaluation import statistics as stats
from epimer.evaluation.statistics import Scores, compare, holm, sign_flip_p


def test_scores_that_are_no_hits_have_intervals_too():
    values = torch.linspace(-3, 1, 400, dtype=torch.float64)
    low, high = Scores([values]).interval()
    assert (low + high) / 2 == pytest.approx(-1, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * float(values.std()) / 20, rel=0.1)


def test_counting_a_few_values_is_drawing_samples(monkeypatch):
    values = torch.tensor([-1.0, 0.0, 0.0, 1 / 3, 1.0] * 60, dtype=torch.float64)
    counted = Scores([values, values[:200]]).interval()
    monkeypatch.setattr(stats, "FEW", 0)
    assert Scores([values, values[:200]]).interval() == pytest.approx(counted, abs=0.006)


def test_intervals_cover_and_shrink():
    few = Scores([torch.arange(100) < 70, torch.arange(100) < 90])
    many = Scores([torch.arange(10_000) < 7000, torch.arange(10_000) < 9000])
    assert few.average == many.average == pytest.approx(0.8)
    assert few.worst == pytest.approx(0.7)
    for scores, spread in ((few, (0.7 * 0.3 / 100 + 0.9 * 0.1 / 100) ** 0.5 / 2), (many, None)):
        low, high = scores.interval()
        assert low < scores.average < high
        if spread is not None:
            assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert many.interval()[1] - many.interval()[0] < 0.2 * (few.interval()[1] - few.interval()[0])


def test_the_paired_test_is_the_exact_one_within_its_draws():
    a = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    b = torch.tensor([1, 0, 0, 1, 0, 1, 0, 1], dtype=torch.bool)
    d = a.double() - b.double()
    changed = d[d != 0]
    signs = itertools.product((1, -1), repeat=len(changed))
    flips = [sum(s * abs(x) for s, x in zip(sign, changed.tolist(), strict=True)) for sign in signs]
    exact = sum(abs(f) >= abs(float(d.sum())) for f in flips) / len(flips)
    found = compare(Scores([a]), Scores([b]))
    difference, p = found.difference, found.p
    assert difference == pytest.approx(float(d.mean()))
    assert p == pytest.approx(exact, abs=0.04)
    assert found.low < difference < found.high
    same = compare(Scores([a]), Scores([a]))
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def task_scores(*accuracies):
    return Scores([torch.arange(100) < round(100 * accuracy) for accuracy in accuracies])


def test_the_test_over_tasks_goes_through_all_signs():
    differences = [0.02, -0.01, 0.03, 0.05, 0.01, 0.0, 0.04]
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    exact = sum(abs(total) >= sum(differences) - 1e-9 for total in sums) / len(sums)
    assert sign_flip_p(differences) == exact
    assert sign_flip_p([-d for d in differences]) == exact
    assert sign_flip_p([0.1] * 8) == 2 / 2**8  # the least there is with eight tasks
    assert sign_flip_p([0.0, 0.0, 0.0]) == sign_flip_p([0.3]) == 1.0


def test_many_tasks_are_tested_on_drawn_signs(monkeypatch):
    differences = torch.randn(13, generator=torch.Generator().manual_seed(3)).add(0.3).tolist()
    exact = sign_flip_p(differences)
    monkeypatch.setattr(stats, "EXACT", 12)
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.025)
    assert sign_flip_p([1.0] * 40) == 1 / (2**12 + 1)


def test_a_lead_that_rests_on_one_task_is_seen():
    ours, theirs = task_scores(0.8, 0.7, 0.9, 0.6), task_scores(0.8, 0.7, 0.9, 0.4)
    found = compare(ours, theirs)
    assert found.p < 0.01  # over samples
    assert found.p_tasks == 1.0
    assert found.without_one == pytest.approx([0.2 / 3, 0.2 / 3, 0.2 / 3, 0.0])
    assert ours.averages_without_one == pytest.approx([2.2 / 3, 2.3 / 3, 2.1 / 3, 2.4 / 3])
    assert task_scores(0.8).averages_without_one == []


def test_holm_multiplies_by_the_tests_that_are_left():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
