"""The bench on real text tasks: MiniLM-L6 fine-tuned on eight of them, merged and judged by the library's own code.

The data (minilm8.npz) and the progenitor are not part of the project. Scales are chosen on a tenth of the train data.

    python benchmarks/minilm8.py DATA.npz MODEL_FOLDER [--device cuda] [--json FILE] [--samples 64 256 1000]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel

from epimer.suites.bench import CANDIDATES, Bench, Candidate, references
from epimer.suites.experiments import interval, percent
from epimer.suites.stats import compare
from epimer.suites.suite import Split, Suite, SuiteTask

TASKS = ("agnews", "banking77", "clinc150", "emotion", "hate", "sst2", "subj", "trec6")


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


def build(data: Path, folder: Path, device: str, epochs: int, length: int) -> Suite:
    """Train heads and models, and return them as a suite."""
    splits = read(data, folder, device, length)
    start = {name: W.clone() for name, W in progenitor(folder, device).state_dict().items()}
    networks: dict[str, Network] = {}
    tasks, models = [], []
    for name in TASKS:
        torch.manual_seed(0)
        classes = int(splits[name]["train"].y.max()) + 1
        network = Network(progenitor(folder, device), classes).to(device)
        network.requires_grad_(False)
        network.head.requires_grad_(True)
        train_head(network, splits[name]["train"])
        network.head.requires_grad_(False)
        network.bert.encoder.requires_grad_(True)
        fine_tune(network, splits[name]["train"], device, epochs)
        networks[name] = network
        encoder = {
            f"bert.{key}": W.clone() for key, W in network.bert.state_dict().items() if key.startswith("encoder.")
        }
        models.append(encoder)
        head = {"weight": network.head.weight.detach()}
        tasks.append(SuiteTask(name, [str(c) for c in range(classes)], head, splits[name]))
    base = {f"bert.{key}": W for key, W in start.items() if key.startswith("encoder.")}

    def network_of(state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        network = networks[task.name]
        network.load_state_dict(dict(state), strict=False)
        return network.eval()

    return Suite("minilm8", base, models, tasks, network_of, Path("minilm8"))


def main() -> None:
    """Print the table for several numbers of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    started = time.perf_counter()
    suite = build(given.data, given.model, given.device, given.epochs, given.length)
    print(f"heads and models in {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for name, scores in references(Bench(suite, keep=False)).items():
        rows.append({"method": name, "average": scores.average, "worst": scores.worst, "tasks": scores.accuracies})
        print(f"{name:<28} {interval(scores)}  worst {percent(scores.worst)}", flush=True)
    flat = None
    kron = [
        Candidate("epimer_kron", {"basis": basis, "aggregator": a, "damping": d}, f"kron {basis} {a} {d}")
        for basis in ("tensor", "full")
        for a, d in (("mean", 0.01), ("anchored", 0.1), ("anchored", 0.3), ("anchored", 1.0))
    ]
    free = [
        Candidate("epimer_free", {"basis": basis, "damping": d}, f"free {basis} {d}")
        for basis in ("tensor", "full")
        for d in (0.1, 0.3, 1.0, 3.0)
    ]
    for count in given.samples:
        bench = Bench(suite, samples=count, keep=False)
        first = count == given.samples[0]
        chosen = [c for c in (*CANDIDATES, *kron, *free) if first or c.curvature is not None]
        for candidate in chosen:
            if candidate.method in ("mats",) and count != given.samples[-1]:
                continue
            outcome = bench.best(candidate)
            flat = outcome if candidate.name == "tsv" else flat
            difference, p = compare(outcome.test, flat.test) if flat else (float("nan"), float("nan"))
            rows.append(
                {
                    "method": candidate.name,
                    "samples": count if candidate.curvature else None,
                    "average": outcome.test.average,
                    "interval": outcome.test.interval(),
                    "validation": outcome.validation,
                    "worst": outcome.test.worst,
                    "scale": outcome.scale,
                    "seconds": outcome.seconds,
                    "over tsv": difference,
                    "p": p,
                    "tasks": outcome.test.accuracies,
                }
            )
            label = f"{candidate.name} {count if candidate.curvature else ''}"
            print(
                f"{label:<28} {interval(outcome.test)}  worst {percent(outcome.test.worst)}  val "
                f"{percent(outcome.validation)}  scale {outcome.scale:g} {outcome.seconds:.1f} s {difference:+.3f}",
                flush=True,
            )
        print("measured", {kind: round(s, 1) for kind, s in bench.seconds.items()}, flush=True)
        if given.json:
            given.json.write_text(json.dumps({"device": given.device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
