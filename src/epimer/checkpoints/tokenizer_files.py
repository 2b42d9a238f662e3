"""The files of a tokenizer with more tokens than it had, or with another chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epimer.checkpoints.folder import parse_json
from epimer.checkpoints.sidecar_files import PATHS, read_sidecar, tokens_of
from epimer.checkpoints.writer import as_json
from epimer.errors import CheckpointError

CONFIG = "tokenizer_config.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def with_tokens(folder: Path, tokens: Mapping[int, str], owners: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer in which all of `tokens`, by id, are known.

    Tokens that it lacks are as in the tokenizer of their owner's folder: added tokens with their flags, or words of the
    vocabulary. The vocabulary lists added tokens too, since that is what fixes their ids.
    """
    tokenizer = _tokenizer(folder)
    model = tokenizer["model"]
    listed = {entry["content"] for entry in tokenizer["added_tokens"]}
    new = {i: token for i, token in tokens.items() if token in owners}
    donors = {path: _tokenizer(path) for path in set(owners.values())}
    entries = {path: {one["content"]: one for one in donor["added_tokens"]} for path, donor in donors.items()}
    added = [
        {**entries[owners[token]][token], "id": i}
        for i, token in sorted(new.items())
        if token in entries[owners[token]] and token not in listed
    ]
    tokenizer["added_tokens"] = sorted([*tokenizer["added_tokens"], *added], key=lambda one: one["id"])
    if isinstance(model["vocab"], dict):
        model["vocab"] |= {token: i for i, token in sorted(tokens.items()) if token not in model["vocab"]}
    else:
        _append(model["vocab"], tokens, folder, owners, donors)
    files = {"tokenizer.json": as_json(tokenizer)}
    config = _config(folder)
    if isinstance(known := config.get("added_tokens_decoder"), dict):
        flags = {str(one["id"]): {"content": one["content"], **{k: one.get(k, False) for k in FLAGS}} for one in added}
        files[CONFIG] = as_json({**config, "added_tokens_decoder": known | flags})
    if (data := read_sidecar(folder, "added_tokens.json")) is not None:
        known = parse_json(data, folder / "added_tokens.json")
        files["added_tokens.json"] = as_json(known | {token: i for i, token in new.items()})
    return files


def _append(
    pieces: list[Any],
    tokens: Mapping[int, str],
    folder: Path,
    owners: Mapping[str, Path],
    donors: Mapping[Path, Mapping[str, Any]],
) -> None:
    """Append tokens to a list of [token, score], whose places are the ids."""
    vocabularies = {path: donor["model"]["vocab"] for path, donor in donors.items()}
    tables = {path: dict(vocab) if isinstance(vocab, list) else {} for path, vocab in vocabularies.items()}
    scores = {token: tables[path].get(token, 0.0) for token, path in owners.items()}
    for i in range(len(pieces), max(tokens) + 1):
        if i not in tokens:
            raise CheckpointError(f"{folder}/tokenizer.json has no token with the id {i}; save the tokenizer again.")
        pieces.append([tokens[i], scores.get(tokens[i], 0.0)])


def with_chat_template(folder: Path | None, files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer, some of which are new, with a chat template, where both readers look.

    Newer versions of transformers read chat_template.jinja, older ones tokenizer_config.json.
    """
    data = files.get(CONFIG)
    config = _config(folder) if data is None else parse_json(data, Path(CONFIG))
    made = {CONFIG: as_json({**config, "chat_template": template}), "chat_template.jinja": template.encode()}
    return {**files, **made}


def _config(folder: Path | None) -> dict[str, Any]:
    data = read_sidecar(folder, CONFIG)
    config = {} if data is None or folder is None else parse_json(data, folder / CONFIG)
    return {key: value for key, value in config.items() if key not in PATHS}


def _tokenizer(folder: Path) -> dict[str, Any]:
    data = read_sidecar(folder, "tokenizer.json")
    if data is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and only such tokenizers are joined; save it with transformers "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(…)), or name one as tokenizer_source."
        )
    tokenizer = parse_json(data, folder / "tokenizer.json")
    tokens_of(tokenizer, folder / "tokenizer.json")
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise CheckpointError(f"{folder}/tokenizer.json has no vocabulary; save the tokenizer again.")
    tokenizer["added_tokens"] = tokenizer.get("added_tokens") or []
    return tokenizer
