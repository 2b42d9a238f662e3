"""The metrics a task can be scored by, one number per sample, and which of them can be averaged."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from epimer.errors import ParameterError
from epimer.evaluation.suite import SampleFunction, Suite, classification_loss, correct
from epimer.score_format import SHARES
from epimer.tasks.labels import IGNORED, logits_of
from epimer.tasks.task import sample_losses


def token_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return each text's cross-entropy, the mean over its tokens."""
    return sample_losses(outputs, targets) / _token_counts(targets)


def token_accuracy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the share of each text's tokens that the model predicts first, NaN where logits hold NaN."""
    top, counted = logits_of(outputs).max(-1), targets != IGNORED
    hits = ((top.indices == targets) & counted).double().masked_fill(top.values.isnan() & counted, math.nan)
    return hits.sum(1) / _token_counts(targets)


def _token_counts(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum(1).clamp(min=1)


def _negated(loss: SampleFunction) -> SampleFunction:
    return lambda outputs, targets: -loss(outputs, targets)


CLASSIFIER_SCORES: dict[str, SampleFunction] = {"accuracy": correct, "loss": _negated(classification_loss)}
TOKEN_SCORES: dict[str, SampleFunction] = {
    "token-accuracy": token_accuracy,
    "loss": _negated(token_losses),
    "perplexity": _negated(token_losses),
}
"""metric -> score, of classifiers and of language models; the first is the default"""


def unit(metric: str) -> str:
    """Return the unit of a metric; only tasks of one unit can be averaged."""
    return "accuracy" if metric in SHARES else metric


def shared_unit(suite: Suite) -> str:
    """Return the unit of all tasks of a suite; refuse tasks of several units."""
    units = sorted({unit(task.metric) for task in suite.tasks})
    if len(units) > 1:
        raise ParameterError(
            f"{suite.name}: its tasks are measured in {', '.join(units)}, which cannot be averaged; give all tasks one "
            "metric."
        )
    return units[0]
