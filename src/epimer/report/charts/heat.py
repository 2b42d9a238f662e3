"""Matrices as coloured cells, with their values written in where there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.report.charts.frame import SMALL, WIDTH, Chart, cut, label, margin_for, mark, wide
from epimer.report.markup import Markup, join, tag
from epimer.report.numbers import finite
from epimer.report.palette import SIDES, STEPS, shade, side

LEAST, MOST = 18.0, 46.0  # width of a cell
TILTED = 90.0  # most room for a name on its side
TALL = 21.0


@dataclass(frozen=True)
class Scale:
    """What colours mean: from `low` to `high`, or to both sides of their middle."""

    low: float
    high: float
    diverging: bool = False

    @property
    def middle(self) -> float:
        """Half-way between the ends."""
        return (self.low + self.high) / 2

    @classmethod
    def of(cls, values: Sequence[float | None], *, zero: bool = True) -> Scale:
        """Span the values; from zero, unless told otherwise."""
        known = finite(values) or [0.0]
        low = min(0.0, *known) if zero else min(known)
        return cls(low, max(known) if max(known) > low else low + 1.0)

    def fill(self, value: float) -> tuple[str, str]:
        """Return a value's colour and the ink to write on it."""
        if self.diverging:
            return side((value - self.middle) / (self.high - self.middle))
        return shade((value - self.low) / (self.high - self.low))


def heat(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    show: Callable[[float], str],
    describes: str,
    *,
    scale: Scale | None = None,
    tip: Callable[[str, str, float], str] | None = None,
) -> Chart:
    """Draw a matrix; a value of None leaves its cell empty."""
    flat = [value for row in values for value in row]
    scale = scale or Scale.of(flat)
    say = tip or (lambda row, column, value: f"{row}, {column}\n{show(value)}")
    left = margin_for(rows, most=210, size=SMALL)
    cell = min(MOST, max(LEAST, (WIDTH - left - 4) / max(1, len(columns))))
    heads = _Headings(columns, left, cell)
    width = max(WIDTH, left + cell * len(columns) + 4, heads.right + 4)
    top = heads.height
    inside = max((wide(show(v), 10) for v in finite(flat)), default=0.0) <= cell - 3
    parts = [heads.draw()]
    for i, row in enumerate(rows):
        y = top + TALL * i
        parts.append(label(left - 7, y + TALL / 2, cut(row, left - 10, SMALL), anchor="end", size=SMALL))
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
    parts.append(_key(scale, show, left, bottom + 10))
    return Chart(width, bottom + 42, join(parts), describes)


@dataclass(frozen=True)
class _Headings:
    """The names of the columns: level where they fit, numbers with some left out where not, else tilted."""

    names: Sequence[str]
    left: float
    cell: float

    @property
    def longest(self) -> float:
        return min(TILTED, max((wide(name, SMALL) for name in self.names), default=0.0))

    @property
    def every(self) -> int:
        """One in how many names is written."""
        return math.ceil((self.longest + 4) / self.cell) if all(len(name) <= 3 for name in self.names) else 1

    @property
    def tilted(self) -> bool:
        return self.every == 1 and self.longest > self.cell - 4

    @property
    def height(self) -> float:
        return self.longest * 0.75 + 16 if self.tilted else 22.0

    @property
    def right(self) -> float:
        """How far to the right they go."""
        if not self.tilted:
            return 0.0
        return max(self._x(j) + 0.71 * min(TILTED + 4, wide(name, SMALL)) + 8 for j, name in enumerate(self.names))

    def _x(self, j: int) -> float:
        return self.left + self.cell * (j + 0.5)

    def draw(self) -> Markup:
        y = self.height - (8 if self.tilted else 10)
        parts = []
        for j, name in enumerate(self.names):
            x = self._x(j)
            if self.tilted:
                turned = f"rotate(-45 {x:.1f} {y:.1f})"
                parts.append(label(x, y, cut(name, TILTED, SMALL), size=SMALL, transform=turned))
            elif j % self.every == 0:
                parts.append(label(x, y, name, anchor="middle", size=SMALL))
        return join(parts)


def _key(scale: Scale, show: Callable[[float], str], left: float, top: float) -> Markup:
    """Return the ramp with its two ends, and the middle where it has two sides."""
    count = SIDES if scale.diverging else STEPS
    each, parts = 132.0 / count, []
    for i in range(count):
        fill, _ = side((i - count // 2) / (count // 2)) if scale.diverging else shade((i + 0.5) / count)
        parts.append(tag("rect", x=left + each * i, y=top, width=each + 0.3, height=8.0, fill=fill))
    ends = [(0.0, scale.low, "start"), (132.0, scale.high, "end")]
    ends += [(66.0, scale.middle, "middle")] if scale.diverging else []
    for at, value, anchor in ends:
        parts.append(label(left + at, top + 18, show(value), anchor=anchor, soft=True, size=SMALL))
    return join(parts)
