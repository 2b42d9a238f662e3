"""nn.RNN, nn.LSTM and nn.GRU with each layer's products visible: the result of the module's own forward.

A step's gates are W_ih x_t + b_ih + W_hh h_(t-1) + b_hh, so both weights' gradients are sums over steps of outer
products with the gradient δ_t of the gates: δ_t ⊗ x_t and δ_t ⊗ h_(t-1). In a GRU the hidden part of the new state is
first multiplied by the reset gate r_t, and so is its δ_t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from epimer.curvature.per_sample_gradients import GradientRule, Layout, OuterProducts, SampleGradients, TokenSums

Record = Callable[[str, Tensor, Tensor, GradientRule], Tensor]
"""(part, input of all steps, its product with W_ih, the gradient rule) -> the product to continue with"""
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def is_supported(module: Any) -> bool:
    """Whether a module is recurrent and `visible_forward` reproduces it."""
    known = (nn.RNN, nn.LSTM, nn.GRU)
    own = isinstance(module, known) and type(module).forward in [kind.forward for kind in known]
    return own and "forward" not in module.__dict__ and not module.proj_size


def parts(module: Any) -> list[str]:
    """Return how the names of each layer's and direction's parameters end: l0, l0_reverse, l1 and so on."""
    return [
        f"l{i}{suffix}" for i in range(module.num_layers) for suffix in ("", "_reverse")[: 1 + module.bidirectional]
    ]


def visible_forward(module: Any, record: Record) -> Callable[..., Any]:
    """Return a replacement of the module's forward that passes every layer's input products through `record`.

    Packed sequences and samples without a batch take the module's own forward, which nothing is recorded of.
    """

    def forward(input: Any, hx: Any = None) -> Any:
        if not isinstance(input, Tensor) or input.dim() != 3:
            return type(module).forward(module, input, hx)
        time = 1 if module.batch_first else 0
        states = (hx if isinstance(module, nn.LSTM) else (hx,)) if hx is not None else None
        ends: list[tuple[Tensor, ...]] = []
        x, sides = input, 1 + module.bidirectional
        for start in range(0, len(names := parts(module)), sides):
            outputs = []
            for part in names[start : start + sides]:
                zero = x.new_zeros(x.shape[1 - time], module.hidden_size)
                begin = [zero, zero] if states is None else [state[len(ends)] for state in states]
                y, end = _run(module, part, x, begin, time, record)
                outputs.append(y)
                ends.append(end)
            x = torch.cat(outputs, dim=-1)
        final = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        return x, final if isinstance(module, nn.LSTM) else final[0]

    return forward


def _run(
    module: Any, part: str, x: Tensor, begin: list[Tensor], time: int, record: Record
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction; return its outputs, and its state at the end."""
    own: dict[str, Any] = {name: getattr(module, f"{name}_{part}", None) for name in PARAMETERS}
    W_ih, W_hh, b_ih, b_hh = own.values()
    T = x.shape[time]
    before: list[Any] = [None] * T  # the hidden state before each step
    scales: list[Any] = [None] * T  # what the hidden product's gradient is, relative to the gates'

    def rule(module: Any, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
        x_ntk, g_ntm = layout.tokens(x, N), layout.tokens(g, N)
        h_ntk = layout.tokens(torch.stack(before, dim=time).detach(), N)
        hidden_ntm = g_ntm
        if isinstance(module, nn.GRU):
            hidden_ntm = g_ntm * layout.tokens(torch.stack(scales, dim=time).detach(), N)
        gradients = (
            OuterProducts(g_ntm, x_ntk),
            OuterProducts(hidden_ntm, h_ntk),
            TokenSums(g_ntm),
            TokenSums(hidden_ntm),
        )
        return {f"{name}_{part}": gradient for name, gradient in zip(PARAMETERS, gradients, strict=True)}

    products = record(part, x, functional.linear(x, W_ih, b_ih), rule).unbind(time)
    h, c = begin[0], begin[-1]
    outputs: list[Any] = [None] * T
    for t in reversed(range(T)) if part.endswith("_reverse") else range(T):
        before[t], hidden = h, functional.linear(h, W_hh, b_hh)
        if isinstance(module, nn.LSTM):
            i, f, n, o = (products[t] + hidden).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = o.sigmoid() * c.tanh()
        elif isinstance(module, nn.GRU):
            (r, z, n), (h_r, h_z, h_n) = products[t].chunk(3, dim=-1), hidden.chunk(3, dim=-1)
            r, z = (r + h_r).sigmoid(), (z + h_z).sigmoid()
            h = (1 - z) * (n + r * h_n).tanh() + z * h
            scales[t] = torch.cat([torch.ones_like(r), torch.ones_like(z), r], dim=-1)
        else:
            gates = products[t] + hidden
            h = gates.tanh() if module.nonlinearity == "tanh" else gates.relu()
        outputs[t] = h
    return torch.stack(outputs, dim=time), (h, c) if isinstance(module, nn.LSTM) else (h,)
