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
    """Load a causal language model without running its code, and have lm-eval score it.

    Args:
        model: a model folder, a hub id, or `base+adapter`.
        tasks: names that lm-eval knows, groups and patterns among them.
        include: a folder with task files of your own. A task file may name functions to run: use only what you trust.
        limit: take only the first samples of each task.
        batch_size: requests at a time.
        device: cpu, cuda, cuda:N, or auto.
        progress: show lm-eval's bars on a terminal.
    """
    try:
        lm_eval, models = import_module("lm_eval"), import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ParameterError("--harness lm-eval needs lm-eval; install it: pip install 'epimer[lm-eval]'") from error
    if include is not None and not include.is_dir():
        raise ParameterError(f"--include-path {include} is not a folder; give the folder that holds your task files.")
    if limit is not None and limit < 1:
        raise ParameterError(f"--limit must be at least 1, got {limit}.")
    with _quiet(shown=progress and sys.stderr.isatty()):
        manager = _manager(tasks, include)
        checkpoint = open_checkpoint(model, progress=progress)
        widest = max(checkpoint.headers.values(), key=nbytes)
        dtype = widest.dtype if widest.is_floating_point() else torch.float32
        device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        task = load_task(model, CAUSAL_LM, dtype=dtype, device=device, progress=progress)
        try:
            scorer = models.HFLM(pretrained=task.model, tokenizer=task.reader, batch_size=batch_size)
            found = lm_eval.simple_evaluate(
                model=scorer, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
            )
        except EpimerError:
            raise
        except Exception as error:  # a task may hold anything
            raise DataError(
                f"lm-eval failed on {listed(tasks)}: {type(error).__name__}: {short(str(error))}"
            ) from error
    assert found is not None
    return HarnessRecord(model, f"lm-eval {version('lm_eval')}", list(_scores(found)), limit)


def _manager(tasks: Sequence[str], include: Path | None) -> Any:
    """Return what knows the tasks: the user's folder alone where it has them all, else lm-eval's own too."""
    if not tasks:
        raise ParameterError("--harness lm-eval needs --tasks: names of tasks, separated by commas.")
    known, unknown = list[str](), list[str]()
    manage: Any = import_module("lm_eval.tasks").TaskManager
    for defaults in (False, True) if include is not None else (True,):
        try:
            manager = manage(include_path=None if include is None else str(include), include_defaults=defaults)
        except Exception as error:  # whatever is wrong with a task file
            reason = f"{type(error).__name__}: {short(str(error))}"
            raise DataError(f"the tasks in {include} cannot be read: {reason}") from error
        known = list(manager.all_tasks)
        unknown = [name for name in tasks if name not in known and "*" not in name]
        if not unknown:
            return manager
    raise ParameterError(
        f"lm-eval knows no task {unknown[0]!r}.{nearest(unknown[0], known)} `lm-eval ls tasks` lists them; "
        "--include-path adds your own."
    )


def _scores(found: Any) -> Iterator[HarnessScore]:
    """Yield each task's metrics; lm-eval keys them as `metric,filter`, and their errors as `metric_stderr,filter`."""
    for task, values in found["results"].items():
        counts = found.get("n-samples", {}).get(task, {})
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            spread = values.get(f"{metric}_stderr,{filtered}")
            stderr = float(spread) if isinstance(spread, int | float) else None
            yield HarnessScore(task, metric, float(value), filtered, stderr, counts.get("effective"))


@contextmanager
def _quiet(*, shown: bool) -> Iterator[None]:
    """Keep lm-eval's remarks off the terminal, and its bars unless they are to be shown."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if shown:
            yield
            return
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()), _silent_children():
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _silent_children() -> Iterator[None]:
    """Send away what other programs write to stderr: lm-eval asks git for a commit, which may complain."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
