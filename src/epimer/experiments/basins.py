"""Two basins and the merges between them, after the paper's first figure: a model of two weights, needing no suite.

Every point is a merge by the library's own methods; curvature is the exact Hessian at each task's optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from epimer.api import merge_state_dicts
from epimer.evaluation.provenance import provenance
from epimer.experiments.results import Column, Row, number, tabulate, text
from epimer.geometry.decompositions import solve
from epimer.geometry.metric import Diagonal, Kronecker
from epimer.records import Experiment, MapPoint, Maps

GRID = 41  # points along a side of the map
NAME = "w"
Loss = Callable[[Tensor], Tensor]
"""weights [2] -> a scalar"""


def quadratic() -> Experiment:
    """Return two long quadratic valleys that cross: the merge under their Hessians is the joint minimum."""
    valleys = {"one": (35.0, (2.0, 0.4)), "two": (115.0, (0.2, 1.9))}
    losses = {
        task: partial(_valley, _rotated(angle), torch.tensor(at).double()) for task, (angle, at) in valleys.items()
    }
    return _experiment("basins", "Two basins, quadratic", losses)


def logistic() -> Experiment:
    """Return the losses of two logistic regressions, whose curvature changes with the weights."""
    losses = {
        task: partial(_cross_entropy, *_samples(seed, angle))
        for seed, (task, angle) in enumerate({"one": 20.0, "two": 100.0}.items())
    }
    return _experiment("basins-logistic", "Two basins, logistic regression", losses)


WITHOUT_SUITE: dict[str, Callable[[], Experiment]] = {"basins": quadratic, "basins-logistic": logistic}
"""experiments that need no suite, by name"""


def _rotated(degrees: float, stiff: float = 10.0, soft: float = 0.3) -> Tensor:
    """Return the Hessian of a valley that runs in a direction: soft along it, stiff across."""
    along, across = _direction(degrees), _direction(degrees + 90)
    return soft * torch.outer(along, along) + stiff * torch.outer(across, across)


def _direction(degrees: float) -> Tensor:
    radians = math.radians(degrees)
    return torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)


def _valley(H: Tensor, at: Tensor, w: Tensor) -> Tensor:
    return (w - at) @ H @ (w - at) / 2


def _samples(seed: int, degrees: float, count: int = 400) -> tuple[Tensor, Tensor]:
    """Return inputs that vary mostly along one direction, and labels ±1 drawn from a logistic model of their own."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.stack([3 * _direction(degrees), 0.6 * _direction(degrees + 90)])
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64) @ spread
    chances = torch.sigmoid(x @ (0.5 * _direction(degrees) + 2.5 * _direction(degrees - 90 + 180 * seed)))
    return x, 2.0 * (torch.rand(count, generator=generator, dtype=torch.float64) < chances) - 1


def _cross_entropy(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return softplus(-y * (x @ w)).mean()


def _derivatives(loss: Loss, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss's gradient [2] and Hessian [2, 2]."""
    w = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(w), w, create_graph=True)
    H = torch.stack([torch.autograd.grad(slope, w, retain_graph=True)[0] for slope in gradient])
    return gradient.detach(), H


def minimum(loss: Loss, steps: int = 50) -> Tensor:
    """Return where a convex loss is least, by Newton's method from 0, halving steps that do not descend."""
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(steps):
        gradient, H = _derivatives(loss, w)
        step = solve(H, gradient)
        while loss(w - step) > loss(w) and step.norm() > 1e-12:
            step = step / 2
        w = w - step
    return w


def _experiment(name: str, title: str, losses: Mapping[str, Loss]) -> Experiment:
    """Return the losses at the base, the optima and the merges between them, and on a grid around them."""
    base, optima = torch.zeros(2, dtype=torch.float64), {task: minimum(loss) for task, loss in losses.items()}
    hessians = [_derivatives(loss, optima[task])[1] for task, loss in losses.items()]
    states = [{NAME: w[None]} for w in optima.values()]

    def merged(method: str, curvature: list[dict[str, Diagonal | Kronecker]] | None = None, **options: Any) -> Tensor:
        return merge_state_dicts({NAME: base[None]}, states, method, curvature=curvature, **options)[NAME][0]

    diagonal: list[dict[str, Diagonal | Kronecker]] = [{NAME: Diagonal(H.diagonal()[None])} for H in hessians]
    whole: list[dict[str, Diagonal | Kronecker]] = [{NAME: Kronecker(A=H)} for H in hessians]
    merges = {
        "average": merged("average"),
        "task arithmetic, sum": merged("task_arithmetic", scale=float(len(states))),
        "Fréchet mean, diagonal": merged("fisher", diagonal),
        "Fréchet mean, Hessian": merged("mats", whole, normalize="none", damping=0.0, iterations=200),
    }
    groups = {"base": {"base": base}, "task": optima, "merged": merges}
    points = [_point(name, kind, w, losses) for kind, group in groups.items() for name, w in group.items()]
    across, along = _axis([point.a for point in points]), _axis([point.b for point in points])
    maps = {
        task: [[float(loss(torch.tensor([a, b], dtype=torch.float64))) for a in across] for b in along]
        for task, loss in losses.items()
    }
    joint = [[sum(maps[task][i][j] for task in maps) for j in range(GRID)] for i in range(GRID)]
    data = [
        {"point": p.name, "kind": p.kind, "a": p.a, "b": p.b, "losses": p.losses, "joint": p.joint,
         "worst": max(p.losses.values())}
        for p in points
    ]  # fmt: skip
    columns: dict[str, Column] = {"model": text("point"), "a": number("a"), "b": number("b")}
    columns |= {f"loss of {task}": partial(_loss_cell, task) for task in losses}
    columns |= {"summed": number("joint"), "worst": number("worst")}
    least = minimum(lambda w: sum((loss(w) for loss in losses.values()), torch.zeros((), dtype=torch.float64)))
    origin = provenance()
    notes = [
        f"Two weights, (a, b). The least summed loss anywhere is {_point('', '', least, losses).joint:.3g}.",
        "Fréchet mean: under each task's Hessian at its own optimum, or its diagonal, neither normalised nor damped; "
        "by the methods mats and fisher.",
        f"A toy after the paper's first figure, made by epimer {origin['epimer']} on {origin['date']}.",
    ]
    figure = Maps(across, along, maps, joint, points, explained=1.0)
    return replace(tabulate(name, title, columns, data, notes, figure), made=origin)


def _point(name: str, kind: str, w: Tensor, losses: Mapping[str, Loss]) -> MapPoint:
    values = {task: float(loss(w)) for task, loss in losses.items()}
    a, b = w.tolist()
    return MapPoint(name, kind, a, b, joint=sum(values.values()), losses=values)


def _loss_cell(task: str, row: Row) -> str:
    return f"{row['losses'][task]:.3g}"


def _axis(values: list[float], room: float = 0.3) -> list[float]:
    """Return a grid over all values, with some room on both sides."""
    low, high = min(values), max(values)
    low, high = low - room * (high - low), high + room * (high - low)
    return torch.linspace(low, high, GRID, dtype=torch.float64).tolist()
