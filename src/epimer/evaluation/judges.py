"""What a sweep judges merges by: a suite's labels, agreement with the fine-tuned models, or a function of one's own."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from epimer.diagnosis.sweep import Evaluate, Judged, State
from epimer.errors import ParameterError, listed
from epimer.evaluation.metrics import one_unit
from epimer.evaluation.suite import Suite, SuiteTask
from epimer.evaluation.user_code import is_entry, load_entry, run_entry
from epimer.experiments.run import open_suite
from epimer.tasks.batches import Batch
from epimer.tasks.labels import IGNORED, logits_of

AGREEMENT = "agreement"


def evaluator(text: str, folder: Path | None = None, *, count: int | None = None, progress: bool = False) -> Evaluate:
    """Return what `--eval` names.

    Args:
        text: a suite (its name, its YAML file, or module:function that makes one); `agreement:SUITE`, which takes the
            suite's inputs but not its labels; or module:function that takes a state dict and returns scores by task.
        folder: where a YAML file is looked for too.
        count: how many models are merged: a suite must have as many tasks.
        progress: show bars while a suite is opened.
    """
    kind, _, rest = text.partition(":")
    if text == AGREEMENT:
        raise ParameterError("agreement needs inputs: write agreement:SUITE, a suite's name or YAML file.")
    named = rest if kind == AGREEMENT else text
    if kind != AGREEMENT and is_entry(text):
        function = load_entry(text)
        if _wanted(function):
            return by_function(text, function)
    if folder is not None and not os.path.exists(named) and (folder / named).is_file():
        named = str(folder / named)
    suite = open_suite(named, progress=progress, labels=kind != AGREEMENT)
    if count is not None and count != len(suite.tasks):
        raise ParameterError(
            f"{named} has {len(suite.tasks)} tasks, and {count} models are merged; give a suite with a task for each, "
            "in their order."
        )
    judge = by_agreement(suite) if kind == AGREEMENT else by_suite(suite)

    def evaluate(state: State, split: str) -> Judged:
        if missing := [name for name in suite.base if name not in state]:
            raise ParameterError(
                f"{named} is of other models: what is merged lacks {len(missing)} of its {len(suite.base)} tensors, "
                f"{listed(missing)}; give a suite with the same base."
            )
        return judge(state, split)

    return evaluate


def by_suite(suite: Suite) -> Evaluate:
    """Judge by a suite's labels."""
    _check_splits(suite)
    measured = one_unit(suite)

    def evaluate(state: State, split: str) -> Judged:
        scores = {task.name: suite.sure_scores(state, task, split, "a merge") for task in suite.tasks}
        return Judged(scores, unit=measured)

    return evaluate


def by_agreement(suite: Suite) -> Evaluate:
    """Judge by how often, and how closely in KL, predictions match those of each task's own model; no label is read."""
    _check_splits(suite)
    known: dict[tuple[str, str], list[Tensor]] = {}

    @torch.no_grad()
    def evaluate(state: State, split: str) -> Judged:
        scores, kl = {}, {}
        for task, model in zip(suite.tasks, suite.models, strict=True):
            if (task.name, split) not in known:
                known[task.name, split] = list(_predictions(suite, model, task, split))
            hits, far = [], []
            for own, theirs in zip(known[task.name, split], _predictions(suite, state, task, split), strict=True):
                lost = (own + theirs).isnan().any(1)  # a prediction that is no number agrees with nothing
                hits.append((own.argmax(1) == theirs.argmax(1)).double().masked_fill(lost, math.nan))
                far.append(kl_div(theirs, own, reduction="none", log_target=True).sum(1).double())
            scores[task.name] = suite.sure(torch.cat(hits), task, split, "agreement", "a merge or the fine-tuned model")
            kl[task.name] = float(torch.cat(far).mean())
        return Judged(scores, kl)

    return evaluate


def _predictions(suite: Suite, state: State, task: SuiteTask, split: str) -> Any:
    """Yield log-probabilities, a row per sample, or per token that counts, of a language model."""
    network = suite.network(state, task)
    for inputs, targets in task.splits[split].batches(suite.batch):
        logits = logits_of(Batch(inputs, targets, 0).run(network)).float()
        if logits.dim() == 3:
            logits = logits[targets != IGNORED] if isinstance(targets, Tensor) else logits.flatten(0, 1)
        yield log_softmax(logits, 1).cpu()


def by_function(text: str, function: Callable[..., Any]) -> Evaluate:
    """Judge by a function of a state dict, and of the split where it takes a second argument."""
    takes_split = _wanted(function) > 1

    def evaluate(state: State, split: str) -> Judged:
        found = run_entry(text, function, *((state, split) if takes_split else (state,)))
        if not isinstance(found, Mapping) or not found:
            raise ParameterError(f"{text} returned {type(found).__name__}, expected a mapping from task to score.")
        scores = {}
        for task, value in found.items():
            try:
                scores[str(task)] = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ParameterError(
                    f"{text} scored {task!r} as {value!r}, expected a number, or one per sample."
                ) from error
        return Judged(scores, unit="score")

    return evaluate


def _wanted(function: Callable[..., Any]) -> int:
    """Return how many arguments a function must be given by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in that does not say
        return 0
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in by_place and one.default is inspect.Parameter.empty for one in parameters)


def _check_splits(suite: Suite) -> None:
    for task in suite.tasks:
        for split in ("val", "test"):
            if split not in task.splits:
                lack = f"task {task.name!r} has no {split} data, which a sweep needs"
                raise ParameterError(f"{suite.name}: {lack}; add it.")
