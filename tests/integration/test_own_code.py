"""Suites in Python: whatever fails in the user's own code is one line that names suite, task and their error."""

from __future__ import annotations

import importlib
import json
import os
import sys
import weakref

import pytest
import torch
from safetensors.torch import save_file

from commands import run, start
from epimer.evaluation.user_code import suite_from_entry_point
from epimer.experiments.bench import Bench

MODULE = """
from dataclasses import replace
import torch
from torch import nn
from epimer import Split, Suite, SuiteTask

KEPT = nn.Linear(2, 2)

def network(state, task):
    made = nn.Linear(2, 2)
    made.load_state_dict(dict(state))
    return made.eval()

def kept(state, task):
    KEPT.load_state_dict(dict(state))
    return KEPT.eval()

class Fails(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no forward today")

class Gone:
    def __len__(self):
        return 10
    def batches(self, size, order=None):
        yield torch.zeros(5, 2), torch.zeros(5).long()
        raise OSError("disk gone")

class Single(Gone):
    def batches(self, size, order=None):
        yield torch.zeros(5, 2)

class Endless(Gone):
    def __len__(self):
        raise ValueError("who knows")

def make():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    splits = [dict.fromkeys(("train", "val", "test"), Split(x, (x[:, i] > 0).long())) for i in (0, 1)]
    tasks = [SuiteTask(f"column{i}", ["low", "high"], splits[i]) for i in (0, 1)]
    states = [{"weight": torch.eye(2) * s, "bias": torch.zeros(2)} for s in (1.0, 2.0, 3.0)]
    return Suite("columns", states[0], states[1:], tasks, network)

def with_task(**changes):
    return replace(make(), tasks=[replace(task, **changes) for task in make().tasks])

def with_data(change):
    return replace(make(), tasks=[
        replace(task, splits={name: change(data) for name, data in task.splits.items()}) for task in make().tasks
    ])

def kept_network(): return replace(make(), network=kept)
def listed(): return with_task(score=lambda outputs, targets: [1.0] * len(targets))
def number(): return replace(make(), network=lambda state, task: 3)
def empty(): return with_data(lambda data: Split(data.x[:0], data.y[:0]))
def floats(): return with_data(lambda data: Split(data.x, data.y.float()))
def narrow(): return with_data(lambda data: Split(data.x[:, :1], data.y))
def strange(): return with_data(lambda data: Split(data.x, data.y + 5))
def no_batches(): return with_data(lambda data: [1, 2])
def gone(): return with_data(lambda data: Gone())
def single(): return with_data(lambda data: Single())
def endless(): return with_data(lambda data: Endless())
def no_tasks(): return replace(make(), tasks=[], models=[])
def no_splits(): return with_task(splits=None)
def forward(): return replace(make(), network=lambda state, task: Fails(2, 2))
def unnamed(): return replace(make(), names=lambda task: 1 / 0)
def lost(state, task): return network({**state, "bias": torch.full((2,), torch.nan)}, task)
def nan(): return replace(make(), network=lost)
def memory(): raise MemoryError
"""

