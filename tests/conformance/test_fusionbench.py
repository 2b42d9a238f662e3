"""Methods against FusionBench, which nobody here wrote: in float64 to 1e-6, in float32 as near to float64 as it is.

Runs in an environment of its own: `make conformance`. `--log-cli-level INFO` shows the errors
in float32.
"""

import contextlib
import io
import itertools
import logging
from functools import partial

import pytest
import torch

import epimer

fusion_bench = pytest.importorskip("fusion_bench", reason="FusionBench is installed by `make conformance`")

from fusion_bench.method.fisher_merging.fisher_merging import merging_with_fisher_weights  # noqa: E402
from fusion_bench.method.isotropic_merging.iso_utils import iso_c, iso_cts  # noqa: E402
from fusion_bench.method.regmean.regmean import merging_with_regmean_weights  # noqa: E402
from fusion_bench.method.task_singular_vector.utils.TSVM_utils import (  # noqa: E402
    compute_and_sum_svd_mem_reduction,
)
from fusion_bench.method.ties_merging.ties_merging_utils import ties_merging  # noqa: E402

SHAPES = {"a.weight": (40, 40), "b.weight": (64, 24), "c.weight": (24, 96), "a.bias": (40,)}
MATRICES = [name for name in SHAPES if name.endswith("weight")]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[2, 5, 8], ids=lambda tasks: f"{tasks} tasks")
def states(request):
    torch.manual_seed(request.param)
    base = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    models = [
        {name: W + 0.1 * (1 + t) * torch.randn(W.shape, dtype=torch.float64) for name, W in base.items()}
        for t in range(request.param)
    ]
    return base, models, [{name: model[name] - base[name] for name in base} for model in models]


def quietly(run):
    with contextlib.redirect_stdout(io.StringIO()):
        return run()


def agree(ours, base, theirs):
    for name, delta in theirs.items():
        difference = error(ours[name] - base[name], delta)
        assert difference < 1e-6, f"{name}: {difference:.1e}"


def error(merged, expected):
    return float((merged.double() - expected).norm() / expected.norm())


def test_tsv_m(states):
    base, models, vectors = states
    theirs = quietly(lambda: compute_and_sum_svd_mem_reduction(vectors, accelerator="cpu"))
    agree(epimer.merge_state_dicts(base, models, "tsv"), base, theirs)


def test_iso_c(states):
    base, models, vectors = states
    agree(epimer.merge_state_dicts(base, models, "iso_c"), base, quietly(lambda: iso_c(vectors, accelerator="cpu")))


@pytest.mark.parametrize("common", [0.8, 0.5])
def test_iso_cts(states, common):
    base, models, vectors = states
    theirs = quietly(lambda: iso_cts(vectors, common, accelerator="cpu"))
    agree(epimer.merge_state_dicts(base, models, "iso_cts", common=common), base, theirs)


@pytest.mark.parametrize("percent", [20, 50])
def test_ties(states, percent):
    base, models, vectors = states
    flat = torch.stack([torch.cat([vector[name].flatten() for name in SHAPES]) for vector in vectors])
    merged = quietly(lambda: ties_merging(flat, reset_thresh=percent, merge_func="mean"))
    pieces = merged.split([torch.Size(shape).numel() for shape in SHAPES.values()])
    theirs = {name: piece.reshape(SHAPES[name]) for name, piece in zip(SHAPES, pieces, strict=True)}
    agree(epimer.merge_state_dicts(base, models, "ties", density=percent / 100), base, theirs)


@pytest.mark.parametrize("ratio", [0.9, 1.0])
def test_regmean(states, ratio):
    base, models, _ = states
    grams = []
    for _ in models:
        inputs = {name: torch.randn(200, SHAPES[name][1]) * torch.randn(SHAPES[name][1]).exp() for name in MATRICES}
        grams.append({name: x.T @ x / len(x) for name, x in inputs.items()})
    theirs = merging_with_regmean_weights(
        {name: [model[name] for model in models] for name in base},
        [{name.removesuffix(".weight"): A for name, A in gram.items()} for gram in grams],
        reduce_non_diagonal_ratio=ratio,
    )
    curvature = [{name: epimer.Kronecker(A=A) for name, A in gram.items()} for gram in grams]
    ours = epimer.merge_state_dicts(base, models, "regmean", curvature=curvature, off_diagonal=ratio)
    agree(ours, base, {name: W - base[name] for name, W in theirs.items()})


@pytest.mark.parametrize("weighted", [False, True])
def test_fisher_merge_step(states, weighted):
    base, models, _ = states
    fishers = [{name: torch.randn(W.shape).square() for name, W in base.items()} for _ in models]
    weights = torch.rand(len(models)) + 0.1 if weighted else torch.ones(len(models))
    floor = 1e-6
    theirs = merging_with_fisher_weights(
        {name: [model[name] for model in models] for name in base},
        fishers,
        weights / weights.sum(),
        normalize_fisher_weight=False,
        minimal_fisher_weight=floor,
    )
    curvature = [{name: epimer.Diagonal(F) for name, F in one.items()} for one in fishers]
    ours = epimer.merge_state_dicts(base, models, "fisher", curvature=curvature, weights=weights.tolist(), jitter=floor)
    agree(ours, base, {name: W - base[name] for name, W in theirs.items()})


