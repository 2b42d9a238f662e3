"""Bases on disk: a folder with `basis.json` and `basis.safetensors`, read one tensor at a time.

A basis is stored as `<tensor>.<part>`: `.U`, `.V`, `.sigma` and `.owner` of the tagged atoms and, where their stacked
factors were rank-deficient, `.mix`; a tensor basis with a `.mix` also has `.left` and `.right`, its own U and V.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.atomic_files import atomic_folder
from epimer.checkpoints.folder import inside
from epimer.checkpoints.tensor_parts import CHECKSUMS, TensorParts, check_header, read_header
from epimer.checkpoints.writer import as_json, save_tensors
from epimer.checksums import sealed
from epimer.curvature.format import model_fingerprint
from epimer.errors import CurvatureError, ParameterError, short
from epimer.geometry.subspace import Basis, Tagged, TensorProduct, atoms_of, basis_problem, owner_problem
from epimer.records import checked

FORMAT = 1
NUMBERS, HEADER = "basis.safetensors", "basis.json"
PARTS = ("U", "V", "sigma", "owner", "mix", "left", "right")
REMEDY = "build it again with `epimer basis`"


@dataclass(frozen=True)
class _About:
    """What the header of a basis folder says."""

    fingerprint: str
    rank: int | None = None
    models: list[str] | None = None
    """fingerprints of the base and the models it was built from, where they are known"""


class StoredBasis(TensorParts[Basis]):
    """A basis folder: tensor name -> its basis, read from disk when it is accessed."""

    def __init__(self, folder: Path, where: str = "") -> None:
        self.where, self.name = where or str(folder), Path(os.path.abspath(folder)).name
        header = read_header(folder, HEADER, "basis", "make one with `epimer basis`", self.where)
        self.kind = header.get("kind")
        if header.get("format") != FORMAT or self.kind not in ("tagged", "tensor"):
            raise CurvatureError(
                f"{self.where} holds a {short(self.kind)} basis in format {short(header.get('format'))}; "
                f"expected format {FORMAT}, tagged or tensor: build it again, or update epimer."
            )
        said = f"{self.where}/{HEADER}"
        about = checked(_About, header, said)
        check_header(header, said, REMEDY)
        self.fingerprint, self.rank, self.models = about.fingerprint, about.rank, about.models
        super().__init__(inside(folder, NUMBERS), f"{self.where}/{NUMBERS}", PARTS, header.get(CHECKSUMS), REMEDY)
        for name in self:
            self._check(name)

    def _check(self, name: str) -> None:
        """Refuse what is no basis, by the headers, and owners that are none of the models."""
        parts, needed = self.headers(name), {"U", "V", "sigma", "owner"}
        if self.kind == "tensor" and "mix" in parts:
            needed |= {"left", "right"}
        if missing := needed - parts.keys():
            raise CurvatureError(f"{self.where} has no {sorted(missing)[0]} for {name!r}; {REMEDY}.")
        foreign = sorted(parts.keys() - needed - {"mix"})
        problem = f"{foreign[0]} has no place there" if foreign else basis_problem(self._build(parts))
        tasks = None if self.models is None else len(self.models) - 1  # the first is the base
        problem = problem or owner_problem(self.file.read(f"{name}.owner"), tasks)
        if problem:
            raise CurvatureError(f"{self.file.where}: {name!r}: {problem}; {REMEDY}.")

    def __getitem__(self, name: str) -> Basis:
        return self._build(self.read(name))

    def _build(self, parts: Mapping[str, Tensor]) -> Basis:
        atoms = Tagged(parts["U"], parts["V"], parts["sigma"], parts["owner"], parts.get("mix"))
        if self.kind == "tagged":
            return atoms
        return TensorProduct(parts.get("left", atoms.U), parts.get("right", atoms.V), atoms)


def basis_fingerprint(basis: Mapping[str, Basis]) -> str:
    """Return a hash of a basis of many tensors; projected curvature keeps it to recognise its basis."""
    if isinstance(basis, StoredBasis):
        return basis.fingerprint
    return _combined((name, tensor_fingerprint(subspace)) for name, subspace in basis.items())


def tensor_fingerprint(basis: Basis) -> str:
    """Return a hash of one tensor's basis."""
    kind = "tensor" if isinstance(basis, TensorProduct) else "tagged"
    return model_fingerprint({f"{kind}.U": basis.U.T, f"{kind}.V": basis.V.T})


def _combined(fingerprints: Iterable[tuple[str, str]]) -> str:
    """Return one hash of (tensor name, fingerprint) pairs."""
    digest = hashlib.blake2b(digest_size=16)
    for name, fingerprint in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprint}\0".encode())
    return digest.hexdigest()


def save_basis(
    bases: Iterable[tuple[str, Basis]], folder: Path, *, about: Mapping[str, Any], overwrite: bool = False
) -> None:
    """Write bases into a new folder, with `about` in its header; an interrupted write leaves no folder."""
    with atomic_folder(folder, HEADER, overwrite=overwrite) as draft:
        tensors: dict[str, Tensor] = {}
        fingerprints: list[tuple[str, str]] = []
        kind = "tagged"
        for name, basis in bases:
            atoms = atoms_of(basis)
            parts = {"U": atoms.U, "V": atoms.V, "sigma": atoms.sigma, "owner": atoms.owner, "mix": atoms.mix}
            if isinstance(basis, TensorProduct):
                kind = "tensor"
                parts |= {} if atoms.mix is None else {"left": basis.U, "right": basis.V}
            tensors |= {f"{name}.{part}": W.cpu().contiguous() for part, W in parts.items() if W is not None}
            fingerprints.append((name, tensor_fingerprint(basis)))
        if not tensors:
            raise ParameterError("no tensor of these models is a matrix with room for a basis; see docs/recipes.md.")
        checksums = save_tensors(draft / NUMBERS, tensors)
        header = {"format": FORMAT, "kind": kind, "fingerprint": _combined(fingerprints), **about, CHECKSUMS: checksums}
        (draft / HEADER).write_bytes(as_json(sealed(header)))
