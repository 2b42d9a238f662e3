"""Sweeps, merged models and their recipes, and whom to cite."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from epimer.plain_text import format_size
from epimer.records import MergeRecord, Status, SweepRecord, TensorRecord, Trial
from epimer.records.experiment import Point
from epimer.report.blocks import Block, Cell, Figure, Rows, Section, Side, Table, cells, facts, folded, notes
from epimer.report.charts.lines import Labels, lines
from epimer.report.citations import CITATIONS
from epimer.report.figures import axis_name, series
from epimer.report.markup import Child, Markup, join, tag
from epimer.report.numbers import NOTHING, finite, number, widened
from epimer.report.performance import unit_of
from epimer.score_format import AGREEMENT, metric_heading

SOLVED = (Status.EXACT, Status.CONVERGED, Status.TIED)
"""statuses that need no remark"""


def sweep(record: SweepRecord) -> Section:
    """Return all trials, and by scale."""
    best, unit = record.best, unit_of([*record.data, *([record.best] if record.best else [])])
    labels = Labels("scale α", scored_by(record), unit.tick, unit.exact)
    values = finite(trial.validation for trial in record.data)
    charts: list[Figure] = []
    for method in dict.fromkeys(trial.method for trial in record.data):
        trials = [trial for trial in record.data if trial.method == method]
        by_rank: dict[str, list[Point]] = {}
        for t in trials:
            if t.scale is not None and (score := t.validation) is not None:
                name = method if t.rank is None else f"rank {t.rank}"
                insort(by_rank.setdefault(name, []), (t.scale, score, score, score))
        if values and any(len(points) > 1 for points in by_rank.values()):  # a single scale is in the table
            chart = lines(series(by_rank), labels, f"Score of {method} over the scale.", span=widened(values))
            table = _trials(trials, best, f"What was tried of {method}")
            charts.append(Figure(f"sweep {method}", f"{method} over scale", chart, table))
    chosen: Markup | str = "."
    if best is not None:
        chosen = tag("span", "; best: ", tag("b", best.method), f"{setting(best)} ({unit.exact(best.validation)}).")
    said = f"Scores to choose by: {scored_by(record)}. {chosen_on(record)}"
    blocks: list[Block] = [tag("p", "Scored by ", tag("code", record.eval), chosen), tag("p", said)]
    blocks += [Side(charts)] if charts else []
    blocks += [_trials(record.data, best, "Everything that was tried"), notes(record.notes)]
    return Section("Sweep", blocks)


def scored_by(record: SweepRecord) -> str:
    """Return what the scores of a sweep are, with their unit."""
    metric = AGREEMENT if record.unlabelled else next((trial.unit for trial in record.data if trial.unit), None)
    return axis_name("score", unit_of(record.data)) if metric is None else metric_heading(metric)


def chosen_on(record: SweepRecord) -> str:
    """Say on which data a sweep chose, and whether it read labels there."""
    if record.unlabelled:
        return (
            "Settings were chosen without labels, on validation inputs; averages and worst tasks are of other inputs."
        )
    return "Settings were chosen on validation data; averages and worst tasks are on test data."


def setting(trial: Trial) -> str:
    """Return a trial's rank and scale, where they are known, each after a comma."""
    rank = "" if trial.rank is None else f", rank {trial.rank}"
    return rank + ("" if trial.scale is None else f", scale {number(trial.scale)}")


def finalists(record: SweepRecord) -> Table:
    """Return the best of every method and rank, the best first, as it was chosen."""
    settings = [trial for trial in record.data if trial.average is not None] or [t for t in [record.best] if t]
    settings.sort(key=lambda trial: (trial.validation or 0.0) - (trial.kl or 0.0), reverse=True)
    table = _trials(settings, record.best, "The best of every method in the sweep")
    return replace(table, headings=table.headings[:-1], rows=[row[:-1] for row in table.rows])  # all but the worst task


def _trials(trials: Sequence[Trial], best: Trial | None, caption: str) -> Table:
    unit, close = unit_of(trials), any(trial.kl is not None for trial in trials)
    settings = [(trial.method, trial.rank, trial.scale) for trial in trials]
    marked = {i for i, tried in enumerate(settings) if best and tried == (best.method, best.rank, best.scale)}
    rows: Rows = []
    for t in trials:
        between = f" [{unit.between(t.low, t.high)}]" if t.low is not None and t.high is not None else ""
        row = [*cells((t.rank, t.scale), number), *cells([t.validation], unit.show, unit.plain)]
        row += cells([t.kl] if close else [], number)
        row += [Cell(f"{unit.show(t.average)}{between}", unit.plain(t.average))]
        rows.append([t.method, *row, *cells([t.worst], unit.show, unit.plain), t.worst_task])
    headings = ["method", "rank", "scale", "validation", *(["KL"] if close else []), "average", "worst", "worst task"]
    return Table(headings, rows, caption, frozenset(marked))


