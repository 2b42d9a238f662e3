"""SCE, RAM, nearswap, Arcee Fusion and passthrough against their definitions, written out in float64."""

import pytest
import torch

import epimer

GENERATOR = torch.Generator().manual_seed(0)
SHAPE = (60, 50)
BASE = {"w": torch.randn(SHAPE, generator=GENERATOR, dtype=torch.float64)}
MODELS = [
    {"w": BASE["w"] + 0.1 * (1 + t) * torch.randn(SHAPE, generator=GENERATOR, dtype=torch.float64)} for t in range(3)
]
TAU = torch.stack([model["w"] - BASE["w"] for model in MODELS])


def change(method, models=MODELS, **given):
    return epimer.merge_state_dicts(BASE, models, method, **given)["w"] - BASE["w"]


def near(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_sce_selects_calculates_and_erases(share):
    variance = TAU.var(dim=0, unbiased=False)
    order = variance.flatten().argsort(descending=True)[: int(share * variance.numel())]
    mask = torch.zeros(variance.numel(), dtype=torch.float64)
    mask[order] = 1
    chosen = TAU * mask.reshape(SHAPE)
    energy = chosen.square().mean(dim=(1, 2)).reshape(-1, 1, 1)
    agree = chosen.sign() == chosen.sum(0).sign()
    expected = (energy * agree * chosen).sum(0) / (energy * agree).sum(0).clamp_min(1e-300)
    near(change("sce", select_topk=share), expected)


def test_sce_weighs_small_models_by_their_energy_which_mergekit_does_not():
    models = [{"w": BASE["w"] + 1e-3 * D} for D in TAU]
    near(1e3 * change("sce", models), change("sce"), 1e-6)
    agree = TAU.sign() == TAU.sum(0).sign()
    near(1e3 * change("sce", models, compat="mergekit"), (agree * TAU).sum(0) / agree.sum(0), 1e-6)


def test_ram_is_the_mean_of_the_models_that_moved_an_entry():
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).reshape(-1, 1, 1)
    moved = (TAU.abs() > 0.15).double()
    expected = (weights * moved * TAU).sum(0) / (weights * moved).sum(0).clamp_min(1e-300)
    near(change("ram", epsilon=0.15, weights=[5, 2, 3]), expected)


def test_ramplus_makes_stronger_what_a_model_alone_has_moved():
    moved = TAU.abs() > 0.15
    alone = moved.sum(0) == 1
    expected = (moved * TAU).sum(0) / moved.sum(0).clamp_min(1)
    for t in range(3):
        own, shared = int((moved[t] & alone).sum()), int((moved[t] & ~alone).sum())
        expected += 0.7 * min(shared / own, 0.9) * (moved[t] & alone).double() * TAU[t]
    near(change("ramplus_tl", epsilon=0.15, r=0.7, alpha=0.9), expected)


def test_nearswap_moves_each_entry_by_t_at_most():
    weight = (0.05 / TAU[0].abs()).clamp(0, 1)
    found = change("nearswap", MODELS[:1], t=0.05)
    near(BASE["w"] + found, weight * MODELS[0]["w"] + (1 - weight) * BASE["w"])
    assert float(found.abs().max()) <= 0.05 + 1e-12


def test_arcee_fusion_keeps_what_is_most_important():
    p, q = (torch.softmax(state["w"], dim=1) + 1e-8 for state in (MODELS[0], BASE))
    importance = TAU[0].abs() * (p * (p / q).log()).sum(1, keepdim=True)
    low, median, high = importance.flatten().sort().values[[int(s * 2999) for s in (0.25, 0.5, 0.75)]]
    mask = importance >= median + 1.5 * (high - low)
    assert 0.01 < float(mask.double().mean()) < 0.3
    near(change("arcee_fusion", MODELS[:1]), mask * TAU[0])


def test_passthrough_is_the_model_times_its_scale_whatever_the_base():
    for base in (BASE, None):
        assert torch.equal(epimer.merge_state_dicts(base, MODELS[:1], "passthrough")["w"], MODELS[0]["w"])
        half = epimer.merge_state_dicts(base, MODELS[:1], "passthrough", scale=0.5)["w"]
        assert torch.equal(half, 0.5 * MODELS[0]["w"])


@pytest.mark.parametrize("name", [n for n in epimer.list_methods() if epimer.describe_method(n).mergekit is not None])
def test_every_departure_from_mergekit_is_one(name):
    """Models that moved little, of different sizes: each form gives other numbers, and tells of it."""
    row = epimer.describe_method(name)
    models = [{"w": BASE["w"] + 2e-4 * D} for D in TAU][: row.models[1]]
    tensors = [state | {"v": state["w"][:2, :3] / 1000} for state in (BASE, *models)]
    ours, theirs = (epimer.merge_state_dicts(tensors[0], tensors[1:], name, compat=c) for c in (None, "mergekit"))
    assert not torch.equal(ours["w"], theirs["w"]) or not torch.equal(ours["v"], theirs["v"])
    assert row.mergekit.summary.startswith(f"{name} as mergekit 0.1.5 has it: ")


@pytest.mark.parametrize(
    ("dtype", "power"), [(torch.float32, power) for power in (-60, -100, 60, 100)] + [(torch.float64, -660)]
)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_unit_of_the_weights_does_not_matter_to_sce(dtype, power, share):
    """A power of two changes no digit: squares of entries neither vanish nor overflow."""
    models = [{"w": D.to(dtype)} for D in TAU]
    moved = [{"w": torch.ldexp(model["w"], torch.tensor(power))} for model in models]
    zero = {"w": torch.zeros(SHAPE, dtype=dtype)}
    expected, merged = (epimer.merge_state_dicts(zero, ms, "sce", select_topk=share)["w"] for ms in (models, moved))
    assert torch.equal(merged, torch.ldexp(expected, torch.tensor(power)))


@pytest.mark.parametrize("method", ["ram", "ramplus_tl"])
def test_what_no_model_moved_by_epsilon_is_told_and_with_epsilon_zero_kept(method):
    """Below epsilon an entry counts as not moved, whatever the unit of the weights: that is the method."""
    models = [{"w": 1e-9 * D.float()} for D in TAU]
    zero = {"w": torch.zeros(SHAPE)}
    with pytest.warns(epimer.EpimerWarning, match="the merge equals its base"):
        lost = epimer.merge_state_dicts(zero, models, method)
    assert lost.record.tensors["w"].unchanged
    kept = epimer.merge_state_dicts(zero, models, method, epsilon=0)["w"]
    torch.testing.assert_close(1e9 * kept, TAU.mean(0).float(), rtol=1e-6, atol=1e-6)
