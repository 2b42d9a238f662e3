"""Records -> one HTML page that asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import epimer
from epimer.errors import DataError
from epimer.report import palette
from epimer.report.blocks import Block, Renderer, Section, figures, heading
from epimer.report.kinds import Records
from epimer.report.markup import Markup, tag
from epimer.report.sections import diagnosis, evaluations, experiments, merging, scores
from epimer.report.summary import summary, title_of

HELP = "Focus a chart and use the arrow keys to go through its values."


def build(records: Records, *, title: str | None = None) -> str:
    """Return the page of some records (see `epimer.report.read.read_records`)."""
    if not records:
        raise DataError("there are no records to report.")
    title = title or title_of(records)
    renderer = Renderer()
    made = [(renderer.key(section.short or section.title), section) for section in sections(records)]
    script = _asset("page.js")
    style = palette.css() + _asset("page.css")
    head = tag("head", _meta(title, script), tag("title", title), tag("style", Markup(style)))
    main = tag("main", summary(records, title), [renderer.section(section, key) for key, section in made], id="content")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("div", _contents(made), main, class_="page"),
        tag("footer", f"Made by epimer {epimer.__version__}. {HELP}"),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
        tag("script", _json(palette.variables("light")), type="application/json", id="palette"),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def standalone(records: Records) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each figure as an SVG file; names are those of the page's own buttons."""
    renderer = Renderer()
    blocks: list[Block] = []
    for section in sections(records):
        renderer.key(section.short or section.title)
        blocks += section.blocks
    for figure in figures(blocks):
        key = renderer.key(figure.name)
        yield f"{key}.svg", figure.alone(key)


def sections(records: Records) -> list[Section]:
    """Return the page's sections, in order."""
    many = len(records.performances) > 1
    made = [scores.section(one.record, named=many) for one in records.performances]
    own = (("alpha", experiments.alpha), ("eta", experiments.eta), ("landscape", experiments.landscapes))
    for name, section in own:
        made += [section(one.record) for one in records.named(name) if experiments.has_own(one.record)]
    made += [diagnosis.section(one.record, named=len(records.diagnoses) > 1) for one in records.diagnoses]
    made += [merging.sweep(one.record) for one in records.sweeps]
    made += [evaluations.section(one.record) for one in records.evaluations]
    made += [evaluations.harness(one.record) for one in records.harnesses]
    made += [one for one in [experiments.others(records)] if one is not None]
    made += [merging.merge(one.record) for one in records.merges]
    recipes = dict.fromkeys(one.record.recipe for one in records.diagnoses if one.record.recipe)
    if recipes and not any(one.record.recipe for one in records.merges):
        made.append(Section("Recipe", [heading("As it was diagnosed"), *map(merging.recipe, recipes)]))
    made.append(merging.measured(records))
    made += [one for one in [merging.citations(methods_in(records))] if one is not None]
    return made


def methods_in(records: Records) -> list[str]:
    """Return the names of all methods that appear, each once."""
    names = [score.method for one in records.performances for score in one.record.scores]
    names += [
        row["method"] for one in records.experiments for row in one.record.data if isinstance(row.get("method"), str)
    ]
    names += [name for one in records.diagnoses for name in one.record.forecast]
    names += [score.method for one in records.sweeps for score in one.record.data]
    names += [one.record.method for one in records.merges]
    return list(dict.fromkeys(names))


def _contents(made: list[tuple[str, Section]]) -> Markup:
    links = [tag("li", tag("a", section.short or section.title, href=f"#{key}")) for key, section in made]
    return tag(
        "nav",
        tag("ul", tag("li", tag("a", "Summary", href="#summary")), links),
        tag("button", "Dark or light", type="button", id="theme"),
        aria_label="Contents",
    )


def _meta(title: str, script: str) -> Markup:
    """Return the head's facts; the policy lets no request out, and only the page's own script run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Markup(
        tag("meta", charset="utf-8")
        + tag("meta", http_equiv="Content-Security-Policy", content=policy)
        + tag("meta", name="viewport", content="width=device-width, initial-scale=1")
        + tag("meta", name="generator", content=f"epimer {epimer.__version__}")
        + tag("meta", name="description", content=title)
    )


def _json(value: object) -> Markup:
    """Return JSON that is safe within a script element."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


@cache
def _asset(name: str) -> Markup:
    """Return a style sheet or a script of this package."""
    return Markup(files("epimer.report").joinpath(name).read_text(encoding="utf-8"))
