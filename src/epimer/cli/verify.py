"""`epimer verify`: check that a merged model's folder is what its record says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option
from epimer.records import Verification


@app.command()
def verify(
    out: Annotated[str, argument("The folder that a merge made, here or in a store.")],
    recipe: Annotated[
        Path | None,
        option(
            "The recipe with the models' paths.",
            "--recipe",
            default="the record's; models where they were, here or beside OUT",
        ),
    ] = None,
    sample: Annotated[int, typer.Option(help="Tensors to compute again.")] = 8,
    every: Annotated[bool, option("Compute all tensors again.", "--all")] = False,
    seed: Annotated[int, typer.Option(help="Which tensors.")] = 0,
    tolerance: Annotated[
        float | None,
        option("Relative difference that is allowed; 0: none.", default="1e-3; 1e-2 between CPU and GPU"),
    ] = None,
    files_only: Annotated[bool, option("Check the folder alone, without its inputs.", "--files-only")] = False,
    device: Annotated[str | None, option("cpu, cuda, cuda:N, or auto.", default="as recorded")] = None,
    max_memory: options.MaxMemory = None,
    plugin: options.Plugins = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Verify that a merged folder is what its record says: files, inputs, and a sample of tensors computed again.

    Exit code 0: every part was checked and is as recorded. 2: something differs, or could not be checked.
    """
    from epimer.api import verify as run

    options.load_plugins(plugin)
    with stoppable("nothing was written"):
        verification = run(
            out, recipe=recipe, sample=None if every else sample, seed=seed, tolerance=tolerance,
            files_only=files_only, device=device, workers=workers, max_memory=max_memory,
            progress=not (quiet or as_json),
        )  # fmt: skip
    render.output(
        verification.to_dict(), lambda: _print_result(verification, out), file=None, as_json=as_json, quiet=quiet
    )
    raise typer.Exit(0 if verification.verified else 2)


def _print_result(verification: Verification, out: str) -> None:
    for check in verification.checks:
        render.print_text(f"{check.part:<11} {check.outcome:<12} {check.text}")
    verdict = (
        "is not what its record says"
        if verification.differs
        else "is as recorded where it was checked, which is not all"
    )
    render.print_text(f"{out} {'is what its record says' if verification.verified else verdict}.")
