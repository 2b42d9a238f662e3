"""Convert vision towers of open_clip to the names and shapes of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from epimer.errors import CheckpointError, listed

FIRST_LAYER = "visual.conv1.weight"
RENAMED = {
    r"class_embedding": r"embeddings.class_embedding",
    r"positional_embedding": r"embeddings.position_embedding.weight",
    r"conv1\.weight": r"embeddings.patch_embedding.weight",
    r"ln_pre\.(\w+)": r"pre_layrnorm.\1",
    r"ln_post\.(\w+)": r"post_layernorm.\1",
    r"transformer\.resblocks\.(\d+)\.attn\.out_proj\.(\w+)": r"encoder.layers.\1.self_attn.out_proj.\2",
    r"transformer\.resblocks\.(\d+)\.ln_([12])\.(\w+)": r"encoder.layers.\1.layer_norm\2.\3",
    r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.(\w+)": r"encoder.layers.\1.mlp.fc1.\2",
    r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.(\w+)": r"encoder.layers.\1.mlp.fc2.\2",
}
IN_PROJ = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


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
    if match := IN_PROJ.fullmatch(name):
        prefix = f"vision_model.encoder.layers.{match[1]}.self_attn"
        return {f"{prefix}.{part}_proj.{match[2]}": V.contiguous() for part, V in zip("qkv", W.chunk(3), strict=True)}
    for pattern, new in RENAMED.items():
        if match := re.fullmatch(pattern, name):
            return {f"vision_model.{match.expand(new)}": W}
    raise CheckpointError(f"{where} has {name!r} in its vision tower, which a CLIP ViT has not; give the ViT's files.")
