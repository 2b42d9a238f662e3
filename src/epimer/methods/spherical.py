"""Methods that go by angles: slerp, nuslerp, multislerp, the Karcher mean, Model Stock.

Each takes the inner products of the tensors as vectors, finds one coefficient per tensor, and adds them up: all that is
done to a tensor is reading it twice. Norms, angles and coefficients are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from epimer.geometry.linalg import weighted_sum
from epimer.geometry.solution import Solution
from epimer.methods.options import MethodOptions, Option
from epimer.methods.registry import Layer, Method, with_mergekit_form

BLOCK = 1 << 17  # entries of a tensor that are widened to float64 at a time
COLLINEAR = 1e-16  # 1 - cos² up to which two vectors have no arc between them
OPPOSITE = -0.9995  # cosine below which vectors have no stable arc between them; mergekit's threshold for slerp


@dataclass(frozen=True, kw_only=True)
class SlerpOptions(MethodOptions):
    """Options of slerp."""

    t: Annotated[float, Option("where on the arc: 0 is the base, 1 the model")] = 0.5
    dot_threshold: Annotated[float, Option("cosine above which the arc is taken as straight", low=0, high=1)] = 1.0


@dataclass(frozen=True, kw_only=True)
class NuslerpOptions(MethodOptions):
    """Options of nuslerp."""

    nuslerp_flatten: Annotated[bool, Option("take a whole tensor as one vector")] = True
    nuslerp_row_wise: Annotated[
        bool, Option("where it is not flattened: vectors along the first dimension instead of the last")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MultislerpOptions(MethodOptions):
    """Options of multislerp."""

    normalize_weights: Annotated[bool, Option("scale weights to sum 1, else they scale the length as given")] = True
    eps: Annotated[float, Option("length of the mean direction below which the models are averaged", low=0)] = 1e-8


@dataclass(frozen=True, kw_only=True)
class KarcherOptions(MethodOptions):
    """Options of karcher."""

    max_iter: Annotated[int, Option("most steps towards the mean", low=0)] = 10
    tol: Annotated[
        float, Option("length of the last step; a tensor so short, also beside the longest, has no direction", low=0)
    ] = 1e-5


@dataclass(frozen=True, kw_only=True)
class ModelStockOptions(MethodOptions):
    """Options of model_stock."""

    filter_wise: Annotated[bool, Option("one share per row of a matrix instead of one per tensor")] = False
    least_norms: Annotated[float, Option("least product of two norms that a cosine divides by", low=0)] = 0.0


def inner_products(vectors: Sequence[Tensor]) -> Tensor:
    """Return ⟨x_s, x_t⟩ of every row: T tensors of R rows give R x T x T, in float64."""
    rows, length = vectors[0].shape
    across, down = (length, max(1, BLOCK // max(1, length))) if rows > 1 else (BLOCK, 1)
    total = torch.zeros(rows, len(vectors), len(vectors), dtype=torch.float64, device=vectors[0].device)
    for top in range(0, rows, down):
        for left in range(0, length, max(1, across)):
            block = torch.stack([x[top : top + down, left : left + across].double() for x in vectors], dim=1)
            total[top : top + down] += block @ block.mT
    return total


def flat_products(vectors: Sequence[Tensor]) -> Tensor:
    """Return ⟨x_s, x_t⟩ of whole tensors: T x T, in float64."""
    return inner_products([x.reshape(1, -1) for x in vectors])[0]


def arc(t: float, cosine: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coefficients of both ends at `t` of the arc between them; those of a straight line where `linear`.

    The arc's coefficients grow without bound towards opposite ends. From a cosine of `OPPOSITE` down to -1 they stay as
    they are there and are mixed with those of the straight line, which alone count at -1: so they are continuous.
    """
    theta = torch.acos(torch.where(linear, 0.0, cosine.clamp_min(OPPOSITE)))
    first, second = (torch.sin(share * theta) / torch.sin(theta) for share in (1 - t, t))
    curved = torch.where(linear, 0.0, ((1 + cosine) / (1 + OPPOSITE)).clamp_max(1.0))
    return 1 - t + curved * (first - (1 - t)), t + curved * (second - t)


