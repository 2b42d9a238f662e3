"""Compute some tensors of a merge again, and compare them with those that were written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from epimer.engine.factors import FactorWalk
from epimer.engine.in_memory import prepare
from epimer.engine.merge import MergeWalk
from epimer.engine.options import RunOptions
from epimer.plan.adapter import whole_tensors
from epimer.plan.jobs import Job, Plan
from epimer.progress import Progress

TOLERANCE = 1e-3
"""how far merges of the same inputs on CPUs may be apart where torch's version, the processor, the threads or the order
of the models differ: ‖W - W'‖ / ‖W' - W0‖, where one rounding of every entry to its dtype is not counted; where none of
them differs, the bytes are the same (measured: up to 5e-5)"""
GPU_TOLERANCE = 1e-2
"""the same between a CPU and a GPU, which part where singular values are nearly equal (measured: up to 2e-3)"""


def recompute(
    plan: Plan, names: Collection[str], run: RunOptions, progress: Progress
) -> Iterator[tuple[Job, dict[str, Tensor]]]:
    """Yield the jobs of some tensors, each with what is written for it: name in the file -> tensor."""
    parts = [job for job in plan.parts if job.name in names]
    engine = run.start(parts)
    reads = 0 if plan.method.prepare is None else plan.method.passes * sum(job.reads for job in plan.merged)
    prepared = prepare(plan, engine, progress.begin("looking at the whole model", reads)) if reads else None
    stage = progress.begin("computing again", sum(job.reads for job in parts))
    for job, (tensors, _) in engine.map(FactorWalk(plan, [job for job in parts if job.lora is not None], prepared)):
        yield job, tensors
        stage.advance(job.reads, job.name)
    walk = MergeWalk(plan, [job.on(engine.devices[0]) for job in plan.parts if job.lora is None], prepared)
    # Small tensors are merged together: here in the same company again, so that no rounding differs.
    walk.jobs = [batch for batch in walk.jobs if any(job.name in names for job in batch.jobs)]
    whole = {job.name: job for job in plan.jobs}
    adapter = plan.recipe is not None and plan.recipe.output == "lora"
    keys = whole_tensors(plan).keys if adapter else {name: name for name in whole}
    pieces: list[Tensor] = []
    for _, merged in engine.map(walk):
        for part, result, _ in merged:
            if part.name not in names:
                continue
            pieces.append(result)
            stage.advance(part.reads, part.key)
            if part.skip + part.writes == whole[part.name].writes:
                yield whole[part.name], {keys[part.name]: torch.cat(pieces) if len(pieces) > 1 else result}
                pieces = []


def difference(plan: Plan, job: Job, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> float | None:
    """Return how far what was written is from what is computed, as `TOLERANCE` has it; None where no bit differs."""
    pairs = [(stored[name], W) for name, W in computed.items() if name in stored]
    if len(pairs) < len(computed) or any(V.dtype != W.dtype or V.shape != W.shape for V, W in pairs):
        return float("inf")
    if all(_same_bits(V, W) for V, W in pairs):
        return None
    if not all(W.is_floating_point() for _, W in pairs):
        return float("inf")
    eps, base = torch.finfo(pairs[0][1].dtype).eps, plan.participants.base
    if job.lora is not None:  # factors of one product may have other signs, or another order
        (A, B), (A0, B0) = ([of[name].double() for name in job.lora.names] for of in (stored, computed))
        product = job.lora.product
        V, W, rounding = product(A, B), product(A0, B0), 2 * eps * product(A0.abs(), B0.abs())
        changed = W
    else:
        V, W = (one.double() for one in pairs[0])
        rounding, changed = eps * W.abs(), W
        if base is not None:
            start = base.read(job.name).double()
            changed = W - (start[list(job.tokens)] if job.tokens else start)
    excess = ((V - W).abs() - rounding).clamp(min=0)
    gap = float(excess.norm()) / max(float(changed.norm()), 1e-300)
    return gap if gap == gap else float("inf")


def _same_bits(V: Tensor, W: Tensor) -> bool:
    return torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (V, W)))
