"""One row per method: bars from zero, or points with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.report.charts.frame import SMALL, WIDTH, Chart, across, cut, label, margin_for, mark, wide
from epimer.report.markup import Markup, join, tag
from epimer.report.numbers import Axis, decades, finite, ticks, widened

ROW = 22.0


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, how long it is, and what to say when it is hovered."""

    name: str
    value: float
    tip: str
    strong: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Range:
    """One row of points: a value with its interval, and a second, lower one."""

    name: str
    value: float
    low: float
    high: float
    second: float | None
    tip: str
    second_tip: str = ""
    strong: bool = False
    reference: bool = False


def bars(
    rows: Sequence[Bar], show: Callable[[float], str], tick: Callable[[float], str], describes: str, unit: str = ""
) -> Chart:
    """Draw bars from zero to each value, with the value at their end."""
    left = margin_for([row.name for row in rows])
    top, right = 6.0, WIDTH - 44.0
    bottom = top + ROW * len(rows)
    values = [0.0, *finite(row.value for row in rows)]
    grid = ticks(min(values), max(values) or 1.0, 5)
    axis = Axis(min(*values, grid[0]), max(*values, grid[-1]) or 1.0, left, right)
    parts = [across(axis, grid, tick, top, bottom)]
    zero = axis(0.0)
    for i, row in enumerate(rows):
        y = top + ROW * (i + 0.5)
        end = axis(row.value)
        fill = "var(--c6)" if row.reference else "var(--c0)"
        parts.append(label(left - 8, y, cut(row.name, left - 10), anchor="end", strong=row.strong))
        parts.append(
            mark(
                "rect", row.tip, x=min(zero, end), y=y - 7, width=abs(end - zero), height=14.0, rx=1.5, fill=fill,
                fill_opacity=None if row.strong or row.reference else 0.62,
            )
        )  # fmt: skip
        parts.append(label(max(zero, end) + 5, y, show(row.value), size=SMALL, strong=row.strong))
    parts.append(tag("line", x1=zero, x2=zero, y1=top, y2=bottom, stroke="var(--soft)"))
    parts.append(_named(unit, left, right, bottom))
    return Chart(WIDTH, bottom + (40 if unit else 24), Markup("".join(parts)), describes)


def ranges(
    rows: Sequence[Range],
    show: Callable[[float], str],
    names: tuple[str, str],
    describes: str,
    unit: str = "",
    *,
    log: bool = False,
) -> Chart:
    """Draw each value with its interval, and the second value as a diamond."""
    left = margin_for([row.name for row in rows])
    right = WIDTH - 14.0
    top = 24.0
    bottom = top + ROW * len(rows)
    values = finite(v for row in rows for v in (row.value, row.low, row.high, row.second))
    log = log and min(values, default=0.0) > 0
    if log:
        low, high = min(values) / 1.3, max(values) * 1.3
        grid = decades(low, high)
    else:
        low, high = widened(values or [0.0], 0.04)
        grid = ticks(low, high, 6)
    axis = Axis(low, high, left, right, log)
    parts = [_keys(names, left), across(axis, grid, show, top, bottom)]
    for i, row in enumerate(rows):
        y = top + ROW * (i + 0.5)
        x = axis(row.value)
        ink = "var(--c6)" if row.reference else "var(--c0)"
        parts.append(label(left - 8, y, cut(row.name, left - 10), anchor="end", strong=row.strong))
        if row.second is not None:
            parts.append(tag("line", x1=axis(row.second), x2=x, y1=y, y2=y, stroke="var(--rule)"))
            parts.append(mark("path", row.second_tip, d=_diamond(axis(row.second), y), fill="var(--c1)"))
        parts.append(
            tag(
                "line", x1=axis(row.low), x2=axis(row.high), y1=y, y2=y, stroke=ink, stroke_width=5, stroke_opacity=0.35
            )
        )
        parts.append(mark("circle", row.tip, cx=x, cy=y, r=5.0 if row.strong else 4.0, fill=ink))
    parts.append(_named(unit, left, right, bottom))
    return Chart(WIDTH, bottom + (40 if unit else 24), Markup("".join(parts)), describes)


def _keys(names: tuple[str, str], left: float) -> Markup:
    """Return what dot and diamond mean."""
    second = left + 32 + wide(names[0], SMALL)
    first = join(tag("circle", cx=left + 6, cy=8.0, r=4.0, fill="var(--c0)"), label(left + 16, 8, names[0], size=SMALL))
    if not names[1]:
        return first
    return join(
        first,
        tag("path", d=_diamond(second, 8.0), fill="var(--c1)"),
        label(second + 10, 8, names[1], size=SMALL),
    )


def _named(unit: str, left: float, right: float, bottom: float) -> Markup:
    return label((left + right) / 2, bottom + 29, unit, anchor="middle", soft=True, size=SMALL) if unit else Markup()


def _diamond(x: float, y: float, r: float = 4.5) -> str:
    return f"M{x - r:.2f} {y:.2f}l{r} {-r}l{r} {r}l{-r} {r}z"
