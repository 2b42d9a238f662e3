"""The loss of connectionist temporal classification (CTC): minus the log-probability of a transcript, over alignments.

A model gives every frame of a recording a distribution over tokens and a blank. A path takes one of them per frame, and
reads as a transcript once repetitions are joined and blanks removed; a transcript's probability is that of its paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from epimer.errors import CurvatureError
from epimer.tasks.batches import IGNORED, Batch


@dataclass(frozen=True)
class CtcLoss:
    """Each sample's CTC loss; all frames of the logits, [N, frames, tokens], are of the recording."""

    blank: int

    def __call__(self, outputs: Any, targets: Tensor | None) -> Tensor:
        """Return the losses, [N], of transcripts that are padded with -100; infinite where one has too few frames."""
        if targets is None:
            raise CurvatureError("a CTC loss needs transcripts; give every batch 'labels'.")
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        N, frames = logits.shape[:2]
        spoken = targets != IGNORED
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's takes other types and lengths
            return ctc_loss(
                logits.log_softmax(-1).transpose(0, 1),
                targets[spoken],
                torch.full((N,), frames),
                spoken.sum(1),
                blank=self.blank,
                reduction="none",
            )

    def sample(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return transcripts sampled from the model, padded with -100: each frame's token, then joined."""
        wide = logits.double().softmax(-1).cpu()
        if not bool(torch.isfinite(wide).all()):
            raise CurvatureError("the logits of a recording are NaN or Inf; look at the data, and at the model.")
        paths = torch.multinomial(wide.flatten(0, 1), 1, generator=generator).view(wide.shape[:2])
        read = paths != self.blank
        read[:, 1:] &= paths[:, 1:] != paths[:, :-1]
        rows = [path[kept] for path, kept in zip(paths, read, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        return padded.to(logits.device)


def find_ctc_loss(model: Any) -> CtcLoss | None:
    """Return the loss of a model of transformers whose head is trained by CTC; None for others."""
    blank = getattr(getattr(model, "config", None), "pad_token_id", None)
    return CtcLoss(blank) if type(model).__name__.endswith("ForCTC") and isinstance(blank, int) else None


def without_padding(batch: Batch) -> Iterator[Batch]:
    """Yield a batch of recordings, or one by one without what its mask excludes, so that all frames count.

    The mask, which then excludes nothing, is left out: by it these models change a layer's output in place.
    """
    mask = batch.mask
    if mask is None:
        yield batch
        return
    parts = [(batch, mask[0])] if bool(mask.all()) else [(batch.part(i, i + 1), mask[i]) for i in range(batch.N)]
    for part, heard in parts:
        inputs = {
            name: value[:, heard] if isinstance(value, Tensor) and value.shape[1:2] == heard.shape else value
            for name, value in part.inputs.items()
            if name != "attention_mask"
        }
        yield replace(part, inputs=inputs)
