"""The law of copies holds near copies too, and merges change continuously from copies to models that differ."""

from itertools import pairwise

import pytest
import torch

import epimer
from dense import close
from epimer.geometry.aggregator import Anchored, calibrated, calibrated_coordinates, stretched_mean, tsv_delta
from epimer.geometry.frechet import build_problem
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


@pytest.mark.parametrize("method", ["epimer_free", "epimer_kron"])
def test_no_direction_enters_at_once(method):
    """The largest steps of a coarse scan from copies to strangers vanish when they are bisected."""
    arguments = {"rank": K}
    if method == "epimer_kron":
        arguments["curvature"] = [{"w": kronecker(t)} for t in range(T)]

    def steps(levels):
        merges = [merged_by(method, copies(noise)[1], **arguments)["w"] for noise in levels]
        sizes = [float((b - a).norm() / b.norm()) for a, b in pairwise(merges)]
        return sorted(zip(sizes, pairwise(levels), strict=True), reverse=True)

    for size, interval in steps(torch.logspace(-2, 0.3, 41, dtype=torch.float64).tolist())[:4]:
        for _ in range(7):
            size, interval = steps(torch.linspace(*interval, 9, dtype=torch.float64).tolist())[0]
        assert size < 0.01, interval


def test_models_that_differ_are_whitened_as_tsv_s_authors_do():
    _, models = copies(3.0)
    stack = torch.cat([torch.linalg.svd(D).U[:, :K] for D in models], 1)
    U, _, Vh = torch.linalg.svd(stack, full_matrices=False)
    assert close(tagged(models, K).U @ tagged(models, K).U.T, (U @ Vh) @ (U @ Vh).T, 1e-9)


def published(models, weights):
    """Return TSV-M's merge as its authors have it, with dense decompositions."""
    rank = min(models[0].shape) // len(models)
    parts = [torch.linalg.svd(D, full_matrices=False) for D in models]
    stacks = torch.cat([U[:, :rank] for U, _, _ in parts], 1), torch.cat([Vh[:rank].T for _, _, Vh in parts], 1)
    left, right = (torch.linalg.multi_dot([P, Qh]) for P, _, Qh in map(thin, stacks))
    sigma = torch.cat([len(models) * w * S[:rank] for w, (_, S, _) in zip(weights, parts, strict=True)])
    return (left * sigma) @ right.T


def thin(X):
    return torch.linalg.svd(X, full_matrices=False)


def pair_alike(cosine, tasks=8, shape=(96, 80)):
    """Return task vectors of which the first two have this cosine and the others are independent."""
    generator = torch.Generator().manual_seed(3)
    models = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(tasks)]
    first, other = models[0] / models[0].norm(), models[1] / models[1].norm()
    other = other - (other * first).sum() * first
    models[0] = first * models[2].norm()
    models[1] = (cosine * first + (1 - cosine**2) ** 0.5 * other / other.norm()) * models[2].norm()
    return models


def merged_by(method, models, **arguments):
    base = {"w": torch.zeros_like(models[0])}
    return epimer.merge_state_dicts(base, [{"w": D} for D in models], method, **arguments)


@pytest.mark.parametrize("cosine", [0.0, 0.7, 0.8, 0.9])
def test_tsv_is_its_authors_algorithm_if_a_pair_of_models_is_alike(cosine):
    models = pair_alike(cosine)
    merged = merged_by("tsv", models)
    assert close(merged["w"], published(models, [1 / 8] * 8), 1e-9)
    assert "near-copies" not in merged.record.tensors["w"].note


def test_near_copies_are_regularized_alone_and_the_record_says_so():
    models = pair_alike(0.9999)
    merged, authors = merged_by("tsv", models), published(models, [1 / 8] * 8)
    note = merged.record.tensors["w"].note
    assert "near-copies regularized, pairs of models: 1" in note
    # The first two models fine-tuned next to nothing apart; along the others the merge stays the authors'.
    others = torch.stack(models[2:])
    along = [(others * x).sum((1, 2)) / others.square().sum((1, 2)) for x in (merged["w"], authors)]
    assert close(along[0], along[1], 0.05)
    as_published = merged_by("tsv", models, near_copies="as_published")
    assert close(as_published["w"], authors, 1e-7)
    assert "near-copies" not in as_published.record.tensors["w"].note


@pytest.mark.parametrize("basis", ["tensor", "tagged"])
@pytest.mark.parametrize("method", ["tsv", "epimer_free", "epimer_kron"])
def test_a_model_that_moves_a_little_moves_the_merge_a_little(method, basis):
    """A copy that changes by a billionth changes the merge by about that, not by the directions that enter."""
    generator = torch.Generator().manual_seed(1)
    D, other, step = (torch.randn(M, N, generator=generator, dtype=torch.float64) for _ in range(3))
    arguments = {} if method == "tsv" else {"basis": basis}
    if method == "epimer_kron":
        arguments["curvature"] = [{"w": kronecker(t)} for t in range(3)]
    at_copies = merged_by(method, [D, D.clone(), other], **arguments)["w"]
    for size in (1e-9, 1e-6, 1e-3):
        moved = merged_by(method, [D, D + size * step, other], **arguments)["w"]
        assert float((moved - at_copies).norm() / at_copies.norm()) < 3 * size


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 0.999])
def test_calibration_is_that_of_the_uncalibrated_merge(share):
    """Also of what an anchor has outside of the basis, if two models are near-copies."""
    generator = torch.Generator().manual_seed(2)
    common, *own = (torch.randn(24, 20, generator=generator, dtype=torch.float64) for _ in range(4))
    models = [common + (1 / share**2 - 1) ** 0.5 * D for D in own]
    plain = merged_by("epimer_free", models, calibrate=None)["w"]
    expected = calibrated(top_svd(plain, 20), models, 1.0)
    assert close(merged_by("epimer_free", models)["w"], expected, 1e-9)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.7])
def test_calibration_on_a_basis_that_is_given(noise):
    _, models = copies(noise)
    basis = {"w": tensor_product(tagged(models, K))}
    plain = merged_by("epimer_free", models, calibrate=None, basis=basis)["w"]
    expected = calibrated(top_svd(plain, min(plain.shape)), models, 1.0)
    assert close(merged_by("epimer_free", models, basis=basis)["w"], expected, 1e-9)


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
