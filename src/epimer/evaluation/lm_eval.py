"""Evaluate a language model with EleutherAI's lm-eval, where it is installed."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import nbytes
from epimer.errors import DataError, EpimerError, ParameterError, listed, nearest, short
from epimer.records import HarnessRecord, HarnessScore
from epimer.tasks.loading import CAUSAL_LM
from epimer.tasks.task import load_task

HARNESSES = ("lm-eval",)


def run_harness(
    model: str,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    device: str = "auto",
    progress: bool = False,
) -> HarnessRecord:
    """Load a causal language model without running its code, and have lm-eval score the first `limit` samples of tasks.

    Tasks are names, groups or patterns that lm-eval knows, or that are in the task files of the folder `include`. A
    task file may name functions to run: use only what you trust.
    """
    try:
        lm_eval, models = import_module("lm_eval"), import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ParameterError("--harness lm-eval needs lm-eval; install it: pip install 'epimer[lm-eval]'") from error
    if include is not None and not include.is_dir():
        raise ParameterError(f"--include-path {include} is not a folder; give the folder that holds your task files.")
    with _quiet(bars=progress and sys.stderr.isatty()):
        manager = _task_manager(tasks, include)
        checkpoint = open_checkpoint(model, progress=progress)
        widest = max(checkpoint.headers.values(), key=nbytes)
        dtype = widest.dtype if widest.is_floating_point() else torch.float32
        device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        task = load_task(model, CAUSAL_LM, dtype=dtype, device=device, progress=progress)
        try:
            wrapped = models.HFLM(pretrained=task.model, tokenizer=task.reader, batch_size=batch_size)
            output = lm_eval.simple_evaluate(
                model=wrapped, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
            )
        except EpimerError:
            raise
        except Exception as error:  # a task may hold anything
            reason = f"{type(error).__name__}: {short(str(error))}"
            raise DataError(f"lm-eval failed on {listed(tasks)}: {reason}") from error
    assert output is not None
    return HarnessRecord(model, f"lm-eval {version('lm_eval')}", list(_scores(output)), limit)


def _task_manager(tasks: Sequence[str], include: Path | None) -> Any:
    """Return lm-eval's index of tasks: of the user's folder alone where it has them all, else of lm-eval's too."""
    if not tasks:
        raise ParameterError("--harness lm-eval needs --tasks: names of tasks, separated by commas.")
    known, unknown = list[str](), list[str]()
    create: Any = import_module("lm_eval.tasks").TaskManager
    for defaults in (False, True) if include is not None else (True,):
        try:
            manager = create(include_path=None if include is None else str(include), include_defaults=defaults)
        except Exception as error:  # whatever is wrong with a task file
            reason = f"{type(error).__name__}: {short(str(error))}"
            raise DataError(f"the tasks in {include} cannot be read: {reason}") from error
        known = list(manager.all_tasks)
        unknown = [name for name in tasks if name not in known and "*" not in name]
        if not unknown:
            return manager
    raise ParameterError(
        f"lm-eval knows no task {unknown[0]!r}.{nearest(unknown[0], known)} `lm-eval ls tasks` lists them; "
        "--include-path adds others."
    )


def _scores(output: Any) -> Iterator[HarnessScore]:
    """Yield each task's metrics; lm-eval keys them as `metric,filter`, and their errors as `metric_stderr,filter`."""
    for task, values in output["results"].items():
        counts = output.get("n-samples", {}).get(task, {})
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            known = float(stderr) if isinstance(stderr, int | float) else None
            yield HarnessScore(task, metric, float(value), filter_name, known, counts.get("effective"))


@contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """Keep lm-eval's messages off the terminal, and its progress bars unless `bars`."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if bars:
            yield
            return
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()), _silent_children():
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _silent_children() -> Iterator[None]:
    """Discard what subprocesses write to stderr: lm-eval asks git for a commit, which may print an error."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
