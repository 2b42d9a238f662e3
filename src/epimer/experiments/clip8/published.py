"""Averages that others report for the same eight tasks, shown next to ours; not comparable across families."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

import yaml

PAPER = "paper (task_vectors)"
FUSION_BENCH = "FusionBench (tanganke)"
FAMILY_SOURCES = {"tanganke": FUSION_BENCH, "task_vectors": PAPER}
"""family of checkpoints -> whose numbers are of the same checkpoints"""

_FILE = yaml.safe_load(files(__package__).joinpath("published.yaml").read_text(encoding="utf-8"))
SOURCES: Mapping[str, str] = _FILE["sources"]
"""source -> where its numbers stand"""
PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = _FILE["averages"]
"""variant -> source -> method -> average"""


def remarks(family: str) -> list[str]:
    """Return notes for readers of published numbers next to those of a family of checkpoints."""
    other = next(source for name, source in FAMILY_SOURCES.items() if name != family)
    return [
        f"WARNING: never compare across checkpoint families. These are the {family} checkpoints; '{other}' is of "
        "others, fine-tuned by other people in another way, and its column is no baseline for the rows here.",
        f"'{FAMILY_SOURCES[family]}' is of these checkpoints, but with its authors' prompts, scales and splits.",
        "The paper's average and task_arithmetic are one row, at λ = 1/8 without rescaling, and its linear probing is "
        "in our row zero-shot; FusionBench's task_arithmetic and ties are at λ = 0.3, not chosen.",
        "The checkpoints were fine-tuned on the split that val is taken from, so scales are chosen on images that the "
        "models have seen.",
        *(f"{source}: {where}." for source, where in SOURCES.items()),
    ]
