"""Every number of a diagnosis against dense float64 arithmetic written here."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import epimer
from epimer.api import diagnose
from epimer.diagnosis.layer import Sums
from epimer.errors import ParameterError
from epimer.geometry.metric import EKFAC

T, NAMES = 3, ("one.weight", "two.weight")
SHAPES = {"one.weight": (12, 9), "two.weight": (10, 14), "norm.weight": (12,)}


def states(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    models = []
    for _ in range(T):
        step = {
            name: 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
        }
        step["one.weight"][0] = 0
        models.append({name: (W + step[name]).to(dtype) for name, W in base.items()})
    return {name: W.to(dtype) for name, W in base.items()}, models


def spd(size, generator):
    X = torch.randn(2 * size, size, generator=generator, dtype=torch.float64)
    return X.T @ X / size


def curvature_of(kind, base):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(T):
        one = {}
        for name in NAMES:
            m, n = base[name].shape
            if kind == "kronecker":
                one[name] = epimer.Kronecker(A=spd(n, generator), G=spd(m, generator))
            elif kind == "ekfac":
                P, Q = (torch.linalg.qr(spd(d, generator)).Q for d in (m, n))
                S = torch.rand(m, n, generator=generator, dtype=torch.float64)
                one[name] = EKFAC(S=S, P=P, Q=Q)
            else:
                one[name] = epimer.Diagonal(torch.rand(m, n, generator=generator, dtype=torch.float64))
        found.append(one)
    return found


def dense(kind, metric, D):
    """H as an (mn x mn) matrix on row-major vectors."""
    if kind == "kronecker":
        return np.kron(metric.G.numpy(), metric.A.numpy())
    if kind == "ekfac":
        E = np.kron(metric.P.numpy(), metric.Q.numpy())
        return E @ np.diag(metric.S.numpy().ravel()) @ E.T
    if kind == "diagonal":
        return np.diag(metric.F.numpy().ravel())
    return np.kron(D @ D.T, D.T @ D)


def cut(D, k):
    U, s, Vh = np.linalg.svd(D, full_matrices=False)
    return (U[:, :k] * s[:k]) @ Vh[:k]


@pytest.mark.parametrize("kind", ["task-gram", "kronecker", "ekfac", "diagonal"])
def test_a_diagnosis_equals_dense_arithmetic(kind):
    base, models = states()
    curvature = None if kind == "task-gram" else curvature_of(kind, base)
    k = 3
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, rank=k, names=["a", "b", "c"])
    deltas = {name: [(model[name] - base[name]).numpy() for model in models] for name in NAMES}
    H = {
        name: [dense(kind, None if curvature is None else curvature[t][name], deltas[name][t]) for t in range(T)]
        for name in NAMES
    }
    norms = [math.sqrt(sum(np.sum(deltas[name][t] ** 2) for name in NAMES)) for t in range(T)]
    assert found.models == ("a", "b", "c")
    assert found.norms == pytest.approx(norms)
    assert found.base_norm == pytest.approx(math.sqrt(sum(float(base[name].square().sum()) for name in NAMES)))
    assert found.curvature == kind
    inner = np.array([[sum(np.sum(deltas[n][s] * deltas[n][t]) for n in NAMES) for t in range(T)] for s in range(T)])
    assert np.array(found.conflict.cosine) == pytest.approx(inner / np.outer(norms, norms))
    for s in range(T):
        for t in range(T):
            pairs = [(deltas[n][s].ravel(), deltas[n][t].ravel()) for n in NAMES]
            moved = sum(np.sum((a != 0) & (b != 0)) for a, b in pairs)
            same = sum(np.sum(a * b > 0) for a, b in pairs)
            assert found.conflict.sign[s][t] == pytest.approx(same / moved)
            for side, got in ((0, found.conflict.left), (2, found.conflict.right)):
                total = weight = 0.0
                for n in NAMES:
                    one, two = (np.linalg.svd(deltas[n][i], full_matrices=False)[side] for i in (s, t))
                    one, two = (one[:, :k], two[:, :k]) if side == 0 else (one[:k].T, two[:k].T)
                    w = np.linalg.norm(deltas[n][s]) * np.linalg.norm(deltas[n][t])
                    total, weight = total + w * np.sum((one.T @ two) ** 2) / k, weight + w
                assert got[s][t] == pytest.approx(total / weight)
    # interference: of the leading k directions where curvature has two factors
    leading = {n: [cut(D, k) if kind in ("task-gram", "kronecker") else D for D in deltas[n]] for n in NAMES}
    truncated = {n: [dense(kind, None, cut(D, k)) for D in deltas[n]] if kind == "task-gram" else H[n] for n in NAMES}
    crossed = np.array(
        [
            [sum(leading[n][s].ravel() @ truncated[n][t] @ leading[n][s].ravel() for n in NAMES) for t in range(T)]
            for s in range(T)
        ]
    )
    assert np.array(found.conflict.interference) == pytest.approx(crossed / np.diag(crossed)[None, :])
    # forecasts: the quadratic form at the merge itself
    for method, forecast in found.forecast.items():
        given = {} if method in ("average", "tsv") else {"iterations": 8} if method != "epimer" else {}
        rank = {} if method in ("average", "regmean") else {"rank": k}
        merged = epimer.merge_state_dicts(
            base, models, method, **rank, **given,
            curvature=curvature if epimer.describe_method(method).needs_curvature else None,
        )  # fmt: skip
        grams = {n: [dense("task-gram", None, cut(D, k)) for D in deltas[n]] for n in NAMES}

        def lost(t, scale, merged=merged, grams=grams):
            distances = []
            for form in (grams, H) if kind in ("kronecker", "ekfac") else (grams,):  # a diagonal forecasts nothing
                steps = [scale * (merged[n] - base[n]).numpy() - deltas[n][t] for n in NAMES]
                part = sum(E.ravel() @ form[n][t] @ E.ravel() for n, E in zip(NAMES, steps, strict=True))
                whole = sum(deltas[n][t].ravel() @ form[n][t] @ deltas[n][t].ravel() for n in NAMES)
                distances.append(math.sqrt(part / whole))
            return np.mean(distances) ** 2

        assert forecast.tasks == pytest.approx([lost(t, 1.0) for t in range(T)], rel=1e-6)
        assert forecast.mean == pytest.approx(np.mean(forecast.tasks))
        assert forecast.worst == max(forecast.tasks)
        means = {scale: np.mean([lost(t, scale) for t in range(T)]) for scale in np.arange(0.05, 4.01, 0.05)}
        assert forecast.mean_at_scale == pytest.approx(min(means.values()), rel=1e-6)
        assert means[min(means, key=lambda s: abs(s - forecast.scale))] == pytest.approx(min(means.values()), rel=1e-6)
    wanted = {"kronecker": {"regmean", "epimer_kron"}, "ekfac": {"epimer_kron"}, "diagonal": {"epimer"}}.get(
        kind, set()
    )
    assert set(found.forecast) == {"average", "tsv", "epimer_free"} | wanted
    # energy and η by rank
    for rank in (2, 3):
        kept, eta, flat = np.zeros(T), 0.0, 0.0
        bases = epimer.build_basis(base, models, rank=rank)
        for n in NAMES:
            S = bases[n]
            points = [S.project(torch.from_numpy(D)).numpy() for D in deltas[n]]
            both = epimer.build_basis(base, models, rank=rank, basis="tensor")[n]
            U, V = both.U.numpy(), both.V.numpy()
            kept += [np.sum((U @ U.T @ D @ V @ V.T) ** 2) for D in deltas[n]]
            atoms = np.stack([S.lift(e).numpy().ravel() for e in torch.eye(len(points[0]), dtype=torch.float64)], 1)
            forms = [atoms.T @ matrix @ atoms for matrix in H[n]]
            forms = [form / (np.trace(form) / len(form)) + 0.01 * np.eye(len(form)) for form in forms]
            star = np.linalg.solve(sum(forms), sum(form @ x for form, x in zip(forms, points, strict=True)))
            mean = np.mean(points, 0)

            def F(y, forms=forms, points=points):
                return np.mean([(y - x) @ form @ (y - x) for form, x in zip(forms, points, strict=True)])

            eta, flat = eta + F(mean) - F(star), flat + F(mean)
        assert np.array(found.energy[str(rank)]) == pytest.approx(kept / np.array(norms) ** 2)
        rows = [row for row in found.eta_by_rank if row["k"] == rank]
        assert len(rows) == (rank == 3 or kind != "task-gram")
        assert all(row["eta"] == pytest.approx(eta) for row in rows)
        assert all(row["eta_fraction"] == pytest.approx(eta / flat) for row in rows)
    assert found.total.eta == pytest.approx(eta)
    layer = found.layers["two.weight"]
    assert layer.shape == (10, 14)
    alone = epimer.diagnose_state_dicts(
        {"two.weight": base["two.weight"]}, [{"two.weight": model["two.weight"]} for model in models], rank=k,
        curvature=curvature and [{"two.weight": one["two.weight"]} for one in curvature],
    )  # fmt: skip
    assert layer.conflict == alone.conflict
    assert layer.norms == pytest.approx([np.linalg.norm(D) for D in deltas["two.weight"]])
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["kind"] == "diagnosis"
    assert plain["total"]["eta_fraction"] == pytest.approx(eta / flat)


def folders(tmp_path):
    base, models = states(torch.float32)
    for name, state in {"base": base, **{f"m{t}": model for t, model in enumerate(models)}}.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    return base, models


def test_folders_are_diagnosed_like_state_dicts(tmp_path):
    base, models = folders(tmp_path)
    recipe = {
        "merge_method": "tsv",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / f"m{t}")} for t in range(T)],
    }
    found = diagnose(recipe, rank=3, progress=False, workers=2)
    expected = epimer.diagnose_state_dicts(base, models, rank=3, names=["m0", "m1", "m2"])
    assert found.models == expected.models
    assert found.layers.keys() == expected.layers.keys()
    for method, forecast in expected.forecast.items():
        assert found.forecast[method].tasks == pytest.approx(forecast.tasks, rel=1e-6)
    assert np.array(found.conflict.interference) == pytest.approx(np.array(expected.conflict.interference))
    assert found.energy["3"] == pytest.approx(expected.energy["3"])
    assert found.total.bound == pytest.approx(expected.total.bound)
    assert "merge_method: tsv" in found.recipe
    assert str(tmp_path) not in found.recipe
    with pytest.raises(ParameterError, match="Did you mean 'tsv'"):
        diagnose(recipe, methods=["tvs"], progress=False)
    with pytest.raises(ParameterError, match="ties looks at the whole model"):
        diagnose(recipe, methods=["ties"], progress=False)
    with pytest.raises(ParameterError, match="epimer_kron needs kronecker curvature, and there is task-gram"):
        diagnose(recipe, methods=["epimer_kron"], progress=False)
    with pytest.raises(ParameterError, match="needs a base_model"):
        diagnose({"merge_method": "average", "models": recipe["models"]}, progress=False)


def test_a_model_of_weight_zero_is_not_diagnosed():
    base, models = states()
    curvature = curvature_of("kronecker", base)
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, weights=[0, 0.7, 0.3], names=["a", "b", "c"])
    alone = epimer.diagnose_state_dicts(base, models[1:], curvature=curvature[1:], weights=[0.7, 0.3], names=["b", "c"])
    assert found.to_dict() == alone.to_dict()


def gradient_matching_loss(base, models, merged):
    """Return the mean over tasks of ‖Lᵀ(X - D)Lᵀ‖² / ‖LᵀDLᵀ‖² over all layers, L being D's leading directions."""
    lost = []
    for model in models:
        part = whole = 0.0
        for name in NAMES:
            D, X = ((state[name] - base[name]).numpy() for state in (model, merged))
            U, s, Vh = np.linalg.svd(D, full_matrices=False)
            k = min(D.shape) // T
            L = (U[:, :k] * s[:k]) @ Vh[:k]
            part += np.sum((L.T @ (X - D) @ L.T) ** 2)
            whole += np.sum((L.T @ D @ L.T) ** 2)
        lost.append(part / whole)
    return float(np.mean(lost))


