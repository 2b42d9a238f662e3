"""Tensors that a GPU waits for are read by several threads into memory of its own kind: the same ones, same errors."""

import pytest
import torch
from safetensors.torch import save_file

from epimer.checkpoints import checkpoint
from epimer.checkpoints.page_locked import PINNED
from epimer.engine.task_vectors import read_tensors
from epimer.errors import CheckpointError
from epimer.plan.merge import open_models, plan_recipe
from epimer.recipe.load import open_recipe
from ordinary_memory import Ordinary

TASKS = 3


@pytest.fixture
def plan(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for t in range(TASKS + 1):
        save_file({"w.weight": torch.randn(600, 500, generator=generator)}, tmp_path / f"m{t}.safetensors")
    models = [{"model": str(tmp_path / f"m{t}.safetensors")} for t in range(1, TASKS + 1)]
    recipe, folder = open_recipe(
        {"merge_method": "tsv", "base_model": str(tmp_path / "m0.safetensors"), "models": models}
    )
    return plan_recipe(recipe, open_models(recipe, folder=folder))


@pytest.fixture
def memory(monkeypatch):
    memory = Ordinary()
    monkeypatch.setattr(checkpoint, "page_locked", memory)
    token = PINNED.set(3 << 21)
    yield memory
    PINNED.reset(token)


def test_what_several_threads_read_is_what_one_reads(plan, memory):
    [job] = plan.parts
    together = read_tensors(plan.participants, job)
    assert memory.kept == 3 << 21  # and one of four tensors in ordinary memory
    PINNED.set(0)
    alone = read_tensors(plan.participants, job)
    assert torch.equal(together.base, alone.base)
    assert len(together.models) == TASKS
    assert all(torch.equal(one, other) for one, other in zip(together.models, alone.models, strict=True))


def test_a_file_that_one_thread_cannot_read_is_named(plan, memory, tmp_path):
    file = tmp_path / "m2.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"m2\.safetensors"):
        read_tensors(plan.participants, plan.parts[0])
