"""A small vision transformer with timm's parameter names, but separate matrices for queries, keys and values."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from epimer.experiments.glyphs8.render import SIDE


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    patch: int = 9
    width: int = 192
    depth: int = 2
    heads: int = 6
    hidden: int = 4
    """width of the MLP, in widths"""

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return SIDE // self.patch


class Attention(nn.Module):
    """Multi-head self-attention over the patches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape.width, shape.heads)
        self.norm2 = nn.LayerNorm(shape.width)
        hidden = shape.hidden * shape.width
        layers = {"fc1": nn.Linear(shape.width, hidden), "act": nn.GELU(), "fc2": nn.Linear(hidden, shape.width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    """The same linear map of every patch."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(patch * patch, width)

    def forward(self, x: Tensor) -> Tensor:
        n, side, p = len(x), x.shape[1] // self.patch, self.patch
        return self.proj(x.view(n, side, p, side, p).transpose(2, 3).reshape(n, side * side, p * p))


class FrozenHead(nn.Module):
    """A linear classifier whose tensors are neither parameters nor part of the state dict."""

    weight: Tensor
    bias: Tensor

    def __init__(self, head: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.register_buffer("weight", head["weight"], persistent=False)
        self.register_buffer("bias", head["bias"], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Vit(nn.Module):
    """Images (n x 27 x 27, in [0, 1]) to the head's output; without a head, to features: the mean over patches."""

    def __init__(self, shape: Shape, head: nn.Module | None = None) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(shape.patch, shape.width)
        self.pos_embed = nn.Parameter(0.5 * position_embedding(shape.grid, shape.width)[None])
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Identity() if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(2 * x - 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def initialize(network: nn.Module, rng: torch.Generator) -> None:
    """Draw all linear weights from a truncated normal of deviation 1/√fan_in; biases are zero."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5, generator=rng)
            nn.init.zeros_(module.bias)


def position_embedding(grid: int, width: int) -> Tensor:
    """Return sines and cosines of each patch's row and column: grid² x width."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 4) / (width // 4))
    row, column = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    phases = [place.flatten()[:, None] * rates for place in (row, column)]
    return torch.cat([f(phase) for phase in phases for f in (torch.sin, torch.cos)], 1)
