"""What `epimer eval` is asked: a suite or a harness, and which options belong to which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from epimer.checkpoints.writer import check_file
from epimer.errors import ParameterError, nearest
from epimer.evaluation.evaluate import Evaluation, evaluate
from epimer.evaluation.lm_eval import HARNESSES, run_harness
from epimer.experiments.run import is_file, open_suite
from epimer.records import HarnessRecord
from epimer.tasks.loading import check_device_option


@dataclass(frozen=True)
class Question:
    """What to evaluate on what."""

    suite: str | None = None
    model: str | None = None
    split: str = "test"
    limit: int | None = None
    references: bool = True
    harness: str | None = None
    tasks: str | None = None
    include: Path | None = None
    batch_size: int | None = None
    device: str = "auto"
    out: Path | None = None
    progress: bool = False


def ask(question: Question) -> Evaluation | HarnessRecord:
    """Evaluate a model; all that can be wrong with the question is said first."""
    if question.model is None:
        raise ParameterError("give the model to evaluate: --model PATH.")
    if (question.suite is None) == (question.harness is None):
        raise ParameterError("give either a suite, epimer eval SUITE.yaml, or --harness lm-eval with --tasks.")
    _check_device(question)
    check_file(question.out)
    return _harness(question, question.model) if question.suite is None else _suite(question, question.model)


def _check_device(question: Question) -> None:
    """Refuse a device that is none, that the suite would not use, or that is not there."""
    check_device_option(question.device)
    if not question.device.startswith("cuda"):
        return
    if question.suite is not None and not is_file(question.suite):
        raise ParameterError(
            f"--device is for suites in YAML files and for --harness; leave it out for {question.suite}, which chooses "
            "its device itself."
        )
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if question.device not in ("cuda", *there) or not there:
        has = ", ".join(there) or "no CUDA device that torch can use"
        raise ParameterError(f"--device {question.device}: this machine has {has}; take another, or leave it out.")


def _suite(question: Question, model: str) -> Evaluation:
    for option, value in (
        ("--tasks", question.tasks),
        ("--include-path", question.include),
        ("--batch-size", question.batch_size),
    ):
        if value is not None:
            raise ParameterError(f"{option} is for --harness; leave it out for a suite.")
    assert question.suite is not None
    suite = open_suite(question.suite, device=question.device, keep=False, progress=question.progress)
    return evaluate(
        suite,
        model,
        split=question.split,
        limit=question.limit,
        references=question.references,
        progress=question.progress,
    )


def _harness(question: Question, model: str) -> HarnessRecord:
    if question.harness not in HARNESSES:
        hint = nearest(str(question.harness), HARNESSES)
        raise ParameterError(f"--harness must be one of {', '.join(HARNESSES)}, got {question.harness!r}.{hint}")
    if question.split != "test":
        raise ParameterError("--split is for suites: which split a task of lm-eval uses is in its own file.")
    if question.batch_size is not None and question.batch_size < 1:
        raise ParameterError(f"--batch-size must be at least 1, got {question.batch_size}.")
    return run_harness(
        model,
        [name.strip() for name in (question.tasks or "").split(",") if name.strip()],
        include=question.include,
        limit=question.limit,
        batch_size=question.batch_size or 16,
        device=question.device,
        progress=question.progress,
    )
