"""Factors against dense float64: the space they span, matrices of a rank, and the methods that merge there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epimer.geometry.factors import below_each_other, cores_of, in_columns, of_rank, padded
from epimer.geometry.linalg import LowRank
from epimer.methods.registry import Layer, describe_method, list_methods

M, N = 40, 28
WEIGHTS = [0.5, 0.2, 0.3]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adapters(*ranks: int, m: int = M, n: int = N) -> list[LowRank]:
    return [LowRank(random(m, r, seed=10 + t), random(r, n, seed=20 + t)) for t, r in enumerate(ranks)]


SETS = {
    "ranks that differ": adapters(2, 5, 3),
    "one that changes nothing": [*adapters(4, 3), LowRank(torch.zeros(M, 0).double(), torch.zeros(0, N).double())],
    "copies": [adapters(3)[0], adapters(3)[0], adapters(3, 4)[1]],
    "more columns than rows": adapters(12, 9, 11),
    "nearly dependent": [adapters(3)[0], LowRank(adapters(3)[0].B + 1e-5 * random(M, 3, seed=5), adapters(3)[0].A),
                         adapters(3, 4)[1]],
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_matrices_are_whole_in_the_space_of_their_factors(name):
    deltas = SETS[name]
    space = cores_of(deltas)
    for basis in (space.P, space.Q):
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]).double(), atol=1e-12, rtol=0)
    for D, core in zip(deltas, space.cores, strict=True):
        torch.testing.assert_close(space.P @ core @ space.Q.T, D.dense(), atol=1e-11, rtol=0)


CLAIMED = [name for name in list_methods() if describe_method(name).equivariant]
OPTIONS = {
    "tsv": [{}, {"rank": 2}, {"rank": 7}, {"coefficients": "projected"}],
    "iso_cts": [{}, {"common": 0.3}, {"common": 1.0}],
    "epimer_free": [
        {}, {"rank": 2}, {"calibrate": None}, {"anchor": "iso_c", "calibrate": None},
        {"anchor": "stretched", "normalize": "common"},
        {"aggregator": "mean"}, {"basis": "tagged", "aggregator": "sum"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("inputs", [1, 0])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("method", "given"), [(name, given) for name in CLAIMED for given in OPTIONS.get(name, [{}])], ids=str
)
def test_a_merge_of_cores_is_the_dense_merge(method, given, name, inputs):
    row, deltas = describe_method(method), SETS[name]
    options = row.resolve(given)
    whole = Layer("w", [D.dense() for D in deltas], WEIGHTS, inputs=inputs)
    space = cores_of(deltas)
    small = replace(whole, deltas=space.cores, whole_shape=(M, N))
    expected = row.merge(whole, options).value
    found = space.P @ row.merge(small, options).value @ space.Q.T
    assert torch.linalg.vector_norm(found - expected) <= 1e-8 * torch.linalg.vector_norm(expected)


def test_the_methods_that_claim_it():
    assert {"average", "task_arithmetic", "tsv", "iso_c", "iso_cts", "epimer_free"} <= {*CLAIMED}
    assert not {"ties", "dare", "regmean", "epimer", "wudi"} & {*CLAIMED}


@pytest.mark.parametrize("rank", [1, 3, 28])
def test_of_rank_is_the_best_there_is_and_tells_the_error(rank):
    D = random(M, N, seed=1)
    factors, error = of_rank(D, rank)
    sigma = torch.linalg.svdvals(D)
    best = float(sigma[rank:].square().sum().sqrt() / sigma.square().sum().sqrt())
    assert len(factors.A) == rank
    assert abs(error - best) < 1e-12
    assert abs(float(torch.linalg.vector_norm(D - factors.dense()) / torch.linalg.vector_norm(D)) - error) < 1e-12


def test_of_rank_of_nothing():
    factors, error = of_rank(torch.zeros(5, 4).double(), 2)
    assert error == 0
    assert not padded(factors, 2).dense().any()
    assert padded(factors, 2).A.shape == (2, 4)


def test_columns_are_kept_and_what_lies_outside_is_told():
    B = random(M, 6, seed=1)
    inside, outside = B @ random(6, N, seed=2), random(M, N, seed=3)
    factors, error = in_columns(inside, B)
    torch.testing.assert_close(factors.dense(), inside, atol=1e-11, rtol=0)
    assert error < 1e-12
    _, error = in_columns(outside, B)
    P = torch.linalg.svd(B, full_matrices=False).U
    left = torch.linalg.vector_norm(outside - P @ (P.T @ outside)) / torch.linalg.vector_norm(outside)
    assert abs(error - float(left)) < 1e-12


@pytest.mark.parametrize("kind", ["one A", "one row space", "apart", "matrices"])
def test_matrices_below_each_other(kind):
    """Exact where the rank holds them, the nearest of the rank where not; rows without a piece are 0."""
    A = random(5, N, seed=1)
    mixed = random(5, 5, seed=2) @ A if kind == "one row space" else random(5, N, seed=3) if kind == "apart" else A
    upper, lower = LowRank(random(10, 5, seed=4), A), LowRank(random(18, 5, seed=5), mixed)
    D = torch.cat([upper.dense(), torch.zeros(12, N).double(), lower.dense()])
    pieces = [(0, upper), (22, lower.dense() if kind == "matrices" else lower)]
    held = 10 if kind == "apart" else 5
    factors, error = below_each_other(pieces, M, held)
    assert (factors.dense() - D).norm() < 1e-12 * D.norm()
    assert error < 1e-12
    assert kind != "one A" or torch.equal(factors.A, A)
    factors, error = below_each_other(pieces, M, 3)
    sigma = torch.linalg.svdvals(D)
    assert len(factors.A) == 3
    assert abs(float((factors.dense() - D).norm()) - float(sigma[3:].norm())) < 1e-10
    assert abs(error - float(sigma[3:].norm() / sigma.norm())) < 1e-12
