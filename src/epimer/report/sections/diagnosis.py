"""The diagnosis before a merge: the theory's numbers, forecasts, conflicts, and layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epimer.records import Diagnosis, LayerFindings
from epimer.report.blocks import Block, Choice, Figure, Rows, Section, Side, Table, cells, facts
from epimer.report.charts.heat import SHARE, Scale, heat
from epimer.report.charts.lines import Labels, lines
from epimer.report.figures import eta_figures, series
from epimer.report.glossary import SYMBOLS
from epimer.report.markup import Markup, prose, tag
from epimer.report.numbers import NOTHING, finite, fixed, number, percent

MANY = 40  # layers, above which a map shows blocks against kinds of layer
BLOCK = re.compile(r"(?<![^.])\d+(?=\.)")  # a number of its own between dots, as in layers.3.weight
FIXED = "Colours have this scale on every page."
CONFLICTS = {
    "cosine": ("Cosine of the task vectors", "1: the same direction, −1: opposite.", Scale(-1.0, 1.0, True)),
    "sign": (
        "Agreement of signs",
        "Share of the entries that both moved, and in the same direction; 0.5 is chance.",
        Scale(0.0, 1.0, True),
    ),
    "left": ("Overlap of left singular vectors", "0: apart, 1: the same subspace.", SHARE),
    "right": ("Overlap of right singular vectors", "0: apart, 1: the same subspace.", SHARE),
    "interference": (
        "Interference",
        "Row s, column t: what adding task s does to task t, in units of task t's own step.",
        SHARE,
    ),
}
"""matrix -> its title, how to read it, and what its colours stand for"""
ADVICE = {"take": "Take", "warning": "Warning", "mind": "Warning", "note": "Note"}


def section(record: Diagnosis, *, named: bool) -> Section:
    """Return a diagnosis' section."""
    forecast = [_forecast(record)] if record.forecast else []
    by_rank: list[Figure | Choice] = [_energy(record)] if record.energy else []
    by_rank += [Choice("η", eta_figures("diagnosis", record.eta_by_rank))] if record.eta_by_rank else []
    blocks: list[Block] = [_theory(record), Side([_tasks(record), *forecast])]
    blocks += [tag("h3", "Loss increase and its bound, merge by merge"), *_merges(record)] if record.merges else []
    blocks += [tag("h3", "By rank"), Side(by_rank)] if by_rank else []
    blocks += [tag("h3", "Conflict between tasks"), Side([_conflict(record, name) for name in CONFLICTS])]
    if record.layers:
        maps = {quantity.name: _layers(record, quantity) for quantity in _quantities(record)}
        blocks += [tag("h3", "Layer by layer"), Choice("Show", maps)]
    of = f" of {', '.join(record.models)}" if named else ""
    return Section(f"Diagnosis{of}", blocks, short="Diagnosis")


def _theory(record: Diagnosis) -> Block:
    total = record.total
    rank = "all directions" if record.rank is None else f"rank {record.rank}"
    source = (
        "No data: each task vector's own Gram matrices stand for the curvature of its loss."
        if record.curvature == "task-gram"
        else "How fast each task's loss rises when the weights move, measured on data."
    )
    return facts(
        ("Curvature", f"{record.curvature}, {rank}, damping {number(record.damping)}", source),
        ("η / F(x̄): what curvature can gain", f"{percent(total.eta_fraction)}%", SYMBOLS["η / F(x̄)"]),
        ("η (mean diagonal 1; trace 1)", f"{number(total.eta)}; {number(total.eta_unit_trace)}", SYMBOLS["η"]),
        ("Task vectors' energy on the atoms u_i v_iᵀ", f"{percent(total.energy_kept)}%", SYMBOLS["on atoms, %"]),
        ("V_S: variance in the subspace, at the mean", number(total.v_s), SYMBOLS["V_S"]),
        ("R_S: energy outside it", number(total.r_s), SYMBOLS["R_S"]),
        ("Bound on the loss increase, at the mean", number(total.bound), SYMBOLS["bound"]),
        ("Worst condition; damped directions", f"{number(total.condition)}; {total.damped}", SYMBOLS["condition"]),
    )


