"""The first screen: what was merged, which method won and by how much, and what is recommended."""

from __future__ import annotations

from epimer.plain_text import format_size
from epimer.records import Diagnosis, EvaluationRecord, HarnessRecord, MergeRecord, MethodScore, Score, SweepRecord
from epimer.report.blocks import Cell, Rows, Table, card, cells
from epimer.report.figures import axis_name
from epimer.report.markup import Child, Markup, tag
from epimer.report.numbers import Unit, number, percent
from epimer.report.performance import Performance, unit_of
from epimer.report.read import Records
from epimer.report.sections.diagnosis import advice
from epimer.report.sections.evaluations import first_scores, harness_table
from epimer.report.sections.merging import finalists, scored_by, setting
from epimer.report.sections.scores import best_first


def title_of(records: Records) -> str:
    """Return what the page is about."""
    if performances := records.of(Performance):
        return f"{performances[0].suite}: {_count(len(performances[0].tasks))} merged into one"
    if merges := records.of(MergeRecord):
        return f"{_count(len(merges[0].weights)).capitalize()} merged into one"
    if diagnoses := records.of(Diagnosis):
        return f"Before merging {_count(len(diagnoses[0].models))}"
    if sweeps := records.of(SweepRecord):
        return f"Sweep on {sweeps[0].eval}"
    models = [r.model for r in records.of(EvaluationRecord)] + [r.model for r in records.of(HarnessRecord)]
    return f"How {models[0]} does" if models else "Merging experiments"


