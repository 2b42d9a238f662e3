"""The paper's theory of a merge, computed before it: η, V_S, R_S, the bound, the energy a basis keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epimer.geometry.diagonal import TaggedDiagonal
from epimer.geometry.frechet import build_problem
from epimer.geometry.metric import Metric, Projected
from epimer.geometry.operator import Dense, SubspaceOperator
from epimer.geometry.subspace import Subspace, Tagged
from epimer.records import LayerDiagnosis


def diagnose_layer(
    subspace: Subspace,
    metrics: Sequence[Metric],
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    *,
    damping: float,
    rank: int | None,
) -> LayerDiagnosis:
    """Return the theory of one layer on a tagged basis, at the damped, trace-normalised Fréchet mean x*."""
    problem = build_problem(subspace, metrics, deltas, weights).damped(damping)
    raw = replace(problem, scales=[1.0] * len(deltas), shifts=[0.0] * len(deltas))
    solution = problem.mean()
    x = solution.value
    v_s = raw.objective(x)
    r_s = residual_energy(subspace, metrics, deltas, weights, problem.points)
    energies = [float(D.double().square().sum()) for D in deltas]
    kept = [float(point.square().sum()) for point in problem.points]
    energy_kept, energy_kept_by_task = _energy_kept(kept, energies, weights)
    spectrum = _spectrum(problem.mean_operator, x.numel())
    lowest, highest = (float(spectrum[i]) + problem.mean_shift for i in (0, -1))
    return LayerDiagnosis(
        eta=solution.eta or 0.0,
        eta_unit_trace=(solution.eta or 0.0) / max(1, x.numel()),
        flat_objective=problem.objective(problem.flat_mean()),
        v_s=v_s,
        v_s_solve=problem.objective(x),
        r_s=r_s,
        bound=bound(v_s, r_s),
        energy_kept=energy_kept,
        energy_kept_by_task=energy_kept_by_task,
        condition=highest / lowest if lowest > 0 else math.inf,
        damped=int((spectrum < damping).sum()),
        rank=rank,
    )


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
        return torch.linalg.eigvalsh(operator.H).clamp_min(0)
    basis = torch.eye(dimension, dtype=torch.float64)
    return torch.linalg.eigvalsh(torch.stack([operator.apply(column) for column in basis]))
