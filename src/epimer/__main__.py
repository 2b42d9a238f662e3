"""`python -m epimer`, which torchrun needs."""

from epimer.cli import run

run()
