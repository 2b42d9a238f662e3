"""Commands that make models, and look at them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import show
from epimer.cli.app import Json, Quiet, app, stoppable
from epimer.errors import EpimerError


@app.command()
def merge(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    out: Annotated[Path | None, typer.Argument(help="The model folder to make.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its problems, do nothing.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    max_memory: Annotated[
        str | None, typer.Option(help="Most memory to use, as 3GB.", show_default="most of what is free")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even where it was measured on another model.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Tensors merged at a time.", show_default="one per core")] = None,
    threads: Annotated[int, typer.Option(help="Threads for each of them.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that epimer made.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Also write the record with timings to this file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge the models that a recipe names into a new model folder.

    The folder appears when it is complete. After a kill the same command goes on where it stopped.
    """
    from epimer.api import resolve
    from epimer.engine.merge import Options, plan_recipe, run
    from epimer.recipe.model import open_recipe

    options = Options(device, workers, threads, max_memory, max_shard_size, overwrite, not (quiet or as_json))
    if out is None and not dry_run:
        raise EpimerError("give the folder to make: epimer merge RECIPE OUT.")
    show.check_file(record)
    with stoppable("nothing was written"):
        given, folder = open_recipe(recipe)
        chosen, why = resolve(given, folder, progress=options.progress, any_curvature=any_curvature)
    plan = plan_recipe(chosen, progress=options.progress, any_curvature=any_curvature, folder=folder)
    if why:
        plan.notes.append(f"auto took {why}.")
    if dry_run:
        show.plan(plan, options, as_json=as_json, quiet=quiet)
        if plan.problems:
            raise typer.Exit(2)
        return
    assert out is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stoppable("the same command goes on from here"):
            done = run(plan, out, options)
    if record is not None:
        show.write(record, done.to_dict())
    if as_json:
        show.dump(done.to_dict())
    elif not quiet:
        show.done(done, out, [*plan.notes, *(str(warning.message) for warning in caught)])


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A file, a model folder, a hub id, or base+adapter.", show_default=False)],
    as_json: Json = False,
) -> None:
    """List a checkpoint's tensors: names, shapes, dtypes, sizes, ties, fingerprint."""
    from epimer.checkpoints import open_checkpoint

    show.checkpoint(open_checkpoint(path, progress=not as_json), as_json=as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to see all about it.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """List the merging methods, or explain one."""
    from epimer.methods.registry import describe_method, list_methods

    rows = [describe_method(one) for one in ([name] if name else list_methods())]
    show.methods(rows, as_json=as_json, full=name is not None)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A torch file: .bin, .pt or .pth.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The .safetensors file to make.", show_default=False)],
    key: Annotated[str | None, typer.Option(help="Where in the file the state dict is.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a torch file to safetensors; nothing in it is executed."""
    from epimer.checkpoints.convert import convert as run

    ties = run(source, target, key=key, overwrite=overwrite)
    if not quiet:
        shared = f" ({len(ties)} tied names share a tensor)" if ties else ""
        typer.echo(f"wrote {target}{shared}")
