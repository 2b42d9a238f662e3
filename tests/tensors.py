"""Tensors of every dtype, and a way to compare them bit by bit."""

import torch
from torch import Tensor

from epimer.checkpoints.safetensors import DTYPES


def bits(W: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return a tensor as its dtype, shape and bytes: equal for NaN too, and for dtypes that cannot be compared."""
    return W.dtype, tuple(W.shape), bytes(W.contiguous().reshape(-1).view(torch.uint8).numpy()) if W.numel() else b""


def every_dtype(*shape: int) -> dict[str, Tensor]:
    """Return a tensor of random bytes for each dtype of safetensors (booleans are 0 or 1)."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, dtype in DTYPES.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        found[name] = ((raw % 2).bool() if dtype == torch.bool else raw.view(dtype)).reshape(shape)
    return found
