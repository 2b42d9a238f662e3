"""Measure curvature on a cluster: each job measures its part of the data, and the driver adds the parts."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from epimer.atomic_files import held, output_path, remove_abandoned, remove_folder
from epimer.checkpoints import open_checkpoint
from epimer.curvature.basis import StoredBasis
from epimer.curvature.curvature import Curvature, sum_of
from epimer.curvature.kinds import KINDS
from epimer.curvature.measure import Request, check_request, measure_shard
from epimer.engine.options import RunOptions
from epimer.engine.ray import Ray, one_per_machine, versions
from epimer.errors import EpimerError, EpimerWarning, ParameterError, warn
from epimer.progress import Progress

COPIES = 4  # of the model that a measurement holds: parameters, gradients, and about two of Kronecker factors


@dataclass(frozen=True)
class DataShard:
    """Every n-th sample of the data."""

    number: int
    memory: int

    @property
    def name(self) -> str:
        """What to call it in an error."""
        return f"part {self.number} of the data"


@dataclass(frozen=True)
class CurvatureWalk:
    """Measures the parts of the data, and writes each one's curvature to a folder of its own."""

    request: Request
    basis: StoredBasis | None
    folder: Path
    count: int
    """of all parts"""
    jobs: Sequence[DataShard]

    def read(self, shard: DataShard) -> None:
        """Read nothing ahead: the model and the data are opened where they are used."""

    def work(self, shard: DataShard, loaded: None, device: torch.device) -> list[str]:
        """Measure one part; return what there was to warn of."""
        request = replace(self.request, device=device.type, progress=False)
        with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
            warnings.simplefilter("always", EpimerWarning)
            part = measure_shard(request, self.basis, shard.number, self.count)
            part.save(part_folder(self.folder, shard.number), overwrite=True)
        return [str(one.message) for one in caught if issubclass(one.category, EpimerWarning)]


def part_folder(folder: Path, number: int) -> Path:
    """Return where the curvature of one part of the data is kept until all are added."""
    return folder / f"part-{number}"


def _measured(folder: Path) -> Curvature | None:
    """Return the curvature that a killed run left in a folder; what is damaged is removed, and None is returned."""
    if not folder.exists():
        return None
    try:
        part = Curvature.load(folder)
        for name in part:  # which checks it
            _ = part.metrics[name]
        _ = part.inputs
    except EpimerError:
        remove_folder(folder)
        return None
    return part


def measure_on_cluster(request: Request, run: RunOptions, shards: int | None = None) -> Curvature:
    """Measure and save curvature as `shards` processes of torchrun would, each part as a job of a cluster.

    A run that was killed is taken up: parts that were written are not measured again.
    """
    if shards is not None and shards < 1:
        raise ParameterError(f"--shards must be at least 1, got {shards}.")
    if request.data is None:
        raise ParameterError("an optimiser's state and factors are read, not measured; leave out --engine.")
    request = _absolute(request)
    basis = check_request(request)
    engine = one_per_machine(request.device, shards, run.address)
    count = shards or len(engine.devices)
    kind = request.kind or "kronecker"
    if KINDS[kind].add is None and count > 1:
        raise ParameterError(f"--kind {kind} cannot be measured in several parts; give --shards 1, or take kronecker.")
    model = open_checkpoint(request.model)
    entries = sum(W.numel() for name, W in model.headers.items() if name not in model.ties)
    memory = COPIES * entries * getattr(torch, request.dtype).itemsize
    parts_of = f".{request.out.name}.epimer-parts-"
    folder = request.out.parent / f"{parts_of}{_key(request, model.state, count)}"
    request.out.parent.mkdir(parents=True, exist_ok=True)
    with held(folder, request.out, folder=True):
        result = _measure(request, basis, engine, folder, count, memory, progress=run.progress)
        remove_folder(folder)
        remove_abandoned(list(request.out.parent.glob(f"{glob.escape(parts_of)}*")))  # of other requests
    return result


def _measure(
    request: Request, basis: StoredBasis | None, engine: Ray, folder: Path, count: int, memory: int, *, progress: bool
) -> Curvature:
    """Measure the parts that are not in a folder yet, add all of them, and save the sum."""
    parts = {n: part for n in range(count) if (part := _measured(part_folder(folder, n))) is not None}
    left = [n for n in range(count) if n not in parts]
    walk = CurvatureWalk(request, basis, folder, count, [DataShard(n, memory) for n in left])
    try:
        with Progress(progress, unit="parts") as bar:
            stage = bar.begin("measuring", count)
            stage.advance(count - len(left), "")
            for shard, cautions in engine.map(walk):
                stage.advance(1, shard.name)
                for text in cautions:
                    warn(EpimerWarning(text))
        parts |= {n: Curvature.load(part_folder(folder, n)) for n in left}
        total = sum_of([parts[n] for n in range(count)]) if count > 1 else parts[0]
        result = Curvature(dict(total.metrics), total.provenance, inputs=parts[0].inputs)
        result.save(request.out, overwrite=request.overwrite)
    except EpimerError:
        remove_folder(folder)
        raise
    return result


def _absolute(request: Request) -> Request:
    """Return a request whose paths hold on every machine."""
    out = output_path(request.out)
    at, data = (None if text is None else _absolute_path(text) for text in (request.at, request.data))
    return replace(request, model=_absolute_path(request.model), at=at, data=data, out=out)


def _absolute_path(text: str) -> str:
    """Return the absolute form of what is a path here, or of two with a plus; hub ids as they are."""
    path = os.path.expanduser(text)
    if os.path.exists(path):
        return os.path.abspath(path)
    parts = [part.strip() for part in text.split("+")]
    return text if len(parts) == 1 else "+".join(map(_absolute_path, parts))


def _key(request: Request, state: object, count: int) -> str:
    """Return a hash of all that the parts depend on."""
    data = Path(request.data or "")
    changed = data.stat().st_mtime_ns if data.exists() else None
    about = [asdict(replace(request, progress=False, overwrite=False)), state, changed, count, versions()]
    return hashlib.blake2b(json.dumps(about, default=str).encode(), digest_size=8).hexdigest()
