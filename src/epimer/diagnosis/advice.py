"""A diagnosis in words: what to do and why, with the numbers that say so.

The thresholds were set on the embedded suite; how often the advice was right is in docs/diagnosis.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from epimer.methods.registry import describe_method
from epimer.records import Advice, Diagnosis

FAR, TWIN, LOCAL = 3.0, 0.95, 0.5
"""times the others' median norm; cosine of near-copies; share of the base's norm past which a step is not small"""
ENOUGH = 0.9  # of every task's energy, for a rank to be called enough
LITTLE = 0.05  # of F(x̄), below which η is called small; of a forecast, within which another is as good
ADVISED = (
    "without data forecasts do not rank methods; on 24 sets of models it was the best of average, tsv and epimer_free "
    "22 times, tsv 3 times"
)
"""measured by benchmarks/advice_is_right.py; one of the 24 is a tie"""
ALIKE = "the models do not differ, and it keeps every direction of them"


def advise(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with its recommendation."""
    return replace(diagnosis, advice=(*_take(diagnosis), *_warnings(diagnosis), *_note(diagnosis)))


class Recommendation(NamedTuple):
    """What to take, and why."""

    method: str
    scale: float
    why: str


def choice(diagnosis: Diagnosis, *, scaled: bool = True) -> Recommendation:
    """Return the method and the scale to take, and why.

    If forecasts rank methods (`Diagnosis.ranks_methods`), it is the lowest forecast. Otherwise it is epimer_free, which
    measured best (docs/diagnosis.md), or the average if no two models differ much, at the scale of its forecast. If
    neither is among the methods that were forecast, the lowest forecast decides.

    Args:
        diagnosis: one with forecasts.
        scaled: whether the scale is chosen too; 1 otherwise.
    """
    names, why = _candidates(diagnosis)
    losses = {
        name: diagnosis.forecast[name].mean_at_scale if scaled else diagnosis.forecast[name].mean for name in names
    }
    method = min(losses, key=lambda name: losses[name])
    scale = diagnosis.forecast[method].scale if scaled else 1.0
    return Recommendation(method, scale, why or f"the lowest forecast, {losses[method]:.2f}")


def _candidates(diagnosis: Diagnosis) -> tuple[list[str], str]:
    """Return the methods to choose from, and why from these; no reason where the lowest forecast decides."""
    if not diagnosis.ranks_methods and len(diagnosis.forecast) > 1:
        rows = [describe_method(name) for name in diagnosis.forecast]
        alike = all(cosine > TWIN for s, row in enumerate(diagnosis.conflict.cosine) for cosine in row[:s])
        names = [row.name for row in rows if (row.elementwise if alike else row.advised_without_data)]
        if names:
            return names, ALIKE if alike else ADVISED
    return list(diagnosis.forecast), ""


def _take(diagnosis: Diagnosis) -> Iterator[Advice]:
    if not diagnosis.forecast:
        yield Advice("note", "curvature is known inside its basis only, so nothing is forecast.")
        return
    method, scale, why = choice(diagnosis)
    numbers = {name: f"{one.mean_at_scale:.2f} at {one.scale:g}" for name, one in diagnosis.forecast.items()}
    order = sorted(numbers, key=lambda name: diagnosis.forecast[name].mean_at_scale)
    if why == ADVISED:
        lowest = "" if order[0] == method else f", and {order[0]}'s is {numbers[order[0]]}"
        beside = f" (its forecast is {numbers[method]}{lowest})"
    else:
        candidates, _ = _candidates(diagnosis)
        others = ", ".join(f"{name} {numbers[name]}" for name in order if name in candidates and name != method)
        beside = f" (others at their own best scales: {others})" if others else ""
    yield Advice("take", f"{method} at scale {scale:g}: {why}{beside}.")
    if diagnosis.curvature == "task-gram":
        yield Advice(
            "take",
            "measure curvature if you have data, even unlabelled (`epimer curvature`): a few hundred samples a task.",
        )
    else:
        yield _about_eta(diagnosis)


