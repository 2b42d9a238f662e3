"""Data in files and folders: which rows are found, what they are called, and what is said when they are not right."""

import json
import os
import re
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from epimer.errors import DataError
from epimer.tasks import tables
from epimer.tasks.audio import read_recording
from epimer.tasks.data import choose, open_data

pa = pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")

from pyarrow import parquet  # noqa: E402

ROWS = [{"text": "good, really", "label": 1}, {"text": "böse\nzwei", "label": 0}, {"text": "so so", "label": 1}]


def write_jsonl(path, rows, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    return path


def write_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_image(path, colour, size=(6, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def held(table):
    return [table.row(i) for i in range(len(table))]


def fault(text, **options):
    """Return the one line that is said about data when it is opened or read."""
    with pytest.raises(DataError) as caught:
        held(open_data(str(text), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------------


def test_jsonl_counts_the_lines_that_are_there(tmp_path):
    path = tmp_path / "reviews.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_bytes(f"\ufeff{lines[0]}\r\n\n  \n{lines[1]}\n{lines[2]}".encode())
    table = open_data(str(path))
    assert held(table) == ROWS
    assert [table.where(i) for i in range(3)] == [f"reviews.jsonl line {n}" for n in (1, 4, 5)]
    assert (table.columns, table.classes, table.name) == (["text", "label"], None, "reviews.jsonl")
    assert table.row(1) == ROWS[1]  # out of order, and again


def test_jsonl_columns_are_those_of_all_the_first_rows(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}, {"label": 1, "text": "b"}])
    assert open_data(str(path)).columns == ["text", "label"]


def test_txt_has_one_sample_per_line_that_is_not_empty(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("  first line \n\n\t\nzweite Zeile: ä\r\n".encode())
    table = open_data(str(path))
    assert held(table) == [{"text": "first line"}, {"text": "zweite Zeile: ä"}]
    assert [table.where(i) for i in range(2)] == ["lines.txt line 1", "lines.txt line 4"]


@pytest.mark.parametrize(
    "text", [json.dumps(ROWS), json.dumps(ROWS, indent=2), "".join(f"{json.dumps(r)}\n" for r in ROWS)]
)
def test_json_is_a_list_of_objects_or_one_per_line(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_text(text)
    assert held(open_data(str(path))) == ROWS


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_csv_and_tsv(tmp_path, suffix, separator):
    long = "x" * 200_000  # above the csv module's usual limit
    lines = [["text", "label"], ['"a, b\n""c"""', "1"], [], ["d", ""], [long, "pos"]]
    path = tmp_path / f"d{suffix}"
    path.write_bytes(("\ufeff" + "\n".join(separator.join(line) for line in lines)).encode())
    table = open_data(str(path))
    assert held(table) == [
        {"text": 'a, b\n"c"', "label": "1"},
        {"text": "d", "label": ""},
        {"text": long, "label": "pos"},
    ]
    assert [table.where(i) for i in range(3)] == [f"d{suffix} line {n}" for n in (2, 5, 6)]


def test_parquet_is_read_by_row_group(tmp_path, monkeypatch):
    rows = [{"text": f"t{i}", "image": {"bytes": bytes([i]), "path": f"{i}.png"}} for i in range(10)]
    path = write_parquet(tmp_path / "d.parquet", rows, row_group_size=3)
    monkeypatch.setattr(tables, "KEPT", 1)
    table = open_data(str(path))
    assert (len(table), table.columns, table.where(7)) == (10, ["text", "image"], "d.parquet row 7")
    for i in (9, 0, 5, 3, 2, 9):
        assert table.row(i) == rows[i]
        assert len(table.kept) == 1
    monkeypatch.setattr(tables, "KEPT", 1 << 20)
    assert held(table) == rows
    assert len(table.kept) == 4


def test_importing_the_module_needs_neither_torch_nor_pyarrow_nor_pillow():
    code = (
        "import sys, epimer.tasks.data as data; "
        "assert data.choose(2, samples=1, fraction=None, seed=0); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pyarrow', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("package", "file"), [("pyarrow", "d.parquet"), ("PIL", "pictures")])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, package, file):
    write_parquet(tmp_path / "d.parquet", ROWS)
    write_image(tmp_path / "pictures" / "cat" / "1.png", "red")
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from epimer.tasks.data import open_data\n"
        "try: open_data(sys.argv[2]).image(0, 'image')\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", code, package, str(tmp_path / file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    what = "reading .parquet files needs pyarrow" if package == "pyarrow" else "reading images needs pillow"
    assert said == f"{what}; install it: pip install 'epimer[hf]'\n"


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pets"
    for name, colour in {"dogs/b.png": "red", "dogs/a.JPG": "blue", "cats/deep/004.png": "lime"}.items():
        write_image(folder / name, colour)
    (folder / "classes.txt").write_text("cats\ndogs\n")
    (folder / "cats" / "notes.md").write_text("not an image")
    (folder / ".git").mkdir()
    write_image(folder / ".git" / "x.png", "red")
    return folder


def test_class_folders_are_labels(pictures):
    table = open_data(str(pictures))
    assert (table.columns, table.classes, table.name) == (["image", "label"], ["cats", "dogs"], "pets")
    assert [(table.where(i), table.row(i)["label"]) for i in range(len(table))] == [
        ("cats/deep/004.png", "cats"),
        ("dogs/a.JPG", "dogs"),
        ("dogs/b.png", "dogs"),
    ]
    image = table.image(0, "image")
    assert (image.mode, image.size, image.getpixel((2, 3))) == ("RGB", (6, 4), (0, 255, 0))


@pytest.mark.parametrize(("split", "label"), [(None, "a"), ("train", "a"), ("test", "b"), ("val", "c"), ("other", "d")])
def test_class_folders_below_a_split(tmp_path, split, label):
    for name in ("train/a", "test/b", "validation/c", "other/d"):
        write_image(tmp_path / "data" / name / "1.png", "red")
    table = open_data(str(tmp_path / "data"), split=split)
    assert [row["label"] for row in held(table)] == [label]
    assert table.classes == [label]


def test_images_in_parquet_and_beside_a_table(tmp_path):
    png = write_image(tmp_path / "one" / "1.png", (1, 2, 3)).read_bytes()
    structs = [{"image": {"bytes": png, "path": "gone.png"}}, {"image": {"bytes": None, "path": "one/1.png"}}]
    for path in (
        write_parquet(tmp_path / "structs.parquet", structs),
        write_parquet(tmp_path / "bytes.parquet", [{"image": png}]),
        write_jsonl(tmp_path / "paths.jsonl", [{"image": "one/1.png"}]),
    ):
        table = open_data(str(path))
        for i in range(len(table)):
            assert table.image(i, "image").getpixel((0, 0)) == (1, 2, 3)


def test_images_in_shards(tmp_path):
    for shard, colour in enumerate([(1, 2, 3), (4, 5, 6)]):
        write_image(tmp_path / "d" / "pictures" / f"{shard}.png", colour)
        rows = [{"image": f"pictures/{shard}.png"}]
        write_jsonl(tmp_path / "d" / f"train-0000{shard}-of-00002.jsonl", rows)
    table = open_data(str(tmp_path / "d"))
    assert [table.image(i, "image").getpixel((0, 0)) for i in range(2)] == [(1, 2, 3), (4, 5, 6)]


def test_every_mode_becomes_rgb(tmp_path):
    colours = {"L": 90, "RGBA": (9, 8, 7, 100), "P": 1, "1": 1, "CMYK": (0, 0, 0, 0)}
    for mode, colour in colours.items():
        image, options = Image.new(mode, (2, 2), colour), {}
        if mode == "P":
            image.putpalette([1, 2, 3, 40, 50, 60])
            options = {"transparency": b"\x00\x10"}
        path = tmp_path / mode / f"1.{'tiff' if mode == 'CMYK' else 'png'}"
        path.parent.mkdir()
        image.save(path, **options)
    table = open_data(str(tmp_path))
    found = {table.row(i)["label"]: table.image(i, "image") for i in range(len(table))}
    assert {image.mode for image in found.values()} == {"RGB"}
    assert {mode: image.getpixel((0, 0)) for mode, image in found.items()} == {
        "L": (90, 90, 90),
        "RGBA": (9, 8, 7),
        "P": (40, 50, 60),
        "1": (255, 255, 255),
        "CMYK": (255, 255, 255),
    }


def test_images_that_cannot_be_decoded(pictures, tmp_path):
    (pictures / "dogs" / "a.JPG").write_bytes((pictures / "dogs" / "b.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"^dogs/a\.JPG is not an image that can be decoded \(.+\); replace it\.$"):
        open_data(str(pictures)).image(1, "image")
    rows = [{"image": {"bytes": b"\x89PNG no", "path": "x.png"}}, {"image": None}]
    table = open_data(str(write_parquet(tmp_path / "d.parquet", rows)))
    with pytest.raises(DataError, match=r"^d\.parquet row 0 is not an image that can be decoded"):
        table.image(0, "image")
    with pytest.raises(DataError, match=r"^d\.parquet row 1 has no image in 'image': None; expected a path or its"):
        table.image(1, "image")
    table = open_data(str(write_jsonl(tmp_path / "d.jsonl", [{"image": "gone.png"}, {"image": 3}])))
    with pytest.raises(DataError, match=r"^d\.jsonl line 1: the image gone\.png does not exist; copy it there\.$"):
        table.image(0, "image")
    with pytest.raises(DataError, match=r"^d\.jsonl line 2 has no image in 'image': 3; expected a path"):
        table.image(1, "image")


ROW_FILES = ["/dev/zero", "/etc/hostname", "../outside.png", "a/../../outside.png", "link.png", "pipe.png", "zero.png"]


@pytest.mark.parametrize("named", ROW_FILES)
def test_rows_name_regular_files_below_their_data_alone(tmp_path, named):
    """A row that names another file would put a stranger's choice of this disk into a measurement, or wait for ever."""
    write_image(tmp_path / "outside.png", "red")
    folder = tmp_path / "data"
    write_image(folder / "a" / "fine.png", "red")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.png")
    table = open_data(str(write_jsonl(folder / "rows.jsonl", [{"image": "a/fine.png"}, {"image": named}])))
    assert table.image(0, "image").size == (6, 4)
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: the image .* (does not lie in|is no regular file)"):
        table.image(1, "image")
    with pytest.raises(DataError, match=r"does not lie in|is no regular file"):
        read_recording(table, 1, "image")


def test_a_pipe_in_a_folder_of_data_is_not_waited_for(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    os.mkfifo(tmp_path / "train-2.jsonl")
    assert "train-2.jsonl is no regular file" in fault(tmp_path)


def test_images_of_more_pixels_than_memory_holds_are_refused(tmp_path):
    """A PNG of one colour takes a thousandth of its pixels."""
    write_image(tmp_path / "large.png", 0, size=(9000, 9000), mode="1")
    assert (tmp_path / "large.png").stat().st_size < 100_000
    table = open_data(str(write_jsonl(tmp_path / "rows.jsonl", [{"image": "large.png"}])))
    with pytest.raises(DataError, match="9000 x 9000 pixels, above"):
        table.image(0, "image")


def test_no_other_program_is_run_for_an_image(tmp_path):
    """Pillow has Ghostscript draw what is in PostScript, whatever the file is called."""
    Image.new("RGB", (4, 4)).save(tmp_path / "drawing.eps")
    (tmp_path / "drawing.eps").rename(tmp_path / "image.png")
    table = open_data(str(write_jsonl(tmp_path / "rows.jsonl", [{"image": "image.png"}])))
    with pytest.raises(DataError, match="is not an image that can be decoded"):
        table.image(0, "image")


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_row_group_that_would_become_gigabytes_is_refused(tmp_path, dictionary):
    """A text of a megabyte, two thousand times: it is stored once, or packed."""
    array = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int16()), ["x" * (1 << 20)])
    if not dictionary:
        array = pa.array(["x" * (1 << 20)] * 1100)
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        pa.table({"text": array}), path, compression="zstd", use_dictionary=dictionary, store_schema=False
    )
    assert path.stat().st_size < 300_000
    assert "bytes or more, above 268435456; write it with smaller ones" in fault(path)


def test_more_rows_than_bytes_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    nothing = pa.array(np.zeros(10_000_000, np.int8))
    parquet.write_table(pa.table({"label": nothing}), path, row_group_size=1 << 24)
    assert path.stat().st_size < 50_000
    assert "says that it has 10000000 rows" in fault(path)


# --- the hub's layout ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "shards": {
        "data/train-00000-of-00002.parquet": 1,
        "data/train-00001-of-00002.parquet": 2,
        "data/test-00000-of-00001.parquet": 3,
    },
    "plain": {"train.jsonl": 1, "dev.jsonl": 3},
    "only one": {"reviews.csv": 1},
    "only test": {"data/test.csv": 1},
    "inside a name": {"imdb_train_v1.jsonl": 1, "imdb_test_v1.jsonl": 3, "restrained.jsonl": 4},
    "folders": {"train/0000.parquet": 1, "train/0001.parquet": 2, "test/0000.parquet": 3},
    "converted": {"default/train/0000.parquet": 1, "default/test/0000.parquet": 3},
    "beside": {"data/train-00000-of-00001.parquet": 1, "train.jsonl": 5, "dataset_infos.json": 6, "README.txt": 7},
    "numbers": {"part-0.jsonl": 1, "part-1.jsonl": 2},
}


def write_layout(folder, layout):
    for name, value in layout.items():
        write = {"parquet": write_parquet, "jsonl": write_jsonl}.get(name.rpartition(".")[2])
        if write:
            write(folder / name, [{"text": f"{value}a"}, {"text": f"{value}b"}])
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"text\n{value}a\n{value}b\n")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_split_to_train_on_is_the_first_choice(tmp_path, layout):
    files = LAYOUTS[layout]
    table = open_data(str(write_layout(tmp_path / "d", files)))
    expected = [f"{value}{letter}" for value in (1, 2) if value in files.values() for letter in "ab"]
    assert [row["text"] for row in held(table)] == expected
    name = next(name for name in reversed(files) if files[name] == int(expected[-1][0]))
    last = {"parquet": "row 1", "jsonl": "line 2", "csv": "line 3"}[name.rpartition(".")[2]]
    assert table.where(len(table) - 1) == f"{name.rpartition('/')[2]} {last}"


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        ("shards", "test"),
        ("plain", "validation"),
        ("plain", "dev"),
        ("inside a name", "test"),
        ("folders", "eval"),
        ("converted", "test"),
    ],
)
def test_another_split(tmp_path, layout, split):
    table = open_data(str(write_layout(tmp_path / "d", LAYOUTS[layout])), split=split)
    assert [row["text"] for row in held(table)] == ["3a", "3b"]


def test_subsets(tmp_path):
    files = {"cola/train-00000-of-00001.parquet": 1, "sst2/train-00000-of-00001.parquet": 2, "sst2/test.parquet": 3}
    folder = write_layout(tmp_path / "glue", files)
    assert [row["text"] for row in held(open_data(str(folder), subset="cola"))] == ["1a", "1b"]
    assert [row["text"] for row in held(open_data(str(folder), subset="sst2", split="test"))] == ["3a", "3b"]
    assert fault(folder) == "glue has 2 subsets: 'cola', 'sst2'; choose one with --subset."
    assert fault(folder, subset="sst") == "glue has no subset 'sst'; it has 'cola', 'sst2'. Did you mean 'sst2'?"
    assert fault(folder, subset="cola", split="test") == "glue has no split 'test'; it has 'train'."


def test_splits_that_are_not_clear(tmp_path):
    folder = write_layout(
        tmp_path / "a",
        {"validation_matched-00000-of-00001.parquet": 1, "validation_mismatched-00000-of-00001.parquet": 2},
    )
    both = "'validation_matched', 'validation_mismatched'"
    assert fault(folder, split="validation") == f"a has several splits for 'validation': {both}; choose with --split."
    assert fault(folder) == f"a has splits {both} and none to train on; choose one with --split."
    assert held(open_data(str(folder), split="validation_matched")) == [{"text": "1a"}, {"text": "1b"}]
    folder = write_layout(tmp_path / "b", {"en-train.jsonl": 1, "de-train.jsonl": 2})
    assert fault(folder) == "b has several splits for 'train': 'de-train', 'en-train'; choose with --split."
    assert held(open_data(str(folder), split="de-train")) == [{"text": "2a"}, {"text": "2b"}]
    assert fault(folder, split="de-trian").startswith("b has no split 'de-trian'; it has 'de-train', 'en-train'. Did")


def test_shards_that_are_missing_or_that_differ(tmp_path):
    folder = write_layout(
        tmp_path / "a", {"data/train-00000-of-00003.parquet": 1, "data/train-00002-of-00003.parquet": 2}
    )
    assert fault(folder) == (
        "a has 2 of the 3 files that data/train-00000-of-00003.parquet says there are; download the rest."
    )
    write_jsonl(tmp_path / "b" / "train-00000-of-00002.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "b" / "train-00001-of-00002.jsonl", [{"words": "a"}])
    assert fault(tmp_path / "b") == (
        "train-00001-of-00002.jsonl has columns 'words', but train-00000-of-00002.jsonl has 'text'; "
        "give one of the files."
    )


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", b"", "d.jsonl holds no rows; give data with at least one."),
        ("d.jsonl", b"\n \n", "d.jsonl holds no rows; give data with at least one."),
        ("d.txt", b"\n", "d.txt holds no rows; give data with at least one."),
        ("d.json", b"", "d.json holds no rows; give data with at least one."),
        ("d.json", b"[]", "d.json holds no rows; give data with at least one."),
        ("d.csv", b"", "d.csv holds no rows; give data with at least one."),
        ("d.csv", b"text,label\n", "d.csv holds no rows; give data with at least one."),
        ("d.jsonl", b'{"a": 1}\n\n{"a": 2\n', r"d.jsonl line 3 is not JSON: Expecting .*; write one row per line\."),
        ("d.jsonl", b'{"a": 1}\n\xff{}\n', r"d.jsonl line 2 is not UTF-8 text: .*; write one row per line\."),
        ("d.txt", b"a\n\xff\n", r"d.txt line 2 is not UTF-8 text: .*"),
        ("d.jsonl", b"[1, 2]\n", r"d.jsonl line 1 is \[1, 2\], expected an object such as .*"),
        ("d.jsonl", b"[" * 100_000, r"d.jsonl line 1 is not JSON: .*"),
        ("d.json", b'[{"a": 1}, 3]', "d.json row 1 is 3, expected an object such as .*"),
        ("d.json", b'[{"a": 1},', "d.json is not JSON: .*; expected a list of objects."),
        ("d.json", b'"words"', "d.json holds a str, expected a list of objects, one per row."),
        ("d.csv", b"a,b\n1,2\n3\n", "d.csv line 3 has 1 fields, but line 1 names 2 columns; quote fields .*"),
        ("d.csv", b'a,b\n"1\n1",2\n3,4,5\n', "d.csv line 4 has 3 fields, but line 1 names 2 columns; quote fields .*"),
        ("d.csv", b"a,a\n1,2\n", "d.csv line 1 names a column twice: 'a', 'a'; rename one."),
        ("d.csv", b'a,b\n"1"x,2\n', "d.csv cannot be read near line 2: .*; save it as UTF-8."),
        ("d.csv", b"a,b\n\xff,2\n", "d.csv cannot be read near line 2: .*; save it as UTF-8."),
        ("d.parquet", b"PAR1 no", "d.parquet cannot be read as parquet: .*; download it again."),
        ("d.pdf", b"x", "d.pdf is not data that can be read: expected .parquet, .jsonl, .*, or a folder of images."),
    ],
)
def test_faults_in_files(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    assert re.fullmatch(said, fault(tmp_path / name))


def test_rows_of_parquet_that_are_damaged(tmp_path):
    path = write_parquet(tmp_path / "d.parquet", [{"text": "word" * 20}] * 9, compression="gzip")
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    assert re.fullmatch("d.parquet cannot be read as parquet: .*; download it again.", fault(path))
    assert fault(write_parquet(tmp_path / "e.parquet", [])) == "e.parquet holds no rows; give data with at least one."


def test_other_faults(tmp_path):
    assert re.fullmatch(
        r".*/reviews.jsonl does not exist; give a file \(.parquet, .*\), a folder or a hub dataset \(org/name@.*\).",
        fault(tmp_path / "reviews.jsonl"),
    )
    assert fault("reviews.jsonl").startswith("reviews.jsonl does not exist; give a file (")
    assert fault(" ") == "the name of the data is empty; give a path or a hub dataset (org/name@revision)."
    (tmp_path / "empty").mkdir()
    assert fault(tmp_path / "empty").startswith(
        "empty holds no data: expected images in one folder per class, or files"
    )
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    table = open_data(str(path))
    path.rename(tmp_path / "e.jsonl")
    with pytest.raises(DataError, match=r"^d\.jsonl cannot be read: No such file or directory; it was removed"):
        table.row(0)
    (tmp_path / "e.jsonl").rename(path)
    assert fault(path, split="test") == "d.jsonl is one file, of which --split test cannot be chosen; leave it out."
    write_image(tmp_path / "pictures" / "a" / "1.png", "red")
    assert fault(tmp_path / "pictures", split="test") == (
        "pictures holds folders of images for no splits, so there is no 'test'; leave it out."
    )


def test_columns(tmp_path):
    table = open_data(str(write_jsonl(tmp_path / "d.jsonl", [{"sentence": "a", "lable": 1}])))
    assert table.column(None, ("text", "sentence"), "text") == "sentence"
    assert table.column(None, ("label", "labels"), "label") is None
    assert table.column("lable", ("label",), "label") == "lable"
    with pytest.raises(DataError) as caught:
        table.column("label", (), "label")
    assert str(caught.value) == (
        "d.jsonl has no column 'label' for the label; it has 'sentence', 'lable'. Did you mean 'lable'?"
    )


# --- choosing rows ---------------------------------------------------------------------------------------------------


def test_the_choice_is_a_seeded_shuffle():
    every = list(range(50))
    Random(7).shuffle(every)
    assert choose(50, samples=None, fraction=None, seed=7) == every
    assert choose(50, samples=8, fraction=None, seed=7) == every[:8]
    assert choose(50, samples=80, fraction=None, seed=7) == every
    assert choose(50, samples=8, fraction=None, seed=8) != every[:8]
    assert choose(6, samples=None, fraction=None, seed=0) == [4, 2, 1, 0, 5, 3]  # on every platform


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [(100, 0.07, 7), (100, 0.071, 8), (3, 0.01, 1), (5, 1.0, 5), (30, 0.1, 3), (10, 1e-9, 1)],
)
def test_a_fraction_is_rounded_up(count, fraction, expected):
    assert len(choose(count, samples=None, fraction=fraction, seed=0)) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"samples": 0, "fraction": None}, "'samples' must be at least 1. Got 0 instead."),
        ({"samples": None, "fraction": 0.0}, "'fraction' must be above 0 and at most 1. Got 0.0 instead."),
        ({"samples": None, "fraction": 1.5}, "'fraction' must be above 0 and at most 1. Got 1.5 instead."),
        ({"samples": None, "fraction": float("nan")}, "'fraction' must be above 0 and at most 1. Got nan instead."),
        ({"samples": 1, "fraction": 0.5}, "'samples' and 'fraction' both say how many rows to use; give one of them."),
    ],
)
def test_choices_that_cannot_be(given, said):
    with pytest.raises(DataError) as caught:
        choose(10, seed=0, **given)
    assert str(caught.value) == said
