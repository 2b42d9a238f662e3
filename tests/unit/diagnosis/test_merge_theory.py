"""V_S, R_S, the bound and the true quadratic at the merges themselves, against dense float64 arithmetic."""

import json

import pytest
import torch
from safetensors.torch import save_file

import epimer
from dense import basis_of, matrix_of
from epimer.api import diagnose
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Samples, TaskGram
from epimer.records import Diagnosis

T, RANK = 8, 2
SHAPES = {"one.weight": (24, 16), "two.weight": (16, 20)}
WEIGHTS = [1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0]
LAMBDA = [w / sum(WEIGHTS) for w in WEIGHTS]
MEASURED = {
    "diagonal": ("average", "tsv", "epimer", "epimer_free"),
    "samples": ("average", "tsv", "epimer_exact", "epimer_free"),
    "kronecker": ("average", "tsv", "regmean", "epimer_kron", "epimer_free"),
    "ekfac": ("average", "tsv", "epimer_kron", "epimer_free"),
}
TAGGED, TENSOR = {"tsv", "epimer", "epimer_exact"}, {"epimer_free"}  # epimer_kron keeps its anchor outside of them


def states(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(size):
        return {n: size * torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

    base = draw(1.0)
    models = [{name: (base[name] + step[name]).to(dtype) for name in base} for step in (draw(0.1) for _ in range(T))]
    return {name: W.to(dtype) for name, W in base.items()}, models


def curvature_of(kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def spd(size):
        X = draw(2 * size, size)
        return X.T @ X / size

    def one(m, n):
        match kind:
            case "diagonal":
                return Diagonal(draw(m, n).square())
            case "samples":
                return Samples(g=draw(30, 2, m), x=draw(30, 2, n))
            case "ekfac":
                P, Q = (torch.linalg.qr(draw(d, d)).Q for d in (m, n))
                return EKFAC(S=draw(m, n).square(), P=P, Q=Q)
            case _:
                return Kronecker(A=spd(n), G=spd(m))

    return [{name: one(*shape) for name, shape in SHAPES.items()} for _ in range(T)]


def matrix(metric, m, n):
    if isinstance(metric, EKFAC):
        E = torch.kron(metric.P, metric.Q).double()
        return E @ torch.diag(metric.S.double().flatten()) @ E.T
    return matrix_of(metric, m, n).double()


def made(base, models, method, curvature):
    """The delta of the merge itself, as `epimer merge` makes it."""
    row = epimer.describe_method(method)
    given = {name: value for name, value in {"rank": RANK, "iterations": 8}.items() if name in row.defaults}
    merged = epimer.merge_state_dicts(
        base, models, method, weights=WEIGHTS, curvature=curvature if row.needs_curvature else None, **given
    )
    return {name: (merged[name] - base[name]).double().flatten() for name in SHAPES}


def subspaces(base, models, method):
    """S of every layer (m·n x p) that the method merges in; None for the full space."""
    if method not in TAGGED | TENSOR:
        return dict.fromkeys(SHAPES)
    base, *models = ({name: W.double() for name, W in state.items()} for state in (base, *models))
    bases = epimer.build_basis(base, models, rank=RANK, basis="tagged" if method in TAGGED else "tensor")
    return {name: basis_of(bases[name], *shape) for name, shape in SHAPES.items()}


def dense_theory(x, deltas, H, S, scale):
    """(quadratic, V_S, R_S) of scale · x, each summed over layers."""
    quadratic = v_s = r_s = 0.0
    for name in SHAPES:
        for w, D, h in zip(LAMBDA, deltas[name], H[name], strict=True):
            inside = D if S[name] is None else S[name] @ (S[name].T @ D)
            step = scale * x[name]
            quadratic += w * (step - D) @ h @ (step - D)
            v_s += w * (step - inside) @ h @ (step - inside)
            r_s += w * (D - inside) @ h @ (D - inside)
    return float(quadratic), float(v_s), float(r_s)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-4)])
