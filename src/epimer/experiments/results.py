"""Results of experiments: rows of plain values, how each column of a table shows them, and the files they go to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from epimer.atomic_files import atomic_file, explain_os_errors
from epimer.checkpoints.writer import as_json
from epimer.evaluation.statistics import EXACT, Scores, compare, holm
from epimer.evaluation.suite import Suite, SuiteTask
from epimer.records import Dots, Experiment, Lines, Maps
from epimer.report.figures import figure_file
from epimer.score_format import (
    LOSSES,
    SHARES,
    format_interval,
    format_p_value,
    format_score,
    metric_difference,
    order_bounds,
)

Row = dict[str, Any]
Column = Callable[[Row], str]
"""what a row shows in a column"""


def tabulate(
    name: str,
    title: str,
    columns: Mapping[str, Column],
    data: Sequence[Row],
    notes: Sequence[str] = (),
    figure: Lines | Dots | Maps | None = None,
) -> Experiment:
    """Return an experiment's record: its table is what every column, by its heading, shows of every row."""
    rows = [[show(row) for show in columns.values()] for row in data]
    return Experiment(name, title, list(columns), rows, list(data), list(notes), figure)


def with_published(experiment: Experiment, suite: Suite) -> Experiment:
    """Return the table of performance with what others report for the same methods, where the suite knows of it.

    A column for each publication follows ours, and the suite's remarks follow the notes.
    """
    if experiment.name != "performance" or not suite.published:
        return experiment
    rows, data = [], []
    for cells, row in zip(experiment.rows, experiment.data, strict=True):
        reported = {who: scores[row["method"]] for who, scores in suite.published.items() if row["method"] in scores}
        rows.append([*cells, *(f"{reported[who]:.1f}" if who in reported else "" for who in suite.published)])
        data.append({**row, "published": reported})
    headings, notes = [*experiment.headings, *suite.published], [*experiment.notes, *suite.remarks]
    return replace(experiment, headings=headings, rows=rows, data=data, notes=notes)


