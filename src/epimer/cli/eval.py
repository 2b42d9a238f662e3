"""`epimer eval`: evaluate a model on a suite, or in a harness."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option

if TYPE_CHECKING:
    from epimer.evaluation.evaluate import Evaluation
    from epimer.records import HarnessRecord


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
    from epimer.evaluation.run_evaluation import run_evaluation

    with stoppable("nothing was written"), render.printed_warnings(shown=not (quiet or as_json)):
        result = run_evaluation(
            suite=suite, model=model, split=split, limit=limit, references=references, harness=harness, tasks=tasks,
            include=include_path, batch_size=batch_size, device=device, out=out, progress=not (quiet or as_json),
        )  # fmt: skip
    render.output(result.to_dict(), lambda: _print_result(result), file=out, as_json=as_json, quiet=quiet)


def _print_result(result: Evaluation | HarnessRecord) -> None:
    from epimer.evaluation.evaluate import Evaluation

    if isinstance(result, Evaluation):
        title = f"{result.suite}, {result.split}: {result.model}"
        headings = ["task", "metric", "model [95%]", *("base", "fine-tuned")[: len(result.columns) - 1]]
        rows = list(result.rows())
    else:
        title, headings = f"{result.harness}: {result.model}", ["task", "metric", "score", "± s.e."]
        rows = []
        for row in result.results:
            error = "" if row.stderr is None else f"{row.stderr:.4f}"
            rows.append([row.task, row.filtered_metric, f"{row.score:.4f}", error])
    render.print_table(headings, rows, title=title, text_columns=2)
