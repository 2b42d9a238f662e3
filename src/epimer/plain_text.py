"""Names and notes of strangers as plain text: pages, Markdown and terminals must not take them for more."""

from __future__ import annotations

import re

UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
"""controls, what no XML or UTF-8 file may hold, and what turns the direction of the text that follows"""
MARKUP = re.compile(r"<(?=[A-Za-z/!?])|(?<=\])[(\[:]")
"""what begins HTML in Markdown, or makes a link of the brackets before it"""


def visible(text: str) -> str:
    """Return a text in which U+FFFD stands for each character that is not seen but does something."""
    return UNSEEN.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return a text on one line, all of it visible."""
    return " ".join(visible(text).splitlines())


def code_span(name: str) -> str:
    """Return a name as code in Markdown, where nothing is markup and no address becomes a link."""
    line = one_line(name)
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    room = " " if not line or "`" in (line[0], line[-1]) else ""
    return f"{ticks}{room}{line}{room}{ticks}"


def markdown_line(text: str) -> str:
    """Return a text on one line of Markdown that makes neither HTML nor links; emphasis and code stay."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", one_line(text))  # a backslash could itself be escaped


def table_cell(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    return markdown_line(text).replace("|", "&#124;")


def size(count: float) -> str:
    """Return a number of bytes with its unit, as 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
