"""Where a function on a grid reaches a level: lines by marching squares, and the regions above it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from epimer.report.numbers import finite

Grid = Sequence[Sequence[float]]
"""rows of y, each with its values along x"""
Spot = tuple[float, float]
Edge = tuple[int, int, bool]
"""of the grid: where it begins, and whether it goes along y"""
CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))
LOG = 6.0  # times the smallest value the largest must be for levels by the logarithm


def levels_of(values: Grid, count: int) -> list[float]:
    """Return levels between the least and the largest value, by their logarithm where that tells more."""
    known = finite(value for row in values for value in row)
    if not known or not max(known) > min(known):
        return []
    low, high = min(known), max(known)
    shares = [(i + 1) / (count + 1) for i in range(count)]
    if low > 0 and high / low >= LOG:
        return [low * (high / low) ** share for share in shares]
    return [low + (high - low) * share for share in shares]


def contours(values: Grid, xs: Sequence[float], ys: Sequence[float], level: float) -> list[list[Spot]]:
    """Return the lines on which the function, straight along every edge of the grid, has a level; loops are closed."""
    beside: dict[Edge, list[Edge]] = {}
    for i, j in _cells(values):
        for one, two in _pairs(values, i, j, level):
            beside.setdefault(one, []).append(two)
            beside.setdefault(two, []).append(one)
    lines, ends = [], [edge for edge, near in beside.items() if len(near) == 1]
    for start in [*ends, *beside]:
        if beside[start]:
            lines.append([_crossing(values, xs, ys, edge, level) for edge in _followed(start, beside)])
    return lines


def region(values: Grid, xs: Sequence[float], ys: Sequence[float], level: float) -> list[list[Spot]]:
    """Return polygons that together cover where the function is at least `level`; whole cells are joined along x."""
    found: list[list[Spot]] = []
    run: tuple[int, int, int] | None = None  # row, first cell, end

    def close() -> None:
        if run is not None:
            i, a, b = run
            found.append([(xs[a], ys[i]), (xs[b], ys[i]), (xs[b], ys[i + 1]), (xs[a], ys[i + 1])])

    for i, j in _cells(values):
        corners = _corners(values, i, j)
        if min(corners) >= level:
            if run is not None and run[0] == i and run[2] == j:
                run = (i, run[1], j + 1)
            else:
                close()
                run = (i, j, j + 1)
        elif max(corners) >= level:
            found += _pieces(values, xs, ys, i, j, level)
    close()
    return found


def _cells(values: Grid) -> Iterator[tuple[int, int]]:
    """Yield row and column of the cells whose corners all have a value."""
    for i in range(len(values) - 1):
        for j in range(len(values[i]) - 1):
            if all(math.isfinite(value) for value in _corners(values, i, j)):
                yield i, j


def _corners(values: Grid, i: int, j: int) -> list[float]:
    return [values[i + di][j + dj] for dj, di in CORNERS]


def _edges(i: int, j: int) -> tuple[Edge, Edge, Edge, Edge]:
    """Return a cell's edges; the k-th goes from corner k to the next."""
    return (i, j, False), (i, j + 1, True), (i + 1, j, False), (i, j, True)


def _pairs(values: Grid, i: int, j: int, level: float) -> list[tuple[Edge, Edge]]:
    """Return which edges of a cell a line joins; in a saddle, the value in the middle decides."""
    corners = _corners(values, i, j)
    edges = _edges(i, j)
    above = [value >= level for value in corners]
    crossed = [k for k in range(4) if above[k] != above[(k + 1) % 4]]
    if len(crossed) == 2:
        return [(edges[crossed[0]], edges[crossed[1]])]
    if len(crossed) == 4:
        joined = (sum(corners) / 4 >= level) == above[0]  # corner 0 and the opposite one are on one side
        return [(edges[0], edges[1]), (edges[2], edges[3])] if joined else [(edges[3], edges[0]), (edges[1], edges[2])]
    return []


def _pieces(values: Grid, xs: Sequence[float], ys: Sequence[float], i: int, j: int, level: float) -> list[list[Spot]]:
    """Return the part of a cell that lies above a level: one polygon, or two at a saddle."""
    corners = _corners(values, i, j)
    edges = _edges(i, j)
    above = [value >= level for value in corners]
    spots: list[tuple[int, Spot]] = []
    for k, (dj, di) in enumerate(CORNERS):
        if above[k]:
            spots.append((k, (xs[j + dj], ys[i + di])))
        if above[k] != above[(k + 1) % 4]:
            spots.append((-1, _crossing(values, xs, ys, edges[k], level)))
    if len(spots) == 6 and above[0] == above[2] and sum(corners) / 4 < level:
        at = [n for n, (k, _) in enumerate(spots) if k >= 0]
        return [[spots[n - 1][1], spots[n][1], spots[(n + 1) % 6][1]] for n in at]
    return [[spot for _, spot in spots]]


def _crossing(values: Grid, xs: Sequence[float], ys: Sequence[float], edge: Edge, level: float) -> Spot:
    i, j, upright = edge
    one, two = values[i][j], values[i + upright][j + (not upright)]
    share = (level - one) / (two - one)
    if upright:
        return xs[j], ys[i] + share * (ys[i + 1] - ys[i])
    return xs[j] + share * (xs[j + 1] - xs[j]), ys[i]


def _followed(start: Edge, beside: dict[Edge, list[Edge]]) -> list[Edge]:
    """Return a line from edge to edge, and take it out of `beside`."""
    line, at = [start], start
    while beside[at]:
        following = beside[at].pop()
        beside[following].remove(at)
        line.append(following)
        at = following
    return line
