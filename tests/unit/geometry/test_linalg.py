"""Fast linear algebra against LAPACK in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import close
from epimer.geometry.linalg import (
    SVD_TOLERANCE,
    _gram_svd,
    _krylov_svd,
    as_compute_dtype,
    conjugate_gradients,
    polar,
    solve_spd,
    top_svd,
)


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


@pytest.mark.parametrize("shape", [(400, 400), (900, 400), (400, 900)])
@pytest.mark.parametrize(("power", "noise"), [(0.5, 0.5), (1.0, 0.2), (2.0, 0.0)])
def test_krylov_svd_is_within_its_tolerance(shape, power, noise):
    A = decaying(*shape, power, noise)
    svd = top_svd(A, 12)
    assert close(product(svd), truncated(A, 12), SVD_TOLERANCE / 4)
    assert close(svd.sigma, torch.linalg.svdvals(A)[:12], 1e-4)
    assert close(svd.U.T @ svd.U, torch.eye(12), 1e-4)
    assert close(svd.V.T @ svd.V, torch.eye(12), 1e-4)


def test_flat_spectrum_falls_back_to_the_gram_matrix():
    A = torch.randn(400, 300, generator=torch.Generator().manual_seed(1))
    assert _krylov_svd(A, 20) is None
    assert close(product(top_svd(A, 20)), truncated(A, 20), 1e-5)
    assert close(product(_gram_svd(A, 20)), truncated(A, 20), 1e-5)


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


def test_equal_matrices_have_equal_triples():
    A = decaying(300, 300, 0.7, 0.3)
    first, second = top_svd(A, 20), top_svd(A.clone(), 20)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), p=st.integers(1, 20), seed=st.integers(0, 1000))
def test_polar_factor_is_the_nearest_orthonormal_matrix(m, p, seed):
    torch.manual_seed(seed)
    X = torch.randn(max(m, p), p, dtype=torch.float64)
    factor, full_rank, _ = polar(X)
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    assert full_rank
    assert close(factor, U @ Vh, 1e-7)
    assert close(factor.T @ factor, torch.eye(p, dtype=torch.float64), 1e-10)


def test_ill_conditioned_polar_factor_still_agrees_with_the_svd():
    torch.manual_seed(0)
    U, V = torch.linalg.qr(torch.randn(30, 8).double()).Q, torch.linalg.qr(torch.randn(8, 8).double()).Q
    for lowest in (1e-1, 1e-3, 1e-4, 1e-4 / 3):
        factor, full_rank, _ = polar((U * torch.logspace(0, torch.tensor(lowest).log10(), 8).double()) @ V.T)
        assert full_rank
        assert close(factor, U @ V.T, 1e-7)
        assert close(factor.T @ factor, torch.eye(8, dtype=torch.float64), 1e-12)


def test_polar_factor_of_a_deficient_stack_is_a_partial_isometry():
    Q = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    factor, full_rank, _ = polar(torch.cat([Q, Q], dim=1))
    assert not full_rank
    assert close(factor, torch.cat([Q, Q], dim=1) / 2**0.5, 1e-12)
    assert polar(torch.empty(5, 0)).factor.shape == (5, 0)


def test_solve_spd_damps_only_what_is_singular():
    torch.manual_seed(0)
    X = torch.randn(6, 6, dtype=torch.float64)
    b = torch.randn(6, 2, dtype=torch.float64)
    H = X @ X.T
    solution = solve_spd(H, b)
    assert (solution.damping, solution.status) == (0, "exact")
    assert close(H @ solution.value, b, 1e-8)
    singular = X[:, :3] @ X[:, :3].T
    reachable = singular @ b
    solution = solve_spd(singular, reachable)
    assert 0 < solution.damping < 1e-8 * float(singular.trace())
    assert solution.status == "damped"
    assert close(solution.value, torch.linalg.pinv(singular, rtol=1e-10) @ reachable, 1e-6)
    assert not solve_spd(torch.zeros(6, 6, dtype=torch.float64), b).value.any()
    assert solve_spd(torch.empty(0, 0), torch.empty(0, 1)).value.shape == (0, 1)


def test_conjugate_gradients_solves_and_reports_its_residual():
    torch.manual_seed(0)
    X = torch.randn(30, 30, dtype=torch.float64)
    H, b = X @ X.T, torch.randn(30, dtype=torch.float64)
    solution = conjugate_gradients(lambda x: H @ x, b)
    assert solution.residual < 1e-9
    assert solution.status == "converged"
    assert close(solution.value, torch.linalg.solve(H, b), 1e-5)
    assert conjugate_gradients(lambda x: H @ x, torch.zeros(30)).residual == 0
    assert conjugate_gradients(lambda x: 0 * x, b).residual == 1  # nothing to gain: stops where it is
    assert conjugate_gradients(lambda x: H @ x, b, max_steps=2).residual > 1e-3


def test_conjugate_gradients_solve_a_consistent_singular_system():
    torch.manual_seed(0)
    X = torch.randn(20, 5, dtype=torch.float64)
    H = X @ X.T
    b = H @ torch.randn(20, dtype=torch.float64)
    assert close(conjugate_gradients(lambda x: H @ x, b).value, torch.linalg.pinv(H, rtol=1e-10) @ b, 1e-8)


def test_the_precision_of_arithmetic_is_float32_at_least():
    assert as_compute_dtype(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert as_compute_dtype(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
