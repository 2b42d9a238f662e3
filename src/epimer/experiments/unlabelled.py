"""What inputs without labels choose and gain: every method's scale, rounds of measuring at the merge, refinement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from epimer.diagnosis.rounds import FIT, climb_by_inputs, judge_of_scales, scale_inputs
from epimer.diagnosis.suite_merge import merge_suite
from epimer.diagnosis.sweep import SCALES, climb
from epimer.evaluation.judges import Evaluate
from epimer.evaluation.statistics import Scores
from epimer.experiments.bench import CANDIDATES, STEPS, Bench, Candidate
from epimer.experiments.results import (
    Cells,
    Row,
    against,
    comparison_notes,
    correct_for_number,
    dots,
    number,
    summary,
    tabulate,
    text,
)
from epimer.records import Experiment

TSV = Candidate("tsv")
FINER = 5  # steps from the best scale of the grid to its neighbours, for the scale that the chosen one is compared with
IMPROVEMENTS: dict[str, dict[str, Any]] = {
    "epimer_kron, auto": {},
    "epimer_kron, auto, 1 round": {"rounds": 1},
    "epimer_kron, auto, 2 rounds": {"rounds": 2},
    "epimer_kron, auto, 8 steps": {"refine": 8},
    "epimer_kron, auto, 1 round, 8 steps": {"rounds": 1, "refine": 8},
}
"""rows of the table -> what is done beside choosing the scale"""


def unlabelled(bench: Bench) -> Experiment:
    """Return what a scale chosen without labels costs every method, and what the same inputs gain epimer_kron."""
    suite, cells = bench.suite, Cells(bench.metric)
    inputs = suite.inputs_only(bench.samples, bench.seed)
    judge = judge_of_scales(inputs)
    rival = bench.best(TSV)
    data = [_scale_row(bench, candidate, judge) for candidate in bench.each(CANDIDATES, attrgetter("name"))]
    settings: dict[str, Any] = {"samples": bench.samples, "seed": bench.seed, "iterations": STEPS}
    for name, more in IMPROVEMENTS.items():
        merged = merge_suite(suite, curvature=bench.curvature("kronecker"), **settings, **more)
        scores = bench.score(merged, "test")
        row = {"method": name, **summary(scores, suite.tasks), "scale": merged.record.parameters["scale"]}
        data.append({**row, "choices": list(merged.record.choices), **against(scores, rival.test, suite.tasks)})
    correct_for_number(data)
    columns = {
        "method": text("method"),
        "average [95%]": cells.interval,
        "worst": cells.score("worst"),
        "scale": number("scale"),
        "at scale 1": cells.score("at 1"),
        "by labels": cells.score("labelled"),
        "its scale": number("labelled scale"),
        "best on test": cells.score("best"),
        "regret": cells.spread("regret"),
        **cells.comparison(f"against tsv, scale {rival.scale:g} by labels", suite.tasks),
    }
    notes = [
        "Scale: where the merge diverges least from each task's own model (disagreement + KL) on "
        f"{scale_inputs(inputs)} of {bench.samples} training inputs per task, which curvature is measured on too; no "
        "label is read.",
        "By labels: the scale that validation data chose. Regret: what the best scale on test data would have gained; "
        f"that one is looked for in {FINER} steps between the scales to choose from.",
        "Rounds measure curvature again at the merge, on three quarters of the inputs; steps are natural-gradient "
        "steps on the KL divergence; both are judged by the other quarter, which the first curvature was measured on "
        "too.",
        *comparison_notes(bench.metric, data, suite.tasks),
    ]
    figure = dots(data, bench.metric, metric=bench.metric)
    return tabulate("unlabelled", "scales and gains without labels", columns, data, notes + bench.notes, figure)


def _best_scale(value: Callable[[float], float], chosen: float) -> float:
    """Return the best scale: of the grid, of finer steps to its neighbours, and the chosen one."""
    best = climb(value, SCALES)
    place = SCALES.index(best)
    neighbours = SCALES[max(place - 1, 0)], SCALES[min(place + 1, len(SCALES) - 1)]
    finer = [best + step / FINER * (other - best) for other in neighbours for step in range(FINER)]
    return max([best, chosen, *finer], key=value)


def _scale_row(bench: Bench, candidate: Candidate, judge: Evaluate) -> Row:
    """Return a method's test scores at the scale that inputs chose, beside those at other scales."""
    tasks, at = bench.suite.tasks, bench.at_scales(candidate)

    @cache
    def test(scale: float) -> Scores:
        return bench.score(at(scale), "test")

    chosen = climb_by_inputs(lambda scale: judge(at(scale), FIT).order, SCALES)
    best = _best_scale(lambda scale: test(scale).average, chosen)
    labelled = bench.best(candidate)
    return {
        "method": candidate.name,
        **summary(test(chosen), tasks),
        "scale": chosen,
        "at 1": test(1.0).average,
        "labelled": labelled.test.average,
        "labelled scale": labelled.scale,
        "best": test(best).average,
        "best scale": best,
        "regret": test(best).average - test(chosen).average,
        **against(test(chosen), bench.best(TSV).test, tasks),
    }
