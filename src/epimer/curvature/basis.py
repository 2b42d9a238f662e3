"""Bases on disk: a folder with `basis.json` and `basis.safetensors`, read one tensor at a time.

A tensor's basis lies under its name and a letter: `.U`, `.V`, `.sigma` and `.owner` of the tagged atoms, `.mix` where
there is one, and then, for a tensor basis, `.left` and `.right`, whose pairs it consists of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.checkpoints.folder import inside
from epimer.checkpoints.tensor_parts import StoredParts, read_header
from epimer.checkpoints.writer import as_json, save_tensors, whole_folder
from epimer.curvature.format import model_fingerprint
from epimer.errors import CurvatureError, ParameterError
from epimer.geometry.subspace import Tagged, TensorProduct

FORMAT = 1
NUMBERS, HEADER = "basis.safetensors", "basis.json"
PARTS = ("U", "V", "sigma", "owner", "mix", "left", "right")


class StoredBasis(StoredParts[Tagged | TensorProduct]):
    """A basis folder: tensor name -> its basis, read when it is asked for."""

    def __init__(self, folder: Path, where: str = "") -> None:
        self.where = where or str(folder)
        header = read_header(folder, HEADER, "basis", "make one with `epimer basis`", self.where)
        self.kind, self.fingerprint = header.get("kind"), str(header.get("fingerprint"))
        if header.get("format") != FORMAT or self.kind not in ("tagged", "tensor"):
            raise CurvatureError(
                f"{self.where} holds a {self.kind!r} basis in format {header.get('format')!r}; "
                f"expected format {FORMAT}, tagged or tensor: build it again, or update epimer."
            )
        self.rank, models = header.get("rank"), header.get("models")
        self.models = [str(model) for model in models] if isinstance(models, list) else None
        """fingerprints of the base and the models it was built from, where that is known"""
        super().__init__(inside(folder, NUMBERS), f"{self.where}/{NUMBERS}", PARTS)

    def __getitem__(self, name: str) -> Tagged | TensorProduct:
        found = self.read(name)
        lacking = {"U", "V", "sigma", "owner"} - found.keys()
        if lacking:
            raise CurvatureError(f"{self.where} has no {sorted(lacking)[0]} for {name!r}; build it again.")
        atoms = Tagged(found["U"], found["V"], found["sigma"], found["owner"], found.get("mix"))
        if self.kind == "tagged":
            return atoms
        return TensorProduct(found.get("left", atoms.U), found.get("right", atoms.V), atoms)


def basis_fingerprint(basis: Mapping[str, Tagged | TensorProduct]) -> str:
    """Return a hash by which projected curvature knows its basis again."""
    if isinstance(basis, StoredBasis):
        return basis.fingerprint
    return combined((name, one_fingerprint(one)) for name, one in basis.items())


def one_fingerprint(basis: Tagged | TensorProduct) -> str:
    """Return a hash of one tensor's basis."""
    kind = "tensor" if isinstance(basis, TensorProduct) else "tagged"
    return model_fingerprint({f"{kind}.U": basis.U.T, f"{kind}.V": basis.V.T})


def combined(fingerprints: Iterable[tuple[str, str]]) -> str:
    """Return one hash of many tensors' bases."""
    digest = hashlib.blake2b(digest_size=16)
    for name, fingerprint in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprint}\0".encode())
    return digest.hexdigest()


def save_basis(
    bases: Iterable[tuple[str, Tagged | TensorProduct]],
    folder: Path,
    *,
    about: Mapping[str, Any],
    overwrite: bool = False,
) -> None:
    """Write bases, and what there is to say about them, into a new folder; it appears whole or not at all."""
    with whole_folder(folder, HEADER, overwrite=overwrite) as draft:
        tensors: dict[str, Tensor] = {}
        prints: list[tuple[str, str]] = []
        kind = "tagged"
        for name, basis in bases:
            atoms = basis.atoms if isinstance(basis, TensorProduct) else basis
            parts = {"U": atoms.U, "V": atoms.V, "sigma": atoms.sigma, "owner": atoms.owner, "mix": atoms.mix}
            if isinstance(basis, TensorProduct):
                kind = "tensor"
                parts |= {} if atoms.mix is None else {"left": basis.U, "right": basis.V}
            tensors |= {f"{name}.{part}": W.cpu().contiguous() for part, W in parts.items() if W is not None}
            prints.append((name, one_fingerprint(basis)))
        if not tensors:
            raise ParameterError("no tensor of these models is a matrix with room for a basis; see docs/recipes.md.")
        save_tensors(draft / NUMBERS, tensors)
        header = {"format": FORMAT, "kind": kind, "fingerprint": combined(prints), **about}
        (draft / HEADER).write_bytes(as_json(header))
