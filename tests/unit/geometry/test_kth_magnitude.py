"""The k-th smallest magnitude against torch's own, whatever was guessed, and how often the numbers are read for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epimer.geometry.kth_magnitude import kth_magnitudes


class Rows:
    """Rows of two columns, x and -2x, that count how often they are read."""

    def __init__(self, x, length=7):
        self.x, self.length, self.walked = x, length, []

    def __call__(self, columns):
        self.walked.append(list(columns))
        return ([(part, -2 * part)[t] for t in columns] for part in self.x.split(self.length))


def kth(x, k):
    return float(x.abs().kthvalue(k).values)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 300), share=st.floats(0.01, 1), seed=st.integers(0, 99), wide=st.booleans())
def test_kth_magnitude_is_exact_over_chunks(size, share, seed, wide):
    torch.manual_seed(seed)
    x = torch.randn(size, dtype=torch.float64 if wide else torch.float32).round(decimals=1)
    k = max(1, int(share * size))
    found = kth_magnitudes(Rows(x), [k, size + 1 - k], x.dtype)
    assert found == [kth(x, k), 2 * kth(x, size + 1 - k)]


@settings(max_examples=100, deadline=None)
@given(
    low=st.floats(0, 3, width=32),
    width=st.floats(0, 3, width=32),
    k=st.integers(1, 500),
    wide=st.booleans(),
    workers=st.integers(1, 2),
)
def test_a_guess_changes_nothing_whether_it_is_right_too_low_or_too_high(low, width, k, wide, workers):
    dtype = torch.float64 if wide else torch.float32
    x = torch.randn(500, generator=torch.Generator().manual_seed(k), dtype=dtype)
    guesses = [(low, low + width), (0.0, torch.finfo(dtype).max)]
    assert kth_magnitudes(Rows(x), [k, k], dtype, workers, guesses) == [kth(x, k), 2 * kth(x, k)]


def test_a_good_guess_takes_one_pass_and_none_takes_two():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    k = 80_000
    answer, guessed, not_guessed = kth(x, k), Rows(x, 9999), Rows(x, 9999)
    guesses = [(0.98 * answer, 1.02 * answer), (1.96 * answer, 2.04 * answer)]
    assert kth_magnitudes(guessed, [k, k], x.dtype, guesses=guesses) == [answer, 2 * answer]
    assert kth_magnitudes(not_guessed, [k, k], x.dtype) == [answer, 2 * answer]
    assert (guessed.walked, not_guessed.walked) == ([[0, 1]], [[0, 1], [0, 1]])


def test_later_passes_walk_over_those_columns_alone_whose_guess_was_wrong():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    k = 80_000
    answer, rows = kth(x, k), Rows(x, 9999)
    guesses = [(1.02 * answer, 1.04 * answer), (1.96 * answer, 2.04 * answer)]
    assert kth_magnitudes(rows, [k, k], x.dtype, guesses=guesses) == [answer, 2 * answer]
    assert rows.walked[0] == [0, 1]
    assert rows.walked[1:]
    assert all(columns == [0] for columns in rows.walked[1:])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_equal_magnitudes_are_counted_however_many_there_are(share):
    x = torch.cat([torch.zeros(400), torch.full((300,), 0.25), torch.full((300,), -0.5)])
    k = int(share * len(x))
    assert kth_magnitudes(Rows(x), [k, k], x.dtype, guesses=[(0.25, 0.25), (1.0, 1.0)]) == [kth(x, k), 2 * kth(x, k)]
