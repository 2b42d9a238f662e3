"""`epimer basis`: build the basis in which the models of a recipe will be merged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option


@app.command()
def basis(
    recipe: options.Recipe,
    out: Annotated[Path, argument("The basis folder to make.")],
    kind: Annotated[str | None, option("tagged or tensor.", default="what the recipe's method takes")] = None,
    rank: Annotated[int | None, option("Directions per task.", default="what the recipe says")] = None,
    device: options.Device = "auto",
    max_memory: options.MaxMemory = None,
    plugin: options.Plugins = None,
    workers: options.Workers = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Build the basis of a recipe's models, to measure only the curvature that lies in it.

    Give it to `epimer curvature --basis`; merges find it beside that curvature, or by `basis: FOLDER` in the recipe.
    `epimer curvature --recipe` builds it by itself where the whole curvature would be too large.
    """
    from epimer.api import make_basis

    options.load_plugins(plugin)
    with stoppable("nothing was written"):
        result = make_basis(
            recipe, out, kind=kind, rank=rank, overwrite=overwrite, progress=not quiet,
            device=device, workers=workers, max_memory=max_memory,
        )  # fmt: skip
    if not quiet:
        total = render.size(sum(result.size(name) for name in result))
        render.print_text(f"{out}: {result.kind} basis of {len(result)} tensors, {total}")
