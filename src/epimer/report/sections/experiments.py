"""Experiments but for performance: α, η against rank, landscapes, and whatever has a table, lines or dots."""

from __future__ import annotations

import re
from collections.abc import Sequence

from epimer.records import Experiment, Lines, Maps
from epimer.records.experiment import Point
from epimer.report.blocks import Block, Cell, Choice, Figure, Rows, Section, Side, Table, cells, folded, notes
from epimer.report.charts.lines import Labels, lines
from epimer.report.figures import capital, eta_figures, exact, figures_of, has_numbers, series
from epimer.report.markup import tag
from epimer.report.numbers import Unit, number, percent, signed
from epimer.score_format import LOSSES, SHARES

FIRST = re.compile(r"^[-+−]?\d+(\.\d+)?(e[-+]?\d+)?")
OTHERS = ("tasks", "samples", "fisher-fraction", "worst-task", "metrics", "cost")


def has_own_section(experiment: Experiment) -> bool:
    """Whether an experiment has a section of its own: alpha, eta, landscapes, and performance (`sections.scores`)."""
    if experiment.name == "alpha":
        return isinstance(experiment.figure, Lines)
    return experiment.name in ("performance", "eta") or isinstance(experiment.figure, Maps)


def own_section(experiment: Experiment) -> Section:
    """Return the section of α, η or a landscape."""
    said, table = notes(experiment.notes), _table(experiment)
    hidden = folded("The experiment's own table", table)
    if isinstance(experiment.figure, Maps):
        heading, short = (experiment.title, "Basins") if _whole_plane(experiment) else ("Loss landscape", "Landscape")
        return Section(heading, [*_landscapes(experiment), said, hidden], short=short)
    if experiment.name == "alpha":
        return Section("Sensitivity to α", [Side(figures_of(experiment)), said, hidden], short="α")
    figures = Side([Choice("η", eta_figures("eta", experiment.data)), _margin(experiment)])
    return Section("η against rank", [figures, said, table], short="η")


def _margin(experiment: Experiment) -> Figure:
    """Return what curvature gains over the flat merge, against rank."""
    rows = [row for row in experiment.data if has_numbers(row, "k", "difference")]
    points: list[Point] = [(row["k"], row["difference"], row["difference"], row["difference"]) for row in rows]
    share = experiment.metric in SHARES
    gained = "fall in loss" if experiment.metric in LOSSES else f"{experiment.metric} margin"
    points_of = ", points" if share else ""

    def show(value: float | None) -> str:
        return signed(value, lambda size: percent(size, 2) if share else exact(size))

    labels = Labels("rank k", gained + points_of, lambda v: signed(v, Unit(share).tick), show)
    said = capital(f"{gained} of curvature over the flat merge against rank.")
    chart = lines(series({"margin": points}), labels, said, zero=True)
    body: Rows = [
        [
            *cells([row["k"]], number),
            *cells([row["difference"]], show),
            *cells([row["p"] if has_numbers(row, "p") else None], number),
        ]
        for row in rows
    ]
    table = Table(["k", f"margin{points_of}", "p"], body, capital(f"{gained} by rank"))
    return Figure("eta margin", capital(f"{gained} over the flat merge"), chart, table)


def _whole_plane(experiment: Experiment) -> bool:
    """Whether a landscape is of models with two weights, whose plane is all there is."""
    return experiment.name.startswith("basins")


def _landscapes(experiment: Experiment) -> list[Block]:
    """Return the loss on the plane of the models: summed, and of a task to choose."""
    assert isinstance(experiment.figure, Maps)
    intro = (
        "The plane goes through the mean of the fine-tuned models along their first two principal components, and "
        f"holds {percent(experiment.figure.explained, 0)}% of their variance. Models are marked where they fall on it."
    )
    summed, *tasks = figures_of(experiment)
    options = dict(zip(experiment.figure.maps, tasks, strict=True))
    said = [] if _whole_plane(experiment) else [tag("p", intro)]
    return [*said, Side([summed, Choice("Task", options)] if options else [summed])]


def others(experiments: Sequence[Experiment]) -> Section:
    """Return experiments without a section of their own: their figures, and their tables as they were written."""
    blocks: list[Block] = []
    for one in sorted(experiments, key=lambda one: OTHERS.index(one.name) if one.name in OTHERS else len(OTHERS)):
        charts = figures_of(one)
        blocks += [tag("h3", one.title), Side([*charts, _table(one)]) if charts else _table(one), notes(one.notes)]
    return Section("More experiments", blocks, short="More")


def _table(experiment: Experiment) -> Table:
    """Return an experiment's own table; a cell that begins with a number is sorted by it."""
    rows: Rows = [[row[0], *map(_cell, row[1:])] for row in experiment.rows]
    return Table(experiment.headings, rows, experiment.title)


def _cell(text: str) -> Cell:
    match = FIRST.match(text.strip())
    return Cell(text, float(match[0].replace("−", "-")) if match else None)
