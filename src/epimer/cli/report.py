"""`epimer report`: make an HTML page of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app
from epimer.cli.options import argument, option


@app.command()
def report(
    records: Annotated[
        list[Path], argument("JSON of bench, demo, diagnose, sweep or eval, a model's epimer.json, or folders.")
    ],
    out: Annotated[Path, option("The HTML file to write.", "--out", "-o")],
    figures: Annotated[Path | None, option("Also put each figure into this folder, as SVG.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Make one page of what was measured: it needs no network, no server and no torch."""
    from epimer.report.write import make_report

    files = make_report(records, out, figures)
    if not quiet:
        more = f" and {len(files) - 1} figures in {figures}" if figures is not None else ""
        typer.echo(f"wrote {out} ({render.size(out.stat().st_size)}){more}")
