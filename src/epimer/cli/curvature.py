"""`epimer curvature`: measure the curvature of a model's loss."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epimer.cli import options, render
from epimer.cli.app import app, stoppable
from epimer.cli.options import argument, option
from epimer.errors import listed

if TYPE_CHECKING:
    from epimer.curvature.curvature import Curvature

DATA = "A .jsonl, .json, .csv, .tsv, .parquet or .txt file, an image folder, or a hub dataset id."
KINDS = (
    "kronecker (epimer_kron, mats, regmean), ekfac (epimer_kron, mats), diagonal (epimer, fisher), "
    "samples (epimer_exact), hessian or ggn (with --basis: epimer_exact)."
)
TASKS = (
    "causal-lm, text-classification, image-classification, seq2seq-lm, image-text-to-text or "
    "automatic-speech-recognition."
)
RECIPE = "The merge it is for: where the whole is too large, it is measured in a basis of that recipe's models."
NOT_REQUESTED = ("engine", "address", "shards", "plugin", "as_json", "quiet")  # options that are about how, not what


@app.command()
def curvature(
    model: Annotated[str, argument("A model folder, a hub id, or base+adapter.")],
    out: Annotated[Path, option("The curvature folder to make.", "--out", "-o")],
    task: Annotated[str, option(TASKS)],
    data: Annotated[str | None, option(DATA)] = None,
    at: Annotated[str | None, option("Measure the model's task at the tensors of this merged model.")] = None,
    kind: Annotated[str | None, option(KINDS, default="kronecker")] = None,
    samples: Annotated[int | None, option("How many samples to measure on.", default="256")] = None,
    fraction: Annotated[float | None, option("Share of the data instead, as 0.005; one batch at least.")] = None,
    labels: Annotated[str, typer.Option(help="model (sampled from its prediction), true or expected.")] = "model",
    seed: Annotated[int, typer.Option(help="Of the choice of samples and of sampled labels.")] = 0,
    basis: Annotated[Path | None, option("Keep only what lies in this basis (epimer basis).")] = None,
    recipe: Annotated[Path | None, option(RECIPE)] = None,
    layers: Annotated[list[str] | None, option("Name pattern of tensors to measure; may be repeated.")] = None,
    passes: Annotated[
        int | None, option("Passes over the data, some tensors in each; same result.", default="as memory asks for")
    ] = None,
    sequence: Annotated[str, typer.Option(help="How tokens enter Kronecker factors: expand or reduce.")] = "expand",
    split: Annotated[str | None, option("Split of a data set.", default="train")] = None,
    subset: Annotated[str | None, option("Configuration of a data set.")] = None,
    text: Annotated[
        str | None, option("Column of texts, or prompt,answer, or source,target.", default="text, messages, …")
    ] = None,
    label: Annotated[str | None, option("Column of labels.", default="label, labels")] = None,
    image: Annotated[str | None, option("Column of images.", default="image, img")] = None,
    audio: Annotated[str | None, option("Column of recordings.", default="audio, file, path")] = None,
    head: Annotated[Path | None, option("A classifier outside the model: safetensors with weight and bias.")] = None,
    pooling: Annotated[str, typer.Option(help="Features for --head: auto, pooler, cls or mean.")] = "auto",
    optimizer: Annotated[Path | None, option("Read Adam's moments from this optimizer.pt instead of --data.")] = None,
    factors: Annotated[
        Path | None, option("Read factors of kronfluence or bergson from this folder instead of --data.", "--import")
    ] = None,
    moment: Annotated[str, typer.Option(help="Which of Adam's moments: second, or first (squared).")] = "second",
    no_inputs: Annotated[bool, option("Do not store inputs (tokens, pixels) in the folder.", "--no-inputs")] = False,
    batch_size: Annotated[int, typer.Option(help="Samples at a time.")] = 16,
    max_length: Annotated[int, typer.Option(help="Most tokens of a text.")] = 512,
    dtype: Annotated[str, typer.Option(help="What the model computes in; sums are in float32 or wider.")] = "float32",
    device: options.Device = "auto",
    engine: options.Engine = "local",
    address: options.Address = None,
    shards: Annotated[
        int | None, option("Parts of the data with --engine ray.", default="one per GPU or machine")
    ] = None,
    plugin: options.Plugins = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the curvature of a model's loss on a little data, for every later merge.

    Without labels it is measured under the model's own predictions, which is the default.
    Its inputs (tokens or pixels, no labels; at most 256) are stored with it, to judge merges on; see --no-inputs.
    Several processes share the data: torchrun --nproc-per-node 2 -m epimer curvature …, or --engine ray.
    """
    fields = {name: value for name, value in locals().items() if name not in NOT_REQUESTED}
    options.load_plugins(plugin)

    from epimer.api.measuring import measure_curvature
    from epimer.curvature.distributed import leave
    from epimer.curvature.measure import Request
    from epimer.engine.options import RunOptions

    request = Request(**{**fields, "layers": tuple(layers or ()), "progress": not (quiet or as_json)})
    run = RunOptions(device, engine=engine, address=address, progress=request.progress)
    with stoppable("nothing was written"), render.printed_warnings(shown=not (quiet or as_json)):
        result = measure_curvature(request, run, shards)
    if result is not None and not quiet:
        _print_result(result, out, at, as_json=as_json)
    leave()


def _print_result(result: Curvature, out: Path, at: str | None, *, as_json: bool) -> None:
    from epimer.curvature.format import NUMBERS

    about, clipped = result.provenance, result.clipped
    stored = (out.expanduser() / NUMBERS).stat().st_size
    if as_json:
        totals = {"tensors": len(result), "bytes": stored, "clipped": clipped}
        return render.print_json(asdict(about) | totals)
    source = about.source
    if about.samples is not None and source == "data":
        source = f"{about.samples} samples, {about.tokens} tokens, {about.labels} labels"
    kind = f"projected {result.kind}" if about.basis else result.kind
    render.print_text(f"{out}: {kind} of {len(result)} tensors, {render.size(stored)} ({source})")
    lines = [] if at is None else [f"measured at {at} (fingerprint {about.at})."]
    for reason in dict.fromkeys(about.left_out.values()):
        names = [name for name, why in about.left_out.items() if why == reason]
        lines.append(f"left out {listed(names)}: {reason}.")
    if clipped:
        worst = max(clipped, key=lambda name: clipped[name])
        most = f"most in {worst}: {clipped[worst]:.1%} of its spectrum"
        lines.append(f"negative curvature taken as 0 in {len(clipped)} tensors, {most}.")
    render.print_notes(lines)
