"""Published numbers stand beside ours in the table of performance, and nowhere else."""

from dataclasses import replace

from torch import nn

from epimer.evaluation.suite import Suite
from epimer.experiments.results import tabulate, text, with_published

SUITE = Suite(
    "s",
    {},
    [],
    [],
    lambda state, task: nn.Identity(),
    published={"A": {"tsv": 82.25, "ties": 70.0}, "B": {"tsv": 1.0}},
    remarks=["beware"],
)
RESULT = tabulate("performance", "p", {"method": text("method")}, [{"method": "tsv"}, {"method": "dare"}], ["ours"])


def test_columns_and_remarks():
    made = with_published(RESULT, SUITE)
    assert made.headings == ["method", "A", "B"]
    assert made.rows == [["tsv", "82.2", "1.0"], ["dare", "", ""]]
    assert made.notes == ["ours", "beware"]
    assert made.to_dict()["data"][0] == {"method": "tsv", "published": {"A": 82.25, "B": 1.0}}
    assert RESULT.notes == ["ours"]


def test_other_tables_and_suites_are_left_alone():
    alpha = replace(RESULT, name="alpha")
    assert with_published(alpha, SUITE) is alpha
    assert with_published(RESULT, replace(SUITE, published={})) is RESULT
