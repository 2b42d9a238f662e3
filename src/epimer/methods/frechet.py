"""Presets of the one equation with curvature: subspace x metric x aggregator, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from epimer.errors import CurvatureError, ParameterError
from epimer.geometry.frechet import Problem, mean_size, pose
from epimer.geometry.linalg import working
from epimer.geometry.metric import Kronecker, Metric, TaskGram
from epimer.geometry.subspace import Full, Pairs, Subspace, Tagged, clamp_rank, pairs, tagged
from epimer.methods.registry import COMMON, Layer, Method, Outcome, Parameter, scale
from epimer.methods.spectral import clamped, iso_c_delta, rank_note, tsv_delta


def frechet(layer: Layer, p: Any) -> Outcome:
    """Solve the layer's Fréchet mean as the parameters say."""
    tasks, shape = len(layer.deltas), layer.deltas[0].shape
    rank = clamp_rank(shape, tasks, p.rank) if len(shape) == 2 else 0
    anchored = p.aggregator == "anchored"
    atoms = layer.basis.atoms if isinstance(layer.basis, Pairs) else layer.basis
    assert atoms is None or isinstance(atoms, Tagged)
    if (layer.basis is None and p.basis != "full") or (anchored and p.anchor == "tsv" and atoms is None):
        if rank == 0:
            return clamped(layer)
        atoms = tagged(layer.deltas, rank)
    subspace = _subspace(p.basis, atoms, layer) if layer.basis is None else layer.basis
    problem = pose(
        subspace,
        layer.metrics,
        layer.deltas,
        layer.weights,
        normalize=p.normalize,
        damping=0.0 if anchored else p.damping,
        jitter=p.jitter,
        tolerance=p.projection_tol,
        most=p.iterations,
    )
    if anchored:
        unit = 1.0 if p.normalize == "trace" else mean_size(problem)
        solution = problem.solve(_anchor(layer, p.anchor, subspace, atoms, problem), p.damping * unit)
    else:
        solution = problem.mean()
    delta = subspace.lift(solution.coordinates)
    if p.aggregator == "sum":
        delta = tasks * delta
    if layer.basis is not None:
        return Outcome(delta, solution.status, solution.residual, solution.eta, rank_of(layer.basis))
    used, note = (None, "") if atoms is None else (rank, rank_note(p.rank, rank))
    return Outcome(delta, solution.status, solution.residual, solution.eta, used, note)


def rank_of(basis: Subspace) -> int | None:
    """Return how many directions a given basis has for a task, where it says so."""
    atoms = basis.atoms if isinstance(basis, Pairs) else basis
    if not isinstance(atoms, Tagged):
        return None
    return int(atoms.owner.bincount().max()) if atoms.owner.numel() else 0


def _subspace(basis: str, atoms: Tagged | None, layer: Layer) -> Subspace:
    if basis == "full" or atoms is None:
        return Full(layer.deltas[0].dtype)
    return pairs(atoms) if basis == "tensor" else atoms


def _anchor(layer: Layer, anchor: str, subspace: Subspace, atoms: Tagged | None, problem: Problem) -> torch.Tensor:
    """Return the anchor's coordinates x_a."""
    if anchor == "average":
        return problem.flat_mean()
    if anchor == "sum":
        return len(layer.deltas) * problem.flat_mean()
    if anchor == "iso_c":
        return subspace.project(iso_c_delta(layer.deltas, layer.weights))
    assert atoms is not None
    return subspace.project(tsv_delta(atoms, layer.weights))


# The rule 'fisher': the fisher preset at its defaults, for single tensors of any method.
FISHER = SimpleNamespace(normalize="none", damping=0.0, jitter=0.0)


def entrywise(layer: Layer, p: Any) -> Outcome:
    """Solve the equation in the full space, whatever the tensor's shape."""
    fixed = SimpleNamespace(basis="full", rank=None, aggregator="mean", projection_tol=0.0, iterations=None)
    return frechet(layer, SimpleNamespace(**vars(fixed), normalize=p.normalize, damping=p.damping, jitter=p.jitter))


def _with_metrics(build: Callable[[Layer, Any], Sequence[Metric]]) -> Callable[[Layer, Any], Outcome]:
    """Return the equation with metrics made from the layer instead of those given."""

    def merge(layer: Layer, p: Any) -> Outcome:
        return frechet(replace(layer, metrics=list(build(layer, p))), p)

    return merge


