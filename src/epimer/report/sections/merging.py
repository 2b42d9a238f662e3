"""What was made: sweeps, merged models, their recipes; what was measured on what; whom to cite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from epimer.records import MergeRecord, TensorRecord
from epimer.report.blocks import (
    Block,
    Cell,
    Figure,
    Rows,
    Section,
    Side,
    Table,
    facts,
    folded,
    heading,
    notes,
    paragraph,
)
from epimer.report.charts.lines import Labels, Series, lines
from epimer.report.citations import CITATIONS
from epimer.report.kinds import Records, Score, Sweep, unit_of
from epimer.report.markup import Markup, tag
from epimer.report.numbers import NOTHING, finite, number, widened
from epimer.report.palette import colour

WELL = ("exact", "converged")


def sweep(found: Sweep) -> Section:
    """Return what was tried, by scale."""
    unit = unit_of([*found.data, *([found.best] if found.best else [])])
    methods = list(dict.fromkeys(score.method for score in found.data))
    values = finite(score.validation for score in found.data)
    charts: list[Figure] = []
    labels = Labels("scale α", f"score to choose by{', %' if unit.share else ''}", unit.tick, unit.exact)
    for method in methods if values else ():
        some = [s for s in found.data if s.method == method and s.scale is not None and s.validation is not None]
        ranks = list(dict.fromkeys(score.rank for score in some))
        series = [
            Series(
                f"rank {rank}" if rank is not None else method,
                sorted((s.scale or 0.0, v := s.validation or 0.0, v, v) for s in some if s.rank == rank),
                colour(i),
            )
            for i, rank in enumerate(ranks)
        ]  # fmt: skip
        if some:
            chart = lines(series, labels, f"Score of {method} over the scale.", span=widened(values))
            table = _tries([s for s in found.data if s.method == method], found.best, f"What was tried of {method}")
            charts.append(Figure(f"sweep {method}", f"{method} over scale", chart, table))
    blocks: list[Block] = [paragraph("Scored by ", tag("code", found.eval), _chosen(found.best, unit.exact))]
    blocks += [Side(charts)] if charts else []
    return Section("Sweep", [*blocks, _tries(found.data, found.best, "Everything that was tried"), notes(found.notes)])


def _chosen(best: Score | None, exact: object) -> Markup:
    if best is None or not callable(exact):
        return Markup(".")
    rank = "" if best.rank is None else f", rank {best.rank}"
    scale = "" if best.scale is None else f", scale {number(best.scale)}"
    return tag("span", "; best: ", tag("b", best.method), f"{rank}{scale} ({exact(best.validation)}).")


def _tries(scores: Sequence[Score], best: Score | None, caption: str) -> Table:
    unit, close = unit_of(scores), any(score.kl is not None for score in scores)
    rows: Rows = []
    marked = set()
    for i, s in enumerate(scores):
        if best and (s.method, s.rank, s.scale) == (best.method, best.rank, best.scale):
            marked.add(i)
        between = f" [{unit.between(s.low, s.high)}]" if s.low is not None and s.high is not None else ""
        numbers = [
            (number(s.rank), s.rank),
            (number(s.scale), s.scale),
            (unit.show(s.validation), unit.plain(s.validation)),
        ]
        numbers += [(number(s.kl), s.kl)] if close else []
        numbers += [(f"{unit.show(s.average)}{between}", unit.plain(s.average))]
        numbers += [(unit.show(s.worst), unit.plain(s.worst))]
        rows.append([s.method, *(Cell(*pair) for pair in numbers), s.worst_task])
    headings = ["method", "rank", "scale", "to choose by", *(["KL"] if close else []), "average", "worst", "worst task"]
    return Table(headings, rows, caption, frozenset(marked))


def merge(found: MergeRecord) -> Section:
    """Return how a merged model was made."""
    weights = ", ".join(number(weight) for weight in found.weights)
    pairs: list[tuple[str, str]] = [("Method", found.method)]
    pairs += [(name, _value(value)) for name, value in found.parameters.items()]
    pairs += [("Weights", weights or NOTHING), ("Made by", f"epimer {found.version}" if found.version else NOTHING)]
    pairs += [("Time", f"{number(found.timings['total'])} s")] if "total" in found.timings else []
    pairs += [("Files", f"{len(found.files)}, {number(sum(found.files.values()) / 1e6)} MB")] if found.files else []
    blocks: list[Block] = [facts(pairs)]
    made = [tag("div", tag("p", "Recipe", class_="title"), recipe(found.recipe))] if found.recipe else []
    models: Rows = [[name, Cell(tag("code", fingerprint))] for name, fingerprint in found.models]
    blocks.append(Side([Table(["model", "fingerprint"], models, "What was merged"), *made]))
    blocks += [heading("Tensors"), _tensors(found.tensors)]
    return Section(f"The merge: {found.method}", blocks, short="Merge")


def recipe(content: str) -> Markup:
    """Return a recipe as it is."""
    return tag("pre", tag("code", content.strip("\n")), tabindex="0")


def _tensors(tensors: dict[str, TensorRecord]) -> Markup:
    """Return how many tensors went which way, and all of them to unfold."""
    rules = Counter(one.rule for one in tensors.values())
    states: Counter[str] = Counter(one.status for one in tensors.values() if one.rule != "skip")
    odd = {name: one for name, one in tensors.items() if one.status not in (*WELL, "tied") or one.note}
    said = f"{len(tensors)} tensors: {_counted(rules)}. Solved: {_counted(states)}."
    parts = [paragraph(said)]
    if odd:
        parts.append(folded(f"{len(odd)} with something to know", _listed(odd)))
    parts.append(folded("All tensors", _listed(tensors)))
    return Markup("".join(parts))


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def _listed(tensors: dict[str, TensorRecord]) -> Table:
    rows: Rows = [
        [
            name, one.rule, " × ".join(map(str, one.shape)) or "scalar", one.status, Cell(number(one.rank), one.rank),
            Cell(number(one.residual), one.residual), Cell(number(one.eta), one.eta), one.note,
        ]
        for name, one in tensors.items()
    ]  # fmt: skip
    return Table(
        ["tensor", "rule", "shape", "status", "rank", "residual", "η", "note"], rows, "How tensors were merged"
    )


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int | float):
        return number(value, 6)
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return str(value)


def measured(records: Records) -> Section:
    """Return what was measured on what: every record with its file."""
    rows: Rows = []
    for performance in records.performances:
        p = performance.record
        rows.append(
            [
                performance.source,
                "performance",
                f"{p.suite}: {len(p.merges)} merges on {len(p.tasks)} tasks ({', '.join(p.tasks)})",
            ]
        )
    for one in records.experiments:
        if one.record.name != "performance":
            rows.append([one.source, one.record.name, f"{one.record.title}: {len(one.record.data)} rows"])
    for diagnosis in records.diagnoses:
        d = diagnosis.record
        rank = "" if d.rank is None else f", rank {d.rank}"
        by = f"; epimer {d.version}" if d.version else ""
        rows.append(
            [
                diagnosis.source,
                "diagnosis",
                f"{', '.join(d.models)} against {d.base}; {d.curvature} curvature{rank}{by}",
            ]
        )
    for tried in records.sweeps:
        rows.append([tried.source, "sweep", f"{len(tried.record.data)} tries, scored by {tried.record.eval}"])
    for judged in records.evaluations:
        e = judged.record
        rows.append([judged.source, "evaluation", f"{e.model} on {e.split} data of {e.suite}: {len(e.tasks)} tasks"])
    for scored in records.harnesses:
        h = scored.record
        rows.append([scored.source, h.harness, f"{h.model}: {len(h.results)} numbers"])
    for made in records.merges:
        m = made.record
        by = f"; epimer {m.version}" if m.version else ""
        rows.append([made.source, "merge", f"{m.method} of {', '.join(name for name, _ in m.models)}{by}"])
    said = paragraph(
        "Scores of merged models are on test data; what was chosen, like a scale, was chosen on validation data, "
        "unless a note says otherwise."
    )
    return Section(
        "What was measured on what",
        [said, Table(["file", "kind", "what"], rows, "The records of this page")],
        short="Measured",
    )


def citations(names: Iterable[str]) -> Section | None:
    """Return whom to cite for the methods that appear; methods of one paper share a line."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name in CITATIONS:
            found.setdefault(CITATIONS[name], []).append(name)
    if not found:
        return None
    items = [tag("li", tag("b", ", ".join(methods)), ": ", cited, ".") for cited, methods in found.items()]
    said = paragraph("The methods on this page, and where they come from.")
    return Section("Citations", [said, tag("ul", items, class_="cited")])
