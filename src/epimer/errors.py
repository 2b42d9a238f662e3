"""Errors about a user's input, each one line with the problem and its remedy, and helpers to word them."""

from __future__ import annotations

import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

LIBRARY_FOLDERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
"""folders of code that the user did not write"""


class EpimerError(ValueError):
    """The input is at fault: what was wrong, where, what was expected, what to do.

    Its message is one line that can be shown anywhere: what names of the input hold beside text is written as escapes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message if message.isprintable() else "".join(map(_shown, message)))


class ParameterError(EpimerError):
    """An unknown method, an unknown parameter or a value out of range."""


class TensorError(EpimerError):
    """Tensors that do not fit together, or that hold what no merge can use."""


class CurvatureError(EpimerError):
    """Curvature that is missing, of the wrong kind or not positive semi-definite."""


class TooLargeError(CurvatureError):
    """Curvature that fits neither in memory nor on disk; `problem` tells sizes, without the remedy."""

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        super().__init__(f"{problem}{remedy}")
        self.problem = problem


class NumericalError(EpimerError):
    """A matrix that cannot be decomposed, or a system that cannot be solved; `task` counts the one that it is of."""

    task: int | None = None


class CheckpointError(EpimerError):
    """A checkpoint that is missing, damaged, hostile or of a kind that cannot be read."""


class MissingError(CheckpointError):
    """A model that was not found; `reason` is the part of the message that holds for any `name`."""

    def __init__(self, name: str = "", reason: str = "", remedy: str = "") -> None:
        super().__init__(f"{name} {reason}{remedy}".strip())
        self.name, self.reason = name, reason


class DataError(EpimerError):
    """Data to measure on that is missing, malformed or not what the task needs."""


class OutputError(EpimerError):
    """An output that cannot be written, or that would replace something else."""


class RecipeError(EpimerError):
    """A recipe that cannot be read: an unknown key, a wrong value."""


class EpimerWarning(UserWarning):
    """The merge went on, but not exactly as asked: a rank was lowered, a system was damped (its `status`).

    `method` is the one that the `text` is about, if it is about one.
    """

    def __init__(self, text: str = "", status: str = "", *, method: str = "") -> None:
        super().__init__(f"{method}: {text}" if method else text)
        self.text, self.status, self.method = text, status, method


class LeftOutWarning(EpimerWarning):
    """Tensors whose curvature could not be measured; commands list them with their result instead."""


def warn(warning: EpimerWarning) -> None:
    """Warn at the caller's line: the nearest one that is neither epimer's nor torch's, which wraps some functions."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("epimer", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def failure_in_user_code(label: str, error: BaseException) -> ParameterError:
    """Return an error in the user's Python code as one line that names the line of that code it came from."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith((*LIBRARY_FOLDERS, "<"))]
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({Path(error.filename).name} line {error.lineno})"
    return ParameterError(f"{label} failed: {type(error).__name__}: {str(error).strip(' .')}{where}.")


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to `name`, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str], most: int = 3) -> str:
    """Name the first few of `names` and count the rest: ``'a', 'b', 'c' and 4 more``."""
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(repr, every[:most])) + rest


def short(value: Any) -> str:
    """Return a value's repr on one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # more digits than Python writes down, or nested without end
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
