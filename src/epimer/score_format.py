"""How scores read. Within the library higher is better; people read shares in percent, and losses as losses."""

from __future__ import annotations

import math
from typing import TypeVar

T = TypeVar("T")
SHARES = ("accuracy", "token-accuracy")
LOSSES = ("loss", "perplexity")


def natural(metric: str, score: float) -> float:
    """Return a mean score as the metric is known: a loss is minus the score, perplexity is exp(loss)."""
    if metric == "loss":
        return -score
    if metric == "perplexity":
        return math.exp(min(-score, 700.0))  # past which a float holds no more
    return score


def shown(metric: str, score: float) -> str:
    """Return a mean score as tables show it: shares in percent, anything else as a number."""
    if metric in SHARES:
        return f"{100 * score:.1f}"
    value = natural(metric, score)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def between(metric: str, low: float, high: float) -> str:
    """Return an interval as tables show it."""
    first, last = ends(metric, low, high)
    return f"[{shown(metric, first)}, {shown(metric, last)}]"


def ends(metric: str, low: T, high: T) -> tuple[T, T]:
    """Return the ends of an interval of scores in the order in which they read."""
    return (high, low) if metric in LOSSES else (low, high)


def apart(metric: str, by: float) -> float:
    """Return a difference of two scores as one of what they read as: of losses, how much higher one is."""
    return -by if metric in LOSSES else by


def chance(p: float) -> str:
    """Return a probability as tables show it; none that was drawn for is zero."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
