"""regmean's products in single precision against dense float64: near it whatever the inputs, or else not single."""

import pytest
import torch

import epimer
from epimer.geometry import input_mean
from epimer.geometry.input_mean import ALLOWED, LEAST, mean_of_inputs
from epimer.records import Status

WEIGHTS = [0.2, 0.3, 0.5]
M, N = 272, 300
INPUTS = (
    "white",
    "range",
    "outliers",
    "far stronger",
    "far too weak",
    "few samples",
    "one sign",
    "one sign, range",
    "decay",
)


def gram(kind, generator, n=N):
    """Return the Gram matrix of some inputs, in float32."""
    X = torch.randn(1000, n, generator=generator, dtype=torch.float64)
    falling = torch.logspace(0, -2, n, dtype=torch.float64)
    match kind:
        case "range":
            X *= falling
        case "outliers":
            X[:, [7, 99]] *= 100
        case "far stronger":
            X[:, 3] *= 1e3
        case "few samples":
            X = X[:20]
        case "one sign":
            X = X.abs()
        case "one sign, range":
            X = X.abs() * falling
        case "decay":
            Q = torch.linalg.qr(X[:n]).Q
            X = (Q * torch.arange(1, n + 1).pow(-1.0)).T * n**0.5
        case "dead":
            X[:, 3] = 0
        case "far too weak":
            X[:, 3] *= 1e-4
    A = (X.T @ X / len(X)).float()
    return 0.5 * (A + A.T)


def problem(kind, *, size=0.01):
    generator = torch.Generator().manual_seed(0)
    deltas = [size * torch.randn(M, N, generator=generator) for _ in WEIGHTS]
    return deltas, [gram(kind, generator) for _ in WEIGHTS]


def dense(deltas, grams, off_diagonal):
    """Return the mean, and η, in float64 from their definitions."""
    eye = torch.eye(len(grams[0]), dtype=torch.float64)
    H = [A.double() * (off_diagonal + (1 - off_diagonal) * eye) for A in grams]
    points = [D.double() for D in deltas]
    total = sum(w * h for w, h in zip(WEIGHTS, H, strict=True))
    X = torch.linalg.solve(total, sum(w * D @ h for w, D, h in zip(WEIGHTS, points, H, strict=True)), left=False)
    flat = sum(w * D for w, D in zip(WEIGHTS, points, strict=True))

    def objective(x):
        return sum(w * float(((x - D) * ((x - D) @ h)).sum()) for w, D, h in zip(WEIGHTS, points, H, strict=True))

    return X, objective(flat) - objective(X)


def apart(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("off_diagonal", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("kind", INPUTS)
def test_it_is_near_dense_float64(kind, off_diagonal):
    deltas, grams = problem(kind)
    exact, eta = dense(deltas, grams, off_diagonal)
    solution = mean_of_inputs(deltas, grams, WEIGHTS, off_diagonal)
    assert solution.status is Status.EXACT
    assert apart(solution.value, exact) < 2 * ALLOWED
    assert solution.eta == pytest.approx(eta, rel=1e-4)
    assert solution.residual < 1e-5


@pytest.mark.parametrize("kind", INPUTS)
def test_the_error_is_known_before_and_after_the_products(kind, monkeypatch):
    """What the probes say is what the merge is off by; so single precision is taken where it does, and only there."""
    told, used = [], []
    ratio, descent = input_mean._ratio, input_mean._descent
    monkeypatch.setattr(input_mean, "_ratio", lambda *of: told.append(ratio(*of)) or told[-1])
    monkeypatch.setattr(input_mean, "_descent", lambda *of: used.append(of[-1]) or descent(*of))
    deltas, grams = problem(kind)
    exact, _ = dense(deltas, grams, 0.9)
    monkeypatch.setattr(input_mean, "ALLOWED", torch.inf)
    error = apart(mean_of_inputs(deltas, grams, WEIGHTS, 0.9).value, exact)
    assert used == [torch.float32]
    assert told[0] == pytest.approx(error, rel=0.4)
    assert told[2] == pytest.approx(error, rel=0.4)  # told[1] is the residual
    monkeypatch.setattr(input_mean, "ALLOWED", 1.5 * error)
    mean_of_inputs(deltas, grams, WEIGHTS, 0.9)
    monkeypatch.setattr(input_mean, "ALLOWED", error / 1.5)
    merged = mean_of_inputs(deltas, grams, WEIGHTS, 0.9).value
    assert used[1:] == [torch.float32, torch.float64]
    assert apart(merged, exact) < 5e-8


def test_products_that_turn_out_worse_than_foreseen_are_repeated_in_float64(monkeypatch):
    deltas, grams = problem("white")
    descent = input_mean._descent
    monkeypatch.setattr(input_mean, "_descent", lambda *of: descent(*of) * (1.001 if of[-1] == torch.float32 else 1.0))
    assert apart(mean_of_inputs(deltas, grams, WEIGHTS, 0.9).value, dense(deltas, grams, 0.9)[0]) < 5e-8


def test_what_overflows_in_single_precision_is_multiplied_in_float64():
    deltas, grams = problem("white", size=1e25)
    grams = [1e15 * A for A in grams]
    assert apart(mean_of_inputs(deltas, grams, WEIGHTS, 0.9).value, dense(deltas, grams, 0.9)[0]) < 5e-8


def test_a_singular_sum_is_left_to_others():
    assert mean_of_inputs(*problem("dead"), WEIGHTS, 0.9) is None


@pytest.mark.parametrize("kind", ["white", "few samples"])
def test_copies_are_returned_as_they_are(kind):
    deltas, grams = problem(kind)
    solution = mean_of_inputs([deltas[0]] * 3, grams, WEIGHTS, 0.9)
    assert torch.equal(solution.value, deltas[0])
    assert solution.eta == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("kind", ["outliers", "far stronger", "far too weak", "one sign", "dead"])
def test_regmean_is_the_same_wherever_the_inputs_are_stored(kind, inputs):
    deltas, grams = problem(kind)
    assert min(deltas[0].shape) >= LEAST
    models = [{"w": D if inputs else D.T.contiguous()} for D in deltas]
    curvature = [{"w": epimer.Kronecker(**{"GA"[inputs]: A}, inputs=inputs)} for A in grams]
    options = {"weights": WEIGHTS, "curvature": curvature}
    if kind == "dead":
        with pytest.warns(epimer.EpimerWarning, match="singular"):
            merged = epimer.merge_state_dicts(None, models, "regmean", **options)
        assert merged.record.tensors["w"].status is Status.DAMPED
        return
    merged = epimer.merge_state_dicts(None, models, "regmean", **options)
    exact, _ = dense(deltas, grams, 0.9)
    assert apart(merged["w"] if inputs else merged["w"].T, exact) < 2 * ALLOWED


def test_damping_goes_the_way_of_float64():
    deltas, grams = problem("white")
    models, curvature = [{"w": D} for D in deltas], [{"w": epimer.Kronecker(A=A)} for A in grams]
    merged = epimer.merge_state_dicts(None, models, "regmean", weights=WEIGHTS, curvature=curvature, damping=0.1)
    shifted = [A.double() * 0.9 + 0.1 * A.diagonal().double().diag() for A in grams]
    shifted = [A + 0.1 * A.diagonal().mean() * torch.eye(N) for A in shifted]
    assert apart(merged["w"], dense(deltas, shifted, 1.0)[0]) < 1e-6
