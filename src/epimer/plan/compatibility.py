"""Compare the models' config.json and tokenizers: what makes equal weights compute different functions is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from epimer.checkpoints.folder import parse_json
from epimer.checkpoints.sentence_modules import MODULES, missing_modules, module_differences
from epimer.checkpoints.sidecar_files import read_sidecar, vocabularies
from epimer.checkpoints.vocabulary import token_tables
from epimer.errors import CheckpointError, EpimerError, listed, short
from epimer.methods.options import Rules
from epimer.methods.rules import matching
from epimer.plan.participants import Participants, collect_errors

FUNCTION = (
    "model_type", "*rope*", "*rotary*", "*_heads", "*n_head*", "*num_head*", "*head_dim", "kv_channels",
    "hidden_act", "*activation*", "act_fn", "*_act", "*_act_fn", "feed_forward_proj", "*_eps", "*epsilon",
    "tie_word_embeddings", "*softcap*", "query_pre_attn_scalar", "*_multiplier", "logit_scale", "logits_scaling",
    "*scale_attn*", "scale_embedding", "*normalize_before", "*sliding_window*", "layer_types", "*alibi*",
    "*parallel_attn", "*parallel_residual", "position_embedding_type", "relative_attention_*", "*norm_topk_prob",
    "num_experts_per_tok", "*top_k", "routed_scaling_factor", "is_decoder", "patch_size", "*_stride", "pooling*",
    "scoring_func", "n_group", "topk_group", "topk_method", "clip_qkv", "*feature_layer",
)  # fmt: skip
"""patterns of the keys of config.json that change what a model computes with the same weights"""
SILENT = (
    "_*", "name_or_path", "*dtype", "transformers_version", "use_cache", "architectures", "auto_map", "*dropout*",
    "*_drop", "*pdrop", "attn_implementation", "gradient_checkpointing", "initializer_*", "finetuning_task",
    "problem_type",
    "task_specific_params", "id2label", "label2id", "num_labels", "output_attentions", "output_hidden_states",
    "return_dict", "pretraining_tp", "*_token_id", "vocab_size", "torchscript", "chunk_size_feed_forward",
)  # fmt: skip
"""patterns of keys that are looked at elsewhere, or that change nothing of a merge"""
GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k", "top_p",
    "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_return_sequences", "diversity_penalty",
)  # fmt: skip
"""keys of how to generate, which older versions of transformers keep in config.json"""
HEADS = ("classifier", "score", "head", "heads")
KEPT = ("copy", "skip")


class Folder(NamedTuple):
    """A model's folder, and what errors call the model."""

    label: str
    path: Path


def compare_folders(
    participants: Participants,
    tokenizer: Path | None,
    rules: Rules,
    problems: list[EpimerError],
    notes: list[str],
    *,
    aligned: bool = False,
) -> None:
    """Add what configs and tokenizers say against a merge to `problems`, and what else differs to `notes`.

    The first folder, the base's where there is one, is what the others are compared with. `tokenizer` is the folder
    whose tokenizer the output gets, and `aligned` tells whether rows of embeddings follow it in every model.
    """
    merged = [name for name in participants.template.headers if matching(name, rules) not in KEPT]
    folders: dict[Path, Folder] = {}
    for participant in participants.all:
        for path in participant.checkpoint.folders:
            folders.setdefault(path, Folder(participant.label, path))
    with collect_errors(problems, "configs"):
        configs = {one: found for one in folders.values() if (found := _config(one)) is not None}
        for first, other in _against_first(list(configs)):
            problems += _config_problems(first, configs[first], other, configs[other])
            notes += _config_notes(first, configs[first], other, configs[other])
        problems += _label_problems(configs, participants, merged)
    with collect_errors(problems, "sentence-transformers"):
        problems += _module_problems([one for one in folders.values() if (one.path / MODULES).is_file()])
    tables = [name for name in _longest_tables(participants) if name in merged]
    if tokenizer is not None:
        folders.setdefault(tokenizer, Folder("tokenizer_source", tokenizer))
    with collect_errors(problems, "tokenizers"):
        vocabularies = _vocabularies(list(folders.values())) if tables else {}
        for first, other in () if aligned else _against_first(list(vocabularies)):
            problems += _order_problems(first, vocabularies[first], other, vocabularies[other])
        for one, ids in vocabularies.items():
            if one.path == tokenizer:
                problems += _length_problems(one, ids, {t: participants.template.headers[t].shape[0] for t in tables})


def _longest_tables(participants: Participants) -> list[str]:
    """Return the tensors with a row for every token: of all tables the longest, so no table of patches or places."""
    headers = participants.template.headers
    tables = token_tables(headers, 0)
    return [name for name in tables if headers[name].shape[0] == max(headers[one].shape[0] for one in tables)]


def _against_first(folders: Sequence[Folder]) -> Iterator[tuple[Folder, Folder]]:
    return ((folders[0], other) for other in folders[1:])


# --- configs ---


