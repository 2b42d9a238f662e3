"""Averages that others report for the same eight tasks, shown next to ours; not comparable across families.

Accuracies in percent, by the names that our tables have for the methods.
"""

from __future__ import annotations

from collections.abc import Mapping

PAPER = "paper (task_vectors)"
FUSION_BENCH = "FusionBench (tanganke)"
FAMILY_SOURCES = {"tanganke": FUSION_BENCH, "task_vectors": PAPER}
"""family of checkpoints -> whose numbers are of the same checkpoints"""

COLUMNS = [(variant, source) for variant in ("B/32", "B/16", "L/14") for source in (PAPER, FUSION_BENCH)]
TABLE = """
zero-shot        48.0  48.2   55.3  55.3   64.9  64.6
fine-tuned       90.9  90.3   92.9  92.3   94.3  94.3
average          65.3  66.5   71.0  72.3   79.1  80.0
task_arithmetic  65.3  68.0   71.0  77.1   79.1  80.7
ties             72.5  72.2   77.4  77.5   85.9  84.0
fisher           53.9  70.6   62.5  74.2   72.0  80.3
regmean             -  82.4      -  86.0      -  90.4
tsv              82.2  83.1   86.5     -   90.6     -
iso_c               -  82.8      -     -      -     -
wudi                -  84.5      -     -      -     -
epimer           83.3     -   87.0     -   90.6     -
"""


def _parse(table: str) -> dict[str, dict[str, dict[str, float]]]:
    parsed: dict[str, dict[str, dict[str, float]]] = {}
    for line in table.strip().splitlines():
        method, *cells = line.split()
        for (variant, source), cell in zip(COLUMNS, cells, strict=True):
            if cell != "-":
                parsed.setdefault(variant, {}).setdefault(source, {})[method] = float(cell)
    return parsed


PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = _parse(TABLE)
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
    ]
