"""Plain data that epimer writes as JSON and reads again, with a hash of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH = "sha256"
"""the key under which plain data holds its own hash"""


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with a hash of itself, in the place of one that it may have."""
    return {**data, HASH: data_hash(data)}


def is_intact(data: Mapping[str, Any]) -> bool:
    """Whether plain data is what `sealed` returned; True where it has no hash, as older versions wrote it."""
    try:
        return HASH not in data or data[HASH] == data_hash(data)
    except RecursionError:  # nothing that epimer writes is that deep
        return False


def data_hash(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain data as JSON, without its own and whatever the order of its keys."""
    content = {key: value for key, value in data.items() if key != HASH}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
