"""The files of a PEFT adapter that is written: names and shapes of its tensors, and adapter_config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, header
from epimer.checkpoints.expert_factors import ExpertPart
from epimer.checkpoints.lora import PARTS, PREFIX, Adapted
from epimer.checkpoints.memory import Cached
from epimer.geometry.linalg import LowRank

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
AGREED = ("base_model_name_or_path", "revision", "task_type")
"""settings that an adapter takes from those it is made of, where they agree"""


@dataclass(frozen=True)
class LoraModule:
    """A layer of an adapter: W + B A, or its transpose where the base stores inputs x outputs or a table."""

    module: str
    """its name in the network, as PEFT has it"""
    shape: tuple[int, ...]
    """of the base's tensor"""
    rank: int
    dtype: torch.dtype
    transposed: bool = False
    table: bool = False
    """an embedding, whose factors have names of their own"""
    thin: bool = False
    """merged in the space that the adapters' factors span, without a dense matrix"""
    parameter: str = ""
    """the network's parameter that holds all experts, PEFT's target_parameters; `shape` is then of one"""
    experts: int = 0
    """how many it holds"""

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B in the file."""
        A, B = PARTS[2:] if self.table else PARTS[:2]
        return f"{PREFIX}{self.module}{A}", f"{PREFIX}{self.module}{B}"

    @property
    def headers(self) -> dict[str, Tensor]:
        """A and B without data: r x in and out x r; of a convolution r x in x kernel and out x r x 1 x …."""
        sides, kernel = self.shape[:2], self.shape[2:]
        outputs, inputs = reversed(sides) if self.transposed else sides
        if self.parameter:
            joined = self.experts * self.rank
            shapes: tuple[tuple[int, ...], ...] = (joined, inputs), (outputs, joined)
        else:
            shapes = (self.rank, inputs, *kernel), (outputs, self.rank, *(1 for _ in kernel))
        return {name: header(shape, self.dtype) for name, shape in zip(self.names, shapes, strict=True)}

    def tensors(self, delta: LowRank) -> dict[str, Tensor]:
        """Return A and B, in their shapes and dtype, of factors of the base's tensor."""
        delta = delta.T if self.transposed else delta
        factors = zip(self.headers.items(), (delta.A, delta.B), strict=True)
        return {name: W.reshape(template.shape).to(self.dtype).contiguous() for (name, template), W in factors}

    def product(self, A: Tensor, B: Tensor) -> Tensor:
        """Return what factors add, out x in; of a parameter that holds all experts, E x out x in."""
        return ExpertPart(self.experts).stack(A, B, None) if self.experts else B.flatten(1) @ A.flatten(1)


def adapters_of(checkpoint: Checkpoint) -> list[Adapted]:
    """Return the adapters that lie on a base, the last one first; none for a whole model."""
    found = []
    checkpoint = checkpoint.source if isinstance(checkpoint, Cached) else checkpoint
    while isinstance(checkpoint, Adapted):
        found.append(checkpoint)
        checkpoint = checkpoint.base
    return found


def adapter_config(
    modules: Sequence[LoraModule],
    whole: Iterable[str],
    biases: Iterable[str],
    tokens: Mapping[str, Sequence[int]],
    weights: Iterable[str],
    adapters: Sequence[Adapted],
) -> dict[str, Any]:
    """Return adapter_config.json of an adapter.

    Args:
        modules: its layers with factors.
        whole: modules that it brings as they are.
        biases: modules of which it brings the bias alone.
        tokens: modules of which it brings some rows -> which.
        weights: the names of all weights of the base, to name layers by their last word where all of a name are meant.
        adapters: those it is made of.
    """
    ranks = Counter(one.rank for one in modules)
    rank = ranks.most_common(1)[0][0] if ranks else 1
    others = {one.parameter or one.module: one.rank for one in modules if one.rank != rank}
    names = [one.module for one in modules if not one.parameter]
    parameters = [one.parameter for one in modules if one.parameter]
    everywhere = _last_words(names, weights)
    own, biased = list(whole), list(biases)
    return {
        "peft_type": "LORA",
        **{key: _agreed(key, adapters) for key in AGREED},
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted({_last(name) if _last(name) in everywhere else name for name in names}),
        **({"target_parameters": parameters} if parameters else {}),
        "modules_to_save": own or None,
        **({"trainable_token_indices": tokens} if tokens else {}),
        "bias": "none" if not biased else "lora_only" if {*biased} <= {*names} else "all",
        "fan_in_fan_out": any(one.transposed and not one.table for one in modules),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _last_words(modules: Iterable[str], weights: Iterable[str]) -> set[str]:
    """Return the last words of modules that no other weight of the base has; a number is also the name of a layer."""
    targeted = Counter(map(_last, modules))
    every = Counter(_last(name.removesuffix(".weight")) for name in weights)
    return {word for word, count in targeted.items() if every[word] == count and not word.isdigit()}


def _agreed(key: str, adapters: Sequence[Adapted]) -> Any:
    values: list[Mapping[str, Any]] = [one.config for one in adapters]
    found = [value[key] for value in values if value.get(key) is not None]
    return found[0] if found and all(value == found[0] for value in found) else None
