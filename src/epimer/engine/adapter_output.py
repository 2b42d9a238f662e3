"""Carry out a plan into the folder of a PEFT adapter, which appears whole or not at all, as a model's folder does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from epimer.checkpoints.adapter_files import CONFIG, WEIGHTS, adapter_config, adapters_of
from epimer.checkpoints.sidecar_files import sidecar_files
from epimer.checkpoints.writer import Draft, as_json, plan_shards
from epimer.engine.factors import FactorWalk
from epimer.engine.in_memory import joined, with_kept
from epimer.engine.merge import MergeWalk
from epimer.engine.options import RunOptions
from epimer.engine.output import write_files
from epimer.engine.protocol import Engine
from epimer.engine.written import WritingWalk
from epimer.errors import ParameterError
from epimer.methods.registry import Prepared
from epimer.plan.adapter import whole_tensors
from epimer.plan.jobs import Job, Plan
from epimer.progress import Progress
from epimer.records import MergeRecord, TensorRecord

ONE_FILE = 1 << 62  # bytes; PEFT reads no shards


def write_adapter(
    plan: Plan, out: Path, run: RunOptions, *, overwrite: bool = False, hash_inputs: bool = False
) -> MergeRecord:
    """Carry out the plan of an adapter, or find that it has been carried out."""
    if run.engine != "local":
        raise ParameterError("an adapter is small and merged on this machine; leave out --engine, or output: lora.")
    plan.check()
    engine = run.start(plan.parts)
    shards = [replace(one, file=WEIGHTS) for one in plan_shards(_headers(plan), {}, ONE_FILE)]
    how = {"overwrite": overwrite, "hash_inputs": hash_inputs}
    return write_files(plan, out, run, engine, shards, _sidecars(plan), _merge_all, **how)


def _headers(plan: Plan) -> dict[str, Tensor]:
    """Return the tensors of the adapter's file, without data."""
    keys = whole_tensors(plan).keys
    headers: dict[str, Tensor] = {}
    for job in plan.jobs:
        headers |= {keys[job.name]: job.template} if job.lora is None else job.lora.headers
    return headers


def _sidecars(plan: Plan) -> dict[str, bytes]:
    """Return adapter_config.json, and the tokenizer where it is not the base's or has another chat template."""
    whole = whole_tensors(plan)
    adapters = [one for model in plan.participants.models for one in adapters_of(model.checkpoint)]
    modules = [job.lora for job in plan.jobs if job.lora is not None]
    weights = [name for name, W in plan.participants.template.headers.items() if W.dim() > 1]
    config = adapter_config(modules, whole.modules, whole.biases, whole.tokens, weights, adapters)
    same = plan.tokenizer == plan.participants.donor.folder and not plan.tokenizer_files
    files = sidecar_files(None, None if same else plan.tokenizer, None)
    return {CONFIG: as_json(config), **files, **plan.tokenizer_files}


def _merge_all(
    plan: Plan, engine: Engine, draft: Draft, prepared: Prepared | None, progress: Progress
) -> dict[str, TensorRecord]:
    """Write every layer's factors and every whole tensor; return their records in the base's order."""
    done = dict(draft.done)
    stage = progress.begin("merging", plan.reads)
    left = [job for job in plan.parts if not {*_keys(job)} <= done.keys()]
    keys = whole_tensors(plan).keys
    stage.advance(sum(job.reads for job in plan.parts) - sum(job.reads for job in left), "")
    for job, (tensors, record) in engine.map(FactorWalk(plan, [job for job in left if job.lora is not None], prepared)):
        for key, W in tensors.items():
            draft.put(key, W, record)
            done[key] = record
        stage.advance(job.reads, job.name)
    whole = MergeWalk(plan, [job.on(engine.devices[0]) for job in left if job.lora is None], prepared)
    for _, merged in engine.map(WritingWalk(whole, draft, names=keys)):
        for part, written, record in merged:
            draft.wrote(part.key, keys[part.name], part.skip, written, record)
            done[part.key] = record
            stage.advance(part.reads, part.key)
    draft.flush()
    records: dict[str, TensorRecord] = {}
    shapes = {name: tuple(W.shape) for name, W in plan.participants.template.headers.items()}
    for job in plan.parts:
        record = done[_keys(job)[0]]
        for name in job.names:
            own = replace(record, shape=shapes[name]) if job.experts else record
            records[name] = joined(records.get(name), own)
    return with_kept(plan, records)


def _keys(job: Job) -> tuple[str, ...]:
    """Return what the journal calls the parts of a job: the factors' names, or the tensor's own key."""
    return (job.key,) if job.lora is None else job.lora.names
