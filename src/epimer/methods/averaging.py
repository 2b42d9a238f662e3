"""Methods that act entry by entry: averages, task arithmetic, trimming over the whole model, gradient matching."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from epimer.errors import ParameterError, short
from epimer.geometry.kth_magnitude import kth_magnitudes
from epimer.geometry.linalg import as_compute_dtype, chunks, weighted_sum
from epimer.geometry.metric import Diagonal, Metric
from epimer.geometry.solution import Solution
from epimer.methods import workspace
from epimer.methods.options import MethodOptions, Option, per_model
from epimer.methods.registry import Layer, Method, Prepared, Prepass

BLOCK = 1 << 19  # entries of a model that a pre-pass looks at at a time
MARGIN = 0.01  # share of all entries by which a sampled rank may be off
VOTES = 1 << 30  # of all models together in a count of signs, so that any tally fits 32 bits
SHARES = 1 << 24  # of all weights together, where they are no simple fractions

Scorer = Callable[[dict[str, Tensor]], Any]


@dataclass(frozen=True, kw_only=True)
class GreedySoupOptions(MethodOptions):
    """Options of greedy_soup."""

    evaluate: Annotated[Scorer | None, Option("scores a state dict; higher is better")] = None


@dataclass(frozen=True, kw_only=True)
class TiesOptions(MethodOptions):
    """Options of ties."""

    density: Annotated[
        float | list[float], Option("share of entries kept", low=0, high=1, open_low=True, per_model=True)
    ] = 0.2
    elect: Annotated[
        Literal["mass", "frequency"],
        Option(
            "elect the sign by total mass, or by the weight of the models that have it; an even vote leaves the base"
        ),
    ] = "mass"
    normalize: Annotated[bool, Option("divide by the weights of the models that agree, else just add them up")] = True


@dataclass(frozen=True, kw_only=True)
class PassthroughOptions(MethodOptions):
    """Options of passthrough."""

    scale: Annotated[float, Option("multiplies the model's tensors")] = 1.0


@dataclass(frozen=True, kw_only=True)
class GradientMatchingOptions(MethodOptions):
    """Options of gradient_matching."""

    scale: Annotated[float, Option("multiplies the merged delta, the paper's α; 0 returns the base", low=0)] = 1.0
    base_curvature: Annotated[Mapping[str, Metric] | None, Option("the base model's curvature F_0")] = None
    samples: Annotated[list[float] | None, Option("training samples N_t of each model (default 1)")] = None
    base_samples: Annotated[float, Option("samples N_0 behind the base's curvature", low=0)] = 1.0
    prior: Annotated[float, Option("prior precision δ0", low=0)] = 0.0


def average(layer: Layer, options: MethodOptions) -> Solution:
    """Return Σ λ_t D_t: the Fréchet mean of the full space under the identity."""
    return Solution(weighted_sum(layer.deltas, layer.weights))


def passthrough(layer: Layer, options: PassthroughOptions) -> Solution:
    """Return the one model there is."""
    return Solution(1 * layer.deltas[0])


def convex_combination(layer: Layer, scale: float, *, based: bool) -> Solution:
    """Return Σ λ_t D_t with λ_t ≥ 0: `scale` times the weights, or less where they would lead beyond the models.

    Every entry of the merge lies between the models' (and the base's, if the task vectors are `based` on one), which
    what has been measured must: a variance is never below 0. Without a base λ sums to 1, with one to at most 1.
    """
    weights = [max(0.0, scale * weight) for weight in layer.weights]
    if not based and not any(weights):
        weights = [1.0] * len(weights)
    total = sum(weights)
    if total > 1 or not based:
        weights = [weight / total for weight in weights]
    value = weighted_sum(layer.deltas, weights)
    ends = [D for D, weight in zip(layer.deltas, weights, strict=True) if weight]
    ends += [torch.zeros_like(value)] if based else []  # against rounding, by which a variance may miss 0
    return Solution(value.clamp(reduce(torch.minimum, ends), reduce(torch.maximum, ends)))


def norms(prepass: Prepass, options: MethodOptions) -> Prepared:
    """Weigh each model by 1/‖θ_t‖ over the whole model."""
    squares = [0.0] * len(prepass.weights)
    for _, _, models in prepass.tensors(entries=BLOCK):
        for t, W in enumerate(models):
            squares[t] += float(torch.linalg.vector_norm(W, dtype=torch.float64)) ** 2
    raw = [w / s**0.5 if s > 0 else 0.0 for w, s in zip(prepass.weights, squares, strict=True)]
    if not sum(raw) > 0:
        raise ParameterError("nan cannot weigh the models: every model with a weight is zero throughout.")
    return Prepared([w / sum(raw) for w in raw])


def thresholds(prepass: Prepass, options: TiesOptions) -> Prepared:
    """Find, per model, the magnitude that separates the top `density` of all its entries."""

    def deltas(of: Sequence[int]) -> Iterator[Iterator[Tensor]]:
        for _, base, models in prepass.tensors(entries=BLOCK):
            assert base is not None
            for W0, *parts in zip(*(chunks(W.reshape(-1)) for W in (base, *(models[t] for t in of))), strict=True):
                yield _differences(W0, parts)

    # The authors keep every entry from the cut-th smallest up.
    cuts = [prepass.entries - int(prepass.entries * kept) for kept in per_model(options.density, len(prepass.weights))]
    guesses = None if prepass.sample is None else _guesses(prepass.sample(), [cut / prepass.entries for cut in cuts])
    ranks = [max(cut, 1) for cut in cuts]
    magnitudes = kth_magnitudes(deltas, ranks, prepass.dtype, prepass.workers, guesses)
    return Prepared(None, [value if cut > 0 else 0.0 for value, cut in zip(magnitudes, cuts, strict=True)])


def _differences(W0: Tensor, parts: list[Tensor]) -> Iterator[Tensor]:
    start = as_compute_dtype(W0)
    for part in parts:
        yield as_compute_dtype(part) - start


def _guesses(sample: Iterator[tuple[Tensor | None, list[Tensor]]], shares: list[float]) -> list[tuple[float, float]]:
    """Return, per model, two magnitudes of sampled task vectors between which the one at its share is expected."""
    rows = [list(_differences(W0, models)) for W0, models in sample if W0 is not None]
    guesses = []
    for t, share in enumerate(shares):
        values = torch.cat([deltas[t].flatten() for deltas in rows]).abs().sort().values
        low, high = (math.floor((share + margin) * len(values)) for margin in (-MARGIN, MARGIN))
        least = float(values[low]) if low > 0 else 0.0
        guesses.append((least, float(values[high]) if high < len(values) else torch.finfo(values.dtype).max))
    return guesses


def ties(layer: Layer, options: TiesOptions) -> Solution:
    """Trim each task vector, elect a sign per entry, average the entries that agree with it."""
    assert layer.context is not None
    # Comparisons that give numbers instead of truth values are several times faster on a CPU.
    mask = torch.empty_like(layer.deltas[0])
    trimmed = [D * torch.ge(D.abs(), least, out=mask) for D, least in zip(layer.deltas, layer.context, strict=True)]
    elected = elected_by_mass(trimmed, layer.weights) if options.elect == "mass" else majority(trimmed, layer.weights)
    return Solution(disjoint_sum(trimmed, layer.weights, elected, normalize=options.normalize))


def disjoint_sum(deltas: list[Tensor], weights: list[float], elected: Tensor, *, normalize: bool) -> Tensor:
    """Return Σ w_t D_t over those entries that have the elected sign, over Σ w_t of them if normalised.

    Both `deltas` and `elected` are used up.
    """
    total, mass, mask = torch.zeros_like(elected), torch.zeros_like(elected), torch.empty_like(elected)
    for D, weight in zip(deltas, weights, strict=True):
        agreeing = D.mul_(elected if weight >= 0 else -elected).clamp_min_(0)  # |D| where w D has the elected sign
        mass += abs(weight) * torch.gt(agreeing, 0, out=mask)
        total += agreeing.mul_(abs(weight))
    if not normalize:
        return elected.mul_(total)
    torch.gt(mass, 0, out=mask)
    return elected.mul_(total).div_(mass.mul_(mask).add_(1 - mask))  # by 1 where nothing agrees


def elected_by_mass(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Return per entry the sign of Σ w_t D_t, 0 where that is 0.

    Task vectors of models in bfloat16 have few digits and often cancel. Whole shares of them add up exactly, so that an
    even vote is even; under weights as 1/3 rounding, and so the order of the models, would decide it.
    """
    return weighted_sum(deltas, whole_shares(tuple(weights))).sign()


