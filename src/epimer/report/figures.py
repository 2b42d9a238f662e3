"""An experiment's figure, as it is in its record: on the page, and as an SVG file of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from epimer.records import Dots, Experiment, Lines, Maps
from epimer.records.experiment import Point
from epimer.report.blocks import Figure, Rows, Table, cells
from epimer.report.charts.bars import Row, ranges
from epimer.report.charts.frame import sheet
from epimer.report.charts.landscape import landscape
from epimer.report.charts.lines import Labels, Series, lines
from epimer.report.markup import slug
from epimer.report.numbers import Unit, drawable, finite, number, widened
from epimer.report.palette import colour

ETAS = {"eta_fraction": "η / F(x̄)", "eta": "η, mean diagonal 1", "eta_unit_trace": "η, trace 1"}
"""the normalisations of η"""
exact = partial(number, digits=5)
DASHES = ("", "6 4", "2 3", "9 3 2 3")


def figure_file(experiment: Experiment) -> str | None:
    """Return the SVG file of an experiment's figure, with all of its panels; None where it has no figure."""
    panels = figures_of(experiment)
    if not panels:
        return None
    columns = 2 if isinstance(experiment.figure, Lines) else math.ceil(len(panels) ** 0.5)
    chart = sheet(experiment.title, [(one.title, one.chart) for one in panels], columns)
    return Figure(experiment.name, experiment.title, chart, panels[0].table).file(slug(experiment.name))


def figures_of(experiment: Experiment) -> list[Figure]:
    """Return the panels of an experiment's figure: lines, dots, or the maps of a landscape."""
    match experiment.figure:
        case Lines() if experiment.name == "alpha":
            return by_method(experiment)
        case Lines(beside=beside) as figure:
            panels = [figure] if beside is None else [beside, figure]
            return [line_figure(experiment.name, one) for one in panels if one.lines]
        case Dots(dots=dots) as figure:
            return [dot_figure(experiment.name, figure)] if dots else []
        case Maps() as figure:
            return [map_figure(figure), *(map_figure(figure, task) for task in figure.maps)]
        case None:
            return []


def by_method(experiment: Experiment) -> list[Figure]:
    """Return scores over α: a chart per method, colours for ranks, dashes for aggregators."""
    figure = experiment.figure
    assert isinstance(figure, Lines)
    unit, labels = _axes(figure)
    span = widened([v for points in figure.lines.values() for _, *ys in points for v in finite(ys)] or [0.0, 1.0])
    count = max((len(row["tasks"]) for row in experiment.data if isinstance(row.get("tasks"), dict)), default=0)
    methods: dict[str, dict[str, list[Point]]] = {}
    for name, points in figure.lines.items():
        method, _, rest = name.partition(", ")
        methods.setdefault(method, {})[rest or method] = points
    figures, at = [], [(count**-0.5, "1/√T")] if count else []
    for method, some in methods.items():
        chart = lines(
            series(some), labels, f"{figure.y} of {method} over {figure.x}.", span=span, at=at, log=figure.log
        )
        table = point_table(some, figure.x, figure.y, unit)
        figures.append(Figure(f"alpha {method}", f"{method} over α", chart, table))
    return figures


def line_figure(name: str, figure: Lines) -> Figure:
    """Return lines as the record has them."""
    unit, labels = _axes(figure)
    said = f"{figure.y} against {figure.x}: {', '.join(figure.lines)}."
    chart = lines(series(figure.lines), labels, said, log=figure.log)
    title = capital(f"{figure.y} by {figure.x}")
    if len(figure.lines) == 1 and figure.y not in figure.lines:  # a legend is drawn for several lines only
        title += f": {next(iter(figure.lines))}"
    return Figure(name, title, chart, point_table(figure.lines, figure.x, figure.y, unit))


def dot_figure(name: str, figure: Dots) -> Figure:
    """Return dots as the record has them; values that are not finite are left out."""
    unit = _unit((value for values in figure.dots.values() for value in values), figure.x, figure.metric)
    first, second = figure.names
    rows = []
    for row, (value, low, high, other) in figure.dots.items():
        tips = f"{row}\n{first} {unit.exact(value)}", f"{row}\n{second} {unit.exact(other)}"
        if drawable(value):
            rows.append(Row(row, value, tips[0], low, high, other, tips[1]))
    said = f"{figure.x}: {first} and {second} of {len(rows)} rows."
    chart = ranges(rows, unit.tick, figure.names, said, axis_name(figure.x, unit), log=figure.log)
    body: Rows = [
        [row, *cells((value, *unit.ends(low, high), other), unit.exact, unit.plain)]
        for row, (value, low, high, other) in figure.dots.items()
    ]
    table = Table(["row", first, "low", "high", second], body, f"{figure.x}: {first} and {second}")
    return Figure(name, capital(f"{first} and {second}"), chart, table)


