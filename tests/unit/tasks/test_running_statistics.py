"""Running statistics are those of the model's own activations, and nothing else changes."""

import pytest
import torch
from torch import nn

import epimer


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[1].running_var.fill_(7.0)
        model[5].running_mean.fill_(-3.0)
    return model


def test_they_are_the_mean_and_variance_of_each_layers_inputs():
    model = build()
    model[3].train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: W.clone() for name, W in model.named_parameters()}
    x = torch.randn(3, 40, 5, dtype=torch.float64) * 2 + 1
    assert epimer.reestimate_statistics(model, [(part, None) for part in x]) == 2
    first = [model[0](part) for part in x]
    mean, var = (torch.stack([f(part) for part in first]).mean(0) for f in (lambda h: h.mean(0), lambda h: h.var(0)))
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, var)
    hidden = [
        (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt() * model[1].weight + model[1].bias for h in first
    ]
    second = torch.stack([model[4](h.relu()) for h in hidden])  # dropout is off
    torch.testing.assert_close(model[5].running_mean, second.mean((0, 1)))
    torch.testing.assert_close(model[5].running_var, torch.stack([h.var(0) for h in second]).mean(0))
    assert [module.training for module in model.modules()] == modes
    assert {model[1].momentum, model[5].momentum} == {0.1}
    assert all(torch.equal(W, weights[name]) for name, W in model.named_parameters())


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(epimer.TensorError, match="no BatchNorm layer"):
        epimer.reestimate_statistics(nn.Linear(2, 2), [])
    model = build()
    with pytest.raises(epimer.CurvatureError, match="give at least one sample"):
        epimer.reestimate_statistics(model, [])
    assert model[1].running_var.tolist() == [7.0] * 4
    assert model[5].running_mean.tolist() == [-3.0] * 3
