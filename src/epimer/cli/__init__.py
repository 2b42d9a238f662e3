"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from epimer.cli import show
from epimer.errors import EpimerError, EpimerWarning

app = typer.Typer(
    help="Merge fine-tuned models of one ancestor into one model that keeps their skills.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def main() -> None:
    """Run the command line: exit 0 done, 2 the input is at fault, 1 epimer is."""
    try:
        sys.exit(app(standalone_mode=False))
    except EpimerError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the reader of our output has gone)
    except MemoryError:
        _fail("this machine has too little memory; set --max-memory to what it can spare.", 2)
    except Exception as error:
        if hasattr(error, "format_message") and not error.format_message():
            sys.exit(2)  # the help was shown
        if hasattr(error, "format_message"):
            _fail(error.format_message(), 2)
        if os.environ.get("EPIMER_DEBUG"):
            traceback.print_exc()
        _fail(
            f"epimer failed, and not through your input: {type(error).__name__}: {error} (EPIMER_DEBUG=1 shows where)",
            1,
        )


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    if "--json" in sys.argv and sys.argv[1:2] != ["diagnose"]:  # whose --json takes a file
        print(json.dumps({"error": line}))  # noqa: T201
    print(f"error: {line}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        import epimer

        typer.echo(f"epimer {epimer.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def merge(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    out: Annotated[Path | None, typer.Argument(help="The model folder to make.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its problems, do nothing.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    max_memory: Annotated[
        str | None, typer.Option(help="Most memory to use, as 3GB.", show_default="most of what is free")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even where it was measured on another model.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Tensors merged at a time.", show_default="one per core")] = None,
    threads: Annotated[int, typer.Option(help="Threads for each of them.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that epimer made.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Also write the record with timings to this file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge the models that a recipe names into a new model folder.

    The folder appears when it is complete. After a kill the same command goes on where it stopped.
    """
    from epimer.engine.merge import Options, plan_recipe, run
    from epimer.suites.sweeping import resolve

    options = Options(device, workers, threads, max_memory, max_shard_size, overwrite, not (quiet or as_json))
    if out is None and not dry_run:
        raise EpimerError("give the folder to make: epimer merge RECIPE OUT.")
    if record is not None and not record.parent.is_dir():
        raise EpimerError(f"{record} cannot be written: there is no folder {record.parent}; make it first.")
    with _stoppable("nothing was written"):
        chosen, why = resolve(recipe, progress=options.progress, any_curvature=any_curvature)
    wanted = recipe if chosen is None else chosen
    plan = plan_recipe(wanted, progress=options.progress, any_curvature=any_curvature, folder=recipe.parent)
    if why:
        plan.notes.append(f"auto took {why}.")
    if dry_run:
        show.plan(plan, options, as_json=as_json, quiet=quiet)
        if plan.problems:
            raise typer.Exit(2)
        return
    assert out is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _stoppable("the same command goes on from here"):
            done = run(plan, out, options)
    if record is not None:
        show.write(record, done.to_dict())
    if as_json:
        show.dump(done.to_dict())
    elif not quiet:
        show.done(done, out, [*plan.notes, *(str(warning.message) for warning in caught)])


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
    with _stoppable("nothing was written"), warnings.catch_warnings(record=True) as caught:
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

    with _stoppable("nothing was written"):
        made = make_basis(recipe, out, kind=kind, rank=rank, overwrite=overwrite, progress=not quiet)
    if not quiet:
        show.basis(made, out)


@app.command()
def diagnose(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all that was found to this JSON file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that shows it to this HTML file.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Directions per task.", show_default="what the recipe says, or 32")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Merges to forecast, with commas.", show_default="average, tsv, epimer_free and more"),
    ] = None,
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even if it was measured on another model.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """See before merging: which tasks and layers conflict, which rank and method to take, what each merge would lose.

    Works without data; where the recipe's models have a curvature folder, that is used.
    """
    from epimer.cli import findings
    from epimer.diagnosis.diagnose import diagnose as run

    show.check_file(json_file)
    show.check_file(html)
    wanted = findings.listed(methods, str, "--methods")
    with _stoppable("nothing was written"):
        found = run(recipe, rank=rank, methods=wanted, any_curvature=any_curvature, progress=not quiet)
    if json_file is not None:
        show.write(json_file, found.to_dict())
    if html is not None:
        show.page([found.to_dict()], html)
    if not quiet:
        findings.diagnosis(found)


@app.command()
def sweep(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    evaluation: Annotated[
        str,
        typer.Option(
            "--eval",
            help="A suite, agreement:SUITE (needs no labels), or module:function of a state dict.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Which, with commas.", show_default="average, tsv, iso_c, epimer_free and more")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Scales to try, with commas.", show_default="climbs from 1")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks to try, with commas.", show_default="each method's")] = None,
    keep_best: Annotated[
        Path | None, typer.Option(help="Write the best merge to this model folder.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that epimer made.")] = False,
    any_curvature: Annotated[
        bool, typer.Option("--any-curvature", help="Use curvature even where it was measured on another model.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the table to this JSON file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try many methods, ranks and scales: choose on validation data, report on test data, write only what is asked."""
    from epimer.cli import findings
    from epimer.suites.sweeping import sweep as run

    show.check_file(out)
    with _stoppable("nothing was written"), warnings.catch_warnings():
        warnings.simplefilter("ignore", EpimerWarning)
        found = run(
            recipe,
            evaluation,
            methods=findings.listed(methods, str, "--methods"),
            scales=findings.listed(scale, float, "--scale"),
            ranks=findings.listed(rank, int, "--rank"),
            keep_best=keep_best,
            overwrite=overwrite,
            any_curvature=any_curvature,
            progress=not (quiet or as_json),
        )
    if out is not None:
        show.write(out, found.to_dict())
    if as_json:
        show.dump(found.to_dict())
    elif not quiet:
        findings.sweep(found, keep_best)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put table, report and merged model.")] = Path(
        "epimer-demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Merge eight small vision models, trained on this machine, with every method, and compare.

    The first run trains them (about three minutes on two cores); later runs load them.
    """
    from epimer.suites.demo import run

    with _stoppable("the next run starts where whole parts were made"):
        found = run(out, progress=not quiet)
        show.page([found.result.to_dict(), found.diagnosis.to_dict()], out / "report.html")
    if not quiet:
        show.demo(found, out / "report.html")


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="glyphs8, clip8, a YAML file, or module:function.")] = "glyphs8",
    experiment: Annotated[
        list[str] | None, typer.Option(help="Which, by name, or all; may be repeated.", show_default="performance")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to put tables and figures.")] = Path("epimer-bench"),
    seed: Annotated[int, typer.Option(help="Of the suite and of the choice of samples.")] = 0,
    variant: Annotated[str | None, typer.Option(help="Of clip8: B/32, B/16 or L/14.", show_default="B/32")] = None,
    limit: Annotated[int | None, typer.Option(help="Of clip8: samples of each split.", show_default="all")] = None,
    family: Annotated[
        str | None, typer.Option(help="Of clip8's models: tanganke or task_vectors.", show_default="tanganke")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder with clip8's models.", show_default="the hub")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with clip8's datasets.", show_default="the hub")] = None,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments and ours on a suite: JSON, Markdown and figures."""
    from epimer.suites.run import run_experiments

    given = {"variant": variant, "limit": limit, "family": family, "checkpoints": checkpoints, "data": data}
    wanted = experiment or ["performance"]
    with _stoppable("what was finished is kept"):
        for result, files in run_experiments(suite, wanted, out, seed=seed, progress=not quiet, **given):
            if not quiet:
                show.experiment(result, files)


@app.command(name="eval")
def evaluate(
    suite: Annotated[
        str | None,
        typer.Argument(help="A suite: a YAML file, module:function, or a name as glyphs8.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model folder, a hub id, or base+adapter.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    limit: Annotated[int | None, typer.Option(help="Most samples of each task.", show_default="all")] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Also the base and each task's own model.")
    ] = True,
    harness: Annotated[str | None, typer.Option(help="lm-eval, instead of a suite.", show_default=False)] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of the harness, with commas.", show_default=False)] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with task files of your own for the harness.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Requests of the harness at a time.", show_default="16")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the result to this JSON file.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a model on every task of a suite, beside the base and the fine-tuned models.

    A suite is a YAML file (docs/evaluating.md) or a Python function. For language models there is lm-eval:
    epimer eval --harness lm-eval --tasks hellaswag --model PATH
    """
    from epimer.suites.ask import Question, ask

    question = Question(
        suite=suite,
        model=model,
        split=split,
        limit=limit,
        references=references,
        harness=harness,
        tasks=tasks,
        include=include_path,
        batch_size=batch_size,
        device=device,
        out=out,
        progress=not (quiet or as_json),
    )
    with _stoppable("nothing was written"):
        found = ask(question)
    if out is not None:
        show.write(out, found.to_dict())
    if as_json:
        show.dump(found.to_dict())
    elif not quiet:
        show.evaluation(found)


@contextmanager
def _stoppable(consequence: str) -> Iterator[None]:
    """Say what it means that the user stopped the work."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {consequence}.", err=True)
        raise typer.Exit(130) from None


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="JSON of bench, demo, diagnose or sweep, a model's epimer.json, or folders.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", show_default=False)],
    figures: Annotated[
        Path | None, typer.Option(help="Also put each figure into this folder, as SVG.", show_default=False)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make one page of what was measured: it needs no network, no server and no torch."""
    from epimer.report.write import make_report

    made = make_report(records, out, figures)
    if not quiet:
        more = f" and {len(made) - 1} figures in {figures}" if figures is not None else ""
        typer.echo(f"wrote {out} ({show.size(out.stat().st_size)}){more}")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A file, a model folder, a hub id, or base+adapter.", show_default=False)],
    as_json: Json = False,
) -> None:
    """List a checkpoint's tensors: names, shapes, dtypes, sizes, ties, fingerprint."""
    from epimer.checkpoints import open_checkpoint

    show.checkpoint(open_checkpoint(path, progress=not as_json), as_json=as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to see all about it.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """List the merging methods, or explain one."""
    from epimer.methods.registry import describe_method, list_methods

    rows = [describe_method(one) for one in ([name] if name else list_methods())]
    show.methods(rows, as_json=as_json, full=name is not None)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A torch file: .bin, .pt or .pth.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The .safetensors file to make.", show_default=False)],
    key: Annotated[str | None, typer.Option(help="Where in the file the state dict is.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a torch file to safetensors; nothing in it is executed."""
    from epimer.checkpoints.convert import convert as run

    ties = run(source, target, key=key, overwrite=overwrite)
    if not quiet:
        shared = f" ({len(ties)} tied names share a tensor)" if ties else ""
        typer.echo(f"wrote {target}{shared}")
