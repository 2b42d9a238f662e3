"""How a parameter takes part in one sample's loss: its per-sample gradient, in the cheapest form that is exact.

A weight that multiplies tokens has the gradient Σ_tokens left ⊗ right, in the orientation in which it is stored:
for nn.Linear left is the output's gradient and right the input, for GPT-2's Conv1D the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Outer:
    """Sample n has the gradient Σ_t left_nt ⊗ right_nt; left is N x tokens x m, right is N x tokens x n."""

    left: Tensor
    right: Tensor
    inputs: int = 1
    """the stored weight's dimension that the inputs belong to: 1, so right; 0, so left"""
    mask: Tensor | None = None
    """which tokens are real, N x tokens; None where all are"""


@dataclass(frozen=True)
class Rows:
    """Sample n adds g_nt to row ids_nt of a table; ids is N x tokens, g is N x tokens x width."""

    ids: Tensor
    g: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Whole:
    """Sample n has the gradient Σ_t parts_nt; parts is N x tokens x the parameter's shape."""

    parts: Tensor
    mask: Tensor | None = None


Use = Outer | Rows | Whole


def per_token(use: Use) -> Tensor:
    """Return a tensor of N x tokens, or more."""
    return use.left if isinstance(use, Outer) else use.parts if isinstance(use, Whole) else use.ids


@dataclass(frozen=True)
class Layout:
    """Where a tensor of a layer keeps its samples."""

    dim: int = 0
    """the dimension they lie along"""
    flat: bool = False
    """each sample has several places there, one for every token"""
    inner: bool = False
    """then the samples alternate at every token (t0n0 t0n1 …), instead of lying one after the other"""
    single: bool = False
    """the batch has one sample, so everything belongs to it"""

    def fits(self, t: Tensor, N: int) -> bool:
        """Whether a tensor can hold N samples in this layout."""
        if self.single:
            return True
        return t.dim() > self.dim and (not t.shape[self.dim] % N if self.flat else t.shape[self.dim] == N)

    def samples_first(self, t: Tensor, N: int) -> Tensor:
        """Return the tensor as N x …, or as N x tokens x … where it is flat or single."""
        if self.single:
            return t[None]
        if not self.flat:
            return t.movedim(self.dim, 0)
        tokens = t.shape[self.dim] // N
        t = torch.unflatten(t, self.dim, (tokens, N) if self.inner else (N, tokens))
        return t.movedim((self.dim + self.inner, self.dim + (not self.inner)), (0, 1))

    def tokens(self, t: Tensor, N: int) -> Tensor:
        """Return the tensor as N x tokens x width."""
        t = self.samples_first(t, N)
        return t.reshape(N, -1, t.shape[-1])


