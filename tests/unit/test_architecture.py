"""The walks in docs/architecture.md: every stop exists, and none comes twice."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (through .*?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S))
STOP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", flags=re.M)


def names_in(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_there_are_four_walks():
    assert [name.split(":")[0] for name in SECTIONS] == [
        "through a merge", "through a measurement", "through a diagnosis", "through a bench",
    ]  # fmt: skip
    assert all(len(STOP.findall(text)) > 8 for text in SECTIONS.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_stop_exists_and_none_comes_twice(name):
    stops = STOP.findall(SECTIONS[name])
    assert len({file for file, _ in stops}) == len(stops)
    for file, function in stops:
        assert function in names_in(ROOT / "src" / "epimer" / file), f"{file}: {function}"


def test_what_the_table_of_extensions_names_exists():
    table = PAGE.split("## What an extension costs")[1]
    for file in re.findall(r"`((?:tests|examples|docs)/[\w/.]+)`", table):
        assert (ROOT / file).exists(), file
