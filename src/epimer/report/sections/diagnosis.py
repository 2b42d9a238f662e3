"""The diagnosis before a merge: the theory's numbers, forecasts, conflicts, and layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.records import Diagnosis, LayerFindings
from epimer.report.blocks import Block, Choice, Figure, Rows, Section, Side, Table, cells, facts
from epimer.report.charts.heat import Scale, heat
from epimer.report.charts.lines import Labels, lines
from epimer.report.figures import eta_figures, series
from epimer.report.markup import Markup, prose, tag
from epimer.report.numbers import NOTHING, finite, fixed, number, percent

MANY = 40  # layers, above which a map shows blocks against kinds of layer
BLOCK = re.compile(r"(?<=\.)(\d+)(?=\.)|^(\d+)(?=\.)")
CONFLICTS = {
    "cosine": ("Cosine of the task vectors", "1: the same direction, −1: opposite."),
    "sign": ("Agreement of signs", "Share of the entries that both moved, and in the same direction; 0.5 is chance."),
    "left": ("Overlap of left singular vectors", "0: apart, 1: the same subspace."),
    "right": ("Overlap of right singular vectors", "0: apart, 1: the same subspace."),
    "interference": (
        "Interference",
        "Row s, column t: what adding task s does to task t, in units of task t's own step.",
    ),
}
ADVICE = {"take": "Take", "warning": "Warning", "mind": "Warning", "note": "Note"}


def section(found: Diagnosis, *, named: bool) -> Section:
    """Return a diagnosis' section."""
    forecast = [_forecast(found)] if found.forecast else []
    by_rank: list[Figure | Choice] = [_energy(found)] if found.energy else []
    by_rank += [Choice("η", eta_figures("diagnosis", found.eta_by_rank))] if found.eta_by_rank else []
    blocks: list[Block] = [_theory(found), Side([_tasks(found), *forecast])]
    blocks += [tag("h3", "By rank"), Side(by_rank)] if by_rank else []
    blocks += [tag("h3", "Conflict between tasks"), Side([_conflict(found, name) for name in CONFLICTS])]
    if found.layers:
        maps = {quantity.name: _layers(found, quantity) for quantity in _quantities(found)}
        blocks += [tag("h3", "Layer by layer"), Choice("Show", maps)]
    of = f" of {', '.join(found.models)}" if named else ""
    return Section(f"Diagnosis{of}", blocks, short="Diagnosis")


def _theory(found: Diagnosis) -> Block:
    total = found.total
    rank = "all directions" if found.rank is None else f"rank {found.rank}"
    return facts(
        [
            ("Curvature", f"{found.curvature}, {rank}, damping {number(found.damping)}"),
            ("η / F(x̄): what curvature can gain", f"{percent(total.eta_fraction)}%"),
            ("η (mean diagonal 1; trace 1)", f"{number(total.eta)}; {number(total.eta_unit_trace)}"),
            ("Task vectors' energy on the atoms u_i v_iᵀ", f"{percent(total.energy_kept)}%"),
            ("V_S: variance in the subspace", number(total.v_s)),
            ("R_S: energy outside it", number(total.r_s)),
            ("Bound on the loss increase", number(total.bound)),
            ("Worst condition; damped directions", f"{number(total.condition)}; {total.damped}"),
        ]
    )


def _tasks(found: Diagnosis) -> Table:
    rows: Rows = []
    for name, norm, kept in zip(found.models, found.norms, found.total.energy_kept_by_task, strict=True):
        share = norm / found.base_norm if found.base_norm else math.nan
        rows.append([name, *cells([norm], number), *cells([share], lambda v: percent(v, 2)), *cells([kept], percent)])
    headings = ["model", "‖D‖", "‖D‖ / ‖base‖, %", "on atoms, %"]
    return Table(headings, rows, "How far each model moved from the base, and how much of it lies on the atoms")


def _forecast(found: Diagnosis) -> Figure:
    order = sorted(found.forecast, key=lambda name: found.forecast[name].mean_at_scale)
    values = [[*(one := found.forecast[m]).tasks, one.mean, one.worst, one.mean_at_scale] for m in order]
    columns = [*found.models, "mean", "worst", "mean at best α"]
    said = f"Least lost at its best scale: {', '.join(order[:4])}."
    chart = heat(
        values, order, columns, fixed, said, tip=lambda m, t, v: f"{m}, {t}\nloses {percent(v, 2)}% of the gain"
    )
    numbers = [[*row, found.forecast[m].scale] for m, row in zip(order, values, strict=True)]
    table = Table.matrix("method", order, [*columns, "best α"], numbers, "Forecast of every method")
    caption = "0: as good as the task's own model; 1: as bad as the base. A quadratic model: trust it as a ranking."
    return Figure("forecast", "Forecast: share of each task's gain that a merge loses", chart, table, caption)


def _energy(found: Diagnosis) -> Figure:
    ranks = sorted(found.energy, key=int)
    named = {m: [(int(k), e := found.energy[k][t], e, e) for k in ranks] for t, m in enumerate(found.models)}
    labels = Labels("rank k", "energy kept, %", lambda v: percent(v, 0), lambda v: f"{percent(v, 2)}%")
    chart = lines(series(named), labels, "Share of each task vector's energy in the span of all pairs u_i v_jᵀ.")
    table = Table.matrix("k", ranks, found.models, [found.energy[k] for k in ranks], "Energy kept by rank")
    return Figure("energy by rank", "Energy that a basis of rank k keeps", chart, table)


