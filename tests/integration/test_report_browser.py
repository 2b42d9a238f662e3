"""The report in a real browser: nothing fails, nothing leaves the page, and what can be used is used."""

import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import found
from chromium import Watched
from epimer.report.write import make_report


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The page of one record of every kind, made by the command line."""
    folder = tmp_path_factory.mktemp("report")
    found.write_all(folder / "in")
    command = [sys.executable, "-m", "epimer", "report", str(folder / "in"), "-o", str(folder / "page.html"), "-q"]
    subprocess.run(command, check=True)
    return folder / "page.html"


@pytest.fixture
def opened(browser, file):
    """Open the page; afterwards there must have been no error, and no request but for the page itself."""
    watched = Watched(browser, file)
    yield watched.page
    watched.context.close()
    assert watched.trouble == []
    outward = [url for url in watched.asked if not url.startswith(("blob:", "data:"))]
    assert outward == [file.as_uri()]


def test_every_chart_is_drawn(opened):
    figures = opened.locator("figure")
    count = figures.count()
    assert count >= 30
    for select in opened.locator("select[data-choice]").all():  # show every option once
        for value in select.locator("option").evaluate_all("options => options.map(o => o.value)"):
            select.select_option(value)
            for svg in opened.locator(f"[data-of='{select.get_attribute('data-choice')}'] svg:visible").all():
                box = svg.bounding_box()
                assert box["width"] > 250
                assert box["height"] > 60
    for svg in opened.locator("figure svg:visible").all():
        assert svg.bounding_box()["width"] > 250
    clipped = opened.evaluate(
        """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
          const box = svg.viewBox.baseVal;
          return [...svg.querySelectorAll('text')].filter(text => {
            if (!text.getClientRects().length) return false;
            const part = text.getBBox(), at = text.getCTM(), own = svg.getCTM();
            const corners = [[part.x, part.y], [part.x + part.width, part.y + part.height]].map(([x, y]) =>
              new DOMPoint(x, y).matrixTransform(own.inverse().multiply(at)));
            return corners.some(c => c.x < -1 || c.y < -1 || c.x > box.width + 1 || c.y > box.height + 1);
          }).map(text => svg.closest('figure').id + ': ' + text.textContent);
        })"""
    )
    assert clipped == []


def test_hovering_a_mark_tells_its_value(opened):
    best = found.performance()["data"][4]
    bar = opened.locator("#task-digits rect[data-tip^='epimer on digits']")
    bar.hover()
    assert opened.locator("#tip").inner_text() == f"epimer on digits\n{100 * best['tasks']['digits']:.2f}%"
    opened.mouse.move(5, 5)
    assert opened.locator("#tip").is_hidden()


def test_hovering_a_landscape_tells_the_loss_at_the_nearest_point(opened):
    figure = found.landscape()["figure"]
    sheet = opened.locator("#landscape-all [data-map]")
    sheet.scroll_into_view_if_needed()
    box = sheet.bounding_box()
    opened.mouse.move(box["x"] + box["width"] * 1 / 14, box["y"] + box["height"] * 13 / 14)
    said = opened.locator("#tip").inner_text().splitlines()
    assert said[0].startswith(f"a {figure['a'][1]:.4g}, b {figure['b'][1]:.4g}")
    assert float(said[1].removeprefix("loss ")) == pytest.approx(figure["joint"][1][1], rel=1e-4)


def test_tables_sort_by_click_and_by_keyboard(opened):
    table = opened.locator("#methods table").first
    column = table.locator("thead th", has_text="merge s")
    names = table.locator("tbody th")
    before = names.all_inner_texts()
    column.locator("button").click()
    timed = [row for row in found.performance()["data"] if "seconds" in row]
    slowest = [row["method"] for row in sorted(timed, key=lambda row: -row["seconds"])]
    assert names.all_inner_texts() == [*slowest, "few-shot probe", "fine-tuned"]  # what has no value comes last
    assert column.get_attribute("aria-sort") == "descending"
    column.locator("button").focus()
    opened.keyboard.press("Enter")
    assert names.all_inner_texts() == [*slowest[::-1], "few-shot probe", "fine-tuned"]
    assert column.get_attribute("aria-sort") == "ascending"
    table.locator("thead th button").first.click()
    assert names.all_inner_texts() == sorted(before)
    assert table.locator("th[aria-sort]").count() == 1


def test_choosing_a_task_shows_its_chart(opened):
    methods = opened.locator("#methods")
    assert methods.locator("figure:visible").evaluate_all("f => f.map(x => x.id)") == [
        "averages",
        "task-digits",
        "kept",
    ]
    methods.get_by_role("combobox", name="Task", exact=True).select_option(label="sum")
    assert methods.locator("figure:visible").evaluate_all("f => f.map(x => x.id)") == ["averages", "task-sum", "kept"]
    opened.locator("#landscape").get_by_role("combobox", name="Task", exact=True).select_option(label="greek")
    assert opened.locator("#landscape-greek").is_visible()
    assert opened.locator("#landscape-digits").is_hidden()


def test_the_arrow_keys_go_through_a_chart(opened):
    opened.locator("#averages svg").focus()
    tip = opened.locator("#tip")
    opened.keyboard.press("ArrowRight")
    first = tip.inner_text()
    assert first.startswith("fine-tuned")
    opened.keyboard.press("ArrowRight")
    assert tip.inner_text() != first
    assert opened.locator("#averages .on").count() == 1
    opened.keyboard.press("ArrowLeft")
    assert tip.inner_text() == first
    assert tip.get_attribute("aria-live") == "polite"
    opened.keyboard.press("Escape")
    assert tip.is_hidden()


def test_everything_is_reached_by_the_tab_key(opened):
    reached = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("document.activeElement.tagName + ':' + (document.activeElement.id || '')"))
        if {"A:", "BUTTON:theme", "SELECT:choose-task", "BUTTON:", "svg:"} <= reached:
            return
    pytest.fail(f"reached only {reached}")


def test_a_screen_reader_finds_names(opened):
    tree = opened.locator("body").aria_snapshot()
    assert re.search(r'heading "glyphs8: four models merged into one" \[level=1\]', tree)
    assert 'navigation "Contents"' in tree
    assert 'img "Average and worst task' in tree
    assert 'combobox "Task":' in tree
    assert 'button "Save as PNG: Average and worst task"' in tree


def colours(page) -> tuple[str, str, str]:
    return tuple(
        page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('#averages circle[data-tip]')).fill,
                      getComputedStyle(document.querySelector('#averages svg')).fill]"""
        )
    )


