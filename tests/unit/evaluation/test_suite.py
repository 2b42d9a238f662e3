"""Scores of samples: what counts as correct, which labels are refused, and that NaN is never scored or chosen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from epimer.errors import DataError
from epimer.evaluation.judges import by_agreement, by_suite
from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.experiments.bench import Bench, Candidate, references
from trained import make_suite
from trained import network as trained_network


def network(state, task):
    made = nn.Linear(4, 3)
    made.load_state_dict(dict(state))
    return made.eval()


@pytest.fixture
def suite():
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    base = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    models = [{"weight": torch.randn(3, 4), "bias": torch.zeros(3)} for _ in range(2)]
    splits = [dict.fromkeys(("train", "val", "test"), Split(x, (x @ m["weight"].T).argmax(1))) for m in models]
    tasks = [SuiteTask(f"task{t}", ["a", "b", "c"], split) for t, split in enumerate(splits)]
    return Suite("small", base, models, tasks, network)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


def broken(limit):
    """Return a network that gives NaN on the last of four samples where weights are longer than a limit."""

    def made(state, task):
        plain = network(state, task)

        def late(module, inputs, logits):
            if plain.weight.norm() > limit:
                logits[3::4, 0] = torch.nan
            return logits

        plain.register_forward_hook(late)
        return plain

    return made


def test_sweeps_refuse_them(suite):
    bad = replace(suite, network=broken(0.0))
    with pytest.raises(
        DataError, match="small: a merge gets NaN or Inf as accuracy on 15 of 60 val samples of task 'task0'"
    ):
        by_suite(bad)(suite.models[0], "val")
    with pytest.raises(DataError, match="NaN or Inf as agreement on 15 of 60 test samples of task 'task0'"):
        by_agreement(bad)(suite.models[0], "test")
    assert by_agreement(suite)(suite.models[0], "test").scores["task0"].mean() == 1


def test_benches_choose_other_scales(suite):
    bench = Bench(suite)
    whole, merged = bench.best(Candidate("average")), bench.merge(Candidate("average"))
    found = Bench(replace(suite, network=broken(0.8 * merged["weight"].norm()))).best(Candidate("average"))
    assert found.scale < 0.8 <= whole.scale
    assert found.test.average == bench.score(bench.scaled(merged, found.scale), "test").average


def test_targets_that_are_no_classes(suite):
    split = Split(torch.zeros(6, 4), torch.tensor([0, 1, 2, 3, 0, 0]))
    task = replace(suite.tasks[0], splits={"test": split})
    with pytest.raises(
        DataError, match=r"small: task 'task0' has label 3 in test, expected 0 to 2, as it has 3 classes"
    ):
        suite.scores_on(suite.base, task, "test")
    free = replace(task, classes=[], score=lambda outputs, targets: targets.double())
    assert suite.scores_on(suite.base, free, "test").tolist() == [0, 1, 2, 3, 0, 0]


def test_right_is_what_the_network_gets_right(trained):
    for state, task in zip(trained.models, trained.tasks, strict=True):
        test = task.splits["test"]
        expected = (trained_network(state, task)(test.x).argmax(1) == test.y).double()
        assert torch.equal(trained.scores_on(state, task, "test"), expected)
    assert references(Bench(trained))["fine-tuned"].average > 0.8


def test_a_truncated_suite_has_the_first_samples(trained):
    some = trained.truncated(test=30)
    whole, part = trained.scores(trained.base, "test"), some.scores(trained.base, "test")
    assert [len(scores) for scores in part] == [30] * 3
    assert all(torch.equal(a[:30], b) for a, b in zip(whole, part, strict=True))
    assert len(some.tasks[0].splits["val"]) == len(trained.tasks[0].splits["val"])
