"""Methods against FusionBench, which nobody here wrote, in float64 to 1e-6.

Runs in an environment of its own: `make conformance`.
"""

import contextlib
import io

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
        difference = (ours[name] - base[name] - delta).norm() / delta.norm()
        assert difference < 1e-6, f"{name}: {difference:.1e}"


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
