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
from epimer.report import palette
from epimer.report.blocks import Renderer, Section, figures
from epimer.report.markup import Markup, join, tag
from epimer.report.read import Records
from epimer.report.sections import diagnosis, evaluations, experiments, merging, scores
from epimer.report.summary import summary, title_of

ORDER = ("alpha", "eta", "landscape")
"""experiments with sections of their own"""
HELP = "Focus a chart and use the arrow keys to go through its values."


def build(records: Records, *, title: str | None = None) -> str:
    """Return the page of some records (see `epimer.report.read.read_records`)."""
    if not records:
        raise DataError("there are no records to report.")
    title = title or title_of(records)
    renderer = Renderer()
    keyed = [(renderer.key(section.name), section) for section in sections(records)]
    script = _asset("page.js")
    style = palette.css() + _asset("page.css")
    head = tag("head", _meta(title, script), tag("title", title), tag("style", Markup(style)))
    main = tag(
        "main", summary(records, title), [renderer.section(section, key) for key, section in keyed], id="content"
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("div", _contents(keyed), main, class_="page"),
        tag("footer", f"Made by epimer {epimer.__version__}. {HELP}"),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
        tag("script", _json(palette.variables("light")), type="application/json", id="palette"),
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
    named = len(records.performances) > 1
    parts = [scores.section(one.record, named=named) for one in records.performances]
    measured = [one.record for one in records.experiments]
    rest = [one for one in measured if not experiments.has_own_section(one)]
    own = [one for one in measured if one.name != "performance" and one not in rest]
    own.sort(key=lambda one: ORDER.index(one.name) if one.name in ORDER else len(ORDER))
    parts += map(experiments.own_section, own)
    parts += [diagnosis.section(one.record, named=len(records.diagnoses) > 1) for one in records.diagnoses]
    parts += [merging.sweep(one.record) for one in records.sweeps]
    parts += [evaluations.section(one.record) for one in records.evaluations]
    parts += [evaluations.harness(one.record) for one in records.harnesses]
    parts += [experiments.others(rest)] if rest else []
    parts += [merging.merge(one.record) for one in records.merges]
    recipes = dict.fromkeys(one.record.recipe for one in records.diagnoses if one.record.recipe)
    if recipes and not any(one.record.recipe for one in records.merges):
        parts.append(Section("Recipe", [tag("h3", "As it was diagnosed"), *map(merging.recipe, recipes)]))
    parts.append(merging.measured(records))
    cited = merging.citations(methods_in(records))
    return [*parts, cited] if cited else parts


def methods_in(records: Records) -> list[str]:
    """Return the names of all methods that appear, each once."""
    names = [score.method for one in records.performances for score in one.record.scores]
    rows = [row for one in records.experiments for row in one.record.data]
    names += [row["method"] for row in rows if isinstance(row.get("method"), str)]
    names += [name for one in records.diagnoses for name in one.record.forecast]
    names += [score.method for one in records.sweeps for score in one.record.data]
    names += [one.record.method for one in records.merges]
    return list(dict.fromkeys(names))


def _contents(keyed: list[tuple[str, Section]]) -> Markup:
    links = [tag("li", tag("a", section.name, href=f"#{key}")) for key, section in keyed]
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
    named = {
        "viewport": "width=device-width, initial-scale=1",
        "generator": f"epimer {epimer.__version__}",
        "description": title,
    }
    return join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        [tag("meta", name=name, content=content) for name, content in named.items()],
    )


def _json(value: object) -> Markup:
    """Return JSON that is safe within a script element."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


@cache
def _asset(name: str) -> Markup:
    """Return a style sheet or a script of this package."""
    return Markup(files("epimer.report").joinpath(name).read_text(encoding="utf-8"))
