"""Messages: one line that can be shown anywhere, whatever the names in them hold."""

import pickle

import pytest

from epimer.errors import CheckpointError, EpimerError, EpimerWarning, listed, short


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


def test_names_and_messages_without_end_are_cut_and_keep_the_remedy():
    pair: tuple = ()
    for _ in range(200):  # written out it would have 2^200 parts
        pair = (pair, pair)
    assert short(pair) == "a tuple that is too large to show"
    assert listed([10**5000, "a" * 10**6]) == "a int that is too large to show, '" + "a" * 300 + "'..."
    assert short({"b": 1, "a": [2, (3,)]}) == "{'b': 1, 'a': [2, (3,)]}"
    text = str(CheckpointError("start " + "x" * 10**7 + "; copy it again."))
    assert len(text) == 4000
    assert text.startswith("start xxx")
    for long in ("x" * 10**5, "\ud800" * 3000, "https://x/" + "y" * 3990 + "?" + "z" * 10**4):
        error = CheckpointError(long)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert len(str(error)) <= 4000
    assert text.endswith("x; copy it again.")


@pytest.mark.parametrize("kind", [CheckpointError, EpimerWarning])
def test_a_signed_address_keeps_its_signature(kind):
    text = str(
        kind("https://bucket.example/a/b.bin?X-Amz-Signature=5ecre7&x=1 cannot be read, nor 'gs://b?key=5ecre7'.")
    )
    assert text == "https://bucket.example/a/b.bin?... cannot be read, nor 'gs://b?...'."
