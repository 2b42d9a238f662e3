"""Measure the curvature of a checkpoint on a data set: load both, choose samples, measure, save."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.atomic_files import check_new
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.lazy_tensors import LazyTensors
from epimer.checkpoints.memory import total_bytes
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import SEQUENCES, Curvature
from epimer.curvature.distributed import first_of_ranks, process_group, ranks
from epimer.curvature.estimate import estimate_curvature, matching
from epimer.curvature.format import HEADER, stored_fingerprint
from epimer.curvature.kept_inputs import TASKS, InputKeeper
from epimer.curvature.kinds import KINDS
from epimer.curvature.optimizer_state import MOMENTS
from epimer.curvature.stored_names import on_disk, split_experts
from epimer.errors import (
    CheckpointError,
    CurvatureError,
    DataError,
    EpimerWarning,
    LeftOutWarning,
    ParameterError,
    TooLargeError,
    listed,
    nearest,
    warn,
)
from epimer.geometry.linalg import nonfinite
from epimer.methods.rules import stored_name, with_members
from epimer.plain_text import format_size
from epimer.tasks.data import choose, open_data
from epimer.tasks.labels import POLICIES, SampleError
from epimer.tasks.loading import AUTO, DTYPES, IMAGE, POOLINGS, check_device_option, read_head
from epimer.tasks.task import Task, load_task
from epimer.tasks.task_network import task_network

CHOICES: dict[str, Collection[str]] = {
    "task": AUTO,
    "kind": KINDS,
    "labels": POLICIES,
    "sequence": SEQUENCES,
    "pooling": POOLINGS,
    "moment": MOMENTS,
    "dtype": DTYPES,
}
SAMPLES = 256
SAID = 10_000_000  # bytes of a folder that are said before measuring
FEW = 8  # samples; the error of a mean over fewer is more than a third of it


@dataclass(frozen=True)
class Request:
    """The options of `epimer curvature`."""

    model: str
    task: str
    out: Path
    data: str | None = None
    at: str | None = None  # a merged model, at whose tensors the model's task is measured
    no_inputs: bool = False  # whether the inputs are left out of the folder
    split: str | None = None
    subset: str | None = None
    text: str | None = None
    label: str | None = None
    image: str | None = None
    audio: str | None = None
    head: Path | None = None
    pooling: str = "auto"
    kind: str | None = None  # by default kronecker, or diagonal for an optimiser's state
    labels: str = "model"
    sequence: str = "expand"
    samples: int | None = None  # by default 256, where `fraction` is None
    fraction: float | None = None
    seed: int = 0
    basis: Path | None = None
    recipe: Path | None = None  # of the merge that it is for; read by `api.measuring`
    layers: tuple[str, ...] = ()
    passes: int | None = None  # over the data; by default as many as memory asks for
    optimizer: Path | None = None
    factors: Path | None = None  # a folder of kronfluence's or bergson's, instead of data
    moment: str = "second"
    batch_size: int = 16
    max_length: int = 512
    dtype: str = "float32"
    device: str = "auto"
    overwrite: bool = False
    progress: bool = True


def measure(request: Request) -> Curvature | None:
    """Measure and save curvature; return it, or None on every rank of torch.distributed but the first."""
    basis = check_request(request)
    with process_group():
        rank, count = ranks()
        if request.data is not None:
            part = _measure_rank(request, basis, rank, count)
            total = part.summed_over_ranks()
            curvature = Curvature(total.metrics, total.provenance, inputs=part.inputs)
        else:
            curvature = _imported(request)
        if rank == 0:
            curvature.save(request.out, overwrite=request.overwrite)
    return curvature if rank == 0 else None


def warn_of_few(request: Request, curvature: Curvature) -> None:
    """Say that there were fewer samples than asked for, or so few that the curvature is mostly noise."""
    samples = curvature.provenance.samples
    if request.data is None or samples is None:
        return
    measured = f"curvature was measured on {samples} sample{'s' * (samples > 1)}"
    if samples < (request.samples or 0):
        problem = f"{measured} instead of {request.samples}: {request.data} has no more rows"
        warn(EpimerWarning(f"{problem}; give more data, or accept more noise."))
    elif samples < FEW:
        warn(EpimerWarning(f"{measured} and is mostly noise; take a few dozen (--samples, by default {SAMPLES})."))


def _measure_rank(request: Request, basis: StoredBasis | None, rank: int, count: int) -> Curvature:
    """Measure one rank's samples; with a recipe, what does not fit on one rank is refused on all of them."""
    refusal: TooLargeError | None = None
    try:
        part = measure_shard(request, basis, rank, count)
    except TooLargeError as error:
        if request.recipe is None:
            raise
        refusal = error
    if request.recipe is not None and (refusal := first_of_ranks(refusal)) is not None:
        raise refusal
    return part


