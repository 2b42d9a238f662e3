"""Page-locked memory stays within its bound and is counted as torch keeps it; locking itself needs a GPU."""

import gc

import torch

from epimer.checkpoints import checkpoint
from epimer.checkpoints.page_locked import PINNED, PageLocked
from ordinary_memory import Ordinary


def test_no_more_is_locked_than_is_allowed_and_blocks_are_used_again():
    memory = Ordinary()
    first, second = memory.take(3000, 8192), memory.take(4096, 8192)
    assert (len(first), len(second), memory.kept) == (3000, 4096, 8192)
    assert memory.take(100, 8192) is None
    assert memory.take(4000, 8192) is None
    view = first[10:20]
    del first
    gc.collect()
    assert memory.take(4000, 8192) is None  # a tensor on it is left
    del view
    gc.collect()
    again = memory.take(4000, 8192)
    assert len(again) == 4000
    assert memory.kept == 8192
    assert memory.take(100, 8192 + 128) is not None


def test_what_the_driver_refuses_is_ordinary_memory():
    class Refused(PageLocked):
        def _allocate(self, size):
            raise RuntimeError("CUDA error: out of memory")

    assert Refused().take(1 << 20, 1 << 30) is None


def test_large_tensors_are_read_into_it_where_a_gpu_waits_for_them(monkeypatch):
    memory = Ordinary()
    monkeypatch.setattr(checkpoint, "page_locked", memory)
    token = PINNED.set(1 << 21)
    try:
        W, data = checkpoint.allocate_with_bytes((512, 1024), torch.float16)
        data[:2] = torch.tensor([1.5], dtype=torch.float16).view(torch.uint8).numpy()
        other = checkpoint.allocate((1024, 1024), torch.float32)
        small = checkpoint.allocate((16,), torch.float32)
    finally:
        PINNED.reset(token)
    assert (W.shape, W.dtype, float(W[0, 0]), len(data)) == ((512, 1024), torch.float16, 1.5, 1 << 20)
    assert (other.shape, small.shape, memory.kept) == ((1024, 1024), (16,), 1 << 20)
    assert checkpoint.allocate((512, 1024), torch.float16).shape == (512, 1024)
    assert memory.kept == 1 << 20
