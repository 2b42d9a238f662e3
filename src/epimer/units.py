"""How scores read. Within the library higher is better; people read shares in percent, and losses as losses."""

from __future__ import annotations

import math

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
    low, high = (low, high) if metric not in LOSSES else (high, low)
    return f"[{shown(metric, low)}, {shown(metric, high)}]"
