"""Evaluate a model on a suite or with a harness, as `epimer eval` does: all options are checked before any work."""

from __future__ import annotations

from pathlib import Path

import torch

from epimer.atomic_files import check_file
from epimer.errors import ParameterError, nearest
from epimer.evaluation.evaluate import Evaluation, evaluate
from epimer.evaluation.lm_eval import HARNESSES, run_harness
from epimer.evaluation.open_suite import is_suite_file, open_suite
from epimer.records import HarnessRecord
from epimer.tasks.loading import check_device_option


def run_evaluation(
    *,
    suite: str | None = None,
    model: str | None = None,
    split: str = "test",
    limit: int | None = None,
    references: bool = True,
    harness: str | None = None,
    tasks: str | None = None,
    include: Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    out: Path | None = None,
    progress: bool = False,
) -> Evaluation | HarnessRecord:
    """Evaluate `model` on `suite` (see `evaluate`) or with `harness` on `tasks` (see `run_harness`).

    `out` is only checked: a result could be written there.
    """
    if model is None:
        raise ParameterError("give the model to evaluate: --model PATH.")
    if (suite is None) == (harness is None):
        raise ParameterError("give either a suite, epimer eval SUITE.yaml, or --harness lm-eval with --tasks.")
    if limit is not None and limit < 1:
        raise ParameterError(f"--limit must be at least 1, got {limit}.")
    _check_device(device, suite)
    check_file(out)
    if suite is not None:
        for option, value in {"--tasks": tasks, "--include-path": include, "--batch-size": batch_size}.items():
            if value is not None:
                raise ParameterError(f"{option} is for --harness; leave it out for a suite.")
        opened = open_suite(suite, device=device, keep=False, progress=progress)
        return evaluate(opened, model, split=split, limit=limit, references=references, progress=progress)
    if harness not in HARNESSES:
        hint = nearest(str(harness), HARNESSES)
        raise ParameterError(f"--harness must be one of {', '.join(HARNESSES)}, got {harness!r}.{hint}")
    if split != "test":
        raise ParameterError("--split is for suites: which split a task of lm-eval uses is in its own file.")
    if batch_size is not None and batch_size < 1:
        raise ParameterError(f"--batch-size must be at least 1, got {batch_size}.")
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    return run_harness(
        model, names, include=include, limit=limit, batch_size=batch_size or 16, device=device, progress=progress
    )


def _check_device(device: str, suite: str | None) -> None:
    """Refuse a device that is unknown, that the suite would not use, or that this machine does not have."""
    check_device_option(device)
    if not device.startswith("cuda"):
        return
    if suite is not None and not is_suite_file(suite):
        raise ParameterError(
            f"--device is for suites in YAML files and for --harness; leave it out for {suite}, which chooses its "
            "device itself."
        )
    available = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if device not in ("cuda", *available) or not available:
        has = ", ".join(available) or "no CUDA device that torch can use"
        raise ParameterError(f"--device {device}: this machine has {has}; take another, or leave it out.")
