"""Intervals and the paired test against normal approximations, drawn samples and full enumeration."""

import itertools

import pytest
import torch

from epimer.evaluation import statistics as stats
from epimer.evaluation.statistics import Scores, compare


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
