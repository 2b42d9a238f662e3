"""`epimer eval`: evaluate a model on a suite, or in a harness."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option
from epimer.errors import ParameterError, nearest

if TYPE_CHECKING:
    from epimer.evaluation.evaluate import Evaluation
    from epimer.evaluation.lm_eval import HarnessResult


@app.command(name="eval")
def evaluate(
    suite: Annotated[str | None, argument("A suite: a YAML file, module:function, or a name as glyphs8.")] = None,
    model: Annotated[str | None, option("A model folder, a hub id, or base+adapter.", "--model", "-m")] = None,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    limit: Annotated[int | None, option("Most samples of each task.", default="all")] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Also the base and each task's own model.")
    ] = True,
    harness: Annotated[str | None, option("lm-eval, instead of a suite.")] = None,
    tasks: Annotated[str | None, option("Tasks of the harness, with commas.")] = None,
    include_path: Annotated[Path | None, option("Folder with task files of your own for the harness.")] = None,
    batch_size: Annotated[int | None, option("Requests of the harness at a time.", default="16")] = None,
    device: options.Device = "auto",
    out: options.OutJson = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Evaluate a model on every task of a suite, beside the base and the fine-tuned models.

    A suite is a YAML file (docs/evaluating.md) or a Python function. For language models there is lm-eval:
    epimer eval --harness lm-eval --tasks hellaswag --model PATH
    """
    from epimer.checkpoints.writer import check_file
    from epimer.evaluation.evaluate import evaluate as run
    from epimer.evaluation.lm_eval import run_harness
    from epimer.experiments.run import open_suite

    if model is None:
        raise ParameterError("give the model to evaluate: --model PATH.")
    if (suite is None) == (harness is None):
        raise ParameterError("give either a suite, epimer eval SUITE.yaml, or --harness lm-eval with --tasks.")
    _check_device(device, suite)
    check_file(out)
    progress = not (quiet or as_json)
    result: Evaluation | HarnessResult
    with stoppable("nothing was written"):
        if suite is not None:
            _refuse_harness_options({"--tasks": tasks, "--include-path": include_path, "--batch-size": batch_size})
            opened = open_suite(suite, device=device, keep=False, progress=progress)
            result = run(opened, model, split=split, limit=limit, references=references, progress=progress)
        else:
            _check_harness(harness, split, batch_size)
            result = run_harness(
                model,
                [name.strip() for name in (tasks or "").split(",") if name.strip()],
                include=include_path,
                limit=limit,
                batch_size=batch_size or 16,
                device=device,
                progress=progress,
            )
    render.output(result.to_dict(), lambda: _print_result(result), file=out, as_json=as_json, quiet=quiet)


def _check_device(device: str, suite: str | None) -> None:
    """Refuse a device that does not exist, is not there, or that the suite would not use."""
    import torch

    from epimer.experiments.run import is_file
    from epimer.tasks.loading import check_device_option

    check_device_option(device)
    if not device.startswith("cuda"):
        return
    if suite is not None and not is_file(suite):
        raise ParameterError(
            f"--device is for suites in YAML files and for --harness; leave it out for {suite}, which chooses "
            "its device itself."
        )
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if device not in ("cuda", *there) or not there:
        has = ", ".join(there) or "no CUDA device that torch can use"
        raise ParameterError(f"--device {device}: this machine has {has}; take another, or leave it out.")


def _refuse_harness_options(options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ParameterError(f"{name} is for --harness; leave it out for a suite.")


def _check_harness(harness: str | None, split: str, batch_size: int | None) -> None:
    from epimer.evaluation.lm_eval import HARNESSES

    if harness not in HARNESSES:
        hint = nearest(str(harness), HARNESSES)
        raise ParameterError(f"--harness must be one of {', '.join(HARNESSES)}, got {harness!r}.{hint}")
    if split != "test":
        raise ParameterError("--split is for suites: which split a task of lm-eval uses is in its own file.")
    if batch_size is not None and batch_size < 1:
        raise ParameterError(f"--batch-size must be at least 1, got {batch_size}.")


def _print_result(result: Evaluation | HarnessResult) -> None:
    from epimer.evaluation.evaluate import Evaluation

    if isinstance(result, Evaluation):
        title = f"{result.suite}, {result.split}: {result.model}"
        headings = ["task", "metric", "model [95%]", *("base", "fine-tuned")[: len(result.columns) - 1]]
        rows = list(result.rows())
    else:
        title, headings = f"{result.harness}: {result.model}", ["task", "metric", "score", "± s.e."]
        rows = []
        for row in result.rows:
            metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
            error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
            rows.append([row["task"], metric, f"{row['score']:.4f}", error])
    render.print_table(headings, rows, title=title, text_columns=2)
