"""A loss on the plane of the models: filled contours, and the models where they lie."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epimer.records import MapPoint
from epimer.report.charts.contour import Grid, contours, levels_of, region
from epimer.report.charts.frame import SMALL, WIDTH, Chart, across, label, mark, upward, wide
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
    """A map's place on the page."""

    x: Axis
    y: Axis

    @property
    def box(self) -> Box:
        """Its edges."""
        return self.x.start, self.y.end, self.x.end, self.y.start


def landscape(
    a: Sequence[float], b: Sequence[float], losses: Grid, points: Sequence[MapPoint], task: str, describes: str
) -> Chart:
    """Draw one map; the model that was fine-tuned for `task` is marked as such."""
    left, right, top = 44.0, WIDTH - 10.0, 10.0
    shape = (b[-1] - b[0]) / (a[-1] - a[0])
    tall = (right - left) * min(1.0, max(0.72, shape))
    plane = Plane(Axis(a[0], a[-1], left, right), Axis(b[0], b[-1], top + tall, top))
    levels = levels_of(losses, LEVELS)
    parts = [_filled(losses, a, b, plane, levels), _lined(losses, a, b, plane, levels)]
    parts.append(_sheet(losses, a, b, plane))
    for axis, draw, ends in ((plane.x, across, (top + tall, top + tall)), (plane.y, upward, (left, left))):
        parts.append(draw(axis, ticks(axis.low, axis.high, 5), number, *ends))
    parts.append(label((left + right) / 2, top + tall + 28, "a", anchor="middle", soft=True, size=SMALL))
    parts.append(label(8, top + tall / 2, "b", soft=True, size=SMALL))
    parts.append(_marked(points, plane, task))
    parts.append(_key(levels, left, top + tall + 44))
    parts.append(_shapes(left + KEY + 14, top + tall + 48))
    return Chart(WIDTH, top + tall + 74, join(parts), describes)


def _band(i: int, count: int) -> str:
    return f"var(--q{round(i * (STEPS - 1) / max(1, count))})"


def _filled(losses: Grid, a: Sequence[float], b: Sequence[float], plane: Plane, levels: Sequence[float]) -> Markup:
    """Paint the region above each level over the ones before."""
    left, top, right, bottom = plane.box
    parts = [tag("rect", x=left, y=top, width=right - left, height=bottom - top, fill=_band(0, len(levels)))]
    for i, level in enumerate(levels, 1):
        path = "".join(
            _path([(plane.x(x), plane.y(y)) for x, y in shape]) + "z" for shape in region(losses, a, b, level)
        )
        parts.append(tag("path", d=path, fill=_band(i, len(levels))))
    return join(parts)


def _lined(losses: Grid, a: Sequence[float], b: Sequence[float], plane: Plane, levels: Sequence[float]) -> Markup:
    parts = []
    for level in levels:
        path = "".join(_path([(plane.x(x), plane.y(y)) for x, y in line]) for line in contours(losses, a, b, level))
        parts.append(
            tag(
                "path", d=path, fill="none", stroke="var(--paper)", stroke_width=0.7, stroke_opacity=0.75,
                data_level=number(level, 6),
            )
        )  # fmt: skip
    return join(parts)


def _path(spots: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{place(x)} {place(y)}" for x, y in spots)


def _sheet(losses: Grid, a: Sequence[float], b: Sequence[float], plane: Plane) -> Markup:
    """Return a clear sheet that knows the grid's values, for the pointer."""
    left, top, right, bottom = plane.box
    rounded = [[float(f"{value:.5g}") if math.isfinite(value) else None for value in row] for row in losses]
    know = {"a": [float(f"{x:.4g}") for x in a], "b": [float(f"{y:.4g}") for y in b], "values": rounded}
    return tag(
        "rect", x=left, y=top, width=right - left, height=bottom - top, fill="var(--paper)", fill_opacity=0,
        data_map=json.dumps(know, separators=(",", ":")),
    )  # fmt: skip


def _marked(points: Sequence[MapPoint], plane: Plane, task: str) -> Markup:
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
        width = wide(point.name, SMALL) + 2
        box = _free(x, y, width, taken, plane.box)
        taken.append(box)
        names.append(_name(point.name, x, y, box, strong=own or point.kind == "merged"))
    return join(names, shapes[::-1])


def _free(x: float, y: float, width: float, taken: Sequence[Box], page: Box) -> Box:
    """Return the place for a label near (x, y) that overlaps least with what is there."""
    best, least = (x, y, x + width, y + 12), float("inf")
    for reach in (8.0, 16.0, 26.0, 38.0, 52.0, 70.0):
        for dx, dy in ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8)):
            cx, cy = x + dx * (reach + width / 2), y + dy * (reach + 2)
            box = (cx - width / 2, cy - 6.5, cx + width / 2, cy + 6.5)
            out = (
                max(0.0, page[0] - box[0])
                + max(0.0, box[2] - page[2])
                + max(0.0, page[1] - box[1])
                + max(0.0, box[3] - page[3])
            )
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
    parts = []
    for i in range(count + 1):
        parts.append(tag("rect", x=left + each * i, y=top, width=each + 0.3, height=8.0, fill=_band(i, count)))
    for i in range(1, count, 4):
        parts.append(label(left + each * (i + 1), top + 18, number(levels[i]), anchor="middle", soft=True, size=SMALL))
    return join(parts)


def _shapes(left: float, y: float) -> Markup:
    """Return what the shapes mean."""
    parts, x = [], left
    for kind, name in (("base", "base"), ("task", "fine-tuned"), ("merged", "merged")):
        parts += [_shape(kind, x + 6, y, None), label(x + 16, y, name, soft=True, size=SMALL)]
        x += 30 + wide(name, SMALL)
    return join(parts)