def test_dark_follows_the_system_and_the_button(browser, file):
    light, dark = (Watched(browser, file, color_scheme=scheme) for scheme in ("light", "dark"))
    seen = colours(light.page), colours(dark.page)
    assert all(one != two for one, two in zip(*seen, strict=True))
    dark.page.locator("#theme").click()
    assert colours(dark.page) == seen[0]
    light.page.locator("#theme").click()
    assert colours(light.page) == seen[1]
    light.page.emulate_media(media="print")  # paper is white, whatever was chosen
    assert colours(light.page)[1:] == seen[0][1:]
    assert light.trouble == dark.trouble == []
    for watched in (light, dark):
        watched.context.close()


def test_it_prints(opened):
    opened.emulate_media(media="print")
    assert opened.locator("nav").is_hidden()
    assert opened.locator("#averages button").first.is_hidden()
    assert opened.locator("#averages svg").is_visible()
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    pdf = opened.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 25


def test_it_fits_a_phone(browser, file):
    watched = Watched(browser, file, has_touch=True)
    watched.page.set_viewport_size({"width": 360, "height": 740})
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 360
    watched.context.close()
    assert watched.trouble == []


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory) -> Path:
    """The page of a sweep without labels, a merge of it, a diagnosis and an evaluation; 12 layers of a transformer."""
    folder = tmp_path_factory.mktemp("unlabelled")
    records = found.without_labels()
    diagnosis = records["diagnosis.json"]
    named = (f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(6) for kind in ("q", "out"))
    diagnosis["layers"] = dict(zip(named, diagnosis["layers"].values(), strict=True))
    diagnosis["eta_by_rank"] = diagnosis["eta_by_rank"][-1:]
    make_report([found.write_all(folder / "in", records)], folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def wide_page(browser, unlabelled):
    """That page on a screen of 1400 x 900."""
    watched = Watched(browser, unlabelled)
    watched.page.set_viewport_size({"width": 1400, "height": 900})
    yield watched.page
    watched.context.close()
    assert watched.trouble == []


def test_scores_are_on_the_first_screen(wide_page):
    tables = wide_page.locator("#scores table:visible")
    assert tables.count() == 2
    for i in range(2):
        box = tables.nth(i).bounding_box()
        assert box["y"] + box["height"] < 900
    shown = wide_page.locator("#scores").inner_text()
    for said in ("84.0", "90.0", "95.1", "agreement with each task's own model, %"):
        assert said in shown
    summary = wide_page.locator("#summary").inner_text()
    assert "every direction" not in summary
    assert "is not the best of the sweep" in summary


def test_scores_are_near_the_top_on_a_phone(browser, unlabelled):
    watched = Watched(browser, unlabelled, has_touch=True)
    watched.page.set_viewport_size({"width": 420, "height": 900})
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 420
    assert watched.page.locator("#scores table").first.bounding_box()["y"] < 900
    watched.context.close()


def test_labels_of_layers_have_the_layers_number(wide_page):
    labels = wide_page.locator("#layers-energy-kept svg text[text-anchor=end]")
    wide_page.get_by_role("combobox", name="Show", exact=True).select_option(label="energy kept")
    texts = labels.evaluate_all("all => all.map(text => text.textContent)")
    assert [text for text in texts if "_proj" in text] == [
        f"{i}.self_attn.{k}_proj" for i in range(6) for k in ("q", "out")
    ]


def test_colours_of_small_values_are_pale_and_the_legend_states_the_scale(wide_page):
    """Luminance from 0 to 1 of the cell with the least and of the one with the largest value."""
    cells = wide_page.locator("#forecast rect[data-tip]").evaluate_all(
        """all => all.map(cell => [parseFloat(cell.dataset.tip.match(/loses ([\\d.]+)%/)[1]),
             getComputedStyle(cell).fill.match(/\\d+/g).map(Number).reduce((sum, part) => sum + part) / 765])"""
    )
    cells.sort()
    for value, light in cells:
        assert light == pytest.approx(cells[0][1], abs=0.2) if value < 20 else light < 0.95
    assert all(one[1] >= two[1] - 1e-9 for one, two in itertools.pairwise(cells))
    texts = wide_page.locator("#forecast svg text").all_text_contents()
    assert {"0.00", "1.00"} <= set(texts)
    assert "−1.00" in wide_page.locator("#conflict-cosine svg text").all_text_contents()


def test_one_point_is_a_number_and_symbols_are_explained(wide_page):
    eta = wide_page.locator("#diagnosis-eta-fraction, #diagnosis figure:has-text('η against rank')").first
    assert eta.locator("polyline").count() == 0
    assert "rank k 32" in eta.inner_text()
    meanings = wide_page.locator("#diagnosis .facts .meaning:visible")
    assert meanings.count() == 8
    assert (
        wide_page.locator("#diagnosis th abbr", has_text="V_S").first.get_attribute("title").startswith("The variance")
    )


@pytest.mark.parametrize("width", [1400, 420])
def test_a_table_that_is_cut_says_so_until_it_is_scrolled(browser, tmp_path, width):
    """A table of every column of a comparison, wider than its box."""
    record = found.performance()
    for row in record["data"][2:]:
        row |= {
            "p_holm": 0.01,
            "p_tasks": 0.2,
            "trusted": 0.7,
            "difference_trusted": 0.01,
            "difference": 0.01,
            "p": 0.1,
        }
        row |= {"difference_without": {"a task with a rather long name": 0.01}}
        row["method"] += " with some parameters that it was given"
    make_report([found.write_all(tmp_path / "in", {"performance.json": record})], tmp_path / "page.html")
    watched = Watched(browser, tmp_path / "page.html")
    page = watched.page
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    box = page.locator("#methods .scroll").first
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    hint = "box => [getComputedStyle(box, '::before').content, getComputedStyle(box).boxShadow]"
    box.and_(page.locator("[data-more]")).wait_for()
    content, shadow = box.evaluate(hint)
    assert "Scroll sideways" in content
    assert "inset" in shadow
    box.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    box.and_(page.locator(":not([data-more])")).wait_for()
    assert box.evaluate(hint)[0] == "none"
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    for one in page.locator(".scroll:visible").all():
        if one.evaluate("b => b.scrollLeft + b.clientWidth < b.scrollWidth - 1"):
            one.and_(page.locator("[data-more]")).wait_for()
    watched.context.close()
    assert watched.trouble == []


def saved(page, figure: str, kind: str) -> tuple[str, bytes]:
    with page.expect_download() as download:
        page.locator(f"#{figure} button[data-save={kind}]").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


@pytest.mark.parametrize("figure", ["averages", "landscape-all", "conflict-cosine", "alpha-epimer"])
def test_figures_are_saved_on_white_even_in_the_dark(browser, file, figure):
    watched = Watched(browser, file, color_scheme="dark")
    name, svg = saved(watched.page, figure, "svg")
    assert name == f"{figure}.svg"
    assert b"var(" not in svg
    assert b"data-tip" not in svg
    name, png = saved(watched.page, figure, "png")
    assert name == f"{figure}.png"
    width, height = watched.page.eval_on_selector(
        f"#{figure} svg", "s => [s.viewBox.baseVal.width, s.viewBox.baseVal.height]"
    )
    watched.context.close()
    assert watched.trouble == []
    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert image.size == (3 * width, 3 * height)
    assert [image.getpixel(spot) for spot in ((0, 0), (image.width - 1, image.height - 1))] == [(255, 255, 255)] * 2
    assert len(image.getcolors(1 << 24)) > 20


def test_a_figure_of_the_command_line_is_a_picture_of_its_own(browser, tmp_path):
    files = make_report([found.write_all(tmp_path / "in")], tmp_path / "page.html", tmp_path / "figures")
    watched = Watched(browser, next(path for path in files if path.name == "landscape-all.svg"))
    image = Image.open(io.BytesIO(watched.page.screenshot())).convert("RGB")
    watched.context.close()
    assert len(image.getcolors(1 << 24)) > 20
