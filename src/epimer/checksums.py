"""Checksums of plain data that epimer writes as JSON and reads again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
"""the key under which plain data holds its own checksum"""


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with a checksum of itself, in the place of one that it may have."""
    return {**data, CHECKSUM: _checksum(data)}


def is_intact(data: Mapping[str, Any]) -> bool:
    """Whether plain data is what `sealed` returned; True where it has no checksum, as older versions wrote it."""
    try:
        return CHECKSUM not in data or data[CHECKSUM] == _checksum(data)
    except RecursionError:  # nothing that epimer writes is that deep
        return False


def _checksum(data: Mapping[str, Any]) -> str:
    """Return a hash of plain data as it is once it was written and read; the order of keys does not matter."""
    plain = json.loads(json.dumps({key: value for key, value in data.items() if key != CHECKSUM}))
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()
