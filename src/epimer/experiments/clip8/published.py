"""What others report for the same eight tasks, to be printed beside our numbers and not to be compared across families.

Average accuracies in percent, by the name our tables have for the method.
"""

from __future__ import annotations

from collections.abc import Mapping

PAPER = "paper (task_vectors)"
FUSION_BENCH = "FusionBench (tanganke)"

PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "B/32": {
        PAPER: {
            "zero-shot": 48.0,
            "fine-tuned": 90.9,
            "average": 65.3,
            "task_arithmetic": 65.3,
            "ties": 72.5,
            "fisher": 53.9,
            "tsv": 82.2,
            "epimer": 83.3,
        },
        FUSION_BENCH: {
            "zero-shot": 48.2,
            "fine-tuned": 90.3,
            "average": 66.5,
            "task_arithmetic": 68.0,
            "ties": 72.2,
            "fisher": 70.6,
            "regmean": 82.4,
            "tsv": 83.1,
            "iso_c": 82.8,
            "wudi": 84.5,
        },
    },
    "B/16": {
        PAPER: {
            "zero-shot": 55.3,
            "fine-tuned": 92.9,
            "average": 71.0,
            "task_arithmetic": 71.0,
            "ties": 77.4,
            "fisher": 62.5,
            "tsv": 86.5,
            "epimer": 87.0,
        },
        FUSION_BENCH: {
            "zero-shot": 55.3,
            "fine-tuned": 92.3,
            "average": 72.3,
            "task_arithmetic": 77.1,
            "ties": 77.5,
            "fisher": 74.2,
            "regmean": 86.0,
        },
    },
    "L/14": {
        PAPER: {
            "zero-shot": 64.9,
            "fine-tuned": 94.3,
            "average": 79.1,
            "task_arithmetic": 79.1,
            "ties": 85.9,
            "fisher": 72.0,
            "tsv": 90.6,
            "epimer": 90.6,
        },
        FUSION_BENCH: {
            "zero-shot": 64.6,
            "fine-tuned": 94.3,
            "average": 80.0,
            "task_arithmetic": 80.7,
            "ties": 84.0,
            "fisher": 80.3,
            "regmean": 90.4,
        },
    },
}
"""variant -> who -> method -> average"""

OWN = {"tanganke": FUSION_BENCH, "task_vectors": PAPER}
"""whose numbers are of the same checkpoints"""


def remarks(family: str) -> list[str]:
    """Return what to know when reading published numbers beside ours."""
    other = next(who for of, who in OWN.items() if of != family)
    return [
        f"WARNING: never compare across checkpoint families. These are the {family} checkpoints; '{other}' is of "
        "others, fine-tuned by other people in another way, and its column is no baseline for the rows here.",
        f"'{OWN[family]}' is of these checkpoints, but with its authors' prompts, scales and splits.",
        "The paper's average and task_arithmetic are one row, at λ = 1/8 without rescaling, and what it calls linear "
        "probing is beside zero-shot; FusionBench's task_arithmetic and ties are at λ = 0.3, not chosen.",
        "The checkpoints were fine-tuned on the split that val is taken from, so scales are chosen on images that the "
        "models have seen.",
    ]
