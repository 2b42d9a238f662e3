"""Curvature on disk: a folder with `curvature.json` (what was measured) and `curvature.safetensors` (the numbers).

A tensor's curvature lies under its name and a letter: `.F` (diagonal), `.A` and `.G` (kronecker), `.S`, `.P` and `.Q`
(ekfac), `.g` and `.x` (samples), `.H` (projected). It is read one tensor at a time. docs/curvature.md specifies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import inside
from epimer.checkpoints.tensor_parts import StoredParts, read_header
from epimer.checkpoints.writer import as_json, save_tensors, whole_folder
from epimer.curvature.curvature import KINDS, About, Curvature, tensors_of
from epimer.errors import CurvatureError, short
from epimer.geometry.metric import EKFAC, Diagonal, Kronecker, Metric, Projected, Samples

FORMAT = 1
NUMBERS, HEADER = "curvature.safetensors", "curvature.json"
EDGE = 256  # entries of a tensor's first and last row that enter a fingerprint

_CLASSES: dict[str, type[Any]] = {
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "ekfac": EKFAC,
    "samples": Samples,
}


class _Stored(StoredParts[Metric]):
    """The metrics of a curvature folder, read when they are asked for."""

    def __init__(self, folder: Path, about: About, where: str, inputs: Mapping[str, int]) -> None:
        self.where, self.inputs = where, inputs
        self.kind = Projected if about.basis is not None else _CLASSES[about.kind]
        self.known = {field.name for field in fields(self.kind)}
        super().__init__(inside(folder, NUMBERS), f"{where}/{NUMBERS}", self.known)

    def __getitem__(self, name: str) -> Metric:
        given: dict[str, Any] = dict(self.read(name))
        lacking = {"F", "S", "P", "Q", "g", "x"} & self.known - given.keys()
        if lacking:
            raise CurvatureError(f"{self.where} has no {sorted(lacking)[0]} for {name!r}; measure it again.")
        if "inputs" in self.known:
            given["inputs"] = self.inputs.get(name, 1)
        return self.kind(**given)


def open_curvature(folder: Path, where: str = "") -> Curvature:
    """Open a curvature folder; its numbers are read when they are asked for."""
    where = where or str(folder)
    header = read_header(folder, HEADER, "curvature", "measure one with `epimer curvature`", where)
    kind = header.get("kind")
    if header.get("format") != FORMAT or kind not in KINDS:
        raise CurvatureError(
            f"{where} holds {kind!r} curvature in format {header.get('format')!r}; expected format {FORMAT} "
            f"and one of {', '.join(KINDS)}: measure it again, or update epimer."
        )
    known = {field.name for field in fields(About)}
    given: dict[str, Any] = {key: value for key, value in header.items() if key in known and value is not None}
    plain: dict[str, Any] = {"samples": int, "tokens": int, "counts": int, "left_out": str, "ties": str}
    for key, kind_of in ((field.name, plain.get(field.name)) for field in fields(About)):
        value = given.get(key)
        entries = list(value.values()) if isinstance(value, dict) else [value]
        nested = key in ("counts", "left_out", "ties")
        if value is not None and (
            isinstance(value, dict) is not nested
            or (kind_of is not None and not all(isinstance(entry, kind_of) for entry in entries))
        ):
            raise CurvatureError(f"{where}/{HEADER}: {key} cannot be {short(value)}; measure it again.")
    about = About(**given)
    first = header.get("inputs_first")
    inputs = {name: 0 for name in first if isinstance(name, str)} if isinstance(first, list) else {}
    if about.basis is None and kind not in _CLASSES:
        raise CurvatureError(f"{where} holds {kind} curvature without a basis; measure it again.")
    stored = _Stored(folder, about, where, inputs)
    found = Curvature(stored, about, where=where)
    found.file = stored.file
    return found


def save_curvature(curvature: Curvature, folder: Path, *, overwrite: bool = False) -> None:
    """Write curvature into a new folder, which appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    transposed: list[str] = []
    for name, metric in curvature.metrics.items():  # each is read once, where it lies on disk
        tensors |= {f"{name}.{part}": value.detach().cpu() for part, value in tensors_of(metric).items()}
        transposed += [name] if getattr(metric, "inputs", 1) == 0 else []
    if not tensors:
        raise CurvatureError("there is no curvature to save: no tensor was measured.")
    header = {"format": FORMAT, **asdict(curvature.about), "inputs_first": transposed}
    with whole_folder(folder, HEADER, overwrite=overwrite) as draft:
        save_tensors(draft / NUMBERS, tensors)
        (draft / HEADER).write_bytes(as_json(header))


def model_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of tensors' names, shapes and edges, in bfloat16: a model is known again in another precision."""
    return _fingerprint({name: W.shape for name, W in tensors.items()}, lambda name, a, b: tensors[name].detach()[a:b])


def stored_fingerprint(checkpoint: Checkpoint, names: Mapping[str, str]) -> str | None:
    """Return the same hash of a checkpoint's tensors, name -> name in the checkpoint; None where one is missing."""
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
