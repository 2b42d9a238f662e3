"""The options of `epimer eval` as one object, for the command line; see `epimer.evaluation.run_evaluation`."""

from __future__ import annotations

from types import SimpleNamespace

from epimer.evaluation.evaluate import Evaluation
from epimer.evaluation.lm_eval import HarnessResult
from epimer.evaluation.run_evaluation import run_evaluation

Question = SimpleNamespace


def ask(question: SimpleNamespace) -> Evaluation | HarnessResult:
    """Evaluate a model, see `run_evaluation`."""
    return run_evaluation(**vars(question))
