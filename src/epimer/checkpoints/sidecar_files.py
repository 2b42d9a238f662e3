"""The files of a model folder other than its weights: config, generation config, tokenizer and processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from epimer.checkpoints.folder import INDEXES, LARGEST, NOT_WEIGHTS, inside, parse_json, read_json
from epimer.checkpoints.writer import as_json
from epimer.errors import CheckpointError
from epimer.json_values import json_value
from epimer.opened_files import reason

GENERATION = "generation_config.json"
CONFIG = ("config.json", GENERATION)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "tekken.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip
VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json", "vocab.txt")
PROCESSOR = (
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "feature_extractor_config.json",
)  # fmt: skip
TEMPLATES = ("additional_chat_templates", "chat_templates")
TOKENIZER_PATTERNS = ("*.tiktoken", *(f"{folder}/*.jinja" for folder in TEMPLATES))
RECIPE = "recipe.yaml"
WRITTEN_ANEW = ("README.md", "epimer.json", RECIPE, "trainer_state.json", *NOT_WEIGHTS, *INDEXES)
PATHS = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file")
QUANTIZATION = ("quantization_config", "compression_config")  # what is written is never quantised
MOST_TOKENS = 1 << 24  # ids of tokens are below; a table with as many rows would have gigabytes
CODE = ("auto_map", "custom_pipelines")  # keys that name Python files


def sidecar_files(
    donor: Path | None,
    tokenizer: Path | None,
    dtype: str | None,
    generation: Path | None = None,
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    *,
    copy_code: bool = False,
) -> dict[str, bytes]:
    """Return the files to add to the weights; `dtype` is what the config is to say, None to leave it.

    `generation` is the folder that gives generation_config.json and the ids of eos, bos and padding, where it has them;
    `adapt` returns the donor's config as the tensors need it. With `copy_code` the donor's Python files are among them;
    without, no config names any.
    """
    files = {name: data for name in (*CONFIG, *PROCESSOR) if (data := carried(donor, name)) is not None}
    more = [] if tokenizer is None else [path for pattern in TOKENIZER_PATTERNS for path in tokenizer.glob(pattern)]
    names = [*TOKENIZER, *sorted(path.relative_to(tokenizer).as_posix() for path in more if tokenizer is not None)]
    files |= {name: data for name in names if (data := carried(tokenizer, name)) is not None}
    if (data := carried(generation, GENERATION)) is not None:
        files[GENERATION] = data
    if tokenizer is not None and "tokenizer_config.json" in files:
        path = tokenizer / "tokenizer_config.json"
        config = read_json(path, str(path))
        files[path.name] = as_json({key: value for key, value in config.items() if key not in PATHS})
    if donor is not None and "config.json" in files:
        path = donor / "config.json"
        try:
            files[path.name] = as_json(adapt(_config(read_json(path, str(path)), dtype)) | token_ids(generation))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be written down again: {error}.") from error
    if copy_code:
        return files | {name: data for name in code_files(donor) if (data := read_sidecar(donor, name)) is not None}
    for name, data in files.items():
        if name.endswith("_config.json") or name == "config.json":
            config = parse_json(data, Path(name))
            if names_code(config):
                files[name] = as_json(_without_code(config))
    return files


def names_code(config: Mapping[str, Any]) -> bool:
    """Whether a config, or a part of it, names Python files of the model."""
    return any(key in CODE or (isinstance(value, dict) and names_code(value)) for key, value in config.items())


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {key: value for key, value in config.items() if key not in CODE}
    return {key: _without_code(value) if isinstance(value, dict) else value for key, value in parts.items()}


def code_files(donor: Path | None) -> list[str]:
    """Return the Python files of a folder, which are never run, and copied only where that is asked for."""
    return [] if donor is None else sorted(path.name for path in donor.glob("*.py"))


def left_behind(donor: Path | None, carried: Iterable[str], weights: Iterable[Path]) -> list[str]:
    """Return the files and folders of a folder that an output does not get; weights, code and hidden files apart."""
    if donor is None:
        return []
    known = {name.split("/")[0] for name in carried} | {path.name for path in weights} | {*WRITTEN_ANEW}
    names = [f"{path.name}/" if path.is_dir() else path.name for path in donor.iterdir() if path.name not in known]
    return sorted(name for name in names if not name.startswith(".") and not name.endswith((".py", "__pycache__/")))


def token_ids(folder: Path | None) -> dict[str, Any]:
    """Return the ids of eos, bos and padding that a folder's config.json has."""
    config = _object(folder, "config.json")
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def generation_settings(folder: Path | None) -> dict[str, Any]:
    """Return what a folder says about generating text: its generation config, and the ids of eos, bos and padding."""
    settings = {key: value for key, value in _object(folder, GENERATION).items() if value is not None}
    return token_ids(folder) | {
        k: v for k, v in settings.items() if not k.startswith("_") and k != "transformers_version"
    }


