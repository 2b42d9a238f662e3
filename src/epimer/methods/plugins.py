"""Methods in a Python file of the user's, which the command line names with --plugin."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from epimer.errors import EpimerError, ParameterError, failure_in_user_code
from epimer.machine import out_of_memory
from epimer.methods.registry import Method, added_methods, describe_method, register_method, unregister_method
from epimer.opened_files import reason

MODULE = "epimer_plugin_"
"""what the names of the modules begin with; their file's SHA-256 follows"""


@dataclass(frozen=True)
class Plugin:
    """A Python file whose methods were added."""

    path: Path
    """absolute, for workers on other machines"""
    sha256: str
    methods: tuple[str, ...]
    module: ModuleType


_PLUGINS: dict[Path, Plugin] = {}


def load_plugins(paths: Iterable[Path]) -> None:
    """Run Python files and add their methods, see `load_plugin`."""
    for path in paths:
        load_plugin(path)


def load_plugin(path: Path, sha256: str | None = None) -> Plugin:
    """Run a Python file and add every method in it: those that it registers, and `Method` objects at its top level.

    The file is the user's code, and runs as any Python script would. Its name comes from the command line or from
    Python, never from a recipe. A file that has not changed is run once.

    Args:
        path: the file.
        sha256: the hash that it must have, if that is known.

    Raises:
        ParameterError: if the file cannot be read, fails, adds no method, or has another hash.
    """
    path = path.expanduser().absolute()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ParameterError(f"--plugin {path} cannot be read: {reason(error)}; name a Python file.") from error
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise ParameterError(f"{path} is not the plugin that the merge was planned with; do not change it meanwhile.")
    known = _PLUGINS.pop(path, None)
    if known is not None:
        present = [name for name in known.methods if name in added_methods()]
        if known.sha256 == digest and len(present) == len(known.methods):
            _PLUGINS[path] = known
            return known
        for name in present:
            unregister_method(name)
    before = set(added_methods())
    module = _run(path, digest)
    for value in list(vars(module).values()):
        if isinstance(value, Method) and not _is_known(value):
            register_method(value)
    methods = tuple(name for name in added_methods() if name not in before)
    if not methods:
        raise ParameterError(
            f"--plugin {path} adds no method; it needs an epimer.Method at its top level, as in examples/own_method.py."
        )
    _PLUGINS[path] = Plugin(path, digest, methods, module)
    return _PLUGINS[path]


def plugin_of_method(name: str) -> Plugin | None:
    """Return the plugin that a method is from; None if it is from none."""
    return next((plugin for plugin in _PLUGINS.values() if name in plugin.methods), None)


def plugin_of_module(name: str) -> Plugin | None:
    """Return the plugin whose module has a name; None if there is none."""
    return next((plugin for plugin in _PLUGINS.values() if plugin.module.__name__ == name), None)


def value_in_plugin(path: Path, sha256: str, name: str) -> Any:
    """Return a class or a function of a plugin by its qualified name: how a worker unpickles a reference to it."""
    value: Any = load_plugin(path, sha256).module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def method_in_plugin(path: Path, sha256: str, name: str) -> Method:
    """Return a method of a plugin: how a worker unpickles a reference to it."""
    load_plugin(path, sha256)
    return describe_method(name)


def _run(path: Path, digest: str) -> ModuleType:
    """Import a file under a name of its own, so that it hides no other module."""
    name = f"{MODULE}{digest[:16]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ParameterError(f"--plugin {path} is not a Python file; its name must end in .py.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except EpimerError:
        raise
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise failure_in_user_code(f"--plugin {path}", error) from error
    return module


def _is_known(method: Method) -> bool:
    """Whether a method is in the table already: imported from epimer, or registered by the file itself."""
    try:
        return describe_method(method.name) is method
    except ParameterError:
        return False