def _count(models: int) -> str:
    words = ("no models", "one model", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return (words[models] if models < len(words) else str(models)) + (" models" if models > 1 else "")


def summary(records: Records, title: str) -> Markup:
    """Return the first section: what was merged and chosen, how it scores, and what is recommended."""
    heading = [tag("p", "epimer report", class_="eyebrow"), tag("h1", title, id="summary-heading")]
    parts: list[Child] = [*heading, _merged(records)]
    performances, sweeps, diagnoses = records.of(Performance), records.of(SweepRecord), records.of(Diagnosis)
    merges = records.of(MergeRecord)
    if performances:
        parts.append(_best_merge(performances[0]))
    else:
        if merges:
            parts.append(_merge_cards(merges[0]))
        if sweeps:
            parts.append(_best_trial(sweeps[0]))
        if merges and sweeps and not _is_best(merges[0], sweeps[0]):
            said = "The merged model of this page is not the best of the sweep: their methods or settings differ."
            parts.append(tag("p", said, class_="compared"))
    tables = _scores(records)
    if tables:
        parts.append(tag("div", tag("h2", "Scores"), tag("div", tables, class_="side"), id="scores"))
    for diagnosis in diagnoses:
        if diagnosis.advice:
            of = f" for {', '.join(diagnosis.models)}" if len(diagnoses) > 1 else ""
            parts.append(tag("div", tag("h2", f"Recommendation{of}"), advice(diagnosis), class_="recommended"))
    return tag("section", parts, id="summary", aria_labelledby="summary-heading")


def _merge_cards(record: MergeRecord) -> Markup:
    """Return the method and settings of the merged model, its size and its dtype."""
    settings = {name: record.parameters.get(name) for name in ("scale", "rank")}
    told = ", ".join(f"{name} {number(value)}" for name, value in settings.items() if isinstance(value, int | float))
    cards = [card("Merged model", record.method, told, named=True)]
    if record.files:
        kinds = ", ".join(record.dtypes)
        cards.append(card("Size", format_size(sum(record.files.values())), kinds))
    if "total" in record.timings:
        memory = "" if record.peak_memory is None else f"peak memory {format_size(record.peak_memory)}"
        cards.append(card("Merged in", f"{number(record.timings['total'])} s", memory))
    return tag("dl", cards, class_="cards")


def _is_best(record: MergeRecord, sweep: SweepRecord) -> bool:
    """Whether a merge has the method, the scale and the rank that a sweep found best, as far as both tell them."""
    if sweep.best is None:
        return True
    pairs = [(record.parameters.get(name), getattr(sweep.best, name)) for name in ("scale", "rank")]
    same = all(one == other for one, other in pairs if one is not None and other is not None)
    return record.method == sweep.best.method and same


def _scores(records: Records) -> list[Markup]:
    """Return the first tables of scores: the best methods of a suite, of a sweep, and models by task."""
    tables = []
    for performance in records.of(Performance)[:1]:
        tables.append(("methods", f"The best methods on {performance.suite}", _top(performance)))
    for evaluation in records.of(EvaluationRecord)[:2]:
        tables.append(("evaluation", *first_scores(evaluation)))
    for sweep in records.of(SweepRecord)[:1]:
        title = f"The best of every method in the sweep: {scored_by(sweep)}"
        tables.append(("sweep", title, finalists(sweep)))
    for harness in records.of(HarnessRecord)[:1]:
        tables.append(("harness", f"{harness.model} by {harness.harness}", harness_table(harness)))
    shown = tables[:2]  # more would not fit the first screen; each has a section of its own
    return [
        tag("div", tag("p", title, class_="title"), table.render(sortable=False), class_=name)
        for name, title, table in shown
    ]


def _top(performance: Performance, most: int = 5) -> Table:
    """Return the best methods by their average, beside the models that are not merged."""
    unit = performance.unit
    scores = [*performance.references, *best_first(performance.merges)[:most]]
    rows: Rows = [
        [
            score.method,
            *cells([score.average], unit.show, unit.plain),
            Cell(unit.interval(score.low, score.high), unit.plain(score.low)),
            *cells([score.worst], unit.show, unit.plain),
            score.worst_task,
        ]
        for score in scores
    ]
    best = frozenset(i for i, score in enumerate(scores) if score is performance.winner)
    quiet = frozenset(i for i, score in enumerate(scores) if score.reference)
    name = axis_name(performance.metric, unit)
    headings = ["method", f"average {name}", "95% interval", "worst", "worst task"]
    return Table(headings, rows, f"The best methods on {performance.suite}", best, quiet)


def _merged(records: Records) -> Markup:
    """Say what was merged: the models where they are known by name, else the tasks."""
    names, base = [], ""
    if merges := records.of(MergeRecord):
        names = [name for name, _ in merges[0].models]
        base = names.pop(0) if len(names) > len(merges[0].weights) else ""
    elif diagnoses := records.of(Diagnosis):
        names, base = list(diagnoses[0].models), diagnoses[0].base
    if not names:
        tasks = [task for performance in records.of(Performance)[:1] for task in performance.tasks]
        return tag("p", f"One fine-tuned model for each of {_listed(tasks)}.", class_="lead") if tasks else Markup()
    of = [" of ", tag("b", base)] if base and base != "base" else []
    return tag("p", "Fine-tuned models", of, ": ", _listed(names), ".", class_="lead")


def _listed(names: list[str], most: int = 12) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _best_merge(performance: Performance) -> Markup:
    """Return which method is best, with its interval and worst task, and what share of fine-tuning's gain it keeps."""
    best, unit = performance.winner, performance.unit
    if best is None:
        return Markup()
    chosen = f"of {len(performance.merges)} methods; {performance.chosen_by}"
    name = card("Best merge", best.method, chosen, named=True)
    cards = tag("dl", name, _score_cards(best, unit), _gain_kept(best, performance), class_="cards")
    return tag("div", cards, tag("p", _compared(performance, best), class_="compared"))


def _best_trial(sweep: SweepRecord) -> Markup:
    best, unit = sweep.best, unit_of(sweep.data)
    if best is None:
        return Markup()
    name = card("Best of the sweep", best.method, setting(best).removeprefix(", "), named=True)
    labels = "without labels" if sweep.unlabelled else "with labels"
    score = card("Chosen by", unit.show(best.validation) + unit.suffix, f"{scored_by(sweep)}, {labels}")
    return tag("dl", name, score, _score_cards(best, unit) if best.average is not None else None, class_="cards")


def _score_cards(score: Score, unit: Unit) -> list[Markup]:
    known = score.low is not None and score.high is not None
    between = f"95% interval {unit.between(score.low, score.high, ' to ')}" if known else ""
    return [
        card("Average", unit.show(score.average) + unit.suffix, between),
        card("Worst task", unit.show(score.worst) + unit.suffix, score.worst_task),
    ]


def _gain_kept(best: MethodScore, performance: Performance) -> Markup | None:
    """Return what share of fine-tuning's gain over the base a merge keeps, where all three are known."""
    references = {score.method: score.average for score in performance.references}
    own = references.pop("fine-tuned", None)
    name, base = next(iter(references.items()), ("", None))
    if best.average is None or base is None or own is None or own <= base:
        return None
    told = f"{name} {performance.unit.show(base)}, fine-tuned {performance.unit.show(own)}"
    return card("Gain kept", f"{percent((best.average - base) / (own - base), 0)}%", told)


def _compared(performance: Performance, best: MethodScore) -> list[Child]:
    """Return how certain the choice is: the paired test, and who else is within the interval."""
    unit, low = performance.unit, best.low
    said: list[Child] = []
    if best.difference is not None and best.p is not None and performance.against:
        points = " points" if unit.share else ""
        p = "p < 0.001" if best.p < 0.001 else f"p = {best.p:.3f}"
        over_tasks = "" if best.p_tasks is None else f" over samples, p = {best.p_tasks:.3f} over tasks"
        said.append(f"Against {performance.against}: {unit.difference(best.difference)}{points} ({p}{over_tasks}). ")
    others = [score for score in performance.merges if score is not best]
    rivals = [s for s in others if s.average is not None and low is not None and s.average >= low]
    if rivals:
        named = _listed([f"{s.method} ({unit.show(s.average)})" for s in best_first(rivals)], 5)
        verb = "has its average" if len(rivals) == 1 else "have their averages"
        said.append(f"{named} {verb} within that interval or better.")
    elif others and low is not None:
        said.append("No other method's average lies within that interval.")
    return said
