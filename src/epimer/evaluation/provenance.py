"""Which versions made a record, and when."""

from __future__ import annotations

from datetime import date
from typing import Any

import torch

import epimer


def provenance(**settings: Any) -> dict[str, Any]:
    """Return the versions and the date that a record was made with, and the settings that it depends on."""
    return {"epimer": epimer.__version__, "torch": torch.__version__, "date": str(date.today()), **settings}
