"""The parts of a page: figures with their numbers as a table, tables that sort, choices, sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from epimer.report.charts.frame import Chart
from epimer.report.glossary import SYMBOLS
from epimer.report.markup import Child, Markup, prose, slug, tag
from epimer.report.numbers import Show, number
from epimer.report.palette import standalone


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and what it is sorted by where that is a number."""

    show: Child
    value: float | None = None


Rows = list[list[Cell | str]]
LONG, NAME = 60, 28  # characters, above which a cell or a row's name may take several lines
TALL = 24  # rows, above which a table scrolls in its own frame


def cells(
    values: Iterable[float | None], show: Show, sort: Callable[[float | None], float | None] = lambda value: value
) -> list[Cell]:
    """Return a cell per number: how it is shown, and sorted by itself unless told otherwise."""
    return [Cell(show(value), sort(value)) for value in values]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row names it."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str
    marked: frozenset[int] = frozenset()
    """rows to point out"""
    quiet: frozenset[int] = frozenset()
    """rows for comparison only"""

    @classmethod
    def matrix(
        cls, corner: str, names: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]],
        caption: str, show: Show = lambda value: number(value, 4),
    ) -> Table:  # fmt: skip
        """Return a table of numbers, a row per name."""
        rows: Rows = [[name, *cells(row, show)] for name, row in zip(names, values, strict=True)]
        return cls([corner, *columns], rows, caption)

    def render(self, *, sortable: bool = True) -> Markup:
        """Return the element; its caption is for screen readers."""
        rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]
        numeric = [any(row[j].value is not None for row in rows) for j in range(len(self.headings))]
        head = [
            tag("th", _heading(name, sortable=sortable), scope="col", class_="n" if n else None)
            for name, n in zip(self.headings, numeric, strict=True)
        ]
        body = []
        for i, row in enumerate(rows):
            look = "best" if i in self.marked else "quiet" if i in self.quiet else None
            body.append(tag("tr", [_cell(cell, j, n=numeric[j]) for j, cell in enumerate(row)], class_=look))
        inner = [tag("caption", self.caption, class_="heard"), tag("thead", tag("tr", head)), tag("tbody", body)]
        frame = {"class_": "scroll tall" if len(rows) > TALL else "scroll", "tabindex": "0", "role": "group"}
        return tag("div", tag("table", inner, class_="sort" if sortable else None), **frame, aria_label=self.caption)


def _heading(name: str, *, sortable: bool) -> Child:
    """Return the content of a heading: a symbol tells its meaning when it is hovered, a button sorts the table."""
    shown = tag("abbr", name, title=SYMBOLS[name]) if name in SYMBOLS else name
    return tag("button", shown, type="button") if sortable else shown


def _cell(cell: Cell, j: int, *, n: bool) -> Markup:
    """Return one cell; in the first column, a heading of its row."""
    long = isinstance(cell.show, str) and len(cell.show) > (LONG if j else NAME)
    sort_by = None if cell.value is None else repr(cell.value).replace("inf", "Infinity")  # as a script reads it
    name, scope = ("td", None) if j else ("th", "row")
    return tag(name, cell.show, scope=scope, class_="n" if n else "long" if long else None, data_v=sort_by)


@dataclass(frozen=True)
class Figure:
    """A chart with its title, what to know when reading it, and its numbers."""

    name: str
    title: str
    chart: Chart
    table: Table
    caption: Child = None

    def render(self, key: str) -> Markup:
        buttons = [
            tag("button", kind, type="button", data_save=kind.lower(), aria_label=f"Save as {kind}: {self.title}")
            for kind in ("SVG", "PNG")
        ]
        parts = [
            tag("div", tag("span", self.title, class_="title"), tag("span", buttons, class_="save"), class_="top"),
            tag("div", self.chart.svg(key, self.title), class_="drawing"),
            tag("figcaption", self.caption) if self.caption else None,
            tag("details", tag("summary", "Numbers"), self.table.render(sortable=len(self.table.rows) > 2)),
        ]
        return tag("figure", parts, id=key, aria_label=self.title)

    def file(self, key: str) -> str:
        svg = standalone(self.chart.svg(key, self.title, alone=True))
        return f'<?xml version="1.0" encoding="utf-8"?>\n{svg}\n'


@dataclass(frozen=True)
class Side:
    """Parts side by side, where the screen is wide enough."""

    parts: Sequence[Figure | Choice | Table | Markup]


@dataclass(frozen=True)
class Choice:
    """One of several things, chosen by the reader; without a script, all of them."""

    label: str
    options: Mapping[str, Figure | Side]


Block = Markup | Table | Figure | Side | Choice


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading."""

    title: str
    blocks: Sequence[Block]
    short: str = ""
    """its name in the list of contents, where the title is long"""

    @property
    def name(self) -> str:
        return self.short or self.title


@dataclass
class Renderer:
    """Turns blocks into elements; no two get the same id."""

    keys: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        wanted = slug(name)
        key = next(key for key in chain([wanted], (f"{wanted}-{i}" for i in count(2))) if key not in self.keys)
        self.keys.add(key)
        return key

    def section(self, section: Section, key: str) -> Markup:
        named = f"{key}-heading"
        blocks = [self.block(one) for one in section.blocks]
        return tag("section", tag("h2", section.title, id=named), blocks, id=key, aria_labelledby=named)

    def block(self, block: Block) -> Markup:
        match block:
            case Table():
                return block.render()
            case Figure():
                return block.render(self.key(block.name))
            case Side():
                return tag("div", [self.block(part) for part in block.parts], class_="side")
            case Choice():
                return self._choice(block)
            case _:
                return block

    def _choice(self, choice: Choice) -> Markup:
        key = self.key(f"choose {choice.label}")
        names, shown = [], []
        for i, (name, block) in enumerate(choice.options.items()):
            names.append(tag("option", name, value=str(i)))
            shown.append(tag("div", self.block(block), data_of=key, data_option=str(i)))
        label, select = tag("label", choice.label, for_=key), tag("select", names, id=key, data_choice=key)
        return tag("div", tag("div", label, select, class_="choose"), shown, class_="choice")


def figures(blocks: Iterable[Block]) -> Iterator[Figure]:
    """Yield all figures, in their order on the page."""
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Side):
            yield from figures(block.parts)
        elif isinstance(block, Choice):
            yield from figures(block.options.values())


def folded(title: str, table: Table) -> Markup:
    """Return a table that is folded away until the reader opens it."""
    return tag("details", tag("summary", title), table.render())


def notes(lines: Sequence[str]) -> Markup:
    """Return what to know when reading a section."""
    return tag("ul", [tag("li", prose(line)) for line in lines], class_="notes") if lines else Markup()


def facts(*entries: tuple[str, Child] | tuple[str, Child, str]) -> Markup:
    """Return names and values, each with a sentence on what it is if that is given."""
    parts = []
    for name, value, *meaning in entries:
        explained = tag("dd", meaning[0], class_="meaning") if meaning else None
        parts.append(tag("div", tag("dt", name), tag("dd", value), explained))
    return tag("dl", parts, class_="facts")


def card(name: str, value: str, more: str, *, named: bool = False) -> Markup:
    """Return a value of the first screen in large type; `named` where it is a name."""
    shown = tag("dd", value, class_="name" if named else None)
    return tag("div", tag("dt", name), shown, tag("dd", more, class_="more"))
