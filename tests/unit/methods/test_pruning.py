"""TIES, DARE, Model Breadcrumbs and DELLA against their definitions, written out in float64."""

import pytest
import torch

import epimer
from epimer.errors import ParameterError

SHAPE = (300, 400)
GENERATOR = torch.Generator().manual_seed(0)
BASE = {"w": torch.randn(SHAPE, generator=GENERATOR, dtype=torch.float64)}
DELTAS = [0.1 * torch.randn(SHAPE, generator=GENERATOR, dtype=torch.float64) for _ in range(3)]
MODELS = [{"w": BASE["w"] + D} for D in DELTAS]
TAU = torch.stack([model["w"] - BASE["w"] for model in MODELS])
WEIGHTS = [0.6, 0.2, 0.7]


def change(method, **given):
    return epimer.merge_state_dicts(BASE, MODELS, method, **given)["w"] - BASE["w"]


def elected(vectors, weights, *, normalize):
    """Return what agrees with the sign of Σ w P, added up or averaged, entry by entry."""
    w = torch.tensor(weights, dtype=torch.float64).reshape(-1, 1, 1)
    agree = (w * vectors).sign() == (w * vectors).sum(0).sign()
    total = (w * vectors * agree).sum(0)
    return total / (w.abs() * agree).sum(0).clamp_min(1e-300) if normalize else total


def crumbs(D, density, gamma):
    """Return D with its ⌊γN⌋ largest entries dropped, and the smallest until ⌊density N⌋ are left."""
    order = D.abs().flatten().argsort()
    kept, top = int(density * D.numel()), int(gamma * D.numel())
    bottom = max(0, D.numel() - kept - top)
    mask = torch.zeros(D.numel(), dtype=torch.float64)
    mask[order[bottom : bottom + kept]] = 1
    return D * mask.reshape(D.shape)


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_breadcrumbs_drop_the_smallest_and_the_largest():
    vectors = torch.stack([crumbs(D, *pair) for D, pair in zip(TAU, [(0.3, 0.1), (0.5, 0.0), (0.8, 0.4)], strict=True)])
    found = change("breadcrumbs", density=[0.3, 0.5, 0.8], gamma=[0.1, 0.0, 0.4], weights=WEIGHTS, scale=0.5)
    near(found, 0.5 * torch.einsum("t,tmn->mn", torch.tensor(WEIGHTS, dtype=torch.float64), vectors))
    assert int((vectors[1] != 0).sum()) == 0.5 * TAU[1].numel()


def test_breadcrumbs_may_keep_the_norm():
    vectors = [crumbs(D, 0.3, 0.1) for D in TAU]
    vectors = [P * D.abs().sum() / P.abs().sum() for P, D in zip(vectors, TAU, strict=True)]
    near(change("breadcrumbs", density=0.3, gamma=0.1, rescale=True), sum(vectors) / 3)


@pytest.mark.parametrize("normalize", [False, True])
def test_breadcrumbs_ties_elects_signs(normalize):
    vectors = torch.stack([crumbs(D, 0.4, 0.05) for D in TAU])
    found = change("breadcrumbs_ties", density=0.4, gamma=0.05, weights=WEIGHTS, normalize=normalize)
    near(found, elected(vectors, WEIGHTS, normalize=normalize))


def test_ties_may_add_up_what_agrees_under_weights_as_given():
    near(change("ties", density=1.0, weights=WEIGHTS, normalize=False), elected(TAU, WEIGHTS, normalize=False))
    signed = [0.6, -0.2, 0.7]
    near(change("ties", density=1.0, weights=signed, normalize=False), elected(TAU, signed, normalize=False))
    with pytest.raises(ParameterError, match="takes a mean, so weights must not be negative"):
        change("ties", density=1.0, weights=signed)


