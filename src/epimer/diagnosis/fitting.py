"""Which methods can be looked at with what is there: they must exist, and their curvature must have been measured."""

from __future__ import annotations

from epimer.errors import ParameterError, nearest
from epimer.methods.curvatures import serves
from epimer.methods.registry import Method, describe_method, list_methods


def find_method(name: str) -> Method:
    """Return a method by its name."""
    if name not in list_methods():
        raise ParameterError(f"There is no method {name!r}.{nearest(name, list_methods())}")
    return describe_method(name)


def check_kind(row: Method, kind: str | None) -> None:
    """Refuse a method whose curvature is not the kind that is there."""
    if row.needs_curvature and not serves(kind, row.curvature):
        have = "there is none" if kind is None else f"there is {kind}"
        remedy = f"measure it, or leave {row.name} out"
        raise ParameterError(f"{row.name} needs {row.curvature} curvature, and {have}; {remedy}.")
