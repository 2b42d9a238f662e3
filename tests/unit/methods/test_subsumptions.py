"""The paper's unification: each method is the one equation with another subspace, metric and aggregator."""

import pytest
import torch

import epimer
from dense import basis_of, close, matrix_of
from epimer.geometry.aggregator import iso_c_delta, tsv_delta
from epimer.geometry.frechet import build_problem
from epimer.geometry.metric import Identity
from epimer.geometry.subspace import Full, joint, tagged, tensor_product
from models import MATRICES, make_base, make_curvature, make_models

BASE = make_base(torch.float64)
MODELS = make_models(BASE)
DIAGONAL, KRONECKER, SAMPLES = (make_curvature(BASE, kind) for kind in ("diagonal", "kronecker", "samples"))
WEIGHTS = [0.5, 0.2, 0.3]
NAME = "block.0.weight"
DELTAS = [model[NAME] - BASE[NAME] for model in MODELS]
EXACT = {"aggregator": "mean", "normalize": "none", "damping": 0}


def merge(method, **given):
    return epimer.merge_state_dicts(BASE, MODELS, method, weights=WEIGHTS, **given)


def equal(a, b, names=tuple(MATRICES), tolerance=1e-8):
    return all(close(a[k], b[k], tolerance) for k in names)


def test_full_identity_is_task_arithmetic():
    mean = build_problem(Full(torch.float64), [Identity()] * 3, DELTAS, WEIGHTS, normalize="none").mean()
    assert close(BASE[NAME] + mean.value, merge("task_arithmetic")[NAME], 1e-12)
    assert equal(merge("average"), merge("task_arithmetic"))


def test_full_diagonal_is_fisher_averaging():
    full = merge("epimer", curvature=DIAGONAL, basis="full", **EXACT)
    assert equal(full, merge("fisher", curvature=DIAGONAL))
    F = [one[NAME].F for one in DIAGONAL]
    expected = sum(w * f * m[NAME] for w, f, m in zip(WEIGHTS, F, MODELS, strict=True))
    assert close(full[NAME], expected / sum(w * f for w, f in zip(WEIGHTS, F, strict=True)))


def test_full_kronecker_without_output_factor_is_regmean():
    inputs = [{k: epimer.Kronecker(A=v.A) for k, v in one.items()} for one in KRONECKER]
    full = merge("mats", curvature=inputs, **EXACT)
    assert equal(full, merge("regmean", curvature=inputs, off_diagonal=1))
    A = [one[NAME].A for one in inputs]
    expected = sum(w * m[NAME] @ a for w, a, m in zip(WEIGHTS, A, MODELS, strict=True))
    assert close(full[NAME], expected @ torch.linalg.inv(sum(w * a for w, a in zip(WEIGHTS, A, strict=True))), 1e-8)


def test_regmean_shrinks_the_off_diagonal_entries():
    def shrunk(A):
        return 0.9 * A + 0.1 * torch.diag(A.diagonal())

    inputs = [{k: epimer.Kronecker(A=shrunk(v.A)) for k, v in one.items()} for one in KRONECKER]
    assert equal(merge("regmean", curvature=KRONECKER), merge("regmean", curvature=inputs, off_diagonal=1))


def test_gradient_matching_without_base_curvature_is_the_diagonal_mean():
    assert equal(merge("gradient_matching", curvature=DIAGONAL), merge("fisher", curvature=DIAGONAL), tuple(BASE)[:-1])


def test_gradient_matching_as_daheim_writes_it():
    prior, N, N0, alpha = 0.3, [10, 20, 5], 4.0, 0.7
    F0 = {NAME: epimer.Diagonal(torch.rand(24, 20).double())}
    merged = epimer.merge_state_dicts(
        BASE, MODELS, "gradient_matching", curvature=DIAGONAL, base_curvature=F0,
        samples=N, base_samples=N0, prior=prior, scale=alpha,
    )  # fmt: skip
    F = [one[NAME].F for one in DIAGONAL]
    rest = N0 * F0[NAME].F + prior
    total = alpha * sum(n * f for n, f in zip(N, F, strict=True)) + rest
    delta = alpha * sum((n * f + rest) / total * D for n, f, D in zip(N, F, DELTAS, strict=True))
    assert close(merged[NAME], BASE[NAME] + delta)


def test_joint_svd_subspace_projects_task_arithmetic_and_cannot_exceed_rank_t():
    average = sum(w * D for w, D in zip(WEIGHTS, DELTAS, strict=True))
    for k in (1, 2, 3, 9):
        subspace = joint(DELTAS, k)
        S = basis_of(subspace, 24, 20)
        assert S.shape[1] == min(k, 3)
        x = build_problem(subspace, [Identity()] * 3, DELTAS, WEIGHTS, normalize="none").mean().value
        assert close(subspace.lift(x).flatten(), S @ S.T @ average.flatten())
    assert close(subspace.lift(x), average)  # at rank T it is task arithmetic itself