EVAL = {
    "listed": ("columns: task 'column0'", "of type list", "a tensor with one number per sample"),
    "number": ("own_code:number: task 'column0': network returned int", "expected a torch.nn.Module"),
    "empty": ("columns: task 'column0' has no sample in test",),
    "narrow": ("own_code:narrow: task 'column0': the network's forward failed: RuntimeError: mat1 and mat2",),
    "strange": ("columns: task 'column0' has label 5 in test, expected 0 to 1", "2 classes"),
    "no_batches": ("own_code:no_batches: task 'column0': test data failed: AttributeError", "'batches'"),
    "gone": ("own_code:gone: task 'column0': test data failed: OSError: disk gone (own_code.py line 27).",),
    "single": ("own_code:single: task 'column0': test data failed: ValueError: too many values to unpack",),
    "endless": ("own_code:endless: task 'column0': test data failed: ValueError: who knows",),
    "no_tasks": ("own_code:no_tasks returned a suite without tasks",),
    "no_splits": ("own_code:no_splits failed: AttributeError", "'items'"),
    "forward": ("task 'column0': the network's forward failed: RuntimeError: no forward today (own_code.py line 20).",),
    "nan": ("columns: the model gets NaN or Inf as accuracy on 40 of 40 test samples of task 'column0'",),
    "memory": ("too little memory",),
}
BENCH = {
    "number": EVAL["number"],
    "floats": ("own_code:floats: task 'column0': loss failed: RuntimeError: ", "Float"),
    "narrow": EVAL["narrow"],
    "no_batches": ("own_code:no_batches: task 'column0': train data failed: AttributeError", "'batches'"),
    "gone": ("own_code:gone: task 'column0': train data failed: OSError: disk gone",),
    "forward": EVAL["forward"],
    "unnamed": ("own_code:unnamed: task 'column0': names failed: ZeroDivisionError: division by zero",),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(MODULE)
    (tmp_path / "linear").mkdir()
    save_file({"weight": torch.eye(2), "bias": torch.zeros(2)}, tmp_path / "linear" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize("case", EVAL)
def test_eval_says_in_one_line_what_is_wrong(here, case):
    ran = run("eval", f"own_code:{case}", "--model", "linear", "-o", "found.json")
    for words in EVAL[case]:
        assert words in ran.err
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert not (here / "found.json").exists()


@pytest.mark.parametrize("case", BENCH)
def test_bench_says_in_one_line_what_is_wrong(here, case):
    ran = run("bench", f"own_code:{case}", "--experiment", "cost", "-o", "out")
    for words in BENCH[case]:
        assert words in ran.err
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert not (here / "out").exists()


def test_guards_change_no_number(here):
    plain = importlib.import_module("own_code").make()
    for name in ("make", "kept_network"):
        suite = suite_from_entry_point(f"own_code:{name}")
        for state in (plain.base, *plain.models):
            assert all(map(torch.equal, suite.scores(state, "test"), plain.scores(state, "test")))
        curvatures = (Bench(one, keep=False).curvature("kronecker") for one in (suite, plain))
        for ours, theirs in zip(*curvatures, strict=True):
            assert list(ours) == list(theirs) == ["weight"]
            assert torch.equal(ours["weight"].A, theirs["weight"].A)
            assert torch.equal(ours["weight"].G, theirs["weight"].G)


def test_guarded_networks_are_let_go_at_once_and_guarded_once(here):
    suite, kept = suite_from_entry_point("own_code:make"), suite_from_entry_point("own_code:kept_network")
    seen = weakref.ref(suite.network(suite.base, suite.tasks[0]))
    assert seen() is None
    for task in kept.tasks:
        assert type(kept.network(kept.base, task)).__base__ is torch.nn.Linear


STOPPING = """
import os, signal
import my_code

CALLS = []

def network(state, task):
    CALLS.append(task.name)
    if len(CALLS) == {stop}:
        os.kill(os.getpid(), signal.SIGINT)
    return my_code.network(state, task)

def make():
    from dataclasses import replace
    return replace(my_code.make(), network=network)
"""


@pytest.mark.parametrize(("stop", "finished"), [(60, True), (1, False)])
def test_a_bench_that_is_stopped_says_what_its_folder_has(tmp_path, stop, finished):
    """A real Ctrl-C in the real command: the rows of finished methods are written, or nothing is."""
    (tmp_path / "my_code.py").write_text(MODULE)
    (tmp_path / "stopping.py").write_text(STOPPING.format(stop=stop))
    ran = start("bench", "stopping:make", "-o", "out", "-q", cwd=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert ran.code == 130
    if not finished:
        assert ran.err == "stopped; nothing was written.\n"
        assert not (tmp_path / "out").exists()
        return
    assert ran.err == "stopped; out has performance-unfinished.json.\n"
    record = json.loads((tmp_path / "out" / "performance-unfinished.json").read_text())
    merged = [row for row in record["data"] if not row.get("reference")]
    assert [row["method"] for row in merged][:2] == ["average", "task_arithmetic"]
    assert 2 <= len(merged) < 10
    assert all(0 <= row["average"] <= 1 for row in merged)
    assert record["notes"][0].startswith(f"Interrupted: only the {len(merged)} methods")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"performance-unfinished.{e}" for e in ("json", "md", "svg")
    }
