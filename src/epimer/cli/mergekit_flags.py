"""The options of `mergekit-yaml` on `epimer merge`: each becomes one of ours, or one line says what holds instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from epimer.errors import ParameterError

SAME = {
    "--cuda": ("--device", "cuda"),
    "--no-cuda": ("--device", "cpu"),
    "--gpu-rich": ("--device", "auto"),
    "--multi-gpu": ("--device", "auto"),
}
WITH_VALUE = {"-j": "--workers", "--num-threads": "--workers", "--out-path": ""}
"""options that take a value -> ours; an argument where there is no name"""
NEEDLESS = {
    "--copy-tokenizer": "the tokenizer is always copied",
    "--lazy-unpickle": "tensors are always read one at a time, and nothing in a file is run",
    "--low-cpu-memory": "memory is limited by --max-memory",
    "--read-to-gpu": "tensors are read ahead while others are merged",
    "--async-write": "tensors are written while others are merged",
    "--clone-tensors": "a layer can be stacked several times",
    "--write-model-card": "a README.md is always written",
    "--safe-serialization": "safetensors are always written",
    "--allow-crimes": "models that do not fit together are refused all the same",
    "--trust-remote-code": "no code of a model is ever run",
    "--unsafe-truncate-embeddings": "rows of embeddings are aligned by token",
}
"""switches that change nothing here -> why"""
NEEDLESS_WITH_VALUE = {
    "--write-threads": "tensors are written while others are merged",
    "--lora-merge-cache": "adapters are merged without a copy of their base",
    "--lora-merge-dtype": "adapters are applied in float32",
}
REFUSED = {
    "--random-seed": "write the seed into the recipe: parameters: {seed: N}",
    "--transformers-cache": "set the variable HF_HUB_CACHE to the folder",
}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class MergeCommand(TyperCommand):
    """A command that understands mergekit's options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments of which some may be mergekit's."""
        ours, notes = translate(args)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        return super().parse_args(ctx, ours)


def translate(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments with mergekit's options replaced by ours, and what to tell about those that have no effect."""
    ours: list[str] = []
    notes: list[str] = []
    left = list(args)
    while left:
        arg = left.pop(0)
        name, _, given = arg.partition("=") if arg.startswith("--") else (arg, "", "")
        positive = name.replace("--no-", "--", 1)
        if name in SAME:
            ours += SAME[name]
        elif name in REFUSED:
            raise ParameterError(f"{name} is an option of mergekit; here, {REFUSED[name]}.")
        elif name in WITH_VALUE:
            value = given or _value(name, left)
            ours += [WITH_VALUE[name], value] if WITH_VALUE[name] else [value]
        elif name == "--out-shard-size":
            size = _shard_size(given or _value(name, left))
            ours += ["--max-shard-size", size]
            notes.append(f"{name} counts parameters; taken as --max-shard-size {size}, 2 bytes for each.")
        elif name in NEEDLESS_WITH_VALUE:
            given = given or _value(name, left)
            notes.append(f"{name} has no effect: {NEEDLESS_WITH_VALUE[name]}.")
        elif name in NEEDLESS or positive in NEEDLESS:
            notes.append(f"{name} has no effect: {NEEDLESS[positive]}.")
        elif name not in ("-v", "--no-quiet", "--no-multi-gpu"):
            ours.append(arg)
    return ours, notes


def _value(name: str, left: list[str]) -> str:
    if not left:
        raise ParameterError(f"{name} needs a value.")
    return left.pop(0)


def _shard_size(text: str) -> str:
    """Return the bytes of so many parameters of two bytes each, as 5B is 10000000000B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None:
        raise ParameterError(f"--out-shard-size must be a number of parameters, as 5B; got {text!r}.")
    return f"{int(2 * float(match[1]) * UNITS[match[2]]) / 1e9:g}GB"
