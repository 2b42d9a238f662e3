"""Brute force in float64: every matrix formed, nothing clever. The oracle for everything fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epimer.geometry.metric import Diagonal, Identity, Kronecker, Metric, Samples, TaskGram
from epimer.geometry.operator import SubspaceOperator
from epimer.geometry.subspace import Full, Subspace

METRICS = ("identity", "diagonal", "kronecker", "inputs", "outputs", "samples", "task-gram")


def random_metric(kind: str, m: int, n: int, generator: torch.Generator) -> Metric:
    """Return a random metric of one layer, in float64."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def psd(size: int) -> Tensor:
        X = draw(size + 2, size) * draw(size).exp()
        return X.T @ X / len(X)

    match kind:
        case "identity":
            return Identity()
        case "diagonal":
            return Diagonal(draw(m, n).square() * draw(m, n).exp())
        case "kronecker":
            return Kronecker(A=psd(n), G=psd(m))
        case "inputs":
            return Kronecker(A=psd(n))
        case "outputs":
            return Kronecker(G=psd(m))
        case "samples":
            return Samples(g=draw(7, 3, m), x=draw(7, 3, n))
        case _:
            return TaskGram(draw(m, n))


def matrix_of(metric: Metric, m: int, n: int) -> Tensor:
    """Return H as a matrix on row-major vec(D), from its definition."""
    eye_m, eye_n = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    match metric:
        case Identity():
            return torch.eye(m * n, dtype=torch.float64)
        case Diagonal(F=F):
            return torch.diag(F.flatten())
        case Kronecker(A=A, G=G):
            return torch.kron(eye_m if G is None else G, eye_n if A is None else A)
        case Samples(g=g, x=x):
            s = torch.stack(
                [sum(torch.outer(a, b) for a, b in zip(gs, xs, strict=True)) for gs, xs in zip(g, x, strict=True)]
            )
            return torch.einsum("na,nb->ab", s.flatten(1), s.flatten(1)) / len(s)
        case TaskGram(D=D):
            return torch.kron(D @ D.T, D.T @ D)
    raise AssertionError(metric)


def basis_of(subspace: Subspace, m: int, n: int) -> Tensor:
    """Return S (m·n x p): the lift of every unit coordinate."""
    if isinstance(subspace, Full):
        return torch.eye(m * n, dtype=torch.float64)
    shape = subspace.project(torch.zeros(m, n, dtype=torch.float64)).shape
    return _columns(lambda unit: subspace.lift(unit).flatten(), shape, m * n)


def operator_matrix(operator: SubspaceOperator, shape: torch.Size) -> Tensor:
    """Return an operator as a matrix on row-major coordinates, one product at a time."""
    return _columns(lambda unit: operator.apply(unit).flatten(), shape, shape.numel())


def _columns(image: Callable[[Tensor], Tensor], shape: torch.Size, rows: int) -> Tensor:
    units = torch.eye(shape.numel(), dtype=torch.float64).reshape(shape.numel(), *shape)
    return torch.stack([image(unit) for unit in units], dim=1) if len(units) else torch.zeros(rows, 0).double()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether two tensors agree relative to the larger's norm."""
    scale = max(float(actual.norm()), float(expected.norm()), 1e-300)
    return float((actual - expected).norm()) <= tolerance * scale
