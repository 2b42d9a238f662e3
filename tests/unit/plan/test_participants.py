"""Some rows of models that stand for all of them: how many, from where, and of which models."""

import math

import pytest
import torch

from epimer.plan.participants import SAMPLED, sample_rows, state_dict_participants

SHAPES = {"table": (30_000, 20), "wide": (2, 60_000), "vector": (50_000,), "scalar": (), "row": (1, 7)}


@pytest.fixture
def models():
    torch.manual_seed(0)
    return [{name: torch.rand(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(3)]


def parts_of(state):
    return [(name, None, W) for name, W in state.items()]


def test_every_tensor_is_sampled_at_the_same_share(models, monkeypatch):
    monkeypatch.setattr("epimer.plan.participants.SAMPLED", 20_000)
    found = list(sample_rows(state_dict_participants(models[0], models[1:]), parts_of(models[0])))
    assert all(len(others) == 2 and all(len(W) == len(base) for W in others) for base, others in found)
    total = sum(math.prod(shape) for shape in SHAPES.values())
    sampled = torch.cat([base for base, _ in found])
    assert len(sampled) == pytest.approx(20_000, rel=0.02)
    for name in ("table", "wide", "vector"):
        share = torch.isin(sampled, models[0][name]).sum() / models[0][name].numel()
        assert float(share) == pytest.approx(20_000 / total, rel=0.05), name


@pytest.mark.parametrize("wanted", [1000, 20_480, 29_000, 40_000, 60_000])
def test_a_tensor_of_more_rows_than_places_has_its_whole_share(monkeypatch, wanted):
    """Whether the rows of a place are one, one and a half, or two."""
    monkeypatch.setattr("epimer.plan.participants.SAMPLED", wanted)
    state = {"table": torch.arange(600_000.0).view(30_000, 20)}
    sampled = torch.cat([base for base, _ in sample_rows(state_dict_participants(state, [state]), parts_of(state))])
    assert len(sampled.unique()) == len(sampled) == pytest.approx(wanted, rel=0.05)


def test_tensors_of_no_entries_and_of_fewer_than_places(monkeypatch):
    monkeypatch.setattr("epimer.plan.participants.SAMPLED", 2000)
    shapes = {"none": (0, 5), "empty": (5, 0), "scalar": (), "vector": (3,), "table": (3000, 20)}
    state = {name: torch.rand(shape) for name, shape in shapes.items()}
    found = list(sample_rows(state_dict_participants(state, [state]), parts_of(state)))
    assert all(torch.equal(base, model) for base, (model,) in found)
    sampled = torch.cat([base for base, _ in found])
    counts = {name: int(torch.isin(W, sampled).sum()) for name, W in state.items() if name != "table"}
    assert counts == {"none": 0, "empty": 0, "scalar": 1, "vector": 1}
    assert len(sampled) == pytest.approx(2000, rel=0.05)


def test_each_entry_comes_from_its_own_place(models):
    small = [{name: W[:40, :30] for name, W in model.items() if W.dim() == 2} for model in models]
    assert sum(W.numel() for W in small[0].values()) < SAMPLED
    for base, others in sample_rows(state_dict_participants(small[0], small[1:]), parts_of(small[0])):
        name = next(name for name, W in small[0].items() if torch.isin(base, W).all())
        place = torch.isin(small[0][name].flatten(), base)
        assert all(torch.equal(W[name].flatten()[place], other) for W, other in zip(small[1:], others, strict=True))


def test_without_a_base_and_within_some_rows(models):
    part = [("table", (10_000, 10_500), models[0]["table"][10_000:10_500])]
    found = list(sample_rows(state_dict_participants(None, models), part))
    assert all(base is None and len(others) == 3 for base, others in found)
    sampled = torch.cat([others[2] for _, others in found])
    assert len(sampled) == pytest.approx(10_000, rel=0.01)
    assert torch.isin(sampled, models[2]["table"][10_000:10_500]).all()
