"""Progress of long work: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts bytes or samples; shows the current item, the rate and an estimate where there is someone to see it."""

    def __init__(self, shown: bool, unit: str = "bytes") -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar
            from rich.table import Column

            narrow = Column(no_wrap=True, min_width=11)
            amounts = [DownloadColumn(table_column=narrow), TransferSpeedColumn(table_column=narrow)]
            self._bar = Bar(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
                *(amounts if unit == "bytes" else [MofNCompleteColumn(table_column=narrow), TextColumn(unit)]),
                TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
                TextColumn("[dim]{task.fields[item]}", table_column=Column(no_wrap=True, ratio=2)),
                console=Console(stderr=True),
                transient=True,
                expand=True,
            )

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, what: str, total: int | None) -> Stage:
        """Start a stage of `total` units, or of no one knows how many."""
        return Stage(self._bar, self._bar.add_task(what, total=total, item="") if self._bar else None)


class Stage:
    """One stage of the work."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: int, item: str) -> None:
        """Say that `amount` more bytes are done, and what is done now."""
        if self._bar:
            self._bar.update(self._task, advance=amount, item=item)

    def reach(self, done: int, total: int, item: str) -> None:
        """Say that `done` of `total` units are done, and what is done now."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, item=item)
