"""The law of copies holds near copies too, and merges change continuously from copies to models that differ."""

from itertools import pairwise

import pytest
import torch

import epimer
from dense import close
from epimer.geometry.aggregator import Anchored, calibrated, calibrated_coordinates, stretched_mean, tsv_delta
from epimer.geometry.frechet import build_problem
from epimer.geometry.linalg import polar
from epimer.geometry.metric import Kronecker
from epimer.geometry.subspace import tagged, tensor_product
from epimer.geometry.svd import top_svd

M, N, K, T = 48, 40, 6, 4
EQUAL = [1 / T] * T


def decaying(seed):
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(d, N, generator=generator, dtype=torch.float64)).Q for d in (M, N))
    return (U * torch.arange(1, N + 1, dtype=torch.float64) ** -0.7) @ V.T


def copies(noise, seed=0):
    """Return four models that are one task vector, each with its own noise of this share of its norm."""
    D, errors = decaying(seed), [decaying(seed + 1 + t) for t in range(T)]
    return D, [D + noise * float(D.norm() / E.norm()) * E for E in errors]


def top(D):
    U, sigma, Vh = torch.linalg.svd(D)
    return (U[:, :K] * sigma[:K]) @ Vh[:K]


def apart(x, D):
    return float((x - top(D)).norm() / top(D).norm())


def kronecker(seed):
    generator = torch.Generator().manual_seed(seed)
    g, a = (torch.randn(200, d, generator=generator, dtype=torch.float64) for d in (M, N))
    return Kronecker(G=g.T @ g / 200, A=a.T @ a / 200)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 0.01, 0.03])
def test_near_copies_merge_to_the_model_they_are_copies_of(noise):
    D, models = copies(noise)
    atoms = tagged(models, K)
    problem = build_problem(tensor_product(atoms), [kronecker(t) for t in range(T)], models, EQUAL)
    truncated = {
        "tsv": tsv_delta(atoms, EQUAL),
        "anchor": Anchored(tsv_delta(atoms, EQUAL), 1.0).aggregate(problem).value,
    }
    for name, merged in truncated.items():
        assert apart(merged, D) <= 2 * noise + 1e-9, name
    whole = Anchored(stretched_mean(models, EQUAL), 1.0).aggregate(problem).value
    assert float((whole - D).norm() / D.norm()) <= 2 * noise + 1e-9


@pytest.mark.parametrize("method", ["tsv", "epimer_kron", "epimer_free", "iso_cts"])
def test_methods_near_copies(method):
    D, models = copies(0.01)
    base = {"w": torch.zeros(M, N, dtype=torch.float64)}
    row = epimer.describe_method(method)
    given = {"rank": K} if "rank" in row.defaults else {}
    if row.needs_curvature:
        given["curvature"] = [{"w": kronecker(t)} for t in range(T)]
    merged = epimer.merge_state_dicts(base, [{"w": W} for W in models], method, **given)["w"]
    if method == "epimer_kron":  # what its basis does not keep stays at the anchor
        assert float((merged - D).norm() / D.norm()) < 0.03
    elif "copies" in row.laws:
        assert apart(merged, D) < 0.03
    else:
        assert method == "iso_cts"


def test_from_copies_to_strangers_without_a_jump():
    """Steps of noise four times as small make steps of the merge at most half as large: it is continuous."""

    def largest_step(count):
        levels = torch.logspace(-2, 0.3, count).tolist()
        merges = [tsv_delta(tagged(copies(noise)[1], K), EQUAL) for noise in levels]
        return max(float((b - a).norm() / b.norm()) for a, b in pairwise(merges))

    assert largest_step(160) < 0.5 * largest_step(40) < 0.25


def test_models_that_differ_are_whitened_as_tsv_s_authors_do():
    _, models = copies(3.0)
    stack = torch.cat([torch.linalg.svd(D).U[:, :K] for D in models], 1)
    U, _, Vh = torch.linalg.svd(stack, full_matrices=False)
    assert close(tagged(models, K).U @ tagged(models, K).U.T, (U @ Vh) @ (U @ Vh).T, 1e-9)


def test_a_regularised_polar_factor():
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(d, 5, dtype=torch.float64)).Q for d in (9, 5))
    sigma = torch.tensor([2.0, 0.9, 0.4, 0.1, 1e-9], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 0.8, 0.2, 0.0], dtype=torch.float64)
    assert close(polar((U * sigma) @ V.T, 0.5).factor, (U * expected) @ V.T, 1e-7)
    assert torch.equal(
        polar((U * sigma[:4].repeat(2)[:5]) @ V.T).factor, polar((U * sigma[:4].repeat(2)[:5]) @ V.T, 0).factor
    )


def test_the_stretched_average():
    D = decaying(0)
    assert close(stretched_mean([D, D, D], [0.2, 0.3, 0.5]), D, 1e-12)
    left, right = torch.zeros_like(D), torch.zeros_like(D)
    left[:20], right[20:] = decaying(1)[:20], decaying(2)[20:]
    right *= left.norm() / right.norm()
    assert close(stretched_mean([left, right], [0.5, 0.5]), left + right, 1e-12)
    assert close(
        stretched_mean([D, -D + 1e-3 * left], [0.5, 0.5]), 2 * 0.5 * 1e-3 * left, 1e-9
    )  # never more than the sum
    models, weights = copies(0.7)[1][:3], [0.5, 0.2, 0.3]
    x = stretched_mean(models, weights)
    kept = sum(w * float((x * D).sum()) for w, D in zip(weights, models, strict=True))
    assert kept == pytest.approx(sum(w * float(D.square().sum()) for w, D in zip(weights, models, strict=True)))


@pytest.mark.parametrize("least", [0.5, 1.0])
def test_singular_value_calibration(least):
    models = [decaying(t) for t in range(3)]
    merged = sum(models)
    U, sigma, Vh = torch.linalg.svd(merged, full_matrices=False)
    expected = torch.zeros_like(merged)
    for r in range(N):
        u, row = U[:, r], sigma[r] * Vh[r]
        energies = [max(float((u @ D).square().sum()), 0.01 * float(sigma[r] ** 2)) for D in models]
        counted = sum(max(least, float(row @ (u @ D)) / e) for D, e in zip(models, energies, strict=True))
        expected += 3 / counted * torch.outer(u, row)
    assert close(calibrated(top_svd(merged, min(merged.shape)), models, least), expected, 1e-9)


def test_calibration_keeps_copies_and_strangers_as_they_are():
    D = decaying(5)
    assert close(calibrated(top_svd(3 * D, min(D.shape)), [D, D, D], 1.0), D, 1e-9)
    left, right = torch.zeros_like(D), torch.zeros_like(D)
    left[:20, :20], right[20:, 20:] = decaying(1)[:20, :20], decaying(2)[20:, 20:]
    right += 1e-9 * decaying(3)  # next to nothing of a direction that is the other's
    assert close(calibrated(top_svd(left + right, min(left.shape)), [left, right], 1.0), left + right, 1e-6)


@pytest.mark.parametrize("least", [0.5, 1.0])
def test_calibration_in_coordinates_is_that_of_the_merge_they_stand_for(least):
    models = [decaying(t) for t in range(3)]
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(d, 9, generator=generator, dtype=torch.float64)).Q for d in models[0].shape)
    points = [U.T @ D @ V for D in models]
    grams = [U.T @ D @ D.T @ U for D in models]
    x = sum(points)
    merged = U @ x @ V.T
    expected = calibrated(top_svd(merged, 9), models, least)
    assert close(U @ calibrated_coordinates(x, points, grams, least) @ V.T, expected, 1e-9)
