"""Curvature on disk: a folder with `curvature.json` (the provenance) and `curvature.safetensors` (the tensors).

The tensors of a metric are stored as `<tensor>.<field>`: `.F` (diagonal), `.A` and `.G` (kronecker), `.S`, `.P` and
`.Q` (ekfac), `.g` and `.x` (samples), `.H` or `.A` and `.G` (in a basis). docs/curvature.md specifies the format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import inside
from epimer.checkpoints.tensor_parts import TensorParts, read_header
from epimer.checkpoints.writer import as_json, atomic_folder, save_tensors
from epimer.curvature.curvature import Curvature, Provenance
from epimer.curvature.kinds import KINDS, tensors_of
from epimer.errors import CurvatureError, short
from epimer.geometry.metric import Metric, Projected

FORMAT = 1
NUMBERS, HEADER = "curvature.safetensors", "curvature.json"
EDGE = 256  # entries of a tensor's first and last row that enter a fingerprint
TYPES: dict[str, type] = {"samples": int, "tokens": int, "counts": int, "left_out": str, "ties": str}
"""key of the header -> type of its value, or of its values where it is a mapping"""
MAPPINGS = ("counts", "left_out", "ties")


class _StoredMetrics(TensorParts[Metric]):
    """The metrics of a curvature folder, each read from disk when it is accessed."""

    def __init__(self, folder: Path, metric: type[Any], where: str, inputs_first: set[str]) -> None:
        self.metric, self.where, self.inputs_first = metric, where, inputs_first
        self.fields = {field.name for field in fields(metric)}
        self.required = {field.name for field in fields(metric) if field.default is MISSING}
        super().__init__(inside(folder, NUMBERS), f"{where}/{NUMBERS}", self.fields)

    def __getitem__(self, name: str) -> Metric:
        parts: dict[str, Any] = dict(self.read(name))
        missing = sorted(self.required - parts.keys())
        if missing:
            raise CurvatureError(f"{self.where} has no {missing[0]} for {name!r}; measure it again.")
        if "inputs" in self.fields:
            parts["inputs"] = 0 if name in self.inputs_first else 1
        metric: Metric = self.metric(**parts)
        return metric


def open_curvature(folder: Path, where: str = "") -> Curvature:
    """Open a curvature folder; each tensor is read from disk when it is accessed."""
    where = where or str(folder)
    header = read_header(folder, HEADER, "curvature", "measure one with `epimer curvature`", where)
    kind = header.get("kind")
    if header.get("format") != FORMAT or kind not in tuple(KINDS):
        raise CurvatureError(
            f"{where} holds {kind!r} curvature in format {header.get('format')!r}; expected format {FORMAT} "
            f"and one of {', '.join(KINDS)}: measure it again, or update epimer."
        )
    provenance = _read_provenance(header, f"{where}/{HEADER}")
    metric = KINDS[kind].metric if provenance.basis is None else Projected
    if provenance.basis is None and metric is Projected:
        raise CurvatureError(f"{where} holds {kind} curvature without a basis; measure it again.")
    names = header.get("inputs_first")
    inputs_first = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set[str]()
    stored = _StoredMetrics(folder, metric, where, inputs_first)
    curvature = Curvature(stored, provenance, where=where)
    curvature.file = stored.file
    return curvature


def _read_provenance(header: Mapping[str, Any], where: str) -> Provenance:
    """Return the provenance in a header, or name the key whose value is of a wrong type."""
    known = [field.name for field in fields(Provenance)]
    values = {key: header[key] for key in known if header.get(key) is not None}
    for key, value in values.items():
        mapping, expected = key in MAPPINGS, TYPES.get(key, object)
        entries = list(value.values()) if isinstance(value, dict) else [value]
        if isinstance(value, dict) is not mapping or not all(isinstance(entry, expected) for entry in entries):
            raise CurvatureError(f"{where}: {key} cannot be {short(value)}; measure it again.")
    return Provenance(**values)


def save_curvature(curvature: Curvature, folder: Path, *, overwrite: bool = False) -> None:
    """Write curvature into a new folder; an interrupted write leaves no folder."""
    tensors: dict[str, Tensor] = {}
    inputs_first: list[str] = []
    for name, metric in curvature.metrics.items():  # one access each, as it may read from disk
        tensors |= {f"{name}.{part}": value.detach().cpu() for part, value in tensors_of(metric).items()}
        inputs_first += [name] if getattr(metric, "inputs", 1) == 0 else []
    if not tensors:
        raise CurvatureError("there is no curvature to save: no tensor was measured.")
    header = {"format": FORMAT, **asdict(curvature.provenance), "inputs_first": inputs_first}
    with atomic_folder(folder, HEADER, overwrite=overwrite) as draft:
        save_tensors(draft / NUMBERS, tensors)
        (draft / HEADER).write_bytes(as_json(header))


def model_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of tensors' names, shapes and first and last entries, rounded to bfloat16.

    A model stored in another precision has the same fingerprint.
    """
    return _fingerprint({name: W.shape for name, W in tensors.items()}, lambda name, a, b: tensors[name].detach()[a:b])


def stored_fingerprint(checkpoint: Checkpoint, names: Mapping[str, str]) -> str | None:
    """Return `model_fingerprint` of a checkpoint's tensors, name -> name in the checkpoint; None if one is missing."""
    if any(stored not in checkpoint.headers for stored in names.values()):
        return None
    shapes = {name: checkpoint.headers[stored].shape for name, stored in names.items()}
    return _fingerprint(shapes, lambda name, a, b: checkpoint.read(names[name], (a, b)))


def _fingerprint(shapes: Mapping[str, torch.Size], rows: Callable[[str, int, int], Tensor]) -> str:
    edges: list[Tensor] = []
    for name in sorted(shapes):
        shape = shapes[name]
        if shape and shape.numel():
            many = EDGE if len(shape) == 1 else 1
            first, last = rows(name, 0, min(many, shape[0])), rows(name, max(0, shape[0] - many), shape[0])
            edges += [first.flatten()[:EDGE].to(torch.bfloat16), last.flatten()[-EDGE:].to(torch.bfloat16)]
    digest = hashlib.blake2b(digest_size=16)
    digest.update("\0".join(f"{name}\0{tuple(shapes[name])}" for name in sorted(shapes)).encode())
    if edges:
        digest.update(torch.cat(edges).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