def _tasks(record: Diagnosis) -> Table:
    rows: Rows = []
    for name, norm, kept in zip(record.models, record.norms, record.total.energy_kept_by_task, strict=True):
        share = norm / record.base_norm if record.base_norm else math.nan
        rows.append([name, *cells([norm], number), *cells([share], lambda v: percent(v, 2)), *cells([kept], percent)])
    headings = ["model", "‖D‖", "‖D‖ / ‖base‖, %", "on atoms, %"]
    return Table(headings, rows, "How far each model moved from the base, and how much of it lies on the atoms")


def _merges(record: Diagnosis) -> list[Block]:
    """Return the theory at every merge, and what its numbers are."""
    rows: Rows = [
        [method, *cells([one.scale, one.increase, one.v_s, one.r_s, one.bound], number)]
        for method, theories in record.merges.items()
        for one in theories
    ]
    text = "The increase is half of Σ λ_t (x − D_t)ᵀ H_t (x − D_t): the tasks' mean loss increase, to second order"
    if record.curvature == "task-gram":
        text += "; in task-gram's units, which are not those of a loss and do not rank methods"
    text += "."
    headings = ["merge", "α", "increase", "V_S", "R_S", "bound"]
    return [tag("p", text), Table(headings, rows, "Loss increase to second order of every merge, and its bound")]


def _forecast(record: Diagnosis) -> Figure:
    """Return the forecast of every method; the best first, if forecasts rank methods at all."""
    order = list(record.forecast)
    said = "Forecasts of a method's tasks and scales; without measured curvature they do not rank methods."
    trust = (
        "Without measured Kronecker or EKFAC curvature compare the tasks and scales of one method, but not methods: "
        "these forecasts do not tell which method is best."
    )
    if record.ranks_methods:
        order.sort(key=lambda name: record.forecast[name].mean_at_scale)
        said = f"Least lost at its best scale: {', '.join(order[:4])}."
        trust = "A quadratic model: trust it as a ranking."
    values = [[*(one := record.forecast[m]).tasks, one.mean, one.worst, one.mean_at_scale] for m in order]
    columns = [*record.models, "mean", "worst", "mean at best α"]
    chart = heat(
        values, order, columns, fixed, said, tip=lambda m, t, v: f"{m}, {t}\nloses {percent(v, 2)}% of the gain"
    )
    numbers = [[*row, record.forecast[m].scale] for m, row in zip(order, values, strict=True)]
    table = Table.matrix("method", order, [*columns, "best α"], numbers, "Forecast of every method")
    caption = (
        f"At scale 1, but for the last column. 0: as good as the task's own model; 1: as bad as the base. {trust} "
        f"{FIXED}"
    )
    return Figure("forecast", "Forecast: share of each task's gain that a merge loses", chart, table, caption)


def _energy(record: Diagnosis) -> Figure:
    ranks = sorted(record.energy, key=int)
    named = {m: [(int(k), e := record.energy[k][t], e, e) for k in ranks] for t, m in enumerate(record.models)}
    labels = Labels("rank k", "energy kept, %", lambda v: percent(v, 0), lambda v: f"{percent(v, 2)}%")
    chart = lines(series(named), labels, "Share of each task vector's energy in the span of all pairs u_i v_jᵀ.")
    table = Table.matrix("k", ranks, record.models, [record.energy[k] for k in ranks], "Energy kept by rank")
    return Figure("energy by rank", "Energy that a basis of rank k keeps", chart, table)


def _conflict(record: Diagnosis, name: str) -> Figure:
    """Return a matrix; its diagonal, which says nothing, is left out of the drawing, so that colours tell the rest."""
    title, caption, scale = CONFLICTS[name]
    values: list[list[float]] = [list(row) for row in getattr(record.conflict, name)]
    drawn = [[None if s == t else v for t, v in enumerate(row)] for s, row in enumerate(values)]
    away = finite(v for row in drawn for v in row)
    said = f"Between different tasks from {number(min(away))} to {number(max(away))}." if away else "One task only."
    chart = heat(
        drawn, record.models, record.models, fixed, said,
        scale=scale, tip=lambda row, column, value: f"{row} and {column}\n{number(value, 4)}",
    )  # fmt: skip
    table = Table.matrix("task", record.models, record.models, values, title)
    return Figure(f"conflict {name}", title, chart, table, f"{caption} {FIXED}")


