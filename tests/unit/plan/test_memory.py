"""A plan says what a merge will take, and one that would take more than is free is refused before any work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import epimer
from commands import run
from epimer.api import plan_merge
from epimer.checkpoints.checkpoint import header
from epimer.engine.memory import SLACK
from epimer.engine.options import RunOptions
from epimer.errors import ParameterError
from epimer.geometry.linalg import CHUNK
from epimer.methods.frechet import FrechetOptions
from epimer.methods.options import MethodOptions
from epimer.methods.registry import Method
from epimer.plain_text import format_size
from epimer.plan.memory import SCRAP_CHUNKS, STREAMED, CurvatureSize, TensorInputs, memory_of
from epimer.plan.merge import plan_state_dicts
from epimer.plan.participants import state_dict_participants

ROOT = Path(__file__).parents[3]
NAME, SHAPE, TASKS = "layer.weight", (256, 320), 2


@pytest.fixture
def models():
    torch.manual_seed(0)
    base = {NAME: torch.randn(SHAPE), "layer.bias": torch.randn(SHAPE[0])}
    return [base] + [{n: W + 0.1 * torch.randn_like(W) for n, W in base.items()} for _ in range(TASKS)]


@pytest.fixture
def recipe(models, tmp_path):
    """Write a recipe with given parameters."""
    for t, state in enumerate(models):
        save_file(state, tmp_path / f"m{t}.safetensors")

    def write(method="epimer_free", **parameters):
        content = {
            "merge_method": method,
            "base_model": "m0.safetensors",
            "models": [{"model": f"m{t}.safetensors"} for t in range(1, TASKS + 1)],
            "parameters": parameters,
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(content))
        return tmp_path / "recipe.yaml"

    return write


@pytest.fixture
def free(monkeypatch):
    """Set the bytes that are free on this machine."""
    return lambda bytes_: monkeypatch.setattr("epimer.engine.memory.available_memory", lambda: bytes_)


def planned(recipe):
    return plan_merge(recipe).memory


def plan(method, options, shape=(768, 2688), tasks=8, dtype=torch.float32, kind="kronecker"):
    row, W = epimer.describe_method(method), header(shape, dtype)
    curvature = CurvatureSize()
    if row.needs_curvature:
        curvature = CurvatureSize(4 * tasks * sum(side**2 for side in shape), kind)
    inputs = TensorInputs(tasks, dtype, (tasks + 1) * W.nbytes, curvature=curvature)
    return memory_of(row, "matrix", W, inputs, row.resolve(options))


def test_a_plan_of_the_full_space_counts_factors_that_are_formed_for_it_and_none_twice():
    """Of each task DDᵀ and DᵀD in float64; those that were measured are used as they are, one of them widened."""
    factors, widest = 8 * 8 * (768**2 + 2688**2), 8 * 2688**2
    assert plan("epimer_free", {"basis": "full"}) > plan("epimer_free", {"basis": "tensor"}) + factors
    for method in ("epimer_kron", "mats"):
        tensor, full = (plan(method, {"basis": basis, "rank": 32}) for basis in ("tensor", "full"))
        assert tensor + widest < full < tensor + factors
    assert plan("epimer_free", {"basis": "tensor"}) < factors


@pytest.mark.parametrize("method", ["regmean", "wudi", "fisher"])
def test_sums_need_no_room_per_task_but_its_task_vector_and_curvature(method):
    kind = "diagonal" if method == "fisher" else "kronecker"
    few, many = (plan(method, {}, tasks=tasks, kind=kind) for tasks in (4, 8))
    curvature = 0 if method == "wudi" else 4 * (768**2 + 2688**2)
    assert many - few == pytest.approx(1.2 * 4 * (4 * 768 * 2688 + curvature), rel=0.01)


@pytest.mark.parametrize("method", ["epimer", "epimer_kron", "epimer_free", "tsv"])
def test_a_plan_never_falls_with_rank_tasks_or_precision(method):
    def size(**more):
        return plan(method, {"rank": more.pop("rank", 32)}, **more)

    assert size(rank=8) <= size(rank=32) <= size(rank=96)
    assert size(tasks=2) < size(tasks=4) < size(tasks=8)
    assert size() < size(dtype=torch.float64)


def test_a_method_of_another_package_is_planned_by_its_two_numbers():
    row = Method(
        name="own", summary="", equation="", citation="", merge=None, options=MethodOptions(), workspace=(2.0, 3.0)
    )
    W = header((64, 128), torch.float32)
    found = memory_of(row, "matrix", W, TensorInputs(4, torch.float32, 5 * W.nbytes), row.options)
    assert found == pytest.approx(1.2 * W.nbytes * (5 + 4 * 2 + 3), rel=1e-3)


def test_a_method_may_count_its_bytes_itself():
    def count(load):
        return 1000 * load.options.rank * load.tasks

    row = Method(
        name="own", summary="", equation="", citation="", merge=None, workspace=count,
        options=FrechetOptions(basis="full", rank=7),
    )  # fmt: skip
    W = header((64, 128), torch.float32)
    found = memory_of(row, "matrix", W, TensorInputs(4, torch.float32, 0), row.options)
    assert found == pytest.approx(1.2 * (5 * W.nbytes + 28000), rel=1e-3)


def test_only_the_anchor_of_singular_vectors_is_planned_with_them():
    stretched, average, total, tsv = (
        plan("epimer_kron", {"basis": "full", "anchor": anchor}) for anchor in ("stretched", "average", "sum", "tsv")
    )
    assert stretched == average == total
    assert tsv - stretched == pytest.approx(1.2 * 4 * 8 * 32 * (768 + 2688), abs=2)


def test_a_calibration_is_planned_with_the_svd_of_the_merge():
    """A whole SVD in float64 has the matrix, and both its singular vectors: 3 m n entries; p x p coordinates less."""

    def size(method, basis, least):
        return plan(method, {"rank": 1, "basis": basis, "calibrate": least}, tasks=2)

    task_vectors = 3 * 4 * 768 * 2688
    assert size("epimer_free", "tagged", 0.5) > 1.2 * (task_vectors + 8 * 3 * 768 * 2688)
    for method in ("epimer_free", "wudi"):
        assert size(method, "tagged", 0.5) > size(method, "tagged", None)
        assert size(method, "tagged", 0.5) > size(method, "tensor", 0.5)


def memory_in_python(method, states, weights=None, curvature=None, **parameters):
    row = epimer.describe_method(method)
    participants = state_dict_participants(states[0], states[1:])
    return plan_state_dicts(participants, row, row.resolve(parameters), weights, curvature).memory


def test_a_layer_stored_inputs_first_is_planned_as_its_transpose():
    torch.manual_seed(0)
    stored = [{"h.0.attn.c_attn.weight": torch.randn(64, 192)} for _ in range(3)]
    linear = [{"h.0.attn.linear.weight": state["h.0.attn.c_attn.weight"].T.contiguous()} for state in stored]
    assert memory_in_python("wudi", stored) == memory_in_python("wudi", linear)


@pytest.mark.parametrize("method", ["tsv", "epimer_free"])
def test_a_model_of_weight_zero_is_planned_as_read_and_not_merged(method, models):
    """It takes the room of its task vector; ranks are those of the other models."""
    with_zero = memory_in_python(method, [*models, models[1]], [1, 1, 0], rank=None)
    assert with_zero - memory_in_python(method, models, rank=None) == pytest.approx(1.2 * models[0][NAME].nbytes, abs=2)


def test_tensors_that_are_in_memory_are_not_counted_again(models, recipe):
    held, read = memory_in_python("average", models), planned(recipe("average"))
    assert read - held == pytest.approx(1.2 * 3 * models[0][NAME].nbytes, abs=2)


def test_a_merge_that_needs_more_than_is_free_is_refused_with_what_fits(recipe, free, tmp_path):
    file = recipe(basis="full")
    needed, fitting = planned(file), planned(recipe(basis="tensor"))
    assert fitting < needed
    free((needed + fitting) // 2)
    file = recipe(basis="full")
    before = sorted(tmp_path.iterdir())
    done = run("merge", file, tmp_path / "out")
    assert done.code == 2
    assert sorted(tmp_path.iterdir()) == before
    (line,) = done.err.strip().splitlines()
    sizes = f"'{NAME}' needs {format_size(needed)} of memory and {format_size((needed + fitting) // 2)} are free"
    assert sizes in line
    assert f"take basis: tensor ({format_size(fitting)})" in line
    assert run("merge", recipe(basis="tensor"), tmp_path / "out").code == 0


def test_a_limit_of_ones_own_that_is_too_low_is_refused_with_what_fits(models, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("epimer.engine.memory.resident_memory", lambda: 0)
    file = recipe(basis="full")
    limit = planned(file) + SLACK - 1
    done = run("merge", file, tmp_path / "out", "--max-memory", limit)
    assert done.code == 2
    fitting = planned(recipe(basis="tensor"))
    assert f"GB, or take basis: tensor ({format_size(fitting)})." in done.err
    assert "or take" not in run("merge", recipe("average"), tmp_path / "out", "--max-memory", 1000).err


@pytest.mark.parametrize("method", ["iso_cts", "dare"])
def test_where_no_setting_fits_a_method_that_needs_no_curvature_is_named(free, method):
    wide = torch.ones(1, 1).expand(4096, 14336)  # takes no memory
    states = [{NAME: wide} for _ in range(4)]
    row, participants = epimer.describe_method(method), state_dict_participants(states[0], states[1:])
    plan = plan_state_dicts(participants, row, row.resolve({}), None, None)
    fitting = memory_in_python("epimer_free", states)
    assert plan.memory > fitting
    free(fitting)
    with pytest.raises(
        ParameterError, match=rf"are free; take merge_method: epimer_free \({format_size(fitting)}\)\.$"
    ):
        RunOptions().budget(plan.parts)
    free(1000)
    with pytest.raises(ParameterError, match=rf"free some, or give '{NAME}' the rule 'average', which takes parts\.$"):
        RunOptions().budget(plan.parts)
    with pytest.raises(
        ParameterError, match=rf"; give .*GB, or give '{NAME}' the rule 'average', which takes parts\.$"
    ):
        RunOptions(max_memory=1000).budget(plan.parts)


def test_a_rank_that_fits_is_named(recipe, free, tmp_path):
    needed, fitting = planned(recipe(rank=128)), planned(recipe(rank=16))
    free(fitting)
    with pytest.raises(ParameterError, match=r"take rank: 16 \("):
        epimer.merge(recipe(rank=128), tmp_path / "out", progress=False, device="cpu")
    assert needed > fitting
    epimer.merge(recipe(rank=16), tmp_path / "out", progress=False, device="cpu")


def test_a_dry_run_tells_the_plan_and_that_it_does_not_fit(recipe, free):
    file = recipe(basis="full")
    needed = planned(file)
    free(needed - 1)
    done = run("merge", file, "--dry-run", "--json")
    told = json.loads(done.out)
    assert done.code == 2
    assert told["totals"]["memory"] == needed
    assert "are free" in told["problems"][0]
    free(needed)
    assert run("merge", file, "--dry-run", "--json").code == 0


def test_a_basis_and_a_diagnosis_are_refused_alike(recipe, free, tmp_path):
    file = recipe()
    free(10_000)
    for command in (["diagnose", file], ["basis", file, tmp_path / "basis"]):
        done = run(*command)
        assert done.code == 2
        assert f"'{NAME}' needs" in done.err
        assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "basis").exists()


def test_a_diagnosis_is_planned_with_the_curvature_on_its_basis_whatever_it_forecasts(models, free):
    curvature = [{NAME: epimer.Diagonal(torch.rand(SHAPE))} for _ in range(TASKS)]
    free(memory_in_python("epimer", models, curvature=curvature))
    with pytest.raises(ParameterError, match="are free"):
        epimer.diagnose_state_dicts(models[0], models[1:], curvature=curvature, methods=["average"])


def test_a_sweep_is_refused_before_the_first_merge_is_scored(models, free):
    scored = []
    settings = {"methods": ["average", "epimer_free"], "parameters": {"epimer_free": {"basis": "full"}}}
    free(memory_in_python("epimer_free", models, basis="full") - 1)
    with pytest.raises(ParameterError, match=r"take basis: tensor"):
        epimer.sweep_state_dicts(models[0], models[1:], lambda state, split: scored.append(split), **settings)
    assert scored == []


def test_a_sweep_of_a_recipe_is_refused_alike(recipe, free, tmp_path, monkeypatch):
    (tmp_path / "judge_of_nothing.py").write_text("def score(state):\n    raise AssertionError('scored')\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = recipe(basis="full")
    free(planned(file) - 1)
    done = run("sweep", file, "--eval", "judge_of_nothing:score", "--methods", "average,epimer_free")
    assert done.code == 2
    (line,) = done.err.strip().splitlines()
    assert f"'{NAME}' needs" in line
    assert "take basis: tensor" in line


def test_a_merge_in_python_is_refused_and_a_limit_of_ones_own_is_kept_to(models, free, recipe, tmp_path):
    free(10_000)
    with pytest.raises(ParameterError, match=rf"'{NAME}' needs .* kB are free; free some"):
        epimer.merge_state_dicts(models[0], models[1:], "average")
    epimer.merge(recipe("average"), tmp_path / "out", max_memory="4GB", progress=False, device="cpu")


def test_a_streamed_tensor_is_planned_by_the_rows_that_are_read_at_a_time(tmp_path):
    """Blocks of 2^20 entries of the base, of T models and of the result, whatever the tensor's height."""

    def size(rows, method="average"):
        for t in range(3):
            save_file({NAME: torch.zeros(rows, 1024)}, tmp_path / f"m{t}.safetensors")
        models = [{"model": str(tmp_path / f"m{t}.safetensors")} for t in (1, 2)]
        recipe = {"merge_method": method, "base_model": str(tmp_path / "m0.safetensors"), "models": models}
        return plan_merge(recipe).memory

    sums = 2 * 4 * STREAMED + SCRAP_CHUNKS * 4 * CHUNK  # a model's part and the sum, and what the heap keeps
    assert size(4096) == size(2048) == pytest.approx(1.2 * (4 * 4 * STREAMED + sums), rel=1e-6)
    assert size(1030) == pytest.approx(1.2 * (4 * 4 * 515 * 1024 + sums), rel=1e-6)  # two blocks of one size
    assert size(4096, "dare") > 2 * size(2048, "dare") * 0.99  # which looks at the whole tensor


def holds(tmp_path, *cases):
    """Measure cases in processes of their own, and return them."""
    file = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "benchmarks" / "plans_hold.py", *cases, "--json", str(file)]
    subprocess.run(command, check=True, timeout=900)  # fails where a plan is below the peak, or over 1.5 times it
    return json.loads(file.read_text())["rows"]


@pytest.mark.slow
def test_merges_entry_by_entry_and_by_singular_vectors_take_what_their_plans_say(tmp_path):
    methods = ["average", "nan", "ties", "della", "iso_c", "tsv"]
    rows = holds(tmp_path, "--methods", *methods, "--shapes", "768x3072", "--tasks", "4")
    assert {row["method"] for row in rows} == set(methods)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["epimer_free", "epimer_kron"])
def test_a_merge_in_the_full_space_takes_what_its_plan_says(method, tmp_path):
    kinds = ["--kinds", "kronecker"] if method == "epimer_kron" else []
    cases = ["--methods", method, "--bases", "full", "--shapes", "768x2688", "--tasks", "8", *kinds]
    (row,) = holds(tmp_path, *cases)
    assert row["taken"] > 1 << 28
