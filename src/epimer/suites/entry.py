"""A suite that a function of the user's own makes: `my_package.my_suite:make`."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from epimer.errors import EpimerError, ParameterError, nearest
from epimer.suites.suite import Suite

ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_entry(text: str) -> bool:
    """Whether a text reads as `module:function`."""
    return ENTRY.fullmatch(text) is not None


def call_entry(text: str) -> Suite:
    """Import a module and call its function, which returns a `Suite`."""
    suite = run_entry(text, load_entry(text))
    if not isinstance(suite, Suite):
        raise ParameterError(f"{text} returned {type(suite).__name__}, expected an epimer.suites.suite.Suite.")

    def own(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        named = getattr(function, "__module__", None) or ""
        return function if named.startswith("epimer.") else partial(run_entry, f"{text}: {what}", function)

    tasks = [replace(task, score=own("score", task.score), loss=own("loss", task.loss)) for task in suite.tasks]
    return replace(suite, network=own("network", suite.network), tasks=tasks)


def run_entry(text: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of the user's own; what fails in it is said in one line."""
    try:
        return function(*given)
    except EpimerError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(text, error) from error


def load_entry(text: str) -> Callable[..., Any]:
    """Import a module, from the working folder too, and return its function.

    This runs the user's own code. The text comes from the command line or a recipe, never from a file of a model.
    """
    module, _, name = text.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise _failed(f"importing {module}", error) from error
        raise ParameterError(
            f"{text}: there is no module {error.name!r}; run epimer in the folder it lies in, or install it."
        ) from error
    except Exception as error:
        raise _failed(f"importing {module}", error) from error
    make: Any = getattr(found, name, None)
    if not callable(make):
        known = [one for one, value in vars(found).items() if callable(value) and not one.startswith("_")]
        raise ParameterError(f"{text}: {module} has no function {name!r}.{nearest(name, known)}")
    found_function: Callable[..., Any] = make
    return found_function


def _failed(what: str, error: BaseException) -> ParameterError:
    """Return an error that says where in the user's code it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({Path(error.filename).name} line {error.lineno})"
    return ParameterError(f"{what} failed: {type(error).__name__}: {error}{where}.")
