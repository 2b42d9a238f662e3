"""The bench on real text tasks: MiniLM-L6 fine-tuned on eight of them, merged and judged by the library's own code.

The data (minilm8.npz) and the progenitor are not part of the project. Scales are chosen on a tenth of the train data.

    python benchmarks/minilm8.py DATA.npz MODEL_FOLDER [--device cuda] [--samples 256] [--experiments performance eta …]

A GPU is busier with several processes (under nvidia-cuda-mps-control -d): start them with --outcomes FOLDER --part 0/4,
1/4, …, then once more with --outcomes alone, which puts the results together.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import defaults
from safetensors.torch import load_file, save_file
from shared_work import share
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel

from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.experiments.bench import Bench
from epimer.experiments.paper import EXPERIMENTS
from epimer.experiments.results import write

TASKS = ("agnews", "banking77", "clinc150", "emotion", "hate", "sst2", "subj", "trec6")
DOUBTFUL = {"hate": "its test set is shifted; its own model has 52.5% there"}


class Network(nn.Module):
    """MiniLM, its real tokens' mean on the unit sphere, and a task's head."""

    def __init__(self, bert: BertModel, classes: int) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(bert.config.hidden_size, classes, bias=False)

    def features(self, x: Tensor) -> Tensor:
        mask = (x != 0).long()
        hidden = self.bert(input_ids=x, attention_mask=mask).last_hidden_state
        return normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def progenitor(folder: Path, device: str) -> BertModel:
    """Load MiniLM; its table of words may have been cut to those in use."""
    state = {name: W.float() for name, W in load_file(folder / "model.safetensors").items() if "pooler" not in name}
    known = json.loads((folder / "config.json").read_text())
    config = BertConfig(**{**known, "vocab_size": len(state["embeddings.word_embeddings.weight"])})
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    bert = BertModel(config, add_pooling_layer=False)
    missing = bert.load_state_dict(state, strict=False).missing_keys
    assert all("position_ids" in name or "token_type_ids" in name for name in missing), missing
    return bert.to(device)


def read(path: Path, folder: Path, device: str, length: int) -> dict[str, dict[str, Split]]:
    """Return every task's splits: a tenth of train, by a seeded shuffle, is validation data."""
    data = np.load(path)
    number = (
        {int(token): i for i, token in enumerate(np.load(folder / "used.npy"))}
        if (folder / "used.npy").exists()
        else None
    )
    found = {}
    for task in TASKS:
        splits = {}
        for split in ("train", "test"):
            x = data[f"{task}.{split}.x"].astype(np.int64)
            x = x if number is None else np.vectorize(number.__getitem__)(x)
            y = torch.from_numpy(data[f"{task}.{split}.y"].astype(np.int64))
            splits[split] = Split(torch.from_numpy(x[:, :length]).to(device), y.to(device))
        order = torch.randperm(len(splits["train"]), generator=torch.Generator().manual_seed(0)).to(device)
        val, train = order[: len(order) // 10], order[len(order) // 10 :]
        whole = splits["train"]
        splits |= {"train": Split(whole.x[train], whole.y[train]), "val": Split(whole.x[val], whole.y[val])}
        found[task] = splits
    return found


def train_head(network: Network, train: Split) -> None:
    """Fit the head on frozen features."""
    with torch.no_grad():
        features = torch.cat([network.features(x) for x, _ in train.batches(500)])
    network.head.weight.data.zero_()
    optimizer = torch.optim.Adam([network.head.weight], 0.5)
    for _ in range(300):
        optimizer.zero_grad()
        penalty = 1e-4 * network.head.weight.square().sum(1).mean()
        (cross_entropy(features @ network.head.weight.T, train.y) + penalty).backward()
        optimizer.step()


def fine_tune(network: Network, train: Split, device: str, epochs: int) -> None:
    """Train the encoder with the head and the embeddings frozen."""
    parameters = list(network.bert.encoder.parameters())
    optimizer = torch.optim.AdamW(parameters, 3e-5, weight_decay=0.01)
    steps = epochs * math.ceil(len(train) / 64)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 50) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))
    )
    network.train()
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).to(train.y.device)
        for x, y in train.batches(64, order):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = cross_entropy(network(x).float(), y)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            rate.step()
    network.eval()


