"""The examples run as they are and print what they say they print."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "every_method": "epimer_free",
    "measure_curvature": "epimer_kron",
    "merge_folders": "epimer merge",
    "own_method": "stock_with_floor",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_run(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert SAYS[name] in ran.stdout
