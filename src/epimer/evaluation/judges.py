"""What a sweep scores merges by: a suite's labels, agreement with the fine-tuned models, or the user's function."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epimer.errors import ParameterError, listed
from epimer.evaluation.divergence import Predictions, counted_logits
from epimer.evaluation.metrics import shared_unit
from epimer.evaluation.open_suite import open_suite
from epimer.evaluation.statistics import Scores
from epimer.evaluation.suite import State, Suite, SuiteTask
from epimer.evaluation.user_code import is_entry_point, load_entry_point, one_line_errors
from epimer.score_format import AGREEMENT
from epimer.tasks.batches import Batch


@dataclass(frozen=True)
class SplitScores:
    """A model's scores on one split of every task."""

    scores: Mapping[str, Tensor]
    """task -> every sample's score, or a single number; higher is better"""
    kl: Mapping[str, float] = field(default_factory=dict)
    """task -> mean KL divergence from the predictions of the task's fine-tuned model, where it was computed"""
    unit: str = "accuracy"
    """what scores are: accuracy, agreement, loss or perplexity (minus the loss), or score"""
    doubtful: frozenset[str] = frozenset()
    """tasks by which nothing is chosen"""

    def __post_init__(self) -> None:
        for task, scores in self.scores.items():
            if not scores.numel() or not bool(scores.isfinite().all()):
                problem = "no score" if not scores.numel() else "a score that is not finite"
                raise ParameterError(f"the merge got {problem} on {task!r}; a sweep needs finite numbers to choose by.")

    @property
    def all(self) -> Scores:
        """The scores of all tasks."""
        return Scores(list(self.scores.values()))

    @property
    def trusted(self) -> Scores:
        """The scores of the tasks that choices are made by."""
        return Scores([self.scores[task] for task in self._trusted_tasks])

    @property
    def _trusted_tasks(self) -> list[str]:
        """The tasks that are not doubtful, or all where there are no others."""
        return [task for task in self.scores if task not in self.doubtful] or list(self.scores)

    @property
    def order(self) -> float:
        """What settings are compared by: the average score, less the mean KL divergence where it was computed.

        Of agreement it is 1 - (disagreement + KL): each alone errs more often than their sum (docs/diagnosis.md).
        """
        tasks = self._trusted_tasks
        return self.trusted.average - sum(self.kl.get(task, 0.0) for task in tasks) / len(tasks)


Evaluate = Callable[[State, str], SplitScores]
"""(state dict, "val" or "test") -> scores"""


def evaluator(
    text: str,
    folder: Path | None = None,
    *,
    count: int | None = None,
    device: str = "auto",
    progress: bool = False,
) -> Evaluate:
    """Return the evaluation that `--eval` names.

    `text` is a suite (its name, its YAML file, also in `folder`, or module:function that returns it), agreement:SUITE,
    which takes the suite's inputs but not its labels, or module:function that takes a state dict and returns scores by
    task. A suite must have `count` tasks, as many as models are merged; those of a YAML file run on `device`.
    """
    kind, _, rest = text.partition(":")
    if text == AGREEMENT:
        raise ParameterError("agreement needs inputs: write agreement:SUITE, a suite's name or YAML file.")
    name = rest if kind == AGREEMENT else text
    if kind != AGREEMENT and is_entry_point(text):
        function = load_entry_point(text)
        if _required_arguments(function):
            return by_function(text, function)
    if folder is not None and not os.path.exists(name) and os.path.isfile(folder / name):
        name = str(folder / name)
    suite = open_suite(name, progress=progress, device=device, labels=kind != AGREEMENT)
    if count is not None and count != len(suite.tasks):
        raise ParameterError(
            f"{name} has {len(suite.tasks)} tasks, and {count} models are merged; give a suite with a task for each, "
            "in their order."
        )
    score = by_agreement(suite) if kind == AGREEMENT else by_suite(suite)

    def evaluate(state: State, split: str) -> SplitScores:
        if missing := [tensor for tensor in suite.base if tensor not in state]:
            raise ParameterError(
                f"{name} is of other models: what is merged lacks {len(missing)} of its {len(suite.base)} tensors, "
                f"{listed(missing)}; give a suite with the same base."
            )
        return score(state, split)

    return evaluate


def by_suite(suite: Suite) -> Evaluate:
    """Return an evaluation by a suite's labels."""
    _check_splits(suite)
    unit, doubtful = shared_unit(suite), _doubtful(suite)

    def evaluate(state: State, split: str) -> SplitScores:
        scores = {task.name: suite.finite_scores(state, task, split, "a merge") for task in suite.tasks}
        return SplitScores(scores, unit=unit, doubtful=doubtful)

    return evaluate


def _doubtful(suite: Suite) -> frozenset[str]:
    return frozenset(task.name for task in suite.tasks if task.doubtful)


def by_agreement(suite: Suite) -> Evaluate:
    """Return an evaluation by agreement with each task's fine-tuned model, which reads no label.

    The score is the share of equal predictions; settings are compared by it and by the KL divergence from the
    fine-tuned model's predictions together.
    """
    _check_splits(suite)
    references: dict[tuple[str, str], list[Predictions]] = {}
    doubtful = _doubtful(suite)

    @torch.no_grad()
    def evaluate(state: State, split: str) -> SplitScores:
        scores, kl = {}, {}
        for task, model in zip(suite.tasks, suite.models, strict=True):
            if (task.name, split) not in references:
                references[task.name, split] = list(map(Predictions.of, _logits(suite, model, task, split)))
            hits, divergences = [], []
            for own, logits in zip(references[task.name, split], _logits(suite, state, task, split), strict=True):
                divergence = own.divergence(logits).double()
                invalid = own.log_probabilities.isnan().any(1) | divergence.isnan()  # NaN agrees with nothing
                hits.append((own.likeliest == logits.argmax(1)).double().masked_fill(invalid, math.nan))
                divergences.append(divergence)
            who = "a merge or the fine-tuned model"
            scores[task.name] = suite.check_finite(torch.cat(hits).cpu(), task, split, "agreement", who)
            kl[task.name] = float(torch.cat(divergences).mean())
        return SplitScores(scores, kl, unit=AGREEMENT, doubtful=doubtful)

    return evaluate


def _logits(suite: Suite, state: State, task: SuiteTask, split: str) -> Iterator[Tensor]:
    """Yield logits by batch, a row per sample or, of a language model, per token that counts."""
    network = suite.network(state, task)
    for inputs, targets in task.splits[split].batches(suite.batch):
        yield counted_logits(Batch(inputs, targets, 0), network)


def by_function(text: str, function: Callable[..., Any]) -> Evaluate:
    """Return an evaluation by a function of a state dict, and of the split where it takes a second argument."""
    takes_split = _required_arguments(function) > 1

    def evaluate(state: State, split: str) -> SplitScores:
        result = one_line_errors(text)(function)(*((dict(state), split) if takes_split else (dict(state),)))
        if not isinstance(result, Mapping) or not result:
            raise ParameterError(f"{text} returned {type(result).__name__}, expected a mapping from task to score.")
        scores = {}
        for task, value in result.items():
            try:
                scores[str(task)] = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ParameterError(
                    f"{text} scored {task!r} as {value!r}, expected a number, or one per sample."
                ) from error
        return SplitScores(scores, unit="score")

    return evaluate


def _required_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function has that lack a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in without a signature
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _check_splits(suite: Suite) -> None:
    for task, split in itertools.product(suite.tasks, ("val", "test")):
        if split not in task.splits:
            raise ParameterError(f"{suite.name}: task {task.name!r} has no {split} data, which a sweep needs; add it.")
