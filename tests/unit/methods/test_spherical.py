"""slerp, nuslerp, multislerp, the Karcher mean and Model Stock against their definitions, written out in float64."""

import math

import pytest
import torch

import epimer
from epimer.errors import ParameterError

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = {"w": (30, 20), "v": (17,), "s": ()}


def draw(spread):
    return {
        name: spread * torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for name, shape in SHAPES.items()
    }


BASE = draw(1.0)
MODELS = [{name: BASE[name] + D for name, D in draw(0.5).items()} for _ in range(3)]
DELTAS = [{name: model[name] - BASE[name] for name in BASE} for model in MODELS]


def near(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def angle(x, y):
    """Return the angle between two vectors by Kahan's formula, exact for small ones."""
    u, v = x.flatten() / x.norm(), y.flatten() / y.norm()
    return 2 * math.atan2(float((u - v).norm()), float((u + v).norm()))


def arc(x, y, t):
    phi = angle(x, y)
    return (math.sin((1 - t) * phi) * x + math.sin(t * phi) * y) / math.sin(phi)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 1.2])
def test_slerp_is_the_arc_from_the_base_to_the_model(t):
    merged = epimer.merge_state_dicts(BASE, MODELS[:1], "slerp", t=t)
    for name in ("w", "v"):
        near(merged[name], arc(BASE[name], MODELS[0][name], t))
    half = epimer.merge_state_dicts(BASE, MODELS[:1], "slerp", t=t, scale=0.5)
    near(half["w"], (BASE["w"] + merged["w"]) / 2)


def test_slerp_of_near_models_is_still_an_arc_and_straight_to_mergekit():
    model = {name: W + 1e-2 * (V - W) for (name, W), V in zip(BASE.items(), MODELS[0].values(), strict=True)}
    merged = epimer.merge_state_dicts(BASE, [model], "slerp", t=0.3)["w"]
    near(merged, arc(BASE["w"], model["w"], 0.3), 1e-12)
    straight = 0.7 * BASE["w"] + 0.3 * model["w"]
    assert float((merged - straight).norm()) > 1e-7
    near(epimer.merge_state_dicts(BASE, [model], "slerp", t=0.3, compat="mergekit")["w"], straight, 1e-14)
    near(epimer.merge_state_dicts(BASE, [dict(BASE)], "slerp", t=0.3)["w"], BASE["w"], 1e-15)


def test_slerp_and_the_like_say_how_many_models_they_merge():
    def refused(base, models, method):
        with pytest.raises(epimer.EpimerError) as caught:
            epimer.merge_state_dicts(base, models, method)
        return str(caught.value)

    for method in ("slerp", "nearswap", "arcee_fusion"):
        assert refused(BASE, MODELS[:2], method) == (
            f"{method} merges exactly 1 model with the base, and there are 2; take one of them as the base."
        )
        assert refused(None, MODELS[:1], method).startswith(f"{method} needs the base model")
    assert refused(BASE, MODELS, "nuslerp") == "nuslerp merges exactly 2 models, and there are 3."
    assert refused(None, MODELS[:1], "nuslerp") == "nuslerp merges exactly 2 models, and there are 1."
    assert refused(BASE, MODELS[:1], "model_stock") == "model_stock merges at least 2 models, and there are 1."
    assert refused(BASE, MODELS, "passthrough") == "passthrough merges exactly 1 model, and there are 3."


@pytest.mark.parametrize("base", [None, BASE])
@pytest.mark.parametrize("weights", [[1, 3], [2, 0], [0, 0.1]])
def test_nuslerp_is_the_arc_between_task_vectors_or_models(base, weights):
    merged = epimer.merge_state_dicts(base, MODELS[:2], "nuslerp", weights=weights)["w"]
    start = 0 if base is None else base["w"]
    x, y = (model["w"] - start for model in MODELS[:2])
    near(merged, start + arc(x, y, weights[1] / sum(weights)))


