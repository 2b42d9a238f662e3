"""The application that commands register with, and how a command that is told to stop ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

STARTED = time.perf_counter()  # close to when the process did
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEPT = "what was finished is kept"
PATIENCE = 1.0  # seconds in which more signals are taken for the first one: `timeout` sends each of them twice


class Stop:
    """The signal that told this process to stop, if one did."""

    number: int | None = None
    since = 0.0
    said = False
    """whether the user knows of it"""

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[None]:
        """Let signals interrupt the work as Ctrl-C does, so that it ends in order; ignored ones stay ignored."""
        cls.number, cls.said, before = None, False, {}
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            before = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, cls._interrupt)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @classmethod
    def say(cls, consequence: str) -> int:
        """Print that the work was stopped and with what consequence; return the exit code."""
        typer.echo(f"stopped; {consequence}.", err=True)
        cls.said = True
        return 128 + (cls.number or signal.SIGINT)

    @classmethod
    def _interrupt(cls, number: int, frame: Any) -> None:
        if cls.number is not None and time.monotonic() - cls.since < PATIENCE:
            return
        cls.number, cls.since = number, time.monotonic()
        raise KeyboardInterrupt


@contextmanager
def stoppable(consequence: str | Callable[[], str]) -> Iterator[None]:
    """Exit with 128 and the signal's number when the work is interrupted, and print the consequence.

    A consequence that depends on how far the work went is a function, called after the interruption.
    """
    try:
        yield
    except typer.Exit:
        raise
    except BaseException as error:  # an interruption becomes another error in code that others wrote
        if Stop.number is None and not isinstance(error, KeyboardInterrupt):
            raise
        text = consequence if isinstance(consequence, str) else consequence()
        raise typer.Exit(Stop.say(text)) from None


class Commands(TyperGroup):
    """Commands each of which may be interrupted at any moment."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with stoppable(KEPT):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Merge fine-tuned models of one ancestor into one model that keeps their skills.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
