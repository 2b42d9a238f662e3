"""`epimer bench`: run experiments on a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import option, split_commas
from epimer.errors import ParameterError

if TYPE_CHECKING:
    from epimer.records import Experiment

EXPERIMENTS = (
    "performance, worst-task, alpha, eta, fisher-fraction, landscape, cost, metrics, samples, tasks, unlabelled"
)
"""the names in `experiments.paper.EXPERIMENTS`, repeated so that --help needs no torch; a test compares them"""
WITHOUT_SUITE = "basins, basins-logistic"
"""the names in `experiments.basins.WITHOUT_SUITE`, likewise"""


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="glyphs8, clip8, a YAML file, or module:function.")] = "glyphs8",
    experiment: Annotated[
        list[str] | None,
        option(f"{EXPERIMENTS}, all, or without a suite {WITHOUT_SUITE}; may be repeated.", default="performance"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put tables and figures.")] = Path("epimer-bench"),
    seed: Annotated[int, typer.Option(help="Of the suite and of the choice of samples.", min=0)] = 0,
    seeds: Annotated[
        str | None, option("Training seeds, as 0,1,2: performance for each, and over all.", default="one, --seed")
    ] = None,
    variant: Annotated[str | None, option("Of clip8: B/32, B/16 or L/14.", default="B/32")] = None,
    limit: Annotated[int | None, option("Of clip8: samples of each split.", default="all")] = None,
    family: Annotated[str | None, option("Of clip8's models: tanganke or task_vectors.", default="tanganke")] = None,
    checkpoints: Annotated[Path | None, option("Folder with clip8's models.", default="the hub")] = None,
    data: Annotated[Path | None, option("Folder with clip8's datasets.", default="the hub")] = None,
    plugin: options.Plugins = None,
    quiet: options.Quiet = False,
) -> None:
    """Run the paper's experiments and ours on a suite: JSON, Markdown and figures."""
    from epimer.experiments.run import run_experiments
    from epimer.experiments.seeds import run_seeds

    options.load_plugins(plugin)
    of_clip8 = {"variant": variant, "limit": limit, "family": family, "checkpoints": checkpoints, "data": data}
    names = experiment or ["performance"]
    several = split_commas(seeds, int, "--seeds")
    if several and names != ["performance"]:
        raise ParameterError(f"--seeds is for the experiment performance; leave it out for {', '.join(names)}.")
    results = (
        run_seeds(suite, several, out, progress=not quiet, **of_clip8)
        if several
        else run_experiments(suite, names, out, seed=seed, progress=not quiet, **of_clip8)
    )
    tables: list[str] = []
    with stoppable(lambda: f"{out} has {', '.join(tables)}" if tables else "nothing was written"):
        for result, files in results:
            tables.append(files[0].name)
            if not quiet:
                print_experiment(result, files)


def print_experiment(result: Experiment, files: Sequence[Path]) -> None:
    """Print an experiment's table, its notes and where its files are."""
    render.print_table(result.headings, result.rows, title=result.title, text_columns=1)
    for note in result.notes:
        render.print_text(note)
    render.print_text("wrote " + ", ".join(str(file) for file in files))
