"""What a process is said to have in memory is its own."""

import subprocess
import sys

from epimer.engine.memory import peak_memory

BALLAST = 400_000_000
CODE = """
from epimer.engine.memory import peak_memory
before = peak_memory()
held = bytearray(b"1") * 200_000_000
del held
print(before, peak_memory())
"""


def test_the_peak_is_not_the_one_of_the_process_that_started_this_one():
    held = bytearray(b"1") * BALLAST  # in memory while the other process is started
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert len(held) == BALLAST <= peak_memory()
    assert 1_000_000 < before < BALLAST
    assert before + 190_000_000 < after < before + 210_000_000
