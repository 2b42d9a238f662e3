"""`epimer convert`: turn a torch file into a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import options
from epimer.cli.app import app
from epimer.cli.options import argument, option


@app.command()
def convert(
    source: Annotated[Path, argument("A torch file: .bin, .pt or .pth.")],
    target: Annotated[Path, argument("The .safetensors file to make.")],
    key: Annotated[str | None, option("Where in the file the state dict is.")] = None,
    overwrite: Annotated[bool, option("Replace the file if it exists.", "--overwrite")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert a torch file to safetensors; nothing in it is executed."""
    from epimer.checkpoints.convert import convert as run

    ties = run(source, target, key=key, overwrite=overwrite)
    if not quiet:
        shared = f" ({len(ties)} tied names share a tensor)" if ties else ""
        typer.echo(f"wrote {target}{shared}")
