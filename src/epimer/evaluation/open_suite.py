"""Open a suite by its name, by its YAML file, or by a Python function that returns one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from epimer.errors import ParameterError, nearest
from epimer.evaluation.suite import Suite
from epimer.evaluation.user_code import is_entry_point, suite_from_entry_point

SUITES = {"glyphs8": "epimer.experiments.glyphs8.build:load", "clip8": "epimer.experiments.clip8.load:load"}
"""name -> its loader, imported when the suite is opened; a loader takes `seed`, `progress` and options of its own"""


def is_suite_file(name: str) -> bool:
    """Whether a suite is named by its YAML file."""
    return name.lower().endswith((".yaml", ".yml"))


def open_suite(
    name: str,
    *,
    seed: int = 0,
    progress: bool = True,
    device: str = "auto",
    keep: bool = True,
    labels: bool = True,
    **options: Any,
) -> Suite:
    """Build or load a suite: by name, by its YAML file, or by `module:function`.

    `device`, `keep` and `labels` are for YAML files, see `read_suite`; `options` are those of a named suite's loader,
    None where one is not set.
    """
    options = {option: value for option, value in options.items() if value is not None}
    _check_options(name, options)
    if name in SUITES:
        suite: Suite = _loader(name)(seed=seed, progress=progress, **options)
        return suite
    if is_suite_file(name):
        from epimer.evaluation.hf_suite import read_suite

        return read_suite(name, device=device, keep=keep, labels=labels, progress=progress)
    if is_entry_point(name):
        return suite_from_entry_point(name)
    raise ParameterError(
        f"There is no suite {name!r}.{nearest(name, SUITES)} Suites: {', '.join(SUITES)}; or give a YAML file, or "
        "module:function."
    )


def _loader(name: str) -> Callable[..., Suite]:
    module, _, function = SUITES[name].partition(":")
    loader: Callable[..., Suite] = getattr(import_module(module), function)
    return loader


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse an option that the suite's loader does not take."""
    for option in options:
        takers = [suite for suite in SUITES if option in inspect.signature(_loader(suite)).parameters]
        if name not in takers:
            raise ParameterError(f"--{option} is for the suite {' or '.join(takers)}; leave it out for {name}.")
