"""Charts say what the numbers say: lengths, places and colours are read back from the SVG."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from epimer.records import MapPoint
from epimer.report import palette
from epimer.report.charts.bars import Row, bars, ranges
from epimer.report.charts.contour import contours, levels_of, region
from epimer.report.charts.frame import cut, wide
from epimer.report.charts.heat import Scale, heat
from epimer.report.charts.landscape import _free, _overlap, landscape
from epimer.report.charts.lines import Labels, Series, lines
from epimer.report.numbers import Axis, Unit, decades, fixed, number, percent, signed, ticks

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(chart):
    """Parse the standing-alone file: it must be XML."""
    return ElementTree.fromstring(chart.svg("key", "title", alone=True))


def marks(chart, shape=None):
    return [
        one for one in drawn(chart).iter() if "data-tip" in one.attrib and shape in (None, one.tag.removeprefix(SPACE))
    ]


def labelled(chart):
    return {"".join(one.itertext()): one for one in drawn(chart).iter(f"{SPACE}text")}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (1.0, "1"), (0.5, "0.5"), (-0.25, "−0.25"), (1234.5, "1230"), (99999, "1×10⁵"), (16, "16"),
        (0.000123, "1.23×10⁻⁴"), (math.nan, "–"), (math.inf, "∞"), (None, "–"), (100.0, "100"), (0.0996, "0.0996"),
        (9.999, "10"),
    ],
)  # fmt: skip
def test_numbers_read_well(value, shown):
    assert number(value) == shown


def test_percentages_and_signs():
    assert [percent(v) for v in (0.829, -0.0001, 1, None)] == ["82.9", "0.0", "100.0", "–"]
    assert [signed(v, percent) for v in (0.006, -0.075, 0.0, 0.0001)] == ["+0.6", "−7.5", "0.0", "0.0"]
    assert [fixed(v) for v in (0.4, -0.001, -0.5, 4321.0, math.nan)] == ["0.40", "0.00", "−0.50", "4320", "–"]
    assert Unit.of([0.2, None, 1.0]) == Unit(True)
    assert Unit.of([0.2, -3.0]) == Unit(False)
    assert Unit.of([0.2, 0.4], "f1") == Unit(False, "f1")
    loss, perplexity = Unit.of([-0.5], "loss"), Unit.of([-0.5], "perplexity")
    assert (loss.show(-0.5), loss.between(-0.6, -0.4), loss.difference(0.1)) == ("0.5", "0.4, 0.6", "−0.1")
    assert (perplexity.show(-0.5), perplexity.plain(None), perplexity.tick(0.0)) == ("1.65", None, "1")
    assert (Unit(True).exact(0.8294), Unit(False).exact(-1.23456)) == ("82.94%", "−1.2346")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.87), (-3, 41), (1e-7, 9e-7), (0.751, 0.752), (-1e9, 1e9)])
def test_ticks_are_round_and_within(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low - 1e-12 * abs(low) <= tick <= high + 1e-12 * abs(high) for tick in found)
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps))
    assert number(steps[0], 3).replace("×10", "e").strip("0.")[0] in "125"


def test_a_flat_axis_has_one_tick():
    assert ticks(3.0, 3.0) == [3.0]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.03, 700, [0.1, 1, 10, 100]), (0.3, 7, [0.5, 1, 2, 5]), (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (2.1, 4.9, []),
    ],
)  # fmt: skip
def test_ticks_of_a_logarithmic_axis(low, high, wanted):
    assert decades(low, high) == pytest.approx(wanted)


def test_ranges_may_be_logarithmic_where_all_is_positive():
    rows = [Row(f"{v}", v, f"{v}", v, v, v / 10, f"{v} second") for v in (1.0, 10.0, 100.0)]
    places = [float(one.attrib["cx"]) for one in marks(ranges(rows, number, ("a", "b"), "", log=True), "circle")]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.05)
    rows[0] = Row("0", 0.0, "0", 0.0, 0.0)
    places = [float(one.attrib["cx"]) for one in marks(ranges(rows, number, ("a", "b"), "", log=True), "circle")]
    assert places[2] - places[0] == pytest.approx(10 * (places[1] - places[0]), rel=0.01)


def test_bars_are_as_long_as_their_values():
    values = {"a": 0.8, "b": 0.2, "c": 0.0, "long <name> & co": 0.5}
    chart = bars([Row(n, v, f"{n} {v}") for n, v in values.items()], percent, percent, "")
    found = {one.attrib["data-tip"]: one for one in marks(chart, "rect")}
    lengths = {n: float(found[f"{n} {v}"].attrib["width"]) for n, v in values.items()}
    assert lengths["a"] == pytest.approx(4 * lengths["b"], abs=0.05)
    assert lengths["c"] == 0
    assert len({one.attrib["x"] for one in found.values()}) == 1
    ys = [float(one.attrib["y"]) for one in found.values()]
    assert ys == sorted(ys)
    assert "80.0" in labelled(chart)


def test_bars_of_negative_values_end_where_they_begin():
    chart = bars([Row("a", -2.0, "a"), Row("b", 1.0, "b")], number, number, "")
    one, two = marks(chart, "rect")
    assert float(one.attrib["x"]) + float(one.attrib["width"]) == pytest.approx(float(two.attrib["x"]), abs=0.02)
    assert float(one.attrib["width"]) == pytest.approx(2 * float(two.attrib["width"]), abs=0.05)


def test_ranges_lie_on_one_axis():
    rows = [Row("a", 0.8, "a", 0.7, 0.9, 0.5, "worst a"), Row("b", 0.6, "b", 0.6, 0.6)]
    chart = ranges(rows, percent, ("x", "y"), "")
    (a, b) = (float(one.attrib["cx"]) for one in marks(chart, "circle"))
    unit = (a - b) / 0.2
    (worst,) = marks(chart, "path")
    left = float(re.match(r"M([\d.]+) ", worst.attrib["d"])[1]) + 4.5
    assert a - left == pytest.approx(0.3 * unit, abs=0.05)
    band = next(one for one in drawn(chart).iter(f"{SPACE}line") if one.attrib.get("stroke-width") == "5")
    assert float(band.attrib["x2"]) - float(band.attrib["x1"]) == pytest.approx(0.2 * unit, abs=0.05)


def test_lines_go_through_their_points_and_bands_around_them():
    points = [(1, 2.0, 1.5, 2.5), (2, 4.0, 3.0, 4.5), (3, 3.0, 3.0, 3.0), (4, math.nan, 0, 0)]
    chart = lines([Series("s", points, "var(--c0)")], Labels("x", "y", number, number), "")
    dots = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in marks(chart, "circle")]
    assert len(dots) == 3
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0], abs=0.02)
    assert dots[0][1] - dots[2][1] == pytest.approx(dots[2][1] - dots[1][1], abs=0.02)  # 2, 3 and 4, upwards
    (path,) = drawn(chart).iter(f"{SPACE}polyline")
    assert [tuple(map(float, spot.split(","))) for spot in path.attrib["points"].split()] == dots
    (band,) = drawn(chart).iter(f"{SPACE}polygon")
    ys = [float(spot.split(",")[1]) for spot in band.attrib["points"].split()]
    unit = dots[0][1] - dots[2][1]
    assert ys == pytest.approx([dots[0][1] + (2.0 - v) * unit for v in (2.5, 4.5, 3.0, 3.0, 3.0, 1.5)], abs=0.05)
    assert [one.attrib["data-tip"] for one in marks(chart)] == [
        "s\nx 1: 2 [1.5, 2.5]",
        "s\nx 2: 4 [3, 4.5]",
        "s\nx 3: 3",
    ]


def test_ranks_are_spread_by_their_logarithm():
    points = [(k, 1.0 * k, 1.0 * k, 1.0 * k) for k in (2, 4, 8, 16, 32)]
    chart = lines([Series("s", points, "var(--c0)")], Labels("k", "y", number, number), "")
    xs = [float(one.attrib["cx"]) for one in marks(chart, "circle")]
    assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 4, abs=0.03)
    assert {"2", "4", "8", "16", "32"} <= labelled(chart).keys()


def test_lines_without_finite_points_say_so():
    chart = lines([Series("s", [(1, math.nan, 0, 0)], "var(--c0)")], Labels("x", "y", number, number), "")
    assert "No finite values." in labelled(chart)


def test_heat_maps_colour_by_value_and_leave_holes():
    chart = heat([[0.0, 0.5], [1.0, None]], ["r", "s"], ["c", "d"], fixed, "")
    found = {one.attrib["data-tip"].partition("\n")[0]: one.attrib["fill"] for one in marks(chart, "rect")}
    assert found == {"r, c": "var(--q0)", "r, d": "var(--q6)", "s, c": "var(--q11)"}
    both = Scale(-1, 1, True)
    assert [both.fill(v)[0] for v in (-1, 0, 1, 5)] == ["var(--d0)", "var(--d5)", "var(--d10)", "var(--d10)"]


def test_a_colour_has_one_meaning_whatever_the_other_values_are():
    """0.06 of 1 stays pale in a map whose largest value it is; values beyond an end have its colour."""
    small, large, beyond = (heat([[0.06, top]], ["r"], ["a", "b"], fixed, "") for top in (0.05, 1.0, 3.0))
    fills = [[one.attrib["fill"] for one in marks(chart, "rect")] for chart in (small, large, beyond)]
    assert fills == [["var(--q0)", "var(--q0)"], ["var(--q0)", "var(--q11)"], ["var(--q0)", "var(--q11)"]]
    assert ["≥ 1.00" in labelled(chart) for chart in (small, large, beyond)] == [False, False, True]
    assert {"0.00", "1.00"} <= labelled(small).keys()  # the legend
    logarithmic = Scale(1e-4, 1.0, log=True)
    shades = [logarithmic.fill(v)[0] for v in (0.0, 1e-4, 0.011, 1.0, 7.0)]
    assert shades == ["var(--q0)", "var(--q0)", "var(--q6)", "var(--q11)", "var(--q11)"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.11.self_attn.q_proj.weight",
        "vision_model.encoder.layers.7.self_attn.out_proj.weight",
        "bert.encoder.layer.23.attention.output.dense.weight",
        "text_model.encoder.transformer.blocks.101.mlp.experts.15.down_projection.weight",
    ],
)
@pytest.mark.parametrize("room", [120, 160, 200])
def test_a_layers_number_is_never_cut_away(name, room):
    short = cut(name, room)
    assert wide(short) <= room or len(short) < 12
    number = next(part for part in name.split(".") if part.isdigit())
    assert number in re.split(r"[.…]", short)


def test_a_name_of_several_words_is_no_tensors_name():
    """A decimal point ends no part of a name."""
    assert cut("epimer_kron at scale 0.85, refined by 8 steps", 180).startswith("epimer_kr")


def test_a_single_point_is_a_number():
    series = [Series("tsv", [(16.0, 0.8123, 0.8, 0.82)], "red"), Series("average", [(16.0, 0.7, 0.7, 0.7)], "blue")]
    chart = lines(series, Labels("rank k", "score", str, str), "")
    assert not marks(chart)
    assert not list(drawn(chart).iter(f"{SPACE}polyline"))
    assert {"0.8123 [0.8, 0.82]", "tsv, rank k 16", "0.7", "average, rank k 16", "score"} <= labelled(chart).keys()
    more = Series("ties", [(4.0, 0.1, 0.1, 0.1), (8.0, 0.2, 0.2, 0.2)], "green")
    assert len(list(drawn(lines([*series, more], Labels("k", "s", str, str), "")).iter(f"{SPACE}polyline"))) == 3


def test_contrast_is_that_of_wcag():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_on_every_colour_it_is_put_on(theme):
    colours = palette.variables(theme)
    steps = [palette.shade((i + 0.5) / palette.STEPS) for i in range(palette.STEPS)]
    steps += [palette.side(i / 5) for i in range(-5, 6)]
    for fill, ink in steps:
        assert palette.contrast(*(colours[name[6:-1]] for name in (fill, ink))) >= 4.5, (fill, ink)
    for ink in ("ink", "soft", "accent", "good", "warn"):
        assert min(palette.contrast(colours[ink], colours[ground]) for ground in ("paper", "ground")) >= 4.5
    for i in range(8):
        assert palette.contrast(colours[f"c{i}"], colours["paper"]) >= 2.8  # marks, not text
    ramp = [palette._luminance(colours[f"q{i}"]) for i in range(palette.STEPS)]
    assert ramp == sorted(ramp, reverse=theme == "light")


AXIS = [-2 + 4 * i / 40 for i in range(41)]
CONE = [[math.hypot(x, y) for x in AXIS] for y in AXIS]


def area(shape):
    return sum(x * v - u * y for (x, y), (u, v) in zip(shape, [*shape[1:], shape[0]], strict=True)) / 2


def test_the_contour_of_a_cone_is_a_circle():
    (line,) = contours(CONE, AXIS, AXIS, 1.5)
    assert line[0] == line[-1]
    assert all(math.hypot(x, y) == pytest.approx(1.5, abs=2e-3) for x, y in line)
    assert abs(area(line[:-1])) == pytest.approx(math.pi * 1.5**2, rel=2e-3)


def test_contours_that_leave_the_grid_are_open():
    found = contours(CONE, AXIS, AXIS, 2.3)
    assert len(found) == 4
    for line in found:
        assert {max(map(abs, spot)) for spot in (line[0], line[-1])} == {2.0}


def test_the_region_above_a_level_has_the_area_it_should():
    shapes = region(CONE, AXIS, AXIS, 1.5)
    assert sum(abs(area(shape)) for shape in shapes) == pytest.approx(16 - math.pi * 1.5**2, rel=2e-3)
    assert all(max(math.hypot(x, y) for x, y in shape) >= 1.5 - 1e-9 for shape in shapes)


@pytest.mark.parametrize("corners", list(itertools.product([0.0, 1.0, 4.0], repeat=4)))
def test_lines_and_regions_agree_in_every_cell(corners):
    """The region's edge inside the cell is the contour, saddles included."""
    values, level = [corners[:2], corners[2:]], 1.5
    cut = {frozenset(pair) for line in contours(values, [0, 1], [0, 1], level) for pair in itertools.pairwise(line)}
    edges = set()
    for shape in region(values, [0, 1], [0, 1], level):
        for one, two in zip(shape, [*shape[1:], shape[0]], strict=True):
            outer = any(one[i] == two[i] and one[i] in (0, 1) for i in (0, 1))
            edges |= set() if outer else {frozenset((one, two))}
    assert cut == edges