@pytest.mark.parametrize("rank", [1, 4])
def test_homogeneous_curvature_turns_epimer_into_the_projected_tsv(rank):
    same = [DIAGONAL[0]] * 3
    flat = merge("tsv", coefficients="projected", rank=rank)
    assert equal(merge("epimer", curvature=same, rank=rank), flat)
    assert not equal(merge("epimer", curvature=DIAGONAL, rank=rank), flat, tolerance=1e-3)
    assert not equal(merge("tsv", rank=rank), flat, tolerance=1e-3)  # the authors' σ is another algorithm


@pytest.mark.parametrize(
    ("method", "curvature"), [("epimer", DIAGONAL), ("epimer_exact", SAMPLES), ("mats", KRONECKER)]
)
def test_sum_is_t_times_the_mean(method, curvature):
    mean = merge(method, curvature=curvature, aggregator="mean")
    total = merge(method, curvature=curvature, aggregator="sum")
    for k in MATRICES:
        assert close(total[k] - BASE[k], 3 * (mean[k] - BASE[k]), 1e-8)


@pytest.mark.parametrize("basis", ["tagged", "tensor", "full"])
@pytest.mark.parametrize("anchor", ["tsv", "sum", "iso_c", "average"])
def test_anchored_runs_from_the_mean_to_its_anchor(basis, anchor):
    given = {"curvature": KRONECKER, "basis": basis, "rank": 4}
    mean = merge("epimer_kron", aggregator="mean", damping=0, **given)
    near = merge("epimer_kron", anchor=anchor, damping=1e-10, **given)
    far = merge("epimer_kron", anchor=anchor, damping=1e12, **given)
    for k in MATRICES:
        deltas = [model[k] - BASE[k] for model in MODELS]
        atoms = tagged(deltas, 4)
        average = sum(w * D for w, D in zip(WEIGHTS, deltas, strict=True))
        subspace = {"tagged": atoms, "tensor": tensor_product(atoms), "full": Full(torch.float64)}[basis]
        match anchor:
            case "tsv":
                target = tsv_delta(atoms, WEIGHTS)
            case "iso_c":
                target = iso_c_delta(deltas, WEIGHTS)
            case _:
                target = average * (3 if anchor == "sum" else 1)
        assert close(far[k] - BASE[k], target, 1e-8)
        outside = target - subspace.lift(subspace.project(target))
        assert close(near[k] - mean[k], outside, 1e-4 * float(target.norm() / max(outside.norm(), 1e-12)))


def test_anchored_at_tsv_without_curvature_left_is_tsv_itself():
    far = merge("epimer_kron", curvature=KRONECKER, anchor="tsv", damping=1e12, rank=4)
    assert equal(far, merge("tsv", rank=4))
    assert equal(
        merge("mats", curvature=KRONECKER, aggregator="anchored", anchor="iso_c", damping=1e12), merge("iso_c")
    )


@pytest.mark.parametrize("basis", ["tagged", "tensor", "full"])
@pytest.mark.parametrize("damping", [1e-2, 0.3])
def test_anchored_at_the_average_is_the_damped_mean(basis, damping):
    given = {"curvature": KRONECKER, "basis": basis, "rank": 4, "damping": damping}
    anchored, mean = merge("epimer_kron", anchor="average", **given), merge("epimer_kron", aggregator="mean", **given)
    for k in MATRICES:
        deltas = [model[k] - BASE[k] for model in MODELS]
        average, atoms = sum(w * D for w, D in zip(WEIGHTS, deltas, strict=True)), tagged(deltas, 4)
        subspace = {"tagged": atoms, "tensor": tensor_product(atoms), "full": Full(torch.float64)}[basis]
        inside = subspace.lift(subspace.project(average))
        assert close(anchored[k] - BASE[k], mean[k] - BASE[k] + average - inside, 1e-8)


def test_free_curvature_is_the_task_vectors_own_gram():
    grams = []
    for model in MODELS:
        vectors = {k: model[k] - BASE[k] for k in MATRICES}
        grams.append({k: epimer.Kronecker(A=D.T @ D, G=D @ D.T) for k, D in vectors.items()})
    assert equal(
        merge("epimer_free", rank=4), merge("epimer_kron", curvature=grams, rank=4, anchor="tsv", calibrate=1.0)
    )
    inputs = [{k: epimer.Kronecker(A=v.A) for k, v in one.items()} for one in grams]
    assert equal(merge("wudi"), merge("mats", curvature=inputs))