def chat_settings(folder: Path | None) -> dict[str, Any]:
    """Return a tokenizer's chat template and its token for the end of a text, where the folder has them."""
    config = _object(folder, "tokenizer_config.json")
    file = read_sidecar(folder, "chat_template.jinja")
    template = config.get("chat_template") or _object(folder, "chat_template.json").get("chat_template")
    template = file.decode("utf-8", "replace") if file is not None else template
    end = config.get("eos_token") or _object(folder, "special_tokens_map.json").get("eos_token")
    settings = {
        "chat template": template.strip() if isinstance(template, str) else template,
        "eos_token": end.get("content") if isinstance(end, dict) else end,
    }
    return {key: value for key, value in settings.items() if value}


def _object(folder: Path | None, name: str) -> dict[str, Any]:
    data = read_sidecar(folder, name)
    return {} if data is None or folder is None else parse_json(data, folder / name)


def vocabulary(folder: Path) -> dict[int, str]:
    """Return a tokenizer's tokens by their ids, those that were added included; none where no file lists them."""
    if (data := read_sidecar(folder, "tokenizer.json")) is not None:
        where = folder / "tokenizer.json"
        return tokens_of(parse_json(data, where), where)
    if (data := read_sidecar(folder, "vocab.json")) is not None:
        extra = read_sidecar(folder, "added_tokens.json")
        tokens = _tokens(parse_json(data, folder / "vocab.json"), folder / "vocab.json")
        return tokens | ({} if extra is None else _tokens(parse_json(extra, folder / "added_tokens.json"), folder))
    if (data := read_sidecar(folder, "vocab.txt")) is not None:
        return dict(enumerate(data.decode("utf-8", "replace").splitlines()))
    return {}


def tokens_of(tokenizer: Mapping[str, Any], where: Path) -> dict[int, str]:
    """Return the tokens by their ids of what a tokenizer.json holds."""
    model = tokenizer.get("model")
    table = model.get("vocab") if isinstance(model, dict) else None
    return _tokens(table, where) | _added(tokenizer.get("added_tokens"), where)


def vocabularies(folders: Iterable[Path]) -> dict[Path, dict[int, str]]:
    """Return every folder's `vocabulary`; equal files, as most fine-tuned models have, are read into one mapping."""
    parsed: dict[tuple[bytes | None, ...], dict[int, str]] = {}
    tokens = {}
    for folder in folders:
        files = tuple(read_sidecar(folder, name) for name in VOCABULARY)
        if files not in parsed:
            parsed[files] = vocabulary(folder)
        tokens[folder] = parsed[files]
    return tokens


def _tokens(table: Any, where: Path) -> dict[int, str]:
    """Return id -> token of a mapping from tokens to ids, or of a list of tokens with their scores."""
    if isinstance(table, dict) and all(map(_is_id, table.values())):
        return {i: token for token, i in table.items()}
    if isinstance(table, list) and all(map(_is_piece, table)):
        return {i: entry[0] for i, entry in enumerate(table)}
    if table is None:
        return {}
    raise CheckpointError(f"{where} has a vocabulary that maps no tokens to ids; save the tokenizer again.")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_TOKENS


def _is_piece(entry: Any) -> bool:
    """Whether a value is a token with its score."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _is_number(entry[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _added(entries: Any, where: Path) -> dict[int, str]:
    """Return id -> token of a list of added tokens, or of nothing."""
    for entry in entries if isinstance(entries, list) else [None] if entries else []:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{where} has added_tokens without id or content; save the tokenizer again.")
    return {entry["id"]: entry["content"] for entry in entries or ()}


def carried(folder: Path | None, name: str) -> bytes | None:
    """Return a small file that an output gets as it is; None where there is none, an error where it is no JSON."""
    data = read_sidecar(folder, name)
    if data is not None and folder is not None and name.endswith(".json"):
        try:
            json_value(data)
        except ValueError as error:
            raise CheckpointError(f"{folder / name} is not JSON: {error}; save it again, or remove it.") from error
    return data


def read_sidecar(folder: Path | None, name: str) -> bytes | None:
    """Return a small file of a folder; None where there is none."""
    if folder is None or not os.path.isfile(folder / name):
        return None
    path = inside(folder, name)
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, too large for a {name}; remove it.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error


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
