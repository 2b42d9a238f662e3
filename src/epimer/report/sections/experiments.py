"""What else was tried: α, η against rank, landscapes, and whatever has a table, lines or dots."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from epimer.report.blocks import (
    Block,
    Cell,
    Choice,
    Figure,
    Rows,
    Section,
    Side,
    Table,
    folded,
    heading,
    notes,
    paragraph,
)
from epimer.report.charts.bars import Range, ranges
from epimer.report.charts.landscape import landscape
from epimer.report.charts.lines import Labels, Series, lines
from epimer.report.kinds import Dots, Experiment, Lines, Maps, Records
from epimer.report.markup import Markup
from epimer.report.numbers import Unit, finite, number, percent, signed, widened
from epimer.report.palette import colour
from epimer.score_format import LOSSES, SHARES

DASHES = ("", "6 4", "2 3", "9 3 2 3")
FIRST = re.compile(r"^[-+−]?\d+(\.\d+)?(e[-+]?\d+)?")
OTHERS = ("tasks", "samples", "fisher-fraction", "worst-task", "metrics", "cost")
MARGINS = {"accuracy": "Accuracy margin", **dict.fromkeys(LOSSES, "Fall in loss")}
NORMALISED = {"eta_fraction": "η / F(x̄)", "eta": "η, mean diagonal 1", "eta_unit_trace": "η, trace 1"}


def alpha(found: Experiment) -> Section:
    """Return accuracy over α: a chart per method, colours for ranks, dashes for aggregators."""
    assert isinstance(found.figure, Lines)
    unit = _unit(_heights(found.figure), found.figure.y, found.figure.metric)
    span = widened([v for points in found.figure.lines.values() for _, *ys in points for v in finite(ys)] or [0.0, 1.0])
    count = max((len(row.get("tasks") or ()) for row in found.data), default=0)
    by_method: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for name, points in found.figure.lines.items():
        method, _, rest = name.partition(", ")
        by_method.setdefault(method, {})[rest or method] = points
    charts = []
    for method, some in by_method.items():
        chart = lines(
            _series(some), _labels(found.figure, unit), f"{found.figure.y} of {method} over {found.figure.x}.",
            span=span, at=[(count**-0.5, "1/√T")] if count else (),
        )  # fmt: skip
        charts.append(Figure(f"alpha {method}", f"{method} over α", chart, _points(some, found.figure, unit)))
    return Section("Sensitivity to α", [Side(charts), notes(found.notes), _folded(found)], short="α")


def eta(found: Experiment) -> Section:
    """Return η against rank beside the margin that curvature gains."""
    by_rank = [row for row in found.data if isinstance(row.get("k"), int | float)]
    what, plain = {}, Unit(False)
    for key, name in NORMALISED.items():
        points = {name: [(row["k"], row[key], row[key], row[key]) for row in by_rank if _is_number(row.get(key))]}
        figure = Lines("lines", "rank k", name, points)
        chart = lines(
            _series(points), Labels("rank k", name, plain.tick, plain.exact), f"{name} against rank.", zero=True
        )
        what[name] = Figure(f"eta {key}", "η against rank", chart, _points(points, figure, plain))
    margin: list[tuple[float, float, float, float]] = [
        (row["k"], row["difference"], row["difference"], row["difference"])
        for row in by_rank
        if _is_number(row.get("difference"))
    ]
    named = {"margin": margin}
    share = found.metric in SHARES
    gained, what_in = MARGINS.get(found.metric, f"Margin in {found.metric}"), ", points" if share else ""
    labels = Labels(
        "rank k", f"{gained[:1].lower()}{gained[1:]}{what_in}", lambda v: signed(v, Unit(share).tick),
        lambda v: signed(v, lambda size: percent(size, 2) if share else number(size, 5)),
    )  # fmt: skip
    chart = lines(_series(named), labels, f"{gained} of curvature over the flat merge against rank.", zero=True)
    ps = {row["k"]: row.get("p") for row in by_rank}
    table = Table(
        ["k", f"margin{what_in}", "p"],
        [[Cell(number(k), k), Cell(labels.exact(y), y), Cell(number(ps[k]), ps[k])] for k, y, *_ in margin],
        f"{gained} by rank",
    )
    beside = Figure("eta margin", f"{gained} over the flat merge", chart, table)
    return Section("η against rank", [Side([Choice("η", what), beside]), notes(found.notes), _table(found)], short="η")


def landscapes(found: Experiment) -> Section:
    """Return the loss on the plane of the models: summed, and of a task to choose."""
    figure = found.figure
    assert isinstance(figure, Maps)
    intro = paragraph(
        "The plane goes through the mean of the fine-tuned models along their first two principal components, and "
        f"holds {percent(figure.explained, 0)}% of their variance. Models are marked where they fall on it."
    )
    whole = _map(figure, "all tasks, summed", figure.joint)
    tasks: dict[str, Figure | Side] = {task: _map(figure, task, losses) for task, losses in figure.maps.items()}
    parts: list[Figure | Choice | Table] = [whole, Choice("Task", tasks)] if tasks else [whole]
    return Section("Loss landscape", [intro, Side(parts), notes(found.notes), _folded(found)], short="Landscape")


def _map(figure: Maps, task: str, losses: Sequence[Sequence[float]]) -> Figure:
    summed = task not in figure.maps
    known = finite(v for row in losses for v in row) or [0.0]
    said = (
        f"From {number(min(known))} to {number(max(known))}; models marked: {', '.join(p.name for p in figure.points)}."
    )
    shown = [p for p in figure.points if math.isfinite(p.a) and math.isfinite(p.b)]
    chart = landscape(figure.a, figure.b, losses, shown, "" if summed else task, said)
    rows: Rows = []
    for p in figure.points:
        loss = p.joint if summed else p.losses.get(task)
        rows.append([p.name, p.kind, *(Cell(number(v, 5), v) for v in (p.a, p.b, p.off, loss))])
    table = Table(["model", "kind", "a", "b", "off the plane", "its own loss"], rows, f"Models on the plane; {task}")
    title = "Loss of all tasks, summed" if summed else f"Loss on {task}"
    return Figure(f"landscape {'all' if summed else task}", title, chart, table)


def others(records: Records) -> Section | None:
    """Return the remaining experiments: their lines, and their tables as they were written."""
    blocks: list[Block] = []
    shown = {"performance", "alpha", "eta", "landscape"}
    rest = [one.record for one in records.experiments if not has_own(one.record)]
    rest.sort(key=lambda one: OTHERS.index(one.name) if one.name in OTHERS else len(OTHERS))
    for one in rest:
        blocks.append(heading(one.title if one.name not in shown else f"{one.title} ({one.name})"))
        if isinstance(one.figure, Lines) and one.figure.lines:
            blocks.append(Side([line_chart(one.name, one.figure), _table(one)]))
        elif isinstance(one.figure, Dots) and one.figure.dots:
            blocks.append(Side([dot_chart(one.name, one.figure), _table(one)]))
        else:
            blocks.append(_table(one))
        blocks.append(notes(one.notes))
    return Section("More experiments", blocks, short="More") if blocks else None


def has_own(one: Experiment) -> bool:
    """Whether an experiment has a section of its own."""
    if one.name == "performance":
        return True
    if one.name == "alpha":
        return isinstance(one.figure, Lines)
    return one.name == "eta" or isinstance(one.figure, Maps)


def line_chart(name: str, figure: Lines) -> Figure:
    """Return a figure of lines as the record has them."""
    unit = _unit(_heights(figure), figure.y, figure.metric)
    chart = lines(
        _series(figure.lines), _labels(figure, unit), f"{figure.y} against {figure.x}: {', '.join(figure.lines)}."
    )
    title = f"{figure.y[:1].upper()}{figure.y[1:]} by {figure.x}"
    return Figure(name, title, chart, _points(figure.lines, figure, unit))


def dot_chart(name: str, figure: Dots) -> Figure:
    """Return a figure of dots as the record has them; what is not finite is left out."""
    unit = _unit((value for values in figure.dots.values() for value in values), figure.x, figure.metric)
    first, second = figure.names
    rows = []
    for row, (value, low, high, other) in figure.dots.items():
        if math.isfinite(value):
            low, high = (bound if math.isfinite(bound) else value for bound in (low, high))
            beside = other if math.isfinite(other) else None
            tips = f"{row}\n{first} {unit.exact(value)}", f"{row}\n{second} {unit.exact(other)}"
            rows.append(Range(row, value, low, high, beside, *tips))
    said = f"{figure.x}: {first} and {second} of {len(rows)} rows."
    chart = ranges(rows, unit.tick, figure.names, said, _axis(figure.x, unit), log=figure.log)
    cells: Rows = [
        [row, *(Cell(unit.exact(v), unit.plain(v)) for v in (value, *unit.ends(low, high), other))]
        for row, (value, low, high, other) in figure.dots.items()
    ]
    table = Table(["row", first, "low", "high", second], cells, f"{figure.x}: {first} and {second}")
    return Figure(name, f"{first[:1].upper()}{first[1:]} and {second}", chart, table)


def _series(named: dict[str, list[tuple[float, float, float, float]]]) -> list[Series]:
    """Return lines with colours; names of two parts, as `k = 4, sum`, take a dash for the second."""
    split = [name.rpartition(", ") for name in named]
    if all(first for first, _, _ in split):
        firsts = list(dict.fromkeys(first for first, _, _ in split))
        lasts = list(dict.fromkeys(last for _, _, last in split))
        return [
            Series(name, points, colour(firsts.index(first)), DASHES[lasts.index(last) % len(DASHES)])
            for (name, points), (first, _, last) in zip(named.items(), split, strict=True)
        ]
    return [Series(name, points, colour(i), DASHES[i // 8 % 4]) for i, (name, points) in enumerate(named.items())]


def _unit(values: Iterable[float], axis: str, metric: str | None) -> Unit:
    """Return how a figure's values read; older records name no metric, and an axis of shares says so."""
    if metric is None and "accuracy" not in axis:
        return Unit(False)
    return Unit.of(values, metric)


