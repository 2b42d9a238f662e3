"""Names, notes, recipes and numbers from strangers in the report's page, its figures and the model card: all inert."""

import glob
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import epimer
import found
from chromium import Watched
from commands import run
from epimer.records import Experiment
from epimer.report.write import make_report

RUN = "window.ran=1"
ATTACKS = {
    "script": f"<script>{RUN}</script>",
    "closing": f"</script></style></title></textarea></option></svg></table></main><script>{RUN}</script><!--",
    "image": f"<img src=x onerror={RUN}> \" onmouseover=\"{RUN}\" autofocus onfocus={RUN} style='color:red' x=' y=`",
    "style": "<style>*{display:none!important}</style><link rel=stylesheet href=//example.org/x.css>",
    "css": "red;}*{display:none} url(//example.org/x.png) var(--constructor) expression(1)",
    "link": f"<a href='javascript:{RUN}'>x</a> [x](javascript:{RUN}) ![x](//example.org/x.png) <https://example.org>",
    "bare link": "www.example.org https://example.org/x someone@example.org",
    "frame": f"<svg onload={RUN}><foreignObject><iframe srcdoc='<script>{RUN}</script>'></iframe>",
    "base": f"<base href=//example.org/><meta http-equiv=refresh content=0;url=javascript:{RUN}><form action=//x.org>",
    "template": f"${{{RUN}}} {{{{constructor.constructor('{RUN}')()}}}} `${{{RUN}}}` \\u003c/script\\u003e]}} <!--",
    "table": "</td></tr></table> | x | y |\n|---|---|\n| a | b |\r\n\n# heading\n\n- item",
    "fence": "```\n~~~\n`````` ` `` --- \n---\n...\n[x]: javascript:1 'x'",
    "unseen": "\u202egnp.\u2066exe\u2069 \x00\x07\x1b[31m\x1b]8;;https://example.org\x07x\x1b]8;;\x07\x7f\ufffe",
}
STRUCTURE = {"kind", "format", "rule", "status", "metric", "level", "name", "aggregator", "basis", "curvature", "split"}
"""keys of records whose values are of a fixed set, or name an experiment; their values stay as they are"""


def hostile(value: object, attack: str, key: str = "") -> object:
    """Return a record in which every task, method, layer, model, note, heading, recipe and file carries an attack."""
    names = {*found.TASKS, *found.METHODS[1:]}
    if isinstance(value, dict):
        renamed = {k: f"{k} {attack}" if k in names or "." in k or "," in k or "(" in k else k for k in value}
        return {renamed[k]: hostile(v, attack, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(one, attack, key) for one in value]
    if not isinstance(value, str) or (key in STRUCTURE and value not in names):
        return value
    return f"{value} {attack}"


def records(attack: str) -> Iterator[tuple[str, dict]]:
    for file, record in found.everything().items():
        yield file, hostile({**record, "suite": "glyphs8"} if file == "performance.json" else record, attack)


def shown(attack: str) -> str:
    """Return what a reader sees of an attack: white space in one piece, nothing that hides or turns text."""
    return " ".join(
        re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\u202a-\u202e\u2066-\u2069]", "\ufffd", attack).split()
    )


FOREIGN = """() => {
  const found = [...document.querySelectorAll('img, iframe, object, embed, form, base, link, foreignObject, textarea')];
  const active = [...document.querySelectorAll('*')].filter(
    e => [...e.attributes].some(a => /^on|^srcdoc$/.test(a.name)));
  const links = [...document.querySelectorAll('[href], [src], [action], [*|href]')].filter(
    e => !/^#[a-z0-9-]+$/.test(e.getAttribute('href') || e.getAttribute('xlink:href') || ''));
  return [...found, ...active, ...links].map(e => e.outerHTML.slice(0, 200));
}"""


def assert_inert(watched: Watched, file: Path) -> None:
    assert watched.page.evaluate("window.ran") is None
    assert watched.page.evaluate(FOREIGN) == []
    assert watched.trouble == []
    assert [url for url in watched.asked if not url.startswith(("blob:", "data:"))] == [file.as_uri()]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_page_shows_what_strangers_write_and_runs_none_of_it(browser, tmp_path, attack):
    folder = found.write_all(tmp_path / "in", dict(records(attack)))
    file, *figures = make_report([folder], tmp_path / "page.html", tmp_path / "figures")
    watched = Watched(browser, file)
    page, seen = watched.page, shown(attack)
    assert page.locator("style").count() == 1
    assert page.locator("script").count() == 2
    uneven = page.evaluate(
        """() => [...document.querySelectorAll('table')].filter(table =>
             [...table.rows].some(row => row.cells.length !== table.rows[0].cells.length)).length"""
    )
    assert uneven == 0
    assert page.locator("table").count() > 15
    for where in ("h1", "nav a", "main table th", "main table td", "option", "pre", "svg text, svg desc", ".notes li"):
        texts = page.locator(where).evaluate_all("all => all.map(e => e.textContent.replace(/[\\s`]+/g, ' '))")
        assert any(" ".join(seen.replace("`", " ").split())[:12] in text for text in texts), where
    marks = page.locator("[data-tip]")
    tips = marks.evaluate_all("all => all.map(e => e.dataset.tip.replace(/\\s+/g, ' '))")
    at = next(i for i, tip in enumerate(tips) if seen in tip and marks.nth(i).is_visible())
    marks.nth(at).hover()
    assert seen in " ".join(page.locator("#tip").inner_text().split())
    for button in page.locator("th button:visible").all()[:4]:
        button.click()
    with page.expect_download() as download:
        page.locator("#averages button[data-save=svg]").click()
    figures.append(tmp_path / "saved.svg")
    download.value.save_as(figures[-1])
    assert_inert(watched, file)
    watched.context.close()
    for figure in (figures[0], figures[-1]):  # one of the command line, one that the page saved
        watched = Watched(browser, figure)
        assert watched.page.evaluate("document.documentElement.tagName") == "svg"
        assert_inert(watched, figure)
        watched.context.close()


