"""Write what experiments found: JSON for machines, a Markdown table, and a figure where there is something to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epimer.checkpoints.writer import as_json, explained
from epimer.suites.experiments import Result


def write(result: Result, folder: Path) -> list[Path]:
    """Write one experiment's files into a folder; return what was written."""
    files = [folder / f"{result.name}.json", folder / f"{result.name}.md"]
    with explained(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        files[0].write_bytes(as_json(result.to_dict()))
        files[1].write_text(result.markdown(), encoding="utf-8")
        if result.figure is not None:
            files.append(folder / f"{result.name}.svg")
            draw(result.figure, result.title, files[-1])
    return files


def draw(figure: dict[str, Any], title: str, path: Path) -> None:
    """Draw lines with their intervals."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(7, 4.5), layout="constrained")
    axes = page.subplots()
    for label, points in figure["lines"].items():
        x, y, low, high = zip(*points, strict=True)
        (line,) = axes.plot(x, y, marker="o", markersize=3, label=label)
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set_xlabel(figure["x"])
    axes.set_ylabel(figure["y"])
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    page.savefig(path, metadata={"Date": None})
