"""A stand-in for page-locked memory where there is no GPU to lock it for."""

import torch

from epimer.checkpoints.page_locked import PageLocked


class Ordinary(PageLocked):
    """Counts as page-locked memory does, without a GPU to lock it."""

    def _allocate(self, size):
        return torch.empty(size, dtype=torch.uint8)
