"""Merge by a weighted sum of task vectors, which most entries of most merges are, in as few passes as there can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import allocate
from epimer.geometry.linalg import LowRank, dense, nonfinite
from epimer.plan.memory import STREAMED

SUMMED = 1 << 18  # entries of a larger tensor that are summed at a time: fewer cost more calls, more leave the cache


def add_weighted_sum(
    result: Tensor,
    base: Tensor | None,
    models: Sequence[Tensor | LowRank],
    weights: Sequence[float],
    scale: float,
    precision: torch.dtype,
) -> bool:
    """Write θ0 + scale · Σ weights_t (θ_t - θ0) to `result`, and return whether every entry of it is finite.

    Every operation is rounded to `precision` on its own, in the order of `weighted_sum`, so that an entry does not
    depend on where in a tensor it lies. A block at a time goes through the same memory. Where all weights are the same
    power of two, as in the average of 2, 4 or 8 models, the sum is multiplied by it once: that gives the same bits.

    Args:
        result: on the CPU, in the dtype to write.
        base: θ0; None where the models themselves are summed.
        models: θ_t, or their differences from the base as factors.
        weights: one per model.
        scale: multiplies the sum.
        precision: of all arithmetic.
    """
    given = [] if base is None else [base]
    given += [W if W.shape == result.shape else W.reshape(result.shape) for W in map(dense, models)]
    if result.numel() <= STREAMED:  # any call, even one that only takes a view, makes workers wait for each other
        blocks = [(result, *given)]
    else:
        blocks = list(zip(*(torch.split(W.reshape(-1), SUMMED) for W in (result, *given)), strict=True))
    converted = base is not None and base.dtype != precision
    common = weights[0] if _one_power_of_two(weights) else None
    scale = scale if common is None else scale * common
    rooms = allocate((3 if converted else 2, *blocks[0][0].shape), precision).unbind()
    finite = True
    for target, *parts in blocks:
        total, term, *start = rooms if target.shape == rooms[0].shape else [room[: len(target)] for room in rooms]
        W0 = None if base is None else parts.pop(0)
        if W0 is not None and converted:
            W0 = start[0].copy_(W0)
        for t, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            D = term if t else total
            x = in_precision(part, D)
            if W0 is not None and not isinstance(models[t], LowRank):
                x = torch.sub(x, W0, out=D)
            if common is None:
                x = torch.mul(x, weight, out=D)
            if t:
                total.add_(x)  # not add_(x, alpha=weight), whose rounding depends on where an entry lies
            elif x is not total:
                total.copy_(x)
        if scale != 1:
            total.mul_(scale)
        if W0 is not None and target.dtype == precision:
            torch.add(total, W0, out=target)
        else:
            target.copy_(total if W0 is None else total.add_(W0))
        finite = not nonfinite(target) and finite
    return finite


def _one_power_of_two(weights: Sequence[float]) -> bool:
    """Whether all weights are the same power of two, by which any number is multiplied without rounding."""
    return math.frexp(weights[0])[0] == 0.5 and all(weight == weights[0] for weight in weights)


def in_precision(x: Tensor, room: Tensor) -> Tensor:
    """Return `x` in the precision of `room`: itself, or else as a copy there."""
    return x if x.dtype == room.dtype else room.copy_(x)
