"""What clip8 is made of: counts of the papers behind the datasets, names in the data's own order, splits apart."""

import io

import pytest
import torch
from PIL import Image
from pyarrow import parquet

from epimer.errors import DataError
from epimer.experiments.clip8.images import ImageSplit, card_names, label_names, split_rows
from epimer.experiments.clip8.published import FUSION_BENCH, PAPER, PUBLISHED, remarks
from epimer.experiments.clip8.tasks import TASKS, VARIANTS, class_names
from epimer.tasks.data import open_data
from tiny_clip import data_files, shard, write_files

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


def test_the_names_in_the_data_are_found(tmp_path):
    names = ["c", "a", "b"]
    (tmp_path / "named.parquet").write_bytes(shard([0, 1, 2], names, 0))
    (tmp_path / "plain.parquet").write_bytes(shard([0, 1, 2], None, 0))
    assert label_names(open_data(str(tmp_path / "named.parquet"))) == names
    assert label_names(open_data(str(tmp_path / "plain.parquet"))) is None
    write_files(tmp_path, {"joined": data_files(BY_TITLE["DTD"], 0, names)})
    assert label_names(open_data(str(tmp_path / "joined"), split="train")) == names
    for name in names:
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (3, 3)).save(tmp_path / "images" / name / "x.png")
    assert label_names(open_data(str(tmp_path / "images"))) == ["a", "b", "c"]
    head = "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n"
    numbered = "      class_label:\n        names:\n" + "".join(f"          '{i}': n{i}\n" for i in range(12))
    (tmp_path / "README.md").write_text(head + numbered + "---\n# data\n")
    assert card_names(tmp_path / "README.md") == [f"n{i}" for i in range(12)]
    (tmp_path / "README.md").write_text("# data\n")
    assert card_names(tmp_path / "README.md") is None
    assert card_names(tmp_path / "nothing.md") is None


@pytest.mark.parametrize(("train", "limit"), [(2, None), (37, None), (37, 3), (9000, None), (9000, 100)])
def test_splits_share_no_sample(train, limit):
    rows = split_rows(train, 50, limit=limit, seed=3)
    assert not set(rows["train"]) & set(rows["val"])
    assert set(rows["train"]) | set(rows["val"]) <= set(range(train))
    assert all(list(some) == sorted(set(some)) for some in rows.values())
    assert rows == split_rows(train, 50, limit=limit, seed=3)
    held = {2: 1, 37: 3, 9000: 500}[train]
    sizes = {"train": train - held, "val": held, "test": 50}
    assert {split: len(some) for split, some in rows.items()} == {
        split: min(size, limit or size) for split, size in sizes.items()
    }
    if train == 9000:
        assert rows != split_rows(train, 50, limit=limit, seed=4)
        whole = split_rows(train, 50, limit=None, seed=3)  # a quick look is a part of the whole
        assert all(set(rows[split]) <= set(whole[split]) for split in rows)


def test_one_sample_cannot_be_split():
    with pytest.raises(DataError, match="expected at least 2 in the train split"):
        split_rows(1, 5, limit=None, seed=0)


class Bytes:
    """An image processor that only scales."""

    do_rescale = do_normalize = True
    rescale_factor, image_mean, image_std = 1 / 255, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]

    def __init__(self):
        self.seen = 0

    def __call__(self, images, **how):
        assert how == {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        self.seen += len(images)
        pixels = [torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(3, 3, 3) for image in images]
        return {"pixel_values": torch.stack(pixels).permute(0, 3, 1, 2)}


def test_images_are_decoded_when_they_are_asked_for_and_small_splits_once(tmp_path, monkeypatch):
    content = torch.randint(0, 256, (7, 3, 3, 3), dtype=torch.uint8)
    for i, pixels in enumerate(content):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        file = io.BytesIO()
        Image.fromarray(pixels.numpy()).save(file, "PNG")
        (folder / f"{i}.png").write_bytes(file.getvalue())
    table, processor = open_data(str(tmp_path)), Bytes()
    order = [0, 2, 4, 6, 1, 3, 5]  # by folder
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    expected = ((content.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    rows = ImageSplit(table, [1, 2, 4, 6], processor, {"a": 0, "b": 1}, 2, torch.device("cpu"))
    assert processor.seen == 0
    for _ in range(2):
        batches = list(rows.batches(3))
        assert [len(y) for _, y in batches] == [3, 1]
        assert torch.cat([y for _, y in batches]).tolist() == [0, 0, 1, 1]
        found = torch.cat([x["pixel_values"] for x, _ in batches])
        torch.testing.assert_close(found, expected[[order[i] for i in (1, 2, 4, 6)]], rtol=0, atol=1e-6)
    assert processor.seen == 4
    ((inputs, labels),) = rows.batches(10, torch.tensor([3, 0]))
    torch.testing.assert_close(inputs["pixel_values"], expected[[order[6], order[1]]], rtol=0, atol=1e-6)
    assert labels.tolist() == [1, 0]
    monkeypatch.setattr("epimer.experiments.clip8.images.CACHE_BYTES", 0)
    large = ImageSplit(table, [0, 1], processor, {"a": 0, "b": 1}, 2, torch.device("cpu"))
    assert len([*large.batches(1), *large.batches(1)]) == 4
    assert processor.seen == 8


def test_labels_that_are_none_are_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(shard([0, 5], None, 0))
    assert parquet.read_table(tmp_path / "x.parquet").num_rows == 2
    rows = ImageSplit(open_data(str(tmp_path / "x.parquet")), [0, 1], Bytes(), {}, 3, torch.device("cpu"))
    with pytest.raises(DataError, match=r"x\.parquet row 1, has label 5; expected 0 to 2 or the name of a class"):
        list(rows.batches(2))


def test_published_numbers_are_the_averages_of_the_papers_rows():
    """Recomputed from the paper's table by task (Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN)."""
    rows = {
        ("B/32", "zero-shot"): (597, 436, 451, 326, 482, 602, 631, 316),
        ("B/32", "tsv"): (675, 657, 959, 881, 990, 835, 674, 903),
        ("B/32", "epimer"): (672, 694, 965, 914, 993, 834, 665, 926),
        ("B/16", "average"): (672, 504, 760, 599, 941, 759, 677, 765),
        ("B/16", "epimer"): (804, 722, 977, 944, 993, 869, 710, 941),
        ("L/14", "fine-tuned"): (934, 839, 999, 993, 997, 973, 824, 981),
        ("L/14", "fisher"): (874, 760, 646, 507, 755, 760, 788, 671),
        ("L/14", "epimer"): (901, 771, 984, 973, 995, 914, 763, 949),
    }
    for (variant, method), cells in rows.items():
        assert PUBLISHED[variant][PAPER][method] == pytest.approx(sum(cells) / 80, abs=0.11)
    cells = (65.4, 62.6, 70.8, 76.9, 64.5, 54.9, 86.3, 50.9)
    assert PUBLISHED["B/32"][FUSION_BENCH]["average"] == pytest.approx(sum(cells) / 8, abs=0.06)
    assert PUBLISHED.keys() == VARIANTS.keys()


@pytest.mark.parametrize(
    ("family", "own", "other"), [("tanganke", FUSION_BENCH, PAPER), ("task_vectors", PAPER, FUSION_BENCH)]
)
def test_the_warning_names_the_other_family(family, own, other):
    warning, same, *_ = remarks(family)
    assert warning.startswith("WARNING: never compare across checkpoint families")
    assert f"'{other}' is of others" in warning
    assert f"'{own}' is of these checkpoints" in same
