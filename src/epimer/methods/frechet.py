"""The one equation with curvature, subspace x metric x aggregator and nothing else, and EpiMer's presets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from epimer.errors import ParameterError
from epimer.geometry.aggregator import (
    Aggregator,
    Anchored,
    Mean,
    Sum,
    calibrated,
    calibrated_coordinates,
    iso_c_delta,
    stretched_mean,
    tsv_coefficients,
    tsv_delta,
)
from epimer.geometry.frechet import Problem, build_problem
from epimer.geometry.linalg import weighted_sum
from epimer.geometry.metric import TaskGram
from epimer.geometry.solution import Solution
from epimer.geometry.stacked import StackedProblem, stacked_problem
from epimer.geometry.subspace import (
    Basis,
    Full,
    Subspace,
    Tagged,
    TensorProduct,
    atoms_of,
    clamp_rank,
    tagged,
    tensor_product,
)
from epimer.geometry.svd import Svd, top_svd
from epimer.methods import workspace
from epimer.methods.options import MethodOptions, Option
from epimer.methods.registry import Layer, Method
from epimer.methods.spectral import basis_note, clamped, rank_note

Normalize = Annotated[
    Literal["trace", "common", "none"],
    Option("trace: each task's curvature to mean diagonal 1 per layer; common: all by one number, to that on average"),
]
Anchor = Literal["stretched", "tsv", "sum", "iso_c", "average"]
Damping = Annotated[float, Option("share of the mean diagonal added to it", low=0)]
Jitter = Annotated[float, Option("added to the curvature's diagonal before it is projected", low=0)]


@dataclass(frozen=True, kw_only=True)
class FrechetOptions(MethodOptions):
    """Options of the one equation."""

    basis: Annotated[
        Literal["tagged", "tensor", "full"] | Mapping[str, Basis],
        Option("subspace: task-owned atoms, all their pairs, or everything"),
    ]
    rank: Annotated[
        int | None, Option("directions kept per task, at most floor(min(m, n) / T); None takes that many", low=1)
    ] = 32
    aggregator: Annotated[
        Literal["mean", "sum", "anchored"], Option("mean; sum = T times the mean; anchored: a damped pull to an anchor")
    ] = "mean"
    anchor: Annotated[
        Anchor | None,
        Option(
            "where directions without curvature go (aggregator anchored); stretched: the average at full length; "
            "None: tsv on tagged, else stretched"
        ),
    ] = None
    normalize: Normalize = "trace"
    damping: Damping = 1e-2
    jitter: Jitter = 0.0
    projection_tol: Annotated[
        float,
        Option(
            "share down to which a low-rank projection starts a large diagonal solve; 0 projects exactly", low=0, high=1
        ),
    ] = 1e-2
    calibrate: Annotated[
        float | None,
        Option(
            "singular value calibration: what a task counts of a direction at least, 1 or less; None: none",
            low=0,
            open_low=True,
        ),
    ] = None
    iterations: Annotated[
        int | None,
        Option(
            "conjugate-gradient steps at most, for kronecker curvature on tensor or full; None goes on until converged",
            low=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.aggregator == "anchored" and self.anchor == "iso_c" and self.calibrate is not None:
            raise ParameterError(
                "calibrate needs the singular vectors of the merge, and the anchor 'iso_c' has none, as all of its "
                "singular values are equal; set calibrate to None, or take another anchor."
            )

    def anchored_at(self, basis: str) -> Anchor | None:
        """Return the anchor on a kind of basis, if any; most of the stretched average lies outside of tagged atoms."""
        if self.aggregator != "anchored":
            return None
        return self.anchor or ("tsv" if basis == "tagged" else "stretched")

    def stays_in_subspace(self, basis: str) -> bool:
        """Return whether a merge lies in the subspace; anchors reach out of it, but tsv's, which is made of it."""
        return self.anchored_at(basis) in (None, "tsv")


