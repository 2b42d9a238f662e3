"""Methods that prune task vectors, then add them up or elect signs: TIES, DARE, Model Breadcrumbs, DELLA.

    P_t = r_t ∘ M_t ∘ D_t        merged = Σ w_t P_t,  or the mean of those w_t P_t that have the elected sign

M_t says which entries of a task vector are kept, r_t makes up for the others. Each tensor is pruned by itself; TIES
alone, as published, goes by the magnitudes of the whole model (`averaging.thresholds`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from epimer.errors import ParameterError
from epimer.geometry.linalg import weighted_sum
from epimer.geometry.solution import Solution
from epimer.methods.averaging import TiesOptions, disjoint_sum, elected_by_mass, thresholds, ties
from epimer.methods.options import MethodOptions, Option, per_model
from epimer.methods.registry import Layer, Method, with_mergekit_form

NOTHING = 1e-7  # the sum of magnitudes below which a tensor is not rescaled

Kept = tuple[Tensor, Tensor | float | None]
"""which entries are kept, as 0 and 1, and with which chance they were; None where no chance was taken"""
Elect = Callable[[list[Tensor], list[float]], Tensor]


@dataclass(frozen=True)
class Pruning:
    """How one model's task vector is pruned: its own values of the options."""

    density: float
    gamma: float = 0.0
    epsilon: float = 0.0


Keep = Callable[[Tensor, Pruning, torch.Generator], Kept]
"""a task vector, how to prune it and random numbers -> the entries that are kept"""


@dataclass(frozen=True, kw_only=True)
class ElectedOptions(MethodOptions):
    """Options of methods that elect signs."""

    normalize: Annotated[bool, Option("divide by the weights of the models that agree, else just add them up")] = True


@dataclass(frozen=True, kw_only=True)
class DareOptions(MethodOptions):
    """Options of dare."""

    density: Annotated[
        float | list[float], Option("chance that an entry is kept", low=0, high=1, open_low=True, per_model=True)
    ] = 0.5
    rescale: Annotated[bool, Option("make up for what is dropped")] = True


@dataclass(frozen=True, kw_only=True)
class DareTiesOptions(DareOptions, ElectedOptions):
    """Options of dare_ties."""


@dataclass(frozen=True, kw_only=True)
class DellaLinearOptions(DareOptions):
    """Options of della_linear."""

    epsilon: Annotated[
        float | list[float],
        Option("the chance is density - epsilon for a row's smallest entry, + for its largest", low=0, per_model=True),
    ] = 0.15

    def __post_init__(self) -> None:
        count = max(len(per_model(value, 1)) for value in (self.density, self.epsilon))
        for density, epsilon in zip(per_model(self.density, count), per_model(self.epsilon, count), strict=False):
            if density < 1 and not epsilon < density <= 1 - epsilon:
                raise ParameterError(
                    f"The 'epsilon' parameter must be less than density and at most 1 - density, so that all chances "
                    f"lie between 0 and 1. Got {epsilon:g} with density {density:g} instead."
                )


@dataclass(frozen=True, kw_only=True)
class DellaOptions(DellaLinearOptions, ElectedOptions):
    """Options of della."""


@dataclass(frozen=True, kw_only=True)
class TrimmedOptions(MethodOptions):
    """Options of methods that keep entries by their magnitude within a tensor."""

    density: Annotated[
        float | list[float], Option("share of entries kept", low=0, high=1, open_low=True, per_model=True)
    ] = 1.0
    rescale: Annotated[bool, Option("multiply what is kept so that a tensor's magnitudes add up to the same")] = False


@dataclass(frozen=True, kw_only=True)
class TensorTiesOptions(TrimmedOptions, ElectedOptions):
    """Options of ties as mergekit has it."""


@dataclass(frozen=True, kw_only=True)
class BreadcrumbsOptions(TrimmedOptions):
    """Options of breadcrumbs."""

    gamma: Annotated[
        float | list[float], Option("share of entries dropped as the largest", low=0, high=1, per_model=True)
    ] = 0.01


@dataclass(frozen=True, kw_only=True)
class BreadcrumbsTiesOptions(BreadcrumbsOptions, ElectedOptions):
    """Options of breadcrumbs_ties."""


# --- what is kept ---


def at_random(D: Tensor, how: Pruning, generator: torch.Generator) -> Kept:
    """Keep every entry with the same chance, as DARE does."""
    mask = torch.rand(D.shape, generator=generator) < how.density
    return mask.to(D), how.density


def at_random_by_magnitude(D: Tensor, how: Pruning, generator: torch.Generator) -> Kept:
    """Keep every entry with a chance that grows evenly with the rank of its magnitude in its row, as DELLA does."""
    rows = D.reshape(len(D), -1) if D.dim() > 1 else D.reshape(1, -1)
    order, count = rows.abs().argsort(dim=1, stable=True), rows.shape[1]
    steps = torch.linspace(-1, 1, count, dtype=D.dtype, device=D.device) if count > 1 else torch.zeros(1).to(D)
    chance = torch.empty_like(rows).scatter_(1, order, (how.density + how.epsilon * steps).expand_as(rows))
    chance = chance.reshape(D.shape)
    return (torch.rand(D.shape, generator=generator).to(D) < chance).to(D), chance


