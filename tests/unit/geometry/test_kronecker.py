"""Sums of Kronecker products are solved in few steps, as exactly as the merge can tell, against dense float64."""

import pytest
import torch

from epimer.geometry import kronecker
from epimer.geometry.aggregator import Anchored, Mean
from epimer.geometry.frechet import MERGE_TOLERANCE, build_problem
from epimer.geometry.metric import Kronecker
from epimer.geometry.subspace import Full

TASKS, SHAPE, WEIGHTS = 4, (32, 24), [0.4, 0.3, 0.2, 0.1]


def layer(dtype, shape=SHAPE, seed=0):
    """Return task vectors and the factors of a few samples: falling spectra, turned differently for every task."""
    generator = torch.Generator().manual_seed(seed)

    def factor(size):
        X = torch.randn(max(2, size // 3), size, generator=generator, dtype=torch.float64)
        X = X * torch.arange(1, size + 1, dtype=torch.float64) ** -0.5
        Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        return (Q @ X.T @ X @ Q.T).to(dtype)

    deltas = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(TASKS)]
    return deltas, [Kronecker(A=factor(shape[1]), G=factor(shape[0])) for _ in range(TASKS)]


def dense(deltas, metrics, damping, reference=None):
    """Return r + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - r); r is the mean and ε in every H̃_t where no reference is given."""
    eye = torch.eye(deltas[0].numel(), dtype=torch.float64)
    curved = [torch.kron(metric.G.double(), metric.A.double()) for metric in metrics]
    curved = [H / H.diagonal().mean() for H in curved]
    points = [D.double().flatten() for D in deltas]
    if reference is None:
        curved, damping = [H + damping * eye for H in curved], 0.0
        reference = sum(w * x for w, x in zip(WEIGHTS, points, strict=True))
    r, rows = reference.flatten(), list(zip(WEIGHTS, curved, points, strict=True))
    step = torch.linalg.solve(sum(w * H for w, H, _ in rows) + damping * eye, sum(w * H @ (x - r) for w, H, x in rows))
    return (r + step).view(deltas[0].shape)


def relative(x, expected):
    return float((x.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_damped_step_needs_few_steps(dtype):
    deltas, metrics = layer(dtype)
    flat = sum(w * D.double() for w, D in zip(WEIGHTS, deltas, strict=True))
    problem = build_problem(
        Full(torch.float64), metrics, deltas, WEIGHTS, max_steps=12 if dtype == torch.float32 else 25
    )
    solution = Anchored(problem.flat_mean(), 1.0).aggregate(problem)
    assert solution.status == "converged"
    allowed = 2 * MERGE_TOLERANCE if dtype == torch.float32 else 1e-9
    assert relative(solution.value, dense(deltas, metrics, 1.0, flat)) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-4), (torch.float64, 1e-8)])
@pytest.mark.parametrize("shape", [SHAPE, (3, 40), (1, 5)])
def test_a_mean_is_the_dense_one(dtype, allowed, shape):
    deltas, metrics = layer(dtype, shape)
    solution = Mean(1e-2).aggregate(build_problem(Full(torch.float64), metrics, deltas, WEIGHTS))
    assert solution.status == "converged"
    assert relative(solution.value, dense(deltas, metrics, 1e-2)) < allowed


def test_corrected_single_precision_is_as_exact_as_float64(monkeypatch):
    """Large systems in float64 are iterated in float32 under a residual in float64, without a solve in float64."""
    deltas, metrics = layer(torch.float64)
    monkeypatch.setattr(kronecker, "MIXED", 1)
    monkeypatch.setattr(kronecker, "conjugate_gradients", None)
    solution = Mean(1e-2).aggregate(build_problem(Full(torch.float64), metrics, deltas, WEIGHTS))
    assert solution.status == "converged"
    assert solution.residual <= 1e-10
    assert relative(solution.value, dense(deltas, metrics, 1e-2)) < 1e-8


