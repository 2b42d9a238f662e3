"""The page as a whole: what it says first, that nothing escapes from records, and that torch stays away."""

import itertools
import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import found
from epimer.errors import DataError, OutputError
from epimer.report.numbers import number
from epimer.report.page import build, sections, standalone
from epimer.report.read import Records, gather
from epimer.report.write import make_report, write_page

EVIL = "<script>alert(1)</script>\"'&</svg></title>"


class Page(HTMLParser):
    """Elements with their attributes, text by element, and whether all is closed."""

    def __init__(self, content):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(content)
        assert self.open == [], "not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), "an attribute is given twice"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def named(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]

    def text(self, *within):
        return " ".join(data for tag, data in self.texts if not within or tag in within)


@pytest.fixture(scope="module")
def content():
    return build(gather(found.everything().values()))


@pytest.fixture(scope="module")
def page(content):
    return Page(content)


def test_the_first_screen_says_who_won(page):
    assert page.text("h1") == "glyphs8: four models merged into one"
    first = page.text().partition("Methods compared")[0]
    best = found.performance()["data"][4]  # the best on validation data that comes first
    assert best["method"] == "epimer"
    for said in ("epimer", f"{100 * best['average']:.1f}%", f"{100 * best['worst']:.1f}%", "of 4 methods", "sum"):
        assert said in first
    own, base = (found.performance()["data"][i]["average"] for i in (1, 0))
    assert f"{100 * (best['average'] - base) / (own - base):.0f}%" in first
    for advice in found.diagnosis()["advice"]:
        assert advice["text"] in first


def lossy(record):
    """Return a record of the same experiment with losses for scores."""

    def turned(row):
        shares = {key: row[key] - 1 for key in ("average", "low", "high", "worst", "validation") if key in row}
        return {**row, **shares, "tasks": {task: value - 1 for task, value in row["tasks"].items()}}

    data = [turned(row) for row in record["data"]]
    return {**record, "title": "texts: loss of merged models", "suite": "texts", "metric": "loss", "data": data}


def test_losses_are_shown_as_losses():
    record = lossy(found.performance())
    page = Page(build(gather([record])))
    assert page.text("h1") == "texts: four models merged into one"
    best = record["data"][4]
    first = page.text().partition("Methods compared")[0]
    for key in ("average", "worst"):
        assert f"{-best[key]:.3g}" in first
    low, high = (f"{-best[key]:.3g}" for key in ("high", "low"))
    assert f"95% interval {low} to {high}" in first
    assert f"[{low}, {high}]" in page.text("td")
    by = best["difference"]
    assert by > 0
    assert f"Against tsv: −{by:.3g}" in first
    assert "loss on test data" in page.text("text")
    assert "−0." not in first.replace(f"−{by:.3g}", "")


def test_a_sweep_by_losses_shows_losses():
    record = found.sweep()

    def turned(row):
        return {**row, **{k: row[k] - 1 for k in ("average", "low", "high", "worst", "validation") if row.get(k)},
                "tasks": {t: v - 1 for t, v in (row["tasks"] or {}).items()}, "unit": "loss"}  # fmt: skip

    record = {**record, "data": [turned(row) for row in record["data"]], "best": turned(record["best"])}
    cells = Page(build(gather([record]))).text("td", "dd")
    assert f"{-record['best']['validation']:.3g}" in cells
    assert "−" not in cells


def test_an_evaluation_is_shown_as_it_was_printed():
    page = Page(build(gather([found.evaluation()])))
    assert page.text("h1") == "How merged does"
    cells = page.text("td")
    for said in ("accuracy, %", "84.0", "[83.0, 85.0]", "40.0", "93.0", "digits"):
        assert said in cells
    assert "fine-tuned" in page.text("text")
    losses = Page(build(gather([found.evaluation("loss")])))
    assert "0.84" in losses.text("td")
    assert "loss, less is better" in losses.text("text")
    mixed = found.evaluation()
    mixed["tasks"][0]["metric"] = "perplexity"
    del mixed["average"], mixed["worst"]
    assert "Task by task" not in Page(build(gather([mixed]))).text()
    alone = found.evaluation()
    for row in (*alone["tasks"], alone["average"], alone["worst"]):
        del row["base"], row["fine_tuned"]
    assert "fine-tuned" not in Page(build(gather([alone]))).text("th", "button", "text")


