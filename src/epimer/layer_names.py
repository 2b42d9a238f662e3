"""Layers in the names of tensors: `model.layers.3.mlp.weight` is of layer 3 of the stack `model.layers.`."""

from __future__ import annotations

import re
from typing import NamedTuple

LAYER = re.compile(r"((?:[^.]*\.)*?)([0-9]{1,6})(?=\.|\Z)")
"""the start of a tensor's name up to its first integer, and the integer; a longer one counts no layers"""
EMBEDDINGS = ("embed", "wte", "wpe", "shared", "position")
HEADS = ("embed_out",)


class LayerName(NamedTuple):
    """A tensor's name in three parts: the stack with its dot, the number of the layer, and what follows."""

    stack: str
    number: int
    rest: str


def split_layer(name: str) -> LayerName | None:
    """Return the parts of the name of a layer's tensor, going by its first integer; None where it has none."""
    match = LAYER.match(name)
    return match and LayerName(match[1], int(match[2]), name[match.end() :])


def before_layers(name: str) -> bool:
    """Whether a tensor of no layer comes before the layers, as embeddings do, or after them, as norms and heads do.

    Embeddings are what all architectures call so; everything else comes after.
    """
    return any(word in name for word in EMBEDDINGS) and not any(word in name for word in HEADS)


def module_of(name: str, modules: tuple[str, ...]) -> str:
    """Return which of a model's `modules`, words of dotted names, a tensor belongs to; the first if to none."""
    words = name.split(".")
    return next((module for module in modules if module in words), modules[0])
