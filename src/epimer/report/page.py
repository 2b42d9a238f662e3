"""Records -> one HTML page that needs nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import epimer
from epimer.errors import DataError
from epimer.records import Diagnosis, EvaluationRecord, Experiment, HarnessRecord, MergeRecord, Record, SweepRecord
from epimer.report import palette
from epimer.report.blocks import Renderer, Rows, Section, Table, figures
from epimer.report.markup import Markup, join, tag
from epimer.report.performance import Performance
from epimer.report.read import Records
from epimer.report.sections import diagnosis, evaluations, experiments, merging, scores
from epimer.report.summary import summary, title_of

ORDER = ("alpha", "eta", "landscape")
"""experiments with sections of their own"""
KINDS = (Performance, Experiment, Diagnosis, SweepRecord, EvaluationRecord, HarnessRecord, MergeRecord)
"""of records, in the order in which they are listed"""
HELP = "Focus a chart and use the arrow keys to go through its values."


def build(records: Records, *, title: str | None = None) -> str:
    """Return the page of some records (see `epimer.report.read.read_records`)."""
    if not records.entries:
        raise DataError("there are no records to report.")
    title = title or title_of(records)
    renderer = Renderer()
    keyed = [(renderer.key(section.name), section) for section in sections(records)]
    script = _asset("page.js")
    style = Markup(palette.css() + _asset("page.css"))
    head = tag("head", _meta(title, script), tag("title", title), tag("style", style))
    parts = [renderer.section(section, key) for key, section in keyed]
    main = tag("main", summary(records, title), parts, id="content")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("div", _contents(keyed), main, class_="page"),
        tag("footer", f"Made by epimer {epimer.__version__}. {HELP}"),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
        tag("script", Markup(json.dumps(palette.variables("light"))), type="application/json", id="palette"),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def standalone(records: Records) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each figure as an SVG file; names are those of the page's own buttons."""
    renderer = Renderer()
    parts = sections(records)
    for section in parts:
        renderer.key(section.name)
    for figure in figures(block for section in parts for block in section.blocks):
        key = renderer.key(figure.name)
        yield f"{key}.svg", figure.file(key)


def sections(records: Records) -> list[Section]:
    """Return the page's sections, in order."""
    performances, diagnoses, merges = records.of(Performance), records.of(Diagnosis), records.of(MergeRecord)
    parts = [scores.section(record, named=len(performances) > 1) for record in performances]
    parts += map(evaluations.section, records.of(EvaluationRecord))
    parts += map(evaluations.harness, records.of(HarnessRecord))
    parts += map(merging.sweep, records.of(SweepRecord))
    rest = [record for record in records.of(Experiment) if not experiments.has_own_section(record)]
    own = [r for r in records.of(Experiment) if experiments.has_own_section(r) and not isinstance(r, Performance)]
    own.sort(key=lambda record: ORDER.index(record.name) if record.name in ORDER else len(ORDER))
    parts += map(experiments.own_section, own)
    parts += [diagnosis.section(record, named=len(diagnoses) > 1) for record in diagnoses]
    parts += [experiments.others(rest)] if rest else []
    parts += [
        merging.merge(record, records.dates.get(source, ""))
        for source, record in records.entries
        if isinstance(record, MergeRecord)
    ]
    recipes = dict.fromkeys(record.recipe for record in diagnoses if record.recipe)
    if recipes and not any(record.recipe for record in merges):
        parts.append(Section("Recipe", [tag("h3", "As it was diagnosed"), *map(merging.recipe, recipes)]))
    parts.append(sources(records))
    cited = merging.citations(methods_in(records))
    return [*parts, cited] if cited else parts


def methods_in(records: Records) -> list[str]:
    """Return the names of all methods that appear, each once."""
    rows = [row for record in [*records.of(Performance), *records.of(Experiment)] for row in record.data]
    names = [row["method"] for row in rows if isinstance(row.get("method"), str)]
    names += [name for record in records.of(Diagnosis) for name in record.forecast]
    names += [trial.method for record in records.of(SweepRecord) for trial in record.data]
    names += [record.method for record in records.of(MergeRecord)]
    return list(dict.fromkeys(names))


def sources(records: Records) -> Section:
    """Return what was measured on what: every record with its file."""
    entries = sorted(records.entries, key=lambda entry: KINDS.index(type(entry[1])))
    rows: Rows = [[source, *_described(record)] for source, record in entries]
    table = Table(["file", "kind", "what"], rows, "The records of this page")
    said = [tag("p", line) for line in _choices(records)]
    return Section("What was measured on what", [*said, table], short="Measured")


def _choices(records: Records) -> list[str]:
    """Say, for each kind of record, on which data its settings were chosen and its scores measured."""
    lines = []
    for performance in records.of(Performance):
        how = f"the best merge was {performance.chosen_by}; scores are on test data"
        scales = "scales and " if performance.validated else ""
        lines.append(f"{performance.suite}: {scales}{how}.")
    lines += [f"Sweep by {sweep.eval}: {merging.chosen_on(sweep)}" for sweep in records.of(SweepRecord)]
    for record in records.of(MergeRecord):
        if record.unlabelled is not None:
            lines.append(f"{record.method}: chosen by {record.unlabelled} inputs per task, without labels.")
    return lines


def _described(record: Record) -> tuple[str, str]:
    by = f"; epimer {record.version}" if isinstance(record, Diagnosis | MergeRecord) and record.version else ""
    match record:
        case Performance() as p:
            return p.name, f"{p.suite}: {len(p.merges)} merges on {len(p.tasks)} tasks ({', '.join(p.tasks)})"
        case Experiment() as x:
            return x.name, f"{x.title}: {len(x.data)} rows"
        case Diagnosis() as d:
            rank = "" if d.rank is None else f", rank {d.rank}"
            return d.kind, f"{', '.join(d.models)} against {d.base}; {d.curvature} curvature{rank}{by}"
        case SweepRecord() as s:
            return s.kind, f"{len(s.data)} tries, scored by {s.eval}"
        case EvaluationRecord() as e:
            return e.kind, f"{e.model} on {e.split} data of {e.suite}: {len(e.tasks)} tasks"
        case HarnessRecord() as h:
            return h.harness, f"{h.model}: {len(h.results)} numbers"
        case MergeRecord() as m:
            return m.kind, f"{m.method} of {', '.join(name for name, _ in m.models)}{by}"
    return record.kind, ""


def _contents(keyed: list[tuple[str, Section]]) -> Markup:
    names = {"summary": "Summary", **{key: section.name for key, section in keyed}}
    links = tag("ul", [tag("li", tag("a", name, href=f"#{key}")) for key, name in names.items()])
    return tag("nav", links, tag("button", "Dark or light", type="button", id="theme"), aria_label="Contents")


def _meta(title: str, script: str) -> Markup:
    """Return the head's facts; the policy lets no request out, and only the page's own script run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"epimer {epimer.__version__}"),
        tag("meta", name="description", content=title),
    )


@cache
def _asset(name: str) -> Markup:
    return Markup(files("epimer.report").joinpath(name).read_text(encoding="utf-8"))
