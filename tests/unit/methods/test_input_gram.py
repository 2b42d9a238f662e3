"""wudi and regmean restrict the inputs' Gram matrix to a basis without forming it: against A in dense float64."""

import pytest
import torch

from epimer.geometry.checks import WIDE
from epimer.geometry.linalg import HALVED
from epimer.geometry.metric import Kronecker
from epimer.geometry.subspace import Tagged
from epimer.methods import full_space
from epimer.methods.registry import Layer, describe_method

OUTPUTS, DIRECTIONS, OFF_DIAGONAL = 40, 12, 0.7
SIZES = [30, HALVED - 1, HALVED, WIDE + 1, 1100]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric_and_gram(monkeypatch, method, size, inputs, dtype):
    """Return the metric that a method makes of one task, and the A that its equation has."""
    D = drawn(OUTPUTS, size).to(dtype)
    stored = D if inputs else D.T
    if method == "wudi":
        metrics, A = [], D.double().T @ D.double() / D.double().square().sum()
    else:
        X = drawn(size // 2, size, seed=1) * torch.arange(1, size + 1) ** -0.5
        gram = (X.T @ X).to(dtype)
        metrics = [Kronecker(A=gram) if inputs else Kronecker(G=gram, inputs=0)]
        A = OFF_DIAGONAL * gram.double() + (1 - OFF_DIAGONAL) * gram.double().diagonal().diag()
    layers = []
    monkeypatch.setattr(full_space, "frechet", lambda layer, options: layers.append(layer) or full_space.Solution(D))
    given = {"off_diagonal": OFF_DIAGONAL} if method == "regmean" else {}
    row = describe_method(method)
    row.merge(Layer("w", [stored], [1.0], metrics, inputs=inputs), row.resolve(given))
    return layers[0].metrics[0], A


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inputs", [1, 0])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("method", ["wudi", "regmean"])
def test_restrictions_are_those_of_the_dense_matrix(monkeypatch, method, size, inputs, dtype, allowed):
    metric, A = metric_and_gram(monkeypatch, method, size, inputs, dtype)
    of_inputs = torch.linalg.qr(drawn(size, DIRECTIONS, seed=2)).Q.to(dtype)
    of_outputs = torch.linalg.qr(drawn(OUTPUTS, DIRECTIONS, seed=3)).Q.to(dtype)
    restricted = of_inputs.double().T @ A @ of_inputs.double()
    U, V = (of_outputs, of_inputs) if inputs else (of_inputs, of_outputs)

    x = drawn(DIRECTIONS, DIRECTIONS, seed=4)
    image = metric.on_tensor_product(U, V).apply(x)
    expected = x @ restricted if inputs else restricted @ x
    assert float((image - expected).norm()) < allowed * float(expected.norm())
    factor = metric.on_tensor_product(U, V).apply(torch.eye(DIRECTIONS, dtype=torch.float64))
    assert float((factor - factor.T).norm()) < 1e-15 * float(factor.norm())

    owner = torch.zeros(DIRECTIONS, dtype=torch.int64)
    U, V = (W + 0.5 * W.roll(1, dims=1) for W in (U, V))  # so that neither Gram matrix is diagonal
    atoms = Tagged(U, V, torch.ones(DIRECTIONS, dtype=dtype), owner)
    wide = torch.einsum("ai,bi->iab", U.double(), V.double())
    images = wide @ A if inputs else A @ wide
    dense = torch.einsum("iab,jab->ij", wide, images)
    found = torch.stack([metric.on_tagged(atoms, 0.0).apply(e) for e in torch.eye(DIRECTIONS, dtype=torch.float64)])
    assert float((found - dense).norm()) < allowed * float(dense.norm())

    D = drawn(OUTPUTS, size, seed=5).to(dtype)
    D = D if inputs else D.T
    expected = D.double() @ A if inputs else A @ D.double()
    assert float((metric.apply(D) - expected).norm()) < allowed * float(expected.norm())
