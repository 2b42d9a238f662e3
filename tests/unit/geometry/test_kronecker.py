"""Sums of Kronecker products are solved in few steps, as exactly as the merge can tell, against dense float64."""

import numpy as np
import pytest
import torch

import epimer
from epimer.geometry import kronecker
from epimer.geometry.aggregator import Anchored, Mean
from epimer.geometry.frechet import MERGE_TOLERANCE, build_problem
from epimer.geometry.kronecker import Formed, KroneckerSum
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


def test_single_precision_that_stops_early_is_not_the_end_in_float64(monkeypatch):
    """A residual of 1e-5 counts as converged, but not where 1e-10 can be reached."""
    deltas, metrics = layer(torch.float64, seed=1)
    monkeypatch.setattr(kronecker, "MIXED", 1)
    solution = Mean(1e-10).aggregate(build_problem(Full(torch.float64), metrics, deltas, WEIGHTS))
    assert solution.residual <= 1e-10
    assert relative(solution.value, dense(deltas, metrics, 1e-10)) < 1e-4


def turned_apart(size, turned):
    """Return factors of falling spectra, whose eigenvectors are nearly the same for all tasks or not at all."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    factors = []
    for _ in range(2 * TASKS):
        X = torch.randn(2 * size, size, generator=generator, dtype=torch.float64)
        X = X * torch.arange(1, size + 1, dtype=torch.float64) ** -0.7
        if turned:
            Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        factors.append((Q @ X.T @ X @ Q.T).float())
    return [Kronecker(A=A, G=G) for A, G in zip(factors[::2], factors[1::2], strict=True)]


@pytest.mark.parametrize(("turned", "most"), [(False, 15), (True, 110)])
def test_little_damping_needs_few_steps_where_tasks_share_eigenvectors_and_more_elsewhere(turned, most):
    deltas, _ = layer(torch.float32, (64, 64))
    metrics = turned_apart(64, turned)
    problem = build_problem(Full(torch.float64), metrics, deltas, WEIGHTS, max_steps=most)
    assert Mean(1e-2).aggregate(problem).residual < 1e-5


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


def psd(size, rank=None, scale=1.0, seed=0):
    X = torch.randn(rank or 2 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * X.T @ X / len(X)


def formed(M):
    return Formed(lambda: M, float(M.diagonal().mean()))


P, Q = 12, 9
SUMS = {
    "plain": [(0.5, psd(P), psd(Q)), (0.3, psd(P, seed=1), psd(Q, seed=1)), (0.2, psd(P, seed=2), psd(Q, seed=2))],
    "identities": [(0.5, None, psd(Q)), (0.3, psd(P), None), (0.2, psd(P, seed=1), psd(Q, seed=1))],
    "deficient": [(0.5, psd(P, 2), psd(Q, 2)), (0.5, psd(P, 3, seed=1), psd(Q, 1, seed=1))],
    "zero": [(0.5, psd(P, scale=0.0), psd(Q)), (0.5, psd(P, seed=1), psd(Q, seed=1))],
    "one task": [(1.0, psd(P), psd(Q))],
    "formed": [(0.5, psd(P), formed(psd(Q))), (0.5, formed(psd(P, seed=1)), psd(Q, seed=1))],
    "tiny": [(0.5, psd(P, scale=1e-20), psd(Q, scale=1e-20)), (0.5, psd(P, scale=1e-20, seed=1), psd(Q, scale=1e-20))],
    "huge": [(0.5, psd(P, scale=1e20), psd(Q, scale=1e20)), (0.5, psd(P, scale=1e20, seed=1), psd(Q, scale=1e20))],
    "uneven": [(0.5, psd(P, scale=1e-20), psd(Q)), (0.5, psd(P, seed=1), psd(Q, scale=1e20, seed=1))],
}


def matrix_of_sum(terms):
    """Return Σ c G ⊗ A in float64."""
    total = torch.zeros(P * Q, P * Q, dtype=torch.float64)
    for c, *pair in terms:
        G, A = (M.form() if isinstance(M, Formed) else M for M in pair)
        G, A = torch.eye(P).double() if G is None else G.double(), torch.eye(Q).double() if A is None else A.double()
        total += c * torch.kron(G, A)
    return total


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("damping", [0.0, 1e-4, 1e-2, 0.29, 1.0])
@pytest.mark.parametrize("name", SUMS)
def test_a_solve_is_the_dense_one_at_any_damping(monkeypatch, name, damping, mixed):
    """In float64, or in single precision with corrections."""
    if mixed:
        monkeypatch.setattr(kronecker, "MIXED", 1)
    H = matrix_of_sum(SUMS[name])
    if damping == 0 and name == "deficient":
        pytest.skip("which has no single solution")
    shift = damping * float(H.diagonal().mean())
    b = torch.randn(P, Q, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    expected = np.linalg.solve((H + shift * torch.eye(P * Q, dtype=H.dtype)).numpy(), b.flatten().numpy())
    solution = KroneckerSum(tuple(SUMS[name])).solve(b, shift)
    assert solution.status == "converged"
    assert relative(solution.value.flatten(), torch.from_numpy(expected)) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in SUMS if name not in ("tiny", "huge")])
def test_a_preconditioner_for_little_damping_is_symmetric_and_positive(name, dtype):
    terms = SUMS[name]
    shift = 1e-2 * float(matrix_of_sum(terms).diagonal().mean())
    apply = kronecker._preconditioner(terms, shift, torch.zeros(P, Q, dtype=dtype))
    inverse = torch.stack([apply(e.view(P, Q)).flatten() for e in torch.eye(P * Q, dtype=dtype)]).double()
    inverse *= shift
    assert float((inverse - inverse.T).abs().max()) < 20 * torch.finfo(dtype).eps
    assert float(torch.linalg.eigvalsh(inverse)[0]) > 0
    if name == "one task":  # it is the inverse
        H = matrix_of_sum(terms) / shift + torch.eye(P * Q, dtype=torch.float64)
        assert relative(inverse @ H, torch.eye(P * Q).double()) < (1e-4 if dtype == torch.float32 else 1e-12)


STRONG = 3  # of the inputs, 1000 times the others


def strong_inputs(size, samples):
    """Return each task's inputs in float64; one feature is 1000 times the others, as in every language model."""
    generator = torch.Generator().manual_seed(0)
    Z = torch.randn(len(WEIGHTS), samples, size, generator=generator, dtype=torch.float64)
    Z[:, :, STRONG] *= 1e3
    return Z


