"""Errors about a user's input, each one line with the problem and its remedy, and helpers to word them."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any

LIBRARY_FOLDERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
"""folders of code that the user did not write"""
LONGEST = 4000  # characters of a message; of a longer one the beginning and the remedy at the end are shown
REMEDY = 400  # characters at the end of a message that is cut
QUERY = re.compile(r"(\w://[^\s?'\"]*)\?[^\s'\"]*")
"""an address with a query string, where signed addresses have their permission"""


class EpimerError(ValueError):
    """The input is at fault: what was wrong, where, what was expected, what to do.

    Its message is one line that can be shown anywhere: what names of the input hold beside text is written as escapes,
    names without end are cut, and query strings of addresses are left out, as they may hold a permission.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(public_line(message))


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
        text = public_line(text)
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


def public_line(message: str) -> str:
    """Return a message as one line of bounded length, without control characters and query strings of addresses."""
    message = _cut(message)  # first, as it may have a gigabyte
    if "://" in message:
        message = QUERY.sub(r"\1?...", message)
    return message if message.isprintable() else _cut("".join(map(_shown, message)))


def _cut(message: str) -> str:
    if len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST - REMEDY - 5]} ... {message[-REMEDY:]}"


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
    return ", ".join(_repr(name, 300) for name in every[:most]) + rest


def short(value: Any) -> str:
    """Return a value's repr on one line, cut where it is long."""
    text = " ".join(_repr(value, 100).split())
    return text if len(text) <= 60 else text[:57] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut where it is long, or the name of its type."""
    lines = (line.strip() for line in str(error)[:10_000].splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def _repr(value: Any, longest: int) -> str:
    """Return a value's repr, of which at least `longest` characters are there, in bounded time."""
    try:
        return _BoundedRepr(longest).repr(value)
    except (ValueError, RecursionError):  # more digits than Python writes down, or nested without end
        return f"a {type(value).__name__} that is too large to show"


class _BoundedRepr(Repr):
    """The repr of one value, of which long texts and collections are cut; a ValueError where it is too large."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest, self.maxother, self.left = longest, longest, 10 * longest
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = longest
        self.maxlevel = 1000

    def repr1(self, value: Any, level: int) -> str:
        """Return the repr of a part of the value."""
        self.left -= 1
        if self.left < 0:
            raise ValueError("it has too many parts")
        return super().repr1(value, level)

    def repr_str(self, value: Any, level: int) -> str:
        """Return the repr of a text, of which the beginning is shown."""
        return repr(value) if len(value) <= self.longest else repr(value[: self.longest]) + "..."

    repr_bytes = repr_str

    def repr_int(self, value: int, level: int) -> str:
        """Return the repr of an integer; a ValueError where Python writes none down."""
        return repr(value)

    def repr_dict(self, value: Any, level: int) -> str:
        """Return the repr of a dict in its own order."""
        items = [f"{self.repr1(k, level)}: {self.repr1(v, level)}" for k, v in islice(value.items(), self.longest)]
        return "{" + ", ".join(items) + "}"
