"""How far a merge's predictions are from those of a task's own model: agreement, and KL divergence in bounded memory.

Of a vocabulary of 100,000 words only the likeliest are kept for each token, and the rest as one: the KL divergence of
these coarser distributions is at most that of the whole ones, and next to it where a model is sure of what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from epimer.tasks.batches import Batch
from epimer.tasks.labels import IGNORED, logits_of

KEPT = 256  # classes of each prediction; all, where there are no more


def counted_logits(batch: Batch, network: nn.Module) -> Tensor:
    """Return a network's logits as rows: one per sample or, of a language model, one per token that counts."""
    logits = logits_of(batch.run(network)).float()
    if logits.dim() != 3:
        return logits
    return logits[batch.targets != IGNORED] if isinstance(batch.targets, Tensor) else logits.flatten(0, 1)


@dataclass(frozen=True)
class Predictions:
    """A model's predictions on one batch, a row each."""

    log_probabilities: Tensor
    """of the classes `kept`, and of all others together where there are others"""
    kept: Tensor | None
    """numbers of the classes, likeliest first; None where all are kept in their order"""
    likeliest: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Predictions:
        """Keep the predictions that logits amount to."""
        kept = logits.topk(KEPT, dim=1).indices.int() if logits.shape[1] > KEPT else None
        return cls(_log_probabilities(logits, kept), kept, logits.argmax(1))

    def __len__(self) -> int:
        return len(self.likeliest)

    def divergence(self, logits: Tensor) -> Tensor:
        """Return KL(these ‖ softmax(logits)) of every row."""
        other = _log_probabilities(logits, self.kept)
        terms = self.log_probabilities.exp() * (self.log_probabilities - other)
        return torch.where(self.log_probabilities > -torch.inf, terms, 0).sum(1)


def _log_probabilities(logits: Tensor, kept: Tensor | None) -> Tensor:
    """Return the log-probabilities of the classes that are kept, and of all others together."""
    every = log_softmax(logits, 1)
    if kept is None:
        return every
    kept = kept.long()
    some = every.gather(1, kept)
    nothing = torch.finfo(every.dtype).min  # not -inf, which has no gradient where all others are impossible
    rest = every.scatter(1, kept, nothing).logsumexp(1, keepdim=True)
    return torch.cat([some, rest], 1)
