"""What all charts share: the SVG element, text, legends, axes and marks that tell their value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from epimer.report.markup import Child, Markup, join, tag
from epimer.report.numbers import Axis

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
SIZE = 12.5  # of text, in the units of the drawing
SMALL = 11.5
WIDTH = 448.0
TITLE, SUBTITLE = 15.0, 13.0  # of text on a sheet of several charts
MARGIN, GAP = 14.0, 26.0


@dataclass(frozen=True)
class Chart:
    """A drawing: its size, its content and what it says in a sentence."""

    width: float
    height: float
    content: Markup
    describes: str

    def svg(self, key: str, title: str, *, alone: bool = False) -> Markup:
        """Return the drawing as an element of a page, where arrow keys go from mark to mark, or as a file."""
        least = 0.75 * self.width if self.width > 1.2 * WIDTH else 0.0  # a wide drawing scrolls on a phone
        in_page = {"tabindex": "0", "style": f"max-width:{self.width:.0f}px;min-width:{least:.0f}px"}
        as_file = {"xmlns": "http://www.w3.org/2000/svg", "width": self.width, "height": self.height}
        described = tag("title", title, id=f"{key}-title"), tag("desc", self.describes, id=f"{key}-desc")
        paper = tag("rect", width=self.width, height=self.height, fill="var(--paper)") if alone else None
        return tag(
            "svg", described, paper, self.content, **(as_file if alone else in_page),
            viewBox=f"0 0 {self.width:.0f} {self.height:.0f}", role="img",
            aria_labelledby=f"{key}-title {key}-desc", font_family=FONT, font_size=SIZE, fill="var(--ink)",
        )  # fmt: skip


def label(
    x: float, y: float, content: Child, *, anchor: str = "start", size: float | None = None, soft: bool = False,
    strong: bool = False, **more: Any,
) -> Markup:  # fmt: skip
    """Return a line of text; `y` is the middle of its small letters."""
    return tag(
        "text", content, x=x, y=y + 4, text_anchor=None if anchor == "start" else anchor, font_size=size,
        font_weight="700" if strong else None, **({"fill": "var(--soft)"} if soft else {}), **more,
    )  # fmt: skip


def wide(content: str, size: float = SIZE) -> float:
    """Return about how wide a line of text is."""
    widths = (
        0.36 if c in "iljtf.,:;'|! " else 0.92 if c in "mwMW%@×" else 0.7 if c.isupper() else 0.61 for c in content
    )
    return size * sum(widths)


def cut(content: str, room: float, size: float = SIZE) -> str:
    """Return a name that fits.

    The parts of a tensor's name are shortened to their initials, from the first on and but for the last, so that the
    number of a layer stays. What is still too long loses its middle.
    """
    parts = [content] if " " in content else content.split(".")
    for i, part in enumerate(parts[:-1]):
        if wide(".".join(parts), size) <= room:
            break
        parts[i] = part if part.isdigit() else part[:1]
    content = ".".join(parts)
    if wide(content, size) <= room:
        return content
    widths = accumulate(wide(character, size) for character in content)
    kept = max(4, sum(1 for _ in takewhile(lambda width: width + wide("…", size) <= room, widths)))
    numbered = next((i + 1 for i, part in enumerate(parts[:-1]) if part.isdigit()), 0)
    to_number = len(".".join(parts[:numbered]))
    head = to_number if kept // 2 < to_number < kept else kept // 2
    return f"{content[:head]}…{content[len(content) - (kept - head - 1) :]}"


def margin_for(names: Sequence[str], most: float = 215.0, size: float = SIZE) -> float:
    """Return how much room names need beside a drawing."""
    return min(most, max((wide(name, size) for name in names), default=0.0)) + 10.0


def mark(shape: str, tip: str | None, **attributes: Any) -> Markup:
    """Return a shape that tells its value when it is hovered or reached by the keyboard."""
    return tag(shape, data_tip=tip, **attributes)


def legend(entries: Sequence[tuple[str, str, str]], left: float, top: float, width: float) -> tuple[Markup, float]:
    """Return swatches (name, colour, dash) in rows, and how much height they take."""
    parts, x, y = [], left, top + 8
    for name, colour, dash in entries:
        room = 22 + wide(name, SMALL) + 14
        if x > left and x + room > left + width:
            x, y = left, y + 17
        look = {"stroke": colour, "stroke_width": 2.5, "stroke_dasharray": dash or None}
        parts += [tag("line", x1=x, x2=x + 17, y1=y, y2=y, **look), label(x + 22, y, name, size=SMALL)]
        x += room
    return join(parts), y - top + 12


def ramp(fills: Sequence[str], left: float, top: float, width: float) -> Markup:
    """Return colours in a row, for a legend."""
    each = width / len(fills)
    return join(
        tag("rect", x=left + each * i, y=top, width=each + 0.3, height=8.0, fill=fill) for i, fill in enumerate(fills)
    )


def across(axis: Axis, values: Sequence[float], show: Callable[[float], str], top: float, bottom: float) -> Markup:
    """Return the ticks of a horizontal axis, with lines up through the drawing."""
    parts = []
    for value in values:
        x = axis(value)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, stroke="var(--faint)"))
        parts.append(label(x, bottom + 12, show(value), anchor="middle", soft=True, size=SMALL))
    return join(parts)


def upward(axis: Axis, values: Sequence[float], show: Callable[[float], str], left: float, right: float) -> Markup:
    """Return the ticks of a vertical axis, with lines through the drawing."""
    parts = []
    for value in values:
        y = axis(value)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, stroke="var(--faint)"))
        parts.append(label(left - 7, y, show(value), anchor="end", soft=True, size=SMALL))
    return join(parts)


def sheet(title: str, panels: Sequence[tuple[str, Chart]], columns: int) -> Chart:
    """Draw charts in rows of so many columns, each under its own title where there are several."""
    named = len(panels) > 1
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    widths = [max(row[j][1].width for row in rows if j < len(row)) for j in range(min(columns, len(panels)))]
    parts: list[Markup] = [label(MARGIN, MARGIN + 6, title, size=TITLE, strong=True)]
    y = MARGIN + 30
    for row in rows:
        for j, (name, chart) in enumerate(row):
            x = MARGIN + sum(widths[:j]) + GAP * j
            if named:
                parts.append(label(x, y + 4, name, size=SUBTITLE, strong=True))
            parts.append(tag("g", chart.content, transform=f"translate({x:.0f} {y + (18 if named else 0):.0f})"))
        y += max(chart.height for _, chart in row) + (18 if named else 0) + GAP
    width = max(sum(widths) + GAP * (len(widths) - 1), wide(title, TITLE)) + 2 * MARGIN
    return Chart(width, y - GAP + MARGIN, join(parts), " ".join(chart.describes for _, chart in panels))