def largest(D: Tensor, how: Pruning, generator: torch.Generator) -> Kept:
    """Keep the share of entries with the largest magnitudes; at least one."""
    return smallest(-D.abs(), max(1, int(how.density * D.numel()))).to(D), None


def between(D: Tensor, how: Pruning, generator: torch.Generator) -> Kept:
    """Keep the share of entries below the largest ones, as Model Breadcrumbs does."""
    total, kept = D.numel(), int(how.density * D.numel())
    below = max(0, total - kept - int(how.gamma * total))
    magnitudes = D.abs()
    return (smallest(magnitudes, below + kept) & ~smallest(magnitudes, below)).to(D), None


def smallest(x: Tensor, count: int) -> Tensor:
    """Return where the `count` smallest entries are; of equal ones the first."""
    flat = x.reshape(-1)
    if not 0 < count < len(flat):
        return torch.full_like(x, count > 0, dtype=torch.bool)
    last = torch.kthvalue(flat, count).values
    chosen = flat < last
    equal = (flat == last).nonzero().flatten()
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen.reshape(x.shape)


def prune(layer: Layer, options: Any, keep: Keep, *, keep_norm: bool) -> list[Tensor]:
    """Return P_t: what is kept of every task vector, made up for the rest by its norm or by the chance to be kept."""
    names = [name for name in ("density", "gamma", "epsilon") if hasattr(options, name)]
    values = [per_model(getattr(options, name), len(layer.deltas)) for name in names]
    pruned = []
    for t, (D, *own) in enumerate(zip(layer.deltas, *values, strict=True)):
        how = Pruning(**dict(zip(names, own, strict=True)))
        if how.density >= 1 or not D.numel():
            pruned.append(D.clone())
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{options.seed}/{t}/{layer.name}".encode()))
        mask, chance = keep(D, how, generator)
        P = D * mask
        if options.rescale and keep_norm:
            P *= _lost_norm(D, P)
        elif options.rescale and chance is not None:
            P /= chance
        pruned.append(P)
    return pruned


def _lost_norm(D: Tensor, P: Tensor) -> float:
    """Return Σ|D| / Σ|P|; 1 where either is nothing."""
    before, after = (float(x.abs().sum(dtype=torch.float64)) for x in (D, P))
    return before / after if min(before, after) >= NOTHING else 1.0


# --- what is made of it ---


def add_pruned(layer: Layer, options: Any, *, keep: Keep, keep_norm: bool) -> Solution:
    """Return Σ w_t P_t."""
    return Solution(weighted_sum(prune(layer, options, keep, keep_norm=keep_norm), layer.weights))


def elect_pruned(layer: Layer, options: Any, *, keep: Keep, keep_norm: bool, elect: Elect) -> Solution:
    """Return the mean, or the sum, of those P_t that have the elected sign."""
    pruned = prune(layer, options, keep, keep_norm=keep_norm)
    elected = elect(pruned, layer.weights)
    return Solution(disjoint_sum(pruned, layer.weights, elected, normalize=options.normalize))