@pytest.mark.parametrize("row_wise", [False, True])
def test_nuslerp_of_rows_or_columns(row_wise):
    given = {"nuslerp_flatten": False, "nuslerp_row_wise": row_wise, "weights": [1, 3]}
    merged = epimer.merge_state_dicts(BASE, MODELS[:2], "nuslerp", **given)["w"] - BASE["w"]
    x, y = (D["w"].T if row_wise else D["w"] for D in DELTAS[:2])
    expected = torch.stack([arc(a, b, 0.75) for a, b in zip(x, y, strict=True)])
    near(merged, expected.T if row_wise else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["slerp", "nuslerp"])
def test_nearly_opposite_vectors_merge_continuously_and_opposite_ones_on_the_line(method, dtype):
    """Ends of lengths 1 and 2 at angles up to π: no merge is far longer than they are, and none leaps."""
    x = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)

    def merged(t, off):
        y = 2 * torch.tensor([-math.cos(off), math.sin(off), 0.0], dtype=dtype)
        if method == "slerp":
            return epimer.merge_state_dicts({"w": x}, [{"w": y}], "slerp", t=t)["w"]
        return epimer.merge_state_dicts(None, [{"w": x}, {"w": y}], "nuslerp", weights=[1 - t, t])["w"]

    offs = [0.0, *(10.0**power for power in range(-9, -4)), *(0.001 * step for step in range(1, 61))]
    for t in (0.3, 0.5):
        path = torch.stack([merged(t, off) for off in offs])
        near(path[0], x - t * 3 * x, 1e-6)  # the straight line from x to -2x
        assert float(path.norm(dim=1).max()) < 2 / math.sqrt(1 - 0.9995**2)
        assert float((path[1:] - path[:-1]).norm(dim=1).max()) < 2.5
        far = 2 * torch.tensor([-math.cos(0.06), math.sin(0.06), 0.0], dtype=torch.float64)
        near(path[-1].double(), arc(x.double(), far, t), 1e-4 if dtype == torch.float32 else 1e-9)


def test_multislerp_takes_the_published_steps():
    """Unit vectors, their mean as the point of tangency, the tangent step and the exponential map."""
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    x = torch.stack([D["w"].flatten() for D in DELTAS])
    norms = x.norm(dim=1)
    units = x / norms[:, None]
    mean = (weights[:, None] * units).sum(0)
    mean /= mean.norm()
    step = (weights[:, None] * (units - (units @ mean)[:, None] * mean)).sum(0)
    size = step.norm().clamp_min(1e-300)
    direction = torch.cos(size) * mean + torch.sin(size) / size * step
    merged = epimer.merge_state_dicts(BASE, MODELS, "multislerp", weights=weights.tolist())["w"]
    near(merged, BASE["w"] + ((weights @ norms) * direction).reshape(30, 20))
    doubled = epimer.merge_state_dicts(
        BASE, MODELS, "multislerp", weights=(2 * weights).tolist(), normalize_weights=False
    )["w"]
    near(doubled - BASE["w"], 2 * (merged - BASE["w"]))


@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_karcher_minimises_squared_angles(spread):
    """At the Fréchet mean the logarithms of the directions add up to nothing, and every neighbour is worse."""
    weights = [0.5, 0.2, 0.3]
    models = [{name: BASE[name] + spread * D[name] for name in D} for D in DELTAS]
    merged = epimer.merge_state_dicts(BASE, models, "karcher", weights=weights, max_iter=50, tol=1e-12)["w"].flatten()
    points = [model["w"].flatten() for model in models]
    length = sum(w * float(p.norm()) for w, p in zip(weights, points, strict=True))
    assert float(merged.norm()) == pytest.approx(length, rel=1e-12)
    x = merged / merged.norm()

    def logarithm(p):
        across = p - (p @ x) * x
        return angle(x, p) * across / across.norm()

    total = sum(w * logarithm(p) for w, p in zip(weights, points, strict=True))
    assert float(total.norm()) < 1e-8 * max(angle(x, p) for p in points) + 1e-11
    near(epimer.merge_state_dicts(None, models, "karcher", weights=weights, max_iter=50, tol=1e-12)["w"].flatten(),
         merged, 1e-9)  # fmt: skip