@pytest.mark.parametrize("prior", [0.0, 0.3])
def test_a_merge_that_is_not_linear_in_its_scale_is_forecast_at_each_scale_by_its_own_merge(prior):
    base, models = states()
    curvature = curvature_of("diagonal", base)

    def loss(scale):
        given = {"curvature": curvature, "prior": prior, "scale": scale, "rules": [("norm.weight", "copy")]}
        return gradient_matching_loss(
            base, models, epimer.merge_state_dicts(base, models, "gradient_matching", **given)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epimer.EpimerWarning)
        losses = {scale: loss(scale) for scale in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)}
    methods = {"gradient_matching": {"prior": prior}}
    found = epimer.diagnose_state_dicts(base, models, curvature=curvature, methods=methods).forecast[
        "gradient_matching"
    ]
    assert found.mean == pytest.approx(losses[1.0], rel=1e-9)
    assert found.mean_at_scale == pytest.approx(losses[found.scale], rel=1e-9)
    assert found.mean_at_scale == pytest.approx(min(losses.values()), rel=1e-9)
    assert (found.scale == 1.0) == (prior == 0)  # α cancels


def test_sums_of_layers_move_to_a_device_whole():
    """On several GPUs every layer's sums lie on the one that it was examined on."""
    one = torch.ones(2, 2)
    sums = Sums(one, one, one, one, one, one, 3.0, own=one, kept={2: one}, merges={("tsv", 1.0): one})
    moved = sums.to(torch.device("meta"))
    assert all(getattr(moved, name).is_meta for name in ("inner", "agree", "both", "left", "right", "weight", "own"))
    assert moved.kept[2].is_meta
    assert moved.merges["tsv", 1.0].is_meta
    assert (moved.base, moved.interference, moved.steps) == (3.0, None, {})
