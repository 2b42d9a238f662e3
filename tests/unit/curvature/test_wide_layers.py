"""Layers too wide for Kronecker factors: said before any data is read, and measured in a basis."""

import warnings

import pytest
import torch
from torch import nn

import epimer
from cases import cross_entropy
from epimer.curvature import collectors
from epimer.errors import CurvatureError
from epimer.geometry.aggregator import stretched_mean
from oracle import near


class Wide(nn.Module):
    """Two layers share a wide dimension; the table and the head are wider, but a merge averages them."""

    def __init__(self, wide, width=6, words=50):
        super().__init__()
        self.embed_tokens, self.up, self.down = nn.Embedding(words, width), nn.Linear(width, wide), nn.Linear(wide, 5)
        self.mid, self.lm_head = nn.Linear(5, 5), nn.Linear(5, words)

    def forward(self, ids):
        return self.lm_head(self.mid(self.down(self.up(self.embed_tokens(ids)).tanh())).mean(1))


def measure(model, batches, **options):
    return epimer.estimate_curvature(model, batches, cross_entropy, samples=None, progress=False, **options)


def family(wide, dtype=torch.float64):
    """Return a base model, two models a little away from it, and data for each."""
    torch.manual_seed(0)
    base = Wide(wide).to(dtype)
    models = [Wide(wide).to(dtype) for _ in range(2)]
    with torch.no_grad():
        for model in models:
            for name, p in model.named_parameters():
                p.copy_(base.get_parameter(name) + 0.05 * torch.randn_like(p))
    data = [[(torch.randint(50, (6, 3)), torch.randint(50, (6,)))] for _ in models]
    return base.state_dict(), models, data


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(collectors, "WIDEST", 16)


@pytest.mark.parametrize("kind", ["kronecker", "ekfac"])
def test_wide_layers_are_named_before_any_data_is_read(narrow, kind):
    _, (model, _), (data, _) = family(20, torch.float32)
    said = []

    def batches():
        said.extend(str(warning.message) for warning in caught)
        yield from data

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curvature = measure(model, batches(), kind=kind)
    (message,) = said
    assert "'up.weight', 'down.weight' will have no Kronecker factors" in message
    assert "lm_head" not in message
    assert "embed_tokens" not in message
    taken = 4 * (20**2 + 6**2 + 5**2 + 20**2)
    assert f"would take {taken / 1e3:.1f} kB" in message
    assert "at most 16 wide" in message
    assert "--basis" in message
    assert {"up.weight", "down.weight", "lm_head.weight"} <= set(curvature.provenance.left_out)


def test_a_merge_without_their_factors_says_why(narrow):
    base, models, data = family(20)
    curvature = [measure(model, batches) for model, batches in zip(models, data, strict=True)]
    states = [model.state_dict() for model in models]
    with pytest.raises(CurvatureError, match=r"'up\.weight', which epimer_kron needs.*factor of side 20.*--basis"):
        epimer.merge_state_dicts(base, states, "epimer_kron", curvature=curvature)


def test_in_a_basis_wide_layers_are_merged_as_with_whole_factors(monkeypatch):
    base, models, data = family(20)
    states = [model.state_dict() for model in models]
    basis = epimer.build_basis(base, states, rank=2, basis="tensor")
    whole = [measure(model, batches) for model, batches in zip(models, data, strict=True)]
    monkeypatch.setattr(collectors, "WIDEST", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projected = [measure(model, batches, basis=basis) for model, batches in zip(models, data, strict=True)]
    merged = [
        epimer.merge_state_dicts(base, states, "epimer_kron", curvature=curvature, basis=basis)
        for curvature in (whole, projected)
    ]
    for name in ("up.weight", "down.weight"):
        assert float((merged[1][name] - base[name]).norm()) > 0
        assert near(merged[0][name], merged[1][name], 1e-8), name


def test_a_layer_of_twenty_thousand_is_measured_and_merged_in_a_basis():
    wide = 20_000
    assert wide > collectors.WIDEST
    base, models, data = family(wide, torch.float32)
    states = [model.state_dict() for model in models]
    basis = epimer.build_basis(base, states, rank=2, basis="tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curvature = [measure(model, batches, basis=basis) for model, batches in zip(models, data, strict=True)]
    x = torch.zeros(0, wide)
    for ids, _ in data[0]:
        x = torch.cat([x, models[0].up(models[0].embed_tokens(ids)).tanh().flatten(0, 1).detach()])
    V = basis["down.weight"].V
    assert near(curvature[0]["down.weight"].A, (x @ V).T @ (x @ V) / len(x), 1e-5)
    merged = epimer.merge_state_dicts(base, states, "epimer_kron", curvature=curvature, basis=basis)
    step = merged["down.weight"] - base["down.weight"]
    assert merged["down.weight"].shape == (5, wide)
    deltas = [state["down.weight"] - base["down.weight"] for state in states]
    solved = step - stretched_mean(deltas, [1 / len(deltas)] * len(deltas))
    assert float(solved.norm()) > 0
    assert near(basis["down.weight"].U @ (basis["down.weight"].U.T @ solved @ V) @ V.T, solved, 1e-4)