def map_figure(figure: Maps, task: str | None = None) -> Figure:
    """Return the loss on the plane of the models: of one task, or summed over all of them."""
    losses = figure.joint if task is None else figure.maps[task]
    known = finite(v for row in losses for v in row) or [0.0]
    marked = ", ".join(point.name for point in figure.points)
    said = f"From {number(min(known))} to {number(max(known))}; models marked: {marked}."
    shown = [point for point in figure.points if drawable(point.a) and drawable(point.b)]
    chart = landscape(figure.a, figure.b, losses, shown, task or "", said)
    rows: Rows = [
        [p.name, p.kind, *cells((p.a, p.b, p.off, p.joint if task is None else p.losses.get(task)), exact)]
        for p in figure.points
    ]
    headings = ["model", "kind", "a", "b", "off the plane", "its own loss"]
    table = Table(headings, rows, f"Models on the plane; {task or 'all tasks, summed'}")
    title = "Loss of all tasks, summed" if task is None else f"Loss on {task}"
    return Figure(f"landscape {task or 'all'}", title, chart, table)


def eta_figures(key: str, data: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Return η against rank under each normalisation; a row has k and the values of η."""
    figures = {}
    for quantity, name in ETAS.items():
        values = [(row["k"], row[quantity]) for row in data if has_numbers(row, "k", quantity)]
        line, labels = series({name: [(k, y, y, y) for k, y in values]}), Labels("rank k", name, number, exact)
        chart = lines(line, labels, f"{name} against rank.", zero=True)
        rows: Rows = [[*cells([k], number), *cells([y], exact)] for k, y in values]
        table = Table(["k", name], rows, f"{name} by rank")
        figures[name] = Figure(f"{key} {quantity}", "η against rank", chart, table)
    return figures


def series(named: Mapping[str, Sequence[Point]]) -> list[Series]:
    """Return lines with colours; names of two parts, as `k = 4, sum`, take a dash for the second."""
    split = [name.rpartition(", ") for name in named]
    if all(first for first, _, _ in split):
        firsts = list(dict.fromkeys(first for first, _, _ in split))
        lasts = list(dict.fromkeys(last for _, _, last in split))
        looks = [(firsts.index(first), lasts.index(last)) for first, _, last in split]
    else:
        looks = [(i, i // 8) for i in range(len(named))]
    return [
        Series(name, points, colour(i), DASHES[j % len(DASHES)])
        for (name, points), (i, j) in zip(named.items(), looks, strict=True)
    ]


def point_table(named: Mapping[str, Sequence[Point]], x_name: str, y_name: str, unit: Unit) -> Table:
    """Return the numbers of lines."""
    rows: Rows = [
        [name, *cells([x], exact), *cells((y, *unit.ends(low, high)), unit.exact, unit.plain)]
        for name, points in named.items()
        for x, y, low, high in points
    ]
    return Table(["line", x_name, y_name, "low", "high"], rows, f"{y_name} by {x_name}")


def has_numbers(row: Mapping[str, Any], *keys: str) -> bool:
    """Whether a row has numbers under all keys."""
    return all(isinstance(row.get(key), int | float) and not isinstance(row[key], bool) for key in keys)


def axis_name(name: str, unit: Unit) -> str:
    """Return an axis's name with its unit."""
    return name + (", %" if unit.share else "")


def capital(text: str) -> str:
    """Return a sentence with a capital at its beginning; a symbol as η stays as it is."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _unit(values: Iterable[float], axis: str, metric: str | None) -> Unit:
    """Return how a figure's values are shown; older records name no metric, but an axis of accuracies is named so."""
    if metric is None and ("accuracy" not in axis or "margin" in axis):
        return Unit(False)
    return Unit.of(values, metric)


def _axes(figure: Lines) -> tuple[Unit, Labels]:
    unit = _unit((y for points in figure.lines.values() for _, y, _, _ in points), figure.y, figure.metric)
    return unit, Labels(figure.x, axis_name(figure.y, unit), unit.tick, unit.exact, unit.ends)
