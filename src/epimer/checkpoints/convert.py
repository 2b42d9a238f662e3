"""Turn a torch file into a safetensors file, without executing anything in it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from epimer.checkpoints.folder import FORMATS
from epimer.checkpoints.safe_unpickle import is_zip
from epimer.checkpoints.safetensors import DTYPE_NAMES
from epimer.checkpoints.torchfile import TorchFile, find_ties, load_tensors, mapped_regions, read_mapped
from epimer.checkpoints.writer import save_tensors
from epimer.errors import CheckpointError, OutputError
from epimer.opened_files import OpenedFile


def convert(source: Path, target: Path, *, key: str | None = None, overwrite: bool = False) -> dict[str, str]:
    """Write the tensors of a torch file to a safetensors file; return the names that shared another's tensor."""
    if FORMATS.get(source.suffix) is not TorchFile:
        suffixes = ", ".join(suffix for suffix, file in FORMATS.items() if file is TorchFile)
        raise CheckpointError(f"{source} is not a torch file: expected {suffixes}.")
    if target.suffix != ".safetensors":
        raise OutputError(f"{target} should end in .safetensors; give the file to make.")

    def check() -> None:
        if os.path.exists(target) and not overwrite:
            raise OutputError(f"{target} exists; choose another name, or pass --overwrite.")

    check()
    file = OpenedFile(source, str(source))
    with file.open():
        mapped = is_zip(source)
        tensors = load_tensors(source, str(source), key=key, mapped=mapped)
    read = partial(read_mapped, file=file, regions=mapped_regions(source) if mapped else [])
    if not tensors:
        raise CheckpointError(f"{source} holds no tensor.")
    for name, W in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"{source} has a tensor __metadata__, which safetensors cannot hold; rename it.")
        if W.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{source}: {name!r} is {W.dtype}, which safetensors cannot hold; convert it first.")
    ties = find_ties(tensors)
    save_tensors(target, tensors, ties, read=read, check=check)
    return ties
