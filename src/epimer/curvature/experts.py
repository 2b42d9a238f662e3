"""Experts that are stored as one tensor, with each expert's products visible: the result of the module's own forward.

transformers keeps the experts of a layer in 3-D parameters and multiplies routed tokens with them in one kernel, so
that module hooks see no expert's inputs. Its classes tell what they compute: gate_up_proj (or up_proj) and down_proj,
E x out x in or, where `is_transposed`, E x in x out, biases E x out, and `_apply_gate` or `act_fn` in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.per_sample_gradients import GradientRule, Layout, OuterProducts, SampleGradients, TableRows
from epimer.methods.rules import is_stack, member_name

KNOWN = ("num_experts", "is_transposed", "has_gate", "has_bias", "has_post_expert_norm")

Record = Callable[[str, Tensor, Tensor, Tensor, int], Tensor]
"""(product, its input, its output, the expert of each row, rows per token) -> the output to continue with"""


def is_supported(module: Any) -> bool:
    """Whether a module holds experts whose forward `visible_forward` reproduces."""
    if not all(hasattr(module, name) for name in KNOWN) or getattr(module, "_is_expert_parallel", False):
        return False
    own = dict(module.named_parameters(recurse=False))
    expected = {name + suffix for name in products(module) for suffix in ("", *(["_bias"] * module.has_bias))}
    return own.keys() == expected and all(own[name].dim() == 3 for name in products(module))


def products(module: Any) -> tuple[str, str]:
    """Return the two parameters that tokens are multiplied with."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def members(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters, with the matrix of each expert in place of those that hold all."""
    parts: dict[str, Tensor] = {}
    for name, W in parameters.items():
        if is_stack(name, W.shape):
            parts |= {member_name(name, e): W.detach()[e] for e in range(len(W))}
        else:
            parts[name] = W
    return parts


def expert_rule(module: Any, weight: str, ids: Tensor, per_token: int) -> GradientRule:
    """Return the rule of one product, of which each row belongs to the expert in `ids`, `per_token` rows to a token."""

    def rule(module: Any, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
        x_ntk, g_ntm = layout.tokens(x, N), layout.tokens(g, N)
        ids_nt = layout.samples_first(ids, N).reshape(N, -1)
        gradients: dict[str, SampleGradients] = {f"{weight}_bias": TableRows(ids_nt, g_ntm)}
        for e in torch.unique(ids).tolist():
            routed = ids_nt == e
            count = int(routed.sum(1).max())
            rows = routed.long().argsort(dim=1, descending=True, stable=True)[:, :count]
            real = routed.gather(1, rows)
            x_e, g_e = (t.gather(1, rows[..., None].expand(-1, -1, t.shape[2])) for t in (x_ntk, g_ntm))
            g_e = g_e * real[..., None]
            left, right, inputs = (x_e, g_e, 0) if module.is_transposed else (g_e, x_e, 1)
            gradients[member_name(weight, e)] = OuterProducts(
                left, right, inputs, real, tokens=rows // per_token, length=ids_nt.shape[1] // per_token
            )
        return gradients

    return rule


def visible_forward(module: Any, record: Record) -> Callable[..., Tensor]:
    """Return a replacement of the module's forward that passes every product through `record`.

    Rows are in the tokens' order, one for each expert of a token, so that they lie where the samples do.
    """
    first, second = products(module)

    def multiply(x: Tensor, weight: str, ids: Tensor) -> Tensor:
        W, bias = getattr(module, weight), getattr(module, f"{weight}_bias", None)
        order = ids.argsort(stable=True)
        counts = ids.bincount(minlength=len(W)).tolist()
        parts = []
        for e, rows in enumerate(torch.split(x[order], counts)):
            if len(rows):
                y = rows @ (W[e] if module.is_transposed else W[e].T)
                parts.append(y if bias is None else y + bias[e])
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return torch.cat(parts)[place]

    def forward(hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        index, weights = (*routing, *named.values())
        ids, per_token = index.reshape(-1), index.shape[-1]
        x = hidden_states.repeat_interleave(per_token, dim=0)
        y = record(first, x, multiply(x, first, ids), ids, per_token)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = record(second, y, multiply(y, second, ids), ids, per_token)
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y)
        y = y * weights.reshape(-1, 1)
        return y.view(len(hidden_states), per_token, -1).sum(1).to(hidden_states.dtype)

    return forward


def expert_names(names: Mapping[str, str], product: str, matrices: Mapping[int, str]) -> dict[str, str]:
    """Return attribute -> name of what one product measures: the biases, and the experts' matrices by their number."""
    bias = f"{product}_bias"
    biases = {bias: names[bias]} if bias in names else {}
    return biases | {member_name(product, e): name for e, name in matrices.items()}


def made_per_call(product: str, *_: Any) -> dict[str, SampleGradients]:
    """Stand for the rule of a product, which is made for each call: with its tokens' routing, or its hidden states."""
    raise AssertionError(f"{product} was recorded without the rule of its call")


def restore_forward(module: nn.Module, own: Any) -> None:
    """Give a module back the forward of its class, or the one it had of its own."""
    if own is None:
        del module.forward
    else:
        module.forward = own
