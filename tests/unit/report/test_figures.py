"""An experiment's figure as a file: all of its panels under its title, on white, in plain colours."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import found
from epimer.records import Experiment, Lines
from epimer.report.charts.frame import Chart, label, sheet
from epimer.report.figures import figure_file, figures_of

SPACE = "{http://www.w3.org/2000/svg}"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "glyphs8-2026-11-16"
PANELS = {
    "alpha": 2, "eta": 2, "landscape": 9, "performance": 1, "worst-task": 1, "cost": 1, "metrics": 1, "samples": 1,
    "tasks": 1, "fisher-fraction": 1,
}  # fmt: skip


def experiment(name):
    return Experiment.from_dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def texts(root):
    return ["".join(one.itertext()) for one in root.iter(f"{SPACE}text")]


@pytest.mark.parametrize("name", list(PANELS))
def test_figures_of_the_repositorys_results(name):
    record = experiment(name)
    content = figure_file(record)
    root = ElementTree.fromstring(content.encode())
    assert not re.search(r"var\(|data-|nan|inf\b", content)
    assert root[2].attrib == {"width": root.attrib["width"], "height": root.attrib["height"], "fill": "#ffffff"}
    assert record.title in texts(root)
    groups = [one for one in root if one.tag == f"{SPACE}g"]
    assert len(groups) == len(figures_of(record)) == PANELS[name]
    corners = [tuple(map(int, re.findall(r"\d+", one.attrib["transform"]))) for one in groups]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for (x, y), figure in zip(corners, figures_of(record), strict=True):
        assert x + figure.chart.width <= width
        assert y + figure.chart.height <= height
        assert len(groups) == 1 or figure.title in texts(root)


def test_marks_tell_their_values_without_a_script():
    record = experiment("performance")
    root = ElementTree.fromstring(figure_file(record).encode())
    titles = [one.text for one in root.iter(f"{SPACE}title")]
    for row in record.data:
        assert f"{row['method']}\naverage {100 * row['average']:.2f}%" in titles
        assert f"{row['method']}\nworst {100 * row['worst']:.2f}%" in titles


def test_the_second_panel_of_lines_is_on_the_left():
    record = experiment("eta")
    left, right = figures_of(record)
    assert left.title == "η / F(x̄) by k"
    assert right.title == "Accuracy margin by k: epimer - tsv (projected)"
    margins = [[cell.value for cell in row[2:]] for row in right.table.rows]
    assert margins == [[row["difference"], *row["between"]] for row in record.data]


def test_counts_are_written_to_their_last_digit():
    assert "1024" in texts(ElementTree.fromstring(figure_file(experiment("samples")).encode()))


def test_losses_are_drawn_as_losses():
    lines = Lines("T", "average loss", metric="loss")
    for x in (2, 3, 4):
        lines.add("tsv", x, -0.1 * x, -0.12 * x, -0.09 * x)
    record = Experiment("tasks", "Number of tasks", ["method"], [], [], figure=lines)
    (figure,) = figures_of(record)
    assert "T 3: 0.3 [0.27, 0.36]" in figure.chart.content
    assert [cell.show for cell in figure.table.rows[1][2:]] == ["0.3", "0.27", "0.36"]


def test_without_a_figure_there_is_no_file():
    assert figure_file(Experiment("defaults", "Settings", ["method"], [["tsv"]], [{"method": "tsv"}])) is None
    assert figure_file(Experiment("tasks", "T", ["method"], [], [], figure=Lines("T", "accuracy"))) is None


def test_names_in_records_stay_text():
    evil = "<script>alert(1)</script>"
    record = Experiment.from_dict(json.loads(json.dumps(found.cost()).replace("epimer_kron", evil)))
    root = ElementTree.fromstring(figure_file(record).encode())
    assert not list(root.iter(f"{SPACE}script"))
    assert any(evil in text for text in texts(root))


def test_a_sheet_has_rows_and_columns():
    charts = [(f"panel {i}", Chart(100, 50 + 10 * i, label(0, 0, f"{i}"), f"chart {i}")) for i in range(3)]
    made = sheet("title", charts, 2)
    assert made.describes == "chart 0 chart 1 chart 2"
    places = [tuple(map(int, spot)) for spot in re.findall(r"translate\((\d+) (\d+)\)", made.content)]
    assert places[0][1] == places[1][1] < places[2][1]
    assert places[0][0] == places[2][0] < places[1][0]
    assert places[1][0] - places[0][0] > 100
    assert places[2][1] - places[0][1] > 60
    assert made.width > places[1][0] + 100
    assert made.height > places[2][1] + 70
