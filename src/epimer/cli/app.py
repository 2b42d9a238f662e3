"""What all commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

app = typer.Typer(
    help="Merge fine-tuned models of one ancestor into one model that keeps their skills.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@contextmanager
def stoppable(consequence: str) -> Iterator[None]:
    """Say what it means that the user stopped the work."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {consequence}.", err=True)
        raise typer.Exit(130) from None
