"""The patterns of an adapter's config that name modules, matched in time that their lengths bound.

PEFT takes each as a regular expression that must match the end of a module's name, from a dot or from its start. Python
would match such an expression in time exponential in the name, so here it is read into a small tree, and a part is
matched by the set of all places where it can end. Understood are names, `.`, classes, groups of alternatives, and `*`,
`+` and `?` after a single character; everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SPECIAL = frozenset("\\^$*+?{}[]|()")
"""characters that make a pattern of a name; a dot alone does not, as it stands in every name"""
LONGEST = 1000  # characters of a pattern, and of a name that patterns are tried on
MOST_PATTERNS = 32
CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda character: character.isalnum() or character == "_",
    "s": str.isspace,
}

Test = Callable[[str], bool]
"""whether a character fits"""


class One(NamedTuple):
    """A character that fits a test, as often as allowed."""

    test: Test
    least: int = 1
    repeated: bool = False


class Group(NamedTuple):
    """Alternatives, each a sequence; optional if nothing may stand in their place."""

    alternatives: list[list[Any]]
    optional: bool = False
    anchored: bool = False
    """whether the name must begin where it begins"""


class NamePatterns:
    """Patterns with a value each; the first one that matches a name gives its value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Read the patterns.

        Raises:
            ValueError: A pattern is not one of the supported forms, or there are too many; the text names it.
        """
        self._names: dict[str, tuple[int, Any]] = {}
        self._patterns: list[tuple[int, Group, Any]] = []
        for order, (pattern, value) in enumerate(values.items()):
            if SPECIAL.isdisjoint(pattern):
                self._names[pattern] = order, value
            else:
                self._patterns.append((order, _Reader(pattern).read(), value))
        if len(self._patterns) > MOST_PATTERNS:
            raise ValueError(f"there are {len(self._patterns)} patterns, and at most {MOST_PATTERNS} are tried")

    def value(self, name: str, default: Any) -> Any:
        """Return the value of the first pattern that matches the end of a dotted name, or the default."""
        starts = [0, *(i + 1 for i, character in enumerate(name) if character == ".")]
        found = [self._names[name[start:]] for start in starts if name[start:] in self._names]
        for order, pattern, value in self._patterns if len(name) <= LONGEST else ():
            if len(name) in _ends(pattern, name, {0} if pattern.anchored else set(starts)):
                found.append((order, value))
                break
        return min(found, key=lambda one: one[0])[1] if found else default


def _ends(part: One | Group, text: str, starts: set[int]) -> set[int]:
    """Return every place where a part can end that begins at one of some places."""
    if isinstance(part, Group):
        ends = set(starts) if part.optional else set()
        for sequence in part.alternatives:
            places = starts
            for inner in sequence:
                places = _ends(inner, text, places)
            ends |= places
        return ends
    ends = set() if part.least else set(starts)
    left = list(starts)
    while left:
        place = left.pop()
        if place < len(text) and part.test(text[place]) and place + 1 not in ends:
            ends.add(place + 1)
            if part.repeated:
                left.append(place + 1)
    return ends


class _Reader:
    """Reads one pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.place, self.depth = pattern, 0, 0
        if len(pattern) > LONGEST:
            raise ValueError(f"a pattern has {len(pattern)} characters, and at most {LONGEST} are read")

    def read(self) -> Group:
        anchored = self._take("^")
        group = self._group()
        closed = self._take("$")  # as every pattern is
        if self.place < len(self.pattern) or ((anchored or closed) and len(group.alternatives) > 1):
            raise self._unknown()
        return group._replace(anchored=anchored)

    def _group(self) -> Group:
        alternatives: list[list[One | Group]] = [[]]
        while self.place < len(self.pattern) and self.pattern[self.place] not in ")$":
            if self._take("|"):
                alternatives.append([])
            else:
                alternatives[-1].append(self._part())
        return Group(alternatives)

    def _part(self) -> One | Group:
        if not self._take("("):
            return self._repeated(self._single())
        if self._take("?") and not self._take(":"):
            raise self._unknown()
        self.depth += 1
        group = self._group()
        self.depth -= 1
        if self.depth > 10 or not self._take(")"):
            raise self._unknown()
        return group._replace(optional=self._take("?"))

    def _single(self) -> Test:
        character = self._next()
        if character == ".":
            return lambda other: other != "\n"
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escaped()
        if character in SPECIAL:
            raise self._unknown()
        return character.__eq__

    def _escaped(self) -> Test:
        character = self._next()
        if character.isalnum() and character not in CLASSES:
            raise self._unknown()
        return CLASSES.get(character, character.__eq__)

    def _class(self) -> Test:
        inverse, tests = self._take("^"), list[Test]()
        while not (tests and self._take("]")):
            first = self._next()
            if first == "\\":
                tests.append(self._escaped())
            elif (
                self.pattern[self.place : self.place + 1] == "-"
                and self.pattern[self.place + 1 : self.place + 2] != "]"
            ):
                self._take("-")
                tests.append(_between(first, self._next()))
            else:
                tests.append(first.__eq__)
        return lambda character: any(test(character) for test in tests) != inverse

    def _repeated(self, test: Test) -> One:
        one = One(test)
        if self._take("*"):
            one = One(test, 0, True)
        elif self._take("+"):
            one = One(test, 1, True)
        elif self._take("?"):
            return One(test, 0)
        if one.repeated:
            self._take("?")  # how much is tried first changes nothing
        return one

    def _take(self, character: str) -> bool:
        if self.pattern[self.place : self.place + 1] != character:
            return False
        self.place += 1
        return True

    def _next(self) -> str:
        if self.place >= len(self.pattern):
            raise self._unknown()
        self.place += 1
        return self.pattern[self.place - 1]

    def _unknown(self) -> ValueError:
        forms = "names, '.', classes, (a|b), and '*', '+', '?' after one character"
        return ValueError(f"{self.pattern[:100]!r} is not one of the patterns that are read ({forms})")


def _between(first: str, last: str) -> Test:
    return lambda character: first <= character <= last
