"""How scores are printed. Inside the library higher is better; readers expect percentages, and losses as losses."""

from __future__ import annotations

import math
from typing import TypeVar

T = TypeVar("T")
AGREEMENT = "agreement"
"""share of predictions that are those of each task's own model; it needs no labels"""
SHARES = ("accuracy", "token-accuracy", AGREEMENT)
LOSSES = ("loss", "perplexity")


def metric_heading(metric: str) -> str:
    """Return a metric's name and unit, as the title of a table or an axis says them."""
    name = "agreement with each task's own model" if metric == AGREEMENT else metric
    return f"{name}, %" if metric in SHARES else name


def metric_value(metric: str, score: float) -> float:
    """Convert a mean score to the metric's own value: a loss is minus the score, perplexity is exp(loss)."""
    if metric == "loss":
        return -score
    if metric == "perplexity":
        return math.exp(min(-score, 700.0))  # exp overflows beyond
    return score


def format_score(metric: str, score: float) -> str:
    """Format a mean score for a table: shares in percent, anything else as a number."""
    if metric in SHARES:
        return f"{100 * score:.1f}"
    value = metric_value(metric, score)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def format_interval(metric: str, low: float, high: float) -> str:
    """Format an interval of scores for a table, as `[lower value, upper value]` of the metric."""
    first, last = order_bounds(metric, low, high)
    return f"[{format_score(metric, first)}, {format_score(metric, last)}]"


def order_bounds(metric: str, low: T, high: T) -> tuple[T, T]:
    """Order the bounds of an interval of scores by the metric's value: for a loss the higher score comes first."""
    return (high, low) if metric in LOSSES else (low, high)


def metric_difference(metric: str, difference: float) -> float:
    """Convert a difference of scores to a difference of the metric: for losses, how much higher one is."""
    return -difference if metric in LOSSES else difference


def format_p_value(p: float) -> str:
    """Format a p-value for a table; one estimated by sampling is never shown as zero."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
