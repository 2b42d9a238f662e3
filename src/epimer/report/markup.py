"""HTML and SVG as text in which everything is escaped, unless it was built here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

from epimer.plain_text import visible

EMPTY = frozenset({"meta", "br", "hr", "input", "link", "img"})  # HTML elements that are never closed
SHAPES = frozenset({"rect", "line", "circle", "path", "polyline", "polygon"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Markup | None | Iterable[Any]


def text(value: Any) -> Markup:
    """Return a value as text that no browser takes for markup."""
    return Markup(escape(visible(str(value)), quote=True))


def join(*children: Child) -> Markup:
    """Return children one after the other: markup as it is, text escaped, lists flattened, None left out."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Markup) else text(child))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """Return an element.

    Attributes: `class_` and `for_` lose their underscore, other underscores become hyphens; None and False leave an
    attribute out, True gives it no value; numbers are cut to what a screen can show.
    """
    opening = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown = text(place(value) if isinstance(value, float) else value).replace("\n", "&#10;")  # XML drops newlines
        opening.append(key if value is True else f'{key}="{shown}"')
    inner = join(*children)
    if name in SHAPES and not inner:
        return Markup(f"<{' '.join(opening)}/>")
    closing = "" if name in EMPTY else f"{inner}</{name}>"
    return Markup(f"<{' '.join(opening)}>{closing}")


def prose(content: str) -> Markup:
    """Return a sentence in which `code` is set as such."""
    pieces = content.split("`")
    if len(pieces) % 2 == 0:  # a backtick too many
        return text(content)
    return join(tag("code", piece) if i % 2 else piece for i, piece in enumerate(pieces))


def place(value: float) -> str:
    """Return a coordinate: at most two decimals, no trailing zeros, no minus zero."""
    shown = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if shown in ("-0", "") else shown


def slug(value: str) -> str:
    """Return a text as a file or an element may be named."""
    return re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:60] or "figure"
