"""Merge by a weighted sum of task vectors, which most entries of most merges are, in as few passes as there can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epimer.geometry.linalg import LowRank, dense, nonfinite

PART = 1 << 18  # entries at a time: few enough for the cache, and so many that workers do not wait for the interpreter


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
    depend on where in a tensor it lies. A part at a time goes through memory that never leaves the processor's cache.

    Args:
        result: on the CPU, in the dtype to write.
        base: θ0; None where the models themselves are summed.
        models: θ_t, or their differences from the base as factors.
        weights: one per model.
        scale: multiplies the sum.
        precision: of all arithmetic.
    """
    columns = [torch.split(dense(W).reshape(-1), PART) for W in models]
    starts = None if base is None else torch.split(base.reshape(-1), PART)
    scratch = torch.empty(3, min(PART, result.numel()), dtype=precision)
    finite = True
    for i, target in enumerate(torch.split(result.reshape(-1), PART)):
        total, term, start = scratch[:, : len(target)].unbind()
        W0 = None if starts is None else in_precision(starts[i], start)
        for t, (column, weight) in enumerate(zip(columns, weights, strict=True)):
            D = term if t else total
            x = in_precision(column[i], D)
            if W0 is not None and not isinstance(models[t], LowRank):
                x = torch.sub(x, W0, out=D)
            torch.mul(x, weight, out=D)
            if t:
                total.add_(D)  # not add_(x, alpha=weight), whose rounding depends on where an entry lies
        if scale != 1:
            total.mul_(scale)
        if W0 is not None and target.dtype == precision:
            torch.add(total, W0, out=target)
        else:
            target.copy_(total if W0 is None else total.add_(W0))
        finite = not nonfinite(target) and finite
    return finite


def in_precision(x: Tensor, room: Tensor) -> Tensor:
    """Return `x` in the precision of `room`: itself, or else as a copy there."""
    return x if x.dtype == room.dtype else room.copy_(x)
