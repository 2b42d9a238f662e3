"""Presets of the one equation in the full space: fisher, regmean, mats and wudi, which came before EpiMer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from epimer.errors import CurvatureError
from epimer.geometry.checks import check_wide_blocks, check_wide_factor
from epimer.geometry.frechet import Coordinates, build_problem
from epimer.geometry.input_mean import LEAST, mean_of_inputs
from epimer.geometry.linalg import as_compute_dtype, chunks, gram, mean_of, sandwich
from epimer.geometry.metric import Diagonal, InputGram, Kronecker, Metric
from epimer.geometry.operator import Elementwise, SubspaceOperator
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Full
from epimer.methods import workspace
from epimer.methods.frechet import (
    KRONECKER,
    MEAN_LAWS,
    Damping,
    FrechetOptions,
    Jitter,
    Normalize,
    frechet,
    in_any_basis,
)
from epimer.methods.options import MethodOptions, Option
from epimer.methods.registry import Layer, Method

SQUARED = 1e-28, 1e36  # of ‖D‖²: outside of it squares of its entries leave float32


@dataclass(frozen=True, kw_only=True)
class RegMeanOptions(FrechetOptions):
    """Options of regmean."""

    off_diagonal: Annotated[float, Option("factor on A's off-diagonal entries", low=0, high=1)] = 0.9


@dataclass(frozen=True, kw_only=True)
class FisherOptions(MethodOptions):
    """Options of fisher."""

    normalize: Normalize = "none"
    damping: Damping = 0.0
    jitter: Jitter = 0.0


def fisher(layer: Layer, options: FisherOptions) -> Solution:
    """Return Σ λ_t F_t ∘ D_t / Σ λ_t F_t, whatever the tensor's shape; entries are merged in chunks, in the cache."""
    full, merged, eta = Full(layer.deltas[0].dtype), torch.empty_like(layer.deltas[0]), 0.0
    problem = build_problem(
        full, layer.metrics, layer.deltas, layer.weights, normalize=options.normalize, jitter=options.jitter
    ).damped(options.damping)
    diagonals = [metric.F for metric in layer.metrics if isinstance(metric, Diagonal)]
    flat = (chunks(x.reshape(-1)) for x in (*layer.deltas, *diagonals))
    for part, *entries in zip(chunks(merged.view(-1)), *flat, strict=True):
        deltas, factors = entries[: len(diagonals)], entries[len(diagonals) :]
        operators: list[SubspaceOperator] = [Elementwise(F) for F in factors]
        solution = replace(problem, points=Coordinates(full, deltas), operators=operators).mean()
        part.copy_(solution.value)
        eta += solution.eta or 0.0
    return Solution(merged, eta=eta)


FISHER = FisherOptions()
"""what the rule 'fisher' merges single tensors of any method with"""


def regmean(layer: Layer, options: RegMeanOptions) -> Solution:
    """Return (Σ λ_t W_t A_t)(Σ λ_t A_t)⁻¹, the off-diagonal entries of every A_t shrunk.

    The solve's Cholesky factorisation shows that the sum is positive definite; of each wide Gram matrix the blocks of
    its diagonal are checked, and the whole where the sum turns out to be singular or indefinite.
    """
    grams = [_input_gram(layer, t) for t in range(len(layer.metrics))]
    kept = options.off_diagonal
    metrics: list[Metric] = [
        InputGram(
            partial(_shrunk, A, kept),
            partial(_shrunk_along, side, A, kept),
            mean_of(A.diagonal().double()),
            A.dtype,
            "GA".index(side),
        )
        for side, A in grams
    ]
    _check(layer, grams, check_wide_blocks)
    if _plain(layer, options, grams) and (mean := _mean_of_inputs(layer, grams, kept)) is not None:
        return mean
    solution = frechet(replace(layer, metrics=metrics), options)
    if solution.damping > 0:
        _check(layer, grams, lambda side, A: check_wide_factor(side, A, A))
    return solution


