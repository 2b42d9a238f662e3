"""A suite that a function of the user's own makes: `my_package.my_suite:make`."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from epimer.errors import EpimerError, ParameterError, nearest
from epimer.evaluation.suite import Data, Suite, SuiteTask

NOT_THEIRS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))
"""folders of code that the user did not write"""
ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_entry(text: str) -> bool:
    """Whether a text reads as `module:function`."""
    return ENTRY.fullmatch(text) is not None


def call_entry(text: str) -> Suite:
    """Import a module and call its function, which returns a `Suite`."""
    suite = run_entry(text, load_entry(text))
    if not isinstance(suite, Suite):
        raise ParameterError(f"{text} returned {type(suite).__name__}, expected an epimer.evaluation.suite.Suite.")
    if not suite.tasks:
        raise ParameterError(f"{text} returned a suite without tasks; give it one at least, with its model.")
    with own_code(text):
        return _guarded(text, suite)


def _guarded(text: str, suite: Suite) -> Suite:
    """Return a suite all of whose parts say in one line what fails in them, and in which task."""

    def at(task: SuiteTask, what: str) -> str:
        return f"{text}: task {task.name!r}: {what}"

    def network(state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        made = run_entry(at(task, "network"), suite.network, state, task)
        if not isinstance(made, nn.Module):
            said = at(task, f"network returned {type(made).__name__}")
            raise ParameterError(f"{said}, expected a torch.nn.Module.")
        made.__class__ = _network_class(type(made), at(task, "the network's forward"))
        return made

    def guarded(task: SuiteTask) -> SuiteTask:
        splits = {name: Own(at(task, f"{name} data"), data) for name, data in task.splits.items()}
        score, loss = (partial(run_entry, at(task, what), getattr(task, what)) for what in ("score", "loss"))
        return replace(task, splits=splits, score=score, loss=loss)

    given = suite.names
    names = None if given is None else (lambda task: run_entry(at(task, "names"), given, task))
    return replace(suite, network=network, names=names, tasks=[guarded(task) for task in suite.tasks])


@dataclass(frozen=True)
class Own:
    """A split of the user's own."""

    called: str
    data: Data

    def __len__(self) -> int:
        with own_code(self.called):
            return len(self.data)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield its batches."""
        with own_code(self.called):
            for inputs, targets in self.data.batches(size, order):  # noqa: UP028  (what is no pair fails here)
                yield inputs, targets


def _network_class(kind: Any, called: str) -> type:
    """Return a class like a network's own, whose forward says in one line what fails in it.

    A function on the network itself would hold on to it, and such a cycle keeps a large network in memory for long.
    """
    plain = kind.__base__ if hasattr(kind, "epimer_guard") else kind  # a network that was kept has a guard already

    @wraps(plain.forward)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        with own_code(called):
            return plain.forward(self, *given, **named)

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward, "epimer_guard": True})


def run_entry(text: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of the user's own; what fails in it is said in one line."""
    with own_code(text):
        return function(*given)


@contextmanager
def own_code(text: str) -> Iterator[None]:
    """Say in one line what fails in the user's own code, which `text` names."""
    try:
        yield
    except (EpimerError, MemoryError):
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
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*NOT_THEIRS, "<"))]
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({Path(error.filename).name} line {error.lineno})"
    return ParameterError(f"{what} failed: {type(error).__name__}: {str(error).strip(' .')}{where}.")