def check_request(request: Request) -> StoredBasis | None:
    """Refuse options that cannot be served, before any work is done for them; return the basis to measure in."""
    for name, known in CHOICES.items():
        value = getattr(request, name)
        if value is not None and value not in known:
            raise ParameterError(f"--{name} must be one of {', '.join(known)}, got {value!r}.{nearest(value, known)}")
    for name in ("samples", "batch_size", "max_length", "passes"):
        if (count := getattr(request, name)) is not None and count < 1:
            raise ParameterError(f"--{name.replace('_', '-')} must be at least 1, got {count}.")
    if request.fraction is not None and not 0 < request.fraction <= 1:
        raise ParameterError(f"--fraction must be above 0 and at most 1, got {request.fraction}.")
    if None not in (request.fraction, request.samples):
        raise ParameterError("give either --samples or --fraction, not both.")
    sources = {"data": request.data, "optimizer": request.optimizer, "import": request.factors}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        others = "or --optimizer, an optimiser's state to read, or --import, factors of kronfluence or bergson"
        raise ParameterError(f"give either --data, to measure on, {others}.")
    if None not in (request.basis, request.recipe):
        raise ParameterError("give either --basis or --recipe, whose basis is found or built where it is needed.")
    for name in ("basis", "recipe", "layers", "at", "passes"):
        if request.data is None and getattr(request, name):
            raise ParameterError(f"--{name} is for measuring on --data; leave it out with --{given[0]}.")
    if request.factors is not None and request.kind not in (None, "kronecker"):
        raise ParameterError(f"--import gives Kronecker factors; leave out --kind {request.kind}.")
    if request.optimizer is not None and request.kind not in (None, "diagonal"):
        raise ParameterError(f"an optimiser's state gives a diagonal; leave out --kind {request.kind}.")
    check_device_option(request.device)
    if request.kind is not None and KINDS[request.kind].collector is None and request.basis is request.recipe is None:
        problem = f"--kind {request.kind} is measured in a basis only"
        raise ParameterError(f"{problem}; make one with `epimer basis`, or say with --recipe which merge it is for.")
    check_new(request.out, HEADER, overwrite=request.overwrite)
    return None if request.basis is None else StoredBasis(Path(os.path.expanduser(request.basis)), str(request.basis))


def _load(request: Request) -> Task:
    """Load the model with its task; refuse a model with NaN or Inf in its parameters."""
    device = request.device
    if device == "auto":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    task = load_task(
        request.model,
        request.task,
        head=request.head,
        pooling=request.pooling,
        dtype=getattr(torch, request.dtype),
        device=device,
        progress=request.progress and sys.stderr.isatty(),
    )
    for name, W in task.model.named_parameters():
        if bad := nonfinite(W.detach()):
            where = f"{task.checkpoint.where}[{task.names.get(name, name)!r}]"
            problem = f"{where} holds NaN or Inf in {bad} of {W.numel()} entries, in {request.dtype}"
            raise CheckpointError(f"{problem}; repair the model, or take another --dtype.")
    return task


def _imported(request: Request) -> Curvature:
    """Read an optimiser's state, or factors that another library measured."""
    task = _load(request)
    if request.factors is not None:
        curvature = Curvature.from_factors(request.factors, task.model, samples=request.samples)
    else:
        assert request.optimizer is not None
        curvature = Curvature.from_optimizer(request.optimizer, task.model, moment=request.moment)
    return _under_stored_names(curvature, task)


def measure_shard(request: Request, basis: StoredBasis | None, rank: int, count: int) -> Curvature:
    """Measure curvature on every `count`-th of the samples, from the `rank`-th on; the first shard keeps inputs."""
    assert request.data is not None
    if KINDS[request.kind or "kronecker"].add is None and count > 1:
        problem = f"--kind {request.kind} cannot be measured by several processes"
        raise ParameterError(f"{problem}; start one, or take kronecker.")
    table = open_data(request.data, split=request.split, subset=request.subset, progress=request.progress)
    task = _load(request)
    merged = None if request.at is None else _copy_merged(request.at, task, progress=request.progress)
    task.require_labels = request.labels == "true"
    samples = request.samples or SAMPLES if request.fraction is None else None
    rows = choose(len(table), samples=samples, fraction=request.fraction, seed=request.seed, least=request.batch_size)
    mine = rows[rank::count]
    if not mine:
        raise DataError(f"{table.name} gives {len(rows)} samples to {count} processes; start fewer of them.")
    columns = {name: getattr(request, name) for name in ("text", "label", "image", "audio")}
    batches = task.batches(table, mine, batch_size=request.batch_size, max_length=request.max_length, **columns)
    keeper = None if request.no_inputs or rank or task.kind not in TASKS else _keeper(request, task)
    try:
        curvature = _estimate(
            request, task, basis, batches if keeper is None else keeper.watch(batches), rank, len(mine)
        )
    except SampleError as error:
        raise CurvatureError(str(error).replace(f"sample {error.sample}", table.where(mine[error.sample]))) from error
    stored = _under_stored_names(curvature, task)
    provenance = replace(stored.provenance, seed=request.seed)
    if merged is not None:
        checkpoint, copied = merged
        measured = dict.fromkeys(map(stored_name, stored.metrics))
        at = stored_fingerprint(checkpoint, {name: copied[name] for name in measured if name in copied})
        provenance = replace(provenance, at=at)
    return Curvature(stored.metrics, provenance, inputs=None if keeper is None else keeper.kept)


