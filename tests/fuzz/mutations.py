"""Seeded damage: to files, bytes, trees of JSON or YAML values, headers, journals, and the opcodes of a pickle."""

from __future__ import annotations

import copy
import hashlib
import json
import pickletools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any


class Literal(str):
    """Text that is written as it is, without quotes, where a file's format allows what Python cannot write."""


class Pairs(list):  # type: ignore[type-arg]
    """An object as a list of (key, value), which may have a key twice."""


DIGITS = "7" * 4500  # more than Python converts to or from text
NUMBERS: list[Any] = [
    0, -1, 1, 2, 255, -(2**31), 2**31, 2**62, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, -(10**400), 0.5, -0.0,
    1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), Literal(DIGITS), Literal("-" + DIGITS),
    Literal("1e400"), Literal("-1e400"), Literal("1" + "0" * 309), Literal("0." + "3" * 5000),
]  # fmt: skip
NAMES = [
    "", " ", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "~", "~/x", "~nobody-here/x", "a/../../b", "a//b",
    "\0", "a\0b", "\ud800", "x\udfff", "\udc80y", "\u2028", "a\nb", "\r\n", "\x1b[31m", "\x7f", "é" * 200, "a" * 300,
    "a" * 5000, "a/" * 3000, "con", "-", "--help", "*", "[", "(", "(?:a*)*b", "(.*)*x", ".*" * 12 + "x", "\\", "%s",
    "{}", "{0}", "<script>", "🙂", "\ufeff", "https://x", "file:///etc/passwd", "org/name", "x+y", "model",
    "__metadata__", "0", "1e5", "true", "null", "NaN",
]  # fmt: skip
CONSTANTS: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": None}, [None], ["a", 1], {"a": {"b": [1, {}]}}]
YAML_LITERALS = [
    Literal(text)
    for text in (
        "0x" + "f" * 4000, "0b" + "1" * 20000, "0o7", "190:20:30", "9" * 4000 + ":1", "2001-01-01", "99999-99-99",
        "2001-13-45", ".nan", "-.inf", "!!python/object/apply:os.system ['x']", "!!binary aGk=", "!!float x", "!!int x",
        "!!set {a}", "*a", "&a [*a]", "<<", "'", '"\\ud800"', '"\\x00"', "? [a]", "%", "@", "~", "=", "1_0", "0x",
        "!!bool maybe", "!!timestamp x", "!!int ''", "!!float ''", "!!null x", "!!omap [a: 1]", "- -", "!<x> y", "0.e",
        "!!timestamp 2001-99-99", "| \n a", "!!str 1",
    )
]  # fmt: skip


def deep(depth: int) -> Any:
    """Return lists or objects inside each other, as text: Python itself could not write them."""
    return Literal("[" * depth + "]" * depth if depth % 2 else '{"a":' * depth + "1" + "}" * depth)


def hostile(rng: Random, yaml: bool = False) -> Any:
    """Return a value that a reader may not expect."""
    kind = rng.randrange(9 if yaml else 8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(NAMES)
    if kind == 6:
        return copy.deepcopy(rng.choice(CONSTANTS))
    if kind == 7:
        return deep(rng.choice((40, 41, 150, 501, 1200, 100_000, 100_001)) if rng.random() < 0.3 else 21)
    return rng.choice(YAML_LITERALS)


def mutated(rng: Random, value: Any, *, yaml: bool = False, times: int | None = None) -> Any:
    """Return a tree of values with one to three of its places changed."""
    value = copy.deepcopy(value)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        value = _mutated_once(rng, value, yaml)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list) and not isinstance(value, Pairs):
        for i, item in enumerate(value):
            yield from _places(item, (*path, i))


