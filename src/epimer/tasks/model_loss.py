"""The loss of a model whose forward takes `labels`, as Hugging Face's do: the cross-entropy of its logits, or CTC."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epimer.errors import CurvatureError, short
from epimer.tasks.batches import Batch
from epimer.tasks.ctc import CtcLoss, find_ctc_loss, without_padding
from epimer.tasks.generation import decoder_inputs
from epimer.tasks.labels import IGNORED, Loss, logits_of
from epimer.tasks.task import sample_losses

ROUNDING = 2e-2  # between the model's own loss, perhaps in bfloat16, and its cross-entropy
REMEDY = "give loss_fn=, which takes (outputs, targets) and returns a loss per sample"


def next_token_losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy, [N], where the logits of a place are compared with the next target."""
    return sample_losses(logits_of(outputs)[:, :-1], targets[:, 1:])


def own_loss(model: nn.Module, batch: Batch) -> Loss:
    """Return the loss per sample, tokens summed, that a model takes the mean of when its forward gets `labels`.

    It is a cross-entropy of the logits, of the next place's label or of the same place's. Which one is seen from a
    label at the first place alone, which the former does not count; its value must be the model's own. A model of
    speech that is trained by CTC has that loss.
    """
    if (ctc := find_ctc_loss(model)) is not None:
        return _checked(ctc, model, batch)
    if "labels" not in inspect.signature(model.forward).parameters:
        problem = f"loss_fn=None is for models whose forward takes labels, which {type(model).__name__}'s does not"
        raise CurvatureError(f"{problem}; {REMEDY}.")
    few = batch.part(0, 2)
    with torch.no_grad():
        logits = logits_of(few.run(model))
        labels = torch.arange(logits[..., 0].numel(), device=logits.device).view(logits.shape[:-1]) % logits.shape[-1]
        shifted = labels.dim() > 1 and not _own(model, few, _first_only(labels)) > 0  # 0, or NaN, for none counted
        loss_fn = next_token_losses if shifted else sample_losses
        counted = labels[:, 1:].numel() if shifted else labels.numel()
        own, expected = _own(model, few, labels), float(loss_fn(logits, labels).sum()) / max(1, counted)
    if not math.isclose(own, expected, rel_tol=ROUNDING, abs_tol=1e-6):
        problem = f"the loss of {type(model).__name__} is not the cross-entropy of its logits"
        raise CurvatureError(f"{problem} ({own:.4g} instead of {expected:.4g} for the first samples); {REMEDY}.")
    return loss_fn


def _checked(ctc: CtcLoss, model: nn.Module, batch: Batch) -> CtcLoss:
    """Return the CTC loss of a model; refuse one that is not the model's own on the first samples, of a token each."""
    few = batch.part(0, 2)
    with torch.no_grad():
        logits = logits_of(few.run(model))
        labels = torch.full((few.N, 1), 0 if ctc.blank else 1, device=logits.device)
        mean = getattr(model.config, "ctc_loss_reduction", "mean") == "mean"
        own, losses = _own(model, few, labels), ctc(logits, labels)
    expected = float(losses.mean() if mean else losses.sum())
    if not math.isclose(own, expected, rel_tol=ROUNDING):
        problem = f"the loss of {type(model).__name__} is not the CTC loss of its logits"
        raise CurvatureError(f"{problem} ({own:.4g} instead of {expected:.4g} for the first samples); {REMEDY}.")
    return ctc


def _first_only(labels: Tensor) -> Tensor:
    """Return labels that are ignored at every place but the first."""
    only = torch.full_like(labels, IGNORED)
    only[:, 0] = labels[:, 0]
    return only


def _own(model: nn.Module, batch: Batch, labels: Tensor) -> float:
    """Return the loss that the model itself computes; what it notes of the labels in its config is undone."""
    config: Any = getattr(model, "config", None)
    problem_type = getattr(config, "problem_type", None)
    try:
        return float(batch.run(partial(model, labels=labels)).loss)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        reason = f"{type(model).__name__} has no loss for labels of shape {tuple(labels.shape)}: {short(str(error))}"
        raise CurvatureError(f"{reason}; {REMEDY}.") from error
    finally:
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type


def prepared(model: nn.Module, batches: Iterable[Batch], *, own: bool) -> Iterator[Batch]:
    """Yield batches as a model and its loss need them: with a decoder's inputs, and recordings without padding.

    `own` says that the loss is the model's own, which for CTC counts all frames of a batch.
    """
    for batch in batches:
        if own and find_ctc_loss(model) is not None:
            yield from without_padding(batch)
        else:
            yield _with_decoder_inputs(model, batch)


def _with_decoder_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch with the decoder's inputs, which an encoder-decoder model makes from the labels."""
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & set(batch.inputs if isinstance(batch.inputs, dict) else ())
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not encoder_decoder or given or not isinstance(batch.inputs, dict) or not isinstance(batch.targets, Tensor):
        return batch
    taken = inspect.signature(model.forward).parameters
    written = {name: value for name, value in decoder_inputs(model, batch.targets).items() if name in taken}
    return replace(batch, inputs={**written, **batch.inputs})
