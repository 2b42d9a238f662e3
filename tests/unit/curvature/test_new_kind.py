"""A new kind of curvature, added from here: `rows`, the block of the Fisher matrix of each output row of a weight.

    H: D -> D', D'_a = B_a D_a with B_a = E[s_a s_aᵀ], s_a row a of a sample's gradient

In the package a person would touch four files:
  src/epimer/geometry/metric.py         the metric (`Rows` below): its product and its restriction to subspaces
  src/epimer/curvature/collectors.py    the collector (`RowsCollector`): what is summed over samples
  src/epimer/curvature/kinds.py         the row of KINDS, which measuring, sums, files and the command line read
  docs/curvature.md                     the tables of kinds and of the tensors on disk
"""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import epimer
from cases import cross_entropy
from epimer.curvature.collectors import Collector
from epimer.curvature.kinds import KINDS, Kind
from epimer.errors import CurvatureError, ParameterError
from epimer.geometry.metric import Metric, Samples
from epimer.geometry.subspace import Tagged
from oracle import gradients, near


@dataclass(frozen=True)
class Rows(Metric):
    B: torch.Tensor
    """[m, n, n], symmetric positive semi-definite"""
    kind = "rows"
    serves = ("ekfac",)

    def apply(self, D_mn):
        return torch.einsum("mab,mb->ma", self.B, D_mn)

    def _samples(self):
        """Return the metric as N = m·n samples: B_a = Σ_k r_ak r_akᵀ, so that s_ak has r_ak in row a."""
        m, n, _ = self.B.shape
        values, vectors = torch.linalg.eigh(self.B.double())
        r = (vectors * (m * n * values.clamp_min(0)).sqrt()[:, None]).mT.reshape(m * n, 1, n)
        rows = torch.eye(m, dtype=r.dtype).repeat_interleave(n, dim=0)[:, None]
        return Samples(g=rows.to(self.B), x=r.to(self.B))

    def on_tensor_product(self, U, V):
        return self._samples().on_tensor_product(U, V)

    def on_tagged(self, atoms, tolerance):
        return self._samples().on_tagged(atoms, tolerance)

    def to(self, device, dtype):
        return Rows(self.B.to(device, dtype))

    def problem(self, shape):
        expected = (shape[0], shape[1], shape[1])
        return None if tuple(self.B.shape) == expected else f"B must have shape {expected}, got {tuple(self.B.shape)}"


class RowsCollector(Collector):
    def add(self, name, gradients):
        outer = self.concatenated(name, gradients)
        if outer is not None:
            m, n = self.shapes[name]
            s_nmk = torch.einsum("ntm,ntk->nmk", outer.left.to(self.dtype), outer.right.to(self.dtype))
            self.total(name, m, n, n).add_(torch.einsum("nmk,nml->mkl", s_nmk, s_nmk))

    def metric(self, name, shape):
        m, n = shape
        return Rows(self.take(name, m, n, n) / self.samples)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(KINDS, "rows", Kind(Rows, RowsCollector))


class MLP(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x_ntd):
        return self.second(self.norm(self.first(x_ntd)).tanh().sum(1))


WEIGHTS = ("first.weight", "second.weight")


def data(seed=7, sizes=(20, 30)):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(N, 3, 4, generator=generator, dtype=torch.float64), torch.randint(3, (N,), generator=generator))
        for N in sizes
    ]


def measure(model, batches):
    return epimer.estimate_curvature(model, batches, cross_entropy, kind="rows", labels="true", samples=None)


def blocks(model, batches):
    """Return each weight's Fisher matrix with everything between different rows set to 0, from its definition."""
    dense = {}
    for name, s in gradients(model, batches, cross_entropy).items():
        if name in WEIGHTS:
            m, n = s.shape[1:]
            H = (s.flatten(1).T @ s.flatten(1) / len(s)).reshape(m, n, m, n)
            dense[name] = (H * torch.eye(m, dtype=H.dtype)[:, None, :, None]).reshape(m * n, m * n)
    return dense


