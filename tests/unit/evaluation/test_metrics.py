"""Scores by sample against direct computations, and which metrics share a unit."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from epimer.evaluation.metrics import CLASSIFIER_SCORES, TOKEN_SCORES, unit
from epimer.tasks.task import sample_losses


def test_metrics_of_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    targets[0, 3:] = targets[2, 1:] = -100
    outputs = SimpleNamespace(logits=logits)
    p = log_softmax(logits.double(), -1)
    for i in range(3):
        real = [j for j in range(5) if targets[i, j] != -100]
        losses = [-float(p[i, j, targets[i, j]]) for j in real]
        hits = [float(logits[i, j].argmax() == targets[i, j]) for j in real]
        assert float(sample_losses(outputs, targets)[i]) == pytest.approx(sum(losses), rel=1e-5)
        assert float(TOKEN_SCORES["loss"](outputs, targets)[i]) == pytest.approx(-sum(losses) / len(real), rel=1e-5)
        assert float(TOKEN_SCORES["perplexity"](outputs, targets)[i]) == pytest.approx(
            -sum(losses) / len(real), rel=1e-5
        )
        assert float(TOKEN_SCORES["token-accuracy"](outputs, targets)[i]) == pytest.approx(sum(hits) / len(real))
    whole = CLASSIFIER_SCORES["loss"](logits[:, 0], targets[:, 0])
    assert torch.allclose(whole, -cross_entropy(logits[:, 0], targets[:, 0], reduction="none"))


def test_logits_that_are_no_numbers_get_no_score():
    logits = torch.randn(4, 3)
    targets = logits.argmax(1)
    logits[1, 0], logits[2, targets[2]] = math.nan, math.inf
    assert CLASSIFIER_SCORES["accuracy"](logits, targets).nan_to_num(-1).tolist() == [1, -1, 1, 1]
    logits = torch.randn(3, 4, 5)
    targets = logits.argmax(-1)
    targets[:, 2:] = -100
    logits[0, 3, 0], logits[1, 1, 0] = math.nan, math.nan  # a place that does not count, and one that does
    assert TOKEN_SCORES["token-accuracy"](logits, targets).nan_to_num(-1).tolist() == [1, -1, 1]


def test_only_shares_have_one_unit():
    assert unit("token-accuracy") == unit("accuracy") != unit("loss")
