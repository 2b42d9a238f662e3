"""KL divergence in bounded memory: torch's own in float64, and never more than it where classes are put together."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div

from epimer.errors import DataError
from epimer.evaluation.divergence import KEPT, Predictions
from epimer.evaluation.judges import SplitScores, by_agreement
from trained import make_suite, network


def logits(classes, seed, spread=3.0):
    return spread * torch.randn(7, classes, generator=torch.Generator().manual_seed(seed))


def whole(own, other):
    """Return the KL divergence of every row over all classes, by torch in float64."""
    p, q = own.double().log_softmax(1), other.double().log_softmax(1)
    return kl_div(q, p, reduction="none", log_target=True).sum(1)


@pytest.mark.parametrize("classes", [2, KEPT])
def test_of_few_classes_it_is_that_of_torch(classes):
    own, other = logits(classes, 0), logits(classes, 1)
    found = Predictions.of(own).divergence(other)
    torch.testing.assert_close(found.double(), whole(own, other), rtol=1e-5, atol=1e-6)


def test_of_many_classes_it_is_that_of_the_kept_ones_and_the_rest():
    own, other = logits(4 * KEPT, 0), logits(4 * KEPT, 1)
    found = Predictions.of(own).divergence(other).double()
    assert bool((found < whole(own, other)).all())
    assert bool((found > 0.2 * whole(own, other)).all())
    p, q = own.double().softmax(1), other.double().softmax(1)
    for row in range(len(own)):
        kept = p[row].argsort(descending=True)[:KEPT]
        both = [torch.cat([d[row][kept], 1 - d[row][kept].sum()[None]]) for d in (p, q)]
        expected = (both[0] * (both[0] / both[1]).log()).sum()
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-4)


def test_of_many_classes_it_is_whole_where_the_others_are_impossible():
    own, other = logits(4 * KEPT, 0), logits(4 * KEPT, 1)
    own[:, KEPT:] -= 200.0  # every likely class is kept
    found = Predictions.of(own).divergence(other)
    torch.testing.assert_close(found.double(), whole(own, other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("classes", [5, KEPT + 40])
def test_its_gradient_is_that_of_softmax(classes, masked):
    own, other = logits(classes, 0), logits(classes, 1)
    if masked:  # classes that no model can predict
        own[:, 3:], other[:, 3:] = -torch.inf, -torch.inf
    leaf = other.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(Predictions.of(own).divergence(leaf).sum(), leaf)
    assert bool(found.isfinite().all())
    if classes <= KEPT or masked:
        expected = other.double().softmax(1) - own.double().softmax(1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def suite_with(tmp_path, change):
    """Return a suite of a single task whose merges' logits are changed; the fine-tuned model's are not."""
    suite = make_suite(tmp_path)
    suite = replace(suite, tasks=suite.tasks[:1], models=suite.models[:1])
    tuned = suite.models[0]

    class Changed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return change(self.inner(x))

    def make(state, task):
        return network(state, task) if state is tuned else Changed(network(state, task)).eval()

    return replace(suite, network=make)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_predictions_that_are_no_numbers_are_refused(tmp_path, bad):
    suite = suite_with(tmp_path, lambda out: out.index_fill(1, torch.tensor([1]), bad))
    with pytest.raises(DataError, match=r"NaN or Inf as agreement on 150 of 150 val samples of task 'task0'"):
        by_agreement(suite)(suite.base, "val")


def test_agreement_is_of_the_likeliest_of_all_classes(tmp_path):
    """A merge that likes a class best which is not kept disagrees, though among the kept ones it agrees."""
    wide = torch.nn.functional.pad
    suite = suite_with(tmp_path, lambda out: wide(out, (0, 2 * KEPT), value=100.0))
    small = suite.network

    def make(state, task):
        if state is not suite.models[0]:
            return small(state, task)
        return torch.nn.Sequential(small(state, task), torch.nn.ConstantPad1d((0, 2 * KEPT), -100.0)).eval()

    judged = by_agreement(replace(suite, network=make))(dict(suite.models[0]), "val")
    assert float(judged.scores["task0"].sum()) == 0
    assert judged.kl["task0"] > 50


def test_the_order_of_merges_is_agreement_less_kl_of_trusted_tasks():
    scores = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0]), "c": torch.tensor([0.0])}
    kl = {"a": 0.25, "b": 0.75, "c": 100.0}
    assert SplitScores(scores, kl, doubtful=frozenset("c")).order == pytest.approx(0.75 - 0.5)
    assert SplitScores(scores, doubtful=frozenset("c")).order == 0.75
