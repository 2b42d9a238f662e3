"""Run commands of the command line, in this process or as a user does."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from epimer import cli

EPIMER = Path(sys.executable).with_name("epimer")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    """Run a command in this process, which spares the seconds that transformers takes to import."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["epimer", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        sys.argv = before
    return Ran(left.value.code or 0, out.getvalue(), err.getvalue())


def start(*arguments: object, cwd: Path | None = None, **environment: str) -> Ran:
    """Run a command as a user does."""
    done = subprocess.run(
        [EPIMER, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def assert_done(ran: Ran) -> str:
    """Exit code 0 and nothing on stderr; return what was printed."""
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.out


def assert_refused(ran: Ran, *words: str) -> None:
    """One line on stderr that holds these words, exit code 2, nothing printed."""
    assert ran.err.startswith("error: "), ran
    assert ran.err.count("\n") == 1, ran.err
    for word in words:
        assert word in ran.err
    assert (ran.code, ran.out) == (2, "")
