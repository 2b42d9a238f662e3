"""Matrices as coloured cells, with their values written in where there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.report.charts.frame import SMALL, WIDTH, Chart, cut, label, margin_for, mark, ramp, wide
from epimer.report.markup import Markup, join, tag
from epimer.report.numbers import finite
from epimer.report.palette import SIDES, STEPS, shade, side

LEAST, MOST = 18.0, 46.0  # width of a cell
TILTED = 90.0  # most room for a name on its side
TALL = 21.0
KEY = 132.0  # width of the colours' legend


@dataclass(frozen=True)
class Scale:
    """The values that colours stand for: from `low` to `high`, or to both sides of their middle.

    A scale belongs to a quantity and not to the values of one map, so that the same colour has the same meaning on
    every page. Values beyond an end have its colour.
    """

    low: float
    high: float
    diverging: bool = False
    log: bool = False
    """colours follow the logarithm; `low` is positive"""

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def fill(self, value: float) -> tuple[str, str]:
        if self.diverging:
            return side((value - self.middle) / (self.high - self.middle))
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
            return shade(share)
        return shade((value - self.low) / (self.high - self.low))


SHARE = Scale(0.0, 1.0)


def heat(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str],
    show: Callable[[float], str], describes: str, *, scale: Scale = SHARE,
    tip: Callable[[str, str, float], str] | None = None, labels: Sequence[str] | None = None,
) -> Chart:  # fmt: skip
    """Draw a matrix; a value of None leaves its cell empty.

    Args:
        values: of every row.
        rows: their names, as tips have them.
        columns: the names of the columns.
        show: formats a value.
        describes: the chart in a sentence.
        scale: what the colours stand for.
        tip: the text of a cell's tip, from its row, its column and its value.
        labels: shorter names of the rows, to write beside them.
    """
    flat = [value for row in values for value in row]
    names = rows if labels is None else labels
    say = tip or (lambda row, column, value: f"{row}, {column}\n{show(value)}")
    left = margin_for(names, most=210, size=SMALL)
    cell = min(MOST, max(LEAST, (WIDTH - left - 4) / max(1, len(columns))))
    headings, top, right = _headings(columns, left, cell)
    width = max(WIDTH, left + cell * len(columns) + 4, right + 4)
    inside = max((wide(show(v), 10) for v in finite(flat)), default=0.0) <= cell - 3
    parts = [headings]
    for i, row in enumerate(rows):
        y = top + TALL * i
        parts.append(label(left - 7, y + TALL / 2, cut(names[i], left - 10, SMALL), anchor="end", size=SMALL))
        for j, value in enumerate(values[i]):
            x, across, tall = left + cell * j, cell - 1, TALL - 1
            if value is None or math.isnan(value):
                parts.append(tag("rect", x=x, y=y, width=across, height=tall, fill="var(--faint)", fill_opacity=0.5))
                continue
            fill, ink = scale.fill(value)
            parts.append(mark("rect", say(row, columns[j], value), x=x, y=y, width=across, height=tall, fill=fill))
            if inside:
                middle = x + across / 2, y + tall / 2 - 0.5
                parts.append(label(*middle, show(value), anchor="middle", size=10, fill=ink, pointer_events="none"))
    bottom = top + TALL * len(rows)
    parts.append(_key(scale, finite(flat), show, left, bottom + 10))
    return Chart(width, bottom + 42, join(parts), describes)


def _headings(names: Sequence[str], left: float, cell: float) -> tuple[Markup, float, float]:
    """Return the names of the columns, how high they are, and how far to the right they go.

    They are level where they fit; where not, numbers are level with some left out, and names are tilted.
    """
    longest = min(TILTED, max((wide(name, SMALL) for name in names), default=0.0))
    every = math.ceil((longest + 4) / cell) if all(len(name) <= 3 for name in names) else 1
    tilted = every == 1 and longest > cell - 4
    height = longest * 0.75 + 16 if tilted else 22.0
    y, right, parts = height - (8 if tilted else 10), 0.0, []
    for j, name in enumerate(names):
        x = left + cell * (j + 0.5)
        if tilted:
            turned = f"rotate(-45 {x:.1f} {y:.1f})"
            parts.append(label(x, y, cut(name, TILTED, SMALL), size=SMALL, transform=turned))
            right = max(right, x + 0.71 * min(TILTED + 4, wide(name, SMALL)) + 8)
        elif j % every == 0:
            parts.append(label(x, y, name, anchor="middle", size=SMALL))
    return join(parts), height, right


def _key(scale: Scale, values: Sequence[float], show: Callable[[float], str], left: float, top: float) -> Markup:
    """Return the ramp with its two ends, marked if values lie beyond, and the middle of two sides or of a logarithm."""
    fills = [shade((i + 0.5) / STEPS) for i in range(STEPS)]
    below = "≤ " if any(value < scale.low for value in values) else ""
    above = "≥ " if any(value > scale.high for value in values) else ""
    ends = [(0.0, below + show(scale.low), "start"), (KEY, above + show(scale.high), "end")]
    if scale.diverging:
        fills = [side(2 * i / (SIDES - 1) - 1) for i in range(SIDES)]
        ends.append((KEY / 2, show(scale.middle), "middle"))
    elif scale.log:
        ends.append((KEY / 2, show(math.sqrt(scale.low * scale.high)), "middle"))
    names = [label(left + at, top + 18, text, anchor=anchor, soft=True, size=SMALL) for at, text, anchor in ends]
    return join(ramp([fill for fill, _ in fills], left, top, KEY), names)
