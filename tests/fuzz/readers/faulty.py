"""A reader with every fault that the harness must notice."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from epimer.errors import EpimerError
from fuzz.harness import MEMORY, ROOM, Reader

FAULTS = {
    "none": None,
    "refusal": None,
    "slow": None,
    "error": "KeyError",
    "result": "AssertionError",
    "time": "TooLongError",
    "hang": "it hung",
    "memory": "MiB of memory",
    "address space": "MemoryError",
    "death": "its process died",
}
"""what may be wrong -> what is said of it; None where nothing is"""


SLOW = 1.5  # seconds of processor time


def _damage(rng: Random, folder: Path) -> None:
    (folder / "fault").write_text(fault(rng))


def fault(rng: Random) -> str:
    return rng.choice(tuple(FAULTS))


def _read(folder: Path) -> None:
    match (folder / "fault").read_text():
        case "refusal":
            raise EpimerError("it is damaged; copy it again.")
        case "error":
            raise KeyError("it")
        case "result":
            raise AssertionError("it is another")
        case "slow":
            end = time.process_time() + SLOW
            while time.process_time() < end:
                pass
        case "time":
            while True:
                pass
        case "hang":
            time.sleep(3600)
        case "memory":
            bytearray(MEMORY + (1 << 26))
        case "address space":
            bytearray(2 * ROOM)
        case "death":
            os.abort()


FAULTY = Reader("faulty", lambda folder: None, _damage, _read)
