"""What the command line prints."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epimer.errors import listed

if TYPE_CHECKING:
    from torch import Tensor

    from epimer.checkpoints.checkpoint import Checkpoint
    from epimer.curvature.basis import StoredBasis
    from epimer.curvature.curvature import Curvature
    from epimer.engine.merge import Options
    from epimer.evaluation.evaluate import Evaluation
    from epimer.experiments.demo import Demo
    from epimer.methods.registry import Method
    from epimer.plan.jobs import Plan
    from epimer.records import Experiment, HarnessRecord, MergeRecord


DEMO_COLUMNS = ("method", "average [95%]", "worst", "scale", "merge s", "against tsv")


def dump(value: Any) -> None:
    """Print a value as JSON."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def write(path: Path, value: Any) -> None:
    """Write a value to a JSON file, which appears whole or not at all."""
    from epimer.checkpoints.writer import as_json, whole_file

    with whole_file(path) as draft:
        draft.write_bytes(as_json(value))


def page(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write an HTML page that shows some records."""
    from epimer.report.write import write_page

    write_page(records, path)


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    from epimer.checkpoints.writer import check_file

    check_file(path)


def size(count: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def curvature(found: Curvature, out: Path, notes: Sequence[str], *, as_json: bool) -> None:
    """Say what was measured."""
    about = found.about
    if as_json:
        dump({**asdict(about), "tensors": len(found), "bytes": found.nbytes, "clipped": found.clipped})
        return
    page = console()
    source = about.source
    if about.samples is not None:
        source = f"{about.samples} samples, {about.tokens} tokens, {about.labels} labels"
    kind = f"projected {found.kind}" if about.basis else found.kind
    page.print(f"{out}: {kind} of {len(found)} tensors, {size(found.nbytes)} ({source})", markup=False)
    for reason in dict.fromkeys(about.left_out.values()):
        names = [name for name, why in about.left_out.items() if why == reason]
        page.print(f"note: left out {listed(names)}: {reason}.", markup=False)
    clipped = found.clipped
    if clipped:
        worst = max(clipped, key=lambda name: clipped[name])
        page.print(
            f"note: negative curvature taken as 0 in {len(clipped)} tensors, most in {worst}: "
            f"{clipped[worst]:.1%} of its spectrum.",
            markup=False,
        )
    for note in dict.fromkeys(notes):
        page.print(f"note: {note}", markup=False)


def basis(made: StoredBasis, out: Path) -> None:
    """Say what basis was built."""
    total = size(sum(made.size(name) for name in made))
    console().print(f"{out}: {made.kind} basis of {len(made)} tensors, {total}", markup=False)


def experiment(result: Experiment, files: Sequence[Path]) -> None:
    """Print one experiment's table, and where its files are."""
    page = console()
    table = Table(title=escape(result.title), title_justify="left", box=None, header_style="bold", padding=(0, 1))
    for i, heading in enumerate(result.headings):
        table.add_column(escape(str(heading)), justify="left" if i == 0 else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*map(escape, row))
    width = page.measure(table).minimum
    page.print(table, width=max(width, page.width), overflow="ignore", crop=False, no_wrap=True)
    for note in result.notes:
        page.print(note, markup=False, highlight=False)
    page.print("wrote " + ", ".join(str(file) for file in files), markup=False)


def evaluation(found: Evaluation | HarnessRecord) -> None:
    """Print how a model does: on a suite, beside base and fine-tuned models, or in a harness."""
    from epimer.evaluation.evaluate import Evaluation

    if isinstance(found, Evaluation):
        title = f"{found.suite}, {found.split}: {found.model}"
        headings = ["task", "metric", "model [95%]", *("base", "fine-tuned")[: len(found.columns) - 1]]
        rows = list(found.rows())
    else:
        title, headings = f"{found.harness}: {found.model}", ["task", "metric", "score", "± s.e."]
        rows = []
        for row in found.results:
            named = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
            spread = "" if row.stderr is None else f"{row.stderr:.4f}"
            rows.append([row.task, named, f"{row.score:.4f}", spread])
    page = console()
    table = Table(title=escape(title), title_justify="left", box=None, header_style="bold", padding=(0, 1))
    for i, heading in enumerate(headings):
        table.add_column(escape(heading), justify="left" if i < 2 else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*map(escape, cells))
    page.print(table, overflow="ignore", crop=False)


def demo(found: Demo, report: Path) -> None:
    """Print the table of the demonstration, where its files are and what to try next."""
    experiment(found.result.only(DEMO_COLUMNS), found.files)
    page = console()
    best = found.best
    page.print(
        f"\n{best.candidate.name} was best on validation data: the merged model is in {found.model}\n"
        f"the report is {report}, open it in a browser\n"
        f"the eight models and their base are in {found.models}, folders as anybody's: epimer merge takes them\n"
        f"{found.seconds:.0f} s in all. What next: epimer bench glyphs8 --experiment all, "
        f"epimer methods {best.candidate.method}, epimer diagnose for a recipe of your own models.",
        markup=False,
        highlight=False,
    )


def done(record: MergeRecord, out: Path, notes: Sequence[str]) -> None:
    """Say what a merge made."""
    page = console()
    if not record.timings:
        page.print(f"{out} is already there, made from the same recipe and models; nothing to do.", markup=False)
        return
    rules = Counter(tensor.rule for tensor in record.tensors.values())
    counted = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    total = sum(record.files.values())
    peak = size(record.peak_memory or 0)
    page.print(
        f"[bold]{escape(str(out))}[/bold]  {record.method}, {len(record.tensors)} tensors ({counted})", highlight=False
    )
    page.print(f"{size(total)} in {record.timings['total']:.1f} s, peak memory {peak}", highlight=False)
    for note in notes:
        page.print(f"note: {note}", highlight=False, markup=False)


def plan(plan: Plan, options: Options, *, as_json: bool, quiet: bool = False) -> None:
    """Show a plan: every tensor's rule, what it costs, and all problems."""
    from epimer.engine.merge import check_memory
    from epimer.errors import EpimerError

    problems = [str(problem) for problem in plan.problems]
    if not problems:
        try:
            check_memory(plan, options)
        except EpimerError as error:
            plan.problems.append(error)
            problems = [str(error)]
    rows: list[dict[str, Any]] = [
        {
            "name": job.name,
            "rule": "tied" if job.name in plan.ties else job.rule,
            "shape": list(job.template.shape),
            "dtype": _dtype(job.template),
            "reads": job.reads,
            "writes": 0 if job.name in plan.ties else job.writes,
            "memory": max(part.memory for part in job.parts()),
        }
        for job in plan.jobs
    ]
    if as_json:
        totals = {"reads": plan.reads, "writes": plan.writes, "memory": plan.memory}
        return dump(
            {"method": plan.method.name, "tensors": rows, "totals": totals, "notes": plan.notes, "problems": problems}
        )
    page = console()
    table = Table("tensor", "rule", "shape", "dtype", "read", "write", "memory", box=None, pad_edge=False)
    for row in rows:
        costs = [size(row[key]) for key in ("reads", "writes", "memory")]
        table.add_row(escape(row["name"]), row["rule"], _shape(row["shape"]), row["dtype"], *costs)
    if rows and not quiet:
        page.print(table)
        page.print(
            f"{plan.method.name} of {len(plan.models)} models: read {size(plan.reads)}, write {size(plan.writes)}, "
            f"widest tensor needs {size(plan.memory)}"
            + (", after a pre-pass over the whole model" if plan.method.prepare else ""),
            highlight=False,
        )
        for note in plan.notes:
            page.print(f"note: {note}", highlight=False, markup=False)
    for problem in problems:
        page.print(f"problem: {problem}", highlight=False, markup=False)


def checkpoint(model: Checkpoint, *, as_json: bool) -> None:
    """Show a checkpoint's tensors."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(W.shape),
            "dtype": _dtype(W),
            "bytes": model.size(name),
            "fingerprint": model.fingerprints[name],
            "tied_to": model.ties.get(name),
        }
        for name, W in model.headers.items()
    ]
    total = sum(model.size(name) for name in model.headers if name not in model.ties)
    entries = sum(W.numel() for name, W in model.headers.items() if name not in model.ties)
    if as_json:
        return dump(
            {"name": model.name, "fingerprint": model.fingerprint, "bytes": total, "entries": entries, "tensors": rows}
        )
    page = console()
    table = Table("tensor", "shape", "dtype", "size", "fingerprint", "tied to", box=None, pad_edge=False)
    for row in rows:
        cells = [escape(row["name"]), _shape(row["shape"]), row["dtype"], size(row["bytes"]), row["fingerprint"]]
        table.add_row(*cells, escape(row["tied_to"] or ""))
    page.print(table)
    page.print(
        f"{len(rows)} tensors, {entries:,} entries, {size(total)}, fingerprint {model.fingerprint}", highlight=False
    )


def methods(rows: Sequence[Method], *, as_json: bool, full: bool) -> None:
    """Show the registry."""
    if as_json:
        return dump([_method(row) for row in rows])
    if full:
        sys.stdout.write(f"{rows[0]}\n")
        return
    table = Table("method", "needs", "what it does", box=None, pad_edge=False)
    for row in rows:
        needs = ["base"] if row.needs_base else []
        needs += [row.curvature or ""] if row.needs_curvature else []
        table.add_row(row.name, " + ".join(needs) or "models only", row.summary)
    page = console()
    page.print(table)
    page.print("epimer methods NAME tells a method's parameters, equation and citation.", highlight=False)


def _method(row: Method) -> dict[str, Any]:
    return {
        "name": row.name,
        "summary": row.summary,
        "equation": row.equation,
        "citation": row.citation,
        "needs_base": row.needs_base,
        "curvature": row.curvature,
        "parameters": [
            {"name": p.name, "default": p.default, "meaning": p.meaning, "expected": p.expected} for p in row.parameters
        ],
    }


def _dtype(W: Tensor) -> str:
    return str(W.dtype).removeprefix("torch.")


def _shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def console() -> Console:
    """Return a console that cuts no line where nobody watches."""
    return Pipe() if sys.stdout.isatty() else Pipe(width=10_000)


class Pipe(Console):
    """A console whose reader may leave early, as `head` does."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
