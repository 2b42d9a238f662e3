"""Measure the running means and variances of a merged model's BatchNorm layers again, which no average gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from epimer.errors import TensorError
from epimer.tasks.batches import read_batches


@torch.no_grad()
def reestimate_statistics(model: nn.Module, batches: Iterable[Any], *, samples: int | None = None) -> int:
    """Replace the running statistics of a model's BatchNorm layers by those of its own activations; return how many.

    Each is the mean over the batches of a batch's mean and (unbiased) variance. Weights, modes and everything else of
    the model stay as they are, and only these layers run in training mode.

    Args:
        model: any PyTorch model, such as a merge.
        batches: pairs (inputs, targets) or as `estimate_curvature` takes them; targets may be None.
        samples: stop after this many; None takes all.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not layers:
        raise TensorError("the model has no BatchNorm layer with running statistics; there is nothing to measure.")
    before = {module: module.training for module in model.modules()}
    momentum = {layer: layer.momentum for layer in layers}
    statistics = {layer: {name: value.clone() for name, value in layer.named_buffers()} for layer in layers}
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
            layer.train()
        for batch in read_batches(batches, samples, next(model.parameters()).device):
            batch.run(model)
    except BaseException:
        for layer, values in statistics.items():
            layer.load_state_dict(values, strict=False)
        raise
    finally:
        for layer in layers:
            layer.momentum = momentum[layer]
        for module, training in before.items():
            module.training = training
    return len(layers)
