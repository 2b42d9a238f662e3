"""Curvature against brute force, in float64: every kind, on every sort of layer that torch itself has."""

import itertools

import pytest
import torch
from torch import nn

import epimer
from cases import CASES, build, cross_entropy, draw, labels, matrices, measure
from dense import matrix_of
from epimer.errors import CurvatureError
from oracle import factors, fisher, gradients, layer_uses, near


@pytest.fixture(params=CASES)
def case(request):
    return build(request.param)


# --- every kind on every model ---------------------------------------------------------------------------------------


def test_the_diagonal_is_the_mean_squared_gradient(case):
    found, s = measure(case, "diagonal"), gradients(case.model, case.batches, case.loss)
    assert set(found) == set(s) - set(case.left_out)
    assert set(found.provenance.left_out) == set(case.left_out)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0)), name
        assert not found[name].F.requires_grad


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
def test_kronecker_factors_are_second_moments_of_inputs_and_gradients(case, sequence):
    found = measure(case, "kronecker", sequence=sequence)
    uses, _ = layer_uses(case.model, case.batches, case.loss)
    masks = None if case.real is None else [row for inputs, _ in case.batches for row in case.real(inputs)]
    assert set(found) == set(matrices(case))
    assert set(found.provenance.left_out) >= set(case.no_factors)
    for name in found:
        G, A = factors(uses[name], sequence, masks)
        assert near(found[name].G, G), name
        assert near(found[name].A, A), name
        assert found[name].inputs == 1
        tokens = sum(len(use.x) for sample in uses[name] for use in sample)
        if masks is not None:
            tokens = sum(
                int(mask.sum()) if len(use.x) == len(mask) else len(use.x)
                for sample, mask in zip(uses[name], masks, strict=True)
                for use in sample
            )
        assert found.provenance.counts[name] == tokens


def test_samples_are_the_whole_fisher(case):
    found, s = measure(case, "samples"), gradients(case.model, case.batches, case.loss)
    assert set(found) == set(matrices(case))
    for name in found:
        H = matrix_of(found[name], len(s[name][0]), s[name][0][0].numel())
        assert near(H, fisher(s[name])), name


def test_ekfac_has_the_exact_moments_along_the_factors_eigenvectors(case):
    found, s = measure(case, "ekfac"), gradients(case.model, case.batches, case.loss)
    kronecker = measure(case, "kronecker")
    assert set(found) == set(matrices(case))
    for name in found:
        metric, s_nmn = found[name], s[name].flatten(2)
        P, Q = metric.P, metric.Q
        for E, factor in ((P, kronecker[name].G), (Q, kronecker[name].A)):
            assert near(E.T @ E, torch.eye(len(E), dtype=torch.float64))
            turned = E.T @ factor @ E
            assert near(turned, torch.diag(turned.diagonal()))
        S = (P.T @ s_nmn @ Q).square().mean(0)
        assert near(metric.S, S), name
        D = draw(*s_nmn.shape[1:])
        dense = torch.kron(P, Q) @ torch.diag(S.flatten()) @ torch.kron(P, Q).T
        assert near(metric.apply(D).flatten(), dense @ D.flatten())
        assert S.sum() == pytest.approx(float(s_nmn.square().sum() / len(s_nmn)))  # a rotation keeps the trace
    with pytest.raises(CurvatureError, match="ekfac curvature cannot be added"):
        found + found


# --- in a basis ------------------------------------------------------------------------------------------------------


def bases(case, kind, *, copies, rank=1):
    """Return a basis of two models; with `copies` they are the same, so that it is rank-deficient."""
    generator = torch.Generator().manual_seed(1)
    base = {name: W.detach() for name, W in case.model.named_parameters()}
    steps = [
        {n: W + torch.randn(W.shape, generator=generator, dtype=W.dtype) for n, W in base.items()} for _ in range(2)
    ]
    rules = [(name, "matrix") for name in matrices(case)]
    models = [steps[0], steps[0] if copies else steps[1]]
    found = epimer.build_basis(base, models, rank=rank, basis=kind, rules=rules)
    return {name: one for name, one in found.items() if name in matrices(case)}


def directions(basis):
    """Return S, the orthonormal directions of tagged atoms as columns on row-major vec(D)."""
    S = torch.stack([torch.outer(u, v).flatten() for u, v in zip(basis.U.T, basis.V.T, strict=True)], dim=1)
    return S if basis.mix is None else S @ basis.mix


@pytest.fixture(params=["mlp", "convnet", "encoder", "encoder, sequence first", "shared"])
def projected_case(request):
    return build(request.param)


@pytest.mark.parametrize("kind", ["tagged", "tensor"])
@pytest.mark.parametrize("copies", [False, True])
def test_projected_factors_are_the_factors_projected(projected_case, kind, copies):
    basis = bases(projected_case, kind, copies=copies)
    found, full = measure(projected_case, "kronecker", basis=basis), measure(projected_case, "kronecker")
    assert found.keys() == basis.keys()
    assert len(found) > 1
    for name, one in basis.items():
        assert near(found[name].G, one.U.T @ full[name].G @ one.U)
        assert near(found[name].A, one.V.T @ full[name].A @ one.V)
        assert found[name].H is None


