"""Fast linear algebra against LAPACK in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import close
from epimer.geometry.linalg import (
    as_compute_dtype,
    conjugate_gradients,
    gram,
    newton_schulz_polar,
    nonfinite,
    polar,
    sandwich,
    solve_spd,
    symmetrize_,
)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), p=st.integers(1, 20), seed=st.integers(0, 1000))
def test_polar_factor_is_the_nearest_orthonormal_matrix(m, p, seed):
    torch.manual_seed(seed)
    X = torch.randn(max(m, p), p, dtype=torch.float64)
    factor, full_rank, *_ = polar(X)
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    assert full_rank
    assert close(factor, U @ Vh, 1e-7)
    assert close(factor.T @ factor, torch.eye(p, dtype=torch.float64), 1e-10)


def test_ill_conditioned_polar_factor_still_agrees_with_the_svd():
    torch.manual_seed(0)
    U, V = torch.linalg.qr(torch.randn(30, 8).double()).Q, torch.linalg.qr(torch.randn(8, 8).double()).Q
    for lowest in (1e-1, 1e-3, 1e-4, 1e-4 / 3):
        factor, full_rank, *_ = polar((U * torch.logspace(0, torch.tensor(lowest).log10(), 8).double()) @ V.T)
        assert full_rank
        assert close(factor, U @ V.T, 1e-7)
        assert close(factor.T @ factor, torch.eye(8, dtype=torch.float64), 1e-12)


def test_polar_factor_of_a_deficient_stack_is_a_partial_isometry():
    Q = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    factor, full_rank, *_ = polar(torch.cat([Q, Q], dim=1))
    assert not full_rank
    assert close(factor, torch.cat([Q, Q], dim=1) / 2**0.5, 1e-12)
    assert polar(torch.empty(5, 0)).factor.shape == (5, 0)


@pytest.mark.parametrize(("m", "p"), [(300, 300), (700, 256), (400, 30)])
def test_float32_polar_factors_agree_with_the_svd_and_tell_how_errors_grow(m, p):
    torch.manual_seed(0)
    X = torch.cat([torch.linalg.qr(torch.randn(m, p // 2)).Q for _ in range(2)], dim=1)  # square: nearly singular
    U, _, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    factor, full_rank, amplification, _ = polar(X)
    assert full_rank
    assert close(factor, U @ Vh, 1e-3)
    assert close(factor.T @ factor, torch.eye(p), 1e-5)
    stepped, [measured] = newton_schulz_polar(X)  # the way a GPU takes
    assert close(stepped, U @ Vh, 1e-5)
    E = 1e-4 * torch.randn(m, p, dtype=torch.float64) / m**0.5
    U, _, Vh = torch.linalg.svd(X.double() + E, full_matrices=False)
    grown = float((U @ Vh - factor.double()).norm() / E.norm())
    assert amplification / 2 < grown < 2 * amplification
    assert measured / 2 < grown < 2 * measured


def test_newton_schulz_steps_say_where_they_do_not_converge():
    X = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    X[:, 7] = X[:, 3]
    assert newton_schulz_polar(X)[1] == [float("inf")]
    Y = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    factors, amplifications = newton_schulz_polar(torch.stack([Y, X]))
    (alone, [measured]) = newton_schulz_polar(Y)
    assert close(factors[0], alone, 1e-6)
    assert amplifications == [pytest.approx(measured, rel=1e-2), float("inf")]


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


def test_gram_in_blocks_is_the_dense_product() -> None:
    X = torch.randn(2, 40, 601, generator=torch.Generator().manual_seed(0))
    exact = X.double().mT @ X.double()
    assert gram(X.double()).sub(exact).abs().max() < 1e-12
    assert gram(X).double().sub(exact).abs().max() < 1e-4
    assert torch.equal(gram(X).triu(75), gram(X).mT.triu(75))


@pytest.mark.parametrize("n", [40, 700])
def test_a_sandwich_from_half_of_a_symmetric_matrix_is_the_dense_product(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, n, generator=generator, dtype=torch.float64)
    U = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    assert close(sandwich(X + X.T, U), U.T @ (X + X.T) @ U, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_what_is_not_finite_is_counted_wherever_it_is_and_what_is_large_is_not(dtype):
    """Whatever the sum of the entries does: Inf and -Inf in it, or beyond the dtype without any."""
    largest = torch.finfo(dtype).max
    W = torch.full((3, 1001), 0.5 * largest, dtype=torch.float64)
    assert nonfinite(W.to(dtype)) == 0
    for values in ([float("nan")], [float("inf")], [float("-inf")], [float("inf"), float("-inf")]):
        for place in (0, 1500, 3002 - len(values)):
            V = W.reshape(-1).clone()
            V[place : place + len(values)] = torch.tensor(values, dtype=torch.float64)
            assert nonfinite(V.to(dtype).reshape(3, 1001)) == len(values)


@pytest.mark.parametrize("size", [1, 5, 512, 1100])
def test_a_matrix_is_made_symmetric_in_place(size):
    M = torch.randn(size, size, dtype=torch.float64)
    expected = 0.5 * (M + M.T)
    assert torch.equal(symmetrize_(M), expected)
    assert torch.equal(M, expected)
