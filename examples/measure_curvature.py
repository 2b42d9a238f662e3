"""Measure curvature of three small classifiers on unlabelled data, and merge them with and without it."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import epimer

TASKS, CLASSES, WIDTH = 3, 4, 32


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss per sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def network() -> nn.Sequential:
    """Return an untrained network."""
    return nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


def data(task: int, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs of one task, which live in directions of their own, and a teacher's labels."""
    generator = torch.Generator().manual_seed(task)
    teacher = torch.randn(16, CLASSES, generator=generator)
    directions = torch.randn(6, 16, generator=generator)
    x = torch.randn(count, 6) @ directions
    return x, (x @ teacher).argmax(1)


def train(model: nn.Module, task: int, steps: int) -> nn.Module:
    """Train a model on one task."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        x, y = data(task, 64)
        optimizer.zero_grad()
        loss_fn(model(x), y).mean().backward()
        optimizer.step()
    return model


def accuracy(state: dict[str, Tensor], task: int) -> float:
    """Return the share of right answers."""
    model = network()
    model.load_state_dict(state)
    x, y = data(task, 2000)
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Print a table of methods and tasks."""
    torch.manual_seed(0)
    base = network()
    for task in list(range(TASKS)) * 10:  # a common ancestor that knows a little of everything
        train(base, task, 10)
    models = [train(copy.deepcopy(base), task, 400) for task in range(TASKS)]
    states = [model.state_dict() for model in models]
    folder = Path(tempfile.mkdtemp())
    curvature = []
    for task, model in enumerate(models):
        batches = [(data(task, 32)[0], None) for _ in range(8)]  # no labels: the model samples its own
        found = epimer.estimate_curvature(model, batches, loss_fn, samples=256)
        found.save(folder / f"task{task}")
        curvature.append(epimer.Curvature.load(folder / f"task{task}"))
    print(curvature[0])
    merged = {
        "average": epimer.merge_state_dicts(base.state_dict(), states, "average"),
        "tsv": epimer.merge_state_dicts(base.state_dict(), states, "tsv"),
        "regmean": epimer.merge_state_dicts(base.state_dict(), states, "regmean", curvature=curvature),
        "mats": epimer.merge_state_dicts(base.state_dict(), states, "mats", curvature=curvature),
        "epimer_kron": epimer.merge_state_dicts(base.state_dict(), states, "epimer_kron", curvature=curvature),
    }
    print(f"{'':<14}" + "".join(f"task {task:<5}" for task in range(TASKS)) + "mean")
    for name, state in merged.items():
        scores = [accuracy(state, task) for task in range(TASKS)]
        print(f"{name:<14}" + "".join(f"{score:<10.3f}" for score in scores) + f"{sum(scores) / TASKS:.3f}")
    own = [accuracy(state, task) for task, state in enumerate(states)]
    print(f"{'each its own':<14}" + "".join(f"{score:<10.3f}" for score in own) + f"{sum(own) / TASKS:.3f}")


if __name__ == "__main__":
    main()
