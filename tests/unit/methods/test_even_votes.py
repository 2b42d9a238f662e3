"""Signs are elected by whole shares: an even vote is even in any order of the models, and no rounding decides it."""

from fractions import Fraction
from itertools import permutations

import pytest
import torch

import epimer
from epimer.methods.averaging import elected_by_mass

ELECTING = ["ties", "mergekit_ties", "dare_ties", "breadcrumbs_ties", "della", "sce"]
WEIGHTS = (0.2, 0.3, 0.5)


def narrow(seed, count=3, size=4000):
    """Return task vectors of few different values, as bfloat16 models have them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, (size,), generator=generator) / 128 for _ in range(count)]


@pytest.mark.parametrize("weights", [WEIGHTS, (1 / 3,) * 3, (0.1, 0.7, 0.2), (1e-9, 1e-9, 2e-9), (2.0, -1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_elected_sign_is_that_of_the_exact_sum(weights, dtype):
    deltas = [D.to(dtype) for D in narrow(0)]
    exact = [Fraction(w).limit_denominator(10) if max(weights) > 1e-3 else Fraction(round(1e9 * w)) for w in weights]
    values = [[Fraction(x) for x in D.tolist()] for D in deltas]
    sums = [sum(w * x for w, x in zip(exact, column, strict=True)) for column in zip(*values, strict=True)]
    before = [D.clone() for D in deltas]
    expected = torch.tensor([(x > 0) - (x < 0) for x in sums], dtype=dtype)
    found = elected_by_mass(deltas, list(weights))
    assert int((expected == 0).sum()) > 30
    assert torch.equal(found, expected)
    assert all(map(torch.equal, deltas, before))


def test_a_vote_of_one_model_alone_counts_however_small_its_weight():
    D = torch.tensor([0.0, 3.0, -2.0])
    found = elected_by_mass([torch.zeros(3), D], [1.0, 1e-12])
    assert torch.equal(found, D.sign())
    assert torch.equal(elected_by_mass([D, D], [0.0, 0.0]), torch.zeros(3))


@pytest.mark.parametrize("method", ELECTING)
def test_an_even_vote_is_even_in_any_order_of_the_models(method):
    base = {"w": torch.zeros(40, 100)}
    deltas = [D.view(40, 100) for D in narrow(1)]
    whole = {"density": 1.0} if method not in ("sce",) else {}
    merged = []
    for order in permutations(range(3)):
        models, weights = [{"w": deltas[t]} for t in order], [WEIGHTS[t] for t in order]
        merged.append(epimer.merge_state_dicts(base, models, method, weights=weights, **whole)["w"])
    for other in merged[1:]:
        assert float((other - merged[0]).norm()) <= 1e-6 * float(merged[0].norm())
