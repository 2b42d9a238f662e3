"""Layers of one shape solved at once, as on a GPU, against dense float64 and against each layer on its own."""

from dataclasses import replace

import pytest
import torch

from dense import close
from epimer.geometry import stacked
from epimer.geometry.frechet import MERGE_TOLERANCE
from epimer.geometry.linalg import conjugate_steps
from epimer.geometry.metric import Diagonal, Kronecker, TaskGram
from epimer.geometry.stacked import stacked_problem
from epimer.geometry.subspace import tagged
from epimer.methods.frechet import epimer_free, epimer_free_stack, frechet, frechet_stack
from epimer.methods.registry import Layer, describe_method

TASKS, RANK, SHAPE, WEIGHTS = 4, 3, (40, 30), [0.4, 0.3, 0.2, 0.1]


def factor(size, generator):
    X = torch.randn(size // 3, size, generator=generator) * torch.arange(1, size + 1) ** -0.5
    return X.T @ X


def layer(kind, seed, size=1.0, shape=SHAPE):
    """Return a layer with its curvature and basis in float32; `size` multiplies its task vectors."""
    generator = torch.Generator().manual_seed(seed)
    deltas = []
    for _ in range(TASKS):
        U, V = (torch.linalg.qr(torch.randn(n, min(shape), generator=generator)).Q for n in shape)
        deltas.append(size * (U * torch.arange(1, min(shape) + 1) ** -0.7) @ V.T)
    metrics = [TaskGram(D) for D in deltas]
    if kind == "kronecker":
        metrics = [Kronecker(A=factor(shape[1], generator), G=factor(shape[0], generator)) for _ in deltas]
    return Layer("w", deltas, WEIGHTS, metrics=metrics, atoms=tagged(deltas, RANK))


def posed(layers, normalize="trace"):
    U, V = (torch.stack([getattr(one.atoms, side) for one in layers]) for side in "UV")
    metrics, deltas = [one.metrics for one in layers], [one.deltas for one in layers]
    return stacked_problem(metrics, deltas, U, V, [one.weights for one in layers], normalize)


def dense_step(one, start, damping, normalize):
    """Return x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a) with every matrix formed."""
    U, V = one.atoms.U.double(), one.atoms.V.double()
    curved, points = [], []
    for metric, D in zip(one.metrics, one.deltas, strict=True):
        D = D.double()
        G, A = (D @ D.T, D.T @ D) if isinstance(metric, TaskGram) else (metric.G.double(), metric.A.double())
        curved.append(torch.kron(U.T @ G @ U, V.T @ A @ V))
        points.append((U.T @ D @ V).flatten())
    sizes = [float(H.diagonal().mean()) for H in curved]
    mean = sum(w * size for w, size in zip(WEIGHTS, sizes, strict=True))
    divisors = {"trace": sizes, "common": [mean] * TASKS, "none": [1.0] * TASKS}[normalize]
    curved = [H / divisor for H, divisor in zip(curved, divisors, strict=True)]
    epsilon = damping * (mean if normalize == "none" else 1.0)
    whole = sum(w * H for w, H in zip(WEIGHTS, curved, strict=True)) + epsilon * torch.eye(len(curved[0]))
    pulls = zip(WEIGHTS, curved, points, strict=True)
    step = torch.linalg.solve(whole, sum(w * H @ (x - start.flatten()) for w, H, x in pulls))
    return start + step.view(start.shape)


@pytest.mark.parametrize("normalize", ["trace", "common", "none"])
@pytest.mark.parametrize("kind", ["kronecker", "task-gram"])
def test_steps_are_those_of_dense_matrices(kind, normalize):
    layers = [layer(kind, seed, size) for seed, size in enumerate([1.0, 1e-3, 30.0])]
    problem = posed(layers, normalize)
    generator = torch.Generator().manual_seed(9)
    sizes = torch.tensor([1.0, 1e-3, 30.0], dtype=torch.float64)[:, None, None]
    start = sizes * torch.randn(3, TASKS * RANK, TASKS * RANK, generator=generator, dtype=torch.float64) / 10
    for damping in (1.0, 0.1):
        for one, x, solution in zip(layers, start, problem.step(start, damping, None), strict=True):
            assert solution.status == "converged"
            assert close(solution.value, dense_step(one, x, damping, normalize), 2 * MERGE_TOLERANCE)


@pytest.mark.parametrize("inputs", [1, 0])
@pytest.mark.parametrize("method", ["epimer_free", "epimer_kron"])
def test_a_stack_of_layers_is_merged_as_each_of_them(method, inputs):
    kind = "kronecker" if method == "epimer_kron" else "task-gram"
    layers = [replace(layer(kind, seed), inputs=inputs) for seed in range(3)]
    options = describe_method(method).resolve({"rank": RANK})
    one_by_one, at_once = (epimer_free, epimer_free_stack) if kind == "task-gram" else (frechet, frechet_stack)
    for one, solution in zip(layers, at_once(layers, options), strict=True):
        alone = one_by_one(one, options)
        assert close(solution.value, alone.value, 4 * MERGE_TOLERANCE)
        assert (solution.status, solution.rank, solution.note) == (alone.status, alone.rank, alone.note)


@pytest.mark.parametrize(
    "settings",
    [{"anchor": "average"}, {"anchor": "sum"}, {"anchor": "tsv"}, {"normalize": "common"}, {"normalize": "none"}],
    ids=str,
)
def test_anchors_and_normalisations_of_a_stack(settings):
    layers = [layer("kronecker", seed) for seed in range(2)]
    options = describe_method("epimer_kron").resolve({"rank": RANK, **settings})
    for one, solution in zip(layers, frechet_stack(layers, options), strict=True):
        assert close(solution.value, frechet(one, options).value, 4 * MERGE_TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"jitter": 0.1},
        {"aggregator": "mean"},
        {"basis": "tagged"},
        {"basis": "full"},
        {"damping": 0.0},
        {"calibrate": 1.0},
    ],
    ids=str,
)
def test_what_is_not_solved_at_once_is_left_to_each_layer(settings):
    layers = [layer("kronecker", seed) for seed in range(2)]
    options = describe_method("epimer_kron").resolve({"rank": RANK, **settings})
    assert frechet_stack(layers, options) == [None, None]


