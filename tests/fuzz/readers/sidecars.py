"""What lies beside the weights: configs, tokenizers, modules of sentence-transformers, model cards."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from epimer.checkpoints.sidecar_files import MOST_TOKENS, vocabulary
from fuzz.harness import Reader
from fuzz.mutations import NAMES, YAML_LITERALS, damage_content, damage_files, mutated_bytes, mutated_json
from fuzz.readers.models import CONFIG, merge, merge_and_compare, recipe, write_models

WORDS = ["<unk>", "<eos>", "a", "b", "c"]
GENERATION = {"eos_token_id": 1, "bos_token_id": None, "temperature": 0.7, "transformers_version": "4.0"}


def _json_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.json"))


# configs


def _build_config(folder: Path) -> None:
    config = {
        **CONFIG, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0},
        "layer_types": ["full", "full"], "auto_map": {"AutoModel": "code.Model"}, "_name_or_path": "/home/x",
        "text_config": {"dtype": "float32", "num_hidden_layers": 2},
    }  # fmt: skip
    write_models(folder, "base", "one", "two", config=config)
    for name in ("base", "one", "two"):
        (folder / name / "generation_config.json").write_text(json.dumps(GENERATION))
        (folder / name / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 4}, "do_resize": True}))


def _damage_config(rng: Random, folder: Path) -> None:
    path = rng.choice(_json_files(folder))
    (damage_files if rng.random() < 0.05 else damage_content)(rng, path)


def _read_config(folder: Path) -> None:
    merge_and_compare(recipe(folder), folder / "out")
    (folder / "stack").mkdir()
    sources = [
        {"model": str(folder / "one"), "layer_range": [0, 1]},
        {"model": str(folder / "two"), "layer_range": [1, 2]},
    ]
    slices = [{"sources": [source]} for source in sources]
    found = merge({"merge_method": "passthrough", "slices": slices}, folder / "stack" / "out")
    assert len(found) == 6


# tokenizers


def tokenizer(words: list[str], added: list[str]) -> dict:
    entries = [
        {"id": len(words) + i, "content": word, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        for i, word in enumerate(added)
    ]
    model = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {word: i for i, word in enumerate(words)}}
    return {"version": "1.0", "added_tokens": entries, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}


def _build_tokenizer(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    for name, added in (("base", "<x>"), ("one", "<x>"), ("two", "<y>")):
        files = {
            "tokenizer.json": tokenizer(WORDS, [added]),
            "tokenizer_config.json": {
                "eos_token": "<eos>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast",
                "added_tokens_decoder": {"5": {"content": added, "special": True}}, "model_max_length": 10**30,
                "chat_template": "{{ messages }}", "name_or_path": "/home/x",
            },
            "special_tokens_map.json": {"eos_token": {"content": "<eos>"}, "unk_token": "<unk>"},
            "added_tokens.json": {added: 5},
            "chat_template.json": {"chat_template": "{{ messages }}"},
        }  # fmt: skip
        for file, content in files.items():
            (folder / name / file).write_text(json.dumps(content))
        (folder / name / "chat_template.jinja").write_text("{{ messages }}")
    scores = [[word, -float(i)] for i, word in enumerate([*WORDS, "<x>"])]
    for name in ("base", "one", "two"):
        (folder / f"unigram-{name}").mkdir()
        unigram = {**tokenizer([], []), "model": {"type": "Unigram", "unk_id": 0, "vocab": scores}}
        (folder / f"unigram-{name}" / "tokenizer.json").write_text(json.dumps(unigram))
    (folder / "slow").mkdir()
    (folder / "slow" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "slow" / "added_tokens.json").write_text(json.dumps({"<x>": 5}))
    (folder / "older").mkdir()
    (folder / "older" / "vocab.txt").write_text("\n".join(WORDS))


def _damage_tokenizer(rng: Random, folder: Path) -> None:
    place = folder / rng.choice(
        ("base", "one", "two", "base", "one", "two", "unigram-base", "unigram-two", "slow", "older")
    )
    kind = rng.random()
    if place.name in ("slow", "older"):
        damage_content(rng, rng.choice(sorted(place.iterdir())))
    elif kind < 0.5:
        damage_content(rng, place / "tokenizer.json")
    elif kind < 0.9:
        damage_content(rng, rng.choice(_json_files(place)))
    else:
        damage_files(rng, rng.choice(sorted(path for path in place.iterdir() if path.suffix in (".json", ".jinja"))))


def _read_tokenizer(folder: Path) -> None:
    for name in ("slow", "older"):
        for i, token in vocabulary(folder / name).items():
            assert 0 <= i < MOST_TOKENS
            assert isinstance(token, str)
    alike = recipe(folder)
    merge_and_compare({**alike, "models": alike["models"][:1]}, folder / "plain")
    tokens = {"<y>": {"source": str(folder / "two")}, "a": {"source": {"kind": "zero"}}}
    union = {"source": "union", "tokens": tokens, "pad_to_multiple_of": 4}
    found = merge(recipe(folder, "average", tokenizer=union, chat_template="auto"), folder / "union")
    rows = found["model.embed_tokens.weight"].shape[0]
    ids = vocabulary(folder / "union")
    assert rows > max(ids), f"the table has {rows} rows, and a token has the id {max(ids)}"
    for name in ("base", "one", "two"):
        for file in (folder / name).glob("*token*"):
            if file.is_file():
                file.unlink()
        if (folder / f"unigram-{name}" / "tokenizer.json").is_file() and not (
            folder / name / "tokenizer.json"
        ).exists():
            (folder / f"unigram-{name}" / "tokenizer.json").rename(folder / name / "tokenizer.json")
    merge(recipe(folder, tokenizer_source="union"), folder / "unigram")


# sentence-transformers


def _build_sentence(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    for seed, name in enumerate(("base", "one", "two")):
        place = folder / name
        (place / "1_Pooling").mkdir()
        (place / "2_Dense").mkdir()
        for file, content in {
            "modules.json": modules,
            "config_sentence_transformers.json": {"prompts": {"query": "query: "}},
            "sentence_bert_config.json": {"max_seq_length": 32},
            "1_Pooling/config.json": {"pooling_mode_cls_token": True},
            "2_Dense/config.json": {"in_features": 4, "out_features": 2},
        }.items():
            (place / file).write_text(json.dumps(content))
        save_file({"linear.weight": torch.full((2, 4), float(seed))}, place / "2_Dense" / "model.safetensors")


def _damage_sentence(rng: Random, folder: Path) -> None:
    place = folder / rng.choice(("base", "one", "two"))
    kind = rng.random()
    if kind < 0.6:
        damage_content(rng, place / "modules.json")
    elif kind < 0.75:
        damage_content(rng, rng.choice(_json_files(place)))
    elif kind < 0.9:
        damage_content(rng, place / "2_Dense" / "model.safetensors")
    else:
        damage_files(rng, rng.choice(sorted(path for path in place.rglob("*") if path.is_file())))


def _read_sentence(folder: Path) -> None:
    merge_and_compare(recipe(folder), folder / "out")
    inside = {path.resolve() for path in (folder / "out").rglob("*")}
    assert all(path.is_relative_to((folder / "out").resolve()) for path in inside)


# model cards

CARD = """---
license: mit
license_link: https://x.org
pipeline_tag: text-generation
library_name: transformers
---
# A
"""


def _build_card(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    for name in ("base", "one", "two"):
        (folder / name / "README.md").write_text(CARD)


def _damage_card(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("base", "one", "two")) / "README.md"
    lines = CARD.splitlines()
    if rng.random() < 0.3:
        path.write_bytes(mutated_bytes(rng, CARD.encode()))
        return
    for _ in range(rng.choice((1, 2))):
        i = rng.randrange(len(lines))
        value = rng.choice(
            (*map(str, YAML_LITERALS), *NAMES, mutated_json(rng, b'{"a": ["mit"]}').decode("utf-8", "replace"))
        )
        lines[i] = f"{lines[i].split(':')[0]}: {value}"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


READERS = [
    Reader("config", _build_config, _damage_config, _read_config, share=4),
    Reader("tokenizer", _build_tokenizer, _damage_tokenizer, _read_tokenizer, share=5),
    Reader("sentence-modules", _build_sentence, _damage_sentence, _read_sentence, share=3),
    Reader(
        "model-card",
        _build_card,
        _damage_card,
        lambda folder: merge_and_compare(recipe(folder), folder / "out"),
        share=2,
    ),
]
