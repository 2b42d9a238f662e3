"""Suites and functions in the user's Python code, named as `module:function`; errors in them become one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from epimer.errors import EpimerError, ParameterError, failure_in_user_code, nearest
from epimer.evaluation.suite import Data, State, Suite, SuiteTask
from epimer.machine import out_of_memory

ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_entry_point(text: str) -> bool:
    """Whether a text has the form `module:function`."""
    return ENTRY_POINT.fullmatch(text) is not None


def suite_from_entry_point(text: str) -> Suite:
    """Import a module and call its function, which returns a `Suite`."""
    suite = one_line_errors(text)(load_entry_point(text))()
    if not isinstance(suite, Suite):
        raise ParameterError(f"{text} returned {type(suite).__name__}, expected an epimer.Suite.")
    if not suite.tasks:
        raise ParameterError(f"{text} returned a suite without tasks; give it at least one, with its model.")
    with one_line_errors(text):
        return _guarded(text, suite)


def load_entry_point(text: str) -> Callable[..., Any]:
    """Import a module, from the working folder too, and return its function.

    This runs the user's code. The text comes from the command line or from Python, never from a file.
    """
    name, _, attribute = text.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise failure_in_user_code(f"importing {name}", error) from error
        raise ParameterError(
            f"{text}: there is no module {error.name!r}; run epimer in the folder it lies in, or install it."
        ) from error
    except Exception as error:
        raise failure_in_user_code(f"importing {name}", error) from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ParameterError(f"{text}: {name} has no function {attribute!r}.{nearest(attribute, known)}")
    return function


@contextmanager
def one_line_errors(label: str) -> Iterator[None]:
    """Turn any exception in the user's code, which `label` names, into one line; usable as a decorator too."""
    try:
        yield
    except EpimerError:
        raise
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise failure_in_user_code(label, error) from error


def _guarded(text: str, suite: Suite) -> Suite:
    """Return the suite with every function of the user's wrapped in `one_line_errors`, naming task and part."""

    def label(task: SuiteTask, part: str) -> str:
        return f"{text}: task {task.name!r}: {part}"

    def network(state: State, task: SuiteTask) -> nn.Module:
        module: Any = one_line_errors(label(task, "network"))(suite.network)(state, task)
        if not isinstance(module, nn.Module):
            returned = label(task, f"network returned {type(module).__name__}")
            raise ParameterError(f"{returned}, expected a torch.nn.Module.")
        module.__class__ = _guarded_class(type(module), label(task, "the network's forward"))
        return module

    def names(task: SuiteTask) -> Any:
        assert suite.names is not None
        return one_line_errors(label(task, "names"))(suite.names)(task)

    tasks = [
        replace(
            task,
            splits={name: GuardedData(label(task, f"{name} data"), data) for name, data in task.splits.items()},
            score=one_line_errors(label(task, "score"))(task.score),
            loss=one_line_errors(label(task, "loss"))(task.loss),
        )
        for task in suite.tasks
    ]
    return replace(suite, network=network, names=suite.names and names, tasks=tasks)


@dataclass(frozen=True)
class GuardedData:
    """A split in the user's code."""

    label: str
    data: Data

    def __len__(self) -> int:
        with one_line_errors(self.label):
            return len(self.data)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        with one_line_errors(self.label):
            for inputs, targets in self.data.batches(size, order):  # noqa: UP028  (anything but a pair fails here)
                yield inputs, targets


def _guarded_class(network: Any, label: str) -> type:
    """Return a subclass of a network's class whose forward is wrapped in `one_line_errors`.

    A wrapper stored on the network itself would form a reference cycle, which keeps a large network in memory for long.
    """
    plain = network.__base__ if hasattr(network, "epimer_guard") else network  # the user may return one network twice
    members = {"__module__": plain.__module__, "forward": one_line_errors(label)(plain.forward), "epimer_guard": True}
    return type(plain.__name__, (plain,), members)
