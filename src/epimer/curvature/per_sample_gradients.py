"""Per-sample gradients of a layer's parameters, from its input and the gradient of its output.

A weight that multiplies tokens has the gradient Σ_tokens left ⊗ right, in the orientation in which it is stored: for
nn.Linear `left` is the output's gradient and `right` the input, for GPT-2's Conv1D it is the other way round. It is
kept as these two factors; other parameters have cheap exact forms of their own.

Shapes: N samples, t tokens (or places of a picture), m outputs, k inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LateMask = Callable[[], Tensor | None]
"""returns a mask that is known only after the last backward pass of a batch"""


class SampleGradients(ABC):
    """One parameter's gradient for each of N samples, through one call of its layer."""

    mask: Tensor | LateMask | None  # [N, t], False at padding; None if no token is padding

    @property
    @abstractmethod
    def output_gradients(self) -> Tensor:
        """The gradient of the loss in the layer's output at each token, [N, t, …]."""

    @abstractmethod
    def total(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return the gradient summed over samples, and the root of the sum of its terms' squared norms."""

    @abstractmethod
    def add_sample(self, total: Tensor, n: int) -> None:
        """Add the gradient of sample n to a tensor of the parameter's shape."""


@dataclass(frozen=True)
class OuterProducts(SampleGradients):
    """Sample n has the gradient Σ_t left_nt ⊗ right_nt: a weight matrix that multiplies tokens."""

    left: Tensor  # [N, t, rows of the stored weight]
    right: Tensor  # [N, t, columns of the stored weight]
    inputs: int = 1  # the stored weight's dimension that the layer's inputs belong to: 1 (`right`), or 0 (`left`)
    mask: Tensor | LateMask | None = None
    tokens: Tensor | None = None  # [N, t], which of its sample's tokens each is, where an expert gets some of them
    length: int = 0  # how many tokens the sample has then

    @property
    def output_gradients(self) -> Tensor:
        return self.left if self.inputs else self.right

    def total(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 1).to(self.left)
        return (left.T @ right).reshape(shape), (left.float().norm(dim=1) * right.float().norm(dim=1)).norm()

    def add_sample(self, total: Tensor, n: int) -> None:
        total.view(len(total), -1).addmm_(self.left[n].T.to(total.dtype), self.right[n].to(total.dtype))


@dataclass(frozen=True)
class TableRows(SampleGradients):
    """Sample n adds g_nt to row ids_nt of a table: an embedding."""

    ids: Tensor  # [N, t]
    g: Tensor  # [N, t, width]
    mask: Tensor | LateMask | None = None

    @property
    def output_gradients(self) -> Tensor:
        return self.g

    def total(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        g = self.g.flatten(0, 1)
        return torch.zeros(shape, dtype=g.dtype, device=g.device).index_add_(0, self.ids.flatten(), g), g.norm()

    def add_sample(self, total: Tensor, n: int) -> None:
        total.index_add_(0, self.ids[n], self.g[n].to(total.dtype))


@dataclass(frozen=True)
class TokenSums(SampleGradients):
    """Sample n has the gradient Σ_t parts_nt: a bias, a norm's weight, or a grouped convolution."""

    parts: Tensor  # [N, t, *the parameter's shape]
    mask: Tensor | LateMask | None = None

    @property
    def output_gradients(self) -> Tensor:
        return self.parts

    def total(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        return self.parts.sum((0, 1)).reshape(shape), self.parts.norm()

    def add_sample(self, total: Tensor, n: int) -> None:
        total += self.parts[n].to(total.dtype).sum(0)


@dataclass(frozen=True)
class Layout:
    """Where a tensor of a layer keeps its samples."""

    dim: int = 0  # the dimension the samples lie along
    flat: bool = False  # that dimension holds the tokens of all samples, N·t entries instead of N
    inner: bool = False  # in a flat dimension samples alternate (t0n0 t0n1 …) instead of following each other
    single: bool = False  # the batch has one sample, so every entry belongs to it

    def fits(self, x: Tensor, N: int) -> bool:
        """Whether a tensor can hold N samples in this layout."""
        if self.single:
            return True
        return x.dim() > self.dim and (not x.shape[self.dim] % N if self.flat else x.shape[self.dim] == N)

    def samples_first(self, x: Tensor, N: int) -> Tensor:
        """Return the tensor as [N, …], or as [N, t, …] where it is flat or single."""
        if self.single:
            return x[None]
        if not self.flat:
            return x.movedim(self.dim, 0)
        tokens = x.shape[self.dim] // N
        x = torch.unflatten(x, self.dim, (tokens, N) if self.inner else (N, tokens))
        return x.movedim((self.dim + self.inner, self.dim + (not self.inner)), (0, 1))

    def tokens(self, x: Tensor, N: int) -> Tensor:
        """Return the tensor as [N, t, width]."""
        x = self.samples_first(x, N)
        return x.reshape(N, -1, x.shape[-1])


def find_layout(once: Tensor, twice: Tensor, N: int) -> Layout | None:
    """Infer a layer's layout from its output on N samples and on the same samples twice; None where it is unclear.

    Both batches hold the same samples, so a shape that depends on them (the longest text's) is the same in both.
    """
    dims = [i for i, (s, r) in enumerate(zip(once.shape, twice.shape, strict=False)) if s != r]
    if once.dim() != twice.dim() or len(dims) != 1:
        return None
    dim = dims[0]
    tokens, rest = divmod(once.shape[dim], N)
    if rest or twice.shape[dim] != 2 * once.shape[dim]:
        return None
    if tokens == 1:
        return Layout(dim)
    for layout in (Layout(dim, flat=True), Layout(dim, flat=True, inner=True)):
        if agree(layout.samples_first(once, N), layout.samples_first(twice, 2 * N)[:N]):
            return layout
    return None


def agree(x: Tensor, y: Tensor) -> bool:
    """Whether two results of one computation are equal up to the rounding that another batch size causes."""
    if x.shape != y.shape or not len(x):
        return False
    x, y = x.detach().double(), y.detach().double()
    finite = torch.isfinite(x) & torch.isfinite(y)
    x, y = x[finite], y[finite]
    return not x.numel() or float((x - y).abs().max()) <= 2e-2 * float(x.abs().max())


Places = tuple[int, ...]
GradientRule = Callable[[Any, Tensor, Tensor, Layout, int], dict[str, SampleGradients]]
"""(module, its input, the gradient of its output, their layout, N) -> attribute of a parameter -> its gradients"""


@dataclass(frozen=True)
class RecordedLayer:
    """A module, or one projection of an attention, whose parameters are measured."""

    label: str
    module: nn.Module
    rule: GradientRule
    names: Mapping[str, str]  # attribute of the module -> name of the parameter, for those that are measured


def gradient_rule(module: nn.Module) -> GradientRule | None:
    """Return the rule for a module's own parameters, or None for a module of an unknown kind."""
    own, kind = {name for name, _ in module.named_parameters(recurse=False)}, type(module).__name__
    if isinstance(module, nn.Linear):
        return linear_rule()
    if kind == "Conv1D" and hasattr(module, "nf"):
        return linear_rule(inputs=0)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return _convolution
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return _transposed_convolution
    if isinstance(module, nn.Embedding):
        return None if module.max_norm is not None or module.scale_grad_by_freq else _embedding
    norm = "Norm" in kind and "weight" in own and own <= {"weight", "bias"} and not list(module.children())
    return _norm if norm else None


def is_weight_matrix(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter multiplies tokens as one matrix, so that its gradients are outer products."""
    weight = getattr(module, attribute)
    table = isinstance(module, nn.Embedding) or getattr(module, "groups", 1) > 1
    return weight.dim() > 1 and not table and "Norm" not in type(module).__name__


def linear_rule(weight: str = "weight", bias: str = "bias", inputs: int = 1) -> GradientRule:
    """Return the rule for y = Wx + b; `inputs` is the dimension of the stored W that x belongs to."""

    def rule(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
        x_ntk, g_ntm = layout.tokens(x, N), layout.tokens(g, N)
        outer = OuterProducts(g_ntm, x_ntk) if inputs else OuterProducts(x_ntk, g_ntm, inputs=0)
        return {weight: outer, bias: TokenSums(g_ntm)}

    return rule


def _embedding(module: nn.Embedding, ids: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
    g_ntd = layout.tokens(g, N)
    ids_nt = layout.samples_first(ids, N).reshape(N, -1)
    if module.padding_idx is not None:
        g_ntd = g_ntd * (ids_nt != module.padding_idx)[..., None]
    return {"weight": TableRows(ids_nt, g_ntd)}


def _convolution(module: Any, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
    x, g = layout.samples_first(x, N), layout.samples_first(g, N)
    spatial = module.weight.dim() - 2
    places, channels = g.shape[-spatial:].numel(), len(module.weight)
    g_ntm = g.reshape(N, -1, channels, places).transpose(2, 3).reshape(N, -1, channels)
    patches = _patches(module, x.reshape(-1, *x.shape[-1 - spatial :]))
    x_ntk = patches.transpose(1, 2).reshape(N, -1, patches.shape[1])
    if module.groups == 1:
        return {"weight": OuterProducts(g_ntm, x_ntk), "bias": TokenSums(g_ntm)}
    left, right = (torch.unflatten(t, 2, (module.groups, -1)) for t in (g_ntm, x_ntk))
    weight = torch.einsum("ntgo,ntgk->ngok", left, right.to(left)).reshape(N, 1, *module.weight.shape)
    return {"weight": TokenSums(weight), "bias": TokenSums(g_ntm)}


def _transposed_convolution(module: Any, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
    """Take the stored weight, inputs x outputs·kernel, as the product of an input's place with the patch it adds to."""
    x, g = layout.samples_first(x, N), layout.samples_first(g, N)
    spatial = module.weight.dim() - 2
    x, g = (t.reshape(-1, *t.shape[-1 - spatial :]) for t in (x, g))
    patches = _unfold(g, module.kernel_size, module.stride, module.dilation, module.padding)
    for dim in range(2, x.dim()):  # a large output_padding has patches that no input adds to
        patches = patches.narrow(dim, 0, x.shape[dim])
    x_ntk, g_ntm, bias = (t.flatten(2).transpose(1, 2).reshape(N, -1, t.shape[1]) for t in (x, patches, g))
    if module.groups == 1:
        return {"weight": OuterProducts(x_ntk, g_ntm, inputs=0), "bias": TokenSums(bias)}
    left, right = (torch.unflatten(t, 2, (module.groups, -1)) for t in (x_ntk, g_ntm))
    weight = torch.einsum("ntgo,ntgk->ngok", left.to(right), right).reshape(N, 1, *module.weight.shape)
    return {"weight": TokenSums(weight), "bias": TokenSums(bias)}


def _patches(module: Any, x: Tensor) -> Tensor:
    """Return the input patch of each output place of a convolution, as [batch, channels·kernel, places]."""
    kernel, stride, dilation, padding = module.kernel_size, module.stride, module.dilation, module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = functional.pad(x, module._reversed_padding_repeated_twice, mode), (0,) * len(kernel)
    return _unfold(x, kernel, stride, dilation, padding).flatten(2)


def _unfold(x: Tensor, kernel: Places, stride: Places, dilation: Places, padding: Places) -> Tensor:
    """Return the patches of a picture of one, two or three dimensions, as [batch, channels·kernel, *places]."""
    sides = zip(x.shape[2:], kernel, stride, dilation, padding, strict=True)
    places = [(side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, d, p in sides]
    if len(kernel) == 3:
        return _unfold_volume(
            functional.pad(x, [p for p in reversed(padding) for _ in (0, 1)]), kernel, stride, dilation
        )
    if len(kernel) == 1:  # a picture of height 1
        x, kernel, stride, dilation, padding = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation), (0, *padding)
    if tuple(stride) == tuple(kernel) and not any(padding) and set(dilation) == {1}:
        h, w = x.shape[2] // kernel[0], x.shape[3] // kernel[1]  # patches without overlap: a reshape
        x = x[:, :, : h * kernel[0], : w * kernel[1]].reshape(*x.shape[:2], h, kernel[0], w, kernel[1])
        return torch.unflatten(x.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(1, 3), 2, places)
    return torch.unflatten(functional.unfold(x, kernel, dilation, padding, stride), 2, places)


def _unfold_volume(x: Tensor, kernel: Places, stride: Places, dilation: Places) -> Tensor:
    """Return the patches of a padded volume, as [batch, channels·kernel, depth, height, width]."""
    for i, (k, s, d) in reversed(list(enumerate(zip(kernel, stride, dilation, strict=True)))):
        count = (x.shape[2 + i] - d * (k - 1) - 1) // s + 1
        index = torch.arange(count, device=x.device)[:, None] * s + torch.arange(k, device=x.device) * d
        x = torch.unflatten(x.index_select(2 + i, index.flatten()), 2 + i, (count, k))
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def _norm(module: nn.Module, x: Tensor, g: Tensor, layout: Layout, N: int) -> dict[str, SampleGradients]:
    """Take the normalised input as norm(x; weight 1) - norm(x; weight 0), which holds for every kind of norm."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    unit = _norm_with(module, x, torch.ones_like(weight)) - _norm_with(module, x, torch.zeros_like(weight))
    channels = isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)

    def tokens(t: Tensor) -> Tensor:
        t = layout.samples_first(t, N)
        if channels:
            t = t.movedim(2 if layout.flat or layout.single else 1, -1)
        return t.reshape(N, -1, *weight.shape)

    return {"weight": TokenSums(tokens(g * unit)), "bias": TokenSums(tokens(g))}


def _norm_with(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return a norm's output with another weight and no bias; its hooks do not run."""
    own = {name: module._parameters[name] for name in ("weight", "bias") if module._parameters.get(name) is not None}
    try:
        for name in own:
            module._parameters[name] = nn.Parameter(weight if name == "weight" else torch.zeros_like(weight), False)
        with torch.no_grad():
            return module.forward(x.to(weight.dtype))
    finally:
        module._parameters.update(own)