def _conflict(found: Diagnosis, name: str) -> Figure:
    """Return a matrix; its diagonal, which says nothing, is left out of the drawing, so that colours tell the rest."""
    title, caption = CONFLICTS[name]
    values: list[list[float]] = [list(row) for row in getattr(found.conflict, name)]
    drawn = [[None if s == t else v for t, v in enumerate(row)] for s, row in enumerate(values)]
    away = finite(v for row in drawn for v in row)
    chance = {"cosine": 0.0, "sign": 0.5}.get(name)
    scale = Scale.of(away)
    if chance is not None:
        reach = max([0.1, *(abs(v - chance) for v in away)])
        scale = Scale(chance - reach, chance + reach, True)
    said = f"Between different tasks from {number(min(away))} to {number(max(away))}." if away else "One task only."
    chart = heat(
        drawn, found.models, found.models, fixed, said,
        scale=scale, tip=lambda row, column, value: f"{row} and {column}\n{number(value, 4)}",
    )  # fmt: skip
    return Figure(
        f"conflict {name}", title, chart, Table.matrix("task", found.models, found.models, values, title), caption
    )


@dataclass(frozen=True)
class Quantity:
    """What a map of the layers shows: a value per layer and column, from one column up."""

    name: str
    columns: Sequence[str]
    of: Callable[[LayerFindings], Sequence[float | None]]
    show: Callable[[float], str]
    caption: str
    zero: bool = True


def _quantities(found: Diagnosis) -> list[Quantity]:
    models, methods = found.models, list(found.forecast)
    forecast = [
        Quantity(
            "forecast of each method", methods, lambda one: [_mean(one.forecast.get(m, ())) for m in methods], fixed,
            "Predicted share of the fine-tuning gain that is lost, mean over tasks.",
        ),
    ]  # fmt: skip
    return [
        Quantity(
            "how far fine-tuning moved", models,
            lambda one: [norm / one.base_norm if one.base_norm else None for norm in one.norms],
            lambda v: fixed(100 * v, 1), "‖D‖ / ‖W‖ in percent.",
        ),
        Quantity(
            "energy kept", models, lambda one: one.theory.energy_kept_by_task, lambda v: percent(v, 0),
            "Share of each task vector's energy on the atoms u_i v_iᵀ, in percent.",
        ),
        *(forecast if methods else []),
        Quantity(
            "what curvature can gain", ["η / F(x̄)"], lambda one: [one.theory.eta_fraction], lambda v: percent(v, 0),
            "η as a share of the flat merge's objective, in percent.",
        ),
        Quantity(
            "condition", ["condition"], lambda one: [_log(one.theory.condition)],
            lambda v: number(10**v if v < 300 else math.inf, 2),
            "Condition number of the system that is solved; colours by its logarithm.", zero=False,
        ),
    ]  # fmt: skip


def _log(value: float) -> float | None:
    return math.log10(value) if value > 0 else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _layers(found: Diagnosis, quantity: Quantity) -> Figure:
    """Return a map: layers against columns where they are few, else kinds of layer against blocks."""
    names = list(found.layers)
    values = [list(quantity.of(layer)) for layer in found.layers.values()]
    table = Table.matrix(
        "tensor", names, quantity.columns, values, f"{quantity.name}, by layer",
        show=lambda v: NOTHING if v is None else quantity.show(v),
    )  # fmt: skip
    rows, columns, caption = names, list(quantity.columns), quantity.caption
    if len(names) > MANY and (folded := _folded(names)):
        rows, columns, places = folded
        means: list[list[float | None]] = [[None] * len(columns) for _ in rows]
        for row, (i, j) in zip(values, places, strict=True):
            means[i][j] = _mean(row)
        values = means
        several = len(quantity.columns) > 1
        caption += f" Columns are blocks{', cells the mean over the columns of the table below' if several else ''}."
    scale = Scale.of([v for row in values for v in row], zero=quantity.zero)
    chart = heat(values, rows, columns, quantity.show, f"{quantity.name}, {len(names)} layers.", scale=scale)
    return Figure(f"layers {quantity.name}", f"Layers: {quantity.name}", chart, table, caption)


def _folded(names: Sequence[str]) -> tuple[list[str], list[str], list[tuple[int, int]]] | None:
    """Return kinds of layer, blocks, and each name's place among them; None where names have no block numbers."""
    split = []
    for name in names:
        match = BLOCK.search(name)
        block = "" if match is None else match[0]
        kind = name if match is None else f"{name[: match.start()]}*{name[match.end() :]}"
        split.append((kind, block))
    kinds = list(dict.fromkeys(kind for kind, _ in split))
    blocks = sorted({block for _, block in split}, key=lambda b: -1 if b == "" else int(b))
    if len(set(split)) < len(split) or len(kinds) > len(names) / 2:
        return None
    return kinds, [b or "·" for b in blocks], [(kinds.index(k), blocks.index(b)) for k, b in split]


def advice(found: Diagnosis) -> Markup:
    """Return the recommendation in sentences."""
    items = []
    for one in found.advice:
        known = ADVICE.get(one.kind)
        name = tag("b", known or one.kind)
        items.append(tag("li", name, " ", prose(one.text), class_=known.lower() if known else None))
    return tag("ul", items, class_="advice")
