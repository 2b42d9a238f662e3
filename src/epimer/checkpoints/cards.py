"""What the model card of a model says about it in the head of its README.md: license, pipeline tag and library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from epimer.checkpoints.sidecar_files import read_sidecar
from epimer.yaml_values import yaml_value

CARD = "README.md"
KEYS = ("license", "license_name", "license_link", "pipeline_tag", "library_name")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LINK = re.compile(r"https://[A-Za-z0-9._~:/?#@!$&*+,;=%-]{1,200}")
LONGEST = 1 << 16  # bytes of a head that is read


def card_head(folder: Path) -> dict[str, str]:
    """Return the known keys in the head of a folder's README.md whose values are single words, or a link where due."""
    text = (read_sidecar(folder, CARD) or b"")[:LONGEST].decode("utf-8", "replace").lstrip("\ufeff")
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---" or "---" not in (rest := [line.rstrip() for line in lines[1:]]):
        return {}
    try:
        head: Any = yaml_value("\n".join(rest[: rest.index("---")]))
    except ValueError:
        return {}
    found: dict[str, str] = {}
    for key in KEYS if isinstance(head, dict) else ():
        value = head.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(value, str) and (LINK if key == "license_link" else WORD).fullmatch(value):
            found[key] = value
    return found