def frechet(layer: Layer, options: FrechetOptions) -> Solution:
    """Return the mean, the sum or the anchored step, in the subspace that the options name."""
    shape, tasks = layer.shape, len(layer.deltas)
    rank = clamp_rank(shape, tasks, options.rank) if len(shape) == 2 else 0
    atoms = None if layer.basis is None else atoms_of(layer.basis)
    given = "tagged" if isinstance(layer.basis, Tagged) else "tensor"
    basis = options.basis if isinstance(options.basis, str) else given
    anchor = options.anchored_at(basis)
    if atoms is None and (options.basis != "full" or anchor == "tsv"):  # both are made of singular vectors
        if rank == 0:
            return clamped(layer)
        atoms = layer.atoms or tagged(layer.deltas, rank)
    problem = build_problem(
        layer.basis or _subspace(layer, options, atoms),
        layer.metrics,
        layer.deltas,
        layer.weights,
        normalize=options.normalize,
        jitter=options.jitter,
        tolerance=options.projection_tol,
        max_steps=options.iterations,
        name=layer.name,
    )
    aggregator = _aggregator(layer, options, anchor, problem.subspace, atoms)
    if options.calibrate is None or len(shape) != 2:
        solution = aggregator.aggregate(problem)
    elif isinstance(problem.subspace, TensorProduct) and options.stays_in_subspace(basis):
        solution = _solved_and_calibrated(problem, problem.subspace, aggregator, layer, options.calibrate)
    else:
        solution = aggregator.aggregate(problem)
        del problem  # a calibration needs its memory
        solution = replace(solution, value=_calibrated(solution.value, layer, options.calibrate))
    if layer.basis is not None:
        return replace(solution, rank=layer.basis.rank)
    return solution if atoms is None else replace(solution, rank=rank, note=basis_note(atoms, options.rank, rank))


def frechet_stack(layers: Sequence[Layer], options: FrechetOptions) -> list[Solution | None]:
    """Return the anchored steps of layers of one shape, solved at once where curvature has two factors a task."""
    unsolved: list[Solution | None] = [None] * len(layers)
    anchor = options.anchored_at("tensor")
    atoms = [layer.atoms for layer in layers if layer.atoms is not None and layer.atoms.mix is None]
    alike = len({layer.inputs_first for layer in layers}) == 1 and len(atoms) == len(layers)
    known = alike and all(layer.metrics and layer.deltas[0].dtype == torch.float32 for layer in layers)
    if not known or options.basis != "tensor" or anchor is None or options.jitter or options.damping <= 0:
        return unsolved
    free = all(isinstance(metric, TaskGram) for layer in layers for metric in layer.metrics)
    if options.calibrate is not None and not (free and options.stays_in_subspace("tensor")):
        return unsolved
    U, V = torch.stack([one.U for one in atoms]), torch.stack([one.V for one in atoms])
    deltas, weights = [layer.deltas for layer in layers], [layer.weights for layer in layers]
    problem = stacked_problem([layer.metrics for layer in layers], deltas, U, V, weights, options.normalize)
    if problem is None:
        return unsolved
    outside = None
    if anchor == "tsv":
        coefficients = [tsv_coefficients(one, layer.weights) for one, layer in zip(atoms, layers, strict=True)]
        start = torch.stack(coefficients).double().diag_embed()
    else:
        outside = torch.stack([_anchor(layer, anchor, layer.atoms) for layer in layers])
        start = (U.mT @ outside @ V).double()
    solutions = problem.step(start, options.damping, options.iterations)
    x = torch.stack([start[i] if one is None else one.value for i, one in enumerate(solutions)])
    if options.calibrate is not None:
        x = _calibrated_stack(x, problem, options.calibrate, outputs_first=not layers[0].inputs_first)
    step = x if outside is None else x - start
    values = U @ step.to(U.dtype) @ V.mT
    values = values if outside is None else outside + values
    rank = clamp_rank(layers[0].shape, len(weights[0]), options.rank)
    note = rank_note(options.rank, rank)
    return [
        None if solution is None else replace(solution, value=value, rank=rank, note=note)
        for solution, value in zip(solutions, values, strict=True)
    ]


def _calibrated_stack(x: Tensor, problem: StackedProblem, least: float, *, outputs_first: bool) -> Tensor:
    """Return the coordinates of merges calibrated along the directions of their outputs, wherever they are stored."""
    points = problem.points_ltpq.unbind(1)
    if outputs_first:
        return calibrated_coordinates(x, points, problem.G_ltpp.unbind(1), least)
    return calibrated_coordinates(x.mT, [point.mT for point in points], problem.A_ltqq.unbind(1), least).mT


def _calibrated(delta: Tensor, layer: Layer, least: float) -> Tensor:
    """Return a merged task vector calibrated along the directions of its outputs, wherever they are stored."""
    U, sigma, V = top_svd(delta, min(delta.shape))
    if layer.inputs_first:
        return calibrated(Svd(V, sigma, U), [D.T for D in layer.deltas], least).T
    return calibrated(Svd(U, sigma, V), layer.deltas, least)


