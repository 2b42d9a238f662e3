"""How well every method merges: the headline table, average and worst task, and task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from epimer.records import MethodScore
from epimer.report.blocks import Block, Cell, Choice, Figure, Rows, Section, Side, Table, cells, notes
from epimer.report.charts.bars import Row, bars, ranges
from epimer.report.charts.heat import Scale, heat
from epimer.report.figures import axis_name
from epimer.report.markup import Markup
from epimer.report.numbers import Unit, bounds, drawable, finite, number, percent
from epimer.report.performance import Performance
from epimer.score_format import LOSSES, format_p_value


def section(performance: Performance, *, named: bool) -> Section:
    """Return a suite's section; its name is in the heading where there are several."""
    blocks: list[Block] = [headline(performance)]
    if any(finite([score.average]) for score in performance.scores):
        parts: list[Figure | Choice | Table | Markup] = [averages(performance)]
        if performance.tasks:
            parts.append(Choice("Task", {task: task_bars(performance, task) for task in performance.tasks}))
        blocks.append(Side(parts))
    kept = shares(performance)
    blocks.append(Side([kept, notes(performance.notes)]) if kept else notes(performance.notes))
    return Section(f"Methods compared{f' on {performance.suite}' if named else ''}", blocks, short="Methods")


def headline(performance: Performance) -> Table:
    """Return the table of all methods."""
    unit = performance.unit
    compared = any(score.difference is not None for score in performance.scores)
    over_tasks = any(score.p_tasks is not None for score in performance.scores)
    doubted = any(score.trusted is not None for score in performance.scores)
    timed = any(score.seconds is not None for score in performance.scores)
    headings = ["method", f"average{' %' if unit.share else ''}", "95% interval", "worst task", "on it"]
    headings += [f"against {performance.against or 'the first'}", "p"] if compared else []
    headings += ["p, Holm", "p over tasks", "least without one task"] if over_tasks else []
    headings += ["without doubtful tasks", "against"] if doubted else []
    headings += ["scale", *(["merge s"] if timed else [])]
    scores = [*performance.references, *best_first(performance.merges)]
    rows: Rows = []
    for score in scores:
        row: list[Cell | str] = [score.method, *cells([score.average], unit.show, unit.plain)]
        row += [Cell(unit.interval(score.low, score.high), unit.plain(score.low)), score.worst_task]
        row += cells([score.worst], unit.show, unit.plain)
        if compared:
            row.append(_given(unit.apart(score.difference), unit.difference(score.difference)))
            row.append(_p_value(score.p))
        if over_tasks:
            row += [_p_value(score.p_holm), _p_value(score.p_tasks), _least_without_one(score, unit)]
        if doubted:
            row += cells([score.trusted], unit.show, unit.plain)
            by = score.difference_trusted
            row.append(_given(unit.apart(by), unit.difference(by)))
        row.append(_given(score.scale, number(score.scale) + ("*" if score.edge else "")))
        if timed:
            row.append(_given(score.seconds, number(score.seconds)))
        rows.append(row)
    best = frozenset(i for i, score in enumerate(scores) if score is performance.winner)
    quiet = frozenset(i for i, score in enumerate(scores) if score.reference)
    return Table(headings, rows, f"Every method's average and worst task on {performance.suite}", best, quiet)


def _p_value(p: float | None) -> Cell:
    return _given(p, "" if p is None else format_p_value(p))


def _least_without_one(score: MethodScore, unit: Unit) -> Cell:
    """Return the difference nearest to nothing, or on its other side, as one task is left out, and which task it is."""
    left, sign = score.difference_without, math.copysign(1.0, score.difference or 0.0)
    if not left:
        return Cell("", None)
    task = min(left, key=lambda name: sign * left[name])
    return _given(unit.apart(left[task]), f"{unit.difference(left[task])} ({task})")


def _given(value: float | None, text: str) -> Cell:
    """Return a cell that is empty where there is no value."""
    return Cell("" if value is None else text, value)