@pytest.mark.parametrize("copies", [False, True])
def test_projected_samples_and_diagonals_are_the_fisher_projected(projected_case, copies):
    basis = bases(projected_case, "tagged", copies=copies)
    s = gradients(projected_case.model, projected_case.batches, projected_case.loss)
    samples, diagonal = (measure(projected_case, kind, basis=basis) for kind in ("samples", "diagonal"))
    assert samples.keys() == diagonal.keys() == basis.keys()
    for name, one in basis.items():
        assert (one.mix is not None) == copies
        S = directions(one)
        assert near(S.T @ S, torch.eye(S.shape[1], dtype=torch.float64), 1e-8)
        assert near(samples[name].H, S.T @ fisher(s[name]) @ S)
        assert near(diagonal[name].H, S.T @ torch.diag(s[name].square().mean(0).flatten()) @ S)


@pytest.mark.parametrize(
    ("kind", "basis", "words"),
    [
        ("ekfac", "tagged", "cannot be projected"),
        ("samples", "tensor", "build a tagged basis"),
        ("diagonal", "tensor", "build a tagged basis"),
        ("ggn", None, "needs basis="),
    ],
)
def test_a_basis_that_does_not_fit_the_kind_is_refused(kind, basis, words):
    case = build("mlp")
    with pytest.raises(CurvatureError, match=words):
        measure(case, kind, basis=None if basis is None else bases(case, basis, copies=False))


def test_a_basis_of_other_models_is_refused():
    case = build("mlp")
    basis = bases(case, "tagged", copies=False)
    with pytest.raises(CurvatureError, match=r"'1\.kernel', which is not in the model"):
        measure(case, "kronecker", basis={"1.kernel": basis["0.weight"]})
    with pytest.raises(CurvatureError, match=r"of 5 x 4 matrices, but the model's has shape \(3, 5\)"):
        measure(case, "kronecker", basis={"5.weight": basis["0.weight"]})
    for chosen, layers in ((basis, ["*.bias"]), ({}, None)):
        with pytest.raises(CurvatureError):  # nothing is left to measure, and it says so
            measure(case, "kronecker", basis=chosen, layers=layers)


# --- cases where an approximation is exact ---------------------------------------------------------------------------


def half_squares(outputs, targets):
    return 0.5 * (outputs - targets).square().flatten(1).sum(1)


def gauss_newton(model, x, name):
    """Return JᵀJ of the outputs with respect to one weight, the mean over samples: that of half the squared error."""
    W = dict(model.named_parameters())[name].detach()

    def outputs(w):
        return torch.func.functional_call(model, {name: w}, (x,))

    J = torch.func.jacrev(outputs)(W).detach().reshape(-1, W.numel())
    return J.T @ J / len(x)


@pytest.mark.parametrize(
    ("widths", "shape"),
    [((4, 3), (7,)), ((4, 3, 5), (7,)), ((4, 3, 5), (7, 6))],  # with tokens, each has a loss of its own
)
def test_kfac_is_the_gauss_newton_matrix_of_a_linear_model_under_squared_error(widths, shape):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))).double()
    x = draw(*shape, 4)
    batches = [(x[:4], torch.zeros_like(model(x[:4]))), (x[4:], torch.zeros_like(model(x[4:])))]
    found = epimer.estimate_curvature(model, batches, half_squares, labels="expected")
    for name in found:
        assert near(torch.kron(found[name].G, found[name].A), gauss_newton(model, x, name))


def test_reduced_kfac_is_the_gauss_newton_matrix_of_a_linear_model_that_averages_its_tokens():
    torch.manual_seed(0)

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.two(self.one(x)).mean(1)

    model, x = Averaged().double(), draw(6, 5, 4)
    for sequence, exact in (("reduce", True), ("expand", False)):
        batches = [(x, torch.zeros(6, 2).double())]
        found = epimer.estimate_curvature(model, batches, half_squares, labels="expected", sequence=sequence)
        for name in found:
            assert near(torch.kron(found[name].G, found[name].A), gauss_newton(model, x, name)) == exact


@pytest.mark.parametrize("kind", ["kronecker", "samples", "ekfac"])
def test_one_sample_of_one_token_has_a_product_for_its_fisher(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double(), draw(1, 4)
    found = epimer.estimate_curvature(model, [(x, labels(1))], cross_entropy, kind=kind, labels="expected")
    p = model(x)[0].softmax(0).detach()
    for name in found:
        W = dict(model.named_parameters())[name].detach()
        J = torch.func.jacrev(lambda w, name=name: torch.func.functional_call(model, {name: w}, (x,))[0])(W)
        J = J.detach().reshape(4, -1)
        exact = J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
        D = draw(*W.shape)
        assert near(found[name].apply(D).flatten(), exact @ D.flatten())