def cosine_of(inner: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return ⟨x, y⟩ / ‖x‖‖y‖ from inner products; 0 where a vector is zero."""
    norms = (first * second).clamp_min(0).sqrt()
    return torch.where(norms > 0, inner / torch.where(norms > 0, norms, 1), 0).clamp(-1, 1)


def slerp(layer: Layer, options: SlerpOptions) -> Solution:
    """Return the point at t of the arc from the base to the model, each tensor being one vector."""
    (D,), W0 = layer.deltas, layer.base
    assert W0 is not None
    (base, cross), (_, delta) = flat_products([W0, D])
    cosine = cosine_of(base + cross, base, base + 2 * cross + delta)
    linear = (cosine.abs() > options.dot_threshold) | (1 - cosine.square() <= COLLINEAR)
    first, second = map(float, arc(options.t, cosine, linear))
    return Solution(weighted_sum([W0, D], [first + second - 1, second]))


def nuslerp(layer: Layer, options: NuslerpOptions) -> Solution:
    """Return the point that weights say on the arc between two task vectors, or models where there is no base."""
    if len(layer.deltas) == 1:
        return Solution(1 * layer.deltas[0])
    shape = layer.deltas[0].shape
    dimension = 0 if options.nuslerp_row_wise else -1
    if options.nuslerp_flatten or not shape:
        vectors = [D.reshape(1, -1) for D in layer.deltas]
    else:
        vectors = [D.transpose(dimension, -1).reshape(-1, shape[dimension]) for D in layer.deltas]
    products = inner_products(vectors)
    cosine = cosine_of(products[:, 0, 1], products[:, 0, 0], products[:, 1, 1])
    t = layer.weights[1] / total if (total := sum(layer.weights)) else 0.5
    coefficients = arc(t, cosine, 1 - cosine.square() <= COLLINEAR)
    merged = _combine(vectors, coefficients)
    if options.nuslerp_flatten or not shape:
        return Solution(merged.reshape(shape))
    moved = layer.deltas[0].transpose(dimension, -1).shape
    return Solution(merged.reshape(moved).transpose(dimension, -1).contiguous())


def _combine(rows: Sequence[Tensor], coefficients: Sequence[Tensor]) -> Tensor:
    """Return Σ c_t x_t with a coefficient for every row."""
    total = torch.zeros_like(rows[0])
    for x, c in zip(rows, coefficients, strict=True):
        total += c[:, None].to(x) * x
    return total


def multislerp(layer: Layer, options: MultislerpOptions) -> Solution:
    """Return the mean direction of task vectors, or of models where there is no base, at their mean length.

    The published algorithm goes on with a step in the tangent space at that direction, which is zero: there the
    projections of the unit vectors have the weighted sum 0.
    """
    products = flat_products(layer.deltas)
    norms = products.diagonal().sqrt()
    weights = torch.tensor(layer.weights, dtype=torch.float64, device=norms.device)
    units = torch.where(norms > 0, weights / torch.where(norms > 0, norms, 1), 0)  # of the mean direction, not yet unit
    length = (units @ products @ units).clamp_min(0).sqrt()
    if len(layer.deltas) == 1 or length <= options.eps:
        note = "the directions cancel: averaged" if len(layer.deltas) > 1 and norms.any() else ""
        return Solution(weighted_sum(layer.deltas, layer.weights), note=note)
    return Solution(weighted_sum(layer.deltas, (units * (weights @ norms) / length).tolist()))


def karcher(layer: Layer, options: KarcherOptions) -> Solution:
    """Return the Fréchet mean of the models' directions on the sphere, at their mean length.

    It is the x of length 1 with the least Σ λ_t θ(x, W_t / ‖W_t‖)², found by steps along the mean of the logarithms:
    x ← exp_x(Σ λ_t log_x u_t). Every x lies in the span of the models, so steps are taken in T coordinates.
    """
    tensors = layer.deltas if layer.base is None else [layer.base, *layer.deltas]
    products = flat_products(tensors)
    if layer.base is not None:  # ⟨W0 + D_s, W0 + D_t⟩
        products = products[0, 0] + products[1:, :1] + products[:1, 1:] + products[1:, 1:]
    norms = products.diagonal().clamp_min(0).sqrt()
    weights = torch.tensor(layer.weights, dtype=torch.float64, device=norms.device)
    mean = _directions_mean(products, norms, weights, options) * (weights @ norms)
    coefficients = mean.tolist() if layer.base is None else [float(mean.sum()) - 1, *mean.tolist()]
    return Solution(weighted_sum(tensors, coefficients))


def _directions_mean(products: Tensor, norms: Tensor, weights: Tensor, options: KarcherOptions) -> Tensor:
    """Return the coefficients on the models of the spherical mean of their directions."""
    present = norms > options.tol * norms.max().clamp_max(1)
    if not present.any():
        return torch.zeros_like(norms)
    scales = torch.where(present, 1 / torch.where(present, norms, 1), 0)
    cosines = products * scales[:, None] * scales  # of the directions u_t; x is kept as coefficients on them
    shares = torch.where(present, weights, 0) / weights[present].sum()

    def length(x: Tensor) -> Tensor:
        return (x @ cosines @ x).clamp_min(0).sqrt()

    first = torch.zeros_like(shares)
    first[int(present.to(torch.int).argmax())] = 1
    x = shares / length(shares) if length(shares) >= options.tol else first
    for _ in range(options.max_iter):
        dots = (cosines @ x).clamp(-1, 1)
        theta = torch.acos(dots)
        none = (theta <= options.tol) | (theta >= torch.pi - options.tol)  # no one way leads to an opposite point
        stretch = shares * torch.where(none, 0, theta / torch.where(none, 1, torch.sin(theta)))
        step = stretch - (stretch @ dots) * x
        size = length(step)
        if size <= options.tol:
            break
        x = torch.cos(size) * x + torch.sin(size) / size * step
        x = x / length(x)
    return x * scales


def model_stock(layer: Layer, options: ModelStockOptions) -> Solution:
    """Return t Σ λ_t D_t with t = T cos θ / (1 + (T - 1) cos θ), cos θ being the mean cosine of two task vectors."""
    tasks, shape = len(layer.deltas), layer.deltas[0].shape
    filters = options.filter_wise and len(shape) > 1
    vectors = [D.reshape(-1, shape[-1]) if filters else D.reshape(1, -1) for D in layer.deltas]
    products = inner_products(vectors)
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    pairs = (norms[:, :, None] * norms[:, None, :]).clamp_min(options.least_norms)
    cosines = torch.where(pairs > 0, products / torch.where(pairs > 0, pairs, 1), 0).clamp(-1, 1)
    above = torch.triu(torch.ones(tasks, tasks, dtype=torch.bool, device=norms.device), diagonal=1)
    cosine = cosines[:, above].mean(dim=1) if tasks > 1 else torch.ones_like(norms[:, 0])
    below = 1 + (tasks - 1) * cosine
    share = torch.where(below.abs() < 1e-6, 0, tasks * cosine / torch.where(below.abs() < 1e-6, 1, below))
    return Solution(_combine(vectors, [weight * share for weight in layer.weights]).reshape(shape))


ALONG = frozenset({"permutation", "copies", "scale_zero"})

METHODS: tuple[Method, ...] = (
    with_mergekit_form(
        Method(
            name="slerp",
            summary="a point on the arc from the base to one model, each tensor being one vector",
            equation="θ = θ0 + α (x - θ0), x = (sin((1-t)φ) θ0 + sin(tφ) θ_1) / sin φ, φ the angle between θ0 and θ_1",
            citation="Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985",
            merge=slerp,
            options=SlerpOptions(),
            uses_base=True,
            models=(1, 1),
            elementwise=True,
            laws=frozenset({"permutation", "scale_zero"}),
        ),
        "the arc is taken as straight where its cosine is above 0.9995",
        options=SlerpOptions(dot_threshold=0.9995),
    ),
    Method(
        name="nuslerp",
        summary="a point on the arc between two task vectors, or two models where there is no base",
        equation="θ = θ0 + α (sin((1-t)φ) D_1 + sin(tφ) D_2) / sin φ, t = w_2 / (w_1 + w_2)",
        citation="Goddard et al., Arcee's MergeKit, EMNLP 2024",
        merge=nuslerp,
        options=NuslerpOptions(),
        needs_base=False,
        optional_base=True,
        models=(2, 2),
        elementwise=True,
        laws=ALONG,
    ),
    Method(
        name="multislerp",
        summary="the mean direction of the task vectors, or of models where there is no base, at their mean length",
        equation="θ = θ0 + α Σ λ_t ‖D_t‖ · m / ‖m‖, m = Σ λ_t D_t / ‖D_t‖",
        citation="Goddard, Multi-SLERP, 2025",
        merge=multislerp,
        options=MultislerpOptions(),
        needs_base=False,
        optional_base=True,
        elementwise=True,
        laws=ALONG,
    ),
    Method(
        name="karcher",
        summary="the Fréchet mean of the models' directions on the sphere, at their mean length",
        equation="θ = θ0 + α (x - θ0), x = Σ λ_t ‖θ_t‖ · argmin over ‖u‖ = 1 of Σ λ_t φ(u, θ_t)², φ the angle",
        citation="Karcher, Riemannian center of mass, 1977; for model merging in arXiv 2603.04972",
        merge=karcher,
        options=KarcherOptions(),
        needs_base=False,
        uses_base=True,
        elementwise=True,
        laws=ALONG,
    ),
    with_mergekit_form(
        Method(
            name="model_stock",
            summary="the mean of the models, pulled to the base where their task vectors disagree",
            equation="θ = θ0 + α t Σ λ_t D_t, t = T cos φ / (1 + (T - 1) cos φ), cos φ the mean cosine of D_s and D_t",
            citation="Jang et al., Model Stock: All we need is just a few fine-tuned models, ECCV 2024",
            merge=model_stock,
            options=ModelStockOptions(),
            models=(2, None),
            elementwise=True,
            counts_models=True,
            laws=ALONG,
        ),
        "a cosine divides by 1e-6 at least, so tensors that moved little stay near the base",
        options=ModelStockOptions(least_norms=1e-6),
    ),
)
