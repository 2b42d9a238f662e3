"""Too little memory, however it is said: it is known as such, and less is tried before it is an error."""

import errno
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from epimer.checkpoints.checkpoint import Pages
from epimer.errors import CurvatureError, DataError, EpimerWarning
from epimer.machine import out_of_memory
from trained import make_suite

TOO_MUCH = 1 << 60
cross_entropy = partial(functional.cross_entropy, reduction="none")


class Greedy(nn.Module):
    """A model whose activations take more memory than there is from some number of samples on."""

    def __init__(self, most, backward=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.most, self.backward, self.sizes = most, backward, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most and not self.backward:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        y = self.first(x)
        if len(x) > self.most and torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(lambda _: torch.empty(TOO_MUCH, dtype=torch.uint8))
        return self.second(y.tanh())


def batches(sizes=(16, 16, 7)):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(TOO_MUCH, dtype=torch.uint8),
        lambda: np.empty(TOO_MUCH, np.uint8),
        lambda: bytearray(1 << 62),
        lambda: Pages(0).take(TOO_MUCH),
    ],
    ids=["torch", "numpy", "python", "pages"],
)
def test_every_way_of_having_too_little_memory_is_known(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert out_of_memory(caught.value)


def test_other_errors_are_not_taken_for_it():
    others = [
        RuntimeError("size mismatch"),
        RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError(),
        KeyError(1),
    ]
    assert not any(map(out_of_memory, others))
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("could not create a primitive"))
    assert out_of_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))


@pytest.mark.parametrize("labels", ["true", "model"])
def test_curvature_is_measured_with_smaller_batches_and_is_the_same(labels):
    how = {"kind": "kronecker", "samples": None, "labels": labels}
    whole = epimer.estimate_curvature(Greedy(100), batches(), cross_entropy, **how)
    tight = Greedy(5)
    with pytest.warns(EpimerWarning, match="too little memory for a batch of 16 samples, so .* with batches of 8"):
        parts = epimer.estimate_curvature(tight, batches(), cross_entropy, **how)
    assert max(tight.sizes[-4:]) <= 4
    assert parts.provenance.samples == whole.provenance.samples == 39
    for name in whole.metrics:
        for part in ("A", "G"):
            assert torch.allclose(getattr(parts[name], part), getattr(whole[name], part), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("most", "backward"), [(0, False), (5, True)], ids=["one sample", "sums were begun"])
def test_curvature_that_does_not_fit_says_what_to_do(most, backward):
    model = Greedy(most, backward)
    expected = "too little memory for a batch of .* samples; take a .*--max-length"
    with pytest.raises(CurvatureError, match=expected):
        epimer.estimate_curvature(model, batches(), cross_entropy, kind="kronecker", samples=None)


def test_a_suite_is_scored_in_smaller_batches_and_scores_are_the_same(tmp_path):
    suite = make_suite(tmp_path)
    expected, network, sizes = suite.scores(suite.base, "test"), suite.network, []

    class Tight(nn.Module):
        def __init__(self, inner, most):
            super().__init__()
            self.inner, self.most = inner, most

        def forward(self, x):
            sizes.append(len(x))
            if len(x) > self.most:
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            return self.inner(x)

    suite = replace(suite, network=lambda state, task: Tight(network(state, task), 60))
    found = suite.scores(suite.base, "test")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert sizes[:3] == [200, 100, 50]
    suite = replace(suite, network=lambda state, task: Tight(network(state, task), 0))
    with pytest.raises(DataError, match="too little memory for one test sample of task 'task0'; free some"):
        suite.scores(suite.base, "test")
