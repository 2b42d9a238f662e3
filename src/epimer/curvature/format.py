"""Curvature on disk: a folder with `curvature.json` (the provenance) and `curvature.safetensors` (the tensors).

The tensors of a metric are stored as `<tensor>.<field>`: `.F` (diagonal), `.A` and `.G` (kronecker), `.S`, `.P` and
`.Q` (ekfac), `.g` and `.x` (samples), `.H` or `.A` and `.G` (in a basis). Of a symmetric matrix the upper triangle is
stored, row by row. The inputs that it was measured on may be kept in files of their own (`kept_inputs.py`).
docs/curvature.md specifies the format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epimer
from epimer.atomic_files import atomic_folder
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import inside
from epimer.checkpoints.tensor_parts import CHECKSUMS, TensorParts, check_header, read_header
from epimer.checkpoints.writer import as_json, save_tensors
from epimer.checksums import sealed
from epimer.curvature.kept_inputs import KeptInputs
from epimer.curvature.kinds import KINDS, tensors_of
from epimer.curvature.triangles import from_triangle, triangle, triangle_size
from epimer.errors import CurvatureError, short
from epimer.geometry.metric import Metric, Projected

FORMAT = 2
READABLE = (1, FORMAT)
"""formats that are read: 1 is 2 with all matrices in full"""
NUMBERS, HEADER = "curvature.safetensors", "curvature.json"
EDGE = 256  # entries of a tensor's first and last row that enter a fingerprint
NUMBERS_SAID = ("samples", "tokens", "counts", "seed")
"""keys of the header whose value, or whose values where it is a mapping, are integers; all others are text"""
MAPPINGS = ("counts", "left_out", "ties")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REMEDY = "measure it again"


@dataclass(frozen=True)
class Provenance:
    """What was measured, on what, and how; the keys of `curvature.json`."""

    kind: str
    samples: int | None = None
    tokens: int | None = None  # without padding, of the tensor that has most; equal to samples without sequences
    labels: str | None = None
    seed: int | None = None
    dtype: str = "float32"  # dtype of the sums
    compute: str | None = None  # dtype of the model
    sequence: str = "expand"  # how a sample's tokens enter Kronecker factors: expand or reduce
    source: str = "data"  # data, the moment of an optimiser's state, or whose factors were read
    model: str | None = None  # fingerprint of the measured tensors, see `model_fingerprint`
    at: str | None = None  # fingerprint of the tensors it was measured at, where they are not the model's own
    basis: str | None = None  # fingerprint of the basis it was measured in
    basis_folder: str | None = None  # the name of that basis's folder, without its path
    version: str = epimer.__version__
    counts: Mapping[str, int] = field(default_factory=dict)  # tensor -> its tokens without padding
    left_out: Mapping[str, str] = field(default_factory=dict)  # tensors that were not measured, and why
    ties: Mapping[str, str] = field(default_factory=dict)  # other names of a tensor -> the one it is stored under


class StoredMetrics(TensorParts[Metric]):
    """A curvature folder: its provenance, and each tensor's metric, read from disk when it is accessed."""

    def __init__(self, folder: Path, where: str = "") -> None:
        self.where = where or str(folder)
        header = read_header(folder, HEADER, "curvature", "measure one with `epimer curvature`", self.where)
        kind = header.get("kind")
        if header.get("format") not in READABLE or kind not in tuple(KINDS):
            raise CurvatureError(
                f"{self.where} holds {short(kind)} curvature in format {short(header.get('format'))}; "
                f"expected format {FORMAT} and one of {', '.join(KINDS)}: measure it again, or update epimer."
            )
        self.folder, self.inputs_header = folder, header.get("inputs")
        said = f"{self.where}/{HEADER}"
        self.provenance = _read_provenance(header, said)
        self.metric: Any = KINDS[kind].metric if self.provenance.basis is None else Projected
        if self.provenance.basis is None and self.metric is Projected:
            raise CurvatureError(f"{self.where} holds {kind} curvature without a basis; measure it again.")
        check_header(header, said, REMEDY)
        self.inputs_first = header.get("inputs_first", [])
        self.fields = {field.name for field in fields(self.metric)}  # type: ignore[arg-type]
        known, numbers = self.fields - {"inputs", "basis"}, f"{self.where}/{NUMBERS}"
        super().__init__(inside(folder, NUMBERS), numbers, known, header.get(CHECKSUMS), REMEDY)
        names = self.inputs_first if isinstance(self.inputs_first, list) else [None]
        if not all(isinstance(name, str) and name in self for name in names):
            raise CurvatureError(f"{said}: inputs_first cannot be {short(self.inputs_first)}; {REMEDY}.")
        for name in self:
            self._check(name)

    def headers(self, name: str) -> dict[str, Tensor]:
        return self._unpacked(name, super().headers(name))

    def read(self, name: str) -> dict[str, Tensor]:
        return self._unpacked(name, super().read(name))

    def size(self, name: str) -> int:
        """Return the bytes of a tensor's curvature in memory, where matrices are whole."""
        return sum(W.numel() * W.itemsize for W in self.headers(name).values())

    def _unpacked(self, name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of a tensor with whole matrices in place of their triangles."""
        whole = dict(parts)
        for part in self.metric.symmetric:
            if part in parts and parts[part].dim() == 1:
                whole[part] = from_triangle(parts[part])
                if triangle_size(len(whole[part])) != len(parts[part]):
                    problem = f"{part} has {len(parts[part])} numbers, which are no triangle of a matrix"
                    raise CurvatureError(f"{self.file.where}: {name!r}: {problem}; {REMEDY}.")
        return whole

    def _check(self, name: str) -> None:
        """Refuse what no metric can be of, by the headers alone."""
        parts = self.headers(name)
        required = {field.name for field in fields(self.metric) if field.default is MISSING}
        required |= {"H"} if KINDS[self.provenance.kind].indefinite else set()  # whose eigenvalues are clipped
        if missing := sorted(required - parts.keys()):
            raise CurvatureError(f"{self.where} has no {missing[0]} for {name!r}; {REMEDY}.")
        odd = next((part for part, W in parts.items() if W.dtype not in DTYPES), None)
        problem = f"{odd} is {parts[odd].dtype}, expected floats" if odd else self._build(name, parts).misfit()
        if problem:
            raise CurvatureError(f"{self.file.where}: {name!r}: {problem}; {REMEDY}.")

    def __getitem__(self, name: str) -> Metric:
        return self._build(name, self.read(name))

    def _build(self, name: str, parts: Mapping[str, Tensor]) -> Metric:
        more = {"inputs": 0 if name in self.inputs_first else 1} if "inputs" in self.fields else {}
        metric: Metric = self.metric(**parts, **more)
        return metric


def _read_provenance(header: Mapping[str, Any], where: str) -> Provenance:
    """Return the provenance in a header, or name the key whose value is of a wrong type."""
    known = [field.name for field in fields(Provenance)]
    values = {key: header[key] for key in known if header.get(key) is not None}
    for key, value in values.items():
        entries = list(value.values()) if isinstance(value, dict) else [value]
        if isinstance(value, dict) is not (key in MAPPINGS) or not all(_fits(key, entry) for entry in entries):
            raise CurvatureError(f"{where}: {key} cannot be {short(value)}; {REMEDY}.")
    if (name := values.get("basis_folder")) is not None and (name != Path(name).name or name == ".."):
        raise CurvatureError(f"{where}: basis_folder must be a name without a path, got {short(name)}; {REMEDY}.")
    return Provenance(**values)


def _fits(key: str, value: Any) -> bool:
    if key in NUMBERS_SAID:
        return type(value) is int and (value >= 0 or key == "seed")
    return isinstance(value, str)


def save_curvature(
    metrics: Mapping[str, Metric], provenance: Provenance, folder: Path, *, inputs: KeptInputs | None, overwrite: bool
) -> None:
    """Write curvature, and the inputs it was measured on, into a new folder; an interrupted write leaves no folder."""
    tensors: dict[str, Tensor] = {}
    whole: dict[int, Tensor] = {}  # id of an entry of `tensors` that has a shape alone -> the symmetric matrix
    inputs_first: list[str] = []
    for name, metric in metrics.items():  # one access each, as it may read from disk
        for part, value in tensors_of(metric).items():
            M = stored = value.detach()
            if part in metric.symmetric and M.dim() == 2 and torch.equal(M, M.T):
                stored = torch.empty(triangle_size(len(M)), dtype=M.dtype, device="meta")
                whole[id(stored)] = M
            tensors[f"{name}.{part}"] = stored
        inputs_first += [name] if getattr(metric, "inputs", 1) == 0 else []
    if not tensors:
        raise CurvatureError("there is no curvature to save: no tensor was measured.")
    with atomic_folder(folder, HEADER, overwrite=overwrite) as draft:
        checksums = save_tensors(
            draft / NUMBERS, tensors, read=lambda W: (triangle(whole[id(W)]) if W.is_meta else W).cpu().contiguous()
        )
        header = {"format": FORMAT, **asdict(provenance), "inputs_first": inputs_first, CHECKSUMS: checksums}
        if inputs is not None:
            header["inputs"] = inputs.save(draft)
        (draft / HEADER).write_bytes(as_json(sealed(header)))


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
