"""The kinds of curvature: for each the class that holds it, the collector that measures it, and how two add up.

A new kind is a Metric (geometry/metric.py), a Collector (collectors.py) and a row here: measuring, the folder format,
sums of measurements and the command line read this table. The metric's tensor fields are its tensors on disk, and its
`serves` names the kinds in whose place methods take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from epimer.curvature import collectors
from epimer.curvature.collectors import Collector, padded
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Projected, Samples
from epimer.geometry.subspace import Basis, Tagged, TensorProduct

# (one tensor's curvature on each data set, samples of each, tokens of each) -> its curvature on all of them
Add = Callable[[Sequence[Any], Sequence[int], Sequence[int]], Metric]


def tensors_of(metric: Metric) -> dict[str, Tensor]:
    """Return a metric's tensors by the names of its fields, under which they are stored."""
    values = {field.name: getattr(metric, field.name) for field in fields(metric)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def add_means(metrics: Sequence[Any], samples: Sequence[int], tokens: Sequence[int]) -> Metric:
    """Return the mean of every tensor, weighted by the samples."""
    return replace(metrics[0], **{part: _mean(metrics, part, samples) for part in tensors_of(metrics[0])})


def add_factors(metrics: Sequence[Any], samples: Sequence[int], tokens: Sequence[int]) -> Metric:
    """Return the mean of the gradients' factor, weighted by the samples, and of the inputs' factor, by the tokens."""
    gradients, inputs = ("G", "A") if metrics[0].inputs else ("A", "G")
    means = {gradients: _mean(metrics, gradients, samples), inputs: _mean(metrics, inputs, tokens)}
    return replace(metrics[0], **means)


def add_samples(metrics: Sequence[Any], samples: Sequence[int], tokens: Sequence[int]) -> Metric:
    """Return all samples together, scaled so that the mean over rows is the mean over samples."""
    if isinstance(metrics[0], Projected):
        return add_means(metrics, samples, tokens)
    rows = sum(len(metric.g) for metric in metrics)
    scales = [math.sqrt(n * rows / (sum(samples) * len(m.g))) for n, m in zip(samples, metrics, strict=True)]
    g = padded([metric.g * scale for metric, scale in zip(metrics, scales, strict=True)])
    return Samples(g=g, x=padded([metric.x for metric in metrics]))


def _mean(metrics: Sequence[Any], part: str, counts: Sequence[int]) -> Tensor:
    tensors = [getattr(metric, part) for metric in metrics]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, count in zip(tensors, counts, strict=True):
        total.add_(tensor.to(total), alpha=count)
    return (total / max(1, sum(counts))).to(tensors[0].dtype)


@dataclass(frozen=True)
class Kind:
    """One kind of curvature."""

    metric: type[Metric]  # holds one tensor's curvature; in a basis that is always Projected
    collector: type[Collector] | None  # measures it from per-sample gradients; None: second derivatives (exact.py)
    bases: tuple[type[Basis], ...] = ()  # the kinds of basis it can be measured in
    add: Add | None = add_means  # adds measurements of disjoint data; None where the data must be measured at once
    # from what the first pass over the data measured, the collector of a second one
    refine: Callable[[Mapping[str, Metric], torch.dtype, torch.device], Collector] | None = None
    indefinite: bool = False  # whether it may have negative eigenvalues, which are taken as 0


KINDS: dict[str, Kind] = {
    "diagonal": Kind(Diagonal, collectors.DiagonalCollector, bases=(Tagged,)),
    "kronecker": Kind(Kronecker, collectors.KroneckerCollector, bases=(Tagged, TensorProduct), add=add_factors),
    "ekfac": Kind(EKFAC, collectors.KroneckerCollector, add=None, refine=collectors.EKFACCollector),
    "samples": Kind(Samples, collectors.SamplesCollector, bases=(Tagged,), add=add_samples),
    "hessian": Kind(Projected, None, bases=(Tagged,), indefinite=True),
    "ggn": Kind(Projected, None, bases=(Tagged,)),
}
