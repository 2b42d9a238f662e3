"""Page-locked memory, from and to which a GPU copies by itself and several times as fast; bounded, and used again."""

from __future__ import annotations

import weakref
from collections import Counter
from contextvars import ContextVar
from threading import Lock

import torch
from torch import Tensor

PINNED: ContextVar[int] = ContextVar("pinned", default=0)
"""bytes of page-locked memory that large tensors may get; 0 where no GPU reads them"""


class PageLocked:
    """Counts what torch keeps locked: blocks of powers of two, which it never gives back, for the next tensors."""

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()
        self._lock = Lock()

    @property
    def kept(self) -> int:
        """The bytes that are locked, in use or not."""
        return sum(size * count for size, count in self._kept.items())

    def take(self, size: int, most: int) -> Tensor | None:
        """Return `size` bytes; None where more than `most` would be locked then, or the system refuses."""
        block = 1 << (size - 1).bit_length()
        with self._lock:
            if self._used[block] == self._kept[block]:
                if self.kept + block > most:
                    return None
                self._kept[block] += 1
            self._used[block] += 1
        try:
            room = self._allocate(size)
        except RuntimeError:  # of the driver, which has no type
            self._give_back(block)
            return None
        weakref.finalize(room.untyped_storage(), self._give_back, block).atexit = False
        return room

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _give_back(self, block: int) -> None:
        # Garbage may be collected, and so this be called, while this very thread is in `take`: never wait here. A
        # block that is not counted back is only counted as used.
        if self._lock.acquire(blocking=False):
            self._used[block] -= 1
            self._lock.release()


page_locked = PageLocked()