def write(experiment: Experiment, folder: Path) -> list[Path]:
    """Write JSON, a Markdown table, and the figure as SVG where there is one; return the files' paths."""
    contents = {"json": as_json(experiment.to_dict()), "md": experiment.markdown().encode()}
    if svg := figure_file(experiment):
        contents["svg"] = svg.encode()
    with explain_os_errors(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    files = []
    for extension, content in contents.items():
        files.append(folder / f"{experiment.name}.{extension}")
        with atomic_file(files[-1]) as draft:
            draft.write_bytes(content)
    return files


def dots(
    rows: Sequence[Row],
    x: str,
    names: tuple[str, str] = ("average", "worst"),
    *,
    metric: str | None = None,
    log: bool = False,
) -> Dots:
    """Return a figure of one value per row, with its interval where there is one, and a second value."""
    first, second = names
    values = {}
    for row in rows:
        low, high = (row["low"], row["high"]) if "low" in row else (row[first], row[first])
        values[row["method"]] = row[first], low, high, row[second]
    return Dots(x, names, values, metric, log)


def summary(scores: Scores, tasks: Sequence[SuiteTask]) -> Row:
    """Return an average, the worst task and all tasks, each with its 95% interval, and the average without each task.

    Where tasks are doubtful, `trusted` is the average without them.
    """
    low, high = scores.interval()
    names, trusted = [task.name for task in tasks], _trusted(scores, tasks)
    return {
        "average": scores.average,
        "low": low,
        "high": high,
        "worst": scores.worst,
        "tasks": dict(zip(names, scores.accuracies, strict=True)),
        "intervals": {name: Scores([values]).interval() for name, values in zip(names, scores.values, strict=True)},
        "without": dict(zip(names, scores.averages_without_one, strict=False)),  # none of a single task
        **({} if trusted is scores else {"trusted": trusted.average}),
    }


def against(scores: Scores, other: Scores, tasks: Sequence[SuiteTask]) -> Row:
    """Return by how much a merge is better than another.

    The difference, its 95% interval, p of paired tests over samples and over tasks, and the difference without each
    task; where tasks are doubtful, also the difference and its p without them.
    """
    margin = compare(scores, other)
    row: Row = {"difference": margin.difference, "between": [margin.low, margin.high], "p": margin.p}
    without = zip((task.name for task in tasks), margin.without_one, strict=False)
    row |= {"p_tasks": margin.p_tasks, "difference_without": dict(without)}
    if (trusted := _trusted(scores, tasks)) is not scores:
        kept = compare(trusted, _trusted(other, tasks))
        row |= {"difference_trusted": kept.difference, "p_trusted": kept.p, "p_tasks_trusted": kept.p_tasks}
    return row


def _trusted(scores: Scores, tasks: Sequence[SuiteTask]) -> Scores:
    """Return the scores without those of doubtful tasks; the same scores where none is, or all are."""
    kept = [values for values, task in zip(scores.values, tasks, strict=True) if not task.doubtful]
    return Scores(kept) if 0 < len(kept) < len(tasks) else scores


def correct_for_number(data: Sequence[Row]) -> None:
    """Add `p_holm` to the rows of a table that have a p: corrected by Holm's method for how many they are."""
    compared = [row for row in data if row.get("p") is not None]
    for row, p in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["p_holm"] = p


def comparison_notes(metric: str, data: Sequence[Row], tasks: Sequence[SuiteTask]) -> list[str]:
    """Return what the columns of `Cells.comparison` show."""
    count, unit = sum(row.get("p") is not None for row in data), Cells(metric).differences
    how = "all patterns of signs" if len(tasks) <= EXACT else "drawn patterns of signs"
    least = f", so at least {2 / 2 ** len(tasks):.3g} with {len(tasks)} tasks" if len(tasks) <= EXACT else ""
    notes = [
        f"Differences {unit}, with 95% intervals and p of a paired sign-flip test over test samples, which says "
        f"nothing of other tasks; in brackets p corrected for {count} comparisons by Holm's method.",
        f"p over tasks: the same test with tasks as its units, over {how}{least}; not corrected.",
        "Without one task: the least and the largest difference (average, where nothing is compared) as each task in "
        "turn is left out.",
    ]
    doubtful = [f"{task.name} is doubtful: {task.doubtful}." for task in tasks if task.doubtful]
    return notes + ([*doubtful, "Nothing is chosen by a doubtful task."] if doubtful else [])


def text(key: str, show: Callable[[Any], str] = str) -> Column:
    """Show a value, or nothing where a row has none."""
    return lambda row: "" if row.get(key) is None else show(row[key])


def number(key: str, form: str = ".3g") -> Column:
    """Show a number, or nothing where a row has none."""
    return text(key, f"{{:{form}}}".format)


def share(key: str) -> Column:
    """Show a share in percent."""
    return Cells("accuracy").score(key)


def starred_scale(row: Row) -> str:
    """Show a scale, with a star where it is the first or last of its grid."""
    return number("scale")(row) + ("*" if row.get("edge") else "")


def edge_notes(data: Sequence[Row]) -> list[str]:
    """Return what the stars of `starred_scale` mean, where there are any."""
    star = "* the best scale is the first or last of the grid; a better one may lie beyond it."
    return [star] if any(row.get("edge") for row in data) else []


@dataclass(frozen=True)
class Cells:
    """How scores of a metric are shown in a table."""

    metric: str

    def score(self, key: str) -> Column:
        """Show a score, or nothing where a row has none."""
        return text(key, partial(format_score, self.metric))

    def on_task(self, name: str) -> Column:
        """Show the score on one task."""
        return lambda row: format_score(self.metric, row["tasks"][name])

    def spread(self, key: str) -> Column:
        """Show a standard error of scores."""
        return share(key) if self.metric in SHARES else number(key, ".3f")

    def interval(self, row: Row) -> str:
        """Show an average with its interval."""
        return f"{format_score(self.metric, row['average'])} {format_interval(self.metric, row['low'], row['high'])}"

    def worst(self, row: Row) -> str:
        """Show the worst task's score with its interval."""
        name = min(row["tasks"], key=lambda task: row["tasks"][task])
        return f"{format_score(self.metric, row['worst'])} {format_interval(self.metric, *row['intervals'][name])}"

    def comparison(self, heading: str, tasks: Sequence[SuiteTask]) -> dict[str, Column]:
        """Return the columns of a difference, by their headings: itself, its test over tasks, and tasks left out."""
        columns: dict[str, Column] = {heading: self.difference, "p over tasks": text("p_tasks", format_p_value)}
        if len(tasks) > 1:
            columns["without one task"] = self.without_one
        doubtful = [task.name for task in tasks if task.doubtful]
        if 0 < len(doubtful) < len(tasks):
            columns[f"without {', '.join(doubtful)}"] = self.trusted
        return columns

    def difference(self, row: Row) -> str:
        """Show the difference from another merge, with its interval and its p."""
        if row.get("difference") is None:
            return ""
        low, high = map(self.with_sign, order_bounds(self.metric, *row["between"]))
        corrected = f" ({format_p_value(row['p_holm'])})" if "p_holm" in row else ""
        return f"{self.with_sign(row['difference'])} [{low}, {high}], p {format_p_value(row['p'])}{corrected}"

    def without_one(self, row: Row) -> str:
        """Show between what the difference, or else the average, lies as each task in turn is left out."""
        compared = bool(row.get("difference_without"))
        values = row["difference_without"] if compared else row["without"]
        if not values:
            return ""
        show = self.with_sign if compared else partial(format_score, self.metric)
        ends = order_bounds(self.metric, min(values, key=values.__getitem__), max(values, key=values.__getitem__))
        return " to ".join(f"{show(values[task])} ({task})" for task in ends)

    def trusted(self, row: Row) -> str:
        """Show the average without doubtful tasks, and the difference there."""
        average = text("trusted", partial(format_score, self.metric))(row)
        by, p = row.get("difference_trusted"), text("p_trusted", format_p_value)(row)
        return ", ".join([average, *([self.with_sign(by)] if by is not None else []), *([f"p {p}"] if p else [])])

    def with_sign(self, by: float) -> str:
        """Format a difference with its sign."""
        return f"{100 * by:+.1f}" if self.metric in SHARES else f"{metric_difference(self.metric, by):+.3f}"

    @property
    def margin(self) -> str:
        """The name of a merge's advantage over another."""
        return "fall in loss" if self.metric in LOSSES else f"{self.metric} margin"

    @property
    def differences(self) -> str:
        """The unit of differences, in words."""
        if self.metric in SHARES:
            return "in points"
        return "in loss, so that less is better" if self.metric in LOSSES else f"in {self.metric}"
