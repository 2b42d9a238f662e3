"""`epimer diagnose`: predict how the models of a recipe will merge."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Annotated

from rich.markup import escape

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import option, split_commas
from epimer.records import Diagnosis

LABELS = {"take": "[bold green]take[/]", "warning": "[bold yellow]warning[/]", "note": "[dim]note[/]"}
SHOWN = 5  # pairs of tasks, and layers, with the most conflict


@app.command()
def diagnose(
    recipe: options.Recipe,
    html: Annotated[Path | None, option("Write a page that shows it to this HTML file.")] = None,
    rank: Annotated[int | None, option("Directions per task.", default="what the recipe says, or 32")] = None,
    methods: Annotated[
        str | None, option("Merges to forecast, with commas.", default="average, tsv, epimer_free and more")
    ] = None,
    any_curvature: options.AnyCurvature = False,
    device: options.Device = "auto",
    max_memory: options.MaxMemory = None,
    plugin: options.Plugins = None,
    workers: options.Workers = None,
    engine: options.Engine = "local",
    address: options.Address = None,
    out: options.OutJson = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """See before merging: which tasks and layers conflict, which rank and method to take, what each merge would lose.

    Works without data; where the recipe's models have a curvature folder, that is used.
    """
    from epimer.api import diagnose as run
    from epimer.atomic_files import check_file

    options.load_plugins(plugin)
    check_file(out)
    check_file(html)
    with stoppable("nothing was written"):
        result = run(
            recipe, rank=rank, methods=split_commas(methods, str, "--methods"), any_curvature=any_curvature,
            device=device, progress=not (quiet or as_json), max_memory=max_memory, workers=workers, engine=engine,
            address=address,
        )  # fmt: skip
    if html is not None:
        from epimer.report.write import write_page

        write_page([result.to_dict()], html)
    render.output(result.to_dict(), lambda: _print_diagnosis(result), file=out, as_json=as_json, quiet=quiet)


def _print_diagnosis(result: Diagnosis) -> None:
    render.print_text(
        f"[bold]{len(result.models)} models of {escape(result.base)}[/], {len(result.layers)} matrices, "
        f"{escape(result.curvature)} curvature, rank {result.rank or 'floor(d/T)'}",
        markup=True,
    )
    for advice in result.advice:
        render.print_text(f"{LABELS[advice.kind]}  {escape(advice.text)}", markup=True)
    _print_tasks(result)
    _print_conflict(result)
    _print_layers(result)
    _print_merges(result)
    total = result.total
    rest = "" if total.r_s is None or total.bound is None else f", R_S {total.r_s:.3g}, bound {total.bound:.3g}"
    render.print_text(
        f"\nη {total.eta:.3g} ({total.eta_fraction:.1%} of F at the flat mean; {total.eta_unit_trace:.3g} at "
        f"unit trace); at the mean x*: V_S {total.v_s:.3g}{rest}; worst condition {total.condition:.2g}"
    )


def _print_tasks(result: Diagnosis) -> None:
    title = "\nhow far each moved, what a basis of rank k keeps, "
    title += "and forecasts at scale 1 (0: as its own model, 1: as the base)"
    if not result.ranks_methods and len(result.forecast) > 1:
        title += "\nwithout measured Kronecker or EKFAC curvature compare tasks and scales of a method, not methods"
    headings = ["model", "moved", "of base", *(f"k={k}" for k in result.energy), *result.forecast]
    rows = []
    for t, (name, norm) in enumerate(zip(result.models, result.norms, strict=True)):
        share = f"{norm / result.base_norm:.2%}" if result.base_norm else ""
        kept = [f"{energy[t]:.0%}" for energy in result.energy.values()]
        losses = [f"{forecast.tasks[t]:.2f}" for forecast in result.forecast.values()]
        rows.append([name, f"{norm:.3g}", share, *kept, *losses])
    if result.forecast:
        every, blank = result.forecast.values(), [""] * (2 + len(result.energy))
        rows.append(["mean at scale 1", *blank, *(f"{one.mean:.2f}" for one in every)])
        rows.append(["mean at its best scale", *blank, *(f"{one.mean_at_scale:.2f} at {one.scale:g}" for one in every)])
    render.print_table(headings, rows, title=title, text_columns=1)


def _print_merges(result: Diagnosis) -> None:
    if not result.merges:
        return
    units = " (task-gram's units: not a loss, nor a ranking of methods)" if result.curvature == "task-gram" else ""
    title = f"\nloss increase to second order at each merge{units}, at most the bound of V_S and R_S"
    rows = [
        [method, f"{one.scale:g}", *(f"{value:.3g}" for value in (one.increase, one.v_s, one.r_s, one.bound))]
        for method, theories in result.merges.items()
        for one in theories
    ]
    render.print_table(["merge", "scale", "increase", "V_S", "R_S", "bound"], rows, title=title, text_columns=1)


def _print_conflict(result: Diagnosis) -> None:
    headings = ["adding", "to", "interference", "cosine", "same sign", "left overlap", "right overlap"]
    names, conflict = result.models, result.conflict
    matrices = (conflict.interference, conflict.cosine, conflict.sign, conflict.left, conflict.right)
    pairs = sorted(permutations(range(len(names)), 2), key=lambda pair: -conflict.interference[pair[0]][pair[1]])
    rows = [[names[s], names[t], *(f"{matrix[s][t]:.2f}" for matrix in matrices)] for s, t in pairs[:SHOWN]]
    render.print_table(headings, rows, title="\nwhere tasks get in each other's way most", text_columns=2)


def _print_layers(result: Diagnosis) -> None:
    headings = ["tensor", "F(x̄)", "η / F(x̄)", "kept by atoms", "rank", "condition"]
    theory = [(name, layer.theory) for name, layer in result.layers.items()]
    theory.sort(key=lambda item: -item[1].flat_objective)
    rows = []
    for name, layer in theory[:SHOWN]:
        shares = [f"{layer.eta_fraction:.1%}", f"{layer.energy_kept:.0%}"]
        rows.append([name, f"{layer.flat_objective:.3g}", *shares, str(layer.rank), f"{layer.condition:.2g}"])
    render.print_table(headings, rows, title="\nlayers with the most conflict", text_columns=1)
