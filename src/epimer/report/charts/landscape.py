"""A loss on the plane of the models: filled contours, and the models where they lie."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epimer.records import MapPoint
from epimer.report.charts.contour import Grid, contours, levels_of, region
from epimer.report.charts.frame import SMALL, WIDTH, Chart, across, label, mark, ramp, upward, wide
from epimer.report.markup import Markup, join, place, tag
from epimer.report.numbers import Axis, number, percent, ticks
from epimer.report.palette import STEPS

LEVELS = 11
KEY = 148.0  # width of the colours' legend
RADIUS = 5.0
ORDER = {"merged": 0, "base": 1, "task": 2}
Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


@dataclass(frozen=True)
class Plane:
    """Losses on a grid, and where the grid lies on the page."""

    a: Sequence[float]
    b: Sequence[float]
    losses: Grid
    x: Axis
    y: Axis

    @property
    def box(self) -> Box:
        return self.x.start, self.y.end, self.x.end, self.y.start

    def path(self, spots: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{place(self.x(a))} {place(self.y(b))}" for a, b in spots)

    def sheet(self, fill: str, **more: Any) -> Markup:
        left, top, right, bottom = self.box
        return tag("rect", x=left, y=top, width=right - left, height=bottom - top, fill=fill, **more)


def landscape(
    a: Sequence[float], b: Sequence[float], losses: Grid, points: Sequence[MapPoint], task: str, describes: str
) -> Chart:
    """Draw one map; the model that was fine-tuned for `task` is marked as such."""
    left, right, top = 44.0, WIDTH - 10.0, 10.0
    bottom = top + (right - left) * min(1.0, max(0.72, (b[-1] - b[0]) / (a[-1] - a[0])))
    plane = Plane(a, b, losses, Axis(a[0], a[-1], left, right), Axis(b[0], b[-1], bottom, top))
    levels = levels_of(losses, LEVELS)
    parts = [
        *_contours(plane, levels),
        _values(plane),
        across(plane.x, ticks(a[0], a[-1], 5), number, bottom, bottom),
        upward(plane.y, ticks(b[0], b[-1], 5), number, left, left),
        label((left + right) / 2, bottom + 28, "a", anchor="middle", soft=True, size=SMALL),
        label(8, (top + bottom) / 2, "b", soft=True, size=SMALL),
        _models(points, plane, task),
        _key(levels, left, bottom + 44),
        _shapes(left + KEY + 14, bottom + 48),
    ]
    return Chart(WIDTH, bottom + 74, join(parts), describes)


def _band(i: int, count: int) -> str:
    return f"var(--q{round(i * (STEPS - 1) / max(1, count))})"


def _contours(plane: Plane, levels: Sequence[float]) -> Iterator[Markup]:
    """Paint the region above each level over the ones before, then draw the levels' lines."""
    yield plane.sheet(_band(0, len(levels)))
    for i, level in enumerate(levels, 1):
        shapes = region(plane.losses, plane.a, plane.b, level)
        yield tag("path", d="".join(f"{plane.path(shape)}z" for shape in shapes), fill=_band(i, len(levels)))
    look = {"fill": "none", "stroke": "var(--paper)", "stroke_width": 0.7, "stroke_opacity": 0.75}
    for level in levels:
        lines = contours(plane.losses, plane.a, plane.b, level)
        yield tag("path", d="".join(map(plane.path, lines)), **look, data_level=number(level, 6))


def _values(plane: Plane) -> Markup:
    """Return a clear sheet with the grid's values, which the page's script shows under the pointer."""
    values = [[float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in row] for row in plane.losses]
    data = {"a": [float(f"{x:.4g}") for x in plane.a], "b": [float(f"{y:.4g}") for y in plane.b], "values": values}
    return plane.sheet("var(--paper)", fill_opacity=0, data_map=json.dumps(data, separators=(",", ":")))