def test_a_layer_that_needs_more_steps_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(stacked, "STEPS", 6)
    monkeypatch.setattr(stacked, "PAIRS", 1)
    monkeypatch.setattr(stacked, "CORRECTIONS", 1)
    hard = layer("kronecker", 0)
    easy = replace(hard, metrics=[Kronecker(A=torch.eye(SHAPE[1]), G=torch.eye(SHAPE[0]))] * TASKS)
    generator = torch.Generator().manual_seed(0)
    start = 0.02 * torch.randn(2, TASKS * RANK, TASKS * RANK, generator=generator, dtype=torch.float64)
    first, second = posed([easy, hard]).step(start, 0.1, None)
    assert close(first.value, dense_step(easy, start[0], 0.1, "trace"), 2 * MERGE_TOLERANCE)
    assert second is None


def test_a_system_that_has_reached_its_goal_waits_for_the_others():
    eigenvalues = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1e2, 1e4, 1e6]])
    b = torch.ones(2, 4)
    y = conjugate_steps(lambda x: eigenvalues * x, b, lambda r: r, torch.tensor([[1e-6], [1e-3]]), stacked=True)
    assert torch.allclose(eigenvalues * y, b, atol=1e-3)
    assert torch.equal(y[0], b[0])


def test_nothing_to_solve_numbers_out_of_range_and_other_curvature_are_left_to_each_layer():
    one, other = layer("kronecker", 0), layer("kronecker", 1)
    point = posed([one]).points_ltpq[:, 0]
    same = replace(one, deltas=[one.deltas[0]] * TASKS)
    assert posed([same]).step(point, 1.0, None) == [None]  # already there
    huge = replace(other, metrics=[Kronecker(A=1e31 * metric.A, G=metric.G) for metric in other.metrics])
    assert posed([one, huge]) is None
    diagonal = replace(one, metrics=[Diagonal(torch.ones(SHAPE))] * TASKS)
    assert posed([diagonal]) is None
    one_sided = replace(one, metrics=[Kronecker(A=metric.A) for metric in one.metrics])
    assert posed([one_sided]) is None


def test_a_wide_factor_that_is_indefinite_where_it_is_used_is_left_to_its_layer(monkeypatch):
    monkeypatch.setattr(stacked, "WIDE", 16)
    good, bad = layer("kronecker", 0), layer("kronecker", 1)
    u = bad.atoms.U[:, 0]
    factor = bad.metrics[2].G - 100 * torch.outer(u, u)
    bad.metrics[2] = Kronecker(A=bad.metrics[2].A, G=factor)
    assert posed([good]) is not None
    assert posed([good, bad]) is None
