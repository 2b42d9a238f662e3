"""Convert vision towers of open_clip to the names and shapes of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from epimer.errors import CheckpointError, listed

FIRST_LAYER = "visual.conv1.weight"
EMBEDDINGS = {
    "class_embedding": "vision_model.embeddings.class_embedding",
    "positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
}
NORMS = {"ln_pre": "vision_model.pre_layrnorm", "ln_post": "vision_model.post_layernorm"}
LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
BLOCKS = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
INPUTS = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def to_transformers(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return a vision tower's tensors as `CLIPVisionModelWithProjection` has them, in float32.

    in_proj, 3d x d, is q, k and v below each other; proj, d x features, is applied from the right. Tensors of the text
    tower are left out.
    """
    prefix = next((name.removesuffix(FIRST_LAYER) for name in tensors if name.endswith(FIRST_LAYER)), None)
    if prefix is None:
        raise CheckpointError(f"{where} holds no vision tower of open_clip ({FIRST_LAYER}); it has {listed(tensors)}.")
    start = f"{prefix}visual."
    converted: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(start):
            W = value.to(torch.float32)
            converted |= _convert(name.removeprefix(start), W.clone() if W is value else W, where)
    return converted


def _convert(name: str, W: Tensor, where: str) -> dict[str, Tensor]:
    """Return a tensor under its name in transformers; the attention's input projection gives three."""
    if name == "proj":
        return {"visual_projection.weight": W.T.contiguous()}
    if name in EMBEDDINGS:
        return {EMBEDDINGS[name]: W}
    part, _, kind = name.rpartition(".")
    if part in NORMS:
        return {f"{NORMS[part]}.{kind}": W}
    if layer := INPUTS.fullmatch(name):
        prefix = f"vision_model.encoder.layers.{layer[1]}.self_attn"
        return {
            f"{prefix}.{letter}_proj.{layer[2]}": V.contiguous() for letter, V in zip("qkv", W.chunk(3), strict=True)
        }
    if (layer := LAYER.fullmatch(name)) and layer[2] in BLOCKS:
        return {f"vision_model.encoder.layers.{layer[1]}.{BLOCKS[layer[2]]}.{layer[3]}": W}
    raise CheckpointError(f"{where} has {name!r} in its vision tower, which a CLIP ViT has not; give the ViT's files.")