def test_contours_pass_over_what_is_not_finite():
    values = [[math.nan, *row[1:]] for row in CONE]
    assert all(x > AXIS[0] for line in contours(values, AXIS, AXIS, 1.9) for x, _ in line)
    assert levels_of([[1.0, 1.0], [1.0, 1.0]], 5) == []
    assert levels_of([[1.0, 100.0], [1.0, 1.0]], 1) == pytest.approx([10.0])
    assert levels_of([[1.0, 3.0], [1.0, 1.0]], 1) == pytest.approx([2.0])


def test_a_landscape_marks_models_where_they_are():
    points = [MapPoint("base", "base", 0, 0), MapPoint("t", "task", 1, -1), MapPoint("m", "merged", -1, 1, 0.5, 3.0)]
    chart = landscape(AXIS, AXIS, CONE, points, "", "")
    x, y = Axis(-2, 2, 44, 438), None
    (circle,) = marks(chart, "circle")
    assert float(circle.attrib["cx"]) == pytest.approx(x(1), abs=0.02)
    sheet = next(one for one in drawn(chart).iter() if "data-map" in one.attrib)
    y = Axis(-2, 2, float(sheet.attrib["y"]) + float(sheet.attrib["height"]), float(sheet.attrib["y"]))
    assert float(circle.attrib["cy"]) == pytest.approx(y(-1), abs=0.02)
    assert "m (merged)\nits own loss 3; off the plane by 50.0%" in [one.attrib["data-tip"] for one in marks(chart)]
    levels = [float(one.attrib["data-level"]) for one in drawn(chart).iter() if "data-level" in one.attrib]
    assert levels == pytest.approx(levels_of(CONE, len(levels)), rel=1e-5)


