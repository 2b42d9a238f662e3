"""Checkpoints on disk: read lazily, tensor by tensor, without executing anything; written completely or not at all."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import open_file, open_folder
from epimer.checkpoints.hub import fetch, is_hub_id
from epimer.checkpoints.hub_ranges import open_hub
from epimer.checkpoints.lora import Adapted
from epimer.checkpoints.object_store import download, is_store, open_store
from epimer.checkpoints.quantized import dequantized
from epimer.errors import CheckpointError, MissingError

NEAR = 0.75
"""how alike two names must be for the one to be suggested in place of the other, from 0 to 1"""


def open_checkpoint(
    text: str,
    *,
    progress: bool = False,
    as_stored: bool = False,
    download: bool = True,
    folder: Path | None = None,
) -> Checkpoint:
    """Open a file, a folder, a hub id (`org/name@revision`), an object store's address, or `base+adapter` of them.

    Weights in FP8 are dequantised and packed ones refused, unless they are only looked at `as_stored`.
    Without `download` the weights of hub models that are not in the cache stay on the hub, and are read from there.
    An error about a path that does not exist suggests a near one here or in `folder`.
    """
    try:
        return _open(text, progress=progress, as_stored=as_stored, download=download)
    except MissingError as error:
        near = nearest_path(error.name, Path()) or (folder and nearest_path(error.name, folder))
        if near:
            raise MissingError(error.name, f"does not exist. Did you mean {near!r}?") from None
        raise


def _open(text: str, *, progress: bool, as_stored: bool, download: bool) -> Checkpoint:
    if not text.strip():
        raise CheckpointError("the name of a model is empty; give a path or a hub id.")
    if "\0" in text:
        raise CheckpointError(f"{text} is no name that a file can have; give a path or a hub id.")
    if os.path.exists(text) or "+" not in text:
        text = text.removeprefix("hf://")
        if is_store(text):
            checkpoint = open_store(text)
        elif not download and is_hub_id(text) and not os.path.exists(os.path.expanduser(text)):
            checkpoint = open_hub(text)
        else:
            path, name = _locate(text, progress=progress)
            checkpoint = open_folder(path, text, name) if path.is_dir() else open_file(path, text)
        return checkpoint if as_stored else dequantized(checkpoint)
    base, adapter = text.rsplit("+", 1)
    folder, name = _locate(adapter.strip().removeprefix("hf://"), progress=progress)
    if not folder.is_dir() or not (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{adapter} is not a LoRA adapter: expected a folder with adapter_config.json.")
    under = _open(base.strip(), progress=progress, as_stored=as_stored, download=download)
    return Adapted(under, folder, adapter.strip(), f"{under.name}+{name}")


def _locate(text: str, *, progress: bool) -> tuple[Path, str]:
    """Return the path of a model, and its name without the path."""
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        return path, path.resolve().name if path.is_dir() else path.stem
    if is_store(text):
        return download(text)
    if is_hub_id(text):
        return fetch(text, progress=progress)
    raise MissingError(text, "does not exist", "; give a file, a model folder or a hub id (org/name@revision).")


def nearest_path(text: str, folder: Path) -> str | None:
    """Return the existing path nearest to one that does not exist, of which one part may be misspelt; or None.

    A relative path is taken from `folder`.
    """
    try:
        wanted = folder / os.path.expanduser(text)
        parent = next(path for path in wanted.parents if path.is_dir())
        wrong, *rest = wanted.relative_to(parent).parts
        for name in get_close_matches(wrong, [path.name for path in parent.iterdir()], n=3, cutoff=NEAR):
            path = parent.joinpath(name, *rest)
            if path.exists():
                relative = os.path.relpath(path, folder)
                near = relative if relative.startswith("..") else f"./{relative}"
                return os.fspath(path) if os.path.isabs(os.path.expanduser(text)) else near
    except (OSError, ValueError, StopIteration):
        return None
    return None
