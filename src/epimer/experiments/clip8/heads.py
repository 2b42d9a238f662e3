"""Zero-shot classifiers: heads from class names in sentences through the text tower, and networks with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from epimer.errors import CheckpointError, listed

PROMPTS = 256  # sentences encoded at a time


@torch.no_grad()
def zero_shot_head(
    clip: Any,
    tokenizer: Any,
    classes: Sequence[str],
    templates: Sequence[str],
    report: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Return W, classes x features: row c is e^s · n(mean over templates of n(text(template of c))), n(x) = x / |x|.

    s is the model's own logit scale, so that n(image features)·Wᵀ are its logits.
    """
    prompts = [template.format(name) for name in classes for template in templates]
    device = clip.logit_scale.device
    embeddings = []
    for start in range(0, len(prompts), PROMPTS):
        batch = prompts[start : start + PROMPTS]
        inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt").to(device)
        pooled = clip.text_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).pooler_output
        embeddings.append(normalize(clip.text_projection(pooled).float(), dim=-1))
        report(len(batch))
    means = torch.cat(embeddings).view(len(classes), len(templates), -1).mean(1)
    return (clip.logit_scale.float().exp() * normalize(means, dim=-1)).cpu()


class ZeroShot(nn.Module):
    """Pixels to logits: n(P·vision(pixels))·Wᵀ, with the projection P of the base unless the state has one.

    Parameters are named as in transformers' `CLIPVisionModelWithProjection`; the head is not a parameter.
    """

    head: Tensor

    def __init__(self, vision_model: nn.Module, visual_projection: nn.Module, head: Tensor) -> None:
        super().__init__()
        self.vision_model, self.visual_projection = vision_model, visual_projection
        self.register_buffer("head", head, persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pooled = self.vision_model(pixel_values=pixel_values).pooler_output
        return normalize(self.visual_projection(pooled), dim=-1) @ self.head.T


def vision_state(clip: Any, *, projection: bool) -> dict[str, Tensor]:
    """Return the vision tower's tensors, and the projection if it is trained with them."""
    parts = ("vision_model.", "visual_projection.") if projection else ("vision_model.",)
    tensors = {name: W for name, W in clip.state_dict().items() if name.startswith(parts)}
    return {name: W.detach().clone() for name, W in tensors.items() if W.is_floating_point()}


class Networks:
    """Builds networks from states and heads; the latest state's tower is kept, as all tasks are evaluated in turn."""

    def __init__(self, clip: Any, device: torch.device) -> None:
        self._clip, self._device = clip, device
        self._towers: tuple[nn.Module, nn.Module] | None = None
        self._versions: list[tuple[str, int, int]] = []
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, state: Mapping[str, Tensor], head: Tensor) -> nn.Module:
        """Return a network in eval mode, on the device."""
        tensors = dict(state)
        versions = [(name, id(W), W._version) for name, W in tensors.items()]
        if self._towers is None or versions != self._versions:
            self._towers, self._versions = self._build(tensors), versions
            self._tensors = tensors  # while they are alive, no other tensor has their ids
        return ZeroShot(*self._towers, head.to(self._device)).eval()

    def _build(self, state: dict[str, Tensor]) -> tuple[nn.Module, nn.Module]:
        """Return copies of the base's vision tower and projection with the state loaded."""
        names = ("vision_model", "visual_projection")
        parts = nn.ModuleDict({name: copy.deepcopy(getattr(self._clip, name)) for name in names})
        _, unknown = parts.load_state_dict(state, strict=False)
        if unknown:
            raise CheckpointError(f"the vision tower has no tensor {listed(unknown)}; give models of this variant.")
        parts.visual_projection.requires_grad_("visual_projection.weight" in state)
        parts.to(self._device)
        return parts["vision_model"], parts["visual_projection"]
