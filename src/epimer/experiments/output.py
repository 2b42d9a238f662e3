"""Write what experiments found: JSON for machines, a Markdown table, and a figure where there is something to see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epimer.checkpoints.writer import as_json, explained, whole_file
from epimer.experiments.results import Result
from epimer.score_format import LOSSES, metric_value


def write(result: Result, folder: Path) -> list[Path]:
    """Write one experiment's files into a folder; return what was written."""
    with explained(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{result.name}.{kind}" for kind in ("json", "md", "svg")]
    with whole_file(files[0]) as draft:
        draft.write_bytes(as_json(result.to_dict()))
    with whole_file(files[1]) as draft:
        draft.write_text(result.markdown(), encoding="utf-8")
    if result.figure is None:
        return files[:2]
    with whole_file(files[2]) as draft:
        draw(result.figure, result.title, draft)
    return files


def draw(figure: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw a figure as SVG: lines or dots with their intervals, or maps of a landscape."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(7, 4.5), layout="constrained")
    if figure["kind"] == "maps":
        _draw_maps(figure, page)
        page.suptitle(title)
    elif figure["kind"] == "dots":
        page.set_size_inches(7, 1.2 + 0.25 * len(figure["dots"]))
        _draw_dots(figure, title, page.subplots())
    elif "beside" in figure:
        page.set_size_inches(11, 4.5)
        one, other = page.subplots(1, 2)
        _draw_lines(figure["beside"], "", one)
        _draw_lines(figure, "", other)
        page.suptitle(title)
    else:
        _draw_lines(figure, title, page.subplots())
    page.savefig(path, format="svg", metadata={"Date": None})


def _draw_lines(figure: Mapping[str, Any], title: str, axes: Any) -> None:
    for i, (label, points) in enumerate(figure["lines"].items()):
        x, y, low, high = zip(*points, strict=True)
        (line,) = axes.plot(x, y, marker="o", markersize=3, label=label, linestyle=DASHES[i // 10 % len(DASHES)])
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set_xlabel(figure["x"])
    axes.set_ylabel(figure["y"])
    axes.set_xscale("log" if figure["log"] else "linear")
    _read_as(axes.yaxis, figure["metric"])
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_dots(figure: Mapping[str, Any], title: str, axes: Any) -> None:
    names, places = list(figure["dots"]), range(len(figure["dots"]))
    value, low, high, second = zip(*figure["dots"].values(), strict=True)
    axes.hlines(places, low, high, linewidth=4, alpha=0.35)
    axes.plot(value, places, "o", label=figure["names"][0])
    axes.plot(second, places, "D", markersize=4, label=figure["names"][1])
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xscale("log" if figure["log"] else "linear")
    axes.set_xlabel(figure["x"])
    _read_as(axes.xaxis, figure["metric"])
    axes.set_title(title)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small")


def _read_as(axis: Any, metric: str | None) -> None:
    """Label scores as their metric is known; the better end stays where it is."""
    if metric in LOSSES:
        axis.set_major_formatter(lambda value, _: f"{metric_value(metric, value):.4g}")


DASHES = ("-", "--", ":", "-.")  # after ten lines, which are as many as there are colours
MARKS = {"base": "s", "task": "o", "merged": "*"}


def _draw_maps(figure: Mapping[str, Any], page: Any) -> None:
    """Draw the joint loss, then every task's; the base, the models and the merges are marked."""
    maps = {"all tasks, summed": figure["joint"], **figure["maps"]}
    columns = math.ceil(len(maps) ** 0.5)
    rows = math.ceil(len(maps) / columns)
    page.set_size_inches(3.4 * columns, 3.1 * rows)
    cells = page.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for cell, (name, losses) in zip(cells, maps.items(), strict=False):
        cell.contourf(figure["a"], figure["b"], losses, levels=14, cmap="viridis_r")
        cell.contour(figure["a"], figure["b"], losses, levels=14, colors="white", linewidths=0.3)
        for point in figure["points"]:
            own = point["name"] == name
            color = {"base": "white", "task": "orange" if own else "lightgrey", "merged": "red"}[point["kind"]]
            mark = MARKS[point["kind"]]
            cell.plot(point["a"], point["b"], mark, color=color, markeredgecolor="black", markersize=9 if own else 6)
            if point["kind"] != "task" or own:
                cell.annotate(point["name"], (point["a"], point["b"]), fontsize=6, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
        cell.set_title(name, fontsize="small")
    for cell in list(page.axes)[len(maps) :]:
        cell.set_axis_off()
