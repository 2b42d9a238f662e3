"""Measuring with several processes: each rank measures its own part of the data, and the results are added."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from epimer.curvature.curvature import Curvature, add_metrics, combined_provenance
from epimer.curvature.kinds import tensors_of
from epimer.errors import CurvatureError
from epimer.geometry.metric import Projected


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(curvature: Curvature) -> Curvature:
    """Return the measurement of all ranks' data together, on every rank; one tensor is exchanged at a time."""
    _, count = ranks()
    if count == 1:
        return curvature
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, (curvature.provenance, list(curvature)))
    provenances = [provenance for provenance, _ in gathered]
    combined = combined_provenance(provenances)
    if any(names != list(curvature) for _, names in gathered):
        raise CurvatureError("the ranks measured different tensors; give every rank the same model and layers.")
    total: dict[str, Any] = {}
    for name, metric in curvature.metrics.items():
        dtype = next(iter(tensors_of(metric).values())).dtype
        own: Any = metric.to(torch.device("cpu"), dtype)
        dist.all_gather_object(gathered, replace(own, basis=None) if isinstance(own, Projected) else own)
        total[name] = add_metrics(name, gathered, provenances)
        if isinstance(own, Projected):
            total[name] = replace(total[name], basis=own.basis)  # every rank has it, so it is not sent
    return Curvature(total, combined)


def leave() -> None:
    """End a process that torchrun or accelerate started, without the interpreter's shutdown.

    A rank can abort when the interpreter shuts down while gloo's threads are still ending; torchrun then reports the
    run as failed. Call it last, when all output is written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
