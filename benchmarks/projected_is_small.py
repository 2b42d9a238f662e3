"""Projected curvature fits beside a 7B model: p x p numbers per layer and side, measured on one real layer.

One decoder layer of LLaMA-7B's shape (random weights) is measured with a basis of 8 tasks at rank 32, so p = 256.
Printed are the bytes that were really stored for it, times 32 layers, against what the same kinds take unprojected.

    python benchmarks/projected_is_small.py [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from result_file import write_result
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import epimer
from epimer.geometry.subspace import Tagged, tensor_product

TASKS, RANK, LAYERS = 8, 32, 32


def orthonormal(rows: int, columns: int, device: str) -> Tensor:
    """Return random orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns, device=device)).Q


def loss_fn(outputs: object, targets: Tensor) -> Tensor:
    """Return each sample's summed cross-entropy of the next tokens; targets are shifted already."""
    logits: Tensor = outputs.logits  # type: ignore[attr-defined]
    losses = functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return losses.sum(1)


def main() -> None:
    """Print the bytes per task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=1)  # hidden 4096, intermediate 11008: the defaults are 7B's
    model = LlamaForCausalLM(config).to(given.device, torch.float32 if given.device == "cpu" else torch.bfloat16)
    matrices = {name: p for name, p in model.named_parameters() if name.startswith("model.layers") and p.dim() == 2}
    width = TASKS * RANK
    tagged = {}
    for name, W in matrices.items():
        U, V = (orthonormal(side, width, given.device) for side in W.shape)
        owner = torch.arange(TASKS).repeat_interleave(RANK)
        tagged[name] = Tagged(U, V, torch.ones(width), owner)
    ids = torch.randint(0, 1000, (4, 33), device=given.device)
    batches = [({"input_ids": ids[:, :-1]}, ids[:, 1:])]
    rows = {}
    for kind, basis in (
        ("kronecker", {name: tensor_product(one) for name, one in tagged.items()}),
        ("samples", tagged),
    ):
        started = time.perf_counter()
        found = epimer.estimate_curvature(model, batches, loss_fn, kind=kind, basis=basis, progress=False)
        rows[f"{kind}, projected"] = found.nbytes, time.perf_counter() - started
    entries = [tuple(W.shape) for W in matrices.values()]
    rows["diagonal"] = sum(4 * m * n for m, n in entries), None
    rows["kronecker"] = sum(4 * (m * m + n * n) for m, n in entries), None
    model_bytes = sum(2 * m * n for m, n in entries)
    print(f"one layer has {len(entries)} matrices, {model_bytes / 1e9:.2f} GB in bfloat16; p = {width}")
    shown = {}
    for name, (size, seconds) in rows.items():
        whole = size * LAYERS
        measured = "arithmetic" if seconds is None else f"stored, measured in {seconds:.1f} s"
        share = whole / (model_bytes * LAYERS)
        print(f"{name:<22} {size / 1e6:10.2f} MB a layer {whole / 1e9:9.3f} GB a task, {share:8.2%} of it ({measured})")
        shown[name] = {
            "bytes per layer": size,
            "bytes per task": whole,
            "share of the model": share,
            "seconds": seconds,
        }
    if given.json:
        write_result(given.json, {"p": width, "layers": LAYERS, "device": given.device, "rows": shown}, seed=0)


if __name__ == "__main__":
    main()
