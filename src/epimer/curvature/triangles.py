"""Symmetric matrices as their upper triangle, row by row: half the numbers, without loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 512  # side of the blocks in which a matrix is mirrored


def triangle_size(side: int) -> int:
    """Return how many numbers a symmetric matrix is stored as."""
    return side * (side + 1) // 2


def triangle(M: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, row by row."""
    return torch.cat([row[i:] for i, row in enumerate(M)]) if len(M) else M.flatten()


def from_triangle(numbers: Tensor) -> Tensor:
    """Return the symmetric matrix with this upper triangle; of numbers that are none, the next smaller one's."""
    side = (math.isqrt(8 * len(numbers) + 1) - 1) // 2
    M = numbers.new_empty(side, side)
    if M.is_meta:
        return M
    start = 0
    for i in range(side):
        row = numbers[start : start + side - i]
        M[i, i:] = row
        start += side - i
    for start in range(0, side, TILE):
        stop = start + TILE
        M[stop:, start:stop] = M[start:stop, stop:].T
        corner = M[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
    return M
