"""The tasks of clip8: counts of the papers behind the datasets, public lists of names, the order of the data."""

import pytest

from epimer.errors import DataError
from epimer.experiments.clip8.tasks import TASKS, VARIANTS, class_names

COUNTS = {
    "SUN397": (397, 2),
    "Cars": (196, 8),
    "RESISC45": (45, 18),
    "EuroSAT": (10, 3),
    "SVHN": (10, 1),
    "GTSRB": (43, 3),
    "MNIST": (10, 1),
    "DTD": (47, 8),
}
BY_TITLE = {task.title: task for task in TASKS}


def test_the_eight_tasks():
    assert {task.title: (len(task.classes), len(task.templates)) for task in TASKS} == COUNTS
    for task in TASKS:
        assert len(set(task.classes)) == len(task.classes)
        assert len(set(task.templates)) == len(task.templates)
        assert all(template.count("{}") == 1 for template in task.templates)
        assert all(name == " ".join(name.split()) for name in task.classes)
        assert not task.aliases or len(task.aliases) == len(task.classes)


def test_lists_that_are_sorted_by_their_makers_are_sorted():
    """The folders of SUN397, RESISC45 and DTD are in the order of their names, the cars in that of their makers."""
    for title in ("SUN397", "RESISC45", "DTD"):
        assert list(BY_TITLE[title].classes) == sorted(BY_TITLE[title].classes)
    makers = [name.split()[0] for name in BY_TITLE["Cars"].classes]
    assert [maker for i, maker in enumerate(makers) if i == 0 or makers[i - 1] != maker] == sorted(set(makers))


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("SUN397", {0: "abbey", 8: "apartment building outdoor", 206: "jail cell", 207: "jail indoor"}),
        ("Cars", {0: "AM General Hummer SUV 2000", 38: "Bentley Continental Supersports Conv. Convertible 2012"}),
        ("Cars", {144: "Jeep Patriot SUV 2012", 173: "Ram C/V Cargo Van Minivan 2012"}),
        ("RESISC45", {2: "baseball diamond", 16: "ground track field", 37: "snowberg", 44: "wetland"}),
        ("EuroSAT", {2: "brushland or shrubland", 7: "residential buildings or homes or apartments", 9: "lake or sea"}),
        ("GTSRB", {6: "end / de-restriction of 80 kph speed limit", 14: "stop", 15: "empty red and white circle"}),
        (
            "GTSRB",
            {
                17: "red circle with white horizonal stripe no entry",
                33: "blue circle with white right turn arrow mandatory",
            },
        ),
        (
            "GTSRB",
            {
                29: "red and white triangle with bicyle warning",
                40: "blue circle with white arrows indicating a traffic circle",
            },
        ),
        ("DTD", {5: "chequered", 30: "polka-dotted", 35: "spiralled", 46: "zigzagged"}),
    ],
)
def test_labels_are_those_of_public_lists(title, names):
    assert {label: BY_TITLE[title].classes[label] for label in names} == names


@pytest.mark.parametrize(
    ("title", "sentences"),
    [
        ("SUN397", ("a photo of a X.", "a photo of the X.")),
        ("Cars", ("i love my X!", "a photo of my X.", "a photo of my dirty X.", "a photo of my old X.")),
        ("RESISC45", ("satellite imagery of X.", "aerial photo of a X.", "satellite view of the X.")),
        ("EuroSAT", ("a centered satellite photo of X.", "a centered satellite photo of the X.")),
        ("SVHN", ('a photo of the number: "X".',)),
        ("GTSRB", ('a zoomed in photo of a "X" traffic sign.', 'a close up photo of a "X" traffic sign.')),
        ("MNIST", ('a photo of the number: "X".',)),
        ("DTD", ("a photo of a X texture.", "a photo of the X object.")),
    ],
)
def test_sentences_are_clips(title, sentences):
    assert set(sentences) <= {template.format("X") for template in BY_TITLE[title].templates}


def test_ids_are_those_of_the_design_notes():
    assert [task.data for task in TASKS] == [
        *("tanganke/sun397", "tanganke/stanford_cars", "tanganke/resisc45", "tanganke/eurosat"),
        *("ufldl-stanford/svhn", "tanganke/gtsrb", "ylecun/mnist", "tanganke/dtd"),
    ]
    tuned = VARIANTS["L/14"].tuned.format(TASKS[1].name)
    assert (VARIANTS["L/14"].base, tuned) == (
        "openai/clip-vit-large-patch14",
        "tanganke/clip-vit-large-patch14_stanford-cars",
    )


def test_names_follow_the_order_of_the_data():
    eurosat, gtsrb, mnist = BY_TITLE["EuroSAT"], BY_TITLE["GTSRB"], BY_TITLE["MNIST"]
    assert class_names(eurosat, None) == list(eurosat.classes)
    assert class_names(eurosat, list(reversed(eurosat.aliases))) == list(reversed(eurosat.classes))
    assert class_names(eurosat, ["Annual_Crop_Land", *eurosat.aliases[1:9], "wet_land"]) == [
        *eurosat.classes[:9],
        "wet land",
    ]
    numbers = sorted(map(str, range(43)))  # 0, 1, 10, 11, …
    assert class_names(gtsrb, numbers)[:3] == [gtsrb.classes[0], gtsrb.classes[1], gtsrb.classes[10]]
    assert class_names(mnist, list("9876543210")) == list("9876543210")
    with pytest.raises(DataError, match=r"tanganke/gtsrb has 2 classes \('a', 'b'\), expected the 43 of GTSRB"):
        class_names(gtsrb, ["a", "b"])
