"""What a task's score can be: judged sample by sample, higher is better, and how people read its mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from epimer.errors import ParameterError
from epimer.evaluation.suite import Suite, classification_loss, right
from epimer.score_format import SHARES
from epimer.tasks.labels import IGNORED, logits_of
from epimer.tasks.task import sample_losses

Judge = Callable[[Any, Any], Tensor]


def token_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return each text's cross-entropy, the mean over its tokens."""
    return sample_losses(outputs, targets) / _tokens(targets)


def token_accuracy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the share of each text's tokens that are the model's first choice, NaN where logits hold NaN."""
    top, counted = logits_of(outputs).max(-1), targets != IGNORED
    hits = ((top.indices == targets) & counted).double().masked_fill(top.values.isnan() & counted, math.nan)
    return hits.sum(1) / _tokens(targets)


def _tokens(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum(1).clamp(min=1)


def _minus(loss: Judge) -> Judge:
    return lambda outputs, targets: -loss(outputs, targets)


CLASSES: dict[str, Judge] = {"accuracy": right, "loss": _minus(classification_loss)}
TOKENS: dict[str, Judge] = {
    "token-accuracy": token_accuracy,
    "loss": _minus(token_losses),
    "perplexity": _minus(token_losses),
}
"""of classifiers and of language models; the first is the default"""


def unit(metric: str) -> str:
    """Return what a metric is measured in; only tasks of one unit can be averaged."""
    return "accuracy" if metric in SHARES else metric


def one_unit(suite: Suite) -> str:
    """Return what all tasks of a suite are measured in; refuse tasks of several units."""
    units = sorted({unit(task.metric) for task in suite.tasks})
    if len(units) > 1:
        raise ParameterError(
            f"{suite.name}: its tasks are measured in {', '.join(units)}, of which no average can be taken; give all "
            "tasks one metric."
        )
    return units[0]