def best_first(scores: Sequence[MethodScore]) -> list[MethodScore]:
    """Return scores by their average."""
    return sorted(scores, key=lambda score: -math.inf if score.average is None else score.average, reverse=True)


def averages(performance: Performance) -> Figure:
    """Return averages with intervals, and worst tasks, best first."""
    unit = performance.unit
    scores = best_first([s for s in performance.scores if finite([s.average])])
    rows = []
    for s in scores:
        average = s.average or 0.0
        between = unit.between(*bounds(average, s.low, s.high), show=unit.exact)
        tip = f"{s.method}\naverage {unit.exact(average)} [{between}]"
        worst = f"{s.method}\nworst task: {s.worst_task} {unit.exact(s.worst)}"
        strong = s is performance.winner
        rows.append(Row(s.method, average, tip, s.low, s.high, s.worst, worst, strong, s.reference))
    said = ", ".join(f"{score.method} {unit.show(score.average)}" for score in scores[:6])
    names = ("average, 95% interval", "worst task")
    chart = ranges(rows, unit.tick, names, f"Averages, best first: {said}.", _axis(performance))
    body: Rows = [
        [s.method, *cells((s.average, *unit.ends(s.low, s.high), s.worst), unit.exact, unit.plain), s.worst_task]
        for s in scores
    ]
    caption = "Average, its 95% interval and the worst task of every method"
    table = Table(["method", "average", "low", "high", "worst", "worst task"], body, caption)
    return Figure("averages", "Average and worst task", chart, table, "Grey: not merged, for comparison.")


def task_bars(performance: Performance, task: str) -> Figure:
    """Return every method's score on one task, best first."""
    unit = performance.unit
    scored = [(s, s.tasks[task]) for s in performance.scores if drawable(s.tasks.get(task))]
    scored.sort(key=lambda pair: -pair[1])
    rows = []
    for s, value in scored:
        tip, strong = f"{s.method} on {task}\n{unit.exact(value)}", s is performance.winner
        rows.append(Row(s.method, value, tip, strong=strong, reference=s.reference))
    said = ", ".join(f"{s.method} {unit.show(value)}" for s, value in scored[:6])
    chart = bars(rows, unit.show, unit.tick, f"Scores on {task}, best first: {said}.", _axis(performance))
    body: Rows = [[s.method, *cells([value], unit.exact, unit.plain)] for s, value in scored]
    table = Table(["method", task], body, f"Every method's score on {task}")
    return Figure(f"task {task}", f"Every method on {task}", chart, table, f"Bold: {performance.chosen_by}.")


def shares(performance: Performance) -> Figure | None:
    """Return what share of each task's fine-tuned score the methods keep; None where scores are not shares."""
    own = next((s.tasks for s in performance.references if s.method == "fine-tuned"), {})
    tasks, merges = performance.tasks, best_first(performance.merges)
    if not performance.unit.share or not merges or not own or not all(own.get(task) for task in tasks):
        return None
    values = [[s.tasks[t] / own[t] if t in s.tasks else None for t in tasks] for s in merges]
    names = [s.method for s in merges]
    chart = heat(
        values, names, tasks, lambda v: percent(v, 0), "Darker cells keep more of the fine-tuned model's score.",
        scale=Scale(0.5, 1.0),
        tip=lambda m, t, v: f"{m} on {t}\nkeeps {percent(v, 2)}% of fine-tuned",
    )  # fmt: skip
    caption = "Share of the fine-tuned score kept, in percent"
    table = Table.matrix("method", names, tasks, values, caption, show=lambda v: percent(v, 2))
    return Figure(
        "kept", "Share of the fine-tuned score kept, %", chart, table, "Colours from 50 to 100% on every page."
    )


def _axis(performance: Performance) -> str:
    named = performance.metric if performance.metric in LOSSES else "score"
    return axis_name(f"{named} on test data", performance.unit)
