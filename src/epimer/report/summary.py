"""The first screen: what was merged, which method won and by how much, and what is recommended."""

from __future__ import annotations

from epimer.records import MethodScore, Score, SweepRecord
from epimer.report.blocks import card
from epimer.report.markup import Child, Markup, tag
from epimer.report.numbers import Unit, percent
from epimer.report.performance import Performance, unit_of
from epimer.report.read import Records
from epimer.report.sections.diagnosis import advice
from epimer.report.sections.merging import setting
from epimer.report.sections.scores import best_first


def title_of(records: Records) -> str:
    """Return what the page is about."""
    if records.performances:
        performance = records.performances[0].record
        return f"{performance.suite}: {_count(len(performance.tasks))} merged into one"
    if records.merges:
        merge = records.merges[0].record
        return f"{merge.method}: {_count(len(merge.weights))} merged into one"
    if records.diagnoses:
        return f"Before merging {_count(len(records.diagnoses[0].record.models))}"
    if records.sweeps:
        return f"Sweep on {records.sweeps[0].record.eval}"
    models = [one.record.model for one in records.evaluations] + [one.record.model for one in records.harnesses]
    return f"How {models[0]} does" if models else "Merging experiments"


def _count(models: int) -> str:
    words = ("no models", "one model", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return (words[models] if models < len(words) else str(models)) + (" models" if models > 1 else "")


def summary(records: Records, title: str) -> Markup:
    """Return the first section."""
    parts: list[Child] = [
        tag("p", "epimer report", class_="eyebrow"),
        tag("h1", title, id="summary-heading"),
        _merged(records),
    ]
    if records.performances:
        parts.append(_best_merge(records.performances[0].record))
    elif records.sweeps and records.sweeps[0].record.best is not None:
        parts.append(_best_trial(records.sweeps[0].record))
    for one in records.diagnoses:
        if one.record.advice:
            of = f" for {', '.join(one.record.models)}" if len(records.diagnoses) > 1 else ""
            parts.append(tag("div", tag("h2", f"Recommendation{of}"), advice(one.record), class_="recommended"))
    return tag("section", parts, id="summary", aria_labelledby="summary-heading")


def _merged(records: Records) -> Markup:
    """Say what was merged: the models where they are known by name, else the tasks."""
    if records.merges:
        models = records.merges[0].record.models
        based = len(models) > len(records.merges[0].record.weights)
        names, base = [name for name, _ in models[based:]], models[0][0] if based else ""
    elif records.diagnoses:
        names, base = list(records.diagnoses[0].record.models), records.diagnoses[0].record.base
    else:
        names, base = [], ""
    tasks = records.performances[0].record.tasks if records.performances else []
    if not names and not tasks:
        return Markup()
    if not names:
        return tag("p", "One fine-tuned model for each of ", _listed(tasks), ".", class_="lead")
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
    chosen = "chosen on validation data" if performance.validated else "by its average"
    cards = [
        card("Best merge", best.method, f"of {len(performance.merges)} methods; {chosen}", named=True),
        *_score_cards(best, unit),
        *_gain_kept(best, performance),
    ]
    return tag("div", tag("dl", cards, class_="cards"), tag("p", _compared(performance, best), class_="compared"))


def _best_trial(sweep: SweepRecord) -> Markup:
    best, unit = sweep.best, unit_of(sweep.data)
    assert best is not None
    where = setting(best).removeprefix(", ") if best.rank is not None else f"every direction{setting(best)}"
    cards = [
        card("Best of the sweep", best.method, where, named=True),
        card("Score", unit.show(best.validation) + unit.suffix, f"by {sweep.eval}"),
        *(_score_cards(best, unit) if best.average is not None else []),
    ]
    return tag("dl", cards, class_="cards")


def _score_cards(score: Score, unit: Unit) -> list[Markup]:
    """Return the average with its interval, and the worst task."""
    known = score.low is not None and score.high is not None
    between = f"95% interval {unit.between(score.low, score.high, ' to ')}" if known else ""
    return [
        card("Average", unit.show(score.average) + unit.suffix, between),
        card("Worst task", unit.show(score.worst) + unit.suffix, score.worst_task),
    ]


def _gain_kept(best: MethodScore, performance: Performance) -> list[Markup]:
    """Return what share of fine-tuning's gain over the base a merge keeps, where all three are known."""
    references = {score.method: score for score in performance.references}
    own = references.pop("fine-tuned", None)
    base = next(iter(references.values()), None)
    if base is None or own is None or best.average is None or base.average is None or own.average is None:
        return []
    if own.average <= base.average:
        return []
    share = (best.average - base.average) / (own.average - base.average)
    unit = performance.unit
    told = f"{base.method} {unit.show(base.average)}, fine-tuned {unit.show(own.average)}"
    return [card("Gain kept", f"{percent(share, 0)}%", told)]


def _compared(performance: Performance, best: MethodScore) -> list[Child]:
    """Return how certain the choice is: the paired test, and who else is within the interval."""
    unit, low = performance.unit, best.low
    said: list[Child] = []
    if best.difference is not None and best.p is not None and performance.against:
        points = " points" if unit.share else ""
        p = "p < 0.001" if best.p < 0.001 else f"p = {best.p:.3f}"
        said.append(f"Against {performance.against}: {unit.difference(best.difference)}{points} ({p}). ")
    others = [score for score in performance.merges if score is not best]
    rivals = [s for s in others if s.average is not None and low is not None and s.average >= low]
    if rivals:
        named = _listed([f"{s.method} ({unit.show(s.average)})" for s in best_first(rivals)], 5)
        verb = "has its average" if len(rivals) == 1 else "have their averages"
        said.append(f"{named} {verb} within that interval or better.")
    elif others and low is not None:
        said.append("No other method's average lies within that interval.")
    return said
