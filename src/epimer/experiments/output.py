"""Write an experiment: JSON for machines, a Markdown table, and its figure as SVG where it has one."""

from __future__ import annotations

from pathlib import Path

from epimer.checkpoints.writer import as_json, atomic_file, explain_os_errors
from epimer.records import Experiment
from epimer.report.figures import figure_file


def write(experiment: Experiment, folder: Path) -> list[Path]:
    """Write one experiment's files into a folder; return their paths."""
    with explain_os_errors(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    contents = {"json": as_json(experiment.to_dict()), "md": experiment.markdown().encode()}
    svg = figure_file(experiment)
    if svg is not None:
        contents["svg"] = svg.encode()
    files = []
    for extension, content in contents.items():
        files.append(folder / f"{experiment.name}.{extension}")
        with atomic_file(files[-1]) as draft:
            draft.write_bytes(content)
    return files