def build(data: Path, folder: Path, device: str, epochs: int, length: int, cache: Path) -> Suite:
    """Train heads and models, or read them from the cache, and return them as a suite."""
    splits = read(data, folder, device, length)
    start = progenitor(folder, device)
    base = {f"bert.{name}": W.clone() for name, W in start.state_dict().items() if name.startswith("encoder.")}
    classes = {name: int(splits[name]["train"].y.max()) + 1 for name in TASKS}

    def make() -> tuple[list[Mapping[str, Tensor]], list[Mapping[str, Tensor]]]:
        models, heads = [], []
        for name in TASKS:
            torch.manual_seed(0)
            network = Network(progenitor(folder, device), classes[name]).to(device)
            network.requires_grad_(False)
            network.head.requires_grad_(True)
            train_head(network, splits[name]["train"])
            network.head.requires_grad_(False)
            network.bert.encoder.requires_grad_(True)
            fine_tune(network, splits[name]["train"], device, epochs)
            state = network.bert.state_dict()
            models.append({f"bert.{key}": W for key, W in state.items() if key.startswith("encoder.")})
            heads.append({"weight": network.head.weight.detach()})
        return models, heads

    models, heads = stored(cache, make)
    models = [{name: W.to(device) for name, W in model.items()} for model in models]
    networks = {name: Network(start, classes[name]).to(device) for name in TASKS}  # one encoder in all of them
    for name, head in zip(TASKS, heads, strict=True):
        networks[name].head.load_state_dict(head)

    def network_of(state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        network = networks[task.name]
        network.load_state_dict(dict(state), strict=False)
        return network.requires_grad_(True).eval()

    tasks = [
        SuiteTask(name, [str(c) for c in range(classes[name])], splits[name], head, doubtful=DOUBTFUL.get(name, ""))
        for name, head in zip(TASKS, heads, strict=True)
    ]
    return Suite("minilm8", base, models, tasks, network_of, untrained="probe")


def stored(cache: Path, make: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return models and heads from a folder, made first where it has none."""
    names = [cache / kind / f"{task}.safetensors" for kind in ("models", "heads") for task in TASKS]
    if not all(name.exists() for name in names):
        for name, state in zip(names, (state for part in make() for state in part), strict=True):
            name.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: W.contiguous().cpu() for key, W in state.items()}, name)
    states = [load_file(name) for name in names]
    return states[: len(TASKS)], states[len(TASKS) :]


def main() -> None:
    """Run experiments and write their tables; several numbers of samples for `performance`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--experiments", nargs="+", default=["performance"], choices=[*EXPERIMENTS, "defaults"])
    parser.add_argument("--cache", type=Path, default=Path("minilm8-models"))
    parser.add_argument("--out", type=Path, default=Path("minilm8-results"))
    parser.add_argument("--outcomes", type=Path, help="keep merges' outcomes here, and go on from those that are there")
    parser.add_argument("--part", default="0/1", help="i/n: make only every n-th missing outcome and write no results")
    given = parser.parse_args()
    started = time.perf_counter()
    suite = build(given.data, given.model, given.device, given.epochs, given.length, given.cache)
    print(f"heads and models in {time.perf_counter() - started:.0f} s", flush=True)
    part, parts = map(int, given.part.split("/"))
    if given.outcomes is not None:
        share(given.outcomes, part, parts)
    bench = Bench(suite, samples=given.samples, keep=False)
    for name in given.experiments:
        started = time.perf_counter()
        result = defaults(bench) if name == "defaults" else EXPERIMENTS[name](bench)
        if parts > 1:
            continue
        result = replace(bench.with_provenance(result), name=f"{result.name}-{given.samples}")
        write(result, given.out)
        print(result.markdown(), f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
