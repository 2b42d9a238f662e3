"""How one model does: on a suite, beside the base and the fine-tuned models, or in a harness."""

from __future__ import annotations

import math

from epimer.report.blocks import Block, Cell, Figure, Rows, Section, Table, paragraph
from epimer.report.charts.bars import Range, ranges
from epimer.report.kinds import Evaluation, Harness, Judged, Overall
from epimer.report.markup import tag
from epimer.report.numbers import NOTHING, Unit, finite, number
from epimer.score_format import LOSSES, SHARES


def section(found: Evaluation) -> Section:
    """Return a suite's tasks: the model's score with its interval, the base's and the fine-tuned model's."""
    compared = any(task.base is not None or task.fine_tuned is not None for task in found.tasks)
    headings = ["task", "metric", "samples", "model", "95% interval", *(["base", "fine-tuned"] if compared else [])]
    rows: Rows = [_row(task.name, task.metric, number(task.samples), task, compared=compared) for task in found.tasks]
    metrics = {"accuracy" if task.metric in SHARES else task.metric for task in found.tasks}
    metric = metrics.pop() if len(metrics) == 1 else ""
    for name, overall in (("average", found.average), ("worst", found.worst)):
        if overall is not None and len(found.tasks) > 1:
            rows.append(_row(name, metric, overall.task, overall, compared=compared))
    totals = frozenset(range(len(found.tasks), len(rows)))
    intro = paragraph(tag("b", found.model), f" on {found.split} data of {found.suite}.")
    blocks: list[Block] = [intro, Table(headings, rows, f"{found.model} on {found.suite}", totals)]
    if metric and len(found.tasks) > 1:
        blocks.append(_chart(found, metric, compared=compared))
    return Section(f"Evaluation on {found.suite}", blocks, short="Evaluation")


def _unit(metric: str) -> Unit:
    """Return how numbers of a metric read, which here are what people know it by: a loss is a loss."""
    return Unit(metric in SHARES)


def _row(name: str, metric: str, samples: str, found: Judged | Overall, *, compared: bool) -> list[Cell | str]:
    unit = _unit(metric)
    between = NOTHING if found.low is None else f"[{unit.between(found.low, found.high)}]"
    row: list[Cell | str] = [
        name,
        f"{metric}, %" if unit.share else metric,
        samples,
        Cell(unit.show(found.score), found.score),
        Cell(between, found.low),
    ]
    if compared:
        row += [Cell(unit.show(value), value) for value in (found.base, found.fine_tuned)]
    return row


def _chart(found: Evaluation, metric: str, *, compared: bool) -> Figure:
    """Return the model's scores with their intervals, and the fine-tuned models' beside them."""
    unit, rows = _unit(metric), []
    for task in found.tasks:
        if not finite([task.score]):
            continue
        low, high = (v if math.isfinite(v) else task.score for v in (task.low, task.high))
        own = next(iter(finite([task.fine_tuned])), None)
        tips = f"{task.name}\n{unit.exact(task.score)}", f"{task.name}\nfine-tuned {unit.exact(task.fine_tuned)}"
        rows.append(Range(task.name, task.score, low, high, own, *tips))
    names = ("model, 95% interval", "fine-tuned")
    axis = metric + (", %" if unit.share else "") + (", less is better" if metric in LOSSES else "")
    said = ", ".join(f"{task.name} {unit.show(task.score)}" for task in found.tasks)
    chart = ranges(rows, unit.tick, names if compared else (names[0], ""), f"Scores by task: {said}.", axis)
    headings = ["task", "model", "low", "high", *(["fine-tuned"] if compared else [])]
    values = [(task.score, task.low, task.high, task.fine_tuned) for task in found.tasks]
    cells: Rows = [
        [task.name, *(Cell(unit.exact(v), v) for v in row[: len(headings) - 1])]
        for task, row in zip(found.tasks, values, strict=True)
    ]
    table = Table(headings, cells, f"{found.model} by task")
    return Figure(f"evaluation {found.suite}", "Task by task", chart, table)


def harness(found: Harness) -> Section:
    """Return a harness's table as it is."""
    rows: Rows = []
    for row in found.results:
        named = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
        rows.append([row.task, named, *(Cell(number(value, 4), value) for value in (row.score, row.stderr))])
    some = "" if found.limit is None else f", the first {found.limit} samples of each task"
    intro = paragraph(tag("b", found.model), f" by {found.harness}{some}.")
    table = Table(["task", "metric", "score", "± s.e."], rows, f"{found.model} by {found.harness}")
    return Section(f"Scores by {found.harness}", [intro, table], short=found.harness)
