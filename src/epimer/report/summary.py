"""The first screen: what was merged, which method won and by how much, and what is recommended."""

from __future__ import annotations

from epimer.report.kinds import Performance, Records, Score, Sweep, unit_of
from epimer.report.markup import Child, Markup, tag
from epimer.report.numbers import number, percent
from epimer.report.sections.diagnosis import advice
from epimer.report.sections.scores import best_first


def title_of(records: Records) -> str:
    """Return what the page is about."""
    if records.performances:
        found = records.performances[0].record
        return f"{found.suite}: {_count(len(found.tasks))} merged into one"
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
        parts.append(_won(records.performances[0].record))
    elif records.sweeps and records.sweeps[0].record.best is not None:
        parts.append(_swept(records.sweeps[0].record))
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


def _won(found: Performance) -> Markup:
    """Say which method won, with its interval and worst task, and what that is worth."""
    best, unit = found.winner, found.unit
    if best is None:
        return Markup()
    references = {score.method: score for score in found.references}
    own = references.pop("fine-tuned", None)
    base = next(iter(references.values()), None)
    between = (
        "" if best.low is None or best.high is None else f"95% interval {unit.between(best.low, best.high, ' to ')}"
    )
    cards = [
        _card("Best merge", best.method, f"of {len(found.merges)} methods; {_chosen(found)}", name=True),
        _card("Average", unit.show(best.average) + unit.suffix, between),
        _card("Worst task", unit.show(best.worst) + unit.suffix, best.worst_task),
    ]
    gained = _gained(best, base, own)
    if base is not None and own is not None and gained is not None:
        told = f"{base.method} {unit.show(base.average)}, fine-tuned {unit.show(own.average)}"
        cards.append(_card("Gain kept", f"{percent(gained, 0)}%", told))
    return tag("div", tag("dl", cards, class_="cards"), tag("p", _compared(found, best), class_="compared"))


def _chosen(found: Performance) -> str:
    return "chosen on validation data" if all(s.validation is not None for s in found.merges) else "by its average"


def _card(label: str, value: str, more: str, *, name: bool = False) -> Markup:
    look = "name" if name else None
    return tag("div", tag("dt", label), tag("dd", value, class_=look), tag("dd", more, class_="more"))


def _gained(best: Score, base: Score | None, own: Score | None) -> float | None:
    """Return what share of fine-tuning's gain over the base a merge keeps."""
    if base is None or own is None or best.average is None or base.average is None or own.average is None:
        return None
    return (best.average - base.average) / (own.average - base.average) if own.average > base.average else None


def _compared(found: Performance, best: Score) -> list[Child]:
    """Say how sure the choice is."""
    unit = found.unit
    said: list[Child] = []
    if best.difference is not None and best.p is not None and found.against:
        points = " points" if unit.share else ""
        sure = "p < 0.001" if best.p < 0.001 else f"p = {best.p:.3f}"
        said.append(f"Against {found.against}: {unit.difference(best.difference)}{points} ({sure}). ")
    rivals = [
        s
        for s in found.merges
        if s is not best and s.average is not None and best.low is not None and s.average >= best.low
    ]
    if rivals:
        named = _listed([f"{s.method} ({unit.show(s.average)})" for s in best_first(rivals)], 5)
        verb = "has its average" if len(rivals) == 1 else "have their averages"
        said.append(f"{named} {verb} within that interval or better.")
    elif len(found.merges) > 1 and best.low is not None:
        said.append("No other method's average lies within that interval.")
    return said


def _swept(found: Sweep) -> Markup:
    best, unit = found.best, unit_of(found.data)
    assert best is not None
    rank = "every direction" if best.rank is None else f"rank {best.rank}"
    scale = "" if best.scale is None else f", scale {number(best.scale)}"
    cards = [
        _card("Best of the sweep", best.method, f"{rank}{scale}", name=True),
        _card("Score", unit.show(best.validation) + unit.suffix, f"by {found.eval}"),
    ]
    if best.average is not None:
        between = "" if best.low is None else f"95% interval {unit.between(best.low, best.high, ' to ')}"
        cards.append(_card("Average", unit.show(best.average) + unit.suffix, between))
    if best.worst is not None:
        cards.append(_card("Worst task", unit.show(best.worst) + unit.suffix, best.worst_task))
    return tag("dl", cards, class_="cards")
