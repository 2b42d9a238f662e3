"""Recognise quantised checkpoints by their tensors and their config: FP8 is dequantised, packed formats are refused.

A weight in FP8 is `code * scale`. The scale lies beside it, maybe in another file, as `NAME_scale` or `NAME_scale_inv`
(which is multiplied, too, whatever its name says): one number, one per output channel, or one per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint, Rows
from epimer.checkpoints.folder import inside, read_json
from epimer.errors import CheckpointError, listed

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes 4 bit",
    ".quant_map": "bitsandbytes 4 bit",
    ".SCB": "bitsandbytes 8 bit",
    ".weight_packed": "compressed-tensors",
    "_blocks": "MXFP4",
}
"""how the name of a tensor of a packed format ends, and the format"""
ENDINGS = ("_scale", "_scale_inv")
"""what the name of a weight's scale has after the weight's"""
ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""how the scales of activations are called"""
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "mxfp4": "MXFP4", "bitsandbytes": "bitsandbytes"}


class Dequantized(Checkpoint):
    """A checkpoint with weights in FP8: bfloat16 to who writes them, without the tensors that only quantisation needs.

    They are read in float32, as task vectors are small differences: rounded to bfloat16 first, tsv would lose digits.
    """

    def __init__(self, source: Checkpoint, config: Mapping[str, Any]) -> None:
        self.source, self.name, self.where, self.folder = source, source.name, source.where, source.folder
        self.files, self.streams, self.in_memory = source.files, source.streams, source.in_memory
        self.downloads = source.downloads
        if shifted := [name for name in source.headers if name.endswith("weight_zero_point")]:
            raise CheckpointError(
                f"{self.where} has {shifted[0]!r}, and only FP8 without zero points is read; dequantise the model with "
                "transformers (model.dequantize()), save it in bfloat16, and give that folder."
            )
        codes = {name: W for name, W in source.headers.items() if W.dtype in FLOAT8}
        self.scales = {name: scale for name in codes if (scale := _scale_name(name, source.headers))}
        bare = [name for name in codes if name not in self.scales]
        beside = {_module(name): name for name in source.headers if "scale" in name.rpartition(".")[2]}
        if name := next((name for name in bare if beside.get(_module(name), name) != name), None):
            raise CheckpointError(
                f"{self.where} has {name!r} in FP8 beside {beside[_module(name)]!r}, and scales are read only as "
                f"{name + ENDINGS[0]!r} or {name + ENDINGS[1]!r}: rename them if codes times scales are the weights, "
                "or dequantise the model, save it in bfloat16, and give that."
            )
        if bare and (self.scales or config):
            raise CheckpointError(
                f"{self.where} has {len(bare)} weights in FP8 without their scales: {listed(bare)}; expected "
                f"{bare[0] + ENDINGS[0]!r} beside it: copy all files of the model again."
            )
        self.blocks = {name: self._block(name, scale, config) for name, scale in self.scales.items()}
        left_out = {*self.scales.values()} | {name for name in source.headers if self.scales and _of_activations(name)}
        self.headers = {
            name: _as_bfloat16(W) if name in codes else W for name, W in source.headers.items() if name not in left_out
        }
        self.ties = {name: twin for name, twin in source.ties.items() if {name, twin} <= self.headers.keys()}

    def _block(self, name: str, scale: str, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return how many entries in each dimension of a weight have one scale."""
        W, S = self.source.headers[name], self.source.headers[scale]
        if not S.is_floating_point():
            raise CheckpointError(
                f"{self.where}[{scale!r}] is {S.dtype}, expected scales in floating point; dequantise the model with "
                "transformers (model.dequantize()), save it in bfloat16, and give that folder."
            )
        if S.numel() == 1:
            return tuple(max(1, size) for size in W.shape)
        count = tuple(S.shape) if S.dim() == W.dim() else (*S.shape, *[1] * (W.dim() - S.dim()))
        whole = tuple(size if parts == 1 else 1 for size, parts in zip(W.shape, count, strict=False))
        inner = block_size(config)
        for block in (whole, (*[1] * (W.dim() - 2), *inner)):
            if len(block) == W.dim() == len(count) and count == tuple(map(_parts, W.shape, block)):
                return block
        raise CheckpointError(
            f"{self.where}[{scale!r}] has shape {tuple(S.shape)} for a weight of shape {tuple(W.shape)}, expected one "
            f"scale, one per row, or one per block of {inner[0]} x {inner[1]}; dequantise the model with transformers."
        )

    def read(self, name: str, rows: Rows = None) -> Tensor:
        W = self.source.read(name, rows)
        if W.dtype not in FLOAT8:
            return W
        if name not in self.scales or not W.numel():
            return W.to(torch.bfloat16)
        S, block, shape = self.source.read(self.scales[name]).float(), self.blocks[name], self.headers[name].shape
        first, last = rows or (0, shape[0] if shape else 1)
        S = S.reshape(tuple(map(_parts, shape, block)))
        for dim, size in enumerate(shape):
            start, stop = (first, last) if dim == 0 else (0, size)
            if S.shape[dim] > 1:
                S = S.index_select(dim, torch.arange(start, stop, device=S.device) // block[dim])
        return W.float().mul_(S)

    def size(self, name: str) -> int:
        return super().size(name) * (2 if name in self.scales else 1)

    def prefetch(self, name: str, rows: Rows = None) -> None:
        self.source.prefetch(name, rows)

    def problem(self, name: str) -> str | None:
        return self.source.problem(name)

    def sample(self, name: str) -> bytes:
        scale = self.scales.get(name)
        return self.source.sample(name) + (b"" if scale is None else self.source.sample(scale))

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return self.source.state


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are plain numbers: itself, or one that dequantises FP8; refuse packed codes."""
    config = quantization_config(checkpoint.folder)
    if kind := packed_format(checkpoint, config.get("quant_method")):
        raise CheckpointError(
            f"{checkpoint.where} is quantised ({kind}): its weights are codes, which cannot be merged; dequantise it "
            "first: load it with transformers, call model.dequantize(), save it in bfloat16, and give that folder."
        )
    if any(W.dtype in FLOAT8 for W in checkpoint.headers.values()):
        return Dequantized(checkpoint, config)
    return checkpoint


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of a block with one scale, as a quantization_config has them, or else 128 x 128."""
    groups = config.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in each if isinstance(group, dict)]
    found = [config.get("weight_block_size"), *(one.get("block_structure") for one in weights if isinstance(one, dict))]
    sizes = [one for one in found if isinstance(one, list) and len(one) == 2 and all(isinstance(n, int) for n in one)]
    rows, columns = sizes[0] if sizes and min(sizes[0]) > 0 else (128, 128)
    return rows, columns


def _scale_name(name: str, headers: Mapping[str, Tensor]) -> str | None:
    return next((name + ending for ending in ENDINGS if name + ending in headers), None)


def _module(name: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _of_activations(name: str) -> bool:
    """Whether a tensor is a scale of activations or of the key-value cache, which plain weights have no use for."""
    return name.rpartition(".")[2] in ACTIVATIONS


def _parts(size: int, block: int) -> int:
    """Return how many blocks cover a dimension."""
    return -(-size // block)


def _as_bfloat16(W: Tensor) -> Tensor:
    """Return a tensor without data of a tensor's shape and device."""
    return torch.empty((), dtype=torch.bfloat16, device=W.device).expand(W.shape)


def packed_format(checkpoint: Checkpoint, method: object = None) -> str | None:
    """Return the format whose packed integers a checkpoint holds, as its config's `method` or its names tell."""
    headers = checkpoint.headers
    if checkpoint.packed:
        return f"{', '.join(sorted({*checkpoint.packed.values()}))} in {listed(checkpoint.packed)}"
    if not any(_is_code(name, W) for name, W in headers.items()):
        return None
    found = [kind for name in headers for ending, kind in PACKED.items() if name.endswith(ending)]
    if any(".quant_state.bitsandbytes__" in name for name in headers):
        found.insert(0, PACKED[".absmax"])
    if isinstance(method, str) and not any(kind.startswith(method) for kind in found):
        return NAMES.get(method, method)
    specific = [kind for kind in found if " or " not in kind] or found
    return specific[0] if specific else "integer weights"


def _is_code(name: str, W: Tensor) -> bool:
    """Whether a tensor holds codes of weights: integers under a name of weights."""
    integer = not (W.is_floating_point() or W.is_complex() or W.dtype == torch.bool)
    return integer and (name.endswith(tuple(PACKED)) or (name.endswith("weight") and W.dim() >= 2))


def quantization_config(folder: Path | None) -> dict[str, Any]:
    """Return what a folder's config.json says about quantisation, for the whole model or its text model."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    config = read_json(inside(folder, "config.json"), str(folder / "config.json"))
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := place.get(key), dict):
                return found
    return {}
