"""Tiny models of transformers that are really trained on tiny tasks, and independent evaluations of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TASKS = {"animal": ("cat", "dog", "bird"), "pace": ("slow", "fast")}
FILLING = ("the", "a", "sat", "ran", "flew", "over", "sea")
WORDS = ["<pad>", "<unk>", "<eos>", *FILLING, *TASKS["animal"], *TASKS["pace"]]
IDS = {word: i for i, word in enumerate(WORDS)}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "pad_token_id": 0, "initializer_range": 0.3}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RULES = [["cls.*", "copy"], ["classifier.*", "skip"]]  # of the heads, which are each task's own
COUNTS = {"train": 64, "val": 24, "test": 40}


def save_tokenizer(folder: Path, ids: dict[str, int] = IDS) -> None:
    """Save a tokenizer that looks words up."""
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def write_rows(folder: Path, task: str) -> None:
    """Write the splits of a task: texts that hold one of its words, and the number of that word."""
    generator = random.Random(task)
    for split, count in COUNTS.items():
        rows = []
        for _ in range(count):
            label = generator.randrange(len(TASKS[task]))
            others = [word for other, words in TASKS.items() if other != task for word in words]
            words = generator.choices((*FILLING, *others), k=generator.randint(3, 7))
            words.insert(generator.randint(0, len(words)), TASKS[task][label])
            rows.append({"sentence": " ".join(words), "label": label})
        write_jsonl(folder / f"{task}-{split}.jsonl", rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def encode(text: str) -> Tensor:
    """Return the tokens of one text."""
    return torch.tensor([[IDS[word] for word in text.split()]])


def train(model: nn.Module, rows: list[dict], logits, steps: int = 60, rate: float = 5e-3) -> None:
    """Fit a model to rows, all of them at every step."""
    longest = max(len(row["sentence"].split()) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["sentence"].split())] = encode(row["sentence"])[0]
    labels = torch.tensor([row["label"] for row in rows])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(logits(model, ids), labels).backward()
        optimizer.step()


def classify(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=(ids != 0).long()).logits


@torch.no_grad()
def judge(model: nn.Module, rows: list[dict], logits=classify) -> tuple[float, float]:
    """Return accuracy and mean loss, one text at a time."""
    model.eval()
    found = [logits(model, encode(row["sentence"])) for row in rows]
    right = [int(out.argmax()) == row["label"] for out, row in zip(found, rows, strict=True)]
    losses = [float(cross_entropy(out, torch.tensor([row["label"]]))) for out, row in zip(found, rows, strict=True)]
    return sum(right) / len(right), sum(losses) / len(losses)


def make_classifiers(folder: Path) -> None:
    """Save a base without a classifier, and a model fine-tuned for each task, with one; write their data."""
    torch.manual_seed(0)
    transformers.BertForPreTraining(transformers.BertConfig(**SIZES, **TEXT, **CALM)).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    for task, words in TASKS.items():
        write_rows(folder, task)
        torch.manual_seed(1)
        names = {"label2id": {word: i for i, word in enumerate(words)}, "id2label": dict(enumerate(words))}
        model = transformers.BertForSequenceClassification.from_pretrained(folder / "base", **names)
        train(model, read_jsonl(folder / f"{task}-train.jsonl"), classify)
        model.save_pretrained(folder / task)
        save_tokenizer(folder / task)


def make_llamas(folder: Path, names: Sequence[str], noise: float) -> None:
    """Save a small Llama under the first of the names, and others at random steps from it under the rest."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True}
    for seed, name in enumerate(names):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, **TEXT, **tokens, num_key_value_heads=1)
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            for W in model.parameters():
                W += (noise if seed else 0.0) * torch.randn(W.shape)
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)


def loaded(folder: Path, task: str, merged: Path) -> nn.Module:
    """Return a task's model with another model's tensors in it, where it has them, and its own classifier."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder / task)
    state = {name: W for name, W in load_file(merged / "model.safetensors").items() if name.startswith("bert.")}
    left = model.load_state_dict(state, strict=False)
    assert all(name.startswith("classifier.") for name in left.missing_keys)
    assert not left.unexpected_keys
    return model.eval()


def write_suite(path: Path, suite: dict | None = None) -> Path:
    """Write a suite's YAML file, that of the classifiers by default; return its path."""
    path.write_text(yaml.safe_dump(suite_of() if suite is None else suite, sort_keys=False))
    return path


def suite_of(**changes) -> dict:
    """Return what the YAML file of the classifiers' suite says."""
    tasks = [
        {
            "name": task,
            "model": f"./{task}",
            "data": {split: f"{task}-{split}.jsonl" for split in COUNTS} | {"text": "sentence"},
        }
        for task in TASKS
    ]
    return {
        "name": "words",
        "base": "./base",
        "task": "text-classification",
        "classifier": ["classifier.*"],
        "tasks": tasks,
    } | changes