def least_squares(deltas, inputs):
    """Return the D nearest to the mean with the least Σ λ_t ‖(D - D_t) Z_tᵀ‖², by an SVD of all inputs."""
    flat = sum(w * D for w, D in zip(WEIGHTS, deltas, strict=True))
    rows = torch.cat([w**0.5 * Z for w, Z in zip(WEIGHTS, inputs, strict=True)])
    wanted = torch.cat([w**0.5 * Z @ (D - flat).T for w, Z, D in zip(WEIGHTS, inputs, deltas, strict=True)])
    unit = rows.square().mean(0).sqrt()
    scaled = torch.linalg.pinv(rows / unit, rtol=1e-10) @ wanted / unit[:, None]
    Q = torch.linalg.svd(rows, full_matrices=False).Vh[: torch.linalg.matrix_rank(rows / unit)]
    return flat + (Q.T @ (Q @ scaled)).T


def worst_column(merged, expected):
    return float(((merged.double() - expected).norm(dim=0) / expected.norm(dim=0)).max())


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("samples", [200, 8])
@pytest.mark.parametrize(("method", "given"), [("regmean", {"off_diagonal": 1.0}), ("mats", {"damping": 0.0})])
def test_one_strong_feature_does_not_hide_the_others(method, given, samples, inputs):
    """Each input's column is compared, also if few samples leave directions without curvature."""
    size = 40
    Z = strong_inputs(size, samples)
    deltas = torch.randn(len(WEIGHTS), 24, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = least_squares(deltas, Z)
    grams = [(z.T @ z).float() for z in Z]
    models = [{"w": (D if inputs else D.T).float().contiguous()} for D in deltas]
    curvature = [{"w": epimer.Kronecker(**{"GA"[inputs]: A}, inputs=inputs)} for A in grams]
    given = given | {"normalize": "none", "weights": WEIGHTS, "curvature": curvature}
    if samples < size / len(WEIGHTS):
        with pytest.warns(epimer.EpimerWarning, match="singular"):
            merged = epimer.merge_state_dicts({"w": torch.zeros_like(models[0]["w"])}, models, method, **given)
    else:
        merged = epimer.merge_state_dicts({"w": torch.zeros_like(models[0]["w"])}, models, method, **given)
        assert merged.record.tensors["w"].status == "exact"
    assert worst_column(merged["w"] if inputs else merged["w"].T, expected) < 1e-3


def test_regmean_solves_a_strong_feature_at_its_defaults():
    size = 40
    Z = strong_inputs(size, 200)
    deltas = torch.randn(len(WEIGHTS), 24, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grams = [0.9 * z.T @ z + 0.1 * (z.T @ z).diagonal().diag() for z in Z]
    total = sum(w * A for w, A in zip(WEIGHTS, grams, strict=True))
    weighted = sum(w * D @ A for w, D, A in zip(WEIGHTS, deltas, grams, strict=True))
    curvature = [{"w": epimer.Kronecker(A=(z.T @ z).float())} for z in Z]
    models = [{"w": D.float()} for D in deltas]
    merged = epimer.merge_state_dicts(None, models, "regmean", weights=WEIGHTS, curvature=curvature)
    assert merged.record.tensors["w"].status == "exact"
    assert worst_column(merged["w"], torch.linalg.solve(total, weighted, left=False)) < 1e-4


def test_wudi_solves_a_strong_feature():
    deltas = torch.randn(len(WEIGHTS), 24, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    deltas[:, :, STRONG] *= 1e3
    inputs = [D / D.norm() for D in deltas]
    models = [{"w": D.float()} for D in deltas]
    merged = epimer.merge_state_dicts({"w": torch.zeros(24, 40)}, models, "wudi", weights=WEIGHTS, damping=0)
    assert merged.record.tensors["w"].status == "exact"
    assert worst_column(merged["w"], least_squares(deltas, inputs)) < 1e-3


def few_samples(size, seed):
    """Return a factor of six samples in float64, turned at random."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(6, size, generator=generator, dtype=torch.float64)
    X = X * torch.arange(1, size + 1, dtype=torch.float64) ** -0.5
    X = X @ torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return X.T @ X / len(X)


@pytest.mark.parametrize("damping", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9])
@pytest.mark.parametrize("shape", [(40, 30), (24, 24)])
def test_damping_below_the_rounding_of_float32_factors_is_raised_and_reported(shape, damping):
    """Above it the merge is exact for the factors as they are rounded, below it near that of unrounded factors."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(shape, generator=generator) for _ in WEIGHTS]
    exact = [Kronecker(G=few_samples(shape[0], 2 * t), A=few_samples(shape[1], 2 * t + 1)) for t in range(TASKS)]
    rounded = [Kronecker(G=metric.G.float(), A=metric.A.float()) for metric in exact]
    solution = Mean(damping).aggregate(build_problem(Full(), rounded, deltas, WEIGHTS))
    if solution.status == "damped":
        assert damping < 1e-4
        assert relative(solution.value, dense(deltas, exact, damping)) < 2e-2
    else:
        assert solution.status == "converged"
        assert damping > 1e-6
        assert relative(solution.value, dense(deltas, rounded, damping)) < 1e-5
    assert relative(solution.value, dense(deltas, exact, damping)) < 2e-2


def test_a_strong_feature_is_not_mistaken_for_rounding_between_two_factors():
    """Undamped, with the inputs' strong feature in both factors of every task; every entry's row and column counts."""
    Z = strong_inputs(30, 200)
    metrics = [Kronecker(G=(z[:, :24].T @ z[:, :24]).float(), A=(z.T @ z).float()) for z in Z]
    deltas = torch.randn(len(WEIGHTS), 24, 30, generator=torch.Generator().manual_seed(1))
    solution = Mean(0.0).aggregate(build_problem(Full(torch.float64), metrics, list(deltas), WEIGHTS))
    assert solution.status == "converged"
    expected = dense(list(deltas), metrics, 0.0)
    assert worst_column(solution.value, expected) < 1e-5
    assert worst_column(solution.value.T, expected.T) < 1e-5
