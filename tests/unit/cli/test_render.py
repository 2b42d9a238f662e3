"""What commands print."""

import json
import re

import pytest

from epimer.cli import render


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_210_000, "3.2 MB"), (5e9, "5.0 GB"), (2.5e12, "2.50 TB")],
)
def test_sizes(count, text):
    assert render.size(count) == text


def test_shapes():
    assert [render.shape(shape) for shape in ([24, 20], [3], [])] == ["24 x 20", "3", "scalar"]


def test_text_is_printed_as_it_is(capsys):
    render.print_text("[bold]models[0][/bold] " + "x" * 500)
    render.print_notes(["[red] is no colour"])
    assert capsys.readouterr().out == "[bold]models[0][/bold] " + "x" * 500 + "\nnote: [red] is no colour\n"


def test_a_table_of_numbers(capsys):
    rows = [["one", "1"], ["[two]", "22.5"]]
    render.print_table(["model", "score [95%]"], rows, title="[a] title wider than its table", text_columns=1)
    assert capsys.readouterr().out.splitlines() == [
        "[a] title wider than its table",
        " model  score [95%] ",
        " one              1 ",
        " [two]         22.5 ",
    ]


def test_a_table_of_text(capsys):
    render.print_table(["tensor", "size"], [["weight", "8 B"], ["b[0]", "16 B"]])
    assert capsys.readouterr().out.splitlines() == ["tensor  size", "weight  8 B ", "b[0]    16 B"]


def test_a_narrow_terminal_wraps_text_and_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    render.print_table(["name", "text"], [["a", "some words that are long"]])
    assert len(capsys.readouterr().out.splitlines()) > 2
    render.print_table(["name", "number"], [["a long name of a layer", "0.123456789"]], text_columns=1)
    assert (
        re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()[1]
        == " a long name of a layer  0.123456789 "
    )


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_output(tmp_path, capsys, as_json, quiet):
    record, file = {"score": 0.5, "name": "η"}, tmp_path / "record.json"
    render.output(record, lambda: render.print_text("score 0.5"), file=file, as_json=as_json, quiet=quiet)
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    assert file.read_text() == text
    assert capsys.readouterr().out == (text if as_json else "" if quiet else "score 0.5\n")
