"""η, V_S, R_S and the bound against the full quadratic, and the paper's three degenerate cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import epimer
from dense import METRICS, basis_of, close, matrix_of, random_metric
from epimer.geometry.frechet import build_problem
from epimer.geometry.metric import Diagonal, Samples, TaskGram
from epimer.geometry.subspace import tagged
from epimer.geometry.theory import SubspaceTheory, bound, residual_energy
from models import MATRICES, make_base, make_curvature, make_models

BASE = make_base(torch.float64)
MODELS = make_models(BASE)


def diagnose_layer(subspace, metrics, deltas, weights, *, damping, rank):
    return SubspaceTheory(subspace, metrics, deltas, weights).at_mean(damping, rank)


def draw(seed, kind="diagonal", tasks=3, m=9, n=8):
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(m, n, dtype=torch.float64, generator=generator) for _ in range(tasks)]
    metrics = [random_metric(kind, m, n, generator) for _ in range(tasks)]
    weights = torch.rand(tasks, dtype=torch.float64, generator=generator) + 0.1
    return deltas, metrics, (weights / weights.sum()).tolist()


def dense_problem(deltas, metrics, weights, S, damping):
    eye = torch.eye(S.shape[1], dtype=torch.float64)
    H = [S.T @ matrix_of(metric, *deltas[0].shape) @ S for metric in metrics]
    H = [h / h.diagonal().mean() + damping * eye for h in H]
    return H, [S.T @ D.flatten() for D in deltas]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(METRICS), rank=st.integers(1, 2))
def test_theory_of_a_layer_against_the_full_quadratic(seed, kind, rank):
    deltas, metrics, lam = draw(seed, kind)
    atoms = tagged(deltas, rank)
    found = diagnose_layer(atoms, metrics, deltas, lam, damping=1e-2, rank=rank)
    S = basis_of(atoms, 9, 8)
    H, x = dense_problem(deltas, metrics, lam, S, 1e-2)
    mean_H = sum(w * h for w, h in zip(lam, H, strict=True))
    flat = sum(w * v for w, v in zip(lam, x, strict=True))
    c = sum(w * (h - mean_H) @ (v - flat) for w, h, v in zip(lam, H, x, strict=True))
    eta = float(c @ torch.linalg.solve(mean_H, c))
    best = torch.linalg.solve(mean_H, sum(w * h @ v for w, h, v in zip(lam, H, x, strict=True)))

    def objective(at):
        return float(sum(w * (at - v) @ h @ (at - v) for w, h, v in zip(lam, H, x, strict=True)))

    assert found.eta == pytest.approx(eta, rel=1e-6, abs=1e-10)
    assert found.flat_objective - found.v_s_solve == pytest.approx(eta, rel=1e-6, abs=1e-10)
    assert found.flat_objective == pytest.approx(objective(flat), rel=1e-8)
    assert found.v_s_solve == pytest.approx(objective(best), rel=1e-8)
    assert found.eta_fraction == pytest.approx(eta / objective(flat), rel=1e-6, abs=1e-10)
    assert found.eta_unit_trace == pytest.approx(eta / S.shape[1], rel=1e-6, abs=1e-10)
    # raw curvature, loss units
    full = [matrix_of(metric, 9, 8) for metric in metrics]
    outside = [D.flatten() - S @ v for D, v in zip(deltas, x, strict=True)]
    v_s = float(sum(w * (S @ (best - v)) @ h @ (S @ (best - v)) for w, h, v in zip(lam, full, x, strict=True)))
    r_s = float(sum(w * d @ h @ d for w, h, d in zip(lam, full, outside, strict=True)))
    assert found.v_s == pytest.approx(v_s, rel=1e-6)
    assert found.r_s == pytest.approx(r_s, rel=1e-8, abs=1e-10)
    increase = 0.5 * float(
        sum(
            w * (S @ best - D.flatten()) @ h @ (S @ best - D.flatten())
            for w, h, D in zip(lam, full, deltas, strict=True)
        )
    )
    assert increase <= found.bound * (1 + 1e-9)
    assert found.bound == pytest.approx(0.5 * (math.sqrt(v_s) + math.sqrt(r_s)) ** 2, rel=1e-6)
    energies = [float(v.square().sum() / D.square().sum()) for v, D in zip(x, deltas, strict=True)]
    assert found.energy_kept_by_task == pytest.approx(energies)
    spectrum = torch.linalg.eigvalsh(mean_H)
    assert found.condition == pytest.approx(float(spectrum[-1] / spectrum[0]), rel=1e-5)
    assert found.damped == int((spectrum - 1e-2 < 1e-2).sum())


def test_eta_vanishes_for_homogeneous_curvature():
    deltas, metrics, lam = draw(0)
    scaled = [Diagonal(c * metrics[0].F) for c in (1, 7, 0.1)]  # equal after normalisation
    assert diagnose_layer(tagged(deltas, 2), scaled, deltas, lam, damping=1e-2, rank=2).eta == pytest.approx(
        0, abs=1e-12
    )
    assert diagnose_layer(tagged(deltas, 2), metrics, deltas, lam, damping=1e-2, rank=2).eta > 1e-3


def test_eta_vanishes_for_identical_task_vectors():
    deltas, metrics, lam = draw(0)
    same = [deltas[0]] * 3
    assert diagnose_layer(tagged(same, 2), metrics, same, lam, damping=1e-2, rank=2).eta == pytest.approx(0, abs=1e-12)


def test_eta_vanishes_for_uncorrelated_deviations():
    """Four tasks: each of two curvatures meets both of two opposite task vectors, so that c = 0 by symmetry."""
    deltas, metrics, _ = draw(0)
    D, (P, Q) = deltas[0], metrics[:2]
    vectors, curvature, lam = [D, -D, D, -D], [P, P, Q, Q], [0.25] * 4
    atoms = tagged([deltas[1], deltas[2]], 3)
    found = diagnose_layer(atoms, curvature, vectors, lam, damping=1e-2, rank=3)
    assert found.eta == pytest.approx(0, abs=1e-12)
    assert found.flat_objective > 1e-3
    swapped = diagnose_layer(atoms, [P, Q, P, Q], vectors, lam, damping=1e-2, rank=3)
    assert swapped.eta > 1e-4


def test_the_bound_is_reached_where_the_paper_says_it_is():
    """Equality needs the errors inside and outside the basis co-linear under H_t: one sample makes all of them so."""
    torch.manual_seed(3)
    D = torch.randn(6, 5, dtype=torch.float64)
    g, x = torch.randn(1, 1, 6, dtype=torch.float64), torch.randn(1, 1, 5, dtype=torch.float64)
    metric = Samples(g=g, x=x)
    atoms = tagged([D], 2)
    problem = build_problem(atoms, [metric], [D], [1.0], normalize="none")
    outside = D - atoms.lift(problem.points[0])
    sign = float((g[0, 0] @ outside @ x[0, 0]).sign())
    step = -sign * atoms.project(torch.outer(g[0, 0], x[0, 0]))
    at = problem.points[0] + step
    v_s, r_s = problem.objective(at), residual_energy(atoms, [metric], [D], [1.0])
    error = atoms.lift(at) - D
    increase = 0.5 * float((g[0, 0] @ error @ x[0, 0]).square())
    assert increase == pytest.approx(bound(v_s, r_s), rel=1e-9)


@pytest.mark.parametrize("kind", [None, "diagonal", "kronecker", "samples"])
def test_diagnosis_of_models_sums_its_layers(kind):
    curvature = make_curvature(BASE, kind)
    found = epimer.diagnose_state_dicts(BASE, MODELS, curvature=curvature, rank=3, weights=[1, 2, 3])
    assert set(found.layers) == set(MATRICES)
    layers, total = [layer.theory for layer in found.layers.values()], found.total
    for name in ("eta", "eta_unit_trace", "flat_objective", "v_s", "v_s_solve", "r_s", "damped"):
        assert getattr(total, name) == pytest.approx(sum(getattr(layer, name) for layer in layers))
    assert total.bound == pytest.approx(0.5 * (total.v_s**0.5 + total.r_s**0.5) ** 2)
    assert total.condition == max(layer.condition for layer in layers)
    lam = torch.tensor([1, 2, 3]) / 6
    kept = whole = 0
    for name in MATRICES:
        deltas = [model[name] - BASE[name] for model in MODELS]
        atoms = tagged(deltas, 3)
        kept += sum(w * atoms.project(D).square().sum() for w, D in zip(lam, deltas, strict=True))
        whole += sum(w * D.square().sum() for w, D in zip(lam, deltas, strict=True))
    assert total.energy_kept == pytest.approx(float(kept / whole))
    assert found.to_dict()["total"]["eta"] == total.eta


def test_eta_of_a_merge_is_the_diagnosis_eta():
    curvature = make_curvature(BASE, "diagonal")
    found = epimer.diagnose_state_dicts(BASE, MODELS, curvature=curvature, rank=3)
    merged = epimer.merge_state_dicts(BASE, MODELS, "epimer", curvature=curvature, rank=3)
    for name in MATRICES:
        assert merged.record.tensors[name].eta == pytest.approx(found.layers[name].theory.eta)


def test_more_directions_keep_more_energy_and_lose_less():
    curvature = make_curvature(BASE, "kronecker")
    found = [epimer.diagnose_state_dicts(BASE, MODELS, curvature=curvature, rank=k).total for k in (1, 2, 4, 6)]
    assert [t.energy_kept for t in found] == sorted(t.energy_kept for t in found)
    assert found[0].r_s > found[-1].r_s


def test_projected_curvature_leaves_r_s_unknown():
    bases = epimer.build_basis(BASE, MODELS, rank=3)
    curvature = make_curvature(BASE, "kronecker")
    projected = [
        {
            k: epimer.Projected(G=bases[k].U.T @ v.G @ bases[k].U, A=bases[k].V.T @ v.A @ bases[k].V)
            for k, v in one.items()
        }
        for one in curvature
    ]
    found = epimer.diagnose_state_dicts(BASE, MODELS, curvature=projected, basis=bases, rank=3)
    whole = epimer.diagnose_state_dicts(BASE, MODELS, curvature=curvature, rank=3)
    assert found.total.r_s is None
    assert found.total.bound is None
    assert found.total.eta == pytest.approx(whole.total.eta)
    assert found.total.v_s == pytest.approx(whole.total.v_s)


def test_zero_task_vectors_have_nothing_to_diagnose_but_do_not_fail():
    found = epimer.diagnose_state_dicts(BASE, [dict(BASE), dict(BASE)], rank=3).total
    assert (found.eta, found.v_s, found.r_s, found.bound) == (0, 0, 0, 0)
    assert found.energy_kept == 1
    assert found.condition == 1
    assert close(torch.tensor(found.energy_kept_by_task), torch.ones(2))


@pytest.mark.parametrize("shape", [(24, 7), (7, 24), (9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_atoms_leave_of_a_task_vector_by_gram_matrices(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    deltas = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    basis = tagged(deltas, 2)
    for D in deltas:
        x = basis.project(D)
        E = (D - basis.lift(x)).double().numpy()
        A, G = (D.T @ D).double().numpy(), (D @ D.T).double().numpy()
        expected = float(np.trace(E.T @ G @ E @ A))
        assert TaskGram(D).energy_outside(D, x, basis) == pytest.approx(
            expected, rel=1e-4 if dtype == torch.float32 else 1e-10
        )
    near = whitened_to_rounding(deltas[0])
    assert near < 1e-6


def whitened_to_rounding(D):
    """What a basis of full rank leaves, as a share of all: nothing, not a negative number."""
    atoms = tagged([D], min(D.shape))
    metric = TaskGram(D)
    left = metric.energy_outside(D, atoms.project(D), atoms)
    assert left >= 0
    return left / metric.energy(D)
