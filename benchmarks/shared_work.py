"""Let several processes share the merges of a bench, and a later one go on where they stopped: outcomes are files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from epimer.evaluation.statistics import Scores
from epimer.experiments.bench import Bench, Candidate, Outcome


def share(folder: Path, part: int, parts: int) -> None:
    """Keep every outcome in a folder; where it has none, make those of this part, and stand in for the others.

    Only what the last process, with one part, returns is a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make = Bench._best

    def best(bench: Bench, candidate: Candidate) -> Outcome:
        key = f"{bench.suite.name} {bench.samples} {bench.seed} {candidate!r}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        file = folder / f"{digest[:16]}.pt"
        if file.exists():
            return torch.load(file, weights_only=False)
        if int(digest, 16) % parts != part:
            return stand_in(bench)
        outcome = make(bench, candidate)
        torch.save(outcome, file.with_suffix(f".{part}"))
        os.replace(file.with_suffix(f".{part}"), file)
        return outcome

    Bench._best = best


def stand_in(bench: Bench) -> Outcome:
    """Return an outcome with scores of the right shapes, and of nothing."""
    nothing = [torch.arange(len(task.splits["test"])).double() % 2 for task in bench.suite.tasks]
    return Outcome(Candidate("average"), 1.0, 0.0, Scores(nothing), 0.0, edge=False)