@dataclass(frozen=True)
class Quantity:
    """What a map of the layers shows: a value per layer and column, from one column up."""

    name: str
    columns: Sequence[str]
    of: Callable[[LayerFindings], Sequence[float | None]]
    show: Callable[[float], str]
    caption: str
    scale: Scale = SHARE


def _quantities(record: Diagnosis) -> list[Quantity]:
    models, methods = record.models, list(record.forecast)
    quantities = [
        Quantity(
            "how far fine-tuning moved", models,
            lambda one: [norm / one.base_norm if one.base_norm else None for norm in one.norms],
            lambda v: fixed(100 * v, 1 if v >= 0.001 else 2), "‖D‖ / ‖W‖ in percent, on a logarithmic scale.",
            Scale(1e-4, 1.0, log=True),
        ),
        Quantity(
            "energy kept", models, lambda one: one.theory.energy_kept_by_task, lambda v: percent(v, 0),
            "Share of each task vector's energy on the atoms u_i v_iᵀ, in percent.",
        ),
        Quantity(
            "forecast of each method", methods, lambda one: [_mean(one.forecast.get(m, ())) for m in methods], fixed,
            "Predicted share of the fine-tuning gain that is lost, mean over tasks.",
        ),
        Quantity(
            "what curvature can gain", ["η / F(x̄)"], lambda one: [one.theory.eta_fraction], lambda v: percent(v, 0),
            "η as a share of the flat merge's objective, in percent.",
        ),
        Quantity(
            "condition", ["condition"],
            lambda one: [math.log10(one.theory.condition) if one.theory.condition > 0 else None],
            lambda v: number(10**v if v < 300 else math.inf, 2),
            "Condition number of the system that is solved; colours by its logarithm.", Scale(0.0, 12.0),
        ),
    ]  # fmt: skip
    return [quantity for quantity in quantities if quantity.columns]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _layers(record: Diagnosis, quantity: Quantity) -> Figure:
    """Return a map: layers against columns where they are few, else kinds of layer against blocks."""
    names = list(record.layers)
    values = [list(quantity.of(layer)) for layer in record.layers.values()]
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
    said = f"{quantity.name}, {len(names)} layers."
    chart = heat(values, rows, columns, quantity.show, said, scale=quantity.scale, labels=_without_shared_parts(rows))
    return Figure(f"layers {quantity.name}", f"Layers: {quantity.name}", chart, table, f"{caption} {FIXED}")


def _without_shared_parts(names: Sequence[str]) -> list[str]:
    """Return dotted names without the parts that all of them begin or end with; a layer's number stays."""
    split = [name.split(".") for name in names]
    for end in (0, -1):
        while len(names) > 1 and min(map(len, split)) > 1:
            shared = {parts[end] for parts in split}
            if len(shared) > 1 or shared == {"*"} or shared.pop().isdigit():
                break
            for parts in split:
                del parts[end]
    return [".".join(parts) for parts in split]


def _folded(names: Sequence[str]) -> tuple[list[str], list[str], list[tuple[int, int]]] | None:
    """Return kinds of layer, blocks, and each name's place among them; None where names have no block numbers."""
    split = [(BLOCK.sub("*", name, count=1), "".join(BLOCK.findall(name)[:1])) for name in names]
    kinds = list(dict.fromkeys(kind for kind, _ in split))
    blocks = sorted({block for _, block in split}, key=lambda b: -1 if b == "" else int(b))
    if len(set(split)) < len(split) or len(kinds) > len(names) / 2:
        return None
    return kinds, [b or "·" for b in blocks], [(kinds.index(k), blocks.index(b)) for k, b in split]


def advice(record: Diagnosis) -> Markup:
    """Return the recommendation in sentences."""
    items = []
    for one in record.advice:
        name = ADVICE.get(one.kind)
        items.append(tag("li", tag("b", name or one.kind), " ", prose(one.text), class_=name and name.lower()))
    return tag("ul", items, class_="advice")
