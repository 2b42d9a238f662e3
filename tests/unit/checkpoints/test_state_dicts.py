"""State dicts whose tensors are no plain numbers are refused by name."""

import pytest
import torch

import epimer
from epimer.errors import TensorError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda W: torch.nested.nested_tensor([W, W]), r"models\[1\]\['w'\] must be a dense tensor, got a nested one"),
        (lambda W: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8), "'w'.* torch.qint8"),
        (lambda W: W.to_sparse(), "'w'.* torch.sparse_coo"),
        (lambda W: W.to("meta"), "'w'.* meta"),
    ],
    ids=["nested", "quantized", "sparse", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_no_plain_numbers(change, words):
    W = torch.arange(12.0).view(4, 3)
    with pytest.raises(TensorError, match=words):
        epimer.merge_state_dicts({"w": W}, [{"w": W + 1}, {"w": change(W)}], "average")
