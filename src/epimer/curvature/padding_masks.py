"""Which tokens of a batch are real and which are padding.

The arguments of the model's modules say so, where they are masks of a known form. Otherwise the gradient of the loss
in the model's inputs does: it is exactly zero at tokens that the loss does not depend on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from epimer.curvature.per_sample_gradients import OuterProducts, SampleGradients

# argument of a module's forward -> whether it is True at real tokens (else it is True at padding)
MASKS = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}


class PaddingMasks:
    """The padding masks of one forward pass; every mask is [N, tokens], True at real tokens."""

    def __init__(self) -> None:
        self.outermost: Tensor | None = None  # the mask that the first module with one was called with
        self._lengths: list[int] | None = None  # its real tokens of each sample, once they were asked for
        self._by_module: dict[str, list[Tensor]] = {}
        self._by_memory: dict[int, Tensor] = {}  # address of an encoder's output, which a decoder reads -> its mask
        # tokens of a sample -> [N, tokens], True at those of the model's inputs that the loss depends on
        self._reached: dict[int, Tensor] = {}

    def note(self, label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], N: int) -> None:
        """Keep the masks among the arguments of one module's call."""
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        named = {**bound, **bound.get("kwargs", {})}
        masks = [mask for name, real in MASKS.items() if (mask := _as_mask(named.get(name), real, N)) is not None]
        if (
            written := _written(named, N)
        ) is not None:  # encoder and decoder: what follows both has the latter's tokens
            masks = [written, *masks]
        encoder = _as_mask(named.get("encoder_attention_mask"), True, N)
        if encoder is not None:  # a decoder: its own tokens are all real unless it says otherwise
            tokens = next((t for t in named.values() if isinstance(t, Tensor) and t.dim() > 1), encoder)
            masks = masks or [torch.ones_like(encoder[:, :1]).expand(-1, tokens.shape[1])]
            if isinstance(memory := named.get("encoder_hidden_states"), Tensor):
                self._by_memory[memory.data_ptr()] = encoder
        if masks:
            self._by_module[label] = masks
            self.outermost = masks[0] if self.outermost is None else self.outermost

    def may_be_packed(self, rows: int) -> bool:
        """Whether a layer's rows may be the real tokens alone, of which samples have different numbers."""
        if self.outermost is None or not rows % self.outermost.numel():
            return False
        if self._lengths is None:
            self._lengths = self.outermost.sum(1).tolist()
        return len(set(self._lengths)) > 1 and not rows % max(1, sum(self._lengths))

    def of_input(self, label: str, x: Tensor) -> list[Tensor]:
        """Return the masks that may apply to the input of a layer: those of the innermost module around it."""
        if x.data_ptr() in self._by_memory:
            return [self._by_memory[x.data_ptr()]]
        while label not in self._by_module and label:
            label = label.rpartition(".")[0]
        return self._by_module.get(label, [])

    def watch(self, inputs: Tensor, N: int) -> None:
        """Note at which tokens the gradients of a tensor [N, tokens, width] of the model's inputs are not zero."""
        if inputs.dim() != 3 or len(inputs) != N:
            return
        tokens = inputs.shape[1]
        self._reached.setdefault(tokens, torch.zeros(N, tokens, dtype=torch.bool, device=inputs.device))

        def on_gradient(g: Tensor) -> None:
            self._reached[tokens] |= _nonzero(g)

        inputs.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def apply(self, gradients: SampleGradients, masks: list[Tensor]) -> SampleGradients:
        """Return per-sample gradients with the first of the masks that fits their shape [N, tokens].

        If none fits, a token is padding if the loss depends neither on the layer's output nor on the model's input at
        it. The latter is known when the backward passes are over.
        """
        N, tokens = gradients.output_gradients.shape[:2]
        mask: Tensor | None = gradients.mask  # type: ignore[assignment]
        routed: Tensor | None = None
        if isinstance(gradients, OuterProducts) and gradients.tokens is not None:
            tokens, routed = gradients.length, gradients.tokens

        # the late mask calls this function, which must not keep the gradients in memory until then
        def fitting(known: Iterable[Tensor]) -> Tensor | None:
            cuts = (trimmed(one, tokens) for one in known if len(one) == N)
            cut = next((cut for cut in cuts if cut is not None), None)
            if cut is None or routed is None or mask is None:
                return cut
            return cut.gather(1, routed) & mask  # an expert gets some of the tokens, in their order

        if (cut := fitting(masks)) is not None:
            return replace(gradients, mask=cut)  # type: ignore[type-var]
        if not self._reached or (reached := _nonzero(gradients.output_gradients)).all():
            return gradients
        inputs = self._reached.values()

        def late_mask() -> Tensor | None:
            cut = fitting(inputs)
            return mask if cut is None else cut | reached

        return replace(gradients, mask=late_mask)  # type: ignore[type-var]


def _nonzero(g: Tensor) -> Tensor:
    """Return at which tokens a gradient [N, tokens, …] is not exactly zero."""
    return g.flatten(2).ne(0).any(-1)


def _written(named: dict[str, Any], N: int) -> Tensor | None:
    """Return the mask of a decoder's tokens among a model's arguments: all are real where there is none."""
    ids = named.get("decoder_input_ids")
    mask = _as_mask(named.get("decoder_attention_mask"), True, N)
    if mask is not None or not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != N:
        return mask
    return torch.ones_like(ids, dtype=torch.bool)


def takes_mask(module: nn.Module) -> bool:
    """Whether a module's forward has a padding mask among its parameters; False where it has no signature."""
    try:
        return bool(MASKS.keys() & set(inspect.signature(module.forward).parameters))
    except (TypeError, ValueError):
        return False


def trimmed(mask: Tensor, tokens: int) -> Tensor | None:
    """Return a mask [N, …] cut to a number of tokens, or None where that would cut off more than padding."""
    extra = mask.shape[1] - tokens
    if extra <= 0:
        return None if extra else mask
    if not mask[:, tokens:].any():
        return mask[:, :tokens]
    return None if mask[:, :extra].any() else mask[:, extra:]


def _as_mask(value: Any, real: bool, N: int) -> Tensor | None:
    """Return an argument as a mask that is True at real tokens, or None where it is no mask of N samples."""
    if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != N:
        return None
    if value.is_floating_point() and not real:
        return value == 0
    return value.bool() if real else ~value.bool()
