"""Write a page and its figures; a file is complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from epimer.atomic_files import atomic_file, explain_os_errors
from epimer.report.page import build, standalone
from epimer.report.read import gather, read_records


def make_report(
    paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], figures: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Read records, write their page to `out` and each figure into the folder `figures`; return what was written."""
    records = read_records(paths)
    written = [write(Path(out), build(records))]
    if figures is not None:
        folder = Path(figures)
        with explain_os_errors(folder, "made"):
            folder.mkdir(parents=True, exist_ok=True)
        written += [write(folder / name, content) for name, content in standalone(records)]
    return written


def write_page(data: Iterable[Mapping[str, Any]], out: Path) -> Path:
    """Write the page of records in plain data, as `to_dict` gives it."""
    return write(out, build(gather(data)))


def write(path: Path, content: str) -> Path:
    """Write a text file, which appears complete or not at all."""
    with atomic_file(path) as draft:
        draft.write_text(content, encoding="utf-8", newline="\n")
    return path
