"""Repeat a step on a GPU by replaying its kernels: Python starts small ones slower than the card runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

PLAIN = 3  # calls before a step is recorded: few are not worth it, and the first ones load what kernels need

_KEPT = threading.local()
"""of every thread its last recording, whose memory the next one takes over"""


def repeated(step: Callable[[], None], like: Tensor) -> Callable[[], None]:
    """Return `step`, to be called many times; on a GPU it is recorded once, and replayed from then on.

    A step reads and writes the same tensors every time, asks the device for no number, and is called by one thread.
    """
    if not like.is_cuda or torch.cuda.current_stream(like.device) == torch.cuda.default_stream(like.device):
        return step  # the default stream cannot be recorded
    return _Repeated(step)


class _Repeated:
    """A step that is replayed after its first calls."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step, self.calls = step, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == PLAIN + 1 and (graph := _record(self.step)) is not None:
            self.step = graph.replay
        self.step()


def _record(step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Return a step's kernels; None where something in it cannot be recorded."""
    graph, last = torch.cuda.CUDAGraph(), getattr(_KEPT, "graph", None)
    pool = torch.cuda.graph_pool_handle() if last is None else last.pool()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        step()
    except RuntimeError:
        with suppress(RuntimeError):
            graph.capture_end()
        return None
    graph.capture_end()
    _KEPT.graph = graph
    return graph