def find_layout(full: Tensor, probe: Tensor, N: int, k: int) -> Layout | None:
    """Tell from a layer's output on N samples, and on the first k of them alone, where it keeps its samples."""
    if full.dim() != probe.dim():
        return None
    dims = [i for i, (s, r) in enumerate(zip(full.shape, probe.shape, strict=True)) if s != r]
    if len(dims) != 1:
        return None
    dim = dims[0]
    tokens, rest = divmod(full.shape[dim], N)
    if rest or probe.shape[dim] != tokens * k:
        return None
    if tokens == 1:
        return Layout(dim)
    for layout in (Layout(dim, flat=True), Layout(dim, flat=True, inner=True)):
        if alike(layout.samples_first(full, N)[:k], layout.samples_first(probe, k)):
            return layout
    return None


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two results of the same computation agree up to what another batch size does to rounding."""
    if one.shape != other.shape or not len(one):
        return False
    one, other = one.detach().double(), other.detach().double()
    finite = torch.isfinite(one) & torch.isfinite(other)
    one, other = one[finite], other[finite]
    return not one.numel() or float((one - other).abs().max()) <= 2e-2 * float(one.abs().max())


Reader = Callable[[Any, Tensor, Tensor, Layout, int], dict[str, Use]]
"""(module, input, gradient of the output, layout, N) -> attribute of a parameter -> its use"""


def _linear(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, Use]:
    g_ntm = layout.tokens(g, N)
    return {"weight": Outer(g_ntm, layout.tokens(x, N)), "bias": Whole(g_ntm)}


def _transposed(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, Use]:
    g_ntm = layout.tokens(g, N)
    return {"weight": Outer(layout.tokens(x, N), g_ntm, inputs=0), "bias": Whole(g_ntm)}


def _embedding(module: nn.Embedding, ids: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, Use]:
    g_ntd = layout.tokens(g, N)
    ids_nt = layout.samples_first(ids, N).reshape(N, -1)
    if module.padding_idx is not None:
        g_ntd = g_ntd * (ids_nt != module.padding_idx)[..., None]
    return {"weight": Rows(ids_nt, g_ntd)}


def _conv(module: Any, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, Use]:
    x, g = layout.samples_first(x, N), layout.samples_first(g, N)
    spatial = module.weight.dim() - 2
    places, channels = g.shape[-spatial:].numel(), len(module.weight)
    g_ntm = g.reshape(N, -1, channels, places).transpose(2, 3).reshape(N, -1, channels)
    patches = _patches(module, x.reshape(-1, *x.shape[-1 - spatial :]))
    x_ntk = patches.transpose(1, 2).reshape(N, -1, patches.shape[1])
    found: dict[str, Use] = {"bias": Whole(g_ntm)}
    if module.groups == 1:
        found["weight"] = Outer(g_ntm, x_ntk)
    else:
        left, right = (torch.unflatten(t, 2, (module.groups, -1)) for t in (g_ntm, x_ntk))
        found["weight"] = Whole(
            torch.einsum("ntgo,ntgk->ngok", left, right.to(left)).reshape(N, 1, *module.weight.shape)
        )
    return found


def _patches(module: Any, x: Tensor) -> Tensor:
    """Return what each output place of a convolution sees, as batch x (channels·kernel) x places."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode)
        padding: tuple[int, ...] = (0,) * (module.weight.dim() - 2)
    else:
        padding = module.padding
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if module.weight.dim() == 3:  # one-dimensional: a picture of height 1
        x, kernel, stride, dilation, padding = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation), (0, *padding)
    if tuple(stride) == tuple(kernel) and not any(padding) and set(dilation) == {1}:
        h, w = x.shape[2] // kernel[0], x.shape[3] // kernel[1]  # patches of a picture, without overlap
        x = x[:, :, : h * kernel[0], : w * kernel[1]].reshape(*x.shape[:2], h, kernel[0], w, kernel[1])
        return x.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(1, 3)
    return functional.unfold(x, kernel, dilation, padding, stride)


def _norm(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, Use]:
    """Take the normalised input as the difference a unit weight makes, which serves every kind of norm."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    unit = _at(module, x, torch.ones_like(weight)) - _at(module, x, torch.zeros_like(weight))
    channels = isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)

    def tokens(t: Tensor) -> Tensor:
        t = layout.samples_first(t, N)
        if channels:
            t = t.movedim(2 if layout.flat or layout.single else 1, -1)
        return t.reshape(N, -1, *weight.shape)

    return {"weight": Whole(tokens(g * unit)), "bias": Whole(tokens(g))}


def _at(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return what a norm makes of its input with another weight and no bias, without its hooks."""
    own = {name: module._parameters[name] for name in ("weight", "bias") if module._parameters.get(name) is not None}
    try:
        for name in own:
            module._parameters[name] = nn.Parameter(weight if name == "weight" else torch.zeros_like(weight), False)
        with torch.no_grad():
            return module.forward(x.to(weight.dtype))
    finally:
        module._parameters.update(own)


def two_sided(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter multiplies tokens as one matrix, so that its uses are outer products."""
    weight = getattr(module, attribute)
    table = isinstance(module, nn.Embedding) or getattr(module, "groups", 1) > 1
    return weight.dim() > 1 and not table and "Norm" not in type(module).__name__


def total_gradient(use: Use, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the gradient summed over all samples, and the size of its terms, whose rounding adds up in squares."""
    if isinstance(use, Outer):
        left, right = use.left.flatten(0, 1), use.right.flatten(0, 1).to(use.left)
        return (left.T @ right).reshape(shape), (left.float().norm(dim=1) * right.float().norm(dim=1)).norm()
    if isinstance(use, Whole):
        return use.parts.sum((0, 1)).reshape(shape), use.parts.norm()
    total = torch.zeros(shape, dtype=use.g.dtype, device=use.g.device)
    g = use.g.flatten(0, 1)
    return total.index_add_(0, use.ids.flatten(), g), g.norm()


def reader_of(module: nn.Module) -> Reader | None:
    """Return how a module's parameters are read, or None where it is not known."""
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear):
        return _linear
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return _transposed
    if isinstance(module, nn.Conv1d | nn.Conv2d) and not isinstance(module, nn.modules.conv._ConvTransposeNd):
        return _conv
    if isinstance(module, nn.Embedding):
        return None if module.max_norm is not None or module.scale_grad_by_freq else _embedding
    if "Norm" in type(module).__name__ and "weight" in own and set(own) <= {"weight", "bias"}:
        return None if any(True for _ in module.children()) else _norm
    return None