def elected_or_plus(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Return per entry the sign of Σ w_t D_t, + where that is 0, as mergekit has it."""
    elected = elected_by_mass(deltas, weights)
    return torch.where(elected >= 0, torch.ones_like(elected), -1)


random_sum = partial(add_pruned, keep=at_random, keep_norm=False)
random_ties = partial(elect_pruned, keep=at_random, keep_norm=False, elect=elected_by_mass)
della_sum = partial(add_pruned, keep=at_random_by_magnitude, keep_norm=False)
della_ties = partial(elect_pruned, keep=at_random_by_magnitude, keep_norm=False, elect=elected_by_mass)
crumbs_sum = partial(add_pruned, keep=between, keep_norm=True)
crumbs_ties = partial(elect_pruned, keep=between, keep_norm=True, elect=elected_by_mass)

BY_NORM = "what is kept is rescaled to the tensor's sum of magnitudes"
ALL = "all is kept by default (density 1)"
EVEN = "an even vote counts as +"

METHODS: tuple[Method, ...] = (
    with_mergekit_form(
        Method(
            name="ties",
            summary="trim to the largest entries of each model, elect signs, average what agrees",
            equation="θ = θ0 + α · mean of {trim(D_t)_i : sign = elected_i}",
            citation="Yadav et al., TIES-Merging, NeurIPS 2023",
            merge=ties,
            options=TiesOptions(),
            elementwise=True,
            separable=True,
            prepare=thresholds,
            whole_model=frozenset({"density"}),
            workspace=(1.1, 9.0),
            counts_models=True,
            laws=frozenset({"permutation", "scale_zero"}),
        ),
        f"every tensor is trimmed by itself, {ALL}, {EVEN}",
        merge=partial(elect_pruned, keep=largest, keep_norm=True, elect=elected_or_plus),
        options=TensorTiesOptions(),
        separable=False,
        prepare=None,
        whole_model=frozenset(),
        workspace=(1.0, 7.0),
        selects=1,
        counts_models=False,
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="dare",
            summary="drop entries at random and rescale the rest, then task arithmetic",
            equation="θ = θ0 + α Σ w_t (M_t ∘ D_t) / density",
            citation="Yu et al., Language Models are Super Mario (DARE), ICML 2024",
            merge=random_sum,
            options=DareOptions(),
            elementwise=True,
            absolute_weights=True,
            workspace=(1.0, 3.0),
            draws=1,
            laws=frozenset({"scale_zero"}),
        ),
        f"{BY_NORM}, {ALL}",
        merge=partial(add_pruned, keep=at_random, keep_norm=True),
        options=DareOptions(density=1.0),
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="dare_ties",
            summary="drop entries at random and rescale the rest, then elect signs and average what agrees",
            equation="θ = θ0 + α · mean of {P_t,i : sign = elected_i}, P_t = (M_t ∘ D_t) / density",
            citation="Yu et al., Language Models are Super Mario (DARE), ICML 2024",
            merge=random_ties,
            options=DareTiesOptions(),
            elementwise=True,
            workspace=(1.0, 7.0),
            draws=1,
            counts_models=True,
            laws=frozenset({"scale_zero"}),
        ),
        f"{BY_NORM}, {ALL}, what agrees is added up (normalize false), {EVEN}",
        merge=partial(elect_pruned, keep=at_random, keep_norm=True, elect=elected_or_plus),
        options=DareTiesOptions(density=1.0, normalize=False),
        counts_models=False,
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="breadcrumbs",
            summary="drop the smallest entries of each tensor and the very largest, then task arithmetic",
            equation="θ = θ0 + α Σ w_t M_t ∘ D_t",
            citation="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024",
            merge=crumbs_sum,
            options=BreadcrumbsOptions(density=0.9),
            elementwise=True,
            absolute_weights=True,
            workspace=(1.0, 6.0),
            selects=2,
            laws=frozenset({"permutation", "scale_zero"}),
        ),
        ALL,
        options=BreadcrumbsOptions(),
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="breadcrumbs_ties",
            summary="drop the smallest entries of each tensor and the very largest, elect signs, add up what agrees",
            equation="θ = θ0 + α Σ {w_t P_t,i : sign = elected_i}, P_t = M_t ∘ D_t",
            citation="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024, with the signs of TIES as in mergekit",
            merge=crumbs_ties,
            options=BreadcrumbsTiesOptions(density=0.9, normalize=False),
            elementwise=True,
            workspace=(1.0, 7.0),
            selects=2,
            laws=frozenset({"permutation", "scale_zero"}),
        ),
        f"{ALL}, {EVEN}",
        merge=partial(elect_pruned, keep=between, keep_norm=True, elect=elected_or_plus),
        options=BreadcrumbsTiesOptions(normalize=False),
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="della",
            summary="drop small entries more often than large ones, rescale the rest, elect signs, average what agrees",
            equation="θ = θ0 + α · mean of {P_t,i : sign = elected_i}, P_t = (M_t ∘ D_t) / p_t, p = density ± ε",
            citation="Deep et al., DELLA-Merging, 2024 (its ε is the whole range of chances, here it is half of it)",
            merge=della_ties,
            options=DellaOptions(),
            elementwise=True,
            workspace=(1.0, 8.0),
            sorts=1,
            draws=1,
            counts_models=True,
            laws=frozenset({"scale_zero"}),
        ),
        f"{BY_NORM}, {ALL}, {EVEN}",
        merge=partial(elect_pruned, keep=at_random_by_magnitude, keep_norm=True, elect=elected_or_plus),
        options=DellaOptions(density=1.0),
        counts_models=False,
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
    with_mergekit_form(
        Method(
            name="della_linear",
            summary="drop small entries more often than large ones and rescale the rest, then task arithmetic",
            equation="θ = θ0 + α Σ w_t (M_t ∘ D_t) / p_t, p = density ± ε by rank",
            citation="Deep et al., DELLA-Merging, 2024, without its election of signs",
            merge=della_sum,
            options=DellaLinearOptions(),
            elementwise=True,
            absolute_weights=True,
            workspace=(1.0, 7.0),
            sorts=1,
            draws=1,
            laws=frozenset({"scale_zero"}),
        ),
        f"{BY_NORM}, {ALL}",
        merge=partial(add_pruned, keep=at_random_by_magnitude, keep_norm=True),
        options=DellaLinearOptions(density=1.0),
        laws=frozenset({"permutation", "copies", "scale_zero"}),
    ),
)
