"""2,000 damaged files, answers and mappings: nothing but epimer's own errors, in one line, or a result that holds.

`make fuzz` runs 100,000. A failure prints the command that runs its case again.
"""

import tempfile
from pathlib import Path

import pytest

from fuzz.harness import Reader, place_for_files, run_cases, shares
from fuzz.readers import READERS

CASES = 2_000
COUNTS = shares(READERS, CASES)


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused_in_one_line_or_read_well(name):
    outcome = run_cases(name, 0, 0, COUNTS[name])
    assert outcome.cases == COUNTS[name]
    assert not outcome.escapes, "\n".join([f"{len(outcome.escapes)} of {outcome.cases} cases escaped:", *outcome.escapes])