def _heights(figure: Lines) -> Iterator[float]:
    return (y for points in figure.lines.values() for _, y, _, _ in points)


def _axis(name: str, unit: Unit) -> str:
    return name + (", %" if unit.share else "")


def _labels(figure: Lines, unit: Unit) -> Labels:
    return Labels(figure.x, _axis(figure.y, unit), unit.tick, unit.exact)


def _points(named: dict[str, list[tuple[float, float, float, float]]], figure: Lines, unit: Unit) -> Table:
    rows: Rows = [
        [name, Cell(number(x, 5), x), *(Cell(unit.exact(v), unit.plain(v)) for v in (y, *unit.ends(low, high)))]
        for name, points in named.items()
        for x, y, low, high in points
    ]
    return Table(["line", figure.x, figure.y, "low", "high"], rows, f"{figure.y} by {figure.x}")


def _folded(found: Experiment) -> Markup:
    return folded("The experiment's own table", _table(found))


def _table(found: Experiment) -> Table:
    """Return an experiment's own table; a cell that begins with a number is sorted by it."""
    rows: Rows = [[row[0], *(_cell(text) for text in row[1:])] for row in found.rows]
    return Table(found.headings, rows, found.title)


def _cell(text: str) -> Cell:
    match = FIRST.match(text.strip())
    return Cell(text, float(match[0].replace("−", "-")) if match else None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
