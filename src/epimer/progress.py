"""Progress of long work: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Stopwatch:
    """Adds up the seconds that the blocks `with stopwatch:` take."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class Progress:
    """Counts bytes or samples; on a terminal it shows the current item, the rate and the remaining time."""

    def __init__(self, shown: bool, unit: str = "bytes") -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from rich import progress as rich
            from rich.console import Console
            from rich.table import Column

            narrow = Column(no_wrap=True, min_width=11)
            amounts: list[rich.ProgressColumn] = [rich.MofNCompleteColumn(table_column=narrow), rich.TextColumn(unit)]
            if unit == "bytes":
                amounts = [rich.DownloadColumn(table_column=narrow), rich.TransferSpeedColumn(table_column=narrow)]
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                rich.BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
                *amounts,
                rich.TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
                rich.TextColumn("[dim]{task.fields[item]}", table_column=Column(no_wrap=True, ratio=2)),
                console=Console(stderr=True),
                transient=True,
                expand=True,
            )

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, what: str, total: int | None) -> Stage:
        """Start a stage of `total` units; None where their number is not known."""
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
