"""One matrix before it is merged: the theory, how its task vectors stand to each other, what merges would lose.

All of it comes from sums that add up over layers (`Sums`), so that a model is diagnosed in one pass, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epimer.geometry.frechet import pose, weighted_sum
from epimer.geometry.linalg import Svd, chunks
from epimer.geometry.metric import Kronecker, Metric, TaskGram
from epimer.geometry.subspace import Subspace, Tagged, pairs, tagged_with_triples, whitened
from epimer.geometry.theory import diagnose_layer
from epimer.methods.registry import Layer, describe_method
from epimer.methods.spectral import tsv_delta
from epimer.records import LayerFindings

RANKS = (2, 4, 8, 16, 32, 64, 128)


@dataclass
class Sums:
    """What adds up over layers."""

    inner: Tensor
    """⟨D_s, D_t⟩"""
    agree: Tensor
    """entries in which both tasks moved in the same direction"""
    both: Tensor
    """entries in which both moved"""
    left: Tensor
    right: Tensor
    """overlap of singular subspaces, weighted by `weight`"""
    weight: Tensor
    """‖D_s‖‖D_t‖"""
    base: float
    """‖W0‖²"""
    interference: Tensor | None = None
    """D_sᵀ H_t D_s"""
    own: Tensor | None = None
    """D_tᵀ H_t D_t, which forecasts are a share of"""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """rank -> energy of each task that the basis keeps"""
    lost: dict[str, Tensor] = field(default_factory=dict)
    """method -> (x - D_t)ᵀ H_t (x - D_t)"""
    eta: dict[int, Tensor] = field(default_factory=dict)
    """rank -> η, η at unit trace, F(x̄)"""

    def __add__(self, other: Sums) -> Sums:
        always = ("inner", "agree", "both", "left", "right", "weight", "base")
        found: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in always}
        for name in ("interference", "own"):
            one, two = getattr(self, name), getattr(other, name)
            found[name] = None if one is None or two is None else one + two
        found["lost"] = {name: lost + other.lost[name] for name, lost in self.lost.items() if name in other.lost}
        found["kept"] = {k: self.kept_at(k) + other.kept_at(k) for k in {**self.kept, **other.kept}}
        found["eta"] = {k: self.eta_at(k) + other.eta_at(k) for k in {**self.eta, **other.eta}}
        return Sums(**found)

    def kept_at(self, k: int) -> Tensor:
        """Return the energy kept at a rank; a narrow layer keeps what it does at its own largest."""
        return self.kept[min(k, max(self.kept))]

    def eta_at(self, k: int) -> Tensor:
        """Return η at a rank, or at the layer's largest."""
        return self.eta[min(k, max(self.eta))]


@dataclass(frozen=True)
class Question:
    """What to find out about each matrix."""

    rank: int | None
    damping: float
    methods: Mapping[str, Mapping[str, object]]
    """merges to forecast: method -> its parameters"""
    by_rank: bool = True
    """also η and the energy kept at ranks 2, 4, 8, …"""


def examine(
    name: str,
    base: Tensor,
    deltas: Sequence[Tensor],
    metrics: Sequence[Metric],
    weights: Sequence[float],
    rank: int,
    ask: Question,
    fixed: Tagged | None = None,
) -> tuple[LayerFindings, Sums]:
    """Find out all about one matrix: m x n base, T task vectors, each task's curvature.

    `fixed` is the basis that projected curvature is known in.
    """
    atoms, triples = tagged_with_triples(deltas, rank) if fixed is None else (fixed, None)
    theory = diagnose_layer(atoms, metrics, deltas, weights, damping=ask.damping, rank=rank)
    sums = _compared(base, deltas, triples)
    energy = sums.inner.diagonal()
    ranks = sorted({*(k for k in RANKS if k < rank), rank}) if ask.by_rank and triples is not None else [rank]
    for k in ranks:
        some: Subspace = atoms if k == rank or triples is None else whitened(triples, k)[0]
        sums.kept[k] = _vector([float(some.project(D).square().sum()) for D in deltas])
        if k == rank:
            sums.eta[k] = _vector([theory.eta, theory.eta_unit_trace, theory.flat_objective])
        else:
            problem = pose(some, metrics, deltas, weights, damping=ask.damping)
            eta, flat = problem.mean().eta or 0.0, problem.flat_mean()
            sums.eta[k] = _vector([eta, eta / max(1, flat.numel()), problem.objective(flat)])
    if triples is not None:  # else nothing is known outside the basis
        sums.interference = _interference(deltas, metrics, triples)
        sums.own = _vector([H.energy(D) for H, D in zip(metrics, deltas, strict=True)])
        for method, parameters in ask.methods.items():
            x = _merged(method, parameters, name, deltas, metrics, weights, atoms)
            sums.lost[method] = _vector([H.energy(x - D) for H, D in zip(metrics, deltas, strict=True)])
    found = LayerFindings(
        shape=tuple(base.shape),
        theory=theory,
        norms=_floats(energy.clamp_min(0).sqrt()),
        base_norm=sums.base**0.5,
        energy={str(k): _floats(share(kept, energy)) for k, kept in sums.kept.items()},
        forecast={
            method: _floats(share(lost, sums.own, empty=0.0))
            for method, lost in sums.lost.items()
            if sums.own is not None
        },
    )
    return found, sums


