"""Print what a diagnosis and a sweep found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.markup import escape
from rich.table import Table

from epimer.cli.show import console
from epimer.errors import ParameterError

if TYPE_CHECKING:
    from epimer.diagnosis.sweep import Sweep
    from epimer.records import Diagnosis

T = TypeVar("T")

MARKS = {"take": "[bold green]take[/]", "warning": "[bold yellow]warning[/]", "note": "[dim]note[/]"}
SHOWN = 5  # layers with the most conflict


def diagnosis(found: Diagnosis) -> None:
    """Print the recommendation, then the numbers it rests on."""
    page, total = console(), found.total
    page.print(
        f"[bold]{len(found.models)} models of {escape(found.base)}[/], {len(found.layers)} matrices, "
        f"{escape(found.curvature)} curvature, rank {found.rank or 'floor(d/T)'}",
        highlight=False,
    )
    for advice in found.advice:
        page.print(f"{MARKS[advice.kind]}  {escape(advice.text)}", highlight=False)
    _tasks(found)
    _conflict(found)
    _layers(found)
    rest = "" if total.r_s is None or total.bound is None else f", R_S {total.r_s:.3g}, bound {total.bound:.3g}"
    page.print(
        f"\nη {total.eta:.3g} ({total.eta_fraction:.1%} of F at the flat mean; {total.eta_unit_trace:.3g} at "
        f"unit trace), V_S {total.v_s:.3g}{rest}, "
        f"worst condition {total.condition:.2g}",
        highlight=False,
    )


def _table(title: str, headings: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1))
    for i, heading in enumerate(headings):
        table.add_column(escape(heading), justify="left" if i < left else "right", no_wrap=True)
    return table


def _tasks(found: Diagnosis) -> None:
    ranks = list(found.energy)
    headings = ["model", "moved", "of base", *(f"k={k}" for k in ranks), *found.forecast]
    title = "\nhow far each moved, what a basis of rank k keeps, and forecasts (0: as its own model, 1: as the base)"
    table = _table(title, headings)
    for t, name in enumerate(found.models):
        table.add_row(
            escape(name),
            f"{found.norms[t]:.3g}",
            f"{found.norms[t] / found.base_norm:.2%}" if found.base_norm else "",
            *(f"{found.energy[k][t]:.0%}" for k in ranks),
            *(f"{forecast.tasks[t]:.2f}" for forecast in found.forecast.values()),
        )
    console().print(table)


def _conflict(found: Diagnosis) -> None:
    count = len(found.models)
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t]
    pairs.sort(key=lambda pair: -found.conflict.interference[pair[0]][pair[1]])
    headings = ["adding", "to", "interference", "cosine", "same sign", "left overlap", "right overlap"]
    table = _table("\nwhere tasks get in each other's way most", headings, left=2)
    for s, t in pairs[:SHOWN]:
        parts = found.conflict
        numbers = [parts.interference, parts.cosine, parts.sign, parts.left, parts.right]
        table.add_row(escape(found.models[s]), escape(found.models[t]), *(f"{matrix[s][t]:.2f}" for matrix in numbers))
    console().print(table)


def _layers(found: Diagnosis) -> None:
    worst = sorted(found.layers, key=lambda name: -found.layers[name].theory.flat_objective)[:SHOWN]
    headings = ["tensor", "F(x̄)", "η / F(x̄)", "kept by atoms", "rank", "condition"]
    table = _table("\nlayers with the most conflict", headings)
    for name in worst:
        theory = found.layers[name].theory
        table.add_row(
            escape(name),
            f"{theory.flat_objective:.3g}",
            f"{theory.eta_fraction:.1%}",
            f"{theory.energy_kept:.0%}",
            str(theory.rank),
            f"{theory.condition:.2g}",
        )
    console().print(table)


def listed(text: str | None, kind: Callable[[str], T], option: str) -> list[T] | None:
    """Return the values that a text with commas holds."""
    if text is None:
        return None
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"{option} must be values with commas between them, as 0.5,1,1.5; got {text!r}.") from None
    if not found:
        raise ParameterError(f"{option} names nothing; leave it out, or give values with commas between them.")
    return found


def sweep(found: Sweep, kept: Path | None) -> None:
    """Print the best scale of every method and rank, the best first."""
    from epimer.score_format import between, shown

    page, close = console(), any(one.validation.kl for one in found.tried)
    headings = ["method", "rank", "scale", "validation", *(["its KL"] if close else []), "test [95%]", "worst", "tried"]
    table = _table(f"{found.evaluation}: the best scale on validation data, reported on test data", headings)
    for one in sorted(found.finalists, key=lambda one: one.validation.order, reverse=True):
        row, unit = asdict(one.record()), one.validation.unit
        count = sum((other.method, other.rank) == (one.method, one.rank) for other in found.tried)
        bounds = "" if row["low"] is None else f" {between(unit, row['low'], row['high'])}"
        table.add_row(
            escape(one.method),
            "" if one.rank is None else str(one.rank),
            f"{one.scale:g}",
            shown(unit, row["validation"]),
            *([f"{row['kl']:.3f}"] if close else []),
            shown(unit, row["average"]) + escape(bounds),
            shown(unit, row["worst"]),
            f"{count} scales",
        )
    page.print(table)
    for note in found.notes:
        page.print(f"note: {note}", markup=False, highlight=False)
    best = found.best
    rank = "" if best.rank is None else f", rank {best.rank}"
    page.print(f"best on validation data: {best.method} at scale {best.scale:g}{rank}", markup=False, highlight=False)
    page.print("nothing was written" if kept is None else f"wrote {kept}", markup=False, highlight=False)
