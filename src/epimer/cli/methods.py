"""`epimer methods`: list the merging methods, or explain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from epimer.cli import options, render
from epimer.cli.app import app
from epimer.cli.options import argument

if TYPE_CHECKING:
    from epimer.methods.registry import Method


@app.command()
def methods(
    name: Annotated[str | None, argument("One method, to see all about it.")] = None,
    plugin: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """List the merging methods, or explain one."""
    from epimer.methods.registry import describe_method, list_methods

    options.load_plugins(plugin)
    rows = [describe_method(method) for method in ([name] if name else list_methods())]
    if as_json:
        render.print_json([_record(row) for row in rows])
    elif name:
        typer.echo(rows[0])
    else:
        render.print_table(["method", "needs", "what it does"], [[row.name, _needs(row), row.summary] for row in rows])
        render.print_text("epimer methods NAME tells a method's parameters, equation and citation.")


def _needs(row: Method) -> str:
    needs = ["base"] if row.needs_base else []
    needs += [row.curvature or ""] if row.needs_curvature else []
    return " + ".join(needs) or "models only"


def _record(row: Method) -> dict[str, Any]:
    fields = ("name", "summary", "equation", "citation", "needs_base", "curvature")
    parameters = [
        {"name": p.name, "default": p.default, "meaning": p.meaning, "expected": p.expected} for p in row.parameters
    ]
    return {**{field: getattr(row, field) for field in fields}, "parameters": parameters}
