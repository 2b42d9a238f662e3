"""Scores as tables show them."""

import math

import pytest

from epimer.score_format import format_interval, format_p_value, format_score, metric_difference, metric_value


def test_scores_as_people_know_them():
    assert format_score("accuracy", 0.8125) == "81.2"
    assert format_score("loss", -0.5) == "0.500"
    assert metric_value("perplexity", -2.0) == pytest.approx(math.exp(2))
    assert metric_value("perplexity", -1e6) < math.inf
    assert format_score("f1", 0.25) == "0.250"


def test_intervals_and_differences_of_losses_read_from_low_to_high():
    assert format_interval("accuracy", 0.5, 0.75) == "[50.0, 75.0]"
    assert format_interval("loss", -0.75, -0.5) == "[0.500, 0.750]"
    assert metric_difference("loss", 0.25) == -0.25
    assert metric_difference("accuracy", 0.25) == 0.25
    assert (format_p_value(0.0004), format_p_value(0.0126)) == ("< 0.001", "0.013")
