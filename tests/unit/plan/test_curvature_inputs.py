"""Curvature that is given in Python must be in the order of the models it was measured on."""

import pytest
import torch
from torch import nn

import epimer


@pytest.fixture
def measured():
    """A base, two models of it, and the diagonal curvature of each."""
    torch.manual_seed(0)
    networks = [nn.Linear(4, 3) for _ in range(3)]
    batches = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    curvature = [
        epimer.estimate_curvature(
            network, batches, nn.CrossEntropyLoss(reduction="sum"), kind="diagonal", progress=False
        )
        for network in networks[1:]
    ]
    return [network.state_dict() for network in networks], curvature


def test_a_swapped_list_is_refused(measured):
    (base, *models), curvature = measured
    with pytest.raises(epimer.CurvatureError, match=r"curvature\[0\] was measured on models\[1\], not on models\[0\]"):
        epimer.merge_state_dicts(base, models, "fisher", curvature=curvature[::-1])
    with pytest.raises(epimer.CurvatureError, match=r"curvature\[0\] was measured on models\[1\]"):
        epimer.diagnose_state_dicts(base, models, curvature=curvature[::-1])


def test_each_model_with_its_own_is_merged_by_the_weighted_mean(measured):
    (base, *models), curvature = measured
    merged = epimer.merge_state_dicts(base, models, "fisher", curvature=curvature)
    plain = [dict(one) for one in curvature]  # which tell nothing of where they were measured
    swapped = epimer.merge_state_dicts(base, models, "fisher", curvature=plain[::-1])
    assert not torch.equal(merged["weight"], swapped["weight"])
    again = epimer.merge_state_dicts(base, models, "fisher", curvature=plain)
    assert torch.equal(merged["weight"], again["weight"])


def test_curvature_that_was_measured_elsewhere_is_taken(measured):
    (base, *models), curvature = measured
    moved = [{name: W + 1 for name, W in model.items()} for model in models]
    epimer.merge_state_dicts(base, moved, "fisher", curvature=curvature)
