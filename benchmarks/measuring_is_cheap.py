"""Measuring curvature costs little more than training: ViT-B/32 shapes, batch 32, against plain forward + backward.

Peers in the same run: a plain forward and backward pass with weight gradients, and per-sample gradients by
torch.func.vmap(grad) in chunks of 8, as the paper computed its diagonal. Times are the best of several runs.

    python benchmarks/measuring_is_cheap.py [--device cuda] [--layers 12] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import write_result
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

import epimer


class Logits(nn.Module):
    """A ViT that returns its logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(ViTConfig(num_hidden_layers=layers, patch_size=32, num_labels=100))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vit(pixels).logits


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss per sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def best(run: Callable[[], Any], repeats: int, device: str) -> tuple[float, float]:
    """Return the shortest time of several runs after one to warm up, and the peak memory in bytes."""
    times = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return min(times[1:]), peak


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    device = given.device
    model = Logits(given.layers).to(device)
    pixels = torch.randn(32 * given.batches, 3, 224, 224, device=device)
    labels = torch.randint(0, 100, (32 * given.batches,), device=device)
    batches = list(zip(pixels.split(32), labels.split(32), strict=True))

    def plain() -> None:
        for x, y in batches:
            model.zero_grad()
            loss_fn(model(x), y).sum().backward()

    def measure(kind: str) -> Callable[[], Any]:
        return lambda: epimer.estimate_curvature(
            model, batches, loss_fn, kind=kind, labels="true", samples=None, progress=False
        )

    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def per_sample() -> dict[str, Tensor]:
        def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(torch.func.functional_call(model, params, (x[None],)), y[None])[0]

        gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), chunk_size=8)
        total: dict[str, Tensor] = {}
        model.eval()
        for x, y in batches[:1]:
            for name, g in gradients(parameters, x, y).items():
                squares = g.square().sum(0)
                total[name] = total[name] + squares if name in total else squares
        return total

    rows: dict[str, dict[str, float]] = {}
    for name, run in (
        ("forward + backward", plain),
        ("kronecker", measure("kronecker")),
        ("diagonal", measure("diagonal")),
    ):
        seconds, peak = best(run, given.repeats, device)
        rows[name] = {"seconds per batch": seconds / given.batches, "peak GB so far": peak / 1e9}
    seconds, peak = best(per_sample, 1, device)
    rows["vmap(grad), chunks of 8"] = {"seconds per batch": seconds, "peak GB so far": peak / 1e9}
    base, peer = rows["forward + backward"]["seconds per batch"], rows["vmap(grad), chunks of 8"]["seconds per batch"]
    for name, row in rows.items():
        row["x forward + backward"] = row["seconds per batch"] / base
        row["vmap takes x"] = peer / row["seconds per batch"]
        print(f"{name:<26}" + "".join(f"{key} {value:8.3f}   " for key, value in row.items()))
    if given.json:
        write_result(given.json, {"device": device, "layers": given.layers, "rows": rows}, seed=0)


if __name__ == "__main__":
    main()