def rendered(markdown: str, folder: Path) -> Path:
    """Write Markdown as HTML in the most trusting way: HTML in it is kept as it is."""
    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown)
    file = folder / "rendered.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><title>{escape(folder.name)}</title>{html}", encoding="utf-8")
    return file


def assert_rows_are_even(page, columns: int) -> None:
    counts = page.evaluate("[...document.querySelectorAll('tr')].map(row => row.cells.length)")
    assert set(counts) == {columns}


def weights(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    names = ("layer.weight", folder.name[2:])  # a tensor with the folder's hostile name
    save_file({name: torch.randn(4, 3, generator=draw) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_model_card_shows_what_strangers_write_and_makes_nothing_of_it(browser, tmp_path, attack):
    name = attack.replace("/", "").replace("\x00", "")[:200]  # what a folder may be called
    base, model = weights(tmp_path / "in" / f"a {name}", 0), weights(tmp_path / "in" / f"b {name}", 1)
    rules = [[glob.escape(name), "average"]]
    recipe = {"merge_method": "average", "base_model": str(base), "models": [{"model": str(model)}], "rules": rules}
    epimer.merge(recipe, tmp_path / "out", progress=False)
    start, head, body = (tmp_path / "out" / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert start == ""
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["merge", "epimer", "average"]}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", body)
    file = rendered(body, tmp_path)
    watched = Watched(browser, file)
    page = watched.page
    assert page.locator("a, script, style, img, svg, hr, ol, del").count() == 0
    assert page.locator("h1").all_inner_texts() == [f"a {shown(name)}".split("@")[0] + ", one model merged"]
    assert page.locator("h2").all_inner_texts() == ["Recipe", "How it went", "Citation"]
    assert page.locator("pre").count() == 2  # the equation, the recipe
    assert page.locator("table").count() == 1
    assert_rows_are_even(page, 2)
    prose = page.evaluate("document.querySelectorAll('code').forEach(e => e.remove()) || document.body.innerText")
    assert not re.search(r"www\.|://|@", prose)  # what some readers of Markdown make links of, unasked
    assert_inert(watched, file)
    watched.context.close()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_table_of_results_keeps_its_cells(browser, tmp_path, attack):
    record = Experiment.from_dict(hostile(found.performance(), attack), "here")
    file = rendered(record.markdown(), tmp_path)
    watched = Watched(browser, file)
    assert watched.page.locator("a, script, style, img, svg, h1, hr").count() == 0
    assert watched.page.locator("table").count() == 1
    assert watched.page.locator("tr").count() == 1 + len(record.rows)
    assert watched.page.locator("li").count() == len(record.notes)
    assert_rows_are_even(watched.page, len(record.headings))
    assert_inert(watched, file)
    watched.context.close()


@pytest.mark.parametrize(
    "command", ["diagnose recipe.yaml", "merge recipe.yaml out --dry-run", "inspect m{}", "merge gone.yaml out"]
)
def test_no_name_controls_the_terminal(tmp_path, monkeypatch, command):
    """Neither colours, nor the window's title, nor what was printed before."""
    name = "\x1b[2J\x1b]0;x\x07\x9b31m\u202e"
    monkeypatch.chdir(tmp_path)
    for t, folder in enumerate(("base", f"m{name}", f"n{name}")):
        Path(folder).mkdir()
        draw = torch.Generator().manual_seed(t)
        save_file({f"{name}.weight": torch.randn(16, 16, generator=draw)}, f"{folder}/model.safetensors")
    models = [{"model": f"m{name}"}, {"model": f"n{name}"}]
    for file, last in (("recipe", []), ("gone", [{"model": f"gone{name}"}])):
        recipe = {"merge_method": "tsv", "base_model": "base", "models": [*models, *last]}
        Path(f"{file}.yaml").write_text(yaml.safe_dump(recipe))
    ran = run(*(part.format(name) for part in command.split()))
    assert re.search(r"(\ufffd|\\x1b)\]0;x(\ufffd|\\x07)", ran.out + ran.err)  # it is shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ran.out + ran.err)
