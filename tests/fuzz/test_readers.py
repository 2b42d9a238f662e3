"""2,000 damaged files, answers and mappings: nothing but epimer's own errors, in one line, or a result that holds.

`make fuzz` runs 100,000. A failure prints the command that runs its case again.
"""

import shutil
import tempfile
import warnings
from pathlib import Path
from random import Random

import pytest

from fuzz.harness import place_for_files, run_cases, shares
from fuzz.readers import READERS
from fuzz.readers.faulty import FAULTS, SLOW, fault

COUNTS = shares(READERS, 2_000)
PIECE = 45  # cases per test, so that several processes share them
PIECES = [
    pytest.param(name, first, min(first + PIECE, count), id=f"{name}-{first}")
    for name, count in COUNTS.items()
    for first in range(0, count, PIECE)
]


@pytest.mark.parametrize(("name", "first", "last"), PIECES)
def test_damaged_input_is_refused_in_one_line_or_read_well(name, first, last):
    outcome = run_cases(name, 0, first, last)
    assert outcome.cases == last - first
    assert not outcome.escapes, "\n".join([f"{len(outcome.escapes)} of {outcome.cases} escaped:", *outcome.escapes])


def test_two_thousand_cases_are_tried_and_none_twice():
    tried = [(name, case) for name, first, last in (piece.values for piece in PIECES) for case in range(first, last)]
    assert len(set(tried)) == len(tried) == 2_000
    assert {name for name, _ in tried} == READERS.keys()


@pytest.mark.parametrize("name", [name for name in READERS if name != "refused-formats"])
def test_every_reader_reads_what_is_not_damaged(name):
    with tempfile.TemporaryDirectory(dir=place_for_files()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "template").mkdir()
        READERS[name].build(Path(folder) / "template")
        shutil.copytree(Path(folder) / "template", Path(folder) / "files")
        READERS[name].read(Path(folder) / "files")


def test_the_harness_notices_every_fault():
    """A case that takes longer than the harness waits, and less processor time than it may, is none: `slow`."""
    cases, seed = 14, 274  # with which all of them occur
    expected = [fault(Random(f"faulty {seed} {case}")) for case in range(cases)]
    assert set(expected) == set(FAULTS)
    outcome = run_cases("faulty", seed, 0, cases, seconds=2 * SLOW, patience=1.0)
    said = [FAULTS[kind] for kind in expected if FAULTS[kind]]
    accepted = expected.count("none") + expected.count("slow")
    assert (outcome.cases, outcome.accepted, len(outcome.escapes)) == (cases, accepted, len(said))
    for text, words in zip(outcome.escapes, said, strict=True):
        assert words in text
        assert f"python -m fuzz faulty --seed {seed} --case" in text
