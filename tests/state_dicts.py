"""Small state dicts, whole or wrong in one place, and how they are refused: in one line that says where."""

import pytest
import torch

import epimer
from epimer import EpimerError
from models import MATRICES, make_base, needs

METHODS = epimer.list_methods()
FIRST, SECOND = MATRICES
VECTOR = "block.0.bias"


def merge(base, models, name, **given):
    models = models[: epimer.describe_method(name).models[1]] if isinstance(models, list) else models
    return epimer.merge_state_dicts(base, models, name, **(needs(name, make_base(), len(models)) | given))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw(shape, tasks=2, seed=0, dtype=torch.float64):
    """One tensor named w: a base and its fine-tuned models."""
    base, *tuned = (randn(*shape, seed=10 * seed + t, dtype=dtype) for t in range(tasks + 1))
    return {"w": base}, [{"w": W} for W in tuned]


def psd(size, seed=0):
    X = randn(size + 3, size, seed=seed)
    return X.T @ X / len(X)


def mean(models, name):
    return sum(model[name].double() for model in models) / len(models)


def double(state):
    return {k: v.double() if v.is_floating_point() else v for k, v in state.items()}


def changed(states, t, **tensors):
    """The state dicts with some tensors of one of them replaced; names take __ for a dot."""
    return [s | {k.replace("__", "."): v for k, v in tensors.items()} if i == t else s for i, s in enumerate(states)]


def without(states, t, *names):
    return [{k: v for k, v in s.items() if i != t or k not in names} for i, s in enumerate(states)]


def spoiled(W, value):
    W = W.clone()
    W.view(-1)[W.numel() // 2] = value
    return W


def refuses(kind, call, *named):
    """The call is refused in one line that holds everything in `named`."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, EpimerError)
    assert len(message.splitlines()) == 1
    for part in named:
        assert part in message
    return message
