"""The plane of the models' first two principal components, against numpy's SVD and losses known by formula."""

import numpy as np
import pytest
import torch

from epimer.diagnosis.landscape import landscape
from epimer.errors import ParameterError


@pytest.fixture
def models():
    generator = torch.Generator().manual_seed(0)

    def state():
        return {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}

    return {"n": torch.arange(3), **state()}, {name: {"n": torch.arange(3), **state()} for name in "pqrs"}


def flat(state):
    return np.concatenate([state[name].double().numpy().ravel() for name in ("w", "b")])


def test_the_plane_is_that_of_the_svd_and_the_losses_are_those_of_its_points(models):
    base, tuned = models
    seen = []

    def losses(state):
        seen.append(state)
        return [float(((flat(state) - flat(model)) ** 2).sum()) for model in tuned.values()]

    merged = {"mean": {name: sum(m[name] for m in tuned.values()) / 4 for name in ("w", "b")} | {"n": base["n"]}}
    found = landscape(base, tuned, losses, merged=merged, grid=5)
    X = np.stack([flat(model) for model in tuned.values()])
    mean = X.mean(0)
    _, sigma, axes = np.linalg.svd(X - mean, full_matrices=False)
    assert found.explained == pytest.approx((sigma[:2] ** 2).sum() / (sigma**2).sum(), rel=1e-5)
    places = {point.name: point for point in found.points}
    for name, model in tuned.items():
        expected = axes[:2] @ (flat(model) - mean)
        assert [abs(places[name].a), abs(places[name].b)] == pytest.approx(np.abs(expected), rel=1e-4, abs=1e-5)
        off = np.linalg.norm(flat(model) - mean - axes[:2].T @ expected) / np.linalg.norm(flat(model) - mean)
        assert places[name].off == pytest.approx(off, rel=1e-4)
    assert places["mean"].a == pytest.approx(0, abs=1e-5)
    assert [point.kind for point in found.points] == ["base"] + ["task"] * 4 + ["merged"]
    direction = [np.sign(places["p"].a * (axes[0] @ (X[0] - mean))), np.sign(places["p"].b * (axes[1] @ (X[0] - mean)))]
    for j, b in enumerate(found.b):
        for i, a in enumerate(found.a):
            point = mean + a * direction[0] * axes[0] + b * direction[1] * axes[1]
            for t, model in enumerate(tuned.values()):
                assert found.losses[t][j][i] == pytest.approx(((point - flat(model)) ** 2).sum(), rel=1e-4)
    assert found.record().joint[0][0] == pytest.approx(sum(task[0][0] for task in found.losses))
    assert min(found.a) < min(p.a for p in found.points) < max(p.a for p in found.points) < max(found.a)
    assert all(torch.equal(state["n"], base["n"]) for state in seen)


def test_two_models_span_no_plane(models):
    base, tuned = models
    with pytest.raises(ParameterError, match="needs three fine-tuned models"):
        landscape(base, dict(list(tuned.items())[:2]), lambda state: [0.0, 0.0])
