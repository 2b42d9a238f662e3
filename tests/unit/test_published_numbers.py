"""The tables of results in README.md: every number is in the result file that the comment below the table names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\|.*\n\|[-| :]+\|\n((?:\|.*\n)+)", flags=re.M)
SOURCE = re.compile(r"\n<!-- benchmarks/results .*\n((?:.+: .+\n)+)(.+)\n-->")
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def numbers_in(cell: str) -> list[str]:
    return re.findall(NUMBER, cell)


def tables_of_results(page: str) -> list[tuple[list[list[str]], re.Match | None]]:
    """Return the rows of every table with numbers beside its first column, and the comment that follows it."""
    found = []
    for table in TABLE.finditer(page):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
        if any(numbers_in(re.sub(r"`[^`]*`", "", cell)) for row in rows for cell in row[1:]):
            found.append((rows, SOURCE.match(page, table.end())))
    return found


def measured(file: str, key: str, methods: list[str]) -> list[float]:
    """Return the values of a method in a result file, shares in percent."""
    rows = {row["method"]: row for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["data"]}
    value = next(rows[method] for method in methods if method in rows)[key]
    return [100 * one for one in (value.values() if isinstance(value, dict) else [value])]


def differing(rows: list[list[str]], source: re.Match) -> list[str]:
    """Return the cells that do not show, to their digits, the values of the files."""
    columns = [line.split(": ") for line in source[1].splitlines()]
    methods = [names.split(" = ") for names in source[2].split(", ")]
    wrong = []
    for row, names in zip(rows, methods, strict=True):
        for cell, (file, key) in zip(row[1:], columns, strict=True):
            shown = numbers_in(cell)
            digits = [len(number.partition(".")[2]) for number in shown]
            expected = measured(file, key, names) if shown else []
            if len(shown) != len(expected) or any(
                abs(float(number) - value) > 0.5001 * 10**-places
                for number, value, places in zip(shown, expected, digits, strict=True)
            ):
                wrong.append(f"{row[0]}: {cell}, {file} has {expected}")
    return wrong


def test_every_number_is_that_of_its_result_file():
    tables = tables_of_results(README)
    assert tables
    for rows, source in tables:
        assert source, f"no comment names the result files of the table with {rows[0]}"
        assert differing(rows, source) == []


@pytest.mark.parametrize(("old", "new"), [("89.6", "89.7"), ("82.3, 83.2, 81.8", "82.3, 83.2"), ("| 95 |", "| 96 |")])
def test_a_number_that_no_file_has_is_noticed(old, new):
    assert old in README
    ((rows, source),) = tables_of_results(README.replace(old, new, 1))
    assert len(differing(rows, source)) == 1


def test_a_table_without_files_is_noticed():
    page = README.replace("<!-- benchmarks/results", "<!-- results")
    ((_, source),) = tables_of_results(page)
    assert source is None
