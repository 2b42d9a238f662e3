"""How task vectors are aggregated: by their Fréchet mean, by T times it, or by a damped step from an anchor.

The third factor of a method, after its subspace and its metric; each takes the problem that these two pose and returns
the merged task vector, of the layer's shape. Damping ε is counted in mean diagonals of curvature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epimer.geometry.frechet import Problem
from epimer.geometry.linalg import top_svd, weighted_sum
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Tagged


def mean(problem: Problem, damping: float = 0.0) -> Solution:
    """Return the Fréchet mean x* = (Σ λ_t H̃_t)⁻¹ Σ λ_t H̃_t x_t with ε added to every H̃_t."""
    solution = problem.damped(damping).mean()
    return replace(solution, value=problem.subspace.lift(solution.value))


def summed(problem: Problem, damping: float = 0.0) -> Solution:
    """Return T x*, T times the Fréchet mean, as task arithmetic adds task vectors up."""
    solution = mean(problem, damping)
    return replace(solution, value=len(problem.points) * solution.value)


def anchored(problem: Problem, anchor: Tensor, damping: float) -> Solution:
    """Return x_a + (H̄ + εI)⁻¹ Σ λ_t H̃_t (x_t - x_a): directions without curvature stay at the anchor x_a."""
    solution = problem.solve(anchor, damping * problem.mean_unit)
    return replace(solution, value=problem.subspace.lift(solution.value))


def tsv_delta(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return the merge of TSV-M's authors: U diag(T λ_owner σ) Vᵀ."""
    owned = torch.tensor(weights, dtype=atoms.sigma.dtype, device=atoms.sigma.device)[atoms.owner]
    return atoms.lift_atoms(len(weights) * owned * atoms.sigma)


def iso_c_delta(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the merge of Iso-C: the sum of task vectors with every singular value replaced by their mean."""
    side = min(deltas[0].shape)
    U, sigma, V = top_svd(len(deltas) * weighted_sum(deltas, weights), side)
    return sigma.sum() / side * (U @ V.T)
