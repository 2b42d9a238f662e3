"""Models that transformers builds, to measure or evaluate: their config, tokenizer and weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from fuzz.harness import Reader
from fuzz.mutations import damage_content, damage_files
from fuzz.readers.texts import yaml_text


def _build(folder: Path) -> None:
    import torch
    import transformers

    import tiny

    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.BertConfig(**sizes, **tiny.TEXT, **tiny.CALM, num_labels=2)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    tiny.save_tokenizer(folder / "model")


def _damage(rng: Random, folder: Path) -> None:
    place = folder / "model"
    names = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    (damage_files if rng.random() < 0.05 else damage_content)(rng, place / rng.choice(names))


def _read(folder: Path) -> None:
    from epimer.tasks.task import load_task

    task = load_task(str(folder / "model"), "text-classification")
    assert dict(task.model.named_parameters())


# dataset cards

CARD = [{"dataset_info": {"features": [{"name": "label", "dtype": {"class_label": {"names": {"0": "a", "1": "b"}}}}]}}]


def _build_card(folder: Path) -> None:
    (folder / "README.md").write_text(f"---\n{json.dumps(CARD[0])}\n---\n# A\n")


def _damage_card(rng: Random, folder: Path) -> None:
    (folder / "README.md").write_bytes(b"---\n" + yaml_text(rng, CARD) + b"\n---\n# A\n")


def _read_card(folder: Path) -> None:
    from epimer.experiments.clip8.images import card_names

    names = card_names(folder / "README.md")
    assert names is None or all(isinstance(name, str) for name in names)


READERS = [
    Reader("network", _build, _damage, _read, share=1),
    Reader("dataset-card", _build_card, _damage_card, _read_card, share=1),
]
