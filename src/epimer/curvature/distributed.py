"""Measurements of several processes: each rank measures its own part of the data, the sum is one measurement."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from epimer.curvature.curvature import Curvature, joined, mean, tensors_of
from epimer.errors import CurvatureError
from epimer.geometry.metric import Projected


def ranks() -> tuple[int, int]:
    """Return this process's rank and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(curvature: Curvature) -> Curvature:
    """Return the sum of all ranks' measurements, the same on every rank; one tensor is exchanged at a time."""
    _, count = ranks()
    if count == 1:
        return curvature
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, (curvature.about, list(curvature)))
    abouts = [about for about, _ in gathered]
    about = joined(abouts)
    if any(names != list(curvature) for _, names in gathered):
        raise CurvatureError("the ranks measured different tensors; give every rank the same model and layers.")
    total: dict[str, Any] = {}
    for name, metric in curvature.metrics.items():
        dtype = next(iter(tensors_of(metric).values())).dtype
        own: Any = metric.to(torch.device("cpu"), dtype)
        dist.all_gather_object(gathered, replace(own, basis=None) if isinstance(own, Projected) else own)
        total[name] = mean(name, gathered, abouts)
        if isinstance(own, Projected):
            total[name] = replace(total[name], basis=own.basis)  # which every rank has, and need not be sent
    return Curvature(total, about)


def leave() -> None:
    """End a process that torchrun or accelerate started, once all is written and said.

    A rank was seen to abort when the interpreter shut down while gloo's threads were still ending; torchrun then calls
    the whole run a failure. So a rank leaves without that shutdown.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