def share(part: Tensor, whole: Tensor, empty: float = 1.0) -> Tensor:
    """Return part / whole; `empty` where there is nothing to take a part of."""
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), torch.full_like(part, empty))


def _compared(base: Tensor, deltas: Sequence[Tensor], triples: Sequence[Svd] | None) -> Sums:
    """Compare task vectors two by two, a piece of the matrix at a time."""
    T = len(deltas)
    inner, agree, both = (torch.zeros(T, T, dtype=torch.float64) for _ in range(3))
    for pieces in zip(*(chunks(D.reshape(-1)) for D in deltas), strict=True):
        X = torch.stack(pieces)
        inner += (X @ X.T).double().cpu()
        signs = X.sign()
        moved = signs.abs()
        counts = (moved @ moved.T).double().cpu()
        agree += ((signs @ signs.T).double().cpu() + counts) / 2
        both += counts
    norms = inner.diagonal().clamp_min(0).sqrt()
    weight = norms[:, None] * norms[None, :]
    left, right = (
        torch.zeros_like(weight) if triples is None else _overlap([triple[side] for triple in triples]) * weight
        for side in (0, 2)
    )
    return Sums(inner, agree, both, left, right, weight, float(base.double().square().sum()))


def _overlap(bases: Sequence[Tensor]) -> Tensor:
    """Return ‖U_sᵀU_t‖² / k for orthonormal bases of the tasks' subspaces."""
    sizes = [U.shape[1] for U in bases]
    stack = torch.cat(list(bases), 1)
    squares = (stack.T @ stack).double().square().cpu()
    blocks = [torch.split(rows, sizes, dim=1) for rows in torch.split(squares, sizes)]
    return torch.stack(
        [
            torch.stack([block.sum() / max(1, min(sizes[s], sizes[t])) for t, block in enumerate(row)])
            for s, row in enumerate(blocks)
        ]
    )


def _interference(deltas: Sequence[Tensor], metrics: Sequence[Metric], triples: Sequence[Svd]) -> Tensor:
    """Return D_sᵀ H_t D_s for all s, t; with two-sided curvature of every task vector's leading directions only.

    Then it costs products with k columns instead of with n: Σ_ij σ_i σ_j (UᵀGU)_ij (VᵀAV)_ij.
    """
    rows = []
    for D, (U, sigma, V) in zip(deltas, triples, strict=True):
        row = []
        for H, other in zip(metrics, triples, strict=True):
            if isinstance(H, TaskGram):  # of the rank-k part of its own task vector
                between = (other.sigma[:, None] * (other.U.T @ U) * sigma) @ ((other.V.T @ V).T * other.sigma)
                row.append(float(between.double().square().sum()))
            elif type(H) is Kronecker:
                left = U.T @ U if H.G is None else U.T @ H.G @ U
                right = V.T @ V if H.A is None else V.T @ H.A @ V
                row.append(float(sigma.double() @ (left.double() * right.double()) @ sigma.double()))
            else:
                row.append(H.energy(D))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def _merged(
    method: str,
    parameters: Mapping[str, object],
    name: str,
    deltas: Sequence[Tensor],
    metrics: Sequence[Metric],
    weights: Sequence[float],
    atoms: Tagged,
) -> Tensor:
    """Return what a method would merge this matrix into, on the basis that is there already."""
    row = describe_method(method)
    p = row.resolve(dict(parameters))
    lam = list(weights)
    if method == "average":
        return p.scale * weighted_sum(deltas, lam)
    if method == "tsv" and p.coefficients == "sigma":
        return p.scale * tsv_delta(atoms, lam)
    basis = {"tagged": lambda: atoms, "tensor": lambda: pairs(atoms)}.get(getattr(p, "basis", ""), lambda: None)()
    layer = Layer(name, list(deltas), lam, metrics=list(metrics), basis=basis)
    delta = row.merge(layer, p).delta
    return p.scale * (delta if isinstance(delta, Tensor) else delta.dense())


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