def test_every_kind_of_chart_is_there(page):
    keys = {attributes["id"] for attributes in page.named("figure")}
    wanted = {
        "averages", "kept", "alpha-epimer", "alpha-epimer-kron", "eta-eta-fraction", "eta-margin", "landscape-all",
        "tasks", "forecast", "energy-by-rank", "layers-energy-kept", "sweep-tsv",
        *(f"task-{task}" for task in found.TASKS), *(f"landscape-{task}" for task in found.TASKS),
        *(f"conflict-{name}" for name in ("cosine", "sign", "left", "right", "interference")),
    }  # fmt: skip
    assert wanted <= keys


def test_the_page_is_sound_html(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in page.named("a")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    for svg in page.named("svg"):
        assert svg["role"] == "img"
        assert set(svg["aria-labelledby"].split()) <= set(ids)
    assert len(page.named("h1")) == 1
    assert len(page.named("figure")) == len(page.named("svg")) <= len(page.named("details"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_nothing_is_asked_of_the_network(page, content):
    (policy,) = (one["content"] for one in page.named("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    outward = [f"{k}={v}" for _, attributes in page.elements for k, v in attributes.items() if k in ("src", "srcset")]
    assert outward == []
    assert re.findall(r"https?://[^\s\"'<]+", content) == ["http://www.w3.org/2000/svg"] * 2  # a name in the script


def test_what_records_say_stays_text():
    records = [
        json.loads(json.dumps(record).replace("digits", "@").replace("epimer_kron", "@@").replace("glyphs8", "@@@"))
        for record in found.everything().values()
    ]
    text = json.dumps(records).replace("@", json.dumps(EVIL)[1:-1])
    records = json.loads(text)
    records[5]["advice"] = [{"kind": EVIL, "text": EVIL}]
    records[0]["notes"] = [EVIL, "\x00\x1b\ud800"]
    made = gather(records)
    page = Page(build(made))
    assert [attributes.get("type") for attributes in page.named("script")] == ["application/json", None]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert EVIL in page.text("th")
    assert any(EVIL in attributes.get("data-tip", "") for _, attributes in page.elements)
    for _, svg in standalone(made):
        root = ElementTree.fromstring(svg)
        assert not [one for one in root.iter() if one.tag.endswith("script")]


def test_sentences_may_quote_code():
    advice = [{"kind": "take", "text": "run `epimer <x>` now"}, {"kind": "note", "text": "a ` alone"}]
    page = build(gather([found.diagnosis() | {"advice": advice}]))
    assert "run <code>epimer &lt;x&gt;</code> now" in page
    assert "a ` alone" in page


def test_figures_stand_alone_in_plain_colours():
    records = gather(found.everything().values())
    figures = dict(standalone(records))
    page = Page(build(records))
    assert list(figures) == [f"{attributes['id']}.svg" for attributes in page.named("figure")]
    for content in figures.values():
        root = ElementTree.fromstring(content)
        assert "var(" not in content
        assert root[2].attrib["fill"] == "#ffffff"
        assert float(root.attrib["width"]) > 300


def test_many_layers_become_kinds_against_blocks():
    few, many = (gather([found.diagnosis(layers=count)]) for count in (12, 96))
    tips = [
        [one["data-tip"].partition("\n")[0] for _, one in Page(build(r)).elements if "proj" in one.get("data-tip", "")]
        for r in (few, many)
    ]
    assert "model.layers.2.q_proj.weight, digits" in tips[0]
    assert {"model.layers.*.q_proj.weight, 23", "model.layers.*.out_proj.weight, 0"} <= set(tips[1])
    assert len(tips[1]) == 96 * 5  # a map for each of five quantities


def test_a_folded_map_shows_the_mean_over_tasks():
    given = found.diagnosis(layers=96)
    name = "model.layers.7.v_proj.weight"
    layer = given["layers"][name]
    mean = sum(layer["norms"]) / len(layer["norms"]) / layer["base_norm"]
    tips = [one.get("data-tip") for _, one in Page(build(gather([given]))).elements]
    assert f"model.layers.*.v_proj.weight, 7\n{100 * mean:.1f}" in tips


@pytest.mark.parametrize("kind", list(found.everything()))
def test_each_record_makes_a_page_alone(kind):
    record = found.everything()[kind]
    page = Page(build(gather([record])))
    assert len(page.named("h1")) == 1
    assert page.text("h1")


def test_two_suites_and_two_diagnoses_have_sections_of_their_own():
    given = [found.performance("one"), found.performance("two"), found.diagnosis(), found.diagnosis(("x", "y", "z"))]
    page = Page(build(gather(given)))
    headings = page.text("h2")
    assert all(said in headings for said in ("on one", "on two", "Diagnosis of digits", "Diagnosis of x, y, z"))
    assert {"averages", "averages-2"} <= {attributes["id"] for attributes in page.named("figure")}


def test_every_merge_has_its_loss_increase_and_bound():
    record = found.diagnosis()
    page = Page(build(gather([record])))
    text = " ".join(page.text("td", "th").split())
    for method, theories in record["merges"].items():
        for one in theories:
            values = (one["scale"], one["quadratic"] / 2, one["v_s"], one["r_s"], one["bound"])
            assert " ".join([method, *(number(value) for value in values)]) in text
    assert "not those of a loss" not in page.text("p")
    assert "not those of a loss" in Page(build(gather([record | {"curvature": "task-gram"}]))).text("p")
    del record["merges"]  # as older records
    assert "merge by merge" not in Page(build(gather([record]))).text("h3")


def test_odd_records_still_make_a_page():
    bare = found.experiment("performance", "p: accuracy of merged models", [{"method": "tsv"}])
    losses = found.experiment("performance", "p", [found.score("tsv", (-1.5, -2.0, -30.0, -0.1))], ("method",))
    alone = found.diagnosis(("only",), layers=1, advice=[])
    alone["forecast"], alone["energy"], alone["eta_by_rank"] = {}, {}, []
    alone["total"]["r_s"] = alone["total"]["bound"] = None
    nan = found.landscape(4)
    nan["figure"]["joint"][0][0] = float("nan")
    empty = found.experiment("eta", "η against rank", [], ("k",))
    unknown = found.experiment("novel", "Something new", [{"method": "tsv"}])
    for record in (bare, losses, alone, nan, empty, unknown):
        Page(build(gather([record])))
    assert "Something new" in build(gather([unknown]))


def spoilt(value, chance):
    """Replace some numbers by what a measurement that went wrong leaves."""
    if isinstance(value, dict):
        return {key: spoilt(one, chance) for key, one in value.items()}
    if isinstance(value, list):
        return [spoilt(one, chance) for one in value]
    wrong = isinstance(value, float) and chance.random() < 0.2
    return chance.choice([float("nan"), float("inf"), -float("inf"), 0.0]) if wrong else value


@pytest.mark.parametrize("seed", range(6))
def test_numbers_that_are_none_leave_the_drawing_sound(seed):
    given = spoilt(found.everything(), random.Random(seed))
    given["landscape.json"]["figure"] |= {axis: found.landscape()["figure"][axis] for axis in "ab"}
    records = gather(given.values())
    page = Page(build(records))
    coordinates = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "d", "viewbox"}
    for _, attributes in page.elements:
        for name in coordinates & attributes.keys():
            assert not re.search(r"nan|inf", attributes[name]), attributes
        if "data-map" in attributes:
            json.loads(attributes["data-map"], parse_constant=pytest.fail)


def test_no_records_is_an_error():
    with pytest.raises(DataError, match="no records"):
        build(Records())


@pytest.mark.slow
def test_a_large_page_stays_small(tmp_path):
    tasks = [f"task-{i}" for i in range(20)]
    big = [found.diagnosis(tasks, layers=400), found.landscape(41), *found.everything().values()]
    path = write_page(big, tmp_path / "page.html")
    assert path.stat().st_size < 6_000_000


def test_it_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    records = found.write_all(tmp_path / "in")
    out = tmp_path / "page.html"
    out.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OutputError, match=r"page\.html cannot be written: the disk is full"):
            make_report([records], out)
    assert out.read_text() == "before"
    made = make_report([records], out, tmp_path / "figures")
    assert out.read_text().startswith("<!doctype html>")
    assert sorted(made[1:]) == sorted((tmp_path / "figures").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "in", "page.html"]


def test_the_command_needs_no_torch(tmp_path):
    records = found.write_all(tmp_path / "in")
    code = (
        "import sys; from epimer.cli import app; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"app(['report', {str(records)!r}, '-o', {str(tmp_path / 'page.html')!r}], standalone_mode=False)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("wrote ")


def test_the_command_refuses_in_one_line(tmp_path):
    given = tmp_path / "config.json"
    given.write_text("{}")
    command = [sys.executable, "-m", "epimer", "report", str(given), "-o", str(tmp_path / "page.html")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"error: {given} is JSON, but not a record of epimer")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_sections_come_in_one_order():
    titles = [section.short or section.title for section in sections(gather(found.everything().values()))]
    assert titles == [
        "Methods", "Evaluation", "lm-eval", "Sweep", "α", "η", "Landscape", "Diagnosis", "More", "Merge", "Measured",
        "Citations",
    ]  # fmt: skip


def test_a_page_without_labels_says_so_and_names_each_merge_for_what_it_is():
    """The title names no method; the merged model and the best of the sweep have cards of their own."""
    page = Page(build(gather(found.without_labels().values())))
    assert page.text("h1") == "Four models merged into one"
    cards = " ".join(page.text("dt", "dd").split())
    assert "Merged model epimer_kron scale 1.25, rank 16" in cards
    assert "Best of the sweep epimer_free scale 1 Chosen by 95.1% agreement with each task's own model, %" in cards
    text = page.text()
    assert "is not the best of the sweep" in text
    assert "every direction" not in text
    assert "alidation data" not in text
    assert "chosen without labels" in text
    same = found.without_labels()
    same["epimer.json"] |= {"method": "epimer_free", "parameters": {"rank": 32, "scale": 1.0}}
    assert "is not the best" not in Page(build(gather(same.values()))).text()
    labelled = Page(build(gather([found.sweep()]))).text()
    assert "Settings were chosen on validation data" in labelled
    assert "labels" not in labelled.partition("Settings were")[2]


def test_the_run_of_a_merge_is_told():
    """Date, size, dtype, time and memory, of the record that --record writes; without it, where to get them."""
    lasting = found.merge_record() | {"dtypes": {"bfloat16": 8256}}
    text = Page(build(gather([lasting]))).text("dd", "code")
    assert "33.0 MB in 1 files" in text
    assert "bfloat16 (8,256 parameters)" in text
    assert "--record FILE" in text
    run = lasting | {"date": "2026-11-18 12:30 UTC", "timings": {"total": 12.3}, "peak_memory": 2_500_000_000}
    for records in ([run], [lasting, run], [run, lasting]):  # two records of one merge are one merge
        page = Page(build(gather(records)))
        text = page.text("dd", "code")
        assert all(said in text for said in ("2026-11-18 12:30 UTC", "12.3 s", "2.5 GB")), text
        assert "--record" not in text
        assert page.text("h2").count("The merge") == 1


def test_symbols_are_explained_where_they_stand():
    page = Page(build(gather([found.diagnosis()])))
    shown = [data for tag, data in page.texts if tag == "abbr"]
    explained = {name: one["title"] for name, one in zip(shown, page.named("abbr"), strict=True)}
    assert {"V_S", "R_S", "bound", "α", "on atoms, %"} <= explained.keys()
    assert all(len(meaning) > 40 for meaning in explained.values())
    meanings = [one for one in page.named("dd") if one.get("class") == "meaning"]
    assert len(meanings) == 8  # of every fact of the theory


def test_forecasts_that_do_not_rank_methods_are_not_shown_as_a_ranking():
    free = found.diagnosis() | {"curvature": "task-gram"}
    ranked, unranked = (build(gather([record])) for record in (found.diagnosis(), free))
    assert "trust it as a ranking" in ranked
    assert "Least lost at its best scale" in ranked
    assert "trust it as a ranking" not in unranked
    assert "Least lost" not in unranked
    assert "compare the tasks and scales of one method, but not methods" in unranked


def test_the_headline_says_what_rests_on_one_task():
    more = {
        "p": 0.001,
        "p_holm": 0.003,
        "p_tasks": 0.25,
        "difference": 0.014,
        "trusted": 0.8,
        "difference_trusted": 0.0005,
    }
    kron = found.score("epimer_kron", (0.9, 0.8, 0.7, 0.6), difference_without={"digits": 0.02, "sum": 0.0005}, **more)
    tsv = found.score("tsv", (0.8, 0.8, 0.7, 0.6), trusted=0.79)
    record = found.experiment("performance", "s: accuracy of merged models", [tsv, kron], ("method", "against tsv"))
    page = build(gather([record]))
    expected = ("p, Holm", "p over tasks", "least without one task", "0.003", "0.250", "+0.1 (sum)", "80.0")
    assert [text for text in expected if text not in page] == []
    assert "p = 0.250 over tasks" in page