@pytest.mark.parametrize("filter_wise", [False, True])
def test_model_stock_goes_as_far_as_the_models_agree(filter_wise):
    x = torch.stack([D["w"] if filter_wise else D["w"].reshape(1, -1) for D in DELTAS])
    unit = x / x.norm(dim=2, keepdim=True)
    cosine = sum((unit[s] * unit[t]).sum(1) for s, t in ((0, 1), (0, 2), (1, 2))) / 3
    share = 3 * cosine / (1 + 2 * cosine)
    merged = epimer.merge_state_dicts(BASE, MODELS, "model_stock", filter_wise=filter_wise)["w"] - BASE["w"]
    near(merged, (share[:, None] * x.mean(0)).reshape(30, 20))
    assert "mean cosine" in epimer.describe_method("model_stock").equation


def test_model_stock_of_small_task_vectors_is_the_same_and_nothing_to_mergekit():
    models = [{name: BASE[name] + 1e-5 * D[name] for name in D} for D in DELTAS]
    one, other = (epimer.merge_state_dicts(BASE, chosen, "model_stock")["w"] - BASE["w"] for chosen in (MODELS, models))
    near(1e5 * other, one, 1e-6)
    theirs = epimer.merge_state_dicts(BASE, models, "model_stock", compat="mergekit")["w"] - BASE["w"]
    assert float(theirs.norm()) < 0.05 * float(other.norm())


def test_compat_is_for_mergekits_methods():
    with pytest.raises(ParameterError, match="compat: mergekit has no meaning to tsv, which mergekit does not have"):
        epimer.merge_state_dicts(BASE, MODELS, "tsv", compat="mergekit")
    with pytest.raises(ParameterError, match=r"compat must be one of mergekit\. Got 'other' instead"):
        epimer.merge_state_dicts(BASE, MODELS, "ties", compat="other")
    one, other = (epimer.merge_state_dicts(BASE, MODELS, name)["w"] for name in ("linear", "average"))
    assert torch.equal(one, other)


def test_karcher_of_opposite_directions_is_finite():
    models = [{"w": torch.tensor([x, 0.0], dtype=torch.float64)} for x in (3.0, 1.0, -1.0)]
    near(epimer.merge_state_dicts(None, models, "karcher")["w"], torch.tensor([5 / 3, 0.0], dtype=torch.float64))
    epimer.merge_state_dicts(None, models[1:], "karcher")


@pytest.mark.parametrize("power", [-30, -60, -120, 60])
def test_the_unit_of_the_weights_does_not_matter_to_karcher(power):
    """Tensors shorter than `tol` have a direction all the same, unless the others are far longer."""
    generator = torch.Generator().manual_seed(0)
    models = [{"w": torch.randn(6, 5, generator=generator)} for _ in range(3)]
    moved = [{"w": torch.ldexp(model["w"], torch.tensor(power))} for model in models]
    expected, merged = (epimer.merge_state_dicts(None, ms, "karcher")["w"] for ms in (models, moved))
    assert torch.equal(merged, torch.ldexp(expected, torch.tensor(power)))
    short = [{"w": 1e-6 * models[0]["w"]}, *models[1:]]
    rest = epimer.merge_state_dicts(None, models[1:], "karcher")["w"]
    direction = epimer.merge_state_dicts(None, short, "karcher")["w"]
    near(direction / direction.norm(), rest / rest.norm(), 1e-5)


def test_karcher_goes_on_to_the_last_digit_where_tol_is_zero():
    generator = torch.Generator().manual_seed(1)
    models = [{"w": torch.randn(4, 3, generator=generator).double()} for _ in range(2)]
    mean, same = (epimer.merge_state_dicts(None, ms, "karcher", tol=0)["w"] for ms in (models, models[:1] * 2))
    units = [model["w"] / model["w"].norm() for model in models]
    middle = (units[0] + units[1]) / (units[0] + units[1]).norm()
    near(mean, middle * (models[0]["w"].norm() + models[1]["w"].norm()) / 2)
    near(same, models[0]["w"])
