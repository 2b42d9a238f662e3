"""The command line: one file per command, each of which parses, calls and prints."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from epimer.cli.app import KEPT, Stop, app
from epimer.errors import EpimerError
from epimer.machine import out_of_memory
from epimer.opened_files import reason
from epimer.plain_text import visible

COMMANDS = "merge verify extract_lora inspect methods convert diagnose sweep eval bench demo report curvature basis"
"""one module each, in the order of --help"""
INTERRUPTED = 130  # typer's exit code for KeyboardInterrupt
GARBAGE = 50_000  # new objects before garbage is collected; loading torch makes many, and no garbage

for command in COMMANDS.split():
    import_module(f"epimer.cli.{command}")


def main() -> None:
    """Run the command line and exit: 0 for success, 2 for an error in the input, 1 for an internal error.

    A command that is stopped exits with 130 (Ctrl-C), 143 (SIGTERM) or 129 (the terminal is gone).
    """
    gc.set_threshold(GARBAGE)
    try:
        with Stop.listening():
            code = app(standalone_mode=False)
        if code == INTERRUPTED and not Stop.said:  # before the command began
            raise KeyboardInterrupt
        gc.freeze()  # what is left at the end need not be searched for garbage
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(Stop.say(KEPT))
    except EpimerError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the reader of our output has gone)
    except Exception as error:
        if out_of_memory(error):
            _fail("this machine has too little memory; set --max-memory to what it can spare.", 2)
        if isinstance(error, OSError) and error.errno:
            _fail(f"{error.filename or 'a file'} cannot be used: {reason(error)}.", 2)
        if hasattr(error, "format_message"):  # an error in the arguments; no message: the help was shown
            _fail(error.format_message(), 2)
        if os.environ.get("EPIMER_DEBUG"):
            traceback.print_exc()
        _fail(f"internal error: {type(error).__name__}: {error} (EPIMER_DEBUG=1 shows where)", 1)


def run() -> None:
    """Run the command line as a process of its own, which ends at once when all is done: Python takes 0.1 s for it."""
    callers = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe(1))]
    alone = callers in (["__main__"], ["__main__", "runpy", "runpy"])  # no profiler that has yet to write its results
    try:
        main()
    except SystemExit as end:
        if end.code or not alone:
            raise
    if alone:
        with suppress(OSError, AttributeError, ValueError):  # a stream is full, unread or closed: Python's own end then
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _fail(message: str, code: int) -> None:
    line = visible(" ".join(message.split()))
    if line and "--json" in sys.argv:
        print(json.dumps({"error": line}))  # noqa: T201
    if line:
        print(line if code == 1 else f"error: {line}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        import epimer

        typer.echo(f"epimer {epimer.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