def input_grams(layer: Layer, p: Any) -> list[Metric]:
    """Keep the input factor only, its off-diagonal entries shrunk."""
    grams: list[Metric] = []
    for t, metric in enumerate(layer.metrics):
        gram = (metric.G, metric.A)[metric.inputs] if isinstance(metric, Kronecker) else None
        if not isinstance(metric, Kronecker) or gram is None:
            side = "G" if isinstance(metric, Kronecker) and metric.inputs == 0 else "A"
            raise CurvatureError(
                f"curvature[{t}][{layer.name!r}] has no {side}; regmean needs the inputs' Gram matrix."
            )
        gram = p.off_diagonal * gram + (1 - p.off_diagonal) * torch.diag(gram.diagonal())
        grams.append(Kronecker(A=gram) if metric.inputs else Kronecker(G=gram))
    return grams


def task_inputs(layer: Layer, p: Any) -> list[Metric]:
    """Take DᵀD/‖D‖² for the inputs' Gram matrix."""
    grams: list[Metric] = []
    for D in layer.deltas:
        energy = float(working(D).square().sum())
        grams.append(Kronecker(A=D.T @ D / energy if energy > 0 else torch.zeros_like(D.T @ D)))
    return grams


def task_grams(layer: Layer, p: Any) -> list[Metric]:
    """Let each task vector stand in for both factors of its curvature."""
    if layer.metrics and all(isinstance(metric, TaskGram) for metric in layer.metrics):
        return layer.metrics
    return [TaskGram(D) for D in layer.deltas]


def _weighing(*, normalize: str, damping: float) -> tuple[Parameter, ...]:
    """Return the parameters that say how the tasks' curvatures are weighed against each other."""
    return (
        Parameter(
            "normalize",
            "choice",
            normalize,
            "trace: each task's curvature to mean diagonal 1 per layer",
            choices=("trace", "none"),
        ),
        Parameter("damping", "number", damping, "share of the mean diagonal added to it", low=0),
        Parameter("jitter", "number", 0.0, "added to the curvature's diagonal before it is projected", low=0),
    )


def _parameters(
    *,
    basis: str,
    aggregator: str = "mean",
    normalize: str = "trace",
    damping: float = 1e-2,
    extra: tuple[Parameter, ...] = (),
) -> tuple[Parameter, ...]:
    """Return the parameters of the one equation, at a preset's defaults."""
    return (
        scale(),
        *extra,
        Parameter("basis", "basis", basis, "subspace: task-owned atoms, all their pairs, or everything"),
        Parameter(
            "rank",
            "integer",
            32,
            "directions kept per task, at most floor(min(m, n) / T); None takes that many",
            low=1,
            optional=True,
        ),
        Parameter(
            "aggregator",
            "choice",
            aggregator,
            "mean; sum = T times the mean; anchored: a damped pull to an anchor",
            choices=("mean", "sum", "anchored"),
        ),
        Parameter(
            "anchor",
            "choice",
            "tsv",
            "where directions without curvature go (aggregator anchored)",
            choices=("tsv", "sum", "iso_c", "average"),
        ),
        *_weighing(normalize=normalize, damping=damping),
        Parameter(
            "projection_tol",
            "number",
            1e-2,
            "error of the low-rank projection that starts a large diagonal solve; 0 projects exactly",
            low=0,
            high=1,
        ),
        Parameter(
            "iterations",
            "integer",
            None,
            "conjugate-gradient steps at most, for kronecker curvature on tensor or full; None goes on until converged",
            low=1,
            optional=True,
        ),
        *COMMON,
    )


MEAN_LAWS = frozenset({"permutation", "copies", "scale_zero"})
SUM_LAWS = frozenset({"permutation", "scale_zero", "curvature_scale"})