def _config(folder: Folder) -> dict[str, Any] | None:
    """Return a folder's config.json with one key per value, `text_config.hidden_act`; None where there is none."""
    data = read_sidecar(folder.path, "config.json")
    if data is None:
        return None
    return dict(_flat(parse_json(data, folder.path / "config.json")))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in _normalised(config).items():
        if isinstance(value, dict) and key.endswith("config"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in one spelling, whichever version of transformers wrote it.

    Version 5 has `rope_theta` and `rope_scaling` in `rope_parameters`; no scaling, None and the type "default" are the
    same; the width of a window that is not used says nothing.
    """
    settings = dict(config)
    parameters, scaling = settings.get("rope_parameters"), settings.get("rope_scaling")
    if isinstance(parameters, dict) and not any(isinstance(value, dict) for value in parameters.values()):
        del settings["rope_parameters"]
        scaling = parameters
    if isinstance(scaling, dict):
        scaling = dict(scaling)
        settings |= {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        settings["rope_scaling"] = None if scaling.get("rope_type") in (None, "default") else scaling
    if "rope_parameters" not in settings:
        settings.setdefault("rope_scaling", None)
    if settings.get("use_sliding_window") is False:
        settings = {key: value for key, value in settings.items() if key not in ("sliding_window", "max_window_layers")}
    return settings


def _changes_function(key: str) -> bool:
    name = key.rpartition(".")[2]
    return _matches(name, FUNCTION) and not _matches(name, (*SILENT, *GENERATION))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _config_problems(
    first: Folder, config: Mapping[str, Any], other: Folder, theirs: Mapping[str, Any]
) -> Iterator[CheckpointError]:
    """Refuse each key that changes the function and that both configs have, with different values."""
    for key in sorted(config.keys() & theirs.keys()):
        if config[key] != theirs[key] and _changes_function(key):
            yield CheckpointError(
                f"config.json: {key} is {short(config[key])} in {first.label} and {short(theirs[key])} in "
                f"{other.label}: the same weights compute something else there; merge models of one function, or "
                "correct the config."
            )


def _config_notes(first: Folder, config: Mapping[str, Any], other: Folder, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Say which keys only one config has that change the function, and which others differ."""
    for has, lacks, keys in ((first, other, config.keys() - theirs), (other, first, theirs.keys() - config)):
        if unsure := sorted(filter(_changes_function, keys)):
            yield f"config.json: only {has.label} says {listed(unsure)}; for {lacks.label} the same is assumed."
    rest = [key for key in config.keys() & theirs.keys() if config[key] != theirs[key] and not _changes_function(key)]
    if differ := sorted(key for key in rest if not _matches(key.rpartition(".")[2], (*SILENT, *GENERATION))):
        yield f"config.json: {listed(differ)} differs between {first.label} and {other.label}; {first.label}'s is kept."


def _label_problems(
    configs: Mapping[Folder, Mapping[str, Any]], participants: Participants, merged: Sequence[str]
) -> Iterator[CheckpointError]:
    """Refuse classes that are numbered otherwise where the head that tells them apart is merged."""
    named = {one: labels for one, config in configs.items() if (labels := _labels(config.get("id2label")))}
    for first, other in _against_first(list(named)):
        mine, theirs = named[first], named[other]
        headers = participants.template.headers
        rows = {len(mine), len(theirs)}
        heads = [n for n in merged if set(n.split(".")) & {*HEADS} and headers[n].dim() and len(headers[n]) in rows]
        if heads and mine != theirs:
            i = next(i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i))
            yield CheckpointError(
                f"config.json: id2label {i} is {mine.get(i)!r} in {first.label} and {theirs.get(i)!r} in "
                f"{other.label}, and {listed(heads)} would mix them; give it the rule 'copy' or 'skip', or train with "
                "one order."
            )


def _labels(labels: Any) -> dict[int, str]:
    """Return the names of classes by number; none where they are only `LABEL_0`, `LABEL_1`, as nobody named them."""
    if not isinstance(labels, dict) or not all(str(key).isdecimal() and len(str(key)) < 10 for key in labels):
        return {}
    names = {int(key): str(value) for key, value in labels.items()}
    return {} if all(value == f"LABEL_{key}" for key, value in names.items()) else names


def _module_problems(folders: Sequence[Folder]) -> Iterator[CheckpointError]:
    """Refuse modules of sentence-transformers that are missing or differ: they are copied, not merged."""
    for one in folders[:1]:
        for module in missing_modules(one.path):
            yield CheckpointError(
                f"{one.label} has no folder {module!r}, which its modules.json names; download it again."
            )
    for first, other in _against_first(folders):
        for name in module_differences(first.path, other.path):
            yield CheckpointError(
                f"{name} differs between {first.label} and {other.label}, and modules beside the model are copied, not "
                "merged; train them frozen, or put one and the same into every folder."
            )


# --- tokenizers ---


def _vocabularies(folders: Sequence[Folder]) -> dict[Folder, dict[int, str]]:
    """Return the tokens by id of every folder that lists them."""
    tokens = vocabularies(one.path for one in folders)
    return {one: tokens[one.path] for one in folders if tokens[one.path]}


def _order_problems(
    first: Folder, ids: Mapping[int, str], other: Folder, theirs: Mapping[int, str]
) -> Iterator[CheckpointError]:
    """Refuse tokenizers that give one row of the embeddings to different tokens."""
    differ = [] if ids is theirs else sorted(i for i in ids.keys() & theirs.keys() if ids[i] != theirs[i])
    if differ:
        i = differ[0]
        yield CheckpointError(
            f"tokenizers: id {i} is {ids[i]!r} in {first.label} and {theirs[i]!r} in {other.label} ({len(differ)} ids "
            "differ), so rows of embeddings would be mixed; write tokenizer_source: union to align them by token."
        )


def _length_problems(folder: Folder, ids: Mapping[int, str], rows: Mapping[str, int]) -> Iterator[CheckpointError]:
    """Refuse a tokenizer with ids beyond the last row of the table; a table may have rows to spare."""
    for table, count in rows.items():
        if max(ids) >= count:
            yield CheckpointError(
                f"the tokenizer of {folder.label} has {max(ids) + 1} tokens and {table!r} only {count} rows: "
                f"{ids[max(ids)]!r} has none; name another tokenizer_source, or resize the models' embeddings."
            )
