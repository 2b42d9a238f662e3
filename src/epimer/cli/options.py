"""Arguments and options that several commands share, and the means to declare others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from epimer.errors import ParameterError

T = TypeVar("T")


def argument(help: str) -> Any:
    """Declare an argument that is required or None."""
    return typer.Argument(help=help, show_default=False)


def option(help: str, *names: str, default: str | None = None) -> Any:
    """Declare an option that is required, None or off; `default` tells in words what None means."""
    return typer.Option(*names, help=help, show_default=default or False)


Recipe = Annotated[Path, argument("The recipe, a YAML file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")]
MaxMemory = Annotated[str | None, option("Most memory to use, as 3GB.", default="most of what is free")]
Workers = Annotated[int | None, option("Tensors processed at a time.", default="one per core")]
Engine = Annotated[str, typer.Option(help="local, or ray: a cluster whose machines share a disk.")]
Address = Annotated[
    str | None, option("Of the Ray cluster, or auto.", default="RAY_ADDRESS; without it, Ray starts here")
]
AnyCurvature = Annotated[bool, option("Use curvature even where it was measured on another model.", "--any-curvature")]
Overwrite = Annotated[bool, option("Replace a folder that epimer made.", "--overwrite")]
Plugins = Annotated[
    list[Path] | None,
    option("Python file with methods of your own, which is run; may be repeated.", "--plugin"),
]
OutJson = Annotated[Path | None, option("Also write the result to this JSON file.", "--out", "-o")]
Json = Annotated[bool, option("Print JSON for machines.", "--json")]
Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet", "-q")]


def load_plugins(plugins: list[Path] | None) -> None:
    """Add the methods of the files that --plugin names."""
    if plugins:
        from epimer.methods.plugins import load_plugins

        load_plugins(plugins)


def split_commas(text: str | None, kind: Callable[[str], T], name: str) -> list[T] | None:
    """Return the values of an option that takes several, with commas between them; None stays None."""
    if text is None:
        return None
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"{name} must be values with commas between them, as 0.5,1,1.5; got {text!r}.") from None
    if not values:
        raise ParameterError(f"{name} names nothing; leave it out, or give values with commas between them.")
    return values