@pytest.mark.parametrize("kind", MEASURED)
def test_the_theory_at_each_merge_equals_dense_arithmetic(kind, dtype, tolerance):
    base, models = states(dtype)
    curvature = curvature_of(kind, dtype)
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, weights=WEIGHTS, rank=RANK)
    deltas = {name: [(model[name] - base[name]).double().flatten() for model in models] for name in SHAPES}
    H = {name: [matrix(one[name], *shape) for one in curvature] for name, shape in SHAPES.items()}
    assert set(found.merges) == set(found.forecast) == set(MEASURED[kind])
    for method, theories in found.merges.items():
        x, S = made(base, models, method, curvature), subspaces(base, models, method)
        assert [one.scale for one in theories] == list(dict.fromkeys([1.0, found.forecast[method].scale]))
        for one in theories:
            quadratic, v_s, r_s = dense_theory(x, deltas, H, S, one.scale)
            assert (one.quadratic, one.v_s) == pytest.approx((quadratic, v_s), rel=tolerance)
            assert one.r_s == pytest.approx(r_s, rel=tolerance, abs=tolerance * quadratic)
            assert one.increase == pytest.approx(0.5 * quadratic, rel=tolerance)
            assert one.bound == pytest.approx(0.5 * (v_s**0.5 + r_s**0.5) ** 2, rel=10 * tolerance)
            assert one.bound >= 0.5 * quadratic * (1 - tolerance)
            if S["one.weight"] is None:
                assert one.bound == pytest.approx(0.5 * quadratic, rel=tolerance)
        layers = [layer.merges[method] for layer in found.layers.values()]
        assert sum(layer.quadratic for layer in layers) == pytest.approx(theories[0].quadratic)
        assert sum(layer.r_s for layer in layers) == pytest.approx(theories[0].r_s, abs=1e-12)


@pytest.mark.parametrize(("kind", "method"), [("diagonal", "epimer"), ("samples", "epimer_exact")])
def test_the_bound_of_a_sum_is_not_that_of_the_mean(kind, method):
    """T times the mean loses far more than the mean does: the mean's bound lies below what the sum loses."""
    base, models = states()
    curvature = curvature_of(kind)
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, weights=WEIGHTS, rank=RANK)
    x = made(base, models, method, curvature)
    deltas = {name: [(model[name] - base[name]).flatten() for model in models] for name in SHAPES}
    H = {name: [matrix(one[name], *shape) for one in curvature] for name, shape in SHAPES.items()}
    increase = 0.5 * dense_theory(x, deltas, H, dict.fromkeys(SHAPES), 1.0)[0]
    assert found.total.bound < increase
    assert found.merges[method][0].bound >= increase


def test_a_merge_that_is_not_proportional_to_its_scale_is_taken_at_its_scale():
    base, models = states()
    curvature = curvature_of("diagonal")
    methods = {"gradient_matching": {"prior": 0.3}}
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, weights=WEIGHTS, rank=RANK, methods=methods)
    theories = found.merges["gradient_matching"]
    assert [one.scale for one in theories] == [1.0, found.forecast["gradient_matching"].scale]
    deltas = {name: [(model[name] - base[name]).flatten() for model in models] for name in SHAPES}
    H = {name: [matrix(one[name], *shape) for one in curvature] for name, shape in SHAPES.items()}
    for one in theories:
        merged = epimer.merge_state_dicts(
            base, models, "gradient_matching", weights=WEIGHTS, curvature=curvature, prior=0.3, scale=one.scale
        )
        x = {name: (merged[name] - base[name]).flatten() for name in SHAPES}
        quadratic = dense_theory(x, deltas, H, dict.fromkeys(SHAPES), 1.0)[0]
        assert (one.quadratic, one.bound) == pytest.approx((quadratic, 0.5 * quadratic), rel=1e-7)


def orthogonal_models():
    """Models whose task vectors are of rank 2 and share no direction, so that atoms hold each of them whole."""
    generator = torch.Generator().manual_seed(2)
    base, models = {}, [{} for _ in range(T)]
    for name, (m, n) in SHAPES.items():
        base[name] = torch.randn(m, n, generator=generator, dtype=torch.float64)
        U, V = (torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q for d in (m, n))
        for t, model in enumerate(models):
            some = slice(RANK * t, RANK * (t + 1))
            model[name] = (
                base[name] + 0.1 * U[:, some] @ torch.diag(torch.tensor([2.0, 1.0 + t]).double()) @ V[:, some].T
            )
    return base, models


