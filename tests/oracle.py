"""Curvature by brute force: one sample at a time, one `torch.autograd.grad` each, in float64.

Nothing here comes from the library: inputs and gradients of layers are seen by hooks of its own, patches of pictures
are cut out one place at a time, and attention is written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Case:
    """A model, data for it and what to expect."""

    model: nn.Module
    batches: list[tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    real: Callable[[Any], Tensor] | None = None
    """inputs -> N x tokens, which tokens are real"""
    left_out: Sequence[str] = ()
    """parameters that a diagonal cannot have"""
    no_factors: Sequence[str] = ()
    """parameters of two or more dimensions that Kronecker factors cannot have"""


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor of a tensor, tuple or dict."""
    if isinstance(value, Mapping):
        return {key: each(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(each(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on inputs that are a tensor, a tuple or a dict."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def singles(batches: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield every sample as a batch of one; what is padded in its batch stays padded."""
    for inputs, targets in batches:
        for n in range(len(targets)):
            yield each(inputs, lambda t, n=n: t[n : n + 1]), each(targets, lambda t, n=n: t[n : n + 1])


def evaluated(model: nn.Module) -> nn.Module:
    """Return a copy to differentiate."""
    return copy.deepcopy(model).eval().requires_grad_(True)


def gradients(model: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Callable) -> dict[str, Tensor]:
    """Return each sample's gradient of every parameter, N x its shape."""
    model = evaluated(model)
    named = dict(model.named_parameters())
    rows = []
    for inputs, target in singles(batches):
        total = loss(call(model, inputs), target).sum()
        rows.append(torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack(column) for name, column in zip(named, zip(*rows, strict=True), strict=True)}


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether two tensors agree, relative to the larger's norm; gradients that cancel are all zero."""
    sizes = float(actual.norm()), float(expected.norm())
    return float((actual - expected).norm()) <= tolerance * max(sizes) or max(sizes) < 1e-20


def fisher(s: Tensor) -> Tensor:
    """Return (1/N) Σ s sᵀ on row-major vectors."""
    s = s.flatten(1)
    return s.T @ s / len(s)


@dataclass
class Use:
    """A weight multiplies tokens once: x is tokens x inputs, g is tokens x outputs."""

    x: Tensor
    g: Tensor


@dataclass
class Seen:
    """What hooks write down during one forward pass."""

    names: Mapping[int, str]
    notes: list[tuple[str, Tensor, Tensor, Callable[[Tensor], Tensor]]] = field(default_factory=list)

    def note(self, W: Tensor, x: Tensor, y: Tensor, tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """Write down a product of `W`; `tokens` makes rows of outputs from the gradient of y."""
        y.retain_grad()
        self.notes.append((self.names[id(W)], x.detach().clone(), y, tokens))
        return y.clone()  # operations in place come after


def layer_uses(
    model: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Callable
) -> tuple[dict[str, list[list[Use]]], set[str]]:
    """Return weight -> sample -> its uses, and which weights are stored inputs first."""
    model = evaluated(model)
    seen = Seen({id(p): name for name, p in model.named_parameters()})
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(parent, name, Attention(child, seen))
    transposed = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(_on_linear(seen))
        elif type(module).__name__ == "Conv1D":
            transposed.add(seen.names[id(module.weight)])
            module.register_forward_hook(_on_linear(seen))
        elif isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == 1:
            module.register_forward_hook(_on_conv(seen))
    found: dict[str, list[list[Use]]] = {}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for n, (inputs, target) in enumerate(singles(batches)):
        seen.notes.clear()
        loss(call(model, inputs), target).sum().backward()
        for name, x, y, tokens in seen.notes:
            samples = found.setdefault(name, [])
            samples.extend([] for _ in range(n + 1 - len(samples)))
            samples[n].append(Use(x.reshape(-1, x.shape[-1]), tokens(y.grad)))
    torch.backends.mha.set_fastpath_enabled(fast)
    return found, transposed


def factors(samples: list[list[Use]], mode: str, masks: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients' and the inputs' factor, from their definition."""
    G = A = tokens = 0
    for n, uses in enumerate(samples):
        xs = [use.x[masks[n]] if masks is not None and len(use.x) == len(masks[n]) else use.x for use in uses]
        x, g = torch.cat(xs), torch.cat([use.g for use in uses])
        if mode == "reduce":
            G = G + torch.outer(g.sum(0), g.sum(0))
            A = A + torch.outer(x.mean(0), x.mean(0))
        else:
            G = G + sum(torch.outer(row, row) for row in g)
            A = A + sum(torch.outer(row, row) for row in x)
            tokens += len(x)
    return G / len(samples), A / (len(samples) if mode == "reduce" else tokens)


def _rows(g: Tensor) -> Tensor:
    return g.reshape(-1, g.shape[-1])


def _on_linear(seen: Seen) -> Callable:
    return lambda module, args, y: seen.note(module.weight, args[0], y, _rows)


def _on_conv(seen: Seen) -> Callable:
    def hook(module: Any, args: Any, y: Tensor) -> Tensor:
        return seen.note(module.weight, patches(module, args[0]), y, lambda g: g.flatten(2)[0].T)

    return hook


def patches(module: Any, x: Tensor) -> Tensor:
    """Return what a convolution of one sample sees at each output place, cut out one by one."""
    spatial = module.weight.dim() - 2
    reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if module.padding == "same":
        sides = [(r // 2, r - r // 2) for r in reach]
    else:
        sides = [(0, 0) if module.padding == "valid" else (p, p) for p in module.padding or ()]
    flat = [p for pair in reversed(sides) for p in pair]
    x = functional.pad(x, flat, "constant" if module.padding_mode == "zeros" else module.padding_mode)[0]
    counts = [(size - r - 1) // s + 1 for size, r, s in zip(x.shape[1:], reach, module.stride, strict=True)]
    found = []
    for place in torch.cartesian_prod(*(torch.arange(c) for c in counts)).reshape(-1, spatial).tolist():
        window = [
            slice(i * s, i * s + r + 1, d)
            for i, s, r, d in zip(place, module.stride, reach, module.dilation, strict=True)
        ]
        found.append(x[(slice(None), *window)].flatten())
    return torch.stack(found)


class Attention(nn.Module):
    """Multi-head attention written out, with the weights of an nn.MultiheadAttention."""

    def __init__(self, old: nn.MultiheadAttention, seen: Seen) -> None:
        super().__init__()
        self.old, self.seen = [old], seen  # in a list: not a child, its parameters are looked at by id
        self.batch_first = old.batch_first

    def _product(self, x: Tensor, W: Tensor, rows: slice, bias: Tensor | None) -> Tensor:
        y = x @ W[rows].T if bias is None else x @ W[rows].T + bias

        def placed(g: Tensor) -> Tensor:
            out = torch.zeros(g.shape[:-1].numel(), len(W), dtype=g.dtype)
            out[:, rows] = _rows(g)
            return out

        return self.seen.note(W, x, y, placed)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        old, d = self.old[0], self.old[0].embed_dim
        b = old.in_proj_bias
        thirds = [slice(i * d, (i + 1) * d) for i in range(3)]
        biases = [None if b is None else b[third] for third in thirds]
        if old.in_proj_weight is None:
            weights = [old.q_proj_weight, old.k_proj_weight, old.v_proj_weight]
            thirds = [slice(None)] * 3
        elif query is key and key is value:
            return self._product(query, old.in_proj_weight, slice(None), b).split(d, dim=-1)
        else:
            weights = [old.in_proj_weight] * 3
        given = zip((query, key, value), weights, thirds, biases, strict=True)
        return tuple(self._product(*one) for one in given)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, is_causal=False):
        old = self.old[0]
        q, k, v = self._project(query, key, value)
        if not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        size = old.embed_dim // old.num_heads
        heads = []
        for h in range(old.num_heads):
            own = slice(h * size, (h + 1) * size)
            scores = torch.einsum("ntd,nsd->nts", q[..., own], k[..., own]) / size**0.5
            for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None]):
                if mask is not None:
                    scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            heads.append(torch.einsum("nts,nsd->ntd", scores.softmax(-1), v[..., own]))
        mixed = torch.cat(heads, -1)
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        W, b = old.out_proj.weight, old.out_proj.bias
        return self.seen.note(W, mixed, mixed @ W.T if b is None else mixed @ W.T + b, _rows), None