def test_mergekits_ties_trims_each_tensor_by_itself():
    """Two tensors of which one moved ten times as far: over the whole model it alone would be kept."""
    base = BASE | {"v": torch.zeros(40, 50, dtype=torch.float64)}
    small = [0.01 * torch.randn(40, 50, generator=GENERATOR, dtype=torch.float64) for _ in MODELS]
    models = [model | {"v": D} for model, D in zip(MODELS, small, strict=True)]
    merged = epimer.merge_state_dicts(base, models, "ties", density=0.2, compat="mergekit")
    trimmed = torch.stack([D * (D.abs() >= D.abs().flatten().sort().values[-400]) for D in small])
    near(merged["v"], elected(trimmed, [1, 1, 1], normalize=True))
    assert merged.record.method == "mergekit_ties"
    whole = epimer.merge_state_dicts(base, models, "ties", density=0.2)
    assert int((whole["v"] != 0).sum()) < 0.1 * int((merged["v"] != 0).sum())
    near(epimer.merge_state_dicts(base, models, "ties", compat="mergekit")["w"] - BASE["w"],
         elected(TAU, [1, 1, 1], normalize=True))  # fmt: skip


def test_an_even_vote_is_a_plus_to_mergekit_and_leaves_the_base_here():
    base, models = {"w": torch.zeros(4)}, [{"w": torch.full((4,), x)} for x in (0.5, -0.5)]
    assert torch.equal(epimer.merge_state_dicts(base, models, "ties", density=1.0)["w"], base["w"])
    assert torch.equal(epimer.merge_state_dicts(base, models, "ties", compat="mergekit")["w"], models[0]["w"])


@pytest.mark.parametrize("method", ["dare", "della_linear"])
def test_what_is_dropped_at_random_is_made_up_for_on_average(method):
    """E[M ∘ D / p] = D: over 300 seeds the mean is near D, and each entry is kept with its own chance."""
    W0, D, count = BASE["w"][:40, :50], TAU[0][:40, :50], 300
    draws = torch.stack([
        epimer.merge_state_dicts({"w": W0}, [{"w": W0 + D}], method, density=0.4, seed=seed)["w"] - W0
        for seed in range(count)
    ])  # fmt: skip
    ranks = D.abs().argsort(dim=1).argsort(dim=1).double() / 49
    chance = torch.full(D.shape, 0.4, dtype=torch.float64) if method == "dare" else 0.4 - 0.15 + 0.3 * ranks
    kept = (draws.abs() > 1e-12).double()
    near(draws, kept * D / chance)
    spread = (chance * (1 - chance) / count).sqrt()
    assert float(((kept.mean(0) - chance) / spread).abs().max()) < 6
    assert float(((kept.mean(0) - chance) / spread).square().mean()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("method", "linear"), [("dare_ties", "dare"), ("della", "della_linear")])
def test_dare_ties_and_della_elect_signs_of_what_was_kept(method, linear, normalize):
    """What every model kept follows from sums under three sets of weights, as masks do not depend on weights."""
    first, second, third = (change(linear, seed=5, weights=w) for w in ([1, 1, 1], [1, 2, 1], [1, 1, 2]))
    kept = torch.stack([3 * first - second - third, second - first, third - first])
    kept[kept.abs() < 1e-12] = 0
    assert 0.4 < float((kept != 0).double().mean()) < 0.6
    found = change(method, seed=5, weights=WEIGHTS, normalize=normalize)
    near(found, elected(kept, WEIGHTS, normalize=normalize))


@pytest.mark.parametrize("method", ["dare", "della_linear"])
def test_mergekit_keeps_the_sum_of_magnitudes(method):
    alone = epimer.merge_state_dicts(BASE, MODELS[:1], method, density=0.4, compat="mergekit")["w"] - BASE["w"]
    assert float(alone.abs().sum()) == pytest.approx(float(TAU[0].abs().sum()), rel=1e-9)
    off = epimer.merge_state_dicts(BASE, MODELS[:1], method, density=0.4, rescale=False)["w"] - BASE["w"]
    kept = off != 0
    near(off, TAU[0] * kept)


def test_chances_beyond_0_and_1_are_refused():
    with pytest.raises(
        ParameterError, match=r"^della: .* must be less than density and at most 1 - density.* Got 0.3 with"
    ):
        change("della", density=[0.5, 0.8, 0.5], epsilon=0.3)
    assert change("della", density=1.0, epsilon=0.3).isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 7, 11, 12])
def test_the_smallest_are_counted_exactly_and_of_equal_ones_the_first_are_taken(count):
    from epimer.methods.pruning import smallest

    x = torch.tensor([[3.0, 1, 2, 1], [2, 2, 1, 3], [2, 0, 2, 2]])
    expected = torch.zeros(12, dtype=torch.bool)
    expected[x.flatten().sort(stable=True).indices[:count]] = True
    assert torch.equal(smallest(x, count).flatten(), expected)