def _about_eta(diagnosis: Diagnosis) -> Advice:
    """Return what η says, and whether tsv needs no curvature to be as good, which is for the forecasts to say.

    η compares the mean with the flat one on the same coordinates; tsv has coefficients of its own, so a small η does
    not make it as good. Nor does a diagonal, which ranks merges backwards: only two-sided curvature forecasts.
    """
    fraction = diagnosis.total.eta_fraction
    if fraction >= LITTLE:
        return Advice("note", f"η is {fraction:.0%} of F: this curvature removes that share of the conflict.")
    small = f"η is {fraction:.1%} of F: curvature moves the mean by little on these coordinates"
    losses = {name: one.mean_at_scale for name, one in diagnosis.forecast.items()}
    aware = [name for name in losses if describe_method(name).needs_curvature]
    if not diagnosis.ranks_methods or "tsv" not in losses or not aware:
        return Advice("note", f"{small}; it does not compare with tsv's own coefficients.")
    best = min(aware, key=lambda name: losses[name])
    scales = {name: f"{diagnosis.forecast[name].scale:g}" for name in ("tsv", best)}
    numbers = f"forecast {losses['tsv']:.2f} at scale {scales['tsv']}, {best} {losses[best]:.2f} at {scales[best]}"
    if losses["tsv"] <= (1 + LITTLE) * losses[best]:
        return Advice("take", f"{small}; tsv is as good ({numbers}) and needs no data.")
    return Advice("note", f"{small}, yet tsv's own coefficients are worse ({numbers}).")


def _warnings(diagnosis: Diagnosis) -> Iterator[Advice]:
    for t, name in enumerate(diagnosis.models):
        rest = [norm for s, norm in enumerate(diagnosis.norms) if s != t]
        usual = median(rest) if rest else 0.0
        if diagnosis.norms[t] == 0:
            yield Advice("warning", f"{name} equals the base in every matrix: leave it out.")
        elif usual and diagnosis.norms[t] > FAR * usual:
            times = f"{diagnosis.norms[t] / usual:.0f}x"
            yield Advice("warning", f"{name} moved {times} further than the others: lower its weight or leave it out.")
        if diagnosis.base_norm and diagnosis.norms[t] > LOCAL * diagnosis.base_norm:
            share = f"{diagnosis.norms[t] / diagnosis.base_norm:.0%}"
            yield Advice(
                "warning",
                f"{name} moved by {share} of the base's norm: is it a model of this base?",
            )
    for s, one in enumerate(diagnosis.models):
        for t, other in enumerate(diagnosis.models[:s]):
            if (cosine := diagnosis.conflict.cosine[s][t]) > TWIN:
                yield Advice("warning", f"{other} and {one} are near-copies (cosine {cosine:.2f}): count them as one.")
    if diagnosis.forecast and len(diagnosis.models) > 1:
        method = choice(diagnosis).method
        tasks = diagnosis.forecast[method].tasks
        worst = max(range(len(tasks)), key=lambda t: tasks[t])
        if tasks[worst] > 1.5 * diagnosis.forecast[method].mean:
            numbers = f"{tasks[worst]:.2f}, {diagnosis.forecast[method].mean:.2f} on average"
            yield Advice(
                "warning", f"{diagnosis.models[worst]} has the worst forecast under {method} at scale 1: {numbers}."
            )


def _note(diagnosis: Diagnosis) -> Iterator[Advice]:
    least = {int(k): min(kept) for k, kept in diagnosis.energy.items()}
    enough = [k for k in sorted(least) if least[k] >= ENOUGH]
    if enough:
        yield Advice("note", f"k={enough[0]} keeps {least[enough[0]]:.0%} of every task, or more.")
    elif least:
        k = max(least)
        model = diagnosis.models[diagnosis.energy[str(k)].index(least[k])]
        yield Advice(
            "note", f"k={k} keeps {least[k]:.0%} of {model}, the least of any task; what it leaves is not merged."
        )
