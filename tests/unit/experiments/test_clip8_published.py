"""Published averages against the papers' rows, and the warning that stands next to them."""

import pytest

from epimer.experiments.bench import AS_PUBLISHED, CANDIDATES
from epimer.experiments.clip8.published import FUSION_BENCH, PAPER, PUBLISHED, SOURCES, remarks
from epimer.experiments.clip8.tasks import VARIANTS
from epimer.experiments.paper import MATCHED


def test_published_numbers_are_the_averages_of_the_papers_rows():
    """Recomputed from the paper's table by task (Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN)."""
    rows = {
        ("B/32", "zero-shot"): (597, 436, 451, 326, 482, 602, 631, 316),
        ("B/32", "tsv, k = 32"): (675, 657, 959, 881, 990, 835, 674, 903),
        ("B/32", "epimer (as published)"): (672, 694, 965, 914, 993, 834, 665, 926),
        ("B/16", "average"): (672, 504, 760, 599, 941, 759, 677, 765),
        ("B/16", "epimer (as published)"): (804, 722, 977, 944, 993, 869, 710, 941),
        ("L/14", "fine-tuned"): (934, 839, 999, 993, 997, 973, 824, 981),
        ("L/14", "fisher"): (874, 760, 646, 507, 755, 760, 788, 671),
        ("L/14", "epimer (as published)"): (901, 771, 984, 973, 995, 914, 763, 949),
    }
    for (variant, method), cells in rows.items():
        assert PUBLISHED[variant][PAPER][method] == pytest.approx(sum(cells) / 80, abs=0.11)
    cells = (65.4, 62.6, 70.8, 76.9, 64.5, 54.9, 86.3, 50.9)
    assert PUBLISHED["B/32"][FUSION_BENCH]["average"] == pytest.approx(sum(cells) / 8, abs=0.06)
    cells = (71.1, 74.6, 86.5, 89.0, 83.4, 90.4, 98.1, 68.5)
    assert PUBLISHED["B/32"][FUSION_BENCH]["iso_cts"] == pytest.approx(sum(cells) / 8, abs=0.06)
    assert PUBLISHED.keys() == VARIANTS.keys()


def test_every_number_has_a_source_and_a_row():
    rows = {"zero-shot", "fine-tuned", MATCHED.name, *(candidate.name for candidate in (*CANDIDATES, *AS_PUBLISHED))}
    for averages in PUBLISHED.values():
        assert averages.keys() == SOURCES.keys()
        assert set().union(*averages.values()) <= rows
    assert "arXiv:2605.26693" in SOURCES[PAPER]
    assert any("arXiv:2406.03280" in remark for remark in remarks("tanganke"))


@pytest.mark.parametrize(
    ("family", "own", "other"), [("tanganke", FUSION_BENCH, PAPER), ("task_vectors", PAPER, FUSION_BENCH)]
)
def test_the_warning_names_the_other_family(family, own, other):
    warning, same, *_ = remarks(family)
    assert warning.startswith("WARNING: never compare across checkpoint families")
    assert f"'{other}' is of others" in warning
    assert f"'{own}' is of these checkpoints" in same