def test_it_is_measured_as_its_definition_says():
    found, expected = measure(MLP(0), data()), blocks(MLP(0), data())
    assert found.kind == "rows"
    assert set(found) == set(WEIGHTS)
    for name, H in expected.items():
        m, n = MLP(0).get_parameter(name).shape
        assert near(torch.block_diag(*found[name].B), H)
        D = torch.randn(m, n, dtype=torch.float64)
        assert near(found[name].apply(D).flatten(), H @ D.flatten())
        U, V = (torch.linalg.qr(torch.randn(size, 3, dtype=torch.float64)).Q for size in (m, n))
        S = torch.stack([torch.outer(u, v).flatten() for u, v in zip(U.T, V.T, strict=True)], dim=1)
        x = torch.randn(3, dtype=torch.float64)
        atoms = Tagged(U, V, sigma=torch.ones(3), owner=torch.zeros(3, dtype=torch.int64))
        assert near(found[name].on_tagged(atoms, 0.0).apply(x), S.T @ H @ S @ x)
        X = torch.randn(3, 3, dtype=torch.float64)
        image = (H @ (U @ X @ V.T).flatten()).reshape(m, n)
        assert near(found[name].on_tensor_product(U, V).apply(X), U.T @ image @ V)


def test_measurements_add_up_and_go_to_disk_and_back(tmp_path):
    batches = data()
    parts = [measure(MLP(0), [batch]) for batch in batches]
    total, found = parts[0] + parts[1], measure(MLP(0), batches)
    found.save(tmp_path / "c")
    loaded = epimer.Curvature.load(tmp_path / "c")
    assert json.loads((tmp_path / "c/curvature.json").read_text())["kind"] == "rows"
    assert loaded.provenance == found.provenance
    assert loaded.nbytes == found.nbytes == 8 * (5 * 4 * 4 + 3 * 5 * 5)
    for name in WEIGHTS:
        assert torch.equal(loaded[name].B, found[name].B)
        assert near(total[name].B, found[name].B)


@pytest.mark.parametrize("method", ["mats", "epimer_kron"])
def test_a_method_merges_with_it(method, tmp_path):
    """full x rows x mean: X = (Σ H_t)⁻¹ Σ H_t W_t, through either method that takes Kronecker factors."""
    models = [MLP(1), MLP(2)]
    for t, model in enumerate(models):
        measure(model, data(t)).save(tmp_path / f"c{t}")
    curvatures = [epimer.Curvature.load(tmp_path / f"c{t}") for t in (0, 1)]
    options = {"basis": "full", "aggregator": "mean", "normalize": "none", "damping": 0.0}
    states = [model.state_dict() for model in models]
    merged = epimer.merge_state_dicts(MLP(0).state_dict(), states, method, curvature=curvatures, **options)
    H = [blocks(model, data(t)) for t, model in enumerate(models)]
    for name in WEIGHTS:
        total = sum(H_t[name] @ state[name].flatten() for H_t, state in zip(H, states, strict=True))
        expected = torch.linalg.solve(H[0][name] + H[1][name], total)
        assert near(merged[name].flatten(), expected, 1e-6), name


def test_what_it_does_not_support_is_refused_like_any_kind(tmp_path):
    base, *states = (MLP(seed).state_dict() for seed in range(3))
    basis = epimer.build_basis(base, states, rank=1, basis="tagged")
    with pytest.raises(CurvatureError, match="kind='rows' cannot be projected"):
        epimer.estimate_curvature(MLP(0), data(), cross_entropy, kind="rows", labels="true", basis=basis)
    with pytest.raises(CurvatureError, match="Rows, but fisher needs epimer"):
        epimer.merge_state_dicts(base, states, "fisher", curvature=[measure(MLP(t), data(t)) for t in (1, 2)])
    measure(MLP(0), data()).save(tmp_path / "c")
    del KINDS["rows"]
    with pytest.raises(CurvatureError, match="holds 'rows' curvature in format 2; expected format 2 and one of"):
        epimer.Curvature.load(tmp_path / "c")
    with pytest.raises(ParameterError, match="The 'kind' parameter must be one of diagonal"):
        measure(MLP(0), data())
