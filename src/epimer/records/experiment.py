"""What an experiment measured: a table, the numbers behind it, and often a figure."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from epimer.plain_text import markdown_line, table_cell
from epimer.records.record import Record

FARTHEST, NEAREST = 1e100, 1e-100  # of the ends of a landscape's axes, and of their distance
Point = tuple[float, float, float, float]
"""x, y and the ends of y's interval"""


@dataclass(frozen=True)
class Lines:
    """Lines of points with intervals."""

    x: str
    y: str
    lines: dict[str, list[Point]] = field(default_factory=dict)
    metric: str | None = None
    """what y is a score of, if it is one; a loss is minus itself, so that higher is better"""
    log: bool = False
    """x grows by factors"""
    beside: Lines | None = None
    """a second panel, drawn on the left"""
    kind: Literal["lines"] = "lines"

    def add(self, line: str, x: float, y: float, low: float | None = None, high: float | None = None) -> None:
        """Add a point to a line, with its interval where there is one; points are kept in order of x."""
        insort(self.lines.setdefault(line, []), (x, y, y if low is None else low, y if high is None else high))


@dataclass(frozen=True)
class Dots:
    """Rows of a value with its interval and a second value: (value, low, high, second)."""

    x: str
    names: tuple[str, str]
    """what the value and the second value are"""
    dots: dict[str, tuple[float, float, float, float]]
    metric: str | None = None
    """what the values are scores of, if they are"""
    log: bool = False
    kind: Literal["dots"] = "dots"


@dataclass(frozen=True)
class MapPoint:
    """A model on a landscape's plane."""

    name: str
    kind: str
    """base, task or merged"""
    a: float
    b: float
    off: float = 0.0
    """distance from the plane, as a share of the distance from the plane's origin"""
    joint: float = math.nan
    """its own loss, summed over tasks"""
    losses: dict[str, float] = field(default_factory=dict)
    """task -> its own loss"""


@dataclass(frozen=True)
class Maps:
    """Losses on a grid of the plane of the models, per task and summed: `maps[task][row of b][column of a]`."""

    a: list[float]
    b: list[float]
    maps: dict[str, list[list[float]]]
    joint: list[list[float]]
    points: list[MapPoint]
    explained: float
    """share of the fine-tuned models' variance that lies in the plane"""
    kind: Literal["maps"] = "maps"

    def __post_init__(self) -> None:
        for name, losses in {"joint": self.joint, **self.maps}.items():
            if len(losses) != len(self.b) or any(len(row) != len(self.a) for row in losses):
                raise ValueError(f"map {name!r} is not of {len(self.b)} x {len(self.a)} values")
        for name, axis in (("a", self.a), ("b", self.b)):
            rising = all(low < high for low, high in pairwise(axis))
            if len(axis) < 2 or not rising or not all(abs(x) < FARTHEST for x in axis) or axis[-1] - axis[0] < NEAREST:
                raise ValueError(f"{name} must be two or more rising numbers that can be drawn")


@dataclass(frozen=True)
class Experiment(Record):
    """A table with the numbers behind it, and often a figure: what `epimer bench` and `epimer demo` write."""

    kind: ClassVar[str] = "experiment"
    omitted: ClassVar[frozenset[str]] = frozenset({"beside"})

    name: str
    title: str
    headings: list[str]
    rows: list[list[str]]
    """the table's cells"""
    data: list[dict[str, Any]]
    """one dict of plain values per row; scores are such that higher is better, so a loss is minus itself"""
    notes: list[str] = field(default_factory=list)
    """what to know when reading the table"""
    figure: Annotated[Lines | Dots | Maps, Field(discriminator="kind")] | None = None
    suite: str = ""
    metric: str = "accuracy"
    """what scores are of"""
    made: dict[str, Any] = field(default_factory=dict)
    """provenance: commit, versions, date, machine, command, seed and samples"""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError("a row has not as many cells as there are headings")

    def only(self, headings: Collection[str]) -> Experiment:
        kept = [i for i, heading in enumerate(self.headings) if heading in headings]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, headings=[self.headings[i] for i in kept], rows=rows)

    def markdown(self) -> str:
        head, *rows = ("| " + " | ".join(map(table_cell, cells)) + " |" for cells in (self.headings, *self.rows))
        lines = [f"## {markdown_line(self.title)}", "", head, "|" + "---|" * len(self.headings), *rows]
        return "\n".join([*lines, "", *(f"- {markdown_line(note)}" for note in self.notes), ""])
