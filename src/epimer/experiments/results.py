"""What an experiment found: plain data, and how it reads as a table and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epimer.evaluation.statistics import Scores, compare
from epimer.score_format import (
    LOSSES,
    SHARES,
    format_interval,
    format_p_value,
    format_score,
    metric_difference,
    order_bounds,
)

FORMAT = 1  # of the JSON file
Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """An experiment's outcome: one dict of plain values per row, and what to know when reading them."""

    name: str
    title: str
    columns: Mapping[str, Callable[[Row], str]]
    """heading -> what a row shows there"""
    data: Sequence[Row]
    notes: list[str] = field(default_factory=list)
    figure: Mapping[str, Any] | None = None
    """of kind `lines` (x label, y label, per line its points (x, y, low, high)), `dots` or `maps` (a loss landscape)"""
    suite: str = ""
    metric: str = "accuracy"
    """what scores are of; in `data` and figures higher is better, so a loss is minus itself"""
    made: Mapping[str, Any] = field(default_factory=dict)
    """by which versions, when, and from what seed"""

    @property
    def headings(self) -> list[str]:
        """The table's headings."""
        return list(self.columns)

    @property
    def rows(self) -> list[list[str]]:
        """The table's cells."""
        return [[show(row) for show in self.columns.values()] for row in self.data]

    def markdown(self) -> str:
        """Return the table, in the paper's layout, and the notes."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.headings) + " |", "|" + "---|" * len(self.headings)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": "experiment",
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("name", "title", "suite", "metric", "made", "headings", "rows")},
            **{key: getattr(self, key) for key in ("data", "notes", "figure")},
        }


@dataclass(frozen=True)
class Lines:
    """Points of several lines, gathered one by one."""

    x: str
    y: str
    metric: str | None = None
    """what y is a score of, if it is one"""
    log: bool = False
    """x grows by factors"""
    lines: dict[str, list[tuple[float, float, float, float]]] = field(default_factory=dict)

    def add(self, line: str, x: float, y: float, low: float | None = None, high: float | None = None) -> None:
        """Add a point, with its interval where there is one."""
        self.lines.setdefault(line, []).append((x, y, y if low is None else low, y if high is None else high))

    def figure(self) -> dict[str, Any]:
        """Return plain data."""
        lines = {k: sorted(v) for k, v in self.lines.items()}
        return {"kind": "lines", "x": self.x, "y": self.y, "metric": self.metric, "log": self.log, "lines": lines}


def dots(
    rows: Sequence[Row],
    x: str,
    names: tuple[str, str] = ("average", "worst"),
    *,
    metric: str | None = None,
    log: bool = False,
) -> dict[str, Any]:
    """Return a figure of one value per row, with its interval where there is one, and a second value beside it."""
    first, second = names
    shown = {
        row["method"]: [row[first], row.get("low", row[first]), row.get("high", row[first]), row[second]]
        for row in rows
    }
    return {"kind": "dots", "x": x, "names": names, "metric": metric, "log": log, "dots": shown}


def summary(scores: Scores, names: Sequence[str]) -> Row:
    """Return an average, the worst task and all tasks, each with its 95% interval."""
    low, high = scores.interval()
    tasks = dict(zip(names, scores.accuracies, strict=True))
    intervals = {name: Scores([values]).interval() for name, values in zip(names, scores.values, strict=True)}
    found = {"average": scores.average, "low": low, "high": high, "worst": scores.worst}
    return {**found, "tasks": tasks, "intervals": intervals}


def against(one: Scores, other: Scores) -> Row:
    """Return by how much a merge is better than another: the difference, its 95% interval, and a paired test's p."""
    found = compare(one, other)
    return {"difference": found.difference, "between": [found.low, found.high], "p": found.p}


def number(key: str) -> Callable[[Row], str]:
    """Show a number, or nothing where a row has none."""
    return lambda row: "" if row.get(key) is None else f"{row[key]:.3g}"


def text(key: str) -> Callable[[Row], str]:
    """Show a value as it is, or nothing where a row has none."""
    return lambda row: "" if row.get(key) is None else str(row[key])


def share(key: str) -> Callable[[Row], str]:
    """Show a share in percent."""
    return lambda row: "" if row.get(key) is None else format_score("accuracy", row[key])


def starred(row: Row) -> str:
    """Show a scale, with a star where it is the last of its grid."""
    return number("scale")(row) + ("*" if row.get("edge") else "")


def edges(data: Sequence[Row]) -> list[str]:
    """Return what the stars mean, where there are any."""
    star = "* the best scale is the first or last of the grid; a better one may lie beyond it."
    return [star] if any(row.get("edge") for row in data) else []


@dataclass(frozen=True)
class Cells:
    """How scores of a metric are shown in a table."""

    metric: str

    def score(self, key: str) -> Callable[[Row], str]:
        """Show a score, or nothing where a row has none."""
        return lambda row: "" if row.get(key) is None else format_score(self.metric, row[key])

    def on_task(self, name: str) -> Callable[[Row], str]:
        """Show the score on one task."""
        return lambda row: format_score(self.metric, row["tasks"][name])

    def spread(self, key: str) -> Callable[[Row], str]:
        """Show how far scores lie apart."""
        return share(key) if self.metric in SHARES else lambda row: "" if row.get(key) is None else f"{row[key]:.3f}"

    def interval(self, row: Row) -> str:
        """Show an average with its interval."""
        return f"{format_score(self.metric, row['average'])} {format_interval(self.metric, row['low'], row['high'])}"

    def worst(self, row: Row) -> str:
        """Show the worst task's score with its interval."""
        name = min(row["tasks"], key=lambda task: row["tasks"][task])
        return f"{format_score(self.metric, row['worst'])} {format_interval(self.metric, *row['intervals'][name])}"

    def difference(self, row: Row) -> str:
        """Show the difference from another merge, with its interval and its p."""
        if row.get("difference") is None:
            return ""
        low, high = map(self._signed, order_bounds(self.metric, *row["between"]))
        return f"{self._signed(row['difference'])} [{low}, {high}], p {format_p_value(row['p'])}"

    def _signed(self, by: float) -> str:
        return f"{100 * by:+.1f}" if self.metric in SHARES else f"{metric_difference(self.metric, by):+.3f}"

    @property
    def margin(self) -> str:
        """What it is called when a merge is better than another."""
        return "fall in loss" if self.metric in LOSSES else f"{self.metric} margin"

    @property
    def differences(self) -> str:
        """What differences are in."""
        if self.metric in SHARES:
            return "in points"
        return "in loss, so that less is better" if self.metric in LOSSES else f"in {self.metric}"
