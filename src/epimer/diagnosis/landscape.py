"""The loss landscape around fine-tuned models, as in the paper's appendix.

The plane is θ̄ + aδ + bη: θ̄ the mean of the fine-tuned models, δ and η the first two principal components of their
parameter vectors, of norm 1. Every task's loss is taken on a grid of (a, b); the base, the fine-tuned and the merged
models are marked where they fall on the plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from epimer.errors import ParameterError
from epimer.geometry.decompositions import eigh
from epimer.records import MapPoint, Maps

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Point:
    """A model on the plane."""

    name: str
    kind: str
    """base, task or merged"""
    a: float
    b: float
    off: float
    """distance from the plane, as a share of the distance from θ̄"""
    losses: tuple[float, ...]
    """its own loss on every task"""

    def record(self, tasks: Sequence[str]) -> MapPoint:
        """Return the record of it."""
        losses = dict(zip(tasks, self.losses, strict=True))
        return MapPoint(self.name, self.kind, self.a, self.b, self.off, sum(self.losses), losses)


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid of the plane, and where the models lie."""

    tasks: tuple[str, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    losses: tuple[tuple[tuple[float, ...], ...], ...]
    """per task, per b, per a"""
    points: tuple[Point, ...]
    explained: float
    """share of the fine-tuned models' variance that lies in the plane"""

    def record(self) -> Maps:
        """Return the record of it; `joint` is the sum over tasks."""
        joint = torch.tensor(self.losses, dtype=torch.float64).sum(0).tolist()
        maps = {task: [list(row) for row in losses] for task, losses in zip(self.tasks, self.losses, strict=True)}
        points = [point.record(self.tasks) for point in self.points]
        return Maps(list(self.a), list(self.b), maps, joint, points, self.explained)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return asdict(self.record())


def landscape(
    base: State,
    models: Mapping[str, State],
    losses: Callable[[State], Sequence[float]],
    *,
    merged: Mapping[str, State] | None = None,
    tasks: Sequence[str] | None = None,
    grid: int = 21,
    margin: float = 0.35,
    progress: Callable[[int], None] = lambda done: None,
) -> Landscape:
    """Survey the plane of the fine-tuned models' first two principal components.

    Args:
        base: the ancestor.
        models: the fine-tuned models by name.
        losses: the loss of a state dict on every task.
        merged: merged models to mark, by name.
        tasks: what `losses` returns one of each for; the models' names by default.
        grid: points along a side.
        margin: how far the plane goes beyond the outermost model, as a share of their extent.
        progress: called with 1 after each point.
    """
    if len(models) < 3:
        raise ParameterError(
            f"a loss landscape needs three fine-tuned models at least, for two directions; got {len(models)}."
        )
    names = [name for name, W in base.items() if W.is_floating_point()]
    plane = _Plane(names, list(models.values()))
    marked = [("base", "base", base), *((n, "task", W) for n, W in models.items())]
    marked += [(n, "merged", W) for n, W in (merged or {}).items()]
    places = [plane.place(state) for _, _, state in marked]
    points = []
    for (name, kind, state), (a, b, off) in zip(marked, places, strict=True):
        points.append(Point(name, kind, a, b, off, tuple(losses(state))))
        progress(1)
    a_axis, b_axis = (_axis([place[i] for place in places], grid, margin) for i in (0, 1))
    wanted = tuple(tasks or models)
    maps: list[list[list[float]]] = [[] for _ in wanted]
    for b in b_axis:
        rows: list[list[float]] = [[] for _ in wanted]
        for a in a_axis:
            for row, loss in zip(rows, losses(plane.at(a, b, base)), strict=True):
                row.append(float(loss))
            progress(1)
        for task, row in zip(maps, rows, strict=True):
            task.append(row)
    frozen = tuple(tuple(tuple(row) for row in task) for task in maps)
    return Landscape(wanted, tuple(a_axis), tuple(b_axis), frozen, tuple(points), plane.explained)


def _axis(values: Sequence[float], grid: int, margin: float) -> list[float]:
    low, high = min(values), max(values)
    room = margin * (high - low)
    return [float(x) for x in torch.linspace(low - room, high + room, grid, dtype=torch.float64)]


class _Plane:
    """θ̄ + aδ + bη, from the T x T Gram matrix of the centred models: no more than their own size is held."""

    def __init__(self, names: list[str], models: Sequence[State]) -> None:
        self.names, count = names, len(models)
        self.mean = {name: torch.stack([m[name].float() for m in models]).mean(0) for name in names}
        gram = torch.zeros(count, count, dtype=torch.float64)
        for name in names:
            X = torch.stack([m[name].float() - self.mean[name] for m in models]).reshape(len(models), -1).double()
            gram += (X @ X.T).cpu()
        values, vectors = eigh(gram)
        values = values.clamp_min(0)
        self.explained = float(values[-2:].sum() / values.sum()) if float(values.sum()) > 0 else 1.0
        mix = vectors[:, [-1, -2]] / values[[-1, -2]].sqrt().clamp_min(1e-30)
        mix = mix * torch.sign(mix.gather(0, mix.abs().argmax(0)[None]))  # which of ±δ is chosen must not be chance
        self.axes = {
            name: torch.stack([m[name].float() - self.mean[name] for m in models]).reshape(len(models), -1).T.double()
            @ mix.to(self.mean[name].device)
            for name in names
        }

    def place(self, state: State) -> tuple[float, float, float]:
        """Return a model's coordinates, and its distance from the plane as a share of that from θ̄."""
        where, size = torch.zeros(2, dtype=torch.float64), 0.0
        for name in self.names:
            x = (state[name].float() - self.mean[name]).flatten().double()
            where += (x @ self.axes[name]).cpu()
            size += float(x.square().sum())
        rest = max(0.0, size - float(where.square().sum()))
        return float(where[0]), float(where[1]), (rest / size) ** 0.5 if size > 0 else 0.0

    def at(self, a: float, b: float, base: State) -> dict[str, Tensor]:
        """Return the model at (a, b); what is not a float is the base's."""
        made = dict(base)
        for name in self.names:
            step = self.axes[name] @ torch.tensor([a, b], dtype=torch.float64, device=self.axes[name].device)
            made[name] = (self.mean[name] + step.view_as(self.mean[name])).to(base[name].dtype)
        return made
