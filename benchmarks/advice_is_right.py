"""How often the recommendation is right: subsets of glyphs8's models, diagnosed, then merged in every way and measured.

Right means that the method it takes is the best on test data, or within one point of it, each at the scale that
validation data chose. Regret is what following it, scale included, loses against that best.

    python benchmarks/advice_is_right.py [--seed 0] [--subsets 24] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from result_file import write_result

import epimer
from epimer.diagnosis.advice import choice
from epimer.diagnosis.sweep import SCALES, climb
from epimer.evaluation.statistics import Scores
from epimer.experiments.bench import CURVATURE_VERSION, Bench, Candidate
from epimer.experiments.glyphs8.build import load

WITH = ("average", "tsv", "epimer_free", "regmean", "epimer_kron")
WITHOUT = ("average", "tsv", "epimer_free")


def main() -> None:
    """Print how often it was right, with curvature and without, and what other rules would have lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subsets", type=int, default=24)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    suite = load(seed=given.seed).truncated(val=200, test=400)
    whole = Bench(suite, seed=given.seed)
    curvature, draw, rows = whole.curvature("kronecker"), random.Random(0), []
    for _ in range(given.subsets):
        some = sorted(draw.sample(range(len(suite.tasks)), draw.choice((2, 3, 4, 5, 6))))
        part = replace(suite, models=[suite.models[t] for t in some], tasks=[suite.tasks[t] for t in some])
        bench = Bench(part, keep=False)
        bench._curvature[f"kronecker-{bench.samples}-{bench.seed}-v{CURVATURE_VERSION}"] = [curvature[t] for t in some]
        merged = {method: bench.merge(Candidate(method, _steps(method))) for method in WITH}

        def score(method: str, scale: float, split: str, bench: Bench = bench, merged: dict = merged) -> float:
            return bench.score(bench.scaled(merged[method], scale), split).average

        best = {m: score(m, climb(lambda s, m=m: score(m, s, "val"), SCALES), "test") for m in WITH}
        own = Scores([part.scores_on(W, task, "test") for W, task in zip(part.models, part.tasks, strict=True)]).average
        row = {"tasks": [suite.tasks[t].name for t in some], "best": best, "fine-tuned": own}
        for label, used in (("with", [curvature[t] for t in some]), ("without", None)):
            found = epimer.diagnose_state_dicts(dict(part.base), bench.states, curvature=used)
            method, scale, _ = choice(found)
            row[label] = {"method": method, "scale": scale, "got": score(method, scale, "test")}
            row[label]["forecast"] = {
                m: {"scale": one.scale, "got": score(m, one.scale, "test")} for m, one in found.forecast.items()
            }
        row["at 1"] = {method: score(method, 1.0, "test") for method in WITH}
        rows.append(row)
        print(len(some), row["with"], row["without"], {m: round(x, 3) for m, x in best.items()}, flush=True)
    for label, methods in (("with", WITH), ("without", WITHOUT)):
        tops = [max(row["best"][m] for m in methods) for row in rows]
        right = sum(row["best"][row[label]["method"]] == top for row, top in zip(rows, tops, strict=True))
        close = sum(row["best"][row[label]["method"]] >= top - 0.01 for row, top in zip(rows, tops, strict=True))
        regret = 100 * fmean(top - row[label]["got"] for row, top in zip(rows, tops, strict=True))
        print(f"{label} curvature: best {right} of {len(rows)}, within a point {close}, regret {regret:.2f}")
        for method in methods:
            forecast = [row[label]["forecast"][method]["got"] for row in rows]
            at_1, at_forecast = (
                100 * fmean(top - got for top, got in zip(tops, scores, strict=True))
                for scores in ([row["at 1"][method] for row in rows], forecast)
            )
            print(f"   always {method}: regret {at_1:.2f} at scale 1, {at_forecast:.2f} at the scale of its forecast")
    if given.json:
        write_result(given.json, {"rows": rows}, seed=given.seed)


def _steps(method: str) -> dict[str, int]:
    return {"iterations": 40} if method in ("epimer_kron", "epimer_free") else {}


if __name__ == "__main__":
    main()
