"""`epimer extract-lora`: write what a model learnt since its base as a LoRA adapter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option
from epimer.records import MergeRecord


@app.command()
def extract_lora(
    finetuned: Annotated[str, argument("The fine-tuned model: a folder, a file or a hub id.")],
    base: Annotated[str, option("The model it was fine-tuned from.", "--base")],
    rank: Annotated[int, option("Rank of every layer at most.", "--rank", "-r")],
    out: Annotated[Path, option("The adapter's folder to make.", "--out", "-o")],
    dtype: Annotated[str | None, option("Of the factors, as bfloat16.", default="float32")] = None,
    device: options.Device = "auto",
    max_memory: options.MaxMemory = None,
    workers: options.Workers = None,
    overwrite: options.Overwrite = False,
    record: Annotated[Path | None, option("Also write the record with timings to this file.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model: the best of a rank for every linear layer, with its error.

    What is no linear layer and moved (norms, embeddings, biases) is written whole, as PEFT's modules_to_save.
    """
    from epimer.api import extract_lora as run
    from epimer.atomic_files import check_file

    check_file(record)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stoppable("the same command goes on from here"):
            result = run(
                finetuned, base, out, rank, dtype=dtype, device=device, max_memory=max_memory, workers=workers,
                overwrite=overwrite, progress=not (quiet or as_json),
            )  # fmt: skip
    show = partial(_print_result, result, out, [str(warning.message) for warning in caught])
    render.output(result.to_dict(), show, file=record, as_json=as_json, quiet=quiet)


def _print_result(record: MergeRecord, out: Path, notes: Sequence[str]) -> None:
    layers = {name: one for name, one in record.tensors.items() if one.error is not None}
    rows = [[name, render.shape(one.shape), f"{one.error:.4f}"] for name, one in layers.items()]
    render.print_table(["layer", "shape", "relative error"], rows, text_columns=2)
    errors = [one.error for one in layers.values() if one.error is not None]
    worst = f"; relative error {min(errors):.3g} to {max(errors):.3g}" if errors else ""
    whole = len(record.tensors) - len(layers)
    written = render.size(sum(record.files.values()))
    render.print_text(f"{out}: {len(layers)} layers as factors, {whole} tensors whole, {written}{worst}")
    render.print_notes(notes)
