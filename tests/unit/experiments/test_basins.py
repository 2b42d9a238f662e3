"""The toy of two basins: its merges against dense solves, its losses against their definitions."""

import json

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from epimer.experiments import basins, run
from epimer.report.page import build
from epimer.report.read import gather


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both, as `epimer bench --experiment basins --experiment basins-logistic` makes them, where no suite is opened."""
    place = tmp_path_factory.mktemp("basins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_suite", None)
        results = [result for result, _ in run.run_experiments("glyphs8", list(basins.WITHOUT_SUITE), place)]
    return {result.name: result for result in results}, place


def places(result):
    return {row["point"]: torch.tensor([row["a"], row["b"]], dtype=torch.float64) for row in result.data}


def losses_of(name):
    if name == "basins":
        valleys = [(35.0, (2.0, 0.4)), (115.0, (0.2, 1.9))]
        parts = [(basins._rotated(degrees), torch.tensor(at).double()) for degrees, at in valleys]
        return [lambda w, H=H, x=x: (w - x) @ H @ (w - x) / 2 for H, x in parts]
    data = [basins._samples(0, 20.0), basins._samples(1, 100.0)]
    return [lambda w, x=x, y=y: -torch.sigmoid(y * (x @ w)).log().mean() for x, y in data]


@pytest.mark.parametrize("name", basins.WITHOUT_SUITE)
def test_points_are_the_dense_solutions(made, name):
    result, losses = made[0][name], losses_of(name)
    at = places(result)
    optima = [at["one"], at["two"]]
    for loss, w in zip(losses, optima, strict=True):
        assert jacobian(loss, w).norm() < 1e-9
    H = [hessian(loss, w) for loss, w in zip(losses, optima, strict=True)]
    pulls = sum(h @ w for h, w in zip(H, optima, strict=True))
    assert torch.allclose(at["Fréchet mean, Hessian"], torch.linalg.solve(H[0] + H[1], pulls), atol=1e-6)
    diagonal = sum(h.diagonal() * w for h, w in zip(H, optima, strict=True)) / (H[0] + H[1]).diagonal()
    assert torch.allclose(at["Fréchet mean, diagonal"], diagonal, atol=1e-9)
    assert torch.allclose(at["average"], (optima[0] + optima[1]) / 2)
    assert torch.allclose(at["task arithmetic, sum"], optima[0] + optima[1])
    for row in result.data:
        w = at[row["point"]]
        assert list(row["losses"].values()) == pytest.approx([float(loss(w)) for loss in losses])
        assert row["joint"] == pytest.approx(sum(row["losses"].values()))


@pytest.mark.parametrize("name", basins.WITHOUT_SUITE)
def test_the_better_the_curvature_the_lower_the_loss(made, name):
    joint = {row["point"]: row["joint"] for row in made[0][name].data}
    curved, diagonal = joint["Fréchet mean, Hessian"], joint["Fréchet mean, diagonal"]
    assert curved < diagonal < joint["average"] < joint["task arithmetic, sum"]
    losses = losses_of(name)
    least = basins.minimum(lambda w: losses[0](w) + losses[1](w))
    lowest = float(losses[0](least) + losses[1](least))
    assert min(value for row in made[0][name].figure.joint for value in row) >= lowest - 1e-12
    if name == "basins":
        assert curved == pytest.approx(lowest, rel=1e-9)  # a quadratic's Fréchet mean is its joint minimum
    else:
        assert lowest < curved < lowest + 0.02


def test_files_and_page(made):
    results, place = made
    for name in results:
        record = json.loads((place / f"{name}.json").read_text())
        assert (place / f"{name}.svg").read_text().startswith("<?xml")
        page = build(gather([record]))
        assert results[name].title in page
        assert "principal components" not in page