def _estimate(
    request: Request, task: Task, basis: StoredBasis | None, batches: Iterable[Any], rank: int, total: int
) -> Curvature:
    """Measure a loaded model on the `total` samples of one process, by the names of its parameters in memory."""

    def announce(tensors: int, nbytes: int) -> None:
        if nbytes < SAID:
            return
        taken, own = format_size(nbytes), format_size(total_bytes(task.checkpoint))
        each = " for each token" if request.kind == "samples" and basis is None else ""
        about = f"measuring {request.kind or 'kronecker'} of {tensors} tensors"
        warn(EpimerWarning(f"{about}: {request.out} will take up to {taken}{each} (the model takes {own})."))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftOutWarning)  # the command names them with the result
        curvature = estimate_curvature(
            task.model,
            batches,
            task.loss,
            kind=request.kind or "kronecker",
            labels=request.labels,
            samples=None,
            basis=None if basis is None else _for_model(basis, task),
            seed=request.seed + rank,
            sequence=request.sequence,
            layers=_patterns(request.layers, task),
            passes=request.passes,
            scratch=next(folder for folder in request.out.absolute().parents if folder.is_dir()),
            progress=request.progress and rank == 0,
            total=total,
            announce=None if rank else announce,
        )
    if basis is None:
        return curvature
    provenance = replace(curvature.provenance, basis=basis.fingerprint, basis_folder=basis.name)
    return Curvature(curvature.metrics, provenance)


def _keeper(request: Request, task: Task) -> InputKeeper:
    """Return what keeps the inputs, with the head that they are classified by where it is not part of the model."""
    head = {} if request.head is None else read_head(request.head, torch.float32).state_dict()
    return InputKeeper(task.kind, request.pooling, 0 if task.kind == IMAGE else task.padding, head)


def _copy_merged(text: str, task: Task, *, progress: bool) -> tuple[Checkpoint, dict[str, str]]:
    """Copy a merged model's tensors into a task's network; return it, and name in the task's model -> name in it."""
    merged = open_checkpoint(text, progress=progress and sys.stderr.isatty())

    def read(name: str) -> Tensor:
        W = merged.read(name)
        if W.is_floating_point() and (bad := nonfinite(W)):
            raise CheckpointError(f"{merged.where}[{name!r}] holds NaN or Inf in {bad} entries; merge it again.")
        return W

    network = task_network(task, merged.headers.keys())
    fitting = {name: W for name, W in network.targets.items() if merged.headers[name].shape == W.shape}
    if not any(W.dim() > 1 for W in fitting.values()):
        raise CheckpointError(
            f"--at {merged.where} has no matrix of the same name and shape as {task.checkpoint.where}: it has "
            f"{listed(merged.headers)}; give a merge of this model."
        )
    network.copy(LazyTensors({name: merged.headers[name] for name in fitting}, read))
    return merged, {network.stored[name]: name for name in fitting}


def _patterns(layers: tuple[str, ...], task: Task) -> list[str]:
    """Return the parameters that match patterns of names on disk, by their names in memory; without patterns all."""
    split = split_experts(task)
    if not layers:
        return [*task.names, *dict.fromkeys(map(stored_name, split))]
    tensors = {name: [stored] for name, stored in task.names.items()}
    tensors |= {name: [part.name for part in parts] for name, parts in split.items()}
    every = [stored for names in tensors.values() for stored in names]
    named = set(matching(layers, every, task.checkpoint.where))
    return [name for name, names in tensors.items() if named.intersection(names)]


def _for_model(basis: StoredBasis, task: Task) -> dict[str, Any]:
    """Return a basis by the names of the parameters in memory."""
    loaded = with_members({stored: name for name, stored in task.names.items()}, basis)
    if missing := [name for name in basis if name not in loaded]:
        problem = f"{basis.where} has a basis for {missing[0]!r}, which {task.checkpoint.where} does not hold"
        raise CurvatureError(f"{problem}; build it from a recipe with this model.")
    return {loaded[name]: basis[name] for name in basis}


def _under_stored_names(curvature: Curvature, task: Task) -> Curvature:
    """Return curvature by the names of the tensors in the checkpoint on disk."""
    split = split_experts(task)
    stored, joined = on_disk(curvature, task, split), {stored_name(name) for name in split}
    fingerprint = stored_fingerprint(task.checkpoint, {name: name for name in map(stored_name, stored.metrics)})
    unmatched = [name for name in task.unmatched if name not in joined]
    unnamed = dict.fromkeys(unmatched, "it is not in the checkpoint under a name of its own")
    left_out = {**stored.provenance.left_out, **unnamed}
    ties = {name: twin for name, twin in stored.provenance.ties.items() if name in task.checkpoint.headers}
    return Curvature(stored.metrics, replace(stored.provenance, model=fingerprint, left_out=left_out, ties=ties))
