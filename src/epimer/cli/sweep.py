"""`epimer sweep`: try many methods, ranks and scales on the models of a recipe."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import option, split_commas
from epimer.errors import EpimerWarning

if TYPE_CHECKING:
    from epimer.diagnosis.sweep import Sweep


@app.command()
def sweep(
    recipe: options.Recipe,
    evaluation: Annotated[
        str | None,
        option(
            "A suite, agreement:SUITE (needs no labels), or module:function of a state dict.",
            "--eval",
            default="the inputs kept with the curvature",
        ),
    ] = None,
    methods: Annotated[
        str | None, option("Which, with commas.", default="average, tsv, iso_c, epimer_free and more")
    ] = None,
    scale: Annotated[str | None, option("Scales to try, with commas.", default="climbs from 1")] = None,
    rank: Annotated[str | None, option("Ranks to try, with commas.", default="each method's")] = None,
    keep_best: Annotated[Path | None, option("Write the best merge to this model folder.")] = None,
    overwrite: options.Overwrite = False,
    any_curvature: options.AnyCurvature = False,
    device: options.Device = "auto",
    max_memory: options.MaxMemory = None,
    plugin: options.Plugins = None,
    workers: options.Workers = None,
    engine: options.Engine = "local",
    address: options.Address = None,
    out: options.OutJson = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Try many methods, ranks and scales: choose on validation data, report on test data, write only what is asked."""
    from epimer.api import sweep as run
    from epimer.atomic_files import check_file

    options.load_plugins(plugin)
    check_file(out)
    consequence = "nothing was written" if keep_best is None else "no merge was written"
    with stoppable(consequence), warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        result = run(
            recipe, evaluation, methods=split_commas(methods, str, "--methods"),
            scales=split_commas(scale, float, "--scale"), ranks=split_commas(rank, int, "--rank"),
            keep_best=keep_best, overwrite=overwrite, any_curvature=any_curvature,
            device=device, progress=not (quiet or as_json), max_memory=max_memory, workers=workers, engine=engine,
            address=address,
            found=lambda result: render.write_record(result.to_dict(), out),
        )  # fmt: skip
    render.output(result.to_dict(), lambda: _print_sweep(result, keep_best), file=None, as_json=as_json, quiet=quiet)


def _print_sweep(result: Sweep, kept: Path | None) -> None:
    """Print the best scale of every method and rank, the best first."""
    from epimer.score_format import AGREEMENT, SHARES, format_interval, format_score, metric_heading

    with_kl = any(trial.validation.kl for trial in result.tried)
    rows = []
    for trial in sorted(result.finalists, key=lambda trial: trial.validation.order, reverse=True):
        record, unit = asdict(trial.record()), trial.validation.unit
        scales = sum((other.method, other.rank) == (trial.method, trial.rank) for other in result.tried)
        interval = "" if record["low"] is None else f" {format_interval(unit, record['low'], record['high'])}"
        row = [trial.method, "" if trial.rank is None else str(trial.rank), f"{trial.scale:g}"]
        row += [format_score(unit, record["validation"]), *([f"{record['kl']:.3f}"] if with_kl else [])]
        row += [format_score(unit, record["average"]) + interval, format_score(unit, record["worst"])]
        rows.append([*row, f"{scales} scales"])
    kl = ["its KL"] if with_kl else []
    unit = result.best.validation.unit
    percent = " %" if unit in SHARES else ""
    headings = ["method", "rank", "scale", f"validation {unit}{percent}", *kl]
    headings += [f"test {unit}{percent} [95%]", "worst", "tried"]
    title = f"{result.evaluation}: {metric_heading(unit)}; the best scale on validation data, reported on test data"
    if unit == AGREEMENT:
        title += "; no label was read"
    render.print_table(headings, rows, title=title, text_columns=1)
    render.print_notes(result.notes)
    best = result.best
    rank = "" if best.rank is None else f", rank {best.rank}"
    render.print_text(f"best on validation data: {best.method} at scale {best.scale:g}{rank}")
    render.print_text("nothing was written" if kept is None else f"wrote {kept}")
