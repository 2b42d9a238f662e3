"""Images and label names of clip8's datasets: read where they are needed, splits without a common sample."""

import io

import pytest
import torch
from PIL import Image
from pyarrow import parquet

from epimer.errors import DataError
from epimer.experiments.clip8.images import ImageSplit, card_names, label_names, split_rows
from epimer.experiments.clip8.tasks import TASKS
from epimer.tasks.data import open_data
from tiny_clip import data_files, shard, write_files


def test_the_names_in_the_data_are_found(tmp_path):
    names = ["c", "a", "b"]
    (tmp_path / "named.parquet").write_bytes(shard([0, 1, 2], names, 0))
    (tmp_path / "plain.parquet").write_bytes(shard([0, 1, 2], None, 0))
    assert label_names(open_data(str(tmp_path / "named.parquet"))) == names
    assert label_names(open_data(str(tmp_path / "plain.parquet"))) is None
    write_files(tmp_path, {"joined": data_files(next(task for task in TASKS if task.title == "DTD"), 0, names)})
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
