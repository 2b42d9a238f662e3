"""Lines with confidence bands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from epimer.records.experiment import Point
from epimer.report.charts.frame import SMALL, WIDTH, Chart, across, label, legend, mark, upward, wide
from epimer.report.markup import Markup, join, place, tag
from epimer.report.numbers import Axis, bounds, drawable, number, ticks, widened

HEIGHT = 230.0  # of the drawing, without legend and labels
x_text = partial(number, digits=4)  # values of x; a count as 1024 to its last digit
LARGE = 20.0  # of a number that stands for a line
LOG = 8.0  # times the smallest x the largest must be for a logarithmic axis


@dataclass(frozen=True)
class Series:
    """One line: points (x, y, low, high) in order."""

    name: str
    points: Sequence[Point]
    colour: str
    dash: str = ""


@dataclass(frozen=True)
class Labels:
    """What the axes are called, and how their values read."""

    x: str
    y: str
    show: Callable[[float], str]
    exact: Callable[[float], str]
    ends: Callable[[float, float], tuple[float, float]] = lambda low, high: (low, high)
    """an interval's ends in the order in which they are read"""


def lines(
    series: Sequence[Series], labels: Labels, describes: str, *, zero: bool = False,
    at: Sequence[tuple[float, str]] = (), span: tuple[float, float] | None = None, log: bool = False,
) -> Chart:  # fmt: skip
    """Draw lines.

    `zero` puts zero on the vertical axis, `at` marks values of x with a name, `span` is the lowest and highest y where
    several charts share them, and `log` makes x logarithmic even where its values do not ask for it.
    """
    kept = [replace(one, points=_drawable(one.points)) for one in series]
    points = [point for one in kept for point in one.points]
    if not points:
        return Chart(WIDTH, 40, label(0, 16, "No finite values.", soft=True), describes)
    if all(len(one.points) <= 1 for one in kept):
        return _numbers(kept, labels, describes)
    xs = sorted({x for x, *_ in points})
    low, high = span or widened([v for _, *ys in points for v in ys] + ([0.0] if zero else []))
    grid = ticks(low, high, 6)
    left = max(30.0, max(wide(labels.show(v), SMALL) for v in grid) + 14)
    right = WIDTH - 16.0
    keys, used = (
        legend([(s.name, s.colour, s.dash) for s in kept], left, 18, right - left) if len(kept) > 1 else (Markup(), 0.0)
    )
    top = 24.0 + used
    bottom = top + HEIGHT
    across_x, marks_x = _horizontal(xs, left, right, log=log)
    up = Axis(low, high, bottom, top)
    parts = [label(2, 8, labels.y, soft=True, size=SMALL), keys]
    parts += [upward(up, grid, labels.show, left, right), across(across_x, marks_x, x_text, top, bottom)]
    parts.append(label((left + right) / 2, bottom + 29, labels.x, anchor="middle", soft=True, size=SMALL))
    if low <= 0 <= high and (zero or low < 0):
        parts.append(tag("line", x1=left, x2=right, y1=up(0.0), y2=up(0.0), stroke="var(--soft)"))
    for value, name in at:
        if xs[0] <= value <= xs[-1]:
            x = across_x(value)
            parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, stroke="var(--soft)", stroke_dasharray="2 3"))
            parts.append(label(x + 4, top + 6, name, soft=True, size=SMALL))
    parts += [_band(one, across_x, up) for one in kept] + [_line(one, across_x, up, labels) for one in kept]
    return Chart(WIDTH, bottom + 40, join(parts), describes)


def _numbers(series: Sequence[Series], labels: Labels, describes: str) -> Chart:
    """Write the values of lines of one point each, which make no line."""
    parts = [label(2, 8, labels.y, soft=True, size=SMALL)]
    y = 34.0
    for one in series:
        for x, value, low, high in one.points:
            between = "" if low == high else f" [{', '.join(map(labels.exact, labels.ends(low, high)))}]"
            parts.append(label(2, y, labels.exact(value) + between, size=LARGE, strong=True))
            parts.append(label(2, y + 19, f"{one.name}, {labels.x} {x_text(x)}", soft=True, size=SMALL))
            y += 52
    return Chart(WIDTH, y - 14, join(parts), describes)


def _drawable(points: Sequence[Point]) -> list[Point]:
    return [(x, y, *bounds(y, low, high)) for x, y, low, high in points if drawable(x) and drawable(y)]


def _horizontal(xs: Sequence[float], left: float, right: float, *, log: bool) -> tuple[Axis, list[float]]:
    """Return the axis of x, logarithmic where the values ask for it, and its ticks: the values, if they are few."""
    if len(xs) == 1:
        return Axis(xs[0] - 1, xs[0] + 1, left, right), [xs[0]]
    log = xs[0] > 0 and (log or (xs[-1] / xs[0] >= LOG and len(xs) > 2))
    axis = Axis(xs[0], xs[-1], left + 8, right - 8, log)
    whole = all(float(x).is_integer() for x in xs)
    shown = [float(x) for x in xs] if log or (whole and len(xs) <= 12) else ticks(xs[0], xs[-1], 6)
    apart: list[float] = []
    for value in shown:
        if not apart or axis(value) - axis(apart[-1]) > wide(x_text(value), SMALL) + 6:
            apart.append(value)
    return axis, apart


def _band(one: Series, across_x: Axis, up: Axis) -> Markup:
    if all(low == high for _, _, low, high in one.points):
        return Markup()
    upper = [f"{place(across_x(x))},{place(up(high))}" for x, _, _, high in one.points]
    lower = [f"{place(across_x(x))},{place(up(low))}" for x, _, low, _ in reversed(one.points)]
    return tag("polygon", points=" ".join(upper + lower), fill=one.colour, fill_opacity=0.12)


def _line(one: Series, across_x: Axis, up: Axis, labels: Labels) -> Markup:
    path = " ".join(f"{place(across_x(x))},{place(up(y))}" for x, y, _, _ in one.points)
    look = {"stroke": one.colour, "stroke_width": 2, "stroke_dasharray": one.dash or None, "stroke_linejoin": "round"}
    parts = [tag("polyline", points=path, fill="none", **look)]
    for x, y, low, high in one.points:
        between = "" if low == high else f" [{', '.join(map(labels.exact, labels.ends(low, high)))}]"
        tip = f"{one.name}\n{labels.x} {number(x, 4)}: {labels.exact(y)}{between}"
        parts.append(mark("circle", tip, cx=across_x(x), cy=up(y), r=3.2, fill=one.colour))
    return join(parts)
