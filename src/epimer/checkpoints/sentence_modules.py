"""What sentence-transformers keeps beside the weights: modules.json, prompts, and folders as 1_Pooling and 2_Dense."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epimer.checkpoints.folder import FORMATS, inside, open_file, parse_json
from epimer.checkpoints.sidecar_files import carried, read_sidecar
from epimer.errors import CheckpointError
from epimer.json_values import json_value

MODULES = "modules.json"
SETTINGS = ("config_sentence_transformers.json", "sentence_bert_config.json")


def sentence_files(folder: Path | None) -> dict[str, bytes]:
    """Return modules.json, the settings beside it and the files of the folders it names; none where it is not there."""
    if folder is None or not (folder / MODULES).is_file():
        return {}
    names = [MODULES, *SETTINGS]
    for module in (name for name in _folders(folder) if os.path.isdir(folder / name)):
        files = sorted(path for path in (folder / module).rglob("*") if path.is_file() and path.suffix != ".py")
        names += [path.relative_to(folder).as_posix() for path in files]
    return {name: data for name in names if (data := carried(folder, name)) is not None}


def missing_modules(folder: Path | None) -> list[str]:
    """Return the folders that modules.json names and that are not there, where the module needs one."""
    if folder is None or not (folder / MODULES).is_file():
        return []
    return [path for path, kind in _folders(folder).items() if kind != "Normalize" and not os.path.isdir(folder / path)]


def module_differences(first: Path, other: Path) -> Iterator[str]:
    """Yield what makes two folders of sentence-transformers compute different things, weights to merge apart."""
    mine, theirs = _folders(first), _folders(other)
    if list(mine.items()) != list(theirs.items()):
        yield MODULES
        return
    for name, data in sentence_files(first).items():
        if "/" not in name or (twin := read_sidecar(other, name)) == data:
            continue
        if twin is None or not (_same_content(first, other, name, data, twin) or _same_shapes(first, other, name)):
            yield name


def weights_that_differ(first: Path, others: Sequence[Path | None]) -> list[str]:
    """Return the files of modules' weights that some of the other folders have with other values."""
    names = []
    for name, data in sentence_files(first).items():
        twins = [(folder, read_sidecar(folder, name)) for folder in others if folder is not None]
        differ = (
            twin is not None and twin != data and not _same_content(first, folder, name, data, twin)
            for folder, twin in twins
        )
        if "/" in name and name.endswith(tuple(FORMATS)) and any(differ):
            names.append(name)
    return names


def _folders(folder: Path) -> dict[str, str]:
    """Return the folder of every module but the first, which is the model itself, with the last word of its type."""
    data, where = read_sidecar(folder, MODULES) or b"", folder / MODULES
    try:
        modules: Any = json_value(data)
        found = {str(module["path"]): str(module["type"]).rpartition(".")[2] for module in modules}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where} is not a list of modules with path and type: {error}.") from error
    for path in found:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{where} names {path!r}, which leads out of the folder; put the module there.")
    return {path: kind for path, kind in found.items() if path not in ("", ".")}


def _same_shapes(first: Path, other: Path, name: str) -> bool:
    """Whether two files hold weights of the same names and shapes, which can be merged."""
    if not name.endswith(tuple(FORMATS)):
        return False
    mine, theirs = (open_file(inside(folder, name), str(folder / name)).headers for folder in (first, other))
    return {key: W.shape for key, W in mine.items()} == {key: W.shape for key, W in theirs.items()}


def _same_content(first: Path, other: Path, name: str, data: bytes, twin: bytes) -> bool:
    """Whether two files that differ in their bytes hold the same tensors or the same JSON."""
    if name.endswith(".json"):
        return parse_json(data, first / name) == parse_json(twin, other / name)
    if not name.endswith(tuple(FORMATS)):
        return False
    mine, theirs = (open_file(inside(folder, name), str(folder / name)) for folder in (first, other))
    return mine.headers.keys() == theirs.headers.keys() and all(mine.equal(W, theirs, W) for W in mine.headers)
