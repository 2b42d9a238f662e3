"""Write docs/methods.md from the registry. Run by `make docs`; a test fails when the page is out of date."""

from __future__ import annotations

from pathlib import Path

import epimer
from epimer.methods.registry import COUNTS_MODELS

PAGE = Path(__file__).with_name("methods.md")
OWN = (
    "A method is a function from a layer to a merged task vector, and a row that says what it needs. Once the row is",
    "registered, recipes, commands, sweeps, forecasts and benches know it: [own_method.py](../examples/own_method.py)",
    "does so in 25 lines. On the command line name its file:",
    "",
    "    epimer merge recipe.yaml out --plugin own_method.py",
    "",
    "Every command whose recipe or options name a method takes `--plugin FILE.py`, several times if need be. **The",
    "file is run, as any Python script of yours: name only code that you trust.** A recipe cannot name one. Every",
    "`epimer.Method` at the top level of the file is added, and what the file registers itself. The merge's record has",
    "the file's name and SHA-256; `epimer verify` asks for the file, and compares it. With `--engine ray` workers read",
    "the file at the same path, and refuse another one. A package adds methods for all who install it with an entry",
    "point:",
    "",
    '    [project.entry-points."epimer.methods"]',
    '    stock_with_floor = "my_package.merging:STOCK"',
    "",
    "`epimer.testing.check_laws(method)` tests on random models that a method obeys exactly the laws its row states.",
)


def render() -> str:
    """Return the page."""
    lines = [
        "# Methods",
        "",
        "Written by `make docs` from the registry; `epimer.describe_method(name)` says the same in Python.",
        "",
        "| method | what it does | needs |",
        "|---|---|---|",
    ]
    methods = [epimer.describe_method(name) for name in epimer.list_methods()]
    for method in methods:
        needs = ["base"] if method.needs_base else []
        needs += [f"{method.curvature} curvature"] if method.needs_curvature else []
        lines.append(f"| [{method.name}](#{method.name}) | {method.summary} | {', '.join(needs) or 'models only'} |")
    for method in methods:
        lines += ["", f"## {method.name}", "", f"{method.summary[0].upper()}{method.summary[1:]}.", ""]
        lines += [f"    {method.equation}", "", f"{method.citation}.", ""]
        if method.counts_models:
            lines += [f"{COUNTS_MODELS[0].upper()}{COUNTS_MODELS[1:]}.", ""]
        lines += ["| parameter | default | meaning | valid |", "|---|---|---|---|"]
        for p in method.parameters:
            lines.append(f"| `{p.name}` | `{p.default!r}` | {p.meaning} | {p.expected} |")
        if method.mergekit is not None:
            lines += ["", f"Under `compat: mergekit` (`{method.mergekit.name}`): {method.mergekit.summary}."]
    lines += ["", "## Your own", "", *OWN]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
