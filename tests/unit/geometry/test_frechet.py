"""Solves that stop early: nearer the solution with every step, and said to have stalled."""

import pytest
import torch

from epimer.geometry.frechet import build_problem
from epimer.geometry.metric import Kronecker
from epimer.geometry.subspace import Full


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solve_of_few_steps_goes_towards_the_solution(dtype):
    generator = torch.Generator().manual_seed(0)

    def factor(size):
        X = torch.randn(3 * size, size, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, size)
        return (X.T @ X).to(dtype)

    deltas = [torch.randn(12, 9, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    metrics = [Kronecker(A=factor(9), G=factor(12)) for _ in deltas]

    def at(max_steps):
        return build_problem(Full(dtype), metrics, deltas, [1 / 3] * 3, max_steps=max_steps).damped(1e-2).mean()

    exact = at(None)
    assert exact.status == "converged"
    error = [float((at(steps).value - exact.value).norm()) for steps in (1, 4, 16, 500)]
    assert error == sorted(error, reverse=True)
    assert error[0] > 0.01 * float(exact.value.norm())
    assert error[-1] < 1e-3 * float(exact.value.norm())
    assert at(1).status == "stalled"