SPECTRAL = {
    "tsv": partial(compute_and_sum_svd_mem_reduction, accelerator="cpu"),
    "iso_c": partial(iso_c, accelerator="cpu"),
    "iso_cts": partial(iso_cts, common_space_fraction=0.8, accelerator="cpu"),
}
RELATED = {"cosines of .3": (0.55, 0.55, 0.55), "cosines of .3 to .9": (0.98, 0.92, 0.33)}
"""how much each task vector has of the common part: the cosine of two of them is the product of theirs"""
SPECTRAL_CASES = [(method, relation) for method in SPECTRAL for relation in RELATED]
WIDE = [(768, 768), (768, 3072), (3072, 768)]
FLOAT32 = 2e-4
"""how far a merge in float32 may be from FusionBench's in float64: theirs and ours"""


def task_vector(shape, generator):
    """Return a random matrix of norm 1 and full rank, with the singular values of fine-tuned layers: i^-0.7."""
    rank = min(shape)
    U, V = (torch.linalg.qr(torch.randn(side, rank, generator=generator))[0] for side in shape)
    D = (U * torch.arange(1, rank + 1) ** -0.7) @ V.T
    return D / D.norm()


def related_task_vectors(shape, shares):
    """Return task vectors, rounded to float32, each with a common part and a part of its own."""
    generator = torch.Generator().manual_seed(0)
    common = task_vector(shape, generator)
    vectors = [a * common + (1 - a * a) ** 0.5 * task_vector(shape, generator) for a in shares]
    for t, s in itertools.combinations(range(len(shares)), 2):
        assert (vectors[t] * vectors[s]).sum() == pytest.approx(shares[t] * shares[s], abs=0.03)
    return [D.float() for D in vectors]


def merge_layer(vectors, method, **given):
    base = {"a.weight": torch.zeros_like(vectors[0])}
    return epimer.merge_state_dicts(base, [{"a.weight": D} for D in vectors], method, **given)["a.weight"]


def in_both_precisions(merge):
    """Return FusionBench's merge in float64 and in float32, which it also takes from torch's default."""
    merged = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        merged.append(quietly(partial(merge, dtype)))
    torch.set_default_dtype(torch.float64)
    return merged


def close_in_float32(ours, theirs, expected):
    """Compare both merges in float32 with FusionBench's in float64."""
    errors = {"epimer": error(ours, expected), "FusionBench": error(theirs, expected)}
    logging.getLogger(__name__).info("%s", {who: f"{value:.1e}" for who, value in errors.items()})
    assert max(errors.values()) < FLOAT32, errors


@pytest.mark.parametrize("shape", [(96, 96), (64, 24), (24, 96)], ids=str)
@pytest.mark.parametrize(("method", "relation"), SPECTRAL_CASES)
def test_related_tasks_in_float64(method, relation, shape):
    vectors = [D.double() for D in related_task_vectors(shape, RELATED[relation])]
    theirs = quietly(lambda: SPECTRAL[method]([{"a.weight": D} for D in vectors]))["a.weight"]
    assert error(merge_layer(vectors, method), theirs) < 1e-6


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize(("method", "relation"), SPECTRAL_CASES)
def test_wide_layers_of_related_tasks_close_in_float32(method, relation, shape):
    vectors = related_task_vectors(shape, RELATED[relation])
    merge = SPECTRAL[method]
    expected, theirs = in_both_precisions(lambda dtype: merge([{"a.weight": D.to(dtype)} for D in vectors])["a.weight"])
    close_in_float32(merge_layer(vectors, method), theirs, expected)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_ties_of_wide_layers_of_related_tasks_close_in_float32(shape):
    vectors = related_task_vectors(shape, RELATED["cosines of .3 to .9"])
    flat = torch.stack([D.flatten() for D in vectors])
    expected, theirs = in_both_precisions(lambda dtype: ties_merging(flat.to(dtype), 20, "mean"))
    close_in_float32(merge_layer(vectors, "ties", density=0.2).flatten(), theirs, expected)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_regmean_of_wide_layers_of_related_tasks_close_in_float32(shape):
    vectors = related_task_vectors(shape, RELATED["cosines of .3 to .9"])
    torch.manual_seed(0)
    scales = torch.arange(1, shape[1] + 1) ** -0.5
    inputs = [torch.randn(2 * shape[1], shape[1]) * scales[torch.randperm(shape[1])] for _ in vectors]
    grams = [(x.T @ x / len(x)).float() for x in inputs]
    expected, theirs = in_both_precisions(
        lambda dtype: merging_with_regmean_weights(
            {"a.weight": [D.to(dtype) for D in vectors]},
            [{"a": A.to(dtype)} for A in grams],
            reduce_non_diagonal_ratio=0.9,
        )["a.weight"]
    )
    curvature = [{"a.weight": epimer.Kronecker(A=A)} for A in grams]
    ours = merge_layer(vectors, "regmean", curvature=curvature, off_diagonal=0.9)
    close_in_float32(ours, theirs, expected)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_the_fisher_merge_step_of_wide_layers_of_related_tasks_close_in_float32(shape):
    vectors = related_task_vectors(shape, RELATED["cosines of .3 to .9"])
    torch.manual_seed(0)
    fishers = [torch.randn(shape).square().float() for _ in vectors]
    expected, theirs = in_both_precisions(
        lambda dtype: merging_with_fisher_weights(
            {"a.weight": [D.to(dtype) for D in vectors]},
            [{"a.weight": F.to(dtype)} for F in fishers],
            torch.full((len(vectors),), 1 / len(vectors), dtype=dtype),
            normalize_fisher_weight=False,
            minimal_fisher_weight=1e-6,
        )["a.weight"]
    )
    curvature = [{"a.weight": epimer.Diagonal(F)} for F in fishers]
    close_in_float32(merge_layer(vectors, "fisher", curvature=curvature, jitter=1e-6), theirs, expected)
