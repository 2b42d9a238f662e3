"""Open a file of weights by its suffix, or find the weights in a Hugging Face folder and never leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from epimer.checkpoints.checkpoint import Checkpoint, ShardedCheckpoint
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.torchfile import TorchFile
from epimer.errors import CheckpointError, listed
from epimer.json_values import json_value
from epimer.opened_files import lies_in, reason

FORMATS: dict[str, Callable[[Path, str], Checkpoint]] = {
    ".safetensors": SafetensorsFile, ".bin": TorchFile, ".pt": TorchFile, ".pth": TorchFile
}  # fmt: skip
"""suffix -> the class that opens such a file from its path and what to call it in errors"""
DIFFUSERS = "diffusion_pytorch_model"
SINGLES = ("model.safetensors", f"{DIFFUSERS}.safetensors", "pytorch_model.bin", f"{DIFFUSERS}.bin")
INDEXES = tuple(f"{file}.index.json" for file in SINGLES)
REFUSED = {
    ".gguf": "is a GGUF file, whose weights are packed and cannot be merged; give the safetensors model it was made "
    "from, or load it with transformers (from_pretrained with gguf_file=, which dequantises), save it, and merge that.",
    ".onnx": "is an ONNX graph, whose weights have lost the model's names; give the PyTorch model it was made from.",
    ".h5": "is a TensorFlow file; load it with transformers 4 (from_pretrained with from_tf=True) and save it first.",
    ".msgpack": "is a Flax file; load it with transformers 4 (from_pretrained with from_flax=True) and save it first.",
}
"""suffix of weights that cannot be merged -> why, and the way out"""
PIPELINE = "model_index.json"  # of diffusers, beside the folders of its models
LARGEST = 1 << 28  # bytes of a file beside the weights; a tokenizer has a few megabytes
MOST_LISTED = 10_000  # files of a folder without weights that are looked at to say which format they have
NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")


def open_file(path: Path, where: str = "") -> Checkpoint:
    """Open one file of weights in the format of its suffix."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{where or path} is not a regular file; copy the weights to one.")
    if path.suffix in REFUSED:
        raise CheckpointError(f"{where or path} {REFUSED[path.suffix]}")
    if path.suffix not in FORMATS:
        raise CheckpointError(f"{where or path} is not a checkpoint: expected {', '.join(FORMATS)} or a model folder.")
    return FORMATS[path.suffix](path, where)


def open_folder(
    folder: Path, where: str = "", name: str = "", elsewhere: Mapping[str, Callable[[], Checkpoint]] | None = None
) -> Checkpoint:
    """Open the one model in a folder: a single file, or shards with an index.

    Files that belong to the folder and lie `elsewhere` are given by what opens them.
    """
    where, elsewhere = where or str(folder), elsewhere or {}

    def open_weights(file: str) -> Checkpoint:
        return elsewhere[file]() if file in elsewhere else open_file(inside(folder, file), f"{where}/{file}")

    indexes = [index for index in INDEXES if (folder / index).exists()]
    singles = [file for file in SINGLES if (folder / file).exists() or file in elsewhere]
    safe = [file for file in singles if file.endswith(".safetensors")]
    if indexes and indexes[0].removesuffix(".index.json") in safe:
        raise CheckpointError(
            f"{where} has both {safe[0]} and {indexes[0]}, and only one can be the model; remove the other."
        )
    name = name or folder.resolve().name
    if indexes and not safe:
        at = f"{where}/{indexes[0]}"
        index = read_json(inside(folder, indexes[0]), at)
        return assemble(index, at, open_weights, where=where, name=name, folder=folder)
    file = singles[0] if singles else _only_weights(folder, where, elsewhere)
    return ShardedCheckpoint(name, where, [open_weights(file)], folder)


def _only_weights(folder: Path, where: str, elsewhere: Iterable[str]) -> str:
    """Return the folder's single weights file where none has a usual name."""
    names = {*elsewhere, *(path.name for path in folder.iterdir())}
    files = sorted(name for name in names if Path(name).suffix in FORMATS and name not in NOT_WEIGHTS)
    if "adapter_model.safetensors" in files or "adapter_model.bin" in files:
        raise CheckpointError(f"{where} is a LoRA adapter, not a whole model; write it as BASE+{where}.")
    files = [name for name in files if name.endswith(".safetensors")] or files
    if (folder / PIPELINE).is_file():
        parts = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(f"*/{pattern}")]
        raise CheckpointError(pipeline_refusal(where, {path.parent.name for path in parts}))
    if not files:
        near = islice(chain(folder.glob("*"), folder.glob("*/*")), MOST_LISTED)  # it may be a whole disk
        refuse_formats([path.relative_to(folder).as_posix() for path in near], where)
    if len(files) != 1:
        held = f"{len(files)} weight files and no index: {listed(files)}" if files else "no weights"
        raise CheckpointError(f"{where} holds {held}; expected model.safetensors or shards with an index.")
    return files[0]


def refuse_formats(files: Iterable[str], where: str) -> None:
    """Refuse a folder of which these files are all by the first one whose format cannot be merged, if there is one."""
    for file in sorted(files, key=lambda name: (name.count("/"), name)):
        if (suffix := Path(file).suffix) in REFUSED:
            raise CheckpointError(f"{where}/{file} {REFUSED[suffix]}")


def pipeline_refusal(where: str, parts: Iterable[str]) -> str:
    """Return why a pipeline of diffusers cannot be merged as one model; `parts` are its folders with weights."""
    parts = sorted(parts) or ["unet", "transformer"]
    found = ", ".join(f"{where}/{part}" for part in parts[:3]) + (", ..." if len(parts) > 3 else "")
    return f"{where} is a diffusers pipeline ({PIPELINE}); merge its parts, each as a model of its own: {found}."


def assemble(
    index: Mapping[str, object],
    at: str,
    open_shard: Callable[[str], Checkpoint],
    *,
    where: str,
    name: str,
    folder: Path,
) -> Checkpoint:
    """Open the shards that an index, found `at` some place, names, and check that they hold what it says."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{at} has no weight_map from tensor names to file names; save the model again.")
    shards = {file: open_shard(file) for file in dict.fromkeys(weight_map.values())}
    model = ShardedCheckpoint(name, where, list(shards.values()), folder)
    lost = [tensor for tensor, file in weight_map.items() if tensor not in shards[file].headers]
    if lost:
        raise CheckpointError(f"{at} names {len(lost)} tensors that their shards lack: {listed(lost)}.")
    extra = [tensor for tensor in model.headers if tensor not in weight_map and tensor not in model.ties]
    if extra:
        raise CheckpointError(f"{at} lacks {len(extra)} tensors that the shards have: {listed(extra)}; is it stale?")
    return model


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder; refuse a name or a link that leads out of it (the hub cache's own blobs apart)."""
    path = folder / name
    try:
        own, there = lies_in(path, folder), path.is_file()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name!r} in {folder} is not a file that can be read; copy it again.") from error
    if Path(name).is_absolute() or ".." in Path(name).parts or not own:
        raise CheckpointError(f"{name!r} leads out of the folder {folder}; put the file itself there.")
    if not there:
        raise CheckpointError(f"{path} does not exist, but its folder needs it; copy or download it again.")
    return path


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise CheckpointError(f"{where} has {size} bytes, too large for a {path.name}; remove it.")
        return parse_json(path.read_bytes(), where)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {reason(error)}.") from error


def parse_json(data: bytes, where: str | Path) -> dict[str, Any]:
    """Return the object in the bytes of a JSON file that lies at `where`."""
    try:
        value = json_value(data)
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}, expected an object.")
    return value
