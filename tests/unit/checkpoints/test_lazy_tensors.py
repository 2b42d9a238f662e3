"""Tensors that are read on access: how often each is read, and that tied ones are shared."""

import pytest
import torch

from epimer.checkpoints.lazy_tensors import LazyTensors

HEADERS = {name: torch.empty(2, device="meta") for name in ("a", "b", "c")}


def counting(reads):
    def read(name):
        reads.append(name)
        return torch.ones(2)

    return read


def test_tensors_are_read_on_every_access_unless_they_are_kept():
    reads = []
    tensors = LazyTensors(HEADERS, counting(reads))
    assert (list(tensors), len(tensors), reads) == (["a", "b", "c"], 3, [])
    assert tensors["a"] is not tensors["a"]
    assert reads == ["a", "a"]
    reads.clear()
    kept = LazyTensors(HEADERS, counting(reads), keep=True)
    assert kept["a"] is kept["a"]
    assert reads == ["a"]
    with pytest.raises(KeyError):
        tensors["d"]


def test_tied_names_share_one_kept_tensor():
    reads = []
    tensors = LazyTensors(HEADERS, counting(reads), keep=True, ties={"b": "a", "c": "elsewhere"})
    assert tensors["b"] is tensors["a"]
    assert tensors["c"] is not tensors["a"]
    assert reads == ["a", "c"]
