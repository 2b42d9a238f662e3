"""The files of a model folder other than its weights: config, generation config, tokenizer and processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epimer.checkpoints.folder import inside, read_json
from epimer.checkpoints.writer import as_json
from epimer.errors import CheckpointError

CONFIG = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "tekken.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip
PROCESSOR = (
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "feature_extractor_config.json",
)  # fmt: skip
PATHS = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file")
QUANTIZATION = ("quantization_config", "compression_config")  # what is written is never quantised
LARGEST = 1 << 28  # bytes; a tokenizer is a few megabytes


def sidecar_files(donor: Path | None, tokenizer: Path | None, dtype: str | None) -> dict[str, bytes]:
    """Return the files to add to the weights; `dtype` is what the config is to say, None to leave it."""
    files = {name: data for name in (*CONFIG, *PROCESSOR) if (data := _read(donor, name)) is not None}
    files |= {name: data for name in TOKENIZER if (data := _read(tokenizer, name)) is not None}
    if tokenizer is not None and "tokenizer_config.json" in files:
        path = tokenizer / "tokenizer_config.json"
        config = read_json(path, str(path))
        files[path.name] = as_json({key: value for key, value in config.items() if key not in PATHS})
    if donor is not None and "config.json" in files:
        path = donor / "config.json"
        try:
            files[path.name] = as_json(_config(read_json(path, str(path)), dtype))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be written down again: {error}.") from error
    return files


def code_files(donor: Path | None) -> list[str]:
    """Return the Python files of a folder, which are neither run nor copied."""
    return [] if donor is None else sorted(path.name for path in donor.glob("*.py"))


def _read(folder: Path | None, name: str) -> bytes | None:
    if folder is None or not (folder / name).is_file():
        return None
    path = inside(folder, name)
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, too large for a {name}; remove it.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _config(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return a config that names the dtype of the weights, no quantisation and no path of the machine it came from."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in QUANTIZATION:
            continue
        if isinstance(value, dict):
            changed[key] = _config(value, dtype)
        elif key in ("torch_dtype", "dtype") and isinstance(value, str) and dtype is not None:
            changed[key] = dtype
        elif key not in PATHS:
            changed[key] = value
    return changed