@lru_cache
def whole_shares(weights: tuple[float, ...]) -> list[int]:
    """Return whole numbers in the proportion of the weights: exact for simple fractions, else to 2^-24 of their sum."""
    total = sum(map(abs, weights)) or 1.0
    fractions = [Fraction(w / total).limit_denominator(1000) for w in weights]
    whole = math.lcm(*(one.denominator for one in fractions))
    simple = all(math.isclose(one, w / total, rel_tol=1e-12) for one, w in zip(fractions, weights, strict=True))
    if simple and whole <= SHARES:
        return [int(one * whole) for one in fractions]
    return [round(w / total * SHARES) or int(math.copysign(bool(w), w)) for w in weights]


def majority(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Return per entry the sign with more votes, 0 where they are even; each model has λ_t of 2^30 votes.

    Whole votes add up the same in any order. Each λ_t is off by half a vote at most: a lead of T votes is rounding.
    """
    tally, most = torch.zeros_like(deltas[0], dtype=torch.int32), max(1.0, sum(map(abs, weights)))
    for D, weight in zip(deltas, weights, strict=True):
        tally += round(weight / most * VOTES) * D.sign().to(torch.int32)
    return torch.where(tally.abs() > len(deltas), tally.sign(), 0).to(deltas[0])


def gradient_matching(layer: Layer, options: GradientMatchingOptions) -> Solution:
    """Weigh each D_t by (N_t F_t + N_0 F_0 + δ_0) / (α Σ N_s F_s + N_0 F_0 + δ_0), α being the scale, in chunks."""
    tasks, like = len(layer.deltas), layer.deltas[0]
    counts = [1.0] * tasks if options.samples is None else options.samples
    steps = [tasks * w for w in layer.weights]  # 1 for equal weights
    diagonals = [metric.F for metric in (*layer.metrics, layer.base_metric) if isinstance(metric, Diagonal)]
    merged = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    columns = (chunks(x.reshape(-1)) for x in (merged, *layer.deltas, *diagonals))
    for part, *entries in zip(*columns, strict=True):
        deltas, factors, of_base = entries[:tasks], entries[tasks : 2 * tasks], entries[2 * tasks :]
        prior: Tensor | float = options.prior
        for F in of_base:
            prior = options.base_samples * F.double() + options.prior
        curvatures = [N * F.double() for N, F in zip(counts, factors, strict=True)]
        total = weighted_sum(curvatures, [options.scale * step for step in steps]) + prior
        pulled = weighted_sum([(F + prior) * D for F, D in zip(curvatures, deltas, strict=True)], steps)
        flat = weighted_sum(deltas, layer.weights).double()
        part.copy_(torch.where(total > 0, pulled / torch.where(total > 0, total, 1), flat))
    return Solution(merged)


def scale_cancels(options: GradientMatchingOptions) -> str:
    """Return a warning where α Σ N_t F_t D_t / (α Σ N_s F_s) is left of the equation, which no scale changes."""
    based = options.base_curvature is not None and options.base_samples > 0
    if based or options.prior or options.scale in (0, 1):
        return ""
    return "gradient_matching: scale cancels without a prior and without the base's curvature; give it a prior."


def greedy(prepass: Prepass, options: GreedySoupOptions) -> Prepared:
    """Add the models to the soup best first, each only if the score does not drop."""
    evaluate = options.evaluate
    if evaluate is None:
        raise ParameterError(
            "greedy_soup needs evaluate=: a function that takes a state dict and returns a score (higher is better)."
        )
    tasks = len(prepass.weights)

    def weights(members: list[int]) -> list[float]:
        total = sum(prepass.weights[t] for t in members)
        return [prepass.weights[t] / total if t in members else 0.0 for t in range(tasks)]

    def score(members: list[int]) -> float:
        returned = evaluate(prepass.average(weights(members)))
        try:
            value = float(returned)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if math.isnan(value):
            raise ParameterError(f"evaluate= returned {short(returned)} for models {members}, expected a number.")
        return value

    usable = [t for t in range(tasks) if prepass.weights[t] > 0]
    alone = {t: score([t]) for t in usable}
    ranked = sorted(usable, key=lambda t: -alone[t])
    soup, best = ranked[:1], alone[ranked[0]]
    for t in ranked[1:]:
        value = score([*soup, t])
        if value >= best:
            soup, best = [*soup, t], value
    return Prepared(weights(soup))


LINEAR_LAWS = frozenset({"permutation", "copies", "scale_zero"})

METHODS: tuple[Method, ...] = (
    Method(
        name="average",
        summary="the mean of the models",
        equation="θ = θ0 + α Σ λ_t D_t",
        citation="Wortsman et al., Model soups, ICML 2022",
        merge=average,
        equivariant=True,
        options=MethodOptions(),
        needs_base=False,
        elementwise=True,
        separable=True,
        sums_models=True,
        sweep=True,
        forecast=True,
        laws=LINEAR_LAWS,
    ),
    Method(
        name="task_arithmetic",
        summary="the sum of task vectors, each with its weight as given (default 1/T)",
        equation="θ = θ0 + α Σ w_t D_t",
        citation="Ilharco et al., Editing Models with Task Arithmetic, ICLR 2023",
        merge=average,
        equivariant=True,
        options=MethodOptions(),
        elementwise=True,
        separable=True,
        absolute_weights=True,
        laws=LINEAR_LAWS,
    ),
    Method(
        name="nan",
        summary="the mean of the models, each weighted by the inverse of its norm",
        equation="θ = θ0 + α Σ λ_t D_t, λ_t ∝ w_t / ‖θ_t‖",
        citation="Si et al., NAN: A Training-Free Solution to Coefficient Estimation in Model Merging, 2025",
        merge=average,
        equivariant=True,
        options=MethodOptions(),
        needs_base=False,
        elementwise=True,
        separable=True,
        prepare=norms,
        whole_model=frozenset({"weight"}),
        laws=LINEAR_LAWS,
    ),
    Method(
        name="greedy_soup",
        summary="the mean of those models that improve a score, added best first",
        equation="θ = θ0 + α Σ λ_t D_t over the chosen t",
        citation="Wortsman et al., Model soups, ICML 2022",
        merge=average,
        equivariant=True,
        options=GreedySoupOptions(),
        needs_base=False,
        elementwise=True,
        separable=True,
        prepare=greedy,
        whole_model=frozenset({"weight"}),
        laws=LINEAR_LAWS,
    ),
    Method(
        name="passthrough",
        summary="one model as it is, or its tensors times a number",
        equation="θ = α θ_1",
        citation="a copy, as mergekit has it",
        merge=passthrough,
        options=PassthroughOptions(),
        needs_base=False,
        ignores_base=True,
        linear_in_scale=False,
        models=(1, 1),
        elementwise=True,
        separable=True,
        workspace=(0.0, 3.0),
        laws=frozenset({"permutation", "copies"}),
    ),
    Method(
        name="gradient_matching",
        summary="task vectors weighted by curvature, with the base model's curvature and a prior",
        equation="θ = θ0 + α Σ (N_t F_t + N_0 F_0 + δ0) / (α Σ N_s F_s + N_0 F_0 + δ0) ∘ D_t",
        citation="Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024",
        merge=gradient_matching,
        options=GradientMatchingOptions(),
        curvature="diagonal",
        elementwise=True,
        linear_in_scale=False,
        caution=scale_cancels,
        workspace=workspace.gradient_matching,
        laws=LINEAR_LAWS,
    ),
)