def test_names_of_near_points_do_not_overlap():
    spots = [(200 + 7 * math.cos(i), 150 + 7 * math.sin(i)) for i in range(9)]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    labels = []
    for i, (x, y) in enumerate(spots):
        labels.append(_free(x, y, wide(f"a-model-{i}", 10.5), taken + labels, (40, 10, 440, 300)))
    for one, two in itertools.combinations(labels, 2):
        assert _overlap(one, two) == 0
    assert all(box[0] >= 40 and box[2] <= 440 for box in labels)


EXTREMES = [
    -1.7976931348623157e308, -1e308, -1e150, -1.0, -5e-324, 0.0, 5e-324, 1e-323, 1e-320, 3.3288236147706117e-307,
    3.328823614770612e-307, 1e-150, 1.0, 1.0000000000000002, 1e16, 1e150, 1e308, 1.0000000000000002e308,
]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), list(itertools.combinations(EXTREMES, 2)))
def test_axes_hold_any_two_numbers(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(map(math.isfinite, found))
    for log in (False, True):
        if low > 0 or not log:
            axis = Axis(low, high, 0.0, 10.0, log)
            assert 0.0 <= axis(low) <= axis(high) <= 10.0 or not math.isfinite(high - low)


@pytest.mark.parametrize("size", [1e308, -1e308, 1e-320, math.inf, math.nan, 1e200])
def test_a_line_and_a_bar_with_an_extreme_value_are_drawn(size):
    labels = Labels("x", "y", number, number)
    points = [(0.0, 1.0, 0.5, 2.0), (1.0, size, size, size), (2.0, 3.0, -size, size)]
    rows = [Row("a", 1.0, "a", 0.5, size, size, "a"), Row("b", 2.0, "b", -size, size)]
    for chart in (lines([Series("a", points, "red")], labels, "said"), ranges(rows, number, ("x", "y"), "said")):
        places = [float(one.attrib["cx"]) for one in drawn(chart).iter(f"{SPACE}circle")]
        assert len(places) >= 2
        assert all(map(math.isfinite, places))


def test_a_name_without_end_is_cut_to_the_room_it_has():
    """Its width was once computed again for every letter left out: a million letters took days."""
    name = "m" * 300_000 + "x" * 700_000
    short = cut(name, 100.0)
    assert short.startswith("m")
    assert short.endswith("x")
    assert wide(cut("layers.0.attention.weight", 100.0)) <= 100.0 < wide("layers.0.attention.weight")
