"""Leading singular triples against LAPACK in float64."""

import pytest
import torch

from dense import close
from epimer.geometry.svd import SVD_TOLERANCE, searches, top_svd, top_svds


def decaying(m, n, power, noise=0.0, seed=0):
    torch.manual_seed(seed)
    side = min(m, n)
    U, V = torch.linalg.qr(torch.randn(m, side)).Q, torch.linalg.qr(torch.randn(n, side)).Q
    A = (U * torch.arange(1, side + 1) ** -power) @ V.T
    E = torch.randn(m, n)
    return A / A.norm() + noise * E / E.norm()


def truncated(A, k):
    U, S, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    return (U[:, :k] * S[:k]) @ Vh[:k]


def product(svd):
    U, S, V = svd
    return ((U * S) @ V.T).double()


def mean_angle(V, W):
    """The root mean square sine of the angles between W's columns and the span of V."""
    outside = W.double() - V.double() @ (V.double().T @ W.double())
    return float(outside.square().sum(0).mean().sqrt())


@pytest.mark.parametrize("shape", [(400, 400), (900, 400), (400, 900)])
@pytest.mark.parametrize(("power", "noise"), [(0.5, 0.5), (1.0, 0.2), (2.0, 0.0), (0.0, 0.0), (0.0, 1.0)])
def test_searched_triples_are_within_their_tolerance(shape, power, noise):
    if power == 0:  # a flat spectrum, the worst case
        A = torch.randn(shape, generator=torch.Generator().manual_seed(0)) if noise else decaying(*shape, 0.05)
    else:
        A = decaying(*shape, power, noise)
    assert searches(A, 12)
    [svd], [error] = top_svds([A], 12)
    assert 0 < error <= SVD_TOLERANCE
    assert close(product(svd), truncated(A, 12), 1.5 * SVD_TOLERANCE)
    assert close(svd.sigma, torch.linalg.svdvals(A)[:12], 1e-4)
    assert close(svd.U.T @ svd.U, torch.eye(12), 1e-4)
    assert close(svd.V.T @ svd.V, torch.eye(12), 1e-4)
    _, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    assert mean_angle(svd.V, Vh[:12].T) < 2 * error + 1e-5  # what it says of itself is true


@pytest.mark.parametrize(("shape", "k"), [((512, 2048), 60), ((400, 400), 48)])
def test_many_triples_of_pure_noise_are_searched_within_the_tolerance(shape, k):
    A = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    [svd], [error] = top_svds([A], k, 1e-3)
    assert 0 < error <= 1e-3  # 0 where it was decomposed instead
    _, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    assert mean_angle(svd.V, Vh[:k].T) < 2 * error + 1e-5


def test_a_stack_is_searched_like_its_matrices(monkeypatch):
    matrices = [decaying(300, 400, 0.7, 0.3, seed) for seed in range(3)]
    alone = [top_svd(A, 10) for A in matrices]
    monkeypatch.setattr("epimer.geometry.svd._groups", lambda tasks, A: [tasks])  # as on a GPU
    together, errors = top_svds(matrices, 10)
    assert all(0 < error <= SVD_TOLERANCE for error in errors)
    for one, other in zip(alone, together, strict=True):
        assert close(product(one), product(other), 2 * SVD_TOLERANCE)


def test_equal_singular_values_across_the_cut_need_not_be_told_apart():
    Q = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0))).Q
    [svd], _ = top_svds([Q], 20)
    assert searches(Q, 20)
    assert close(svd.sigma, torch.ones(20), 1e-5)
    assert close(product(svd) @ svd.V.double(), (Q @ svd.V).double(), 1e-5)


def test_what_float32_cannot_search_is_decomposed():
    A = decaying(300, 300, 3.0)  # sigma falls to 1e-5 of the first, below the rounding of a Gram matrix
    [svd], [error] = top_svds([A], 48)
    assert (searches(A, 48), error) == (True, 0)
    assert close(product(svd), truncated(A, 48), 1e-4)
    exact = top_svd(A, 48, exact=True)
    assert all(torch.equal(one, other) for one, other in zip(svd, exact, strict=True))


@pytest.mark.parametrize("unit", [1e-15, 1e12])
def test_the_unit_does_not_matter(unit):
    A = decaying(300, 260, 0.7, 0.3)
    assert close(product(top_svd(A * unit, 10)) / unit, product(top_svd(A, 10)), 1e-5)


@pytest.mark.parametrize("shape", [(40, 30), (300, 260), (500, 260)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficient_matrices_give_their_rank(shape, dtype):
    torch.manual_seed(0)
    A = torch.randn(shape[0], 3, dtype=dtype) @ torch.randn(3, shape[1], dtype=dtype)
    svd = top_svd(A, 10)
    assert len(svd.sigma) == 3
    assert svd.U.dtype == dtype
    assert close(product(svd), A.double(), 1e-5)
    assert top_svd(torch.zeros(shape, dtype=dtype), 10).sigma.numel() == 0


@pytest.mark.parametrize("stacked", [False, True])
def test_a_steep_spectrum_is_searched_and_not_decomposed(monkeypatch, stacked):
    """Float32 cannot resolve its gaps: one step in float64 does."""
    matrices = [decaying(400, 300, 1.5, seed=seed) for seed in range(2)]
    if stacked:
        monkeypatch.setattr("epimer.geometry.svd._groups", lambda tasks, A: [tasks])  # as on a GPU
    for A, svd, error in zip(matrices, *top_svds(matrices, 32), strict=True):
        _, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
        assert 0 < error < 1e-5
        assert mean_angle(svd.V, Vh[:32].T) < 2 * error + 1e-6


def test_equal_matrices_have_equal_triples():
    A = decaying(300, 300, 0.7, 0.3)
    first, second = top_svd(A, 20), top_svd(A.clone(), 20)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("k", [4, 32, 60])
@pytest.mark.parametrize("power", [0.3, 0.7, 1.5])
def test_few_and_many_triples_are_within_their_tolerance(k, power):
    A = decaying(300, 300, power)
    [svd], [error] = top_svds([A], k)
    _, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    assert error <= SVD_TOLERANCE
    assert mean_angle(svd.V, Vh[:k].T) < 2 * error + 1e-5
    assert close(svd.V.T @ svd.V, torch.eye(k), 1e-4)