@pytest.mark.parametrize("kind", [*MEASURED, None])
def test_the_bound_is_reached_where_the_basis_leaves_nothing(kind):
    base, models = orthogonal_models()
    curvature = curvature_of(kind) if kind else None
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, weights=WEIGHTS, rank=RANK)
    assert found.total.r_s == pytest.approx(0, abs=1e-9 * found.total.v_s)
    deltas = {name: [(model[name] - base[name]).flatten() for model in models] for name in SHAPES}
    H = {
        name: [
            matrix(curvature[t][name] if curvature else TaskGram(deltas[name][t].reshape(shape)), *shape)
            for t in range(T)
        ]
        for name, shape in SHAPES.items()
    }
    for method, theories in found.merges.items():
        quadratic, *_ = dense_theory(made(base, models, method, curvature), deltas, H, dict.fromkeys(SHAPES), 1.0)
        assert theories[0].quadratic == pytest.approx(quadratic, rel=1e-7)
        assert theories[0].bound == pytest.approx(0.5 * quadratic, rel=1e-4)


def test_task_gram_is_that_of_the_leading_directions():
    base, models = states()
    found = epimer.diagnose_state_dicts(base, models, weights=WEIGHTS, rank=RANK)
    deltas = {name: [(model[name] - base[name]).flatten() for model in models] for name in SHAPES}

    def leading(D):
        U, sigma, Vh = torch.linalg.svd(D, full_matrices=False)
        return TaskGram((U[:, :RANK] * sigma[:RANK]) @ Vh[:RANK])

    for method, (one, *_) in found.merges.items():
        x, S = made(base, models, method, None), subspaces(base, models, method)
        H = {n: [matrix(leading(D.reshape(s)), *s) for D in deltas[n]] for n, s in SHAPES.items()}
        assert one.quadratic == pytest.approx(dense_theory(x, deltas, H, S, 1.0)[0], rel=1e-7)
        whole = {n: [matrix(TaskGram(D.reshape(s)), *s) for D in deltas[n]] for n, s in SHAPES.items()}
        if method in TAGGED:
            quadratic, v_s, r_s = dense_theory(x, deltas, whole, S, 1.0)
            assert (one.v_s, one.r_s) == pytest.approx((v_s, r_s), rel=1e-7)
            assert one.bound >= 0.5 * quadratic >= one.increase
        else:
            assert (one.v_s, one.r_s, one.bound) == pytest.approx((one.quadratic, 0, one.increase), rel=1e-12)


def test_a_recipe_has_the_theory_at_its_own_scale(tmp_path):
    base, models = states(torch.float32)
    for name, state in {"base": base, **{f"m{t}": model for t, model in enumerate(models)}}.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    recipe = {
        "merge_method": "tsv",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / f"m{t}")} for t in range(T)],
        "parameters": {"scale": 0.35, "rank": RANK},
    }
    found = diagnose(recipe, progress=False)
    tsv = {one.scale: one for one in found.merges["tsv"]}
    assert set(tsv) == {1.0, 0.35, found.forecast["tsv"].scale}
    assert 0.35 not in {one.scale for one in found.merges["average"]}
    expected = epimer.diagnose_state_dicts(base, models, rank=RANK, methods={"tsv": {"scale": 0.35}})
    assert tsv[0.35].quadratic == pytest.approx(expected.merges["tsv"][0].quadratic, rel=1e-5)
    assert tsv[0.35].bound == pytest.approx(expected.merges["tsv"][0].bound, rel=1e-5)


def test_records_from_before_are_read():
    base, models = states()
    found = epimer.diagnose_state_dicts(base, models, rank=RANK)
    data = json.loads(json.dumps(found.to_dict()))
    assert Diagnosis.from_dict(data).merges == found.merges
    del data["merges"]
    for layer in data["layers"].values():
        del layer["merges"]
    older = Diagnosis.from_dict(data)
    assert older.merges == {}
    assert older.total == found.total
