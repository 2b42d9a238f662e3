"""Where a function on a grid reaches a level: lines by marching squares, and the regions above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epimer.report.numbers import drawable, finite

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
    for i, j, corners in _cells(values):
        for one, two in _pairs(corners, _edges(i, j), level):
            beside.setdefault(one, []).append(two)
            beside.setdefault(two, []).append(one)
    ends = [edge for edge, near in beside.items() if len(near) == 1]
    lines = [_followed(start, beside) for start in [*ends, *beside] if beside[start]]
    return [[_crossing(values, xs, ys, edge, level) for edge in line] for line in lines]


def region(values: Grid, xs: Sequence[float], ys: Sequence[float], level: float) -> list[list[Spot]]:
    """Return polygons that together cover where the function is at least `level`; whole cells are joined along x."""
    polygons: list[list[Spot]] = []
    following = None  # the cell that would lengthen the last polygon
    for i, j, corners in _cells(values):
        if min(corners) >= level:
            if following != (i, j):
                polygons.append([(xs[j], ys[i]), (xs[j], ys[i]), (xs[j], ys[i + 1]), (xs[j], ys[i + 1])])
            polygons[-1][1:3] = [(xs[j + 1], ys[i]), (xs[j + 1], ys[i + 1])]
            following = (i, j + 1)
        elif max(corners) >= level:
            polygons += _pieces(values, xs, ys, i, j, level)
    return polygons


def _cells(values: Grid) -> Iterator[tuple[int, int, list[float]]]:
    """Yield row, column and corners of the cells whose corners all have a value."""
    for i in range(len(values) - 1):
        for j in range(len(values[i]) - 1):
            corners = [values[i + di][j + dj] for dj, di in CORNERS]
            if all(map(drawable, corners)):
                yield i, j, corners


def _edges(i: int, j: int) -> tuple[Edge, Edge, Edge, Edge]:
    """Return a cell's edges; the k-th goes from corner k to the next."""
    return (i, j, False), (i, j + 1, True), (i + 1, j, False), (i, j, True)


def _pairs(corners: Sequence[float], edges: Sequence[Edge], level: float) -> list[tuple[Edge, Edge]]:
    """Return which edges of a cell a line joins; in a saddle, the value in the middle decides."""
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
    corners, edges = [values[i + di][j + dj] for dj, di in CORNERS], _edges(i, j)
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
