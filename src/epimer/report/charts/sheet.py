"""Several charts on one sheet, under a common title: an experiment's figure as a file."""

from __future__ import annotations

from collections.abc import Sequence

from epimer.report.charts.frame import Chart, label, wide
from epimer.report.markup import Markup, join, tag

MARGIN, GAP = 14.0, 26.0
TITLE, SUBTITLE = 15.0, 13.0  # sizes of text


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
