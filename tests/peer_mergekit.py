"""mergekit's console script `mergekit-yaml`, in a process of its own: only its output is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Called once per recipe without starting Python each time.
COMMAND = """
import importlib.metadata, sys
command = importlib.metadata.entry_points(group="console_scripts", name="mergekit-yaml")["mergekit-yaml"].load()
flags, recipes = [one for one in sys.argv[1:] if one[:2] == "--"], [one for one in sys.argv[1:] if one[:2] != "--"]
for recipe in recipes:
    out = recipe.removesuffix(".yaml") + ".mergekit"
    try:
        command([recipe, out, *flags], standalone_mode=False)
    except Exception as error:
        print(f"{recipe}: {type(error).__name__}: {error}", file=sys.stderr)
"""


def run_mergekit(recipes: Iterable[Path], folder: Path, *flags: str) -> str:
    """Merge every recipe, from within a folder, into one beside it with the suffix .mergekit; return its errors."""
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMAND, *map(str, recipes), "--no-write-model-card", "--quiet", *flags]
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True).stderr
