"""Messages: one line that can be shown anywhere, whatever the names in them hold."""

import pickle

import pytest

from epimer.errors import CheckpointError, EpimerError, short


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\0b", r"a\x00b"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
        ("größe 🙂 η", "größe 🙂 η"),
    ],
)
def test_a_message_is_one_line_of_text(name, shown):
    error = CheckpointError(f"{name} is missing; copy it.")
    assert str(error) == f"{shown} is missing; copy it."
    assert str(error).encode("utf-8").isascii() or shown == name
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, EpimerError)


def test_short_shows_what_python_cannot_write():
    endless: list = []
    endless.append(endless)
    for _ in range(5000):
        endless = [endless]
    assert short(10**5000) == "a int that is too large to show"
    assert short([10**5000]) == "a list that is too large to show"
    assert short(endless) == "a list that is too large to show"
    assert short("a" * 100) == "'" + "a" * 56 + "..."
