"""How well every method merges: the headline table, average and worst task, and task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from epimer.report.blocks import Block, Cell, Choice, Figure, Rows, Section, Side, Table, notes
from epimer.report.charts.bars import Bar, Range, bars, ranges
from epimer.report.charts.heat import Scale, heat
from epimer.report.kinds import Performance, Score
from epimer.report.markup import Markup
from epimer.report.numbers import NOTHING, finite, number, percent
from epimer.score_format import LOSSES, format_p_value


def section(found: Performance, *, named: bool) -> Section:
    """Return a suite's section; its name is in the heading where there are several."""
    blocks: list[Block] = [headline(found)]
    scored = any(finite([score.average]) for score in found.scores)
    if scored:
        parts: list[Figure | Choice | Table | Markup] = [averages(found)]
        if found.tasks:
            parts.append(Choice("Task", {task: task_bars(found, task) for task in found.tasks}))
        blocks.append(Side(parts))
    kept = shares(found)
    blocks.append(Side([kept, notes(found.notes)]) if kept else notes(found.notes))
    return Section(f"Methods compared{f' on {found.suite}' if named else ''}", blocks, short="Methods")


def headline(found: Performance) -> Table:
    """Return the table of all methods."""
    unit, winner = found.unit, found.winner
    compared = any(score.difference is not None for score in found.scores)
    timed = any(score.seconds is not None for score in found.scores)
    headings = ["method", f"average{' %' if unit.share else ''}", "95% interval", "worst task", "on it"]
    headings += [f"against {found.against or 'the first'}", "p"] if compared else []
    headings += ["scale"] + (["merge s"] if timed else [])
    rows: Rows = []
    scores = [*found.references, *best_first(found.merges)]
    for score in scores:
        row: list[Cell | str] = [
            Cell(score.method),
            Cell(unit.show(score.average), unit.plain(score.average)),
            Cell(_interval(score, found), unit.plain(score.low)),
            Cell(score.worst_task),
            Cell(unit.show(score.worst), unit.plain(score.worst)),
        ]
        if compared:
            by = unit.difference(score.difference) if score.difference is not None else ""
            row += [Cell(by, unit.apart(score.difference))]
            row += [Cell("" if score.p is None else format_p_value(score.p), score.p)]
        row.append(Cell("" if score.scale is None else number(score.scale) + ("*" if score.edge else ""), score.scale))
        if timed:
            row.append(Cell("" if score.seconds is None else number(score.seconds), score.seconds))
        rows.append(row)
    best = frozenset(i for i, score in enumerate(scores) if score is winner)
    quiet = frozenset(i for i, score in enumerate(scores) if score.reference)
    return Table(headings, rows, f"Every method's average and worst task on {found.suite}", best, quiet)


def best_first(scores: Sequence[Score]) -> list[Score]:
    """Return scores by their average."""
    return sorted(scores, key=lambda score: -math.inf if score.average is None else score.average, reverse=True)


def _interval(score: Score, found: Performance) -> str:
    if score.low is None or score.high is None:
        return NOTHING
    return f"[{found.unit.between(score.low, score.high)}]"


def averages(found: Performance) -> Figure:
    """Return averages with intervals, and worst tasks, best first."""
    unit = found.unit
    scores = best_first([s for s in found.scores if finite([s.average])])
    rows = []
    for score in scores:
        average = score.average or 0.0
        low, high = (v if v is not None and math.isfinite(v) else average for v in (score.low, score.high))
        tip = f"{score.method}\naverage {unit.exact(average)} [{unit.between(low, high, show=unit.exact)}]"
        worst_tip = f"{score.method}\nworst task: {score.worst_task} {unit.exact(score.worst)}"
        rows.append(
            Range(
                score.method, average, low, high, next(iter(finite([score.worst])), None), tip, worst_tip,
                strong=score is found.winner, reference=score.reference,
            )
        )  # fmt: skip
    said = ", ".join(f"{score.method} {unit.show(score.average)}" for score in scores[:6])
    chart = ranges(
        rows, unit.tick, ("average, 95% interval", "worst task"), f"Averages, best first: {said}.", _axis(found)
    )
    table = Table(
        ["method", "average", "low", "high", "worst", "worst task"],
        [
            [
                s.method,
                *(Cell(unit.exact(v), unit.plain(v)) for v in (s.average, *unit.ends(s.low, s.high), s.worst)),
                s.worst_task,
            ]
            for s in scores
        ],
        "Average, its 95% interval and the worst task of every method",
    )
    return Figure("averages", "Average and worst task", chart, table, "Grey: not merged, for comparison.")


def task_bars(found: Performance, task: str) -> Figure:
    """Return every method's score on one task, best first."""
    unit = found.unit
    scores = sorted(
        (s for s in found.scores if math.isfinite(s.tasks.get(task, math.nan))), key=lambda s: -s.tasks[task]
    )
    rows = [
        Bar(
            s.method, s.tasks[task], f"{s.method} on {task}\n{unit.exact(s.tasks[task])}",
            strong=s is found.winner, reference=s.reference,
        )
        for s in scores
    ]  # fmt: skip
    said = ", ".join(f"{s.method} {unit.show(s.tasks[task])}" for s in scores[:6])
    chart = bars(rows, unit.show, unit.tick, f"Scores on {task}, best first: {said}.", _axis(found))
    table = Table(
        ["method", task],
        [[s.method, Cell(unit.exact(s.tasks[task]), unit.plain(s.tasks[task]))] for s in scores],
        f"Every method's score on {task}",
    )
    return Figure(f"task {task}", f"Every method on {task}", chart, table, "Bold: chosen on validation data.")


def shares(found: Performance) -> Figure | None:
    """Return what part of each task's fine-tuned score the methods keep."""
    own = next((s for s in found.references if s.method == "fine-tuned"), None)
    if own is None or not found.unit.share or not found.merges or any(not own.tasks.get(t) for t in found.tasks):
        return None
    merges = best_first(found.merges)
    values: list[list[float | None]] = [
        [s.tasks[t] / own.tasks[t] if t in s.tasks else None for t in found.tasks] for s in merges
    ]
    names = [s.method for s in merges]
    flat = [v for row in values for v in row]
    chart = heat(
        values, names, found.tasks, lambda v: percent(v, 0), "Darker cells keep more of the fine-tuned model's score.",
        scale=Scale.of(flat, zero=False), tip=lambda m, t, v: f"{m} on {t}\nkeeps {percent(v, 2)}% of fine-tuned",
    )  # fmt: skip
    rows: Rows = [[m, *(Cell(percent(v, 2), v) for v in row)] for m, row in zip(names, values, strict=True)]
    table = Table(["method", *found.tasks], rows, "Share of the fine-tuned score kept, in percent")
    return Figure("kept", "Share of the fine-tuned score kept, %", chart, table)


def _axis(found: Performance) -> str:
    named = found.metric if found.metric in LOSSES else "score"
    return f"{named} on test data{', %' if found.unit.share else ''}"
