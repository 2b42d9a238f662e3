"""Every subspace x metric pair: orthonormal coordinates, exact projections, solves that agree with dense algebra."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import METRICS, basis_of, close, matrix_of, operator_matrix, random_metric
from epimer.geometry.diagonal import TaggedDiagonal, project_diagonal_lowrank
from epimer.geometry.frechet import build_problem
from epimer.geometry.metric import Diagonal
from epimer.geometry.operator import linear_combination
from epimer.geometry.subspace import Full, clamp_rank, joint, tagged, tensor_product

SUBSPACES = ("full", "tagged", "tensor", "joint")


def build(kind, deltas, rank):
    match kind:
        case "full":
            return Full(torch.float64)
        case "tagged":
            return tagged(deltas, rank)
        case "tensor":
            return tensor_product(tagged(deltas, rank))
        case _:
            return joint(deltas, rank)


def draw_layer(m, n, tasks, rank, seed, case="plain"):
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(m, n, dtype=torch.float64, generator=generator) for _ in range(tasks)]
    if case == "low rank":
        deltas = [(D[:, :1] @ D[:1, :]) for D in deltas]
    elif case == "copies":
        deltas = [deltas[0]] * tasks
    elif case == "zero":
        deltas[0] = torch.zeros_like(deltas[0])
    return deltas, max(1, clamp_rank((m, n), tasks, rank)), generator


@st.composite
def layers(draw):
    m, n, tasks = draw(st.integers(2, 11)), draw(st.integers(2, 11)), draw(st.integers(1, 3))
    if min(m, n) < tasks:
        tasks = 1
    case = draw(st.sampled_from(["plain", "low rank", "copies", "zero"]))
    return (m, n, *draw_layer(m, n, tasks, draw(st.integers(1, 4)), draw(st.integers(0, 10**6)), case))


@settings(max_examples=60, deadline=None)
@given(layer=layers(), kind=st.sampled_from(SUBSPACES))
def test_bases_are_orthonormal_and_lift_inverts_project(layer, kind):
    m, n, deltas, rank, _ = layer
    subspace = build(kind, deltas, rank)
    S = basis_of(subspace, m, n)
    assert close(S.T @ S, torch.eye(S.shape[1], dtype=torch.float64))
    D = torch.randn(m, n, dtype=torch.float64)
    assert close(subspace.project(D).flatten(), S.T @ D.flatten())
    x = subspace.project(D)
    assert close(subspace.project(subspace.lift(x)), x)


@settings(max_examples=120, deadline=None)
@given(layer=layers(), kind=st.sampled_from(SUBSPACES), metric_kind=st.sampled_from(METRICS))
def test_projected_curvature_equals_brute_force(layer, kind, metric_kind):
    m, n, deltas, rank, generator = layer
    subspace = build(kind, deltas, rank)
    metric = random_metric(metric_kind, m, n, generator)
    S = basis_of(subspace, m, n)
    expected = S.T @ matrix_of(metric, m, n) @ S
    operator = subspace.restrict(metric)
    shape = subspace.project(deltas[0]).shape
    assert close(operator_matrix(operator, shape), expected)
    if shape.numel():
        assert operator.mean_diagonal() == pytest.approx(float(expected.diagonal().mean()), rel=1e-10, abs=1e-12)
    if isinstance(operator, TaggedDiagonal):
        assert close(operator.H, expected)
    D = torch.randn(m, n, dtype=torch.float64)
    assert close(metric.apply(D).flatten(), matrix_of(metric, m, n) @ D.flatten())


@settings(max_examples=80, deadline=None)
@given(
    layer=layers(),
    kind=st.sampled_from(SUBSPACES),
    metric_kind=st.sampled_from(METRICS),
    damping=st.sampled_from([1e-2, 0.3]),
    jitter=st.sampled_from([0.0, 0.1]),
    normalize=st.sampled_from(["trace", "none"]),
    epsilon=st.sampled_from([0.0, 0.5]),
)
def test_every_pair_solves_its_dense_normal_equations(layer, kind, metric_kind, damping, jitter, normalize, epsilon):
    m, n, deltas, rank, generator = layer
    tasks = len(deltas)
    weights = torch.rand(tasks, generator=generator, dtype=torch.float64) + 0.1
    weights = (weights / weights.sum()).tolist()
    metrics = [random_metric(metric_kind, m, n, generator) for _ in range(tasks)]
    subspace = build(kind, deltas, rank)
    problem = build_problem(subspace, metrics, deltas, weights, normalize=normalize, jitter=jitter).damped(damping)
    S = basis_of(subspace, m, n)
    p = S.shape[1]
    if p == 0:
        return
    eye = torch.eye(p, dtype=torch.float64)
    dense = []
    for metric in metrics:
        H = S.T @ matrix_of(metric, m, n) @ S + jitter * eye
        size = float(H.diagonal().mean())
        H = H / size if normalize == "trace" else H
        dense.append(H + damping * (1 if normalize == "trace" else size) * eye)
    points = [S.T @ D.flatten() for D in deltas]
    mean = sum(w * H for w, H in zip(weights, dense, strict=True))
    rhs = sum(w * H @ x for w, H, x in zip(weights, dense, points, strict=True))
    solution = problem.mean()
    x = solution.value.flatten()
    assert solution.residual < 1e-6
    assert solution.status in ("exact", "converged")
    assert close(x, torch.linalg.solve(mean, rhs), 1e-6)
    # stationarity: Σ λ_t H̃_t (x* - x_t) = 0
    gradient = sum(w * H @ (x - point) for w, H, point in zip(weights, dense, points, strict=True))
    size = sum(float((w * H @ point).norm()) for w, H, point in zip(weights, dense, points, strict=True))
    assert float(gradient.norm()) <= 1e-6 * max(size, 1e-12)
    reference = torch.randn(problem.points[0].shape, dtype=torch.float64, generator=generator)
    anchored = problem.solve(reference, epsilon).value.flatten()
    expected = torch.linalg.solve(mean + epsilon * eye, rhs + epsilon * reference.flatten())
    assert float((anchored - expected).norm()) <= 1e-6 * float(reference.norm() + expected.norm())


def test_the_paper_s_rank_ceiling_of_the_joint_subspace():
    deltas, _, _ = draw_layer(8, 6, 3, 1, 0)
    assert basis_of(joint(deltas, 10), 8, 6).shape[1] == 3


def test_rank_deficient_stacks_keep_what_they_can():
    deltas, _, _ = draw_layer(9, 8, 3, 2, 0)
    low = deltas[0][:, :2] @ deltas[0][:2, :]
    copies = tagged([low, low, low], 2)
    assert copies.mix is not None
    assert close(copies.lift(copies.project(low)), low)
    product_space = tensor_product(copies)
    assert product_space.U.shape == (9, 2)
    assert close(product_space.lift(product_space.project(low)), low)
    zero = torch.zeros(9, 8, dtype=torch.float64)
    assert tagged([zero, low], 2).owner.tolist() == [1, 1]
    assert tagged([zero, zero], 2).project(low).numel() == 0


@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
def test_low_rank_projection_is_that_of_the_low_rank_part(shape):
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    atoms = tagged(deltas, 6)
    F = (torch.rand(shape[0], 2, generator=generator) @ torch.rand(2, shape[1], generator=generator)).double()
    exact = TaggedDiagonal(F, atoms, 0.0).H
    assert close(project_diagonal_lowrank(F, atoms.U, atoms.V, 2), exact, 1e-8)
    noise = 1e-3 * torch.rand(*shape, generator=generator).double()
    approximate = project_diagonal_lowrank(F + noise, atoms.U, atoms.V, 2)
    assert 0 < float((approximate - exact).norm()) < 3e-3 * float(exact.norm())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_large_diagonal_solve_is_as_good_as_the_exact_one(monkeypatch, mixed):
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(96, 80, dtype=torch.float64, generator=generator) for _ in range(4)]
    if mixed:
        deltas = [D[:, :5] @ D[:5, :] for D in deltas[:3]]
        deltas.append(deltas[0])
    atoms = tagged(deltas, 8)
    metrics = []
    for _ in deltas:
        smooth = torch.rand(96, 2, generator=generator) @ torch.rand(2, 80, generator=generator)
        metrics.append(Diagonal(smooth.double() + 0.02 * torch.rand(96, 80, generator=generator)))
    exact = build_problem(atoms, metrics, deltas, [0.25] * 4).damped(1e-2).mean()
    monkeypatch.setattr("epimer.geometry.diagonal.CHEAP", 0)
    fast = build_problem(atoms, metrics, deltas, [0.25] * 4, tolerance=1e-2).damped(1e-2).mean()
    assert exact.status == "exact"
    assert fast.status == "converged"
    assert close(fast.value, exact.value, 1e-8)
    # a diagonal far from low rank takes more steps, and the exact projection where they do not converge
    for power in (1, 4):
        rough = [Diagonal(torch.randn(96, 80, generator=generator).double().exp().pow(power)) for _ in deltas]
        fast = build_problem(atoms, rough, deltas, [0.25] * 4, tolerance=1e-2).damped(1e-2).mean()
        exact = build_problem(atoms, rough, deltas, [0.25] * 4).damped(1e-2).mean()
        assert (fast.status, exact.status) == ("converged", "exact")
        assert close(fast.value, exact.value, 1e-7)
    monkeypatch.setattr("epimer.geometry.diagonal.STEPS", 2)
    given_up = build_problem(atoms, rough, deltas, [0.25] * 4, tolerance=1e-2).damped(1e-2).mean()
    assert given_up.status == "exact"
    assert close(given_up.value, exact.value, 1e-12)


def test_operators_of_one_kind_add_up():
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(7, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    for kind in SUBSPACES:
        subspace = build(kind, deltas, 2)
        x = subspace.project(deltas[0])
        for metric_kind in METRICS:
            operators = [subspace.restrict(random_metric(metric_kind, 7, 6, generator)) for _ in range(3)]
            total = linear_combination(operators, [0.5, 2.0, 0.25]).apply(x)
            assert close(total, 0.5 * operators[0].apply(x) + 2 * operators[1].apply(x) + 0.25 * operators[2].apply(x))
