"""The application that commands register with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

app = typer.Typer(
    help="Merge fine-tuned models of one ancestor into one model that keeps their skills.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def stoppable(consequence: str) -> Iterator[None]:
    """Exit with code 130 when the user interrupts the work, and print the consequence."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {consequence}.", err=True)
        raise typer.Exit(130) from None
