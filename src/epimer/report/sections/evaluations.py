"""How one model does: on a suite, beside the base and the fine-tuned models, or in a harness."""

from __future__ import annotations

from dataclasses import replace

from epimer.records import EvaluationRecord, HarnessRecord, OverallScore, TaskScore
from epimer.report.blocks import Block, Cell, Figure, Rows, Section, Table, cells
from epimer.report.charts.bars import Row, ranges
from epimer.report.figures import axis_name
from epimer.report.markup import tag
from epimer.report.numbers import Unit, drawable, number
from epimer.score_format import LOSSES, SHARES


def section(evaluation: EvaluationRecord) -> Section:
    """Return a suite's tasks: the model's score with its interval, the base's and the fine-tuned model's."""
    intro = tag("p", tag("b", evaluation.model), f" on {evaluation.split} data of {evaluation.suite}.")
    blocks: list[Block] = [intro, score_table(evaluation)]
    metric = _shared_metric(evaluation)
    if metric and len(evaluation.tasks) > 1:
        blocks.append(_chart(evaluation, metric, compared=_is_compared(evaluation)))
    return Section(f"Evaluation on {evaluation.suite}", blocks, short="Evaluation")


def _is_compared(evaluation: EvaluationRecord) -> bool:
    return any(task.base is not None or task.fine_tuned is not None for task in evaluation.tasks)


def _shared_metric(evaluation: EvaluationRecord) -> str:
    """Return the metric of all tasks, an empty text if they have several."""
    metrics = {task.metric for task in evaluation.tasks}
    if len(metrics) > 1:
        metrics = {"accuracy" if metric in SHARES else metric for metric in metrics}
    return metrics.pop() if len(metrics) == 1 else ""


def score_table(evaluation: EvaluationRecord) -> Table:
    """Return every task's score with its interval, the average and the worst, beside the base's and fine-tuned ones."""
    tasks, compared = evaluation.tasks, _is_compared(evaluation)
    headings = ["task", "metric", "samples", "model", "95% interval", *(["base", "fine-tuned"] if compared else [])]
    rows: Rows = [_row(task.name, task.metric, number(task.samples), task, compared=compared) for task in tasks]
    metric = _shared_metric(evaluation)
    for name, overall in (("average", evaluation.average), ("worst", evaluation.worst)):
        if overall is not None and len(tasks) > 1:
            rows.append(_row(name, metric, overall.task or "", overall, compared=compared))
    totals = frozenset(range(len(tasks), len(rows)))
    return Table(headings, rows, f"{evaluation.model} on {evaluation.suite}", totals)


def first_scores(evaluation: EvaluationRecord) -> tuple[str, Table]:
    """Return a title and a table of the scores alone, for the first screen."""
    table = score_table(evaluation)
    metric = _shared_metric(evaluation)
    title = f"{evaluation.model} on {evaluation.split} data of {evaluation.suite}"
    left_out = ("metric", "samples") if metric else ("samples",)
    kept = [i for i, heading in enumerate(table.headings) if heading not in left_out]
    rows = [[row[i] for i in kept] for row in table.rows]
    short = replace(table, headings=[table.headings[i] for i in kept], rows=rows)
    return f"{title}: {axis_name(metric, _unit(metric))}" if metric else title, short


def _unit(metric: str) -> Unit:
    """Return how numbers of a metric are shown, which are as the metric is known: a loss is a loss."""
    return Unit(metric in SHARES)


def _row(name: str, metric: str, samples: str, score: TaskScore | OverallScore, *, compared: bool) -> list[Cell | str]:
    unit = _unit(metric)
    row: list[Cell | str] = [name, axis_name(metric, unit), samples, *cells([score.score], unit.show)]
    others = (score.base, score.fine_tuned) if compared else ()
    return [*row, Cell(unit.interval(score.low, score.high), score.low), *cells(others, unit.show)]


def _chart(evaluation: EvaluationRecord, metric: str, *, compared: bool) -> Figure:
    unit, tasks = _unit(metric), evaluation.tasks
    rows = []
    for t in tasks:
        tip, second_tip = f"{t.name}\n{unit.exact(t.score)}", f"{t.name}\nfine-tuned {unit.exact(t.fine_tuned)}"
        if drawable(t.score):
            rows.append(Row(t.name, t.score, tip, t.low, t.high, t.fine_tuned, second_tip))
    names = ("model, 95% interval", "fine-tuned" if compared else "")
    axis = axis_name(metric, unit) + (", less is better" if metric in LOSSES else "")
    said = ", ".join(f"{task.name} {unit.show(task.score)}" for task in tasks)
    chart = ranges(rows, unit.tick, names, f"Scores by task: {said}.", axis)
    headings = ["task", "model", "low", "high", *(["fine-tuned"] if compared else [])]
    body: Rows = [
        [t.name, *cells((t.score, t.low, t.high, t.fine_tuned)[: len(headings) - 1], unit.exact)] for t in tasks
    ]
    table = Table(headings, body, f"{evaluation.model} by task")
    return Figure(f"evaluation {evaluation.suite}", "Task by task", chart, table)


def harness(record: HarnessRecord) -> Section:
    """Return a harness's table as it is."""
    some = "" if record.limit is None else f", the first {record.limit} samples of each task"
    intro = tag("p", tag("b", record.model), f" by {record.harness}{some}.")
    return Section(f"Scores by {record.harness}", [intro, harness_table(record)], short=record.harness)


def harness_table(record: HarnessRecord) -> Table:
    """Return every number of a harness."""
    rows: Rows = [
        [row.task, row.filtered_metric, *cells((row.score, row.stderr), lambda value: number(value, 4))]
        for row in record.results
    ]
    return Table(["task", "metric", "score", "± s.e."], rows, f"{record.model} by {record.harness}")