def _solved_and_calibrated(
    problem: Problem, subspace: TensorProduct, aggregator: Aggregator, layer: Layer, least: float
) -> Solution:
    """Return the calibrated solution of a problem in all pairs of singular vectors, by its coordinates alone."""
    orthonormal = subspace.orthonormalized()
    if orthonormal is subspace:
        solution = aggregator.solve(problem)
        x, points = solution.value, problem.points
    else:
        # An anchor has its full length along softened directions, where the coordinates of the problem do not.
        solution = aggregator.aggregate(problem)
        x = orthonormal.project(solution.value)
        points = [orthonormal.project(D) for D in layer.deltas]
    x = _calibrated_coordinates(x, orthonormal, points, layer, least)
    return replace(solution, value=orthonormal.lift(x))


def _calibrated_coordinates(
    x: Tensor, subspace: TensorProduct, points: Sequence[Tensor], layer: Layer, least: float
) -> Tensor:
    """Return the coordinates of a merge calibrated along the directions of its outputs, wherever they are stored."""
    grams: list[Tensor] = []
    for t, D in enumerate(layer.deltas):
        metric = layer.metrics[t]
        if isinstance(metric, TaskGram) and metric.D is D:
            grams.append(metric.factors(subspace.U, subspace.V)[int(layer.inputs_first)])
        else:
            rows = ((D @ subspace.V).T if layer.inputs_first else subspace.U.T @ D).double()
            grams.append(rows @ rows.T)
    if layer.inputs_first:
        return calibrated_coordinates(x.T, [point.T for point in points], grams, least).T
    return calibrated_coordinates(x, points, grams, least)


def _subspace(layer: Layer, options: FrechetOptions, atoms: Tagged | None) -> Subspace:
    if options.basis == "full" or atoms is None:
        return Full(layer.deltas[0].dtype)
    return tensor_product(atoms) if options.basis == "tensor" else atoms


def _aggregator(
    layer: Layer, options: FrechetOptions, anchor: Anchor | None, subspace: Subspace, atoms: Tagged | None
) -> Aggregator:
    match options.aggregator:
        case "mean":
            return Mean(options.damping)
        case "sum":
            return Sum(options.damping)
        case "anchored":
            if anchor == "tsv" and (coordinates := _tsv_coordinates(layer, subspace, atoms)) is not None:
                return Anchored(coordinates, options.damping, inside=True)
            return Anchored(_anchor(layer, anchor, atoms), options.damping)


def _tsv_coordinates(layer: Layer, subspace: Subspace, atoms: Tagged | None) -> Tensor | None:
    """Return the tsv anchor in the coordinates of a subspace whose own directions its atoms are made of, else None."""
    if atoms is None or atoms.mix is not None or not isinstance(subspace, Tagged | TensorProduct):
        return None
    if subspace.U is not atoms.U or subspace.V is not atoms.V:
        return None
    coefficients = tsv_coefficients(atoms, layer.weights).double()
    return coefficients.diag() if isinstance(subspace, TensorProduct) else coefficients


def _anchor(layer: Layer, anchor: Anchor | None, atoms: Tagged | None) -> Tensor:
    """Return the anchor, of the layer's shape."""
    match anchor:
        case "stretched":
            return stretched_mean(layer.deltas, layer.weights)
        case "average":
            return weighted_sum(layer.deltas, layer.weights)
        case "sum":
            return len(layer.deltas) * weighted_sum(layer.deltas, layer.weights)
        case "iso_c":
            return iso_c_delta(layer.deltas, layer.weights, min(layer.shape))
        case "tsv" | None:
            assert atoms is not None
            return tsv_delta(atoms, layer.weights)


def directions(options: FrechetOptions, shape: Sequence[int], tasks: int) -> int:
    """Return how many singular vectors of each model a merge begins with."""
    if not isinstance(options.basis, str) or (options.basis == "full" and options.anchored_at("full") != "tsv"):
        return 0
    return clamp_rank(shape, tasks, options.rank)


def in_basis(options: FrechetOptions) -> bool:
    """Return whether a merge is made in a basis of the task vectors' singular vectors, and not in the full space."""
    return options.basis != "full"


def in_any_basis(options: FrechetOptions) -> bool:
    """Return True: what is made of the task vectors themselves, or weighs inputs alone, has no other columns."""
    return True


def epimer_free(layer: Layer, options: FrechetOptions) -> Solution:
    """Return the equation's solution with each task vector standing in for both factors of its curvature."""
    return frechet(_self_curved(layer), options)


def epimer_free_stack(layers: Sequence[Layer], options: FrechetOptions) -> list[Solution | None]:
    """Return `epimer_free` of layers of one shape, solved at once."""
    return frechet_stack([_self_curved(layer) for layer in layers], options)


def _self_curved(layer: Layer) -> Layer:
    """Return a layer whose task vectors stand in for their curvature."""
    if layer.metrics and all(isinstance(metric, TaskGram) for metric in layer.metrics):
        return layer
    return replace(layer, metrics=[TaskGram(D) for D in layer.deltas])