def merge(record: MergeRecord, file_date: str = "") -> Section:
    """Return how a merged model was made.

    Args:
        record: of the merge.
        file_date: when its file was written, for records that have no date.
    """
    weights = ", ".join(number(weight) for weight in record.weights)
    pairs: list[tuple[str, Child]] = [("Method", record.method)]
    pairs += [(name, _value(value)) for name, value in record.parameters.items()]
    pairs += [("Weights", weights or NOTHING), ("Made by", f"epimer {record.version}" if record.version else NOTHING)]
    if record.plugin is not None:
        pairs.append(("Method's own file", f"{record.plugin[0]}, SHA-256 {record.plugin[1]}"))
    pairs += _run_facts(record, file_date)
    if record.untouched:
        share = f"{number(100 * record.untouched)}% of the parameters that models changed"
        pairs.append(("Left as the base has it", share))
    models: Rows = [[name, Cell(tag("code", fingerprint))] for name, fingerprint in record.models]
    parts: list[Table | Markup] = [Table(["model", "fingerprint"], models, "What was merged")]
    if record.recipe:
        parts.append(tag("div", tag("p", "Recipe", class_="title"), recipe(record.recipe)))
    chosen = notes([*record.choices, *record.notes])
    blocks: list[Block] = [facts(*pairs), chosen, Side(parts), tag("h3", "Tensors"), _tensors(record.tensors)]
    return Section(f"The merge: {record.method}", blocks, short="Merge")


def _run_facts(record: MergeRecord, file_date: str) -> list[tuple[str, Child]]:
    """Return the date, size, dtype, time and memory of a merge, as far as its record has them."""
    pairs: list[tuple[str, Child]] = []
    if record.date or file_date:
        pairs.append(("Date", record.date or f"{file_date}, the date of the file"))
    if record.files:
        pairs.append(("Size", f"{format_size(sum(record.files.values()))} in {len(record.files)} files"))
    if record.dtypes:
        counts = (f"{name} ({count:,} parameters)" for name, count in record.dtypes.items())
        pairs.append(("Dtype", ", ".join(counts)))
    if "total" in record.timings:
        pairs.append(("Time", f"{number(record.timings['total'])} s"))
        pairs.append(("Peak memory", NOTHING if record.peak_memory is None else format_size(record.peak_memory)))
    else:
        remedy = tag("span", "not in a folder's own record; ", tag("code", "--record FILE"), " of the merge has them")
        pairs.append(("Time and memory", remedy))
    if record.environment:
        pairs.append(("Made on", ", ".join(f"{name} {value}" for name, value in record.environment.items())))
    return pairs


def recipe(content: str) -> Markup:
    """Return a recipe as it is."""
    return tag("pre", tag("code", content.strip("\n")), tabindex="0")


def _tensors(tensors: dict[str, TensorRecord]) -> Markup:
    """Return how many tensors were merged by which rule, and all of them to unfold."""
    rules = Counter(one.rule for one in tensors.values())
    statuses = Counter(str(one.status) for one in tensors.values() if one.rule != "skip")
    noted = {name: one for name, one in tensors.items() if one.status not in SOLVED or one.note}
    said = tag("p", f"{len(tensors)} tensors: {_counted(rules)}. Solved: {_counted(statuses)}.")
    some = folded(f"{len(noted)} with something to know", _tensor_table(noted)) if noted else None
    return join(said, some, folded("All tensors", _tensor_table(tensors)))


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def _tensor_table(tensors: dict[str, TensorRecord]) -> Table:
    rows: Rows = []
    for name, one in tensors.items():
        shape, numbers = " × ".join(map(str, one.shape)), cells((one.rank, one.residual, one.eta), number)
        rows.append([name, one.rule, shape or "scalar", str(one.status), *numbers, one.note])
    headings = ["tensor", "rule", "shape", "status", "rank", "residual", "η", "note"]
    return Table(headings, rows, "How tensors were merged")


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int | float):
        return number(value, 6)
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return str(value)


def citations(names: Iterable[str]) -> Section | None:
    """Return whom to cite for the methods that appear; methods of one paper share a line."""
    papers: dict[str, list[str]] = {}
    for name in names:
        if name in CITATIONS:
            papers.setdefault(CITATIONS[name], []).append(name)
    if not papers:
        return None
    items = [tag("li", tag("b", ", ".join(methods)), ": ", paper, ".") for paper, methods in papers.items()]
    said = tag("p", "The methods on this page, and where they come from.")
    return Section("Citations", [said, tag("ul", items, class_="cited")])
