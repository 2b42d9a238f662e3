"""Read JSON that anybody may have written: one way for every file, with limits that keep all later steps safe."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

DEEPEST = 100  # lists and objects inside each other; whoever walks through them may then recurse
MOST_DIGITS = 300  # of an integer: any float holds it, and it can be shown
CONTAINERS = (dict, list)
SIGNED = re.compile(rb"[\[:,]\s*-")  # where a number may begin
ZEROS = bytes(48 if chr(byte).isdigit() and byte < 128 else 32 for byte in range(256))
"""every digit as a zero: a long number is found as a long text of them"""


class RepeatedKeyError(ValueError):
    """An object has a `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it has {key!r} twice")
        self.key = key


def json_value(
    data: bytes | str, *, strict: bool = False, compact: Callable[[dict[str, Any]], Any] = lambda table: table
) -> Any:
    """Return the value of a JSON text, bytes being UTF-8; a ValueError says in a line why there is none.

    Refused, besides what is not JSON, are nesting without end, integers of more than 300 digits and half characters
    (a lone surrogate, which no file can hold). With `strict`, as headers of safetensors files are read, so are a key
    that an object has twice, an integer with a sign, NaN and infinity; `compact` then returns what to keep of each
    object, once it is read: a million small objects would take a gigabyte.
    """
    raw, text = (data.encode(), data) if isinstance(data, str) else (data, data.decode("utf-8-sig"))
    long = b"0" * (MOST_DIGITS + 1) in raw.translate(ZEROS)  # a function that is called for every number costs time
    hooks: dict[str, Any] = {"object_pairs_hook": lambda pairs: compact(_unique(pairs)), "parse_constant": _count}
    hooks["parse_int"] = _count if long or SIGNED.search(raw) else None
    try:
        value = json.loads(text, **hooks) if strict else json.loads(text, parse_int=_integer if long else None)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from error
    if raw.count(b"{") + raw.count(b"[") > DEEPEST:
        _check_depth(value)
    if b"\\ud" in raw or b"\\uD" in raw:
        _check_text(value)
    return value


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(text)} digits, and at most {MOST_DIGITS} are read")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{text[:40]} is no count")
    return _integer(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(counts.most_common(1)[0][0])
    return table


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, CONTAINERS) else []
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items if isinstance(item, CONTAINERS)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half a character, {error.object[error.start]!r}") from error