MEAN_LAWS = frozenset({"permutation", "copies", "scale_zero"})
SUM_LAWS = frozenset({"permutation", "scale_zero", "curvature_scale"})
KRONECKER = ("kronecker", "ekfac", "projected")  # EKFAC has Kronecker's eigenvectors, and more exact eigenvalues

METHODS: tuple[Method, ...] = (
    Method(
        name="epimer",
        summary="the paper: diagonal curvature projected on the tasks' singular vectors",
        equation="tagged x diagonal x sum: θ = θ0 + α T H̄⁻¹ Σ λ_t H̃_t x_t",
        citation="Lu et al., Model Merging on Loss Landscape: A Geometry Perspective, CVPR 2026 Findings, "
        "arXiv:2605.26693",
        merge=frechet,
        options=FrechetOptions(basis="tagged", aggregator="sum"),
        curvature="diagonal",
        accepts=("diagonal", "projected"),
        default_for=("diagonal",),
        workspace=workspace.frechet,
        directions=directions,
        factored=True,
        bounded_rank=in_basis,
        sweep=True,
        forecast=True,
        counts_models=True,
        laws=SUM_LAWS,
    ),
    Method(
        name="epimer_kron",
        summary="Kronecker-factored curvature on all pairs of singular vectors, anchored at the stretched average",
        equation="tensor x kronecker x anchored: θ = θ0 + α (H̄ + εI)⁻¹(Σ λ_t H̃_t x_t + ε x_a)",
        citation="this project; after Lu et al., CVPR 2026 Findings",
        merge=frechet,
        merge_stack=frechet_stack,
        options=FrechetOptions(basis="tensor", aggregator="anchored", damping=1.0),
        curvature="kronecker",
        accepts=KRONECKER,
        default_for=KRONECKER,
        workspace=workspace.frechet,
        directions=directions,
        factored=True,
        bounded_rank=in_basis,
        sweep=True,
        forecast=True,
        counts_models=True,
        laws=MEAN_LAWS | {"curvature_scale"},
    ),
    Method(
        name="epimer_full",
        summary="Kronecker-factored curvature in the full space, singular values calibrated; the best with scale: auto",
        equation="full x kronecker x anchored: θ = θ0 + α Σ_r γ_r σ_r u_r v_rᵀ "
        "of the SVD of (H̄ + εI)⁻¹(Σ λ_t H̃_t x_t + ε x_a), γ_r = T / Σ_t max(c, s_rt)",
        citation="this project; after Lu et al., CVPR 2026 Findings",
        merge=frechet,
        options=FrechetOptions(basis="full", aggregator="anchored", damping=1.0, calibrate=1.0),
        curvature="kronecker",
        accepts=("kronecker", "ekfac"),
        workspace=workspace.frechet,
        directions=directions,
        counts_models=True,
        laws=MEAN_LAWS | {"curvature_scale"},
    ),
    Method(
        name="epimer_exact",
        summary="the full empirical Fisher of per-sample gradients, projected on the tasks' singular vectors",
        equation="tagged x samples x sum: θ = θ0 + α T H̄⁻¹ Σ λ_t H̃_t x_t",
        citation="this project; after Lu et al., CVPR 2026 Findings",
        merge=frechet,
        options=FrechetOptions(basis="tagged", aggregator="sum"),
        curvature="samples",
        accepts=("samples", "projected"),
        default_for=("samples",),
        workspace=workspace.frechet,
        directions=directions,
        factored=True,
        bounded_rank=in_basis,
        sweep=True,
        forecast=True,
        counts_models=True,
        laws=SUM_LAWS,
    ),
    Method(
        name="epimer_free",
        summary="no data at all: each task vector stands in for its own curvature, singular values calibrated",
        equation="tensor x task-gram x anchored: θ = θ0 + α Σ_r γ_r σ_r u_r v_rᵀ "
        "of the SVD of (H̄ + εI)⁻¹(Σ λ_t H̃_t x_t + ε x_a), γ_r = T / Σ_t max(c, s_rt)",
        citation="this project; after Lu et al., CVPR 2026 Findings",
        merge=epimer_free,
        merge_stack=epimer_free_stack,
        options=FrechetOptions(basis="tensor", aggregator="anchored", anchor="tsv", damping=1.0, calibrate=1.0),
        curvature="task-gram",
        workspace=workspace.frechet,
        directions=directions,
        factored=True,
        equivariant=True,
        bounded_rank=in_any_basis,
        sweep=True,
        forecast=True,
        advised_without_data=True,
        counts_models=True,
        laws=MEAN_LAWS,
    ),
)
