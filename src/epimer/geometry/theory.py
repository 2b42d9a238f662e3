"""The paper's theory of a merge, computed before it: η, V_S, R_S, the bound, the energy a basis keeps.

`SubspaceTheory` has them at the Fréchet mean x*; `merge_polynomials` and `merge_theory` at any merged delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from epimer.geometry.decompositions import eigvalsh
from epimer.geometry.diagonal import TaggedDiagonal
from epimer.geometry.frechet import Problem, build_problem
from epimer.geometry.metric import Metric, Projected
from epimer.geometry.operator import Dense, SubspaceOperator
from epimer.geometry.subspace import Subspace, Tagged
from epimer.records import LayerDiagnosis, MergeTheory


@dataclass(frozen=True)
class SubspaceTheory:
    """The theory of one layer in one subspace; what is costly is computed once, when it is first asked for."""

    subspace: Subspace
    metrics: Sequence[Metric]
    deltas: Sequence[Tensor]
    weights: Sequence[float]

    @cached_property
    def problem(self) -> Problem:
        """The trace-normalised problem, not damped."""
        return build_problem(self.subspace, self.metrics, self.deltas, self.weights)

    @cached_property
    def raw(self) -> Problem:
        """The problem under the curvature as it was measured, in loss units."""
        tasks = len(self.deltas)
        return replace(self.problem, scales=[1.0] * tasks, shifts=[0.0] * tasks)

    @cached_property
    def r_s(self) -> float | None:
        """R_S; None for curvature known only inside the subspace."""
        return residual_energy(self.subspace, self.metrics, self.deltas, self.weights, self.problem.points)

    def at_mean(self, damping: float, rank: int | None) -> LayerDiagnosis:
        """Return the theory at the damped, trace-normalised Fréchet mean x*, on a tagged basis."""
        problem = self.problem.damped(damping)
        solution = problem.mean()
        x = solution.value
        v_s = self.raw.objective(x)
        energies = [float(D.double().square().sum()) for D in self.deltas]
        kept = [float(point.square().sum()) for point in problem.points]
        energy_kept, energy_kept_by_task = _energy_kept(kept, energies, self.weights)
        spectrum = _spectrum(problem.mean_operator, x.numel())
        lowest, highest = (float(spectrum[i]) + problem.mean_shift for i in (0, -1))
        return LayerDiagnosis(
            eta=solution.eta or 0.0,
            eta_unit_trace=(solution.eta or 0.0) / max(1, x.numel()),
            flat_objective=problem.objective(problem.flat_mean()),
            v_s=v_s,
            v_s_solve=problem.objective(x),
            r_s=self.r_s,
            bound=bound(v_s, self.r_s),
            energy_kept=energy_kept,
            energy_kept_by_task=energy_kept_by_task,
            condition=highest / lowest if lowest > 0 else math.inf,
            damped=int((spectrum < damping).sum()),
            rank=rank,
        )

    def contains(self, x: Tensor) -> bool:
        """Return whether a merged delta lies in the subspace, up to the rounding of its precision."""
        outside = torch.linalg.vector_norm(x - self.subspace.lift(self.subspace.project(x)))
        return bool(outside <= math.sqrt(torch.finfo(x.dtype).eps) * torch.linalg.vector_norm(x))

    def variance(self, x: Tensor) -> Tensor:
        """Return V_S = Σ λ_t (s·x - x_t)ᵀ H_t (s·x - x_t) of a merged delta in the subspace, in powers of s."""
        at = self.subspace.project(x)
        images = [self.raw.product(t, at) for t in range(len(self.deltas))]
        products = [
            (float((at * image).sum()), float((point * image).sum()))
            for point, image in zip(self.raw.points, images, strict=True)
        ]
        return _polynomial(products, self._own, self.weights)

    @cached_property
    def _own(self) -> list[float]:
        """x_tᵀ H_t x_t."""
        return [float((point * self.raw.product(t, point)).sum()) for t, point in enumerate(self.raw.points)]


def merge_polynomials(
    x: Tensor,
    products: Sequence[Sequence[float]],
    own: Sequence[float],
    weights: Sequence[float],
    subspaces: Sequence[SubspaceTheory],
) -> Tensor:
    """Return Σ λ_t (s·x - D_t)ᵀ H_t (s·x - D_t), V_S and R_S of a merged delta x in powers of s: 3 x (1, s, s²).

    V_S and R_S are those of the first subspace that x lies in. A merge that lies in none is one in the full space,
    where V_S is the quadratic itself and R_S = 0. The polynomials of several layers add up.

    Args:
        x: the merged delta, m x n.
        products: xᵀ H_t x and xᵀ H_t D_t of every task.
        own: D_tᵀ H_t D_t of every task.
        weights: λ_t.
        subspaces: the smallest first.
    """
    quadratic = _polynomial(products, own, weights)
    home = next((theory for theory in subspaces if theory.contains(x)), None)
    v_s, r_s = (quadratic, 0.0) if home is None else (home.variance(x), home.r_s or 0.0)
    return torch.stack((quadratic, v_s, torch.tensor([r_s, 0.0, 0.0], dtype=torch.float64)))


def merge_theory(polynomials: Tensor, scale: float) -> MergeTheory:
    """Return the theory at `scale` times a merged delta, from one layer's `merge_polynomials` or their sum."""
    powers = torch.tensor([1.0, scale, scale**2], dtype=torch.float64)
    quadratic, v_s, r_s = (polynomials @ powers).clamp_min(0).tolist()
    return MergeTheory(scale, quadratic, v_s, r_s, bound(v_s, r_s) or 0.0)


