"""One row per method: bars from zero, or points with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.report.charts.frame import SMALL, WIDTH, Chart, across, cut, label, margin_for, mark, wide
from epimer.report.markup import Markup, join, tag
from epimer.report.numbers import Axis, bounds, decades, finite, ticks, widened

ROW = 22.0  # height
Names = tuple[str, str]
"""of the value and of the second value"""


@dataclass(frozen=True)
class Row:
    """A value, with its interval and a second value where it has them, and what its marks tell when hovered."""

    name: str
    value: float
    tip: str
    low: float | None = None
    high: float | None = None
    second: float | None = None
    second_tip: str = ""
    strong: bool = False
    reference: bool = False


def bars(
    rows: Sequence[Row], show: Callable[[float], str], tick: Callable[[float], str], describes: str, unit: str = ""
) -> Chart:
    """Draw bars from zero to each value, with the value at their end."""
    left, top, right = margin_for([row.name for row in rows]), 6.0, WIDTH - 44.0
    bottom = top + ROW * len(rows)
    values = [0.0, *finite(row.value for row in rows)]
    grid = ticks(min(values), max(values) or 1.0, 5)
    axis = Axis(min(*values, grid[0]), max(*values, grid[-1]) or 1.0, left, right)
    parts = [across(axis, grid, tick, top, bottom)]
    zero = axis(0.0)
    for i, row in enumerate(rows):
        y, end = top + ROW * (i + 0.5), axis(row.value)
        look = {"fill": _ink(row), "fill_opacity": None if row.strong or row.reference else 0.62}
        size = {"x": min(zero, end), "y": y - 7, "width": abs(end - zero), "height": 14.0, "rx": 1.5}
        parts.append(_name(row, left, y))
        parts.append(mark("rect", row.tip, **size, **look))
        parts.append(label(max(zero, end) + 5, y, show(row.value), size=SMALL, strong=row.strong))
    parts.append(tag("line", x1=zero, x2=zero, y1=top, y2=bottom, stroke="var(--soft)"))
    return _finished(parts, left, right, bottom, unit, describes)


def ranges(
    rows: Sequence[Row],
    show: Callable[[float], str],
    names: Names,
    describes: str,
    unit: str = "",
    *,
    log: bool = False,
) -> Chart:
    """Draw each value with its interval, and the second value as a diamond."""
    left, top, right = margin_for([row.name for row in rows]), 24.0, WIDTH - 14.0
    bottom = top + ROW * len(rows)
    values = finite(v for row in rows for v in (row.value, row.low, row.high, row.second))
    log = log and min(values, default=0.0) > 0
    low, high = (min(values) / 1.3, max(values) * 1.3) if log else widened(values or [0.0], 0.04)
    axis = Axis(low, high, left, right, log)
    parts = [_keys(names, left), across(axis, decades(low, high) if log else ticks(low, high, 6), show, top, bottom)]
    for i, row in enumerate(rows):
        x, y, ink = axis(row.value), top + ROW * (i + 0.5), _ink(row)
        parts.append(_name(row, left, y))
        for second in finite([row.second]):
            parts.append(tag("line", x1=axis(second), x2=x, y1=y, y2=y, stroke="var(--rule)"))
            parts.append(mark("path", row.second_tip, d=_diamond(axis(second), y), fill="var(--c1)"))
        start, end = map(axis, bounds(row.value, row.low, row.high))
        band = {"stroke": ink, "stroke_width": 5, "stroke_opacity": 0.35}
        parts.append(tag("line", x1=start, x2=end, y1=y, y2=y, **band))
        parts.append(mark("circle", row.tip, cx=x, cy=y, r=5.0 if row.strong else 4.0, fill=ink))
    return _finished(parts, left, right, bottom, unit, describes)


def _ink(row: Row) -> str:
    return "var(--c6)" if row.reference else "var(--c0)"


def _name(row: Row, left: float, y: float) -> Markup:
    return label(left - 8, y, cut(row.name, left - 10), anchor="end", strong=row.strong)


def _finished(parts: list[Markup], left: float, right: float, bottom: float, unit: str, describes: str) -> Chart:
    """Return the chart, with the axis's name below it where it has one."""
    if unit:
        parts = [*parts, label((left + right) / 2, bottom + 29, unit, anchor="middle", soft=True, size=SMALL)]
    return Chart(WIDTH, bottom + (40 if unit else 24), join(parts), describes)


def _keys(names: Names, left: float) -> Markup:
    x = left + 32 + wide(names[0], SMALL)
    dot = join(tag("circle", cx=left + 6, cy=8.0, r=4.0, fill="var(--c0)"), label(left + 16, 8, names[0], size=SMALL))
    diamond = join(tag("path", d=_diamond(x, 8.0), fill="var(--c1)"), label(x + 10, 8, names[1], size=SMALL))
    return join(dot, diamond) if names[1] else dot


def _diamond(x: float, y: float, r: float = 4.5) -> str:
    return f"M{x - r:.2f} {y:.2f}l{r} {-r}l{r} {r}l{-r} {r}z"
