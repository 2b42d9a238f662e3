"""Result files of the benchmarks: JSON that names the code, the machine and the command it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epimer.evaluation.provenance import provenance


def write_result(path: Path, content: Mapping[str, Any], **settings: Any) -> None:
    """Write a benchmark's numbers, with their provenance under `made`.

    Args:
        path: of the JSON file.
        content: the numbers. The benchmark's parameters go here too.
        settings: what else the numbers depend on: `seed` where a script draws random numbers, versions of peers.
    """
    result = {"made": provenance(**settings), **content}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
