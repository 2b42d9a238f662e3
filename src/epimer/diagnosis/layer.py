"""One matrix before it is merged: the theory, how its task vectors stand to each other, what merges would lose.

All of it comes from sums that add up over layers (`Sums`), so that a model is diagnosed in one pass, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from epimer.geometry.decompositions import pinv
from epimer.geometry.frechet import build_problem
from epimer.geometry.linalg import chunks, dense
from epimer.geometry.metric import EKFAC, Kronecker, Metric, TaskGram
from epimer.geometry.subspace import Tagged, tagged_with_triples, tensor_product, whiten
from epimer.geometry.svd import Svd
from epimer.geometry.theory import SubspaceTheory, merge_polynomials, merge_theory
from epimer.methods.frechet import FrechetOptions
from epimer.methods.registry import Layer, describe_method
from epimer.records import Conflict, LayerDiagnosis, LayerFindings, MergeTheory

RANKS = (2, 4, 8, 16, 32, 64, 128)
OTHER_SCALES = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0, 3.0, 4.0)
"""scales beside 1 at which a merge that is not proportional to its scale is made and forecast"""


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
    """D_tᵀ H_t D_t, forms x T"""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """rank -> energy of each task in the span of all pairs u_i v_jᵀ"""
    steps: dict[str, Tensor] = field(default_factory=dict)
    """method -> xᵀH_tx and xᵀH_tD_t of its merge x: 2 x forms x T"""
    rescaled: dict[tuple[str, float], Tensor] = field(default_factory=dict)
    """method and scale -> the same of its merge at that scale, where it is not proportional to scale"""
    merges: dict[tuple[str, float], Tensor] = field(default_factory=dict)
    """method and scale, 1 and those of `rescaled` -> the `merge_polynomials` of its merge at that scale: 3 x 3"""
    eta: dict[int, Tensor] = field(default_factory=dict)
    """rank -> η, η at unit trace, F(x̄); of the last rank alone where no curvature was measured"""

    def __add__(self, other: Sums) -> Sums:
        always = ("inner", "agree", "both", "left", "right", "weight", "base")
        total: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in always}
        for name in ("interference", "own"):
            one, two = getattr(self, name), getattr(other, name)
            total[name] = None if one is None or two is None else one + two
        for name in ("steps", "rescaled", "merges", "kept", "eta"):
            one, two = getattr(self, name), getattr(other, name)
            total[name] = {k: value + two[k] for k, value in one.items() if k in two}
        return Sums(**total)

    def to(self, device: torch.device) -> Sums:
        """Return the sums with all tensors on a device."""
        moved: dict[str, Any] = {
            part.name: {key: one.to(device) for key, one in value.items()}
            if isinstance(value, dict)
            else value.to(device)
            for part in fields(self)
            if isinstance(value := getattr(self, part.name), dict | Tensor)
        }
        return replace(self, **moved)

    def lost(self, method: str, scale: float = 1.0) -> Tensor:
        """Return the share of each task's gain that a merge is forecast to lose, at a multiple of its scale.

        For a form H it is ‖s x - D_t‖² / ‖D_t‖² in the norm of H; for two of them the square of the mean distance.
        """
        assert self.own is not None
        if (method, scale) in self.rescaled:
            xx, xd = self.rescaled[method, scale]
            scale = 1.0
        else:
            xx, xd = self.steps[method]
        squares = (scale**2 * xx - 2 * scale * xd + self.own).clamp_min(0)
        return share(squares, self.own, empty=0.0).sqrt().mean(0).square()

    def theory(self, method: str, scale: float = 1.0) -> MergeTheory:
        """Return the theory at a merge, at a multiple of its scale."""
        if (method, scale) in self.merges:
            return replace(merge_theory(self.merges[method, scale], 1.0), scale=scale)
        return merge_theory(self.merges[method, 1.0], scale)


@dataclass(frozen=True)
class Question:
    """What to find out about each matrix."""

    rank: int | None
    damping: float
    methods: Mapping[str, Mapping[str, object]]
    """merges to forecast: method -> its parameters"""

    @property
    def ranks(self) -> list[int]:
        """Ranks at which η and the energy kept are found, the same in all layers: 2, 4, 8, … and the one asked for."""
        return list(RANKS) if self.rank is None else [*(k for k in RANKS if k < self.rank), self.rank]


def examine(layer: Layer, base: Tensor, rank: int, question: Question) -> tuple[LayerFindings, Sums]:
    """Find out all about one matrix, m x n as its base is; `layer.basis` is what projected curvature is known in."""
    deltas, metrics, fixed = layer.deltas, layer.metrics, layer.basis
    assert fixed is None or isinstance(fixed, Tagged)
    atoms, triples = tagged_with_triples(deltas, rank) if fixed is None else (fixed, None)
    on_atoms = SubspaceTheory(atoms, metrics, deltas, layer.weights)
    theory = on_atoms.at_mean(question.damping, rank)
    sums = _compared(base, deltas, triples)
    sums.eta = _eta_by_rank(layer, theory, triples, rank, question)
    sums.kept = _kept(atoms, triples, deltas, [(k, min(k, rank)) for k in question.ranks])
    if triples is not None:  # else nothing is known outside the basis
        sums.interference = _interference(deltas, metrics, triples)
        _add_forecasts(sums, layer, on_atoms, atoms, triples, question)
    energy = sums.inner.diagonal()
    return LayerFindings(
        shape=tuple(base.shape),
        theory=theory,
        norms=floats(energy.clamp_min(0).sqrt()),
        base_norm=sums.base**0.5,
        energy={str(k): floats(share(kept, energy)) for k, kept in sums.kept.items()},
        forecast={method: floats(sums.lost(method)) for method in sums.steps},
        conflict=conflict_of(sums),
        merges={method: sums.theory(method) for method in sums.steps},
    ), sums


def _without_data(metrics: Sequence[Metric]) -> bool:
    return all(isinstance(H, TaskGram) for H in metrics)


def _eta_by_rank(
    layer: Layer, theory: LayerDiagnosis, triples: Sequence[Svd] | None, rank: int, question: Question
) -> dict[int, Tensor]:
    """Return `Sums.eta`; `theory` is that at `rank`."""
    eta_by_rank: dict[int, Tensor] = {}
    for k in question.ranks:
        least = min(k, rank)  # a narrow layer has no more directions to give
        if least == rank or triples is None:
            eta_by_rank[k] = _vector([theory.eta, theory.eta_unit_trace, theory.flat_objective])
        elif not _without_data(layer.metrics):
            subspace = whiten(triples, least)[0]
            problem = build_problem(subspace, layer.metrics, layer.deltas, layer.weights).damped(question.damping)
            eta, flat = problem.mean().eta or 0.0, problem.flat_mean()
            eta_by_rank[k] = _vector([eta, eta / max(1, flat.numel()), problem.objective(flat)])
    return eta_by_rank


def _add_forecasts(
    sums: Sums, layer: Layer, on_atoms: SubspaceTheory, atoms: Tagged, triples: Sequence[Svd], question: Question
) -> None:
    """Make every merge to be forecast, and add to the sums what it loses of each task, and its theory."""
    deltas, metrics, free = layer.deltas, layer.metrics, _without_data(layer.metrics)
    forms = _forecasters(metrics, triples)
    own = [[H(D, D)[0] for H, D in zip(form, deltas, strict=True)] for form in forms]
    sums.own = torch.tensor(own, dtype=torch.float64)
    # curvature that is no form of the forecast is applied for the theory alone; without any, task-gram of the
    # leading directions stands for it, which all pairs of singular vectors contain
    extra = [] if free or len(forms) > 1 else metrics
    energies = own[-1] if not extra else [H.energy(D) for H, D in zip(extra, deltas, strict=True)]
    pairs = [] if free else [SubspaceTheory(tensor_product(atoms), metrics, deltas, layer.weights)]

    def step(method: str, scale: float = 1.0) -> Tensor:
        x = _merged(layer, atoms, method, question.methods[method], scale)
        found = [[H(x, D) for H, D in zip(form, deltas, strict=True)] for form in forms]
        products = [H.products(x, D) for H, D in zip(extra, deltas, strict=False)] or found[-1]
        sums.merges[method, scale] = merge_polynomials(x, products, energies, layer.weights, [on_atoms, *pairs])
        return torch.tensor(found, dtype=torch.float64).permute(2, 0, 1)

    for method in question.methods:
        sums.steps[method] = step(method)
        if not describe_method(method).linear_in_scale:
            sums.rescaled |= {(method, scale): step(method, scale) for scale in OTHER_SCALES}


Products = Callable[[Tensor, Tensor], list[float]]
"""(x, D) -> xᵀHx and xᵀHD"""


def _forecasters(metrics: Sequence[Metric], triples: Sequence[Svd]) -> list[list[Products]]:
    """Return the forms that a forecast is taken in: task-gram, and two-sided curvature where it was measured.

    Task-gram is that of the leading directions, in which nearly all of a form in σ_i²σ_j² lies; it costs a fraction.
    A diagonal ranks merges backwards (docs/diagnosis.md), so it is never one of them.
    """

    def gram(triple: Svd) -> Products:
        U, sigma, V = triple
        weight = sigma.double()[:, None] * sigma.double()
        along_D = sigma.double().diag() * weight

        def products(x: Tensor, D: Tensor) -> list[float]:
            along_x = (U.T @ x @ V).double() * weight
            return [float((along_x * along).sum()) for along in (along_x, along_D)]

        return products

    forms = [[gram(triple) for triple in triples]]
    if all(isinstance(H, Kronecker | EKFAC) for H in metrics):
        forms.append([H.products for H in metrics])
    return forms


def share(part: Tensor, whole: Tensor, empty: float = 1.0) -> Tensor:
    """Return part / whole; `empty` where there is nothing to take a part of."""
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), torch.full_like(part, empty))


def _kept(
    atoms: Tagged, triples: Sequence[Svd] | None, deltas: Sequence[Tensor], ranks: Sequence[tuple[int, int]]
) -> dict[int, Tensor]:
    """Return the energy of every task in the span of all pairs u_i v_jᵀ, by rank.

    All ranks share the products UᵀDV of the stacked singular vectors; a rank takes the leading ones of each task, and
    the Gram matrices of those undo that they are not orthonormal: tr(G_U⁺ C G_V⁺ Cᵀ).
    """
    if triples is None:
        whole = tensor_product(atoms)
        kept = _vector([float(whole.project(D).square().sum()) for D in deltas])
        return dict.fromkeys((k for k, _ in ranks), kept)
    U, V = (torch.cat([triple[side] for triple in triples], 1) for side in (0, 2))
    order = torch.cat([torch.arange(len(triple.sigma)) for triple in triples])
    cores = [(U.T @ D @ V).double().cpu() for D in deltas]
    grams = [(X.T @ X).double().cpu() for X in (U, V)]
    kept_by_rank: dict[int, Tensor] = {}
    for k, least in ranks:
        some = (order < least).nonzero().flatten()
        left, right = (pinv(gram[some][:, some], 1e-6) for gram in grams)
        parts = [core[some][:, some] for core in cores]
        kept_by_rank[k] = _vector([float(((left @ part @ right) * part).sum()) for part in parts])
    return kept_by_rank


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


def _merged(layer: Layer, atoms: Tagged, method: str, parameters: Mapping[str, object], scale: float) -> Tensor:
    """Return what a method would merge this matrix into at a multiple of its scale, on the basis already built."""
    row = describe_method(method)
    options = row.resolve(dict(parameters))
    options = replace(options, scale=scale * options.scale)
    shape = options.basis if isinstance(options, FrechetOptions) else "tagged"
    basis = None if shape == "full" else atoms if shape == "tagged" else tensor_product(atoms)
    return options.scale * dense(row.merge(replace(layer, basis=basis), options).value)


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(values: Tensor) -> tuple[float, ...]:
    """Return plain numbers."""
    return tuple(float(value) for value in values)


def conflict_of(sums: Sums) -> Conflict:
    """Return how the task vectors of one layer, or of all, stand to each other."""
    norms = sums.inner.diagonal().clamp_min(0).sqrt()
    crossed = torch.zeros_like(sums.inner) if sums.interference is None else sums.interference
    return Conflict(
        cosine=_matrix(share(sums.inner, norms[:, None] * norms[None, :], empty=0.0).clamp(-1, 1)),
        sign=_matrix(share(sums.agree, sums.both, empty=0.0)),
        left=_matrix(share(sums.left, sums.weight, empty=0.0)),
        right=_matrix(share(sums.right, sums.weight, empty=0.0)),
        interference=_matrix(share(crossed, crossed.diagonal()[None, :].expand_as(crossed), empty=0.0)),
    )


def _matrix(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(floats(row) for row in values)
