"""`epimer inspect`: list the tensors of a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

from epimer.cli import options, render
from epimer.cli.app import app
from epimer.cli.options import argument


@app.command()
def inspect(
    path: Annotated[str, argument("A file, a model folder, a hub id, or base+adapter.")],
    as_json: options.Json = False,
) -> None:
    """List a checkpoint's tensors: names, shapes, dtypes, sizes, ties, fingerprint."""
    from epimer.checkpoints import open_checkpoint

    model = open_checkpoint(path, progress=not as_json, as_stored=True)
    tensors: list[dict[str, Any]] = [
        {
            "name": name, "shape": list(W.shape), "dtype": model.packed.get(name, render.dtype(W)),
            "bytes": model.size(name), "fingerprint": model.fingerprints[name], "tied_to": model.ties.get(name),
        }
        for name, W in model.headers.items()
    ]  # fmt: skip
    untied = [name for name in model.headers if name not in model.ties]
    total = sum(model.size(name) for name in untied)
    entries = sum(model.headers[name].numel() for name in untied)
    if as_json:
        totals = {"name": model.name, "fingerprint": model.fingerprint, "bytes": total, "entries": entries}
        return render.print_json({**totals, "tensors": tensors})
    rows = []
    for tensor in tensors:
        sizes = [render.shape(tensor["shape"]), tensor["dtype"], render.size(tensor["bytes"])]
        rows.append([tensor["name"], *sizes, tensor["fingerprint"], tensor["tied_to"] or ""])
    render.print_table(["tensor", "shape", "dtype", "size", "fingerprint", "tied to"], rows)
    counts = f"{len(rows)} tensors, {entries:,} entries, {render.size(total)}"
    render.print_text(f"{counts}, fingerprint {model.fingerprint}")