def test_mats_solves_the_full_kronecker_problem():
    merged = merge("mats", curvature=KRONECKER)
    H, b = 0, 0
    for w, one, D in zip(WEIGHTS, KRONECKER, DELTAS, strict=True):
        H_t = matrix_of(one[NAME], 24, 20)
        H_t = H_t / H_t.diagonal().mean() + 1e-2 * torch.eye(480, dtype=torch.float64)
        H, b = H + w * H_t, b + w * H_t @ D.flatten()
    assert close((merged[NAME] - BASE[NAME]).flatten(), torch.linalg.solve(H, b), 1e-7)


@pytest.mark.parametrize(
    ("method", "curvature"), [("epimer", DIAGONAL), ("epimer_kron", KRONECKER), ("epimer_exact", SAMPLES)]
)
@pytest.mark.parametrize("basis", ["tagged", "tensor"])
def test_presets_solve_the_dense_equation_in_the_authors_basis(method, curvature, basis):
    """The basis is rebuilt here from full SVDs, the curvature from its definition."""
    rank, k = 4, "block.1.weight"
    m, n = BASE[k].shape
    deltas = [model[k] - BASE[k] for model in MODELS]
    svds = [torch.linalg.svd(D, full_matrices=False) for D in deltas]
    P, _, Qh = torch.linalg.svd(torch.cat([U[:, :rank] for U, _, _ in svds], 1), full_matrices=False)
    R, _, Sh = torch.linalg.svd(torch.cat([Vh[:rank] for _, _, Vh in svds], 0), full_matrices=False)
    U, V = P @ Qh, (R @ Sh).T
    atoms = torch.einsum("ai,bj->abij", U, V)
    S = torch.diagonal(atoms, dim1=2, dim2=3).reshape(m * n, -1) if basis == "tagged" else atoms.reshape(m * n, -1)
    damping, eye = 0.05, torch.eye(S.shape[1], dtype=torch.float64)
    H, b = 0, 0
    for w, one, D in zip(WEIGHTS, curvature, deltas, strict=True):
        H_t = S.T @ matrix_of(one[k], m, n) @ S
        H_t = H_t / H_t.diagonal().mean() + damping * eye
        H, b = H + w * H_t, b + w * H_t @ (S.T @ D.flatten())
    merged = merge(method, curvature=curvature, basis=basis, rank=rank, aggregator="sum", damping=damping, scale=0.7)
    expected = BASE[k] + 0.7 * 3 * (S @ torch.linalg.solve(H, b)).reshape(m, n)
    assert close(merged[k], expected, 1e-7)
    assert merged.record.tensors[k].residual < 1e-8


def test_projected_curvature_gives_the_same_merge_as_the_whole():
    for basis, methods in (("tagged", ("epimer", "epimer_exact", "epimer_kron")), ("tensor", ("epimer_kron",))):
        bases = epimer.build_basis(BASE, MODELS, rank=4, basis=basis)
        for method in methods:
            curvature = {"epimer": DIAGONAL, "epimer_exact": SAMPLES, "epimer_kron": KRONECKER}[method]
            projected = []
            for one in curvature:
                mapping = {}
                for k in MATRICES:
                    S, s = basis_of(bases[k], *BASE[k].shape), bases[k]
                    if method == "epimer_kron":
                        mapping[k] = epimer.Projected(G=s.U.T @ one[k].G @ s.U, A=s.V.T @ one[k].A @ s.V)
                    else:
                        mapping[k] = epimer.Projected(H=S.T @ matrix_of(one[k], *BASE[k].shape) @ S, basis=s)
                projected.append(mapping)
            whole = merge(method, curvature=curvature, basis=basis, rank=4)
            assert equal(merge(method, curvature=projected, basis=bases, rank=4), whole)
            if method != "epimer_kron":
                assert equal(merge(method, curvature=projected, rank=4), whole)


@pytest.mark.parametrize(("basis", "anchor"), [("tagged", "tsv"), ("tensor", "stretched"), ("full", "stretched")])
def test_the_anchor_by_default_is_one_that_lies_where_the_basis_reaches(basis, anchor):
    given = {"curvature": KRONECKER, "basis": basis, "aggregator": "anchored", "damping": 1.0, "rank": 2}
    by_default = merge("epimer_kron", **given)
    assert all(torch.equal(by_default[k], W) for k, W in merge("epimer_kron", anchor=anchor, **given).items())
    if basis == "tagged":
        atoms = tagged(DELTAS, 2)
        delta = by_default[NAME] - BASE[NAME]
        assert close(atoms.lift(atoms.project(delta)), delta, 1e-10)
