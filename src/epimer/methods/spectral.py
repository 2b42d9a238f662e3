"""Methods that act on singular vectors and ignore curvature: TSV-M, Iso-C, Iso-CTS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epimer.geometry.frechet import weighted_sum
from epimer.geometry.linalg import Svd, polar, top_svd
from epimer.geometry.subspace import Tagged, clamp_rank, tagged
from epimer.methods.registry import COMMON, Layer, Method, Outcome, Parameter, scale


def clamped(layer: Layer) -> Outcome:
    """Average a layer too small to give every task a direction, and say so."""
    note = f"{min(layer.deltas[0].shape)} directions cannot be shared by {len(layer.deltas)} tasks: averaged"
    return Outcome(weighted_sum(layer.deltas, layer.weights), status="clamped", rank=0, note=note)


def rank_note(asked: int | None, rank: int) -> str:
    """Say that a rank was lowered, if it was."""
    return "" if asked is None or asked <= rank else f"rank {asked} lowered to {rank}"


def tsv_delta(atoms: Tagged, weights: Sequence[float]) -> Tensor:
    """Return the TSV-M authors' merge: U diag(T λ_owner σ) Vᵀ."""
    owned = torch.tensor(weights, dtype=atoms.sigma.dtype, device=atoms.sigma.device)[atoms.owner]
    return atoms.lift_atoms(len(weights) * owned * atoms.sigma)


def tsv(layer: Layer, p: Any) -> Outcome:
    """Put each task's singular values on the whitened atoms, or each atom's share of all task vectors."""
    rank = clamp_rank(layer.deltas[0].shape, len(layer.deltas), p.rank)
    if rank == 0:
        return clamped(layer)
    atoms = tagged(layer.deltas, rank)
    if p.coefficients == "sigma":
        delta = tsv_delta(atoms, layer.weights)
    else:
        flat = weighted_sum(layer.deltas, layer.weights)
        delta = len(layer.deltas) * atoms.lift(atoms.project(flat))
    return Outcome(delta, rank=rank, note=rank_note(p.rank, rank))


def iso_c_delta(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Give the sum of task vectors one singular value, the mean of its own."""
    side = min(deltas[0].shape)
    U, sigma, V = top_svd(len(deltas) * weighted_sum(deltas, weights), side)
    return sigma.sum() / side * (U @ V.T)


def iso_c(layer: Layer, p: Any) -> Outcome:
    """Merge by Iso-C."""
    return Outcome(iso_c_delta(layer.deltas, layer.weights))


def _beyond(common: Svd, D: Tensor, rank: int) -> Svd:
    """Return the leading triples of what the common directions leave of a task vector, rounding apart."""
    U, sigma, V = top_svd(D - common.U @ (common.U.T @ D), rank)
    noise = 8 * torch.finfo(D.dtype).eps * math.sqrt(max(D.shape)) * float(torch.linalg.vector_norm(D))
    kept = sigma > noise
    return Svd(U[:, kept], sigma[kept], V[:, kept])


def iso_cts(layer: Layer, p: Any) -> Outcome:
    """Keep the top directions of the sum, fill up with each task's own, whiten both sides, equalise."""
    tasks, side = len(layer.deltas), min(layer.deltas[0].shape)
    own = min(round((side - int(side * p.common)) / tasks), side // tasks)  # directions of each task
    summed = [tasks * w * D for w, D in zip(layer.weights, layer.deltas, strict=True)]
    common = top_svd(weighted_sum(summed, [1.0] * tasks), side - own * tasks)
    triples = [common]
    if own:
        triples += [_beyond(common, D, own) for D in summed]
    U_mp = polar(torch.cat([triple.U for triple in triples], dim=1)).factor
    V_np = polar(torch.cat([triple.V for triple in triples], dim=1)).factor
    level = torch.cat([triple.sigma for triple in triples]).sum() / side
    return Outcome(level * (U_mp @ V_np.T).to(level.dtype))


METHODS = (
    Method(
        name="tsv",
        summary="TSV-M: top singular vectors of every task, whitened against interference",
        equation="θ = θ0 + α U⊥ diag(T λ_owner σ) V⊥ᵀ (sigma) or α T Σ λ_t S Sᵀ D_t (projected)",
        citation="Gargiulo et al., Task Singular Vectors, CVPR 2025",
        merge=tsv,
        parameters=(
            scale(),
            Parameter(
                "rank",
                "integer",
                None,
                "directions kept per task; None is floor(min(m, n) / T)",
                low=1,
                optional=True,
            ),
            Parameter(
                "coefficients",
                "choice",
                "sigma",
                "sigma: the authors' algorithm; projected: the flat limit of epimer",
                choices=("sigma", "projected"),
            ),
            *COMMON,
        ),
        needs_base=True,
        workspace=(0.6, 9.0),
        factored=True,
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    Method(
        name="iso_c",
        summary="Iso-C: the sum of task vectors with all its singular values made equal",
        equation="θ = θ0 + α mean(σ) U Vᵀ of the SVD of Σ D_t",
        citation="Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
        merge=iso_c,
        parameters=(scale(), *COMMON),
        needs_base=True,
        workspace=(0.0, 10.0),
        factored=True,
        laws=frozenset({"permutation", "scale_zero"}),
    ),
    Method(
        name="iso_cts",
        summary="Iso-CTS: common directions of the sum, filled up with task-specific ones, made equal",
        equation="θ = θ0 + α mean(σ) U⊥ V⊥ᵀ over common and task-specific directions",
        citation="Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
        merge=iso_cts,
        parameters=(
            scale(),
            Parameter("common", "number", 0.8, "share of directions taken from the sum", low=0, high=1),
            *COMMON,
        ),
        needs_base=True,
        workspace=(1.0, 11.0),
        laws=frozenset({"permutation", "scale_zero"}),
    ),
)
