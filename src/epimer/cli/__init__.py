"""The command line: parse, call, print. Commands stand in the order in which --help lists them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated

import typer

from epimer.cli.app import app
from epimer.errors import EpimerError

for commands in ("merging", "judging", "measuring"):  # in the order of --help
    import_module(f"epimer.cli.{commands}")


def main() -> None:
    """Run the command line: exit 0 done, 2 the input is at fault, 1 epimer is."""
    try:
        sys.exit(app(standalone_mode=False))
    except EpimerError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the reader of our output has gone)
    except MemoryError:
        _fail("this machine has too little memory; set --max-memory to what it can spare.", 2)
    except Exception as error:
        if hasattr(error, "format_message") and not error.format_message():
            sys.exit(2)  # the help was shown
        if hasattr(error, "format_message"):
            _fail(error.format_message(), 2)
        if os.environ.get("EPIMER_DEBUG"):
            traceback.print_exc()
        _fail(
            f"epimer failed, and not through your input: {type(error).__name__}: {error} (EPIMER_DEBUG=1 shows where)",
            1,
        )


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    if "--json" in sys.argv and sys.argv[1:2] != ["diagnose"]:  # whose --json takes a file
        print(json.dumps({"error": line}))  # noqa: T201
    print(f"error: {line}", file=sys.stderr)  # noqa: T201
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