def _polynomial(products: Sequence[Sequence[float]], own: Sequence[float], weights: Sequence[float]) -> Tensor:
    """Return Σ λ_t (own_t - 2s xᵀH_tD_t + s² xᵀH_tx) in powers of s."""
    parts = [(dd, -2 * xd, xx) for dd, (xx, xd) in zip(own, products, strict=True)]
    return torch.tensor(list(weights), dtype=torch.float64) @ torch.tensor(parts, dtype=torch.float64)


def residual_energy(
    subspace: Subspace,
    metrics: Sequence[Metric],
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    points: Sequence[Tensor] | None = None,
) -> float | None:
    """Return R_S = Σ λ_t d⊥ᵀ H_t d⊥ with d⊥ = (I - SSᵀ) D_t; None for curvature known only inside the basis."""
    if any(isinstance(metric, Projected) for metric in metrics):
        return None
    total = 0.0
    inside = [subspace.project(D) for D in deltas] if points is None else points
    for D, metric, weight, x in zip(deltas, metrics, weights, inside, strict=True):
        if isinstance(subspace, Tagged):
            c = x if subspace.mix is None else subspace.mix @ x
            total += weight * metric.energy_outside(D, c, subspace)
        else:
            total += weight * metric.energy(D - subspace.lift(x))
    return total


def bound(v_s: float, r_s: float | None) -> float | None:
    """Return ½(√V_S + √R_S)², which bounds Σ λ_t [L_t(merged) - L_t(θ_t)] to second order."""
    return None if r_s is None else 0.5 * (math.sqrt(max(0.0, v_s)) + math.sqrt(r_s)) ** 2


def total(
    layers: Sequence[LayerDiagnosis], energies: Sequence[Sequence[float]], weights: Sequence[float]
) -> LayerDiagnosis:
    """Return the sum over layers, the model's diagnosis: curvature is block-diagonal, so its terms add up.

    `energies` holds ‖D_t‖² per layer and task.
    """
    v_s = sum(layer.v_s for layer in layers)
    known = [layer.r_s for layer in layers if layer.r_s is not None]
    r_s = sum(known) if len(known) == len(layers) else None
    kept = [
        sum(layer.energy_kept_by_task[t] * energy[t] for layer, energy in zip(layers, energies, strict=True))
        for t in range(len(weights))
    ]
    whole = [sum(energy[t] for energy in energies) for t in range(len(weights))]
    energy_kept, energy_kept_by_task = _energy_kept(kept, whole, weights)
    return LayerDiagnosis(
        eta=sum(layer.eta for layer in layers),
        eta_unit_trace=sum(layer.eta_unit_trace for layer in layers),
        flat_objective=sum(layer.flat_objective for layer in layers),
        v_s=v_s,
        v_s_solve=sum(layer.v_s_solve for layer in layers),
        r_s=r_s,
        bound=bound(v_s, r_s),
        energy_kept=energy_kept,
        energy_kept_by_task=energy_kept_by_task,
        condition=max((layer.condition for layer in layers), default=1.0),
        damped=sum(layer.damped for layer in layers),
        rank=None,
    )


def _energy_kept(
    kept: Sequence[float], energies: Sequence[float], weights: Sequence[float]
) -> tuple[float, tuple[float, ...]]:
    """Return the share of Σ λ_t ‖D_t‖² that a basis keeps, and that of every ‖D_t‖²."""
    total_kept, total_energy = (sum(w * e for w, e in zip(weights, each, strict=True)) for each in (kept, energies))
    pairs = zip((total_kept, *kept), (total_energy, *energies), strict=True)
    share, *by_task = (min(1.0, part / whole) if whole > 0 else 1.0 for part, whole in pairs)
    return share, tuple(by_task)


def _spectrum(operator: SubspaceOperator, dimension: int) -> Tensor:
    """Return the eigenvalues of the mean curvature on a tagged basis, lowest first."""
    if not dimension:
        return torch.ones(1, dtype=torch.float64)
    if isinstance(operator, Dense | TaggedDiagonal):
        return eigvalsh(operator.H).clamp_min(0)
    basis = torch.eye(dimension, dtype=torch.float64)
    return eigvalsh(torch.stack([operator.apply(column) for column in basis]))