def _mutated_once(rng: Random, value: Any, yaml: bool) -> Any:
    places = list(_places(value))
    place = rng.choice(places) if rng.random() < 0.9 else ()
    here = value
    for part in place:
        here = here[part]
    changed = _changed(rng, here, value, places, yaml)
    if not place:
        return changed
    parent = value
    for part in place[:-1]:
        parent = parent[part]
    last = place[-1]
    kind = rng.randrange(8)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(NAMES)] = parent.pop(last)
    elif kind == 2 and isinstance(parent, dict) and len(place) == 1:
        return Pairs([*parent.items(), (last, changed)])
    else:
        parent[last] = changed
    return value


def _changed(rng: Random, here: Any, root: Any, places: list[tuple[Any, ...]], yaml: bool) -> Any:
    kind = rng.randrange(10)
    if kind == 0:
        return [here]
    if kind == 1:
        return {rng.choice(NAMES): here}
    if kind == 2:  # something else of the same file
        other = root
        for part in rng.choice(places):
            other = other[part]
        return copy.deepcopy(other)
    if kind == 3 and isinstance(here, list) and here:
        return rng.choice(([], here[:-1], here * 2, [*here, here[0]], here[::-1]))
    if kind == 4 and isinstance(here, dict):
        return rng.choice(({}, dict(list(here.items())[:-1]), {**here, rng.choice(NAMES): hostile(rng, yaml)}))
    if kind == 5 and isinstance(here, int | float) and not isinstance(here, bool) and abs(here) < 1e300:
        return rng.choice((here + 1, here - 1, -here, here * 2, str(here), float(here)))
    if kind == 6 and isinstance(here, str):
        return rng.choice((here + rng.choice(NAMES), here[:-1], here * 2, here.upper(), [here], here[1:]))
    return hostile(rng, yaml)


