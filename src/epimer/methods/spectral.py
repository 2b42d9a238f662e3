"""Methods that act on singular vectors and ignore curvature: TSV-M, Iso-C, Iso-CTS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from epimer.geometry.aggregator import iso_c_with_rank, tsv_delta
from epimer.geometry.linalg import Delta, polar, rounding_share, weighted_sum
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import CROWDED_TOLERANCE, Tagged, atoms_of, clamp_rank, tagged
from epimer.geometry.svd import Svd, top_svd, top_svds
from epimer.methods import workspace
from epimer.methods.options import MethodOptions, Option
from epimer.methods.registry import Layer, Method
from epimer.records import Status


@dataclass(frozen=True, kw_only=True)
class TsvOptions(MethodOptions):
    """Options of tsv."""

    rank: Annotated[int | None, Option("directions kept per task; None is floor(min(m, n) / T)", low=1)] = None
    coefficients: Annotated[
        Literal["sigma", "projected"], Option("sigma: the authors' algorithm; projected: the flat limit of epimer")
    ] = "sigma"
    near_copies: Annotated[
        Literal["regularized", "as_published"],
        Option(
            "models with a cosine above 0.98. regularized: directions in which they differ are shortened; "
            "as_published: the authors' algorithm, which gives these directions full length"
        ),
    ] = "regularized"


@dataclass(frozen=True, kw_only=True)
class IsoCtsOptions(MethodOptions):
    """Options of iso_cts."""

    common: Annotated[float, Option("share of directions taken from the sum", low=0, high=1)] = 0.8


def clamped(layer: Layer) -> Solution:
    """Return the average of a layer too small to give every task a direction, with a note of that."""
    note = f"{min(layer.shape)} directions cannot be shared by {len(layer.deltas)} tasks: averaged"
    return Solution(weighted_sum(layer.deltas, layer.weights), Status.CLAMPED, rank=0, note=note)


def rank_note(wanted: int | None, rank: int) -> str:
    """Return the note on a rank that had to be lowered; nothing where it had not."""
    return "" if wanted is None or wanted <= rank else f"rank {wanted} lowered to {rank}"


def basis_note(atoms: Tagged, wanted: int | None, rank: int) -> str:
    """Return the notes on a basis: a lowered rank, and near-copies that were regularised."""
    notes = [rank_note(wanted, rank)]
    if atoms.near_copies:
        notes.append(f"near-copies regularized, pairs of models: {len(atoms.near_copies)}")
    return "; ".join(note for note in notes if note)


def tsv(layer: Layer, options: TsvOptions) -> Solution:
    """Put each task's singular values on the whitened atoms, or each atom's share of all task vectors."""
    if layer.basis is not None and options.coefficients == "sigma":  # a projection is on atoms of the method's own rank
        atoms, rank, note = atoms_of(layer.basis), layer.basis.rank, ""
    else:
        rank = clamp_rank(layer.shape, len(layer.deltas), options.rank)
        if rank == 0:
            return clamped(layer)
        # Atoms that were computed beforehand are never regularised: near-copies are left to this function.
        atoms = layer.atoms or tagged(layer.deltas, rank, regularize=options.near_copies == "regularized")
        note = basis_note(atoms, options.rank, rank)
    if options.coefficients == "sigma":
        delta = tsv_delta(atoms, layer.weights)
    else:
        delta = len(layer.deltas) * atoms.lift(atoms.project(weighted_sum(layer.deltas, layer.weights)))
    return Solution(delta, rank=rank, note=note)


def directions(options: TsvOptions, shape: Sequence[int], tasks: int) -> int:
    """Return how many singular vectors of each model TSV-M begins with."""
    return clamp_rank(shape, tasks, options.rank)


def iso_c(layer: Layer, options: MethodOptions) -> Solution:
    """Give the sum of task vectors one singular value, the mean of its own."""
    side = min(layer.shape)
    delta, rank = iso_c_with_rank(layer.deltas, layer.weights, side)
    return Solution(delta, note=_left_out(side - rank, side, layer.deltas[0]))


def _left_out(missing: int, side: int, like: Delta) -> str:
    """Return the note on directions without a length, each of which counts as much as any other to a merge."""
    if not missing:
        return ""
    limit = f"{rounding_share(like):.0e} of the largest singular value"
    return f"{missing} of {side} directions are below {limit}, so rounding: left out"


def _beyond(common: Svd, D: Tensor, rank: int, inputs: int) -> Svd:
    """Return the leading triples of a task vector without its part in the common outputs, rounding apart."""
    shared = common.U @ (common.U.T @ D) if inputs else (D @ common.V) @ common.V.T
    [(U, sigma, V)], _ = top_svds([D - shared], rank, CROWDED_TOLERANCE)
    kept = sigma > rounding_share(D) * float(torch.linalg.vector_norm(D, dtype=torch.float64))
    return Svd(U[:, kept], sigma[kept], V[:, kept])


def iso_cts(layer: Layer, options: IsoCtsOptions) -> Solution:
    """Keep the top directions of the sum, fill up with each task's own, whiten both sides, equalise."""
    tasks, side = len(layer.deltas), min(layer.shape)
    own = min(round((side - int(side * options.common)) / tasks), side // tasks)  # directions of each task
    summed = [tasks * w * D for w, D in zip(layer.weights, layer.deltas, strict=True)]
    common = top_svd(weighted_sum(summed, [1.0] * tasks), side - own * tasks)
    triples = [common, *(_beyond(common, D, own, layer.inputs) for D in summed if own)]
    U_mp, V_np = (polar(torch.cat([triple[side] for triple in triples], dim=1)).factor for side in (0, 2))
    level = torch.cat([triple.sigma for triple in triples]).sum() / side
    note = _left_out(side - U_mp.shape[1], side, summed[0])
    return Solution(level * (U_mp @ V_np.T).to(level.dtype), note=note)


METHODS: tuple[Method, ...] = (
    Method(
        name="tsv",
        summary="TSV-M: top singular vectors of every task, whitened against interference",
        equation="θ = θ0 + α U⊥ diag(T λ_owner σ) V⊥ᵀ (sigma) or α T Σ λ_t S Sᵀ D_t (projected)",
        citation="Gargiulo et al., Task Singular Vectors, CVPR 2025",
        merge=tsv,
        options=TsvOptions(),
        workspace=workspace.tsv,
        directions=directions,
        factored=True,
        equivariant=True,
        sweep=True,
        forecast=True,
        counts_models=True,
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    Method(
        name="iso_c",
        summary="Iso-C: the sum of task vectors with all its singular values made equal",
        equation="θ = θ0 + α mean(σ) U Vᵀ of the SVD of Σ D_t",
        citation="Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
        merge=iso_c,
        options=MethodOptions(),
        workspace=workspace.iso_c,
        factored=True,
        equivariant=True,
        sweep=True,
        counts_models=True,
        laws=frozenset({"permutation", "scale_zero"}),
    ),
    Method(
        name="iso_cts",
        summary="Iso-CTS: common directions of the sum, filled up with task-specific ones, made equal",
        equation="θ = θ0 + α mean(σ) U⊥ V⊥ᵀ over common and task-specific directions",
        citation="Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
        merge=iso_cts,
        options=IsoCtsOptions(),
        workspace=workspace.iso_cts,
        equivariant=True,
        counts_models=True,
        laws=frozenset({"permutation", "scale_zero"}),
    ),
)
