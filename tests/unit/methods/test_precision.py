"""The fast float32 routes (Krylov SVD, single-precision CG) against the same merge in float64 with full SVDs."""

import pytest
import torch

import epimer
from dense import close

SHAPES = {"square.weight": (320, 320), "tall.weight": (520, 256), "wide.weight": (256, 520)}
TASKS, RANK = 4, 8


def vector(m, n, generator):
    """A task vector with a falling spectrum, as fine-tuning leaves it."""
    side = min(m, n)
    U = torch.linalg.qr(torch.randn(m, side, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, side, generator=generator, dtype=torch.float64)).Q
    i = torch.arange(1, side + 1)
    return (U * i**-0.7 * torch.exp(-1.5 * i / side)) @ V.T


@pytest.fixture(scope="module")
def states():
    generator = torch.Generator().manual_seed(0)
    base = {k: 0.02 * torch.randn(s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}
    models = [{k: W + vector(*W.shape, generator) for k, W in base.items()} for _ in range(TASKS)]
    g = {k: torch.randn(TASKS, 60, 2, s[0], generator=generator).double() for k, s in SHAPES.items()}
    x = {k: torch.randn(TASKS, 60, 2, s[1], generator=generator).double() for k, s in SHAPES.items()}
    decay = {size: torch.arange(1, size + 1).double() ** -0.5 for size in {d for s in SHAPES.values() for d in s}}
    g = {k: v * decay[v.shape[-1]] for k, v in g.items()}
    x = {k: v * decay[v.shape[-1]] for k, v in x.items()}
    curvature = {"diagonal": [], "kronecker": [], "samples": []}
    for t in range(TASKS):
        grads = {k: torch.einsum("ntm,ntk->nmk", g[k][t], x[k][t]) for k in SHAPES}
        curvature["diagonal"].append({k: epimer.Diagonal(s.square().mean(0)) for k, s in grads.items()})
        flat = {k: (g[k][t].flatten(0, 1), x[k][t].flatten(0, 1)) for k in SHAPES}
        curvature["kronecker"].append(
            {k: epimer.Kronecker(G=a.T @ a / len(a), A=b.T @ b / len(b)) for k, (a, b) in flat.items()}
        )
        curvature["samples"].append({k: epimer.Samples(g=g[k][t], x=x[k][t]) for k in SHAPES})
    return base, models, curvature


def narrow(state):
    return {k: v.float() for k, v in state.items()}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tsv", {}),
        ("tsv", {"coefficients": "projected"}),
        ("iso_c", {}),
        ("epimer", {}),
        ("epimer", {"projection_tol": 0}),
        ("epimer", {"basis": "tensor", "aggregator": "mean"}),
        ("epimer_kron", {}),
        ("epimer_kron", {"aggregator": "mean", "damping": 1e-2}),
        ("epimer_free", {}),
        ("epimer_exact", {}),
        ("regmean", {"damping": 1e-2}),
        ("wudi", {}),
    ],
)
def test_float32_merges_agree_with_float64(monkeypatch, states, name, given):
    base, models, curvature = states
    monkeypatch.setattr("epimer.geometry.diagonal.CHEAP", 0)  # take the low-rank start of a diagonal solve
    kind = epimer.describe_method(name).curvature
    parameters = {p.name for p in epimer.describe_method(name).parameters}
    given = given | ({"rank": RANK} if "rank" in parameters else {}) | {"curvature": curvature.get(kind)}
    exact = epimer.merge_state_dicts(base, models, name, **given)
    fast = epimer.merge_state_dicts(narrow(base), [narrow(m) for m in models], name, **given)
    for k in SHAPES:
        assert close(fast[k].double() - base[k], exact[k] - base[k], 2e-3)
        assert fast.record.tensors[k].status in ("exact", "converged")
        assert exact.record.tensors[k].status in ("exact", "converged")
