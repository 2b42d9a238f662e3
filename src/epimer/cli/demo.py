"""`epimer demo`: merge small models that are trained on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.bench import print_experiment

if TYPE_CHECKING:
    from epimer.experiments.demo import Demo

FOLDER = Path("epimer-demo")
COLUMNS = ("method", "average [95%]", "worst", "scale", "merge s", "against tsv")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put table, report and merged model.")] = FOLDER,
    quiet: options.Quiet = False,
) -> None:
    """Merge eight small vision models, trained on this machine, with every method, and compare.

    The first run trains them (about three minutes on two cores); later runs load them.
    """
    from epimer.experiments.demo import run
    from epimer.report.write import write_page

    out = out.expanduser()
    with stoppable("the next run starts where whole parts were made"):
        result = run(out, progress=not quiet)
        page = write_page([result.result.to_dict(), result.diagnosis.to_dict()], out / "report.html")
    if not quiet:
        _print_demo(result, page)


def _print_demo(demo: Demo, page: Path) -> None:
    print_experiment(demo.result.only(COLUMNS), demo.files)
    best = demo.best.candidate
    render.print_text(
        f"\n{best.name} was best on validation data: the merged model is in {demo.model}\n"
        f"the report is {page}, open it in a browser\n"
        f"the eight models and their base are in {demo.models}, folders as anybody's: epimer merge takes them\n"
        f"{demo.seconds:.0f} s in all. What next: epimer bench glyphs8 --experiment all, "
        f"epimer methods {best.method}, epimer diagnose for a recipe of your own models."
    )
