"""Commands that say what a merge will do, or did: diagnose, sweep, eval, bench, demo, report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import show
from epimer.cli.app import Json, Quiet, app, stoppable
from epimer.errors import EpimerWarning

NAMED = "performance, worst-task, alpha, eta, fisher-fraction, landscape, cost, metrics, samples, tasks"


@app.command()
def diagnose(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all that was found to this JSON file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that shows it to this HTML file.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Directions per task.", show_default="what the recipe says, or 32")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Merges to forecast, with commas.", show_default="average, tsv, epimer_free and more"),
    ] = None,
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even if it was measured on another model.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """See before merging: which tasks and layers conflict, which rank and method to take, what each merge would lose.

    Works without data; where the recipe's models have a curvature folder, that is used.
    """
    from epimer.cli import findings
    from epimer.diagnosis.diagnose import diagnose as run

    show.check_file(json_file)
    show.check_file(html)
    wanted = findings.listed(methods, str, "--methods")
    with stoppable("nothing was written"):
        found = run(recipe, rank=rank, methods=wanted, any_curvature=any_curvature, progress=not quiet)
    if json_file is not None:
        show.write(json_file, found.to_dict())
    if html is not None:
        show.page([found.to_dict()], html)
    if not quiet:
        findings.diagnosis(found)


@app.command()
def sweep(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    evaluation: Annotated[
        str,
        typer.Option(
            "--eval",
            help="A suite, agreement:SUITE (needs no labels), or module:function of a state dict.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Which, with commas.", show_default="average, tsv, iso_c, epimer_free and more")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Scales to try, with commas.", show_default="climbs from 1")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks to try, with commas.", show_default="each method's")] = None,
    keep_best: Annotated[
        Path | None, typer.Option(help="Write the best merge to this model folder.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that epimer made.")] = False,
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even where it was measured on another model.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the table to this JSON file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try many methods, ranks and scales: choose on validation data, report on test data, write only what is asked."""
    from epimer.api import sweep as run
    from epimer.cli import findings

    show.check_file(out)
    with stoppable("nothing was written"), warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        found = run(
            recipe,
            evaluation,
            methods=findings.listed(methods, str, "--methods"),
            scales=findings.listed(scale, float, "--scale"),
            ranks=findings.listed(rank, int, "--rank"),
            keep_best=keep_best,
            overwrite=overwrite,
            any_curvature=any_curvature,
            progress=not (quiet or as_json),
        )
    if out is not None:
        show.write(out, found.to_dict())
    if as_json:
        show.dump(found.to_dict())
    elif not quiet:
        findings.sweep(found, keep_best)


@app.command(name="eval")
def evaluate(
    suite: Annotated[
        str | None,
        typer.Argument(help="A suite: a YAML file, module:function, or a name as glyphs8.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model folder, a hub id, or base+adapter.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    limit: Annotated[int | None, typer.Option(help="Most samples of each task.", show_default="all")] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Also the base and each task's own model.")
    ] = True,
    harness: Annotated[str | None, typer.Option(help="lm-eval, instead of a suite.", show_default=False)] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of the harness, with commas.", show_default=False)] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with task files of your own for the harness.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Requests of the harness at a time.", show_default="16")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the result to this JSON file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a model on every task of a suite, beside the base and the fine-tuned models.

    A suite is a YAML file (docs/evaluating.md) or a Python function. For language models there is lm-eval:
    epimer eval --harness lm-eval --tasks hellaswag --model PATH
    """
    from epimer.experiments.ask import Question, ask

    question = Question(
        suite=suite,
        model=model,
        split=split,
        limit=limit,
        references=references,
        harness=harness,
        tasks=tasks,
        include=include_path,
        batch_size=batch_size,
        device=device,
        out=out,
        progress=not (quiet or as_json),
    )
    with stoppable("nothing was written"):
        found = ask(question)
    if out is not None:
        show.write(out, found.to_dict())
    if as_json:
        show.dump(found.to_dict())
    elif not quiet:
        show.evaluation(found)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="glyphs8, clip8, a YAML file, or module:function.")] = "glyphs8",
    experiment: Annotated[
        list[str] | None,
        typer.Option(help=f"{NAMED} or all; may be repeated.", show_default="performance"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put tables and figures.")] = Path("epimer-bench"),
    seed: Annotated[int, typer.Option(help="Of the suite and of the choice of samples.", min=0)] = 0,
    variant: Annotated[str | None, typer.Option(help="Of clip8: B/32, B/16 or L/14.", show_default="B/32")] = None,
    limit: Annotated[int | None, typer.Option(help="Of clip8: samples of each split.", show_default="all")] = None,
    family: Annotated[
        str | None, typer.Option(help="Of clip8's models: tanganke or task_vectors.", show_default="tanganke")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder with clip8's models.", show_default="the hub")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with clip8's datasets.", show_default="the hub")] = None,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments and ours on a suite: JSON, Markdown and figures."""
    from epimer.experiments.run import run_experiments

    given = {"variant": variant, "limit": limit, "family": family, "checkpoints": checkpoints, "data": data}
    wanted = experiment or ["performance"]
    with stoppable("what was finished is kept"):
        for result, files in run_experiments(suite, wanted, out, seed=seed, progress=not quiet, **given):
            if not quiet:
                show.experiment(result, files)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put table, report and merged model.")] = Path(
        "epimer-demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Merge eight small vision models, trained on this machine, with every method, and compare.

    The first run trains them (about three minutes on two cores); later runs load them.
    """
    from epimer.experiments.demo import run

    out = out.expanduser()
    with stoppable("the next run starts where whole parts were made"):
        found = run(out, progress=not quiet)
        show.page([found.result.to_dict(), found.diagnosis.to_dict()], out / "report.html")
    if not quiet:
        show.demo(found, out / "report.html")


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="JSON of bench, demo, diagnose, sweep or eval, a model's epimer.json, or folders.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", show_default=False)],
    figures: Annotated[
        Path | None, typer.Option(help="Also put each figure into this folder, as SVG.", show_default=False)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make one page of what was measured: it needs no network, no server and no torch."""
    from epimer.report.write import make_report

    made = make_report(records, out, figures)
    if not quiet:
        more = f" and {len(made) - 1} figures in {figures}" if figures is not None else ""
        typer.echo(f"wrote {out} ({show.size(out.stat().st_size)}){more}")
