"""The table of an evaluation: totals are called what the tasks' scores are called."""

import pytest
import torch

from epimer.evaluation.evaluate import Evaluation, TaskScores


def evaluation(*metrics):
    scores = (torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]))
    tasks = [
        TaskScores(f"t{i}", metric, {"model": one}) for i, (metric, one) in enumerate(zip(metrics, scores, strict=True))
    ]
    return Evaluation("suite", "merged", "test", tasks)


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        (("accuracy", "accuracy"), "accuracy"),
        (("token-accuracy", "token-accuracy"), "token-accuracy"),
        (("accuracy", "token-accuracy"), "accuracy"),
        (("f1", "f1"), "f1"),
    ],
)
def test_the_total_has_the_name_of_the_tasks_scores(metrics, name):
    average, worst = list(evaluation(*metrics).rows())[-2:]
    assert (average[:2], worst[:2]) == (["average", name], ["worst", name])
    shown = ("50.0", "25.0") if name != "f1" else ("0.500", "0.250")
    assert (average[2].split()[0], worst[2]) == shown


def test_scores_of_different_kinds_have_no_total():
    assert [row[:2] for row in evaluation("accuracy", "loss").rows()] == [["t0", "accuracy"], ["t1", "loss"]]
