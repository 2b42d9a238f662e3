"""Print text, tables and JSON for the commands."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epimer.errors import EpimerWarning
from epimer.plain_text import size as size
from epimer.plain_text import visible

if TYPE_CHECKING:
    from torch import Tensor


UNLIMITED = 10_000  # characters of a line


class PipeConsole(Console):
    """A console whose reader may leave early, as `head` does."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def console(*, wrap: bool = True) -> Console:
    """Return the console for standard output; lines are wrapped only where `wrap`, and only on a terminal."""
    return PipeConsole(width=None if wrap and sys.stdout.isatty() else UNLIMITED)


def print_text(text: str, *, markup: bool = False) -> None:
    """Print text, by default without interpreting rich's markup in it."""
    console().print(visible(text), markup=markup, highlight=False)


def print_notes(notes: Iterable[str]) -> None:
    """Print one line per note."""
    for note in notes:
        print_text(f"note: {note}")


@contextmanager
def printed_warnings(*, shown: bool) -> Iterator[None]:
    """Print epimer's warnings as notes when they are raised, each once: some are worth stopping for."""
    from epimer.curvature.distributed import ranks

    printed = set[str]()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = str(message)
        if shown and issubclass(category, EpimerWarning) and text not in printed and ranks()[0] == 0:
            printed.add(text)
            print_notes([text])

    with warnings.catch_warnings():
        warnings.simplefilter("always", EpimerWarning)
        warnings.showwarning = show
        yield


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, text_columns: int | None = None
) -> None:
    """Print a table without borders, of plain text.

    The first `text_columns` hold text, the others numbers, which are aligned to the right; neither is cut or wrapped on
    a narrow terminal. Where it is None all hold text, which wraps.
    """
    numeric = text_columns is not None

    def plain(text: str) -> str:
        return escape(visible(text))

    table = Table(title=title and plain(title), title_justify="left", box=None, pad_edge=numeric)
    for i, heading in enumerate(headings):
        right = text_columns is not None and i >= text_columns
        table.add_column(plain(heading), justify="right" if right else "left", no_wrap=numeric)
    for cells in rows:
        table.add_row(*map(plain, cells))
    console(wrap=not numeric).print(table, no_wrap=numeric, overflow="ignore" if numeric else None)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def output(
    record: dict[str, Any], print_result: Callable[[], None], *, file: Path | None, as_json: bool = False, quiet: bool
) -> None:
    """Write a command's record to a file, if there is one, and print it: as JSON, by `print_result`, or not at all."""
    write_record(record, file)
    if as_json:
        print_json(record)
    elif not quiet:
        print_result()


def write_record(record: dict[str, Any], file: Path | None) -> None:
    """Write a command's record to a file, if there is one."""
    from epimer.atomic_files import atomic_file
    from epimer.checkpoints.writer import as_json

    if file is not None:
        with atomic_file(file) as draft:
            draft.write_bytes(as_json(record))


def dtype(W: Tensor) -> str:
    """Return a tensor's dtype without `torch.`."""
    return str(W.dtype).removeprefix("torch.")


def shape(sizes: Sequence[int]) -> str:
    """Return a shape as 24 x 20."""
    return " x ".join(map(str, sizes)) or "scalar"
