"""Commands that measure curvature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import show
from epimer.cli.app import Json, Quiet, app, stoppable
from epimer.errors import EpimerWarning


@app.command()
def curvature(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or base+adapter.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The curvature folder to make.", show_default=False)],
    task: Annotated[
        str,
        typer.Option(help="causal-lm, text-classification or image-classification.", show_default=False),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl, .json, .csv, .tsv, .parquet or .txt file, an image folder, or a hub dataset id.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="kronecker (epimer_kron, mats, regmean), ekfac (epimer_kron, mats), diagonal (epimer, fisher), "
            "samples (epimer_exact), hessian or ggn (with --basis: epimer_exact).",
            show_default="kronecker",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="How many samples to measure on.", show_default="256")] = None,
    fraction: Annotated[
        float | None,
        typer.Option(help="Share of the data instead, as 0.005; one batch at least.", show_default=False),
    ] = None,
    labels: Annotated[str, typer.Option(help="model (sampled from its prediction), true or expected.")] = "model",
    seed: Annotated[int, typer.Option(help="Of the choice of samples and of sampled labels.")] = 0,
    basis: Annotated[
        Path | None, typer.Option(help="Keep only what lies in this basis (epimer basis).", show_default=False)
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="Name pattern of tensors to measure; may be repeated.", show_default=False)
    ] = None,
    sequence: Annotated[str, typer.Option(help="How tokens enter Kronecker factors: expand or reduce.")] = "expand",
    split: Annotated[str | None, typer.Option(help="Split of a data set.", show_default="train")] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a data set.", show_default=False)] = None,
    text: Annotated[str | None, typer.Option(help="Column of texts.", show_default="text, sentence, …")] = None,
    label: Annotated[str | None, typer.Option(help="Column of labels.", show_default="label, labels")] = None,
    image: Annotated[str | None, typer.Option(help="Column of images.", show_default="image, img")] = None,
    head: Annotated[
        Path | None,
        typer.Option(help="A classifier outside the model: safetensors with weight and bias.", show_default=False),
    ] = None,
    pooling: Annotated[str, typer.Option(help="Features for --head: auto, pooler, cls or mean.")] = "auto",
    optimizer: Annotated[
        Path | None,
        typer.Option(help="Read Adam's moments from this optimizer.pt instead of --data.", show_default=False),
    ] = None,
    moment: Annotated[str, typer.Option(help="Which of Adam's moments: second, or first (squared).")] = "second",
    batch_size: Annotated[int, typer.Option(help="Samples at a time.")] = 16,
    max_length: Annotated[int, typer.Option(help="Most tokens of a text.")] = 512,
    dtype: Annotated[str, typer.Option(help="What the model computes in; sums are in float32 or wider.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a curvature folder.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the curvature of a model's loss on a little data, for every later merge.

    Without labels it is measured under the model's own predictions, which is the default.
    Several processes share the data: torchrun --nproc-per-node 2 -m epimer curvature …
    """
    from epimer.curvature.distributed import leave
    from epimer.curvature.measure import Request, measure

    request = Request(
        model=model,
        task=task,
        out=out,
        data=data,
        split=split,
        subset=subset,
        text=text,
        label=label,
        image=image,
        head=head,
        pooling=pooling,
        kind=kind,
        labels=labels,
        sequence=sequence,
        samples=samples,
        fraction=fraction,
        seed=seed,
        basis=basis,
        layers=tuple(layers or ()),
        optimizer=optimizer,
        moment=moment,
        batch_size=batch_size,
        max_length=max_length,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
        progress=not (quiet or as_json),
    )
    with stoppable("nothing was written"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EpimerWarning)
        found = measure(request)
    if found is not None and not quiet:
        notes = [str(warning.message) for warning in caught if issubclass(warning.category, EpimerWarning)]
        show.curvature(found, out, notes, as_json=as_json)
    leave()


@app.command()
def basis(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The basis folder to make.", show_default=False)],
    kind: Annotated[
        str | None, typer.Option(help="tagged or tensor.", show_default="what the recipe's method takes")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Directions per task.", show_default="what the recipe says")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a basis folder.")] = False,
    quiet: Quiet = False,
) -> None:
    """Build the basis of a recipe's models, to measure only the curvature that lies in it.

    Give it to `epimer curvature --basis`, and to the recipe as `basis: FOLDER`.
    """
    from epimer.engine.basis import make_basis

    with stoppable("nothing was written"):
        made = make_basis(recipe, out, kind=kind, rank=rank, overwrite=overwrite, progress=not quiet)
    if not quiet:
        show.basis(made, out)
