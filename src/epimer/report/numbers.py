"""Numbers as people read them, and axes that begin and end where people expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from epimer.score_format import SHARES, metric_difference, metric_value, order_bounds

T = TypeVar("T")
SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
MINUS = "−"
NOTHING = "–"
LARGEST, SMALLEST = 1e150, 1e-150  # of what is drawn: beyond, squares and quotients are no numbers
Show = Callable[[float | None], str]


def number(value: float | None, digits: int = 3) -> str:
    """Return a number to so many significant digits; powers of ten where it is very large or very small."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if -4 < int(exponent) < max(5, digits):
        shown = f"{float(f'{value:.{digits}g}'):.{max(0, digits - 1 - int(exponent))}f}"
        shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    else:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        shown = f"{mantissa}×10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return shown.replace("-", MINUS)


def percent(value: float | None, decimals: int = 1) -> str:
    """Return a share in percent, without the sign."""
    return _rounded(100 * value, decimals) if value is not None and math.isfinite(value) else number(value)


def size(count: float) -> str:
    """Return a number of bytes with its unit, as 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def fixed(value: float | None, decimals: int = 2) -> str:
    """Return a number to so many decimals, for columns and matrices; one that is too large for that in short."""
    return _rounded(value, decimals) if value is not None and abs(value) < 1000 else number(value)


def _rounded(value: float, decimals: int) -> str:
    shown = f"{value:.{decimals}f}"
    return shown.lstrip("-") if float(shown) == 0 else shown.replace("-", MINUS)


def signed(value: float | None, show: Callable[[float], str]) -> str:
    """Return a difference with its sign."""
    if value is None or math.isnan(value):
        return NOTHING
    shown = show(abs(value))
    if not any(digit in shown for digit in "123456789∞"):
        return shown
    return f"{'+' if value > 0 else MINUS}{shown}"


@dataclass(frozen=True)
class Unit:
    """How scores read: shares in percent, losses as losses, anything else as it is; higher is better in all of them."""

    share: bool
    metric: str = ""

    @classmethod
    def of(cls, values: Iterable[float | None], metric: str | None = None) -> Unit:
        """Take scores for shares where all of them lie between 0 and 1 and nothing else is said."""
        share = metric in (None, *SHARES) and all(0 <= value <= 1 for value in finite(values))
        return cls(share, metric or "")

    def plain(self, value: float | None) -> float | None:
        """Return a score as its metric is known: a loss is minus the score."""
        return value if value is None or math.isnan(value) else metric_value(self.metric, value)

    def show(self, value: float | None) -> str:
        return percent(value) if self.share else number(self.plain(value))

    def ends(self, low: T, high: T) -> tuple[T, T]:
        """Return the ends of an interval in the order in which they read."""
        return order_bounds(self.metric, low, high)

    def between(self, low: float | None, high: float | None, to: str = ", ", show: Show | None = None) -> str:
        """Return the ends of an interval as tables have them."""
        return to.join(map(show or self.show, self.ends(low, high)))

    def interval(self, low: float | None, high: float | None) -> str:
        """Return an interval as tables have it, or a dash where there is none."""
        return NOTHING if low is None or high is None else f"[{self.between(low, high)}]"

    def tick(self, value: float) -> str:
        """Return a score as axes have it."""
        return number(100 * value) if self.share else number(self.plain(value))

    def exact(self, value: float | None) -> str:
        """Return a score with its unit, to one digit more."""
        return f"{percent(value, 2)}%" if self.share and value is not None else number(self.plain(value), 5)

    def difference(self, value: float | None) -> str:
        """Return a difference of two scores: points of a percentage, or how much higher a loss is."""
        return signed(self.apart(value), percent if self.share else number)

    def apart(self, value: float | None) -> float | None:
        """Return a difference of two scores as one of what they read as."""
        return None if value is None else metric_difference(self.metric, value)

    @property
    def suffix(self) -> str:
        return "%" if self.share else ""


def drawable(value: float | None) -> bool:
    """Whether a value has a place on an axis: it is finite, and so is what is computed of a few such values."""
    return value is not None and abs(value) < LARGEST


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that can be drawn."""
    return [value for value in values if value is not None and drawable(value)]


def bounds(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the ends of a value's interval; an end that cannot be drawn is the value itself."""
    return (finite([low]) or [value])[0], (finite([high]) or [value])[0]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values from `low` to `high`: steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not SMALLEST < span < LARGEST:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return list(dict.fromkeys(float(f"{step * i:.12g}") for i in range(first, last + 1)))


def decades(low: float, high: float) -> list[float]:
    """Return round values for a logarithmic axis: powers of ten, between them 2 and 5 where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]
    return [value for value in values if low <= value <= high]


def widened(values: Sequence[float], room: float = 0.06) -> tuple[float, float]:
    """Return a range that holds the values with some room at both ends."""
    low, high = min(values), max(values)
    extent = (high - low) or abs(high) or 1.0
    return low - room * extent, high + room * extent


@dataclass(frozen=True)
class Axis:
    """From values to places on the page, straight or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, x = self.low, self.high, value
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(value)
        if not high > low:  # two numbers so near to each other that their logarithms are one
            return (self.start + self.end) / 2
        return self.start + (x - low) / (high - low) * (self.end - self.start)
