"""nn.MultiheadAttention with its projections visible: the result of its own forward, computed from separate products.

torch's forward reads the projection weights without calling a module, so that module hooks never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from epimer.curvature.per_sample_gradients import (
    GradientRule,
    Layout,
    OuterProducts,
    SampleGradients,
    TokenSums,
    linear_rule,
)

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")

Record = Callable[[str, Tensor, Tensor], Tensor]  # (projection, its input, its output) -> the output to continue with


def is_supported(module: nn.Module) -> bool:
    """Whether a module is an attention that `visible_forward` reproduces."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in module.__dict__
        and module.bias_k is None
        and not module.add_zero_attn
    )


def projection_rules(module: Any) -> dict[str, GradientRule]:
    """Return the gradient rule of each projection of queries, keys and values; out_proj is a module of its own."""
    if module.in_proj_weight is None:
        return {name: _third(i, name) for i, name in enumerate(SEPARATE)}
    together = linear_rule("in_proj_weight", "in_proj_bias")
    return {"in_proj": together} | {f"in_proj.{i}": _third(i, None) for i in range(3)}


def _third(i: int, own: str | None) -> GradientRule:
    """Return the rule of the queries', keys' or values' projection, with a weight of its own or a third of one."""

    def rule(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
        g_nte, x_ntk = layout.tokens(g, N), layout.tokens(x, N)
        width = g_nte.shape[-1]
        placed = functional.pad(g_nte, (i * width, (2 - i) * width))
        outer = OuterProducts(g_nte if own else placed, x_ntk)
        return {"in_proj_bias": TokenSums(placed), own or "in_proj_weight": outer}

    return rule


def visible_forward(module: Any, record: Record) -> Callable[..., Any]:
    """Return a replacement of the module's forward that passes every projection through `record`."""

    def project(*inputs: Tensor) -> list[Tensor]:
        W, bias = module.in_proj_weight, module.in_proj_bias
        if W is not None and all(x is inputs[0] for x in inputs):
            return list(record("in_proj", inputs[0], functional.linear(inputs[0], W, bias)).chunk(3, dim=-1))
        weights = [getattr(module, name) for name in SEPARATE] if W is None else W.chunk(3)
        labels = SEPARATE if W is None else [f"in_proj.{i}" for i in range(3)]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        rows = zip(labels, inputs, weights, biases, strict=True)
        return [record(label, x, functional.linear(x, W, b)) for label, x, W, b in rows]

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        H, batched = module.num_heads, query.dim() == 3
        first = batched and module.batch_first  # whether the samples are the first dimension, or the tokens
        projections = (t.transpose(0, 1) if first else t if batched else t[:, None] for t in project(query, key, value))
        q, k, v = (torch.unflatten(t, -1, (H, -1)).permute(1, 2, 0, 3) for t in projections)
        N, L, S = len(q), q.shape[2], k.shape[2]
        mask = torch.zeros(N, H, L, S, dtype=q.dtype, device=q.device)
        if attn_mask is not None:
            mask = mask + _additive(attn_mask, q).expand(N * H, L, S).reshape(N, H, L, S)
        if key_padding_mask is not None:
            mask = mask + _additive(key_padding_mask, q).reshape(N, 1, 1, S)
        weights = None
        if need_weights:
            weights = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + mask).softmax(-1)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            unmasked = attn_mask is None and key_padding_mask is None
            mixed = functional.scaled_dot_product_attention(q, k, v, None if unmasked else mask)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # tokens, batch, width
        return module.out_proj(mixed.transpose(0, 1) if first else mixed if batched else mixed[:, 0]), weights

    return forward


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add to the attention scores: -inf where a boolean mask is True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)
