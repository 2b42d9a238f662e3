"""A merge kept in memory, the pre-pass of methods that look at the whole model first, and every tensor's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import release_unused_pages
from epimer.engine.batches import TOGETHER
from epimer.engine.merge import MergeWalk
from epimer.engine.protocol import Engine
from epimer.methods.registry import Method, Prepared, Prepass, describe_method
from epimer.plan.inputs import check_finite
from epimer.plan.jobs import Job, Plan, precision
from epimer.plan.participants import SAMPLED, sample_rows
from epimer.progress import Stage
from epimer.records import MergeRecord, Status, TensorRecord

# --- the pre-pass of methods that look at the whole model first ---


@dataclass(frozen=True)
class ReadJob:
    """A tensor that is only read."""

    job: Job

    @property
    def memory(self) -> int:
        """Bytes in use at once: its own, and what was read before, which its consumer still has."""
        return 2 * self.job.reads


class ReadWalk:
    """Reads the tensors that take part in a merge, and does nothing with them."""

    def __init__(self, plan: Plan, entries: int | None) -> None:
        """Read tensors whole, or in blocks of about so many entries."""
        jobs = plan.merged if entries is None else [block for job in plan.merged for block in job.blocks(entries)]
        self.plan, self.jobs = plan, [ReadJob(job) for job in jobs]

    def read(self, item: ReadJob) -> list[Tensor]:
        """Read the base's tensor, if there is one, and the models'."""
        return [one.read(item.job.name, item.job.rows) for one in self.plan.participants.all]

    def work(self, item: ReadJob, loaded: list[Tensor], device: torch.device) -> list[Tensor]:
        """Check that the tensors are finite, and move them to where they are worked on."""
        for one, W in zip(self.plan.participants.all, loaded, strict=True):
            check_finite(one, item.job.name, W)
        return [W.to(device) for W in loaded]


def prepare(plan: Plan, engine: Engine, stage: Stage) -> Prepared | None:
    """Let the method look at the whole model first, if it must."""
    jobs = plan.merged
    if plan.method.prepare is None or not jobs:
        return None

    streams = all(one.checkpoint.streams for one in plan.participants.all)

    def tensors(entries: int | None = None) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
        for item, read in engine.map(ReadWalk(plan, entries if streams else None)):
            yield item.job.name, None if plan.participants.base is None else read.pop(0), read
            stage.advance(item.job.reads, item.job.key)

    def mean(weights: list[float]) -> dict[str, Tensor]:
        return merge_in_memory(averaging_plan(plan, weights), engine)[0]

    headers = [one.headers[job.name] for one in plan.participants.all for job in jobs]
    workers = 1 if engine.devices[0].type == "cuda" else len(engine.devices)
    entries = sum(job.template.numel() for job in jobs)
    sample = partial(sample_rows, plan.participants, [(job.name, job.rows, job.template) for job in jobs])
    sampled = sample if streams and entries > 64 * SAMPLED else None
    prepass = Prepass(tensors, jobs[0].weights, mean, entries, precision(headers), workers, sampled)
    prepared = plan.method.prepare(prepass, jobs[0].options)
    release_unused_pages()  # of the blocks that it read
    return prepared


def averaging_plan(plan: Plan, weights: list[float]) -> Plan:
    """Return the plan of the models' plain average under these weights, with a plan's rules."""
    row: Method = describe_method("average")
    options = row.resolve({})
    jobs = [
        job if job.method is None else replace(job, method=row, options=options, weights=weights) for job in plan.jobs
    ]
    return replace(plan, method=row, jobs=jobs)


# --- into memory ---


class MergedState(dict[str, Tensor]):
    """A merged state dict that remembers how it was made."""

    def __init__(self, tensors: Mapping[str, Tensor], record: MergeRecord) -> None:
        super().__init__(tensors)
        self.record = record


def merge_in_memory(
    plan: Plan, engine: Engine, stage: Stage | None = None
) -> tuple[dict[str, Tensor], dict[str, TensorRecord], Prepared | None]:
    """Carry out a plan and keep the tensors; return them, their records and what the pre-pass found."""
    prepared = prepare(plan, engine, stage or Stage(None, None))
    pieces: dict[str, list[Tensor]] = {}
    records: dict[str, TensorRecord] = {}
    device = engine.devices[0]
    jobs = [job.on(device) for job in plan.parts]
    if device.type == "cpu":
        # The largest first, so that no worker is left alone with it at the end; others in their order, as are errors.
        jobs.sort(key=lambda job: -job.memory if job.memory > TOGETHER else 0)
    walk = MergeWalk(plan, jobs, prepared, stacked=device.type == "cuda")
    for batch, merged in engine.map(walk):
        for job, result, record in merged:
            pieces.setdefault(job.name, []).append(result)
            records[job.name] = joined(records.get(job.name), record)
        if stage is not None:
            stage.advance(sum(job.reads for job in batch.jobs), batch.name)
    tensors: dict[str, Tensor] = {}
    for job in plan.jobs:
        if (twin := plan.ties.get(job.name)) is not None:
            tensors[job.name] = tensors[twin]
        else:
            parts = pieces.pop(job.name)
            tensors[job.name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensors, all_records(plan, records), prepared


def joined(one: TensorRecord | None, other: TensorRecord) -> TensorRecord:
    """Return the record of a tensor that was made in two parts."""
    if one is None:
        return other
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    seconds, unchanged = (one.seconds or 0) + (other.seconds or 0), one.unchanged and other.unchanged
    worse = max((one, other), key=lambda record: (bool(record.status.remedy), record.residual))
    eta = None if one.eta is None or other.eta is None else one.eta + other.eta
    return replace(worse, shape=shape, seconds=seconds, unchanged=unchanged, eta=eta, note=one.note or other.note)


def all_records(plan: Plan, records: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Return the record of every tensor of the template, skipped and tied ones too, in their order."""
    records = dict(records)
    for name, W in plan.skipped.items():
        records[name] = TensorRecord("skip", tuple(W.shape))
    records = with_kept(plan, records)
    for name, twin in plan.ties.items():
        records[name] = replace(records[twin], status=Status.TIED, note=f"tied to {twin}")
    order = (name for name in plan.participants.template.headers if name in records)
    return {name: records[name] for name in order}


def with_kept(plan: Plan, records: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Return records that tell which tensors are left as the base has them, and which model has NaN or Inf there."""
    shapes = {name: tuple(plan.participants.template.headers[name].shape) for name in plan.assigned.kept}
    kept = {name: records.get(name, TensorRecord("copy", shape)) for name, shape in shapes.items()}
    told = {name: replace(kept[name], status=Status.NON_FINITE, note=text) for name, text in plan.assigned.kept.items()}
    return records | told
