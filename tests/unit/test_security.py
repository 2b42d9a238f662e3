"""SECURITY.md and the faults of docs/robustness.md: every promise names its tests, and these exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("SECURITY.md", "docs/robustness.md"))
NAME = re.compile(r"`((?:tests/[\w/]+\.py)?)::(test_\w+)`")
PEERS = "tests/integration/test_silent_failures_of_peers.py"
FAULTS = "tests/integration/test_faults.py"


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[str]:
    """Return the rows of all tables, without their headings."""
    return [line for line in text.splitlines() if line.startswith("| ") and "| shown by |" not in line]


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("title", "default", "least"),
    [
        ("What is promised", "", 20),
        ("What goes wrong elsewhere without a word", PEERS, 10),
        ("Faults", FAULTS, 14),
    ],
)
def test_every_promise_names_tests_that_exist(title, default, least):
    found = rows(section(title))
    assert len(found) >= least
    for row in found:
        named, file = NAME.findall(row), default
        assert named, f"no test is named: {row}"
        assert len(named) == row.count("::"), f"a test is misspelled: {row}"
        for place, test in named:
            file = place or file
            assert test in names_in(file), f"{file}::{test}"


@pytest.mark.parametrize(("title", "file"), [("What goes wrong elsewhere without a word", PEERS), ("Faults", FAULTS)])
def test_the_tests_of_a_file_are_all_in_its_table(title, file):
    named = {test for _, test in NAME.findall(section(title))}
    assert {test for test in names_in(file) if test.startswith("test_")} <= named
