"""Which damping, anchor and scale epimer_kron and epimer_free should have by default, asked of validation data only.

Gain is the share of the way from the probe to the fine-tuned models that a merge goes, so that suites can be averaged.

    python benchmarks/defaults.py [--out DIR]     (on glyphs8; on minilm8: benchmarks/minilm8.py --experiments defaults)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from epimer.evaluation.statistics import Scores
from epimer.experiments.bench import Bench, Candidate
from epimer.experiments.results import number, share, tabulate, text, write
from epimer.records import Experiment

METHODS = ("epimer_kron", "epimer_free")
ANCHORS = ("stretched", "tsv", "iso_c", "sum", "average")
DAMPINGS = (0.1, 0.3, 1.0, 3.0)
SCALES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # of anchor average, which makes it a damped mean, T times as far as well


def defaults(bench: Bench) -> Experiment:
    """Return validation accuracy over the grid, without doubtful tasks."""
    suite = bench.suite.trusted
    probe = bench.base_average
    own = [suite.scores_on(state, task, "val") for state, task in zip(suite.models, suite.tasks, strict=True)]
    tuned = Scores(own).average
    data: list[dict[str, Any]] = []
    for method in METHODS:
        for anchor in ANCHORS:
            for damping in DAMPINGS:
                merged = bench.merge(Candidate(method, {"anchor": anchor, "damping": damping, "iterations": 40}))
                further = [round(len(bench.states) * scale, 6) for scale in SCALES] if anchor == "average" else []
                for scale in sorted({*SCALES, *further}):
                    scores = Scores(suite.scores(bench.scaled(merged, scale), "val"))
                    row = {"method": method, "anchor": anchor, "damping": damping, "scale": scale}
                    gain = (scores.average - probe) / (tuned - probe)
                    data.append({**row, "average": scores.average, "worst": scores.worst, "gain": gain})
    columns = {
        "method": text("method"),
        "anchor": text("anchor"),
        "damping": number("damping"),
        "scale": number("scale"),
        "validation": share("average"),
        "worst": share("worst"),
        "gain": share("gain"),
    }
    notes = [f"{task.name} is left out: {task.doubtful}." for task in bench.suite.tasks if task.doubtful]
    notes += [f"Probe {100 * probe:.1f}, fine-tuned {100 * tuned:.1f}, both on validation data."]
    return tabulate("defaults", "settings on validation data", columns, data, notes)


def main() -> None:
    """Run the grid on glyphs8, or read grids and print the best settings over all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("defaults-results"))
    parser.add_argument("--join", type=Path, nargs="*", help="JSON files of several suites; print the best settings")
    given = parser.parse_args()
    if not given.join:
        from epimer.experiments.glyphs8.build import load

        bench = Bench(load())
        result = bench.with_provenance(defaults(bench))
        write(result, given.out)
        print(result.markdown())
        return
    gains: dict[tuple[Any, ...], list[float]] = {}
    for path in given.join:
        for row in json.loads(path.read_text())["data"]:
            key = tuple(row[part] for part in ("method", "anchor", "damping", "scale"))
            gains.setdefault(key, []).append(row["gain"])
    for method in METHODS:
        ranked = sorted((key for key in gains if key[0] == method), key=lambda key: -sum(gains[key]))
        for key in ranked[:12]:
            print(
                *key,
                " ".join(f"{100 * gain:.1f}" for gain in gains[key]),
                f"{100 * sum(gains[key]) / len(gains[key]):.1f}",
            )


if __name__ == "__main__":
    main()
