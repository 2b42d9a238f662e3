"""Text of strangers in Markdown, read back by a parser that nobody here wrote."""

import pytest
from markdown_it import MarkdownIt

from epimer.plain_text import code_span, markdown_line, table_cell, visible

NAMES = [
    "a",
    "",
    " ",
    "`",
    "``",
    "a`b",
    "`a",
    "a``",
    "``` `` `",
    "<b>x</b>",
    "[x](y)",
    "\\",
    "\\`",
    "a\\",
    "*x* _y_",
    "&lt;",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_piece_of_code(name):
    (paragraph,) = [token for token in MarkdownIt().parse(f"x {code_span(name)} y") if token.type == "inline"]
    kinds = [(token.type, token.content) for token in paragraph.children]
    assert kinds == [("text", "x "), ("code_inline", name or kinds[1][1]), ("text", " y")]


@pytest.mark.parametrize(
    "text", ["<b>", "\\<b>", "\\\\<b>", "</b", "<!--", "<?x?>", "[x](y)", "[x][y]", "![x](y)", "\\](x)"]
)
def test_a_line_makes_neither_html_nor_links(text):
    tokens = MarkdownIt("commonmark", {"html": True}).parse(
        f"{markdown_line(text)}\n\n- {markdown_line('[y]: z')}\n\n[y]"
    )
    inside = [child.type for token in tokens for child in token.children or ()]
    assert set(inside) == {"text"}, inside
    assert "html_block" not in [token.type for token in tokens]


@pytest.mark.parametrize("text", ["a|b", "a\\|b", "a\\\\|b", "|", "a\nb", "a\r\n|b", "a\u2028b"])
def test_a_cell_is_one_cell(text):
    table = f"| x | y |\n|---|---|\n| {table_cell(text)} | last |"
    tokens = MarkdownIt("commonmark").enable("table").parse(table)
    cells = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "td_open"]
    assert len(cells) == 2
    assert cells[1] == "last"


def test_what_is_not_seen_is_shown():
    assert visible("a\x1b[31m\u202eb\x9b\ud800c") == "a\ufffd[31m\ufffdb\ufffd\ufffdc"
    plain = "naïve שלום مرحبا 日本語 e\u0301 👩\u200d👧 \u200f\t\n"
    assert visible(plain) == plain
