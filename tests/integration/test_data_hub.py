"""Datasets by hub id, against a stand-in for the hub on this machine; epimer runs in processes of their own."""

import io
import json
import re
import subprocess
import sys

import pytest

from stand_in_hub import DatasetAnswer, Hub, Repo, environment

pa = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402

# Several datasets in one process; of each its name and rows, or what is said about it.
OPEN = """
import json, sys
from epimer.tasks.data import open_data
from epimer.errors import DataError

done = []
for text, options in json.loads(sys.argv[1]):
    try:
        table = open_data(text, **options)
        rows = [[table.where(i), table.row(i)["text"]] for i in range(len(table))]
        done.append([table.name, rows])
    except DataError as error:
        done.append(str(error))
json.dump(done, sys.stdout)
"""


def shard(*texts: str) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": list(texts)}), file)
    return file.getvalue()


BESIDE = {
    "README.md": b"# hello",
    "loader.py": b"raise SystemExit",
    "dataset_infos.json": b"{}",
    "LICENSE.txt": b"mine",
}
REVIEWS = {
    "data/train-00000-of-00002.parquet": shard("a", "b"),
    "data/train-00001-of-00002.parquet": shard("c"),
    "data/test-00000-of-00001.parquet": shard("d"),
    "data/extra.jsonl": b'{"text": "x"}\n',
    **BESIDE,
}
GLUE = {"cola/train.jsonl": b'{"text": "e"}\n', "cola/dev.jsonl": b'{"text": "f"}\n', "sst2/train.jsonl": b"{}"}


@pytest.fixture
def hub():
    repos = {
        "org/reviews": Repo([{"train.csv": b"text\nold\n"}, REVIEWS], {"main": -1, "old": 0}),
        "org/glue": Repo([GLUE]),
        "org/none": Repo([BESIDE]),
        "org/secret": Repo([REVIEWS], hidden=(401, {"X-Error-Code": "RepoNotFound"})),
        "org/gated": Repo([REVIEWS], hidden=(403, {"X-Error-Code": "GatedRepo"})),
    }
    hub = Hub(repos)
    hub.RequestHandlerClass = DatasetAnswer
    yield hub
    hub.stop()


@pytest.fixture
def opened(hub, tmp_path):
    """Return a function that opens datasets with a cache of this test's own."""

    def run(*asked: tuple[str, dict], **settings: str) -> list:
        command = [sys.executable, "-W", "error", "-c", OPEN, json.dumps(asked)]
        made = subprocess.run(
            command, env=environment(hub, tmp_path / "home", **settings), cwd=tmp_path, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        assert made.stderr == ""
        return json.loads(made.stdout)

    return run


TRAIN = [
    ["train-00000-of-00002.parquet row 0", "a"],
    ["train-00000-of-00002.parquet row 1", "b"],
    ["train-00001-of-00002.parquet row 0", "c"],
]


def test_only_the_files_of_the_split_are_fetched_and_only_once(hub, opened):
    old, new = hub.repos["org/reviews"].shas
    assert opened(("org/reviews", {})) == [[f"org/reviews@{new}", TRAIN]]
    assert hub.files() == [f"org/reviews:data/train-0000{i}-of-00002.parquet" for i in range(2)]
    hub.asked.clear()
    found = opened(
        (f"org/reviews@{new}", {"split": "train"}),
        ("org/reviews", {"split": "test"}),
        ("org/reviews@old", {}),
        ("org/glue", {"subset": "cola", "split": "validation"}),
    )
    assert found[0] == [f"org/reviews@{new}", TRAIN]
    assert found[1][1] == [["test-00000-of-00001.parquet row 0", "d"]]
    assert found[2] == [f"org/reviews@{old}", [["train.csv line 2", "old"]]]
    assert found[3][1] == [["dev.jsonl line 1", "f"]]
    assert hub.files() == [
        "org/glue:cola/dev.jsonl",
        "org/reviews:data/test-00000-of-00001.parquet",
        "org/reviews:train.csv",
    ]


def test_without_the_hub(hub, opened):
    new = hub.repos["org/reviews"].shas[-1]
    opened(("org/reviews", {}))
    hub.stop()
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        cached, test, lost = opened(
            ("org/reviews", {}), ("org/reviews", {"split": "test"}), ("org/glue@main", {"subset": "cola"}), **settings
        )
        assert cached == [f"org/reviews@{new}", TRAIN]
        assert test == "org/reviews has no split 'test'; it has 'train'."
        assert re.fullmatch(
            r"org/glue@main is neither a path here nor in the hub's cache, and the hub cannot be reached \(.+\); "
            r"download it where there is a network: hf download org/glue --repo-type dataset --revision main",
            lost,
        )


FAULTS = {
    "org/nothing": "org/nothing is neither a path here nor a dataset on the hub (a private one needs `hf auth login`).",
    "org/secret": "org/secret is neither a path here nor a dataset on the hub (a private one needs `hf auth login`).",
    "org/reviews@v9": "org/reviews has no revision 'v9' on the hub; see its page for branches.",
    "org/gated": "org/gated is gated; accept its terms on HUB/datasets/org/gated and log in: hf auth login",
    "org/glue": "org/glue has 2 subsets: 'cola', 'sst2'; choose one with --subset.",
    "org/none": "org/none holds no data files that can be read: expected .parquet, .jsonl, .json, .csv, .tsv, .txt.",
}


def test_faults(hub, opened):
    *said, split = opened(*((text, {}) for text in FAULTS), ("org/reviews", {"split": "dev"}))
    page = f"http://127.0.0.1:{hub.server_port}/"
    assert said == [text.replace("HUB/", page) for text in FAULTS.values()]
    assert split == "org/reviews has no split 'dev'; it has 'test', 'train'."
    assert hub.files() == []
