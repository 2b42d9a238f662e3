"""Journals: entries come back as they were written, up to the first line that is not as it was."""

import json

import pytest

from epimer.checkpoints.journal import Journal

ENTRIES = [{"n": n, "name": f"é{n}"} for n in range(5)]


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", "key")
    journal.begin()
    journal.append(ENTRIES[:2])
    journal.append(ENTRIES[2:])
    return journal.path


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read_and_can_be_added_to(path):
    journal = Journal(path, "key")
    assert journal.resume() == ENTRIES
    journal.append([{"n": 5}])
    assert Journal(path, "key").resume() == [*ENTRIES, {"n": 5}]


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda x: [*x[:3], x[3][:-9]], 2),  # torn
        (lambda x: [*x[:3], x[3].replace(b'"n": 2', b'"n": 7'), *x[4:]], 2),
        (lambda x: [*x[:3], x[3].replace(b" ", b"\t", 1), *x[4:]], 2),
        (lambda x: [*x[:2], x[3], x[2], *x[4:]], 1),  # exchanged
        (lambda x: [*x[:3], *x[2:]], 2),  # doubled
        (lambda x: [*x[:2], *x[3:]], 1),  # lost
        (lambda x: [*x, b"\n"], 5),
        (lambda x: [*x, *x], 5),
        (lambda x: [x[0]], 0),
    ],
)
def test_lines_that_do_not_verify_are_removed_with_all_after_them(path, damage, kept):
    path.write_bytes(b"".join(damage(lines(path))))
    journal = Journal(path, "key")
    assert journal.resume() == ENTRIES[:kept]
    journal.append(ENTRIES[kept:])
    assert Journal(path, "key").resume() == ENTRIES


def test_another_journal_is_not_resumed(path, tmp_path):
    assert Journal(path, "other").resume() is None
    assert Journal(tmp_path / "nowhere", "key").resume() is None
    path.write_text("".join(json.dumps(entry) + "\n" for entry in [{"key": "key"}, *ENTRIES]))  # of version 0.1
    assert Journal(path, "key").resume() is None


def test_a_link_is_neither_read_nor_written_through(path, tmp_path):
    other = path.rename(tmp_path / "other")
    content = other.read_bytes()
    path.symlink_to(other)
    journal = Journal(path, "key")
    assert journal.resume() is None
    journal.begin()
    assert other.read_bytes() == content
    assert not path.is_symlink()
    assert Journal(path, "key").resume() == []
