"""Recognise quantised checkpoints by their tensors and their config: packed formats are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import inside, read_json
from epimer.errors import CheckpointError

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
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "mxfp4": "MXFP4", "bitsandbytes": "bitsandbytes"}


def refuse_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are plain numbers; refuse weights that are codes, in packed integers or FP8."""
    method = quantization_config(checkpoint.folder).get("quant_method")
    if kind := packed_format(checkpoint, method):
        raise CheckpointError(
            f"{checkpoint.where} is quantised ({kind}): its weights are codes, which cannot be merged; dequantise it "
            "first: load it with transformers, call model.dequantize(), save it in bfloat16, and give that folder."
        )
    if any(W.dtype in FLOAT8 for W in checkpoint.headers.values()):
        raise CheckpointError(
            f"{checkpoint.where} is quantised (FP8): its weights are codes, which cannot be merged; dequantise it "
            "first: load it with transformers, call model.dequantize(), save it in bfloat16, and give that folder."
        )
    return checkpoint


def packed_format(checkpoint: Checkpoint, method: object = None) -> str | None:
    """Return the format whose packed integers a checkpoint holds, as its config's `method` or its names tell."""
    headers = checkpoint.headers
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
