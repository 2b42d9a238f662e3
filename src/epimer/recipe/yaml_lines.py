"""YAML as plain data of the safe types, with the line of every value for error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from epimer.errors import RecipeError, nearest, short
from epimer.json_values import MOST_DIGITS

TAG = "tag:yaml.org,2002:"
MOST_BYTES, MOST_VALUES = 1_000_000, 10_000
LARGEST = 10**MOST_DIGITS

Location = tuple[str | int, ...]
"""a place in the data: keys and indices"""


def spell(path: Location) -> str:
    """Return a place in the data as people write it: models[0].parameters."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def plain_data(data: Any) -> Any:
    """Return a mapping that a caller gives as a file would have it: dicts and lists, and no integer without end."""
    if isinstance(data, Mapping):
        return {key: plain_data(value) for key, value in data.items()}
    if isinstance(data, int) and abs(data) >= LARGEST:
        raise RecipeError(f"recipe: an integer must have at most {MOST_DIGITS} digits, and one has more.")
    return [plain_data(value) for value in data] if isinstance(data, list | tuple) else data


class _Loader(yaml.SafeLoader):
    """Compose nodes, which know their lines, and stop early in a file of too many."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.composed += 1
        if self.composed > 2 * MOST_VALUES:  # keys are nodes too
            raise OverflowError
        return super().compose_node(parent, index)


class YamlFile:
    """A file as plain data, with the line of everything in it; a mapping has no lines."""

    def __init__(self, file: str | None, what: str = "recipe") -> None:
        self.file, self.what, self.lines, self.values = file, what, dict[Location, int](), 0

    def error(self, path: Location, message: str) -> RecipeError:
        while path and path not in self.lines:
            path = path[:-1]
        where = f"{self.file}:{self.lines.get(path, 1)}" if self.file else self.what
        return RecipeError(f"{where}: {message}")

    def wrong(self, path: Location, value: Any, expected: str) -> RecipeError:
        return self.error(path, f"{spell(path) or f'a {self.what}'} must be {expected}. Got {short(value)} instead.")

    def mapping(self, path: Location, raw: Any, known: Iterable[str], refused: Mapping[str, str], of: str = "") -> Any:
        """Return `raw` if it is a mapping of known keys; a `refused` key is an error with that message."""
        if not isinstance(raw, dict):
            raise self.wrong(path, raw, f"a mapping with keys among {', '.join(known)}")
        for key in raw:
            if key in refused:
                raise self.error((*path, key), refused[key])
            if key not in known:
                where = f" in {spell(path)}{of}" if path else ""
                shown = str(key)[:60]
                hint = nearest(shown, known)
                raise self.error((*path, key), f"unknown key {shown!r}{where}.{hint} Known: {', '.join(known)}.")
        return raw

    def text(self, path: Location, raw: Any) -> str | None:
        """Return `raw` if it is a text or None."""
        if raw is not None and (not isinstance(raw, str) or not raw.strip()):
            raise self.wrong(path, raw, "text (in quotes if it looks like a number or a yes or no)")
        return raw

    def read(self) -> Any:
        """Return the data of a file of one document in the safe types of YAML; None where it is empty."""
        documents = self.read_all()
        if len(documents) > 1:
            raise documents[1][0].error((), f"the file holds {len(documents)} documents, expected one {self.what}.")
        for file, data in documents:
            self.lines = file.lines
            return data
        return None

    def read_all(self) -> list[tuple[YamlFile, Any]]:
        """Return the data of every document of the file that is not empty, each with its own lines."""
        assert self.file is not None
        try:
            with open(self.file, "rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RecipeError(f"Cannot read the {self.what} {self.file!r}: {reason}.") from None
        text, line = "", 0
        try:
            if len(raw) > MOST_BYTES:
                raise OverflowError
            text = raw.decode("utf-8-sig")
            found = []
            for node in yaml.compose_all(text, Loader=_Loader):
                part = YamlFile(self.file, self.what)
                part.lines[()], part.values = node.start_mark.line + 1, self.values
                data = part.plain(node, ())
                self.values = part.values
                found += [] if data is None else [(part, data)]
            return found
        except UnicodeDecodeError as error:
            line, message = raw.count(b"\n", 0, error.start), "not UTF-8 text; save the file as UTF-8."
        except yaml.YAMLError as error:
            mark, context = getattr(error, "problem_mark", None), getattr(error, "context", None)
            line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
            problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", error)).split())
            hint = " Quote text that begins with '*'." if "alias" in f"{context} {problem}" else ""
            message = f"not valid YAML: {problem}.{hint}"
        except (OverflowError, RecursionError):
            most = f"{MOST_BYTES:,} bytes or {MOST_VALUES:,} values (an alias counts each time it is used)"
            message = f"too large to be a {self.what}: more than {most}, or nested without end."
        raise RecipeError(f"{self.file}:{line + 1}: {message}")

    def plain(self, node: yaml.Node, path: Location) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            raise OverflowError
        kind = node.tag.removeprefix(TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.plain_mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            self.lines |= {(*path, i): item.start_mark.line + 1 for i, item in enumerate(node.value)}
            return [self.plain(item, (*path, i)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or kind not in ("str", "timestamp", "null", "bool", "int", "float"):
            raise self.error(path, f"the YAML tag {kind!r} is not allowed in a {self.what}.")
        if kind in ("str", "timestamp"):
            return node.value
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (ValueError, LookupError):
            raise self.wrong(path, node.value, f"a YAML {kind}") from None
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise self.wrong(path, node.value, f"an integer of at most {MOST_DIGITS} digits")
        return value

    def plain_mapping(self, node: yaml.MappingNode, path: Location) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merges = [value for key, value in node.value if key.tag == TAG + "merge"]
        parts = [part for value in merges for part in (value.value if value.tag == TAG + "seq" else [value])]
        for part in reversed(parts):  # of several, the first prevails; the mapping's own keys prevail over all
            if not isinstance(part, yaml.MappingNode):
                raise self.error(path, "the YAML key '<<' takes a mapping or a list of mappings.")
            data |= self.plain(part, path)
        own: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == TAG + "merge":
                continue
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{self.file}:{line}: a key must be text.")
            if key.value in own:
                first = own[key.value]
                raise RecipeError(f"{self.file}:{line}: the key {key.value!r} is given twice, first in line {first}.")
            own[key.value] = self.lines[*path, key.value] = line
            data[key.value] = self.plain(value, (*path, key.value))
        return data
