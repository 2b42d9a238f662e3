"""A plan says how long a merge takes: counts of known arithmetic, and sums over jobs and workers."""

import json
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

import epimer
from commands import run
from epimer.methods.workspace import Workload
from epimer.plan.merge import plan_state_dicts
from epimer.plan.participants import state_dict_participants
from epimer.plan.time import Work, measured_speeds, seconds, times, work_of

KERNELS = {
    "single",
    "double",
    "eigen",
    "eigen_single",
    "leading",
    "svd",
    "selected",
    "sorted",
    "random",
    "bytes",
    "files",
}


def work(method, shape=(768, 3072), tasks=8, kind=None, curvature=0, **options):
    row = epimer.describe_method(method)
    return work_of(row, Workload(shape, tasks, 4, row.resolve(options), kind or row.curvature, curvature))


@pytest.mark.parametrize("method", [name for name in epimer.list_methods() if name != "auto"])
def test_every_method_has_an_estimate_that_grows_with_the_tensor_and_the_tasks(method):
    speeds = measured_speeds(torch.device("cpu"), 1)
    assert set(speeds) == KERNELS
    assert all(speed > 0 for speed in speeds.values())
    small, wide, many = (seconds(work(method, **case), speeds) for case in ({}, {"shape": (1536, 3072)}, {"tasks": 16}))
    assert 0 < small < wide
    assert small < many


def test_a_one_sided_solve_is_counted_by_its_products():
    """Of each task (X - D)A in float64, then a decomposition with its solve and its residual; wudi forms DᵀD twice."""
    m, n, tasks = 768, 3072, 8
    product = 2 * m * n * n
    assert work("regmean", (m, n), tasks)["double"] == (tasks + 3) * product + n**3
    assert work("wudi", (m, n), tasks)["single"] == 2 * tasks * product


def test_restricting_factors_is_counted_by_its_products():
    m, n, p = 768, 3072, 256
    free = {"iterations": 1, "aggregator": "mean", "calibrate": None}
    measured, projected = (
        work("epimer_kron", (m, n), kind=kind, **free)["single"] for kind in ("kronecker", "projected")
    )
    assert measured - projected == 8 * 2 * (m * m * p + n * n * p + (m + n) * p * p)


@pytest.mark.parametrize(("damping", "preconditioning"), [(1.0, 0), (1e-2, 4)])
def test_conjugate_gradients_are_counted_up_to_the_steps_that_are_allowed(damping, preconditioning):
    """With little damping a step also has four products with the eigenvectors of mean factors."""
    few, more = (work("mats", (256, 512), iterations=steps, damping=damping)["single"] for steps in (10, 20))
    assert more - few == pytest.approx(10 * (2 * 8 + preconditioning) * 256 * 512 * (256 + 512))


def test_selecting_sorting_and_drawing_are_counted_where_entries_are_dropped():
    """Breadcrumbs finds two k-th largest entries a task, Arcee Fusion three quartiles, DELLA sorts and draws once."""
    entries = 768 * 3072
    assert work("breadcrumbs", tasks=4)["selected"] == 2 * 4 * entries
    assert work("arcee_fusion", tasks=1)["selected"] == 3 * entries
    assert work("della", tasks=4)["sorted"] == work("della_linear", tasks=4)["sorted"] == 4 * entries
    for method in ("mergekit_della", "mergekit_breadcrumbs", "mergekit_ties"):  # which keep all by default
        whole, pruned = work(method), work(method, density=[0.3, *[1.0] * 7])
        assert whole["selected"] == whole["sorted"] == 0
        assert pruned["selected"] + pruned["sorted"] > 0
    assert work("dare")["selected"] == work("dare")["sorted"] == 0
    assert work("dare", tasks=4)["random"] == work("della", tasks=4)["random"] == 4 * entries
    assert work("sce")["selected"] == 0 < work("sce", select_topk=0.5)["selected"]


def test_work_adds_up():
    assert times(0.5, Work(svd=4)) + Work(svd=1, bytes=2) == Counter(svd=3, bytes=2)
    assert seconds(Work(svd=3, bytes=2), {"svd": 2.0, "bytes": 0.5}) == 7.0


def test_a_plan_divides_its_jobs_among_workers_and_none_itself():
    states = [{f"layers.{i}.weight": torch.zeros(64, 64) for i in range(4)} for _ in range(3)]
    row = epimer.describe_method("tsv")
    plan = plan_state_dicts(state_dict_participants(states[0], states[1:]), row, row.options, None, None)
    speeds = dict.fromkeys(KERNELS, 1.0)
    one = plan.seconds(speeds, 1)
    assert one == pytest.approx(4 * seconds(plan.jobs[0].work, speeds))
    assert plan.seconds(speeds, 2) == pytest.approx(one / 2)
    assert plan.seconds(speeds, 100) == pytest.approx(one / 4)


def test_a_tensor_in_parts_takes_as_long_as_whole():
    states = [{"layer.weight": torch.zeros(9000, 9000)} for _ in range(3)]
    row = epimer.describe_method("average")
    plan = plan_state_dicts(state_dict_participants(states[0], states[1:]), row, row.options, None, None)
    assert len(plan.parts) > 1
    whole = plan.jobs[0].work["bytes"]
    assert sum(part.work["bytes"] for part in plan.parts) == pytest.approx(whole)


def test_a_dry_run_tells_the_time(tmp_path):
    for name in "bcd":
        save_file({"layer.weight": torch.randn(32, 32)}, tmp_path / f"{name}.safetensors")
    models = [{"model": str(tmp_path / f"{name}.safetensors")} for name in "cd"]
    recipe = {"merge_method": "tsv", "base_model": str(tmp_path / "b.safetensors"), "models": models}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    told = json.loads(run("merge", tmp_path / "recipe.yaml", "--dry-run", "--json").out)
    assert 0 < told["totals"]["seconds"] < 10
    assert told["totals"]["starting"] > 0
    assert told["tensors"][0]["seconds"] >= 0
    shown = " ".join(run("merge", tmp_path / "recipe.yaml", "--dry-run").out.split())
    assert re.search(r"about \S+ s with \d+ at a time, after \S+ s to start and plan", shown)