def test_what_single_precision_cannot_solve_is_solved_in_float64(monkeypatch):
    deltas, metrics = layer(torch.float64)
    monkeypatch.setattr(kronecker, "MIXED", 1)
    own, called = kronecker.conjugate_gradients, []
    monkeypatch.setattr(kronecker, "conjugate_gradients", lambda *a, **k: called.append(1) or own(*a, **k))
    solution = Mean(1e-9).aggregate(build_problem(Full(torch.float64), metrics, deltas, WEIGHTS))
    assert called
    assert relative(solution.value, dense(deltas, metrics, 1e-9)) < 1e-5


def test_an_error_that_the_merge_cannot_feel_ends_the_solve_and_the_record_has_the_residual():
    deltas, metrics = layer(torch.float32)
    problem = build_problem(Full(torch.float64), metrics, deltas, WEIGHTS)
    solution = Anchored(problem.flat_mean(), 1.0).aggregate(problem)
    y = solution.value - problem.flat_mean()
    b = problem.descent(problem.flat_mean())
    residual = float((problem.mean_operator.apply(y) + y - b).norm() / b.norm())
    assert solution.status == "converged"
    assert solution.residual == pytest.approx(residual, rel=1e-6)
    assert residual > 1e-7


def test_a_factor_of_none_is_the_identity_beside_others():
    deltas, metrics = layer(torch.float64)
    metrics[1] = Kronecker(A=metrics[1].A)
    solution = Mean(1e-2).aggregate(build_problem(Full(torch.float64), metrics, deltas, WEIGHTS))
    metrics[1] = Kronecker(A=metrics[1].A, G=torch.eye(SHAPE[0], dtype=torch.float64))
    assert relative(solution.value, dense(deltas, metrics, 1e-2)) < 1e-8


def test_factors_too_wide_to_stack_are_solved_alike(monkeypatch):
    deltas, metrics = layer(torch.float32, (48, 64))
    monkeypatch.setattr("epimer.geometry.kronecker.STACKED", 16)
    problem = build_problem(Full(torch.float64), metrics, deltas, WEIGHTS)
    flat = problem.flat_mean()
    solution = Anchored(problem.flat_mean(), 1.0).aggregate(problem)
    assert solution.status == "converged"
    assert relative(solution.value, dense(deltas, metrics, 1.0, flat)) < 2 * MERGE_TOLERANCE


@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_factors_that_are_not_quite_symmetric_count_as_their_symmetric_part(damping):
    deltas, metrics = layer(torch.float64, (6, 5))
    full = [Kronecker(A=m.A + torch.eye(5, dtype=m.A.dtype), G=m.G + torch.eye(6, dtype=m.G.dtype)) for m in metrics]
    tilt = 1e-7 * torch.triu(torch.ones(5, 5, dtype=torch.float64), 1)
    tilted = [Kronecker(A=metric.A + tilt, G=metric.G) for metric in full]
    even = [Kronecker(A=metric.A + 0.5 * (tilt + tilt.T), G=metric.G) for metric in full]
    solution = Mean(damping).aggregate(build_problem(Full(torch.float64), tilted, deltas, WEIGHTS))
    assert solution.status == "converged"
    assert relative(solution.value, dense(deltas, even, damping)) < 1e-8


def test_factors_too_large_to_decompose_whole_are_solved_as_exactly():
    """Of 200 x 200 factors only leading Ritz vectors are known; residuals against float64 products."""
    deltas, metrics = layer(torch.float32, (200, 200))
    problem = build_problem(Full(torch.float64), metrics, deltas, WEIGHTS, max_steps=None)
    start = problem.flat_mean()
    y = Anchored(start, 1.0).aggregate(problem).value - start
    curved = [(metric.G.double(), metric.A.double()) for metric in metrics]
    image, b = y.clone(), torch.zeros_like(y)
    for w, (G, A), D in zip(WEIGHTS, curved, deltas, strict=True):
        scale = w / float(G.diagonal().mean() * A.diagonal().mean())
        image += scale * G @ y @ A
        b += scale * G @ (D.double() - start) @ A
    assert float((image - b).norm()) < MERGE_TOLERANCE * float(start.norm())  # which bounds the error: no λ is below 1
