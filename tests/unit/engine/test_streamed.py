"""Tensors that are merged as they are read: the bytes of a merge in memory, and errors that name the culprit."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.engine import merge
from epimer.engine.merge import MergeWalk
from epimer.engine.options import RunOptions
from epimer.errors import TensorError
from epimer.plan.memory import STREAMED
from epimer.plan.merge import open_models, plan_recipe
from epimer.recipe.load import open_recipe
from epimer.records.verification import Outcome

SHAPES = {"table": (STREAMED // 1000 * 2 + 77, 1000), "row": (1, STREAMED + 3), "vector": (STREAMED + 5,), "bias": (9,)}
WEIGHTS = [0.2, 0.5, 0.3]


def save_models(folder, dtype, change=lambda t, state: None):
    torch.manual_seed(0)
    states = []
    for t in range(4):
        state = {name: (0.02 * torch.randn(shape)).to(dtype) for name, shape in SHAPES.items()}
        change(t, state)
        save_file(state, folder / f"m{t}.safetensors")
        states.append(state)
    return states


def recipe_of(folder, method, parameters=None):
    models = [
        {"model": str(folder / f"m{t}.safetensors"), "parameters": {"weight": weight}}
        for t, weight in enumerate(WEIGHTS, 1)
    ]
    base = {"base_model": str(folder / "m0.safetensors")} if method != "average" else {}
    return {"merge_method": method, "models": models, **base, "parameters": parameters or {}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties"])
def test_a_streamed_merge_has_the_bytes_of_one_in_memory(tmp_path, method, dtype):
    states = save_models(tmp_path, dtype)
    epimer.merge(recipe_of(tmp_path, method), tmp_path / "out", progress=False)
    base = None if method == "average" else states[0]
    expected = epimer.merge_state_dicts(base, states[1:], method, weights=WEIGHTS)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_wide_tensors_are_streamed_and_small_ones_are_read_ahead(tmp_path):
    save_models(tmp_path, torch.bfloat16)
    recipe, folder = open_recipe(recipe_of(tmp_path, "average"))
    plan = plan_recipe(recipe, open_models(recipe, folder=folder))
    walk = MergeWalk(plan, plan.parts)
    streamed = {batch.name: walk.read(batch)[0].streamed for batch in walk.jobs}
    assert streamed == {"table": True, "row": True, "vector": True, "bias": False}


def test_rows_are_handed_on_as_they_are_merged_in_memory_that_is_used_again(tmp_path):
    states = save_models(tmp_path, torch.bfloat16)
    recipe, folder = open_recipe(recipe_of(tmp_path, "average"))
    plan = plan_recipe(recipe, open_models(recipe, folder=folder))
    walk, cpu = MergeWalk(plan, plan.parts), torch.device("cpu")
    (table,) = [batch for batch in walk.jobs if batch.name == "table"]
    rows, places = [], set()

    def sink(job, W):
        rows.append(W.clone())
        places.add(W.data_ptr())

    (record,) = walk.work_into(sink, table, walk.read(table), cpu)
    expected = sum(weight * state["table"].double() for weight, state in zip(WEIGHTS, states[1:], strict=True))
    assert [len(W) for W in rows] == [725, 725, 723]  # as few blocks as hold it, of one size
    assert len(places) == 1
    assert record.shape == SHAPES["table"]
    torch.testing.assert_close(torch.cat(rows).double(), expected, rtol=2**-8, atol=1e-7)


def test_a_block_is_let_go_before_the_next_is_read(tmp_path, monkeypatch):
    save_models(tmp_path, torch.float32)
    recipe, folder = open_recipe(recipe_of(tmp_path, "task_arithmetic"))
    plan = plan_recipe(recipe, open_models(recipe, folder=folder))
    walk, read, alive = MergeWalk(plan, plan.parts), merge.read_tensors, []

    def counted(*given):
        assert not [block for block in alive if block() is not None]
        tensors = read(*given)
        alive.append(weakref.ref(tensors))
        return tensors

    monkeypatch.setattr(merge, "read_tensors", counted)
    (table,) = [batch for batch in walk.jobs if batch.name == "table"]
    walk.work_into(lambda job, W: None, table, walk.read(table), torch.device("cpu"))
    assert len(alive) == 3


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_found_wherever_it_lies(tmp_path, method, value):
    def spoil(t, state):
        if t == 2:
            state["table"][-1, -1] = value

    save_models(tmp_path, torch.bfloat16, spoil)
    with pytest.raises(TensorError, match=r"models\[1\].*table.*1"):
        epimer.merge(recipe_of(tmp_path, method), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_merge_that_does_not_fit_its_dtype_is_refused(tmp_path):
    def widen(t, state):
        state["vector"][-1] = 3e38 if t else -3e38

    save_models(tmp_path, torch.bfloat16, widen)
    with pytest.raises(TensorError, match="'vector'"):
        epimer.merge(recipe_of(tmp_path, "task_arithmetic", {"scale": 3}), tmp_path / "out", progress=False)


def test_a_gpu_is_planned_with_the_whole_of_what_is_read_for_it(tmp_path, monkeypatch):
    """It merges no rows as they are read: every part is in memory whole, of all models and the result."""
    states = save_models(tmp_path, torch.float32)
    recipe, folder = open_recipe(recipe_of(tmp_path, "task_arithmetic"))
    plan = plan_recipe(recipe, open_models(recipe, folder=folder))
    read, sizes = merge.read_tensors, {}

    def counted(participants, job, rows=None, **options):
        tensors = read(participants, job, rows, **options)
        sizes[job.key] = sum(W.nbytes for W in (tensors.base, *tensors.models))
        return tensors

    monkeypatch.setattr(merge, "read_tensors", counted)
    cpu = {batch.name: batch.memory for batch in MergeWalk(plan, plan.parts).jobs}
    gpu = MergeWalk(plan, [job.on(torch.device("cuda")) for job in plan.parts])
    monkeypatch.setattr(gpu, "_in_chunks", lambda job, device: False)  # as on a GPU
    for batch in gpu.jobs:
        results = [W for _, W, _ in gpu.work(batch, gpu.read(batch), torch.device("cpu"))]
        held = sum(sizes[job.key] for job in batch.jobs) + sum(W.nbytes for W in results)
        assert held < batch.memory
        assert batch.memory < 1.5 * held or batch.memory == cpu[batch.name]
        assert batch.memory >= cpu[batch.name]
    assert sizes.keys() == states[0].keys()
    assert any(batch.memory > cpu[batch.name] for batch in gpu.jobs)
    monkeypatch.setattr("epimer.engine.memory.available_memory", lambda: 0)
    monkeypatch.setattr("epimer.engine.options.worker_devices", lambda *options: [torch.device("cuda")])
    assert RunOptions("cuda").start(plan.parts).memory == max(batch.memory for batch in gpu.jobs)


def test_a_large_streamed_tensor_is_divided_among_workers_and_has_the_same_bytes(tmp_path, monkeypatch):
    states = save_models(tmp_path, torch.bfloat16)
    monkeypatch.setattr("epimer.plan.jobs.STREAMED_PART", 1 << 22)
    recipe, folder = open_recipe(recipe_of(tmp_path, "average"))
    rows = [job.rows for job in plan_recipe(recipe, open_models(recipe, folder=folder)).parts if job.name == "table"]
    assert len(rows) > 2
    assert [first for first, _ in rows] == [0, *(stop for _, stop in rows[:-1])]
    assert rows[-1][1] == len(states[0]["table"])
    epimer.merge(recipe_of(tmp_path, "average"), tmp_path / "out", progress=False, workers=2)
    expected = epimer.merge_state_dicts(None, states[1:], "average", weights=WEIGHTS)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
    checks = epimer.verify(tmp_path / "out", files_only=True).checks
    assert [check.outcome for check in checks if check.part in ("files", "tensors")] == [Outcome.OK, Outcome.OK]