def as_text(value: Any) -> str:
    """Return a tree as JSON, with its literals and its double keys; lone surrogates are escaped."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(str(k))}:{as_text(v)}" for k, v in value) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(k))}:{as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    return json.dumps(value)


def as_python(value: Any) -> Any:
    """Return a tree as Python's own values: numbers of more digits than text may have, the last of double keys."""
    if isinstance(value, Literal):
        digits = value.lstrip("-")
        return -(10 ** len(digits)) if value.startswith("-") else 10 ** min(len(digits), 6000)
    if isinstance(value, Pairs):
        return {key: as_python(item) for key, item in value}
    if isinstance(value, dict):
        return {key: as_python(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_python(item) for item in value]
    return value


def mutated_json(rng: Random, data: bytes) -> bytes:
    """Return the bytes of a JSON file damaged: mostly in its values, else in its bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(rng, data)
    text = as_text(mutated(rng, json.loads(data))).encode()
    return mutated_bytes(rng, text) if rng.random() < 0.05 else text


def mutated_lines(rng: Random, data: bytes) -> bytes:
    """Return the bytes of a file with JSON in each line, with one line damaged."""
    lines = data.splitlines()
    i = rng.randrange(len(lines))
    lines[i] = mutated_json(rng, lines[i])
    return b"\n".join(lines)


def mutated_safetensors(rng: Random, data: bytes) -> bytes:
    """Return a safetensors file damaged: its header's values, its tensors' bytes, its length, or any of its bytes."""
    size, kind = int.from_bytes(data[:8], "little"), rng.randrange(5)
    if kind == 0:
        return mutated_bytes(rng, data)
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    if kind == 1:
        rest = mutated_bytes(rng, rest)
    if kind == 2:
        header = _of_other_tensors(rng, header)
    elif kind > 2 or rng.random() < 0.5:
        header = mutated(rng, header)
    text = as_text(header).encode()
    length = rng.choice((0, 8, len(text) - 1, len(text) + 1, 2**63, 100_000_000)) if rng.random() < 0.05 else len(text)
    return length.to_bytes(8, "little") + text + rest


SAME_WIDTH = {
    "F32": ("I32", "U32"), "I32": ("F32", "U32"), "F64": ("I64", "U64", "C64"), "I64": ("F64", "U64", "C64"),
    "F16": ("BF16", "I16", "U16"), "BOOL": ("U8", "I8", "F8_E4M3"),
}  # fmt: skip


def _of_other_tensors(rng: Random, header: dict[str, Any]) -> dict[str, Any]:
    """Return a safetensors header that fits the file: a tensor has another name, shape, dtype, or another's bytes."""
    names = [name for name in header if name != "__metadata__"]
    one, other, kind = rng.choice(names), rng.choice(names), rng.randrange(4)
    if kind == 0:
        header[one], header[other] = header[other], header[one]
    elif kind == 1:
        header[one]["shape"] = rng.choice((header[one]["shape"][::-1], [*header[one]["shape"], 1]))
    elif kind == 2:
        header[one]["dtype"] = rng.choice(SAME_WIDTH.get(header[one]["dtype"], ("F32",)))
    else:
        header[f"{one[:-1]}{rng.choice('UVxFAG')}"] = header.pop(one)
    return header


def mutated_journal(rng: Random, data: bytes, *, forged: bool) -> bytes:
    """Return a journal with a line damaged, doubled, moved or gone; with hashes that fit where it is `forged`.

    A forged one has its notes as they were: what a method's pre-pass found is of any type, and only its hash tells.
    """
    if not forged and rng.random() < 0.3:
        return mutated_bytes(rng, data)
    lines = data.splitlines()
    i = rng.choice([i for i, line in enumerate(lines) if not forged or b'"note"' not in line])
    if rng.random() < 0.2:
        lines[i : i + 1] = rng.choice(([], [lines[i]] * 2, [rng.choice(lines), lines[i]]))
    else:
        found, _, text = lines[i].partition(b" ")
        lines[i] = found + b" " + as_text(mutated(rng, json.loads(text))).encode()
    if forged:
        before = b""
        for i, line in enumerate(lines):
            text = line.partition(b" ")[2]
            before = hashlib.blake2b(before + text, digest_size=8).hexdigest().encode()
            lines[i] = before + b" " + text
    return b"\n".join(lines) + b"\n"


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Return bytes of which some are changed, gone, doubled or new."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(BYTES)(rng, data)
    return data


def _place(rng: Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1) if rng.random() < 0.6 else min(len(data), rng.randrange(64))


def _flip(rng: Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _overwrite(rng: Random, data: bytes) -> bytes:
    at, new = _place(rng, data), rng.randbytes(rng.choice((1, 1, 2, 8, 64)))
    return data[:at] + new + data[at + len(new) :]


def _insert(rng: Random, data: bytes) -> bytes:
    at, words = (
        _place(rng, data),
        (b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"}", b"]", b"\\ud800", b"-", b"9" * 4500),
    )
    return data[:at] + rng.choice(words) * rng.choice((1, 1, 5)) + data[at:]


def _cut(rng: Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return rng.choice((data[:at], data[at:], data[:at] + data[at + rng.choice((1, 8, 100)) :]))


def _double(rng: Random, data: bytes) -> bytes:
    at, size = _place(rng, data), rng.choice((1, 16, 200))
    return data[:at] + data[at : at + size] * rng.choice((2, 3)) + data[at + size :]


def _number(rng: Random, data: bytes) -> bytes:
    """Overwrite eight, four or two bytes by a number that no size or offset can be."""
    form, values = rng.choice(
        (("<Q", (0, 2**63, 2**64 - 1, 2**40, 100_000_001)), ("<I", (0, 2**31, 2**32 - 1)), ("<H", (0, 65535)))
    )
    new, at = struct.pack(form, rng.choice(values)), _place(rng, data)
    return data[:at] + new + data[at + len(new) :]


def _swap(rng: Random, data: bytes) -> bytes:
    a, b = sorted((_place(rng, data), _place(rng, data)))
    return data[b:] + data[a:b] + data[:a]


BYTES: list[Callable[[Random, bytes], bytes]] = [_flip, _overwrite, _insert, _cut, _double, _number, _swap]

OPCODES = [
    b"\x96" + struct.pack("<Q", 2**40),  # a bytearray of a terabyte
    b"\x96" + struct.pack("<Q", 2**30) + b"abc",
    b"\x8e" + struct.pack("<Q", 2**40),  # bytes
    b"\x8d" + struct.pack("<Q", 2**36) + b"abc",  # a text
    b"X" + struct.pack("<I", 2**32 - 1),
    b"T" + struct.pack("<i", 2**31 - 1),
    b"\x95" + struct.pack("<Q", 2**40),  # a frame
    b"\x8b" + struct.pack("<i", 2**31 - 1),  # an integer of two gigabytes
    b"\x8b" + struct.pack("<i", 3000) + b"\x7f" * 3000,  # one of 7,225 digits
    b"I" + DIGITS.encode() + b"\n",
    b"L" + DIGITS.encode() + b"L\n",
    b"Fnan\n", b"Finf\n", b"G" + struct.pack(">d", 1e308), b"N", b"\x88", b"K\x00", b"K\xff", b"M\xff\xff",
    b"J" + struct.pack("<i", -1), b"J" + struct.pack("<i", 2**31 - 1), b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
    b"r" + struct.pack("<I", 2**31 - 1), b"q\x00", b"\x94", b"j" + struct.pack("<I", 2**31 - 1), b"h\x00",
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"(", b")", b"]", b"}", b"\x8f", b"t", b"R", b"b", b"u",
    b"e", b"s", b"Q", b"0", b"2", b".", b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"\x93", b"V\\ud800\n",
    b"X\x03\x00\x00\x00\xed\xa0\x80", b"X\x01\x00\x00\x00\x00", b"X\x00\x00\x00\x00",
]  # fmt: skip


def mutated_pickle(rng: Random, data: bytes) -> bytes:
    """Return a pickle with opcodes replaced, removed, doubled, swapped, or new hostile ones."""
    starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        i = rng.randrange(len(parts))
        kind = rng.randrange(6)
        if kind == 0:
            parts[i] = rng.choice(OPCODES)
        elif kind == 1:
            parts.insert(i, rng.choice(OPCODES))
        elif kind == 2 and len(parts) > 2:
            del parts[i]
        elif kind == 3:
            parts.insert(i, rng.choice(parts))
        elif kind == 4:
            j = rng.randrange(len(parts))
            parts[i], parts[j] = parts[j], parts[i]
        else:  # one argument for another
            numbers = [k for k, part in enumerate(parts) if part[:1] in b"KMJ"]
            texts = [k for k, part in enumerate(parts) if part[:1] == b"X"]
            if numbers and rng.random() < 0.7:
                parts[rng.choice(numbers)] = rng.choice([part for part in OPCODES if part[:1] in b"KMJ\x8a\x8bINFG"])
            elif texts:
                text = rng.choice(NAMES).encode("utf-8", "surrogatepass")
                parts[rng.choice(texts)] = b"X" + struct.pack("<I", len(text)) + text
    return b"".join(parts)


def damage_content(rng: Random, path: Path) -> None:
    """Damage what is in a file: JSON and safetensors mostly in their values, all else in its bytes."""
    formats = {".json": mutated_json, ".jsonl": mutated_lines, ".safetensors": mutated_safetensors}
    path.write_bytes(formats.get(path.suffix, mutated_bytes)(rng, path.read_bytes()))


def damage_files(rng: Random, path: Path) -> None:
    """Damage what a path is: gone, empty, a folder, a link that leads out, in a circle or nowhere."""
    data = path.read_bytes()
    kind = rng.randrange(6)
    path.unlink()
    if kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", "/dev/null", path.name, "../../missing", "..")))
    elif kind == 4:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    elif kind == 5:
        path.with_name(path.name + ".old").write_bytes(data)