def _models(points: Sequence[MapPoint], plane: Plane, task: str) -> Markup:
    """Mark the models and write their names where they hide nothing."""
    spots = [(plane.x(point.a), plane.y(point.b)) for point in points]
    taken: list[Box] = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in spots]
    order = sorted(range(len(points)), key=lambda i: ORDER.get(points[i].kind, 3))  # who is named first has the choice
    shapes, names = [], []
    for i in order:
        point, (x, y) = points[i], spots[i]
        loss = point.losses.get(task, point.joint)
        own = point.kind == "task" and point.name == task
        who = f"{point.name} ({'fine-tuned' if point.kind == 'task' else point.kind})"
        tip = f"{who}\nits own loss {number(loss, 4)}; off the plane by {percent(point.off)}%"
        shapes.append(_shape(point.kind, x, y, tip, own=own))
        taken.append(_free(x, y, wide(point.name, SMALL) + 2, taken, plane.box))
        names.append(_name(point.name, x, y, taken[-1], strong=own or point.kind == "merged"))
    return join(names, shapes[::-1])


def _free(x: float, y: float, width: float, taken: Sequence[Box], page: Box) -> Box:
    """Return the place for a label near (x, y) that overlaps least with what is there."""
    best, least = (x, y, x + width, y + 12), float("inf")
    for reach in (8.0, 16.0, 26.0, 38.0, 52.0, 70.0):
        for dx, dy in ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8)):
            cx, cy = x + dx * (reach + width / 2), y + dy * (reach + 2)
            box = (cx - width / 2, cy - 6.5, cx + width / 2, cy + 6.5)
            outside = (page[0] - box[0], page[1] - box[1], box[2] - page[2], box[3] - page[3])
            out = sum(max(0.0, edge) for edge in outside)
            cost = reach / 4 + 400 * out + sum(_overlap(box, other) for other in taken)
            if cost < least:
                best, least = box, cost
    return best


def _overlap(one: Box, two: Box) -> float:
    width = min(one[2], two[2]) - max(one[0], two[0])
    height = min(one[3], two[3]) - max(one[1], two[1])
    return max(0.0, width) * max(0.0, height)


def _name(name: str, x: float, y: float, box: Box, *, strong: bool) -> Markup:
    """Write a name, with a line to its point where it had to move away."""
    cx, cy = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    near_x, near_y = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
    far = ((near_x - x) ** 2 + (near_y - y) ** 2) ** 0.5 > 14
    leader = tag("line", x1=x, y1=y, x2=near_x, y2=near_y, stroke="var(--ink)", stroke_width=0.7) if far else None
    halo: dict[str, Any] = {"stroke": "var(--paper)", "stroke_width": 3, "stroke_linejoin": "round"}
    halo |= {"paint_order": "stroke", "pointer_events": "none"}
    return join(leader, label(cx, cy, name, anchor="middle", size=SMALL, strong=strong, **halo))


def _shape(kind: str, x: float, y: float, tip: str | None, *, own: bool = False) -> Markup:
    edge = {"stroke": "var(--paper)", "stroke_width": 1.5}
    if kind == "base":
        return mark("rect", tip, x=x - 4.5, y=y - 4.5, width=9.0, height=9.0, fill="var(--ink)", **edge)
    if kind == "merged":
        return mark("path", tip, d=f"M{x:.2f} {y - 6.5:.2f}l6 10.5h-12z", fill="var(--c1)", **edge)
    return mark("circle", tip, cx=x, cy=y, r=6.5 if own else RADIUS, fill="var(--c3)" if own else "var(--c4)", **edge)


def _key(levels: Sequence[float], left: float, top: float) -> Markup:
    """Return the bands' colours with some of the levels between them."""
    count, each = len(levels), KEY / (len(levels) + 1)
    shown = [(left + each * (i + 1), number(levels[i])) for i in range(1, count, 4)]
    names = [label(x, top + 18, name, anchor="middle", soft=True, size=SMALL) for x, name in shown]
    return join(ramp([_band(i, count) for i in range(count + 1)], left, top, KEY), names)


def _shapes(left: float, y: float) -> Markup:
    parts, x = [], left
    for kind, name in (("base", "base"), ("task", "fine-tuned"), ("merged", "merged")):
        parts += [_shape(kind, x + 6, y, None), label(x + 16, y, name, soft=True, size=SMALL)]
        x += 30 + wide(name, SMALL)
    return join(parts)