METHODS = (
    Method(
        name="fisher",
        summary="the mean of the models, entry by entry weighted by the diagonal Fisher information",
        equation="full x diagonal x mean: Σ λ_t F_t ∘ θ_t / Σ λ_t F_t",
        citation="Matena and Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022",
        merge=entrywise,
        parameters=(scale(), *_weighing(normalize="none", damping=0.0), *COMMON),
        needs_base=False,
        curvature="diagonal",
        elementwise=True,
        workspace=(2.0, 14.0),
        laws=MEAN_LAWS,
    ),
    Method(
        name="regmean",
        summary="least squares on the layers' outputs, from the inputs' Gram matrices",
        equation="full x kronecker(G = I) x mean: (Σ λ_t W_t A_t)(Σ λ_t A_t)⁻¹",
        citation="Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023",
        merge=_with_metrics(input_grams),
        parameters=_parameters(
            basis="full",
            normalize="none",
            damping=0.0,
            extra=(Parameter("off_diagonal", "number", 0.9, "factor on A's off-diagonal entries", low=0, high=1),),
        ),
        needs_base=False,
        curvature="kronecker",
        workspace=(5.5, 12.0),
        squares=True,
        laws=MEAN_LAWS,
    ),
    Method(
        name="mats",
        summary="the Fréchet mean under Kronecker-factored curvature in the full space",
        equation="full x kronecker x mean: Σ λ_t G_t (X - D_t) A_t = 0, by conjugate gradients",
        citation="Tam et al., Merging by Matching Models in Task Parameter Subspaces, TMLR 2024",
        merge=frechet,
        parameters=_parameters(basis="full"),
        needs_base=False,
        curvature="kronecker",
        workspace=(6.0, 20.0),
        squares=True,
        laws=MEAN_LAWS | {"curvature_scale"},
    ),
    Method(
        name="wudi",
        summary="least squares on the task vectors' own outputs, without data",
        equation="full x (A = DᵀD/‖D‖², G = I) x mean",
        citation="Cheng et al., Whoever Started the Interference Should End It (WUDI), ICML 2025",
        merge=_with_metrics(task_inputs),
        parameters=_parameters(basis="full"),
        needs_base=True,
        curvature="task-gram",
        workspace=(4.5, 12.0),
        squares=True,
        laws=MEAN_LAWS,
    ),
    Method(
        name="epimer",
        summary="the paper: diagonal curvature projected on the tasks' singular vectors",
        equation="tagged x diagonal x sum: α T H̄⁻¹ Σ λ_t H̃_t x_t",
        citation="Lu et al., Model Merging on Loss Landscape: A Geometry Perspective, CVPR 2026",
        merge=frechet,
        parameters=_parameters(basis="tagged", aggregator="sum"),
        needs_base=True,
        curvature="diagonal",
        workspace=(0.2, 9.0),
        factored=True,
        laws=SUM_LAWS,
    ),
    Method(
        name="epimer_kron",
        summary="Kronecker-factored curvature on all pairs of singular vectors, anchored at TSV-M",
        equation="tensor x kronecker x anchored: (H̄ + εI)⁻¹(Σ λ_t H̃_t x_t + ε x_a)",
        citation="this project; after Lu et al., CVPR 2026",
        merge=frechet,
        parameters=_parameters(basis="tensor", aggregator="anchored", damping=1.0),
        needs_base=True,
        curvature="kronecker",
        workspace=(2.0, 3.0),
        squares=True,
        factored=True,
        laws=MEAN_LAWS | {"curvature_scale"},
    ),
    Method(
        name="epimer_exact",
        summary="the full empirical Fisher of per-sample gradients, projected on the tasks' singular vectors",
        equation="tagged x samples x sum: α T H̄⁻¹ Σ λ_t H̃_t x_t",
        citation="this project; after Lu et al., CVPR 2026",
        merge=frechet,
        parameters=_parameters(basis="tagged", aggregator="sum"),
        needs_base=True,
        curvature="samples",
        workspace=(0.5, 5.0),
        factored=True,
        laws=SUM_LAWS,
    ),
    Method(
        name="epimer_free",
        summary="no data at all: each task vector stands in for its own curvature, anchored at TSV-M",
        equation="tensor x task-gram x anchored: (H̄ + εI)⁻¹(Σ λ_t H̃_t x_t + ε x_a)",
        citation="this project; after Lu et al., CVPR 2026",
        merge=_with_metrics(task_grams),
        parameters=_parameters(basis="tensor", aggregator="anchored", damping=1.0),
        needs_base=True,
        curvature="task-gram",
        workspace=(0.6, 5.0),
        factored=True,
        laws=MEAN_LAWS,
    ),
)


def check_without_base(method: Method, p: Any) -> None:
    """Refuse settings under which the result depends on a base that is not there."""
    if p.scale != 1:
        raise ParameterError(
            f"The 'scale' parameter of {method.name} needs a base model; pass base or leave scale at 1."
        )
    if getattr(p, "basis", "full") != "full" or getattr(p, "aggregator", "mean") != "mean":
        raise ParameterError(
            f"{method.name} without a base model must have basis='full' and aggregator='mean'; pass base."
        )
