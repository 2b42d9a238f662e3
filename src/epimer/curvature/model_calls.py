"""Calls of a model: in eval mode, and such as may fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and without torch's fused attention, which calls no hooks; restore both afterwards."""
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in training.items():
            module.training = flag


def attempt(run: Callable[[], Any]) -> Any:
    """Return the result of a call, or the exception it raised; warnings are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            return error