def _plain(layer: Layer, options: RegMeanOptions, grams: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether single precision may do: for wide matrices on a CPU, which multiplies float64 half as fast."""
    tensors = [*layer.deltas, *(A for _, A in grams)]
    return (
        (options.basis == "full" and options.aggregator == "mean" and options.normalize == "none")
        and options.damping == options.jitter == 0
        and options.calibrate is None
        and options.off_diagonal < 1
        and layer.basis is None
        and min(layer.deltas[0].shape) >= LEAST
        and len(layer.deltas) > 1
        and min(layer.weights) > 0
        and len({side for side, _ in grams}) == 1
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
    )


def _mean_of_inputs(layer: Layer, grams: Sequence[tuple[str, Tensor]], off_diagonal: float) -> Solution | None:
    """Return regmean's solution, with products in single precision where they are exact enough; None if singular."""
    if grams[0][0] == "A":
        return mean_of_inputs(layer.deltas, [A for _, A in grams], layer.weights, off_diagonal)
    solution = mean_of_inputs([D.T for D in layer.deltas], [A.T for _, A in grams], layer.weights, off_diagonal)
    return None if solution is None else replace(solution, value=solution.value.T)


def _input_gram(layer: Layer, t: int) -> tuple[str, Tensor]:
    """Return the side that a layer's inputs belong to, G or A, and a task's Gram matrix of them."""
    metric = layer.metrics[t]
    side = "G" if isinstance(metric, Kronecker) and metric.inputs == 0 else "A"
    gram = getattr(metric, side) if isinstance(metric, Kronecker) else None
    if gram is None:
        raise CurvatureError(f"curvature[{t}][{layer.name!r}] has no {side}; regmean needs the inputs' Gram matrix.")
    return side, gram


def _check(layer: Layer, grams: Sequence[tuple[str, Tensor]], check: Callable[[str, Tensor], None]) -> None:
    """Check every task's Gram matrix, and name the one that is refused."""
    for t, (side, A) in enumerate(grams):
        try:
            check(side, A)
        except CurvatureError as error:
            raise CurvatureError(f"curvature[{t}][{layer.name!r}]: {error}") from None


def wudi(layer: Layer, options: FrechetOptions) -> Solution:
    """Return regmean's solution with A_t = D_tᵀD_t / ‖D_t‖², which needs no data; D_tD_tᵀ where inputs are the rows."""
    side = layer.deltas[0].shape[layer.inputs]
    grams: list[Metric] = []
    for D in layer.deltas:
        energy = float(as_compute_dtype(D).square().sum())
        if not SQUARED[0] < energy < SQUARED[1] and (largest := float(D.abs().max())) > 0:
            D = D / largest  # A does not depend on its size, but the squares would leave their precision
            energy = float(as_compute_dtype(D).square().sum())
        D = D if layer.inputs else D.T
        form, along = partial(_gram, D, energy or 1.0), partial(_gram_along, D, energy or 1.0)
        grams.append(InputGram(form, along, float(energy > 0) / side, D.dtype, layer.inputs))
    return frechet(replace(layer, metrics=grams), options)


def _shrunk(gram: Tensor, off_diagonal: float) -> Tensor:
    """Return a matrix with its off-diagonal entries multiplied by `off_diagonal`."""
    shrunk = off_diagonal * gram
    shrunk.diagonal().add_(gram.diagonal(), alpha=1 - off_diagonal)
    return shrunk


def _shrunk_along(side: str, A: Tensor, off_diagonal: float, U: Tensor) -> Tensor:
    """Return UᵀAU of a Gram matrix with its off-diagonal entries multiplied by `off_diagonal`."""
    diagonal = ((U.T * A.diagonal()) @ U).double()
    restricted = off_diagonal * sandwich(A, U).double()
    restricted += 0.5 * (1 - off_diagonal) * (diagonal + diagonal.T)  # symmetric beyond the product's rounding
    check_wide_factor(side, A, restricted)
    return restricted


def _gram(D: Tensor, energy: float) -> Tensor:
    """Return DᵀD / energy."""
    return gram(D).div_(energy)


def _gram_along(D: Tensor, energy: float, U: Tensor) -> Tensor:
    """Return UᵀDᵀDU / energy."""
    return gram((D @ U).double()).div_(energy)


METHODS: tuple[Method, ...] = (
    Method(
        name="fisher",
        summary="the mean of the models, entry by entry weighted by the diagonal Fisher information",
        equation="full x diagonal x mean: θ = θ0 + α Σ λ_t F_t ∘ D_t / Σ λ_t F_t",
        citation="Matena and Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022",
        merge=fisher,
        options=FISHER,
        needs_base=False,
        curvature="diagonal",
        elementwise=True,
        workspace=workspace.in_chunks,
        sweep=True,
        laws=MEAN_LAWS,
    ),
    Method(
        name="regmean",
        summary="least squares on the layers' outputs, from the inputs' Gram matrices",
        equation="full x kronecker(G = I) x mean: θ = θ0 + α (Σ λ_t D_t A_t)(Σ λ_t A_t)⁻¹",
        citation="Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023",
        merge=regmean,
        options=RegMeanOptions(basis="full", normalize="none", damping=0.0),
        needs_base=False,
        curvature="kronecker",
        workspace=workspace.one_sided,
        bounded_rank=in_any_basis,
        sweep=True,
        forecast=True,
        laws=MEAN_LAWS,
    ),
    Method(
        name="mats",
        summary="the Fréchet mean under Kronecker-factored curvature in the full space",
        equation="full x kronecker x mean: θ = θ0 + α X with Σ λ_t (G_t (X - D_t) A_t + ε (X - D_t)) = 0",
        citation="Tam et al., Merging by Matching Models in Task Parameter Subspaces, TMLR 2024",
        merge=frechet,
        options=FrechetOptions(basis="full"),
        needs_base=False,
        curvature="kronecker",
        accepts=KRONECKER,
        workspace=workspace.frechet,
        laws=MEAN_LAWS | {"curvature_scale"},
    ),
    Method(
        name="wudi",
        summary="least squares on the task vectors' own outputs, without data",
        equation="full x (A = DᵀD/‖D‖², G = I) x mean: θ = θ0 + α (Σ λ_t D_t (A_t + εI))(Σ λ_t A_t + εI)⁻¹",
        citation="Cheng et al., Whoever Started the Interference Should End It (WUDI), ICML 2025",
        merge=wudi,
        options=FrechetOptions(basis="full"),
        curvature="task-gram",
        workspace=workspace.one_sided,
        bounded_rank=in_any_basis,
        laws=MEAN_LAWS,
    ),
)
