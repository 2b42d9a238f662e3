"""Damage to files and to plain data, seeded: what disks, copies, editors and strangers do to what we have written."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

STRANGE = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "", "x", "-1",
    "\ud800", "a\0b", "../x", "x" * 5000, [], {}, [[]], [None], {"x": {}}, [1, "two", None],
)  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return some bytes with a part flipped, cut off, removed, inserted or doubled."""
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    match rng.randrange(6):
        case 0:
            return data[:a] + bytes([data[a] ^ (1 << rng.randrange(8))]) + data[a + 1 :]
        case 1:
            return data[:a]
        case 2:
            return data[:a] + data[min(b, a + 40) :]
        case 3:
            return data[:a] + rng.randbytes(rng.randint(1, 8)) + data[a:]
        case 4:
            return data[:b] + data[a:]
        case _:
            return data[:a] + bytes(min(512, len(data) - a)) + data[a + 512 :]


def damaged_data(value: Any, rng: random.Random) -> Any:
    """Return plain data with one value replaced, removed, renamed, doubled or exchanged with its neighbour."""
    value = copy.deepcopy(value)
    places = _places(value)
    if not places:
        return rng.choice(STRANGE)
    holder, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("x", "\ud800", str(key)[:-1]))] = holder.pop(key)
        case 1 | 2 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 3:
            other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        case 4 if isinstance(holder[key], int | float):
            holder[key] = rng.choice((-holder[key], holder[key] + 1, holder[key] * 2, str(holder[key])))
        case _:
            holder[key] = rng.choice(STRANGE)
    return value


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """Return the text of a JSON file with damage to its bytes or to its values."""
    if rng.random() < 0.35:
        return damaged_bytes(data, rng)
    return json.dumps(damaged_data(json.loads(data), rng), indent=2).encode()


def damaged_lines(lines: list[bytes], rng: random.Random) -> list[bytes]:
    """Return lines with one doubled, removed or moved."""
    lines = list(lines)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(i, lines[i])
        case 1:
            del lines[i]
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case _:
            lines.insert(j, lines[i])
    return lines


def damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with damage to its bytes or to its header."""
    if rng.random() < 0.5:
        return damaged_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    match rng.randrange(5):
        case 0:
            header[one], header[other] = header[other], header[one]
        case 1:
            header[one]["shape"] = rng.choice((header[one]["shape"][::-1], [*header[one]["shape"], 1]))
        case 2:  # another type of the same width
            dtype = header[one]["dtype"]
            header[one]["dtype"] = rng.choice([d for d in SAME_WIDTH.get(dtype, (dtype,)) if d != dtype] or [dtype])
        case 3:
            header[f"{one[:-1]}{rng.choice('UVxFAG')}"] = header.pop(one)
        case _:
            header = damaged_data(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


SAME_WIDTH = {
    "F32": ("F32", "I32", "U32"), "I32": ("F32", "I32", "U32"), "F64": ("F64", "I64", "U64", "C64"),
    "I64": ("F64", "I64", "U64", "C64"), "F16": ("F16", "BF16", "I16", "U16"), "BOOL": ("U8", "I8", "F8_E4M3"),
}  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every value of plain data as its holder and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]
