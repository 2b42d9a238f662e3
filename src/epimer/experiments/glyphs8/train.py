"""Train the models: pre-train one, fit every task a few-shot head, fine-tune with the head frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from epimer.evaluation.suite import BATCH, Split, correct
from epimer.experiments.glyphs8.render import seeded_generator
from epimer.experiments.glyphs8.tasks import LabeledImages, Pool
from epimer.experiments.glyphs8.vit import FrozenHead, Shape, Vit, initialize
from epimer.progress import Stage

State = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """Everything that determines the suite."""

    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    train: int = 8000
    val: int = 500
    test: int = 1000
    shots: int = 20
    """images per class for a head"""
    batch: int = 64
    pool: int = 272
    """characters for pre-training"""
    pretrain_steps: int = 1250
    pretrain_rate: float = 1.5e-3
    head_steps: int = 300
    epochs: int = 2
    rate: float = 3e-4

    def size(self, split: str) -> int:
        """Return how many images a split has."""
        return {"train": self.train, "val": self.val, "test": self.test}[split]


TINY = Settings(
    shape=Shape(width=32, depth=1, heads=2), train=200, val=60, test=60, shots=4, batch=40, pool=12, pretrain_steps=4,
    head_steps=20, epochs=1,
)  # fmt: skip
"""for tests of everything but the numbers"""


def to_float(images: Tensor) -> Tensor:
    """Convert eight-bit images to floats in [0, 1]."""
    return images.float() / 255


def fit(network: nn.Module, batches: Iterator[LabeledImages], steps: int, *, rate: float, warmup: float, decay: float,
        stage: Stage, item: str) -> None:  # fmt: skip
    """Train with AdamW: linear warm-up over a fraction of the steps, cosine decay to zero, gradients clipped to 1."""
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
    network.train()
    for step in range(steps):
        x, y = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(step, steps, warmup)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(network(to_float(x)), y))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        stage.advance(len(y), item)
    network.eval()


def _schedule(step: int, steps: int, warmup: float) -> float:
    ramp = max(1, round(warmup * steps))
    return min((step + 1) / ramp, 0.5 * (1 + math.cos(math.pi * step / steps)))


def pretrain(settings: Settings, pool: Pool, stage: Stage) -> tuple[State, float]:
    """Train a classifier of the pool's characters; return its backbone and its accuracy on fresh images."""
    rng = seeded_generator(settings.seed, "pretrain")
    head = nn.Linear(settings.shape.width, len(pool.counts))
    network = Vit(settings.shape, head)
    initialize(network, rng)

    def batches() -> Iterator[LabeledImages]:
        while True:
            yield pool.batch(settings.batch, rng)

    fit(network, batches(), settings.pretrain_steps, rate=settings.pretrain_rate, warmup=0.05, decay=0.05, stage=stage,
        item="characters")  # fmt: skip
    x, y = pool.batch(1000, seeded_generator(settings.seed, "pretrain", "test"))
    with torch.no_grad():
        hits = torch.cat([correct(network(images), labels) for images, labels in Split(to_float(x), y).batches(BATCH)])
    network.head = nn.Identity()
    return {name: W.detach() for name, W in network.state_dict().items()}, float(hits.mean())


def few_shot_head(settings: Settings, base: State, data: LabeledImages, classes: int) -> State:
    """Fit a linear classifier on the base's features of the first `shots` images of every class.

    Softmax regression with a small ridge on standardised features; the standardisation is then folded into it.
    """
    x, y = data
    first = torch.cat([(y == c).nonzero().flatten()[: settings.shots] for c in range(classes)])
    features, y = _features(settings, base, x[first]), y[first]
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    z = (features - mean) / deviation
    weight = torch.zeros(classes, z.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    for step in range(settings.head_steps):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / settings.head_steps)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(z @ weight.T + bias, y) + 0.01 * weight.square().sum())
        optimizer.step()
    folded = weight.detach() / deviation
    return {"weight": folded, "bias": bias.detach() - folded @ mean}


@torch.no_grad()
def _features(settings: Settings, base: State, x: Tensor) -> Tensor:
    backbone = Vit(settings.shape).eval()
    backbone.load_state_dict(base)
    return torch.cat([backbone(to_float(part)) for part in torch.split(x, BATCH)])


def fine_tune(settings: Settings, base: State, head: State, data: LabeledImages, name: str, stage: Stage) -> State:
    """Train the whole backbone on one task, with the head frozen."""
    x, y = data
    network = Vit(settings.shape, FrozenHead(head))
    network.load_state_dict(base)
    rng = seeded_generator(settings.seed, "fine-tune", name)

    def batches() -> Iterator[LabeledImages]:
        while True:
            for part in torch.split(torch.randperm(len(y), generator=rng), settings.batch):
                yield x[part], y[part]

    steps = settings.epochs * math.ceil(len(y) / settings.batch)
    fit(network, batches(), steps, rate=settings.rate, warmup=0.1, decay=0.01, stage=stage, item=name)
    return {name: W.detach() for name, W in network.state_dict().items()}
