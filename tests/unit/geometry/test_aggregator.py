"""Subspace x metric x aggregator against dense algebra: what a preset is composed of."""

import json

import pytest
import torch

from dense import basis_of, close, matrix_of, random_metric
from epimer.geometry.aggregator import Anchored, Mean, Sum, iso_c_delta, tsv_delta
from epimer.geometry.frechet import build_problem
from epimer.geometry.subspace import Full, tagged, tensor_product
from epimer.records import MergeRecord, Status, TensorRecord

M, N, WEIGHTS = 9, 7, [0.5, 0.2, 0.3]
GENERATOR = torch.Generator().manual_seed(0)
DELTAS = [torch.randn(M, N, generator=GENERATOR, dtype=torch.float64) for _ in WEIGHTS]
METRICS = [random_metric("kronecker", M, N, GENERATOR) for _ in WEIGHTS]
ATOMS = tagged(DELTAS, 2)
SUBSPACES = {"full": Full(torch.float64), "tagged": ATOMS, "tensor": tensor_product(ATOMS)}
AVERAGE = sum(w * D for w, D in zip(WEIGHTS, DELTAS, strict=True))


def dense_parts(subspace, normalize):
    """Return S, every H̃_t and its mean diagonal before damping, and the points, all as plain matrices."""
    S = basis_of(subspace, M, N)
    curvatures = [S.T @ matrix_of(metric, M, N) @ S for metric in METRICS]
    sizes = [float(H.diagonal().mean()) for H in curvatures]
    if normalize == "trace":
        curvatures, sizes = [H / size for H, size in zip(curvatures, sizes, strict=True)], [1.0] * 3
    if normalize == "common":
        mean = sum(w * size for w, size in zip(WEIGHTS, sizes, strict=True))
        curvatures, sizes = [H / mean for H in curvatures], [1.0] * 3
    return S, curvatures, sizes, [S.T @ D.flatten() for D in DELTAS]


@pytest.mark.parametrize("normalize", ["trace", "common", "none"])
@pytest.mark.parametrize("kind", SUBSPACES)
def test_mean_and_sum_damp_every_task_s_curvature(kind, normalize):
    subspace = SUBSPACES[kind]
    S, curvatures, sizes, points = dense_parts(subspace, normalize)
    eye = torch.eye(S.shape[1], dtype=torch.float64)
    damped = [H + 0.3 * size * eye for H, size in zip(curvatures, sizes, strict=True)]
    H = sum(w * H_t for w, H_t in zip(WEIGHTS, damped, strict=True))
    b = sum(w * H_t @ x for w, H_t, x in zip(WEIGHTS, damped, points, strict=True))
    expected = (S @ torch.linalg.solve(H, b)).reshape(M, N)
    problem = build_problem(subspace, METRICS, DELTAS, WEIGHTS, normalize=normalize)
    average, total = Mean(0.3).aggregate(problem), Sum(0.3).aggregate(problem)
    assert close(average.value, expected, 1e-8)
    assert torch.equal(total.value, 3 * average.value)
    assert total.eta == average.eta > 0


@pytest.mark.parametrize("normalize", ["trace", "common", "none"])
@pytest.mark.parametrize("kind", SUBSPACES)
@pytest.mark.parametrize(
    "anchor",
    [AVERAGE, 3 * AVERAGE, tsv_delta(ATOMS, WEIGHTS), iso_c_delta(DELTAS, WEIGHTS), 2 * DELTAS[0]],
    ids=["average", "sum", "tsv", "iso_c", "a model"],
)
def test_anchored_damps_the_way_to_its_anchor_and_leaves_the_rest_there(kind, normalize, anchor):
    subspace = SUBSPACES[kind]
    S, curvatures, sizes, points = dense_parts(subspace, normalize)
    H = sum(w * H_t for w, H_t in zip(WEIGHTS, curvatures, strict=True))
    b = sum(w * H_t @ x for w, H_t, x in zip(WEIGHTS, curvatures, points, strict=True))
    epsilon = 0.3 * sum(w * size for w, size in zip(WEIGHTS, sizes, strict=True))
    eye = torch.eye(S.shape[1], dtype=torch.float64)
    inside = S @ torch.linalg.solve(H + epsilon * eye, b + epsilon * S.T @ anchor.flatten())
    expected = (inside + anchor.flatten() - S @ (S.T @ anchor.flatten())).reshape(M, N)
    problem = build_problem(subspace, METRICS, DELTAS, WEIGHTS, normalize=normalize)
    solution = Anchored(anchor, 0.3).aggregate(problem)
    assert close(solution.value, expected, 1e-8)
    assert solution.eta is None


def test_a_status_is_its_word_in_json_and_tells_what_helps():
    record = MergeRecord("tsv", {}, (1.0,), {"w": TensorRecord("matrix", (2, 2), Status.STALLED)})
    written = json.loads(json.dumps(record.to_dict()))
    assert written["tensors"]["w"]["status"] == f"{Status.STALLED}" == "stalled"
    assert MergeRecord.from_dict(written).tensors["w"].status is Status.STALLED
    words = ["exact", "converged", "damped", "stalled", "retried", "clamped", "non-finite", "tied"]
    assert [status.value for status in Status] == words
    assert all(status.meaning for status in Status)
    assert Status.STALLED.remedy == "Raise iterations, or damping."
    words = f"{', '.join(map(repr, words[:-1]))} or 'tied'"
    with pytest.raises(ValueError, match=rf"tensors\.w\.status: input should be {words}\. Got 'solved' instead"):
        MergeRecord.from_dict({**written, "tensors": {"w": {**written["tensors"]["w"], "status": "solved"}}})
