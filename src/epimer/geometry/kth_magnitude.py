"""The k-th smallest magnitude of more numbers than fit in memory, exactly, by counting bit patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from epimer.geometry.linalg import chunks

COUNTERS = 1 << 22  # of bit patterns, for all columns together


def kth_magnitudes(
    rows: Callable[[Sequence[int]], Iterable[Iterable[Tensor]]],
    ranks: Sequence[int],
    dtype: torch.dtype,
    workers: int = 1,
    guesses: Sequence[tuple[float, float]] | None = None,
) -> list[float]:
    """Return, for every column t of `rows`, its ranks[t]-th smallest |value| (from 1), exactly, in little memory.

    `rows` is given the columns that it is to walk over: after the first pass, those whose answer is not known yet.
    Non-negative floats sort like their bit patterns. `guesses` are, per column, two magnitudes that the answer is
    expected between: every pass over `rows` counts what lies below such an interval and how often each pattern in it
    occurs, in groups where it is wide. That leaves one pattern, or a narrower interval, or another one where a guess
    was wrong. Good guesses take one pass in float32; none takes two, and four in float64.
    """
    integer, last = (torch.int64, (1 << 63) - 1) if dtype == torch.float64 else (torch.int32, (1 << 31) - 1)
    intervals = [(0, last)] * len(ranks)
    for t, pair in enumerate(guesses or ()):
        low, high = (int(torch.tensor(value, dtype=dtype).view(integer)) for value in pair)
        intervals[t] = (low, high)
    unknown = list(range(len(ranks)))
    while unknown:  # a guess that is a single number is counted, too
        guessed = max(1 << 16, COUNTERS // len(unknown))
        ends = [intervals[t] for t in unknown]
        counts = [_Counts(low, high, guessed if high - low < last else 1 << 16) for low, high in ends]
        iterator, lock = iter(rows(unknown)), Lock()
        work = partial(_count_rows, iterator, lock, counts, dtype, integer)
        if workers == 1:
            work()
        else:
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for part in [pool.submit(work) for _ in range(workers)]:
                    part.result()
        for t, column in zip(unknown, counts, strict=True):
            intervals[t] = column.around(ranks[t], last)
        unknown = [t for t in unknown if intervals[t][0] < intervals[t][1]]
    return [float(torch.tensor(low, dtype=integer).view(dtype)) for low, _ in intervals]


class _Counts:
    """How many bit patterns lie below an interval, and how often each group of patterns in it occurs."""

    def __init__(self, low: int, high: int, most: int) -> None:
        """Count within [low, high], in at most `most` groups of 2^shift patterns."""
        self.low, self.high = low, high
        self.shift = max(0, -(-(high - low + 1) // most) - 1).bit_length()
        self.below, self.inside = 0, np.zeros(((high - low) >> self.shift) + 1, dtype=np.int64)
        self._lock = Lock()

    def add(self, bits: Tensor) -> None:
        """Count patterns; the CPU's by numpy, whose comparisons are several times faster than torch's."""
        if bits.device.type == "cpu":
            values = bits.numpy()
            less, upto = values < self.low, values <= self.high
            below, found = int(np.count_nonzero(less)), values[np.flatnonzero(less ^ upto)]  # faster than a mask
        else:
            below, found = int((bits < self.low).sum()), bits[(bits >= self.low) & (bits <= self.high)].cpu().numpy()
        groups = (found - self.low) >> self.shift
        dense = np.bincount(groups, minlength=len(self.inside)) if len(groups) > len(self.inside) else None
        with self._lock:
            self.below += below
            if dense is not None:
                self.inside += dense
            else:
                np.add.at(self.inside, groups, 1)

    def around(self, rank: int, last: int) -> tuple[int, int]:
        """Return the interval that holds the pattern of a rank, counted from 1, as far as is known now."""
        if rank <= self.below:
            return 0, self.low - 1
        sums = self.below + np.cumsum(self.inside)
        if rank > sums[-1]:
            return self.high + 1, last
        low = self.low + (int(np.searchsorted(sums, rank)) << self.shift)
        return low, min(self.high, low + (1 << self.shift) - 1)


def _count_rows(
    iterator: Iterator[Iterable[Tensor]],
    lock: Lock,
    counts: Sequence[_Counts],
    dtype: torch.dtype,
    integer: torch.dtype,
) -> None:
    while True:
        with lock:
            row = next(iterator, None)
        if row is None:
            return
        for column, values in zip(counts, row, strict=True):
            for chunk in chunks(values.flatten()):
                column.add(chunk.to(dtype).abs().view(integer))
