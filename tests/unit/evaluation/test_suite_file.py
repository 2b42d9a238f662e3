"""What a suite's file says, and what is refused in it."""

from __future__ import annotations

import json

import pytest
import torch

import epimer
from epimer.errors import EpimerError

pytest.importorskip("transformers")

import tiny
from epimer.evaluation.suite_file import read_suite_file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    return root


def test_what_a_file_says(made):
    described = tiny.suite_of(batch_size=5, max_length=12, dtype="float64")
    described["tasks"][0]["metric"] = "loss"
    described["tasks"][0]["doubtful"] = "its test set is shifted"
    described["tasks"][1]["classifier"] = "bert.pooler.*"
    del described["tasks"][1]["name"]
    found = read_suite_file(tiny.write_suite(made / "said.yaml", described))
    one, two = found.tasks
    assert (found.name, found.batch, found.max_length, found.dtype) == ("words", 5, 12, torch.float64)
    assert (one.metric, two.metric, two.name) == ("loss", "accuracy", "pace")
    assert (one.doubtful, two.doubtful) == ("its test set is shifted", "")
    assert one.classifier == ("classifier.*",)
    assert two.classifier == ("classifier.*", "bert.pooler.*")
    assert {split: len(table) for split, table in one.tables.items()} == tiny.COUNTS
    assert one.model == str(made / "animal")
    del described["name"]
    assert read_suite_file(tiny.write_suite(made / "said.yaml", described)).name == "said"


def test_splits_of_one_dataset(made, tmp_path):
    folder = tmp_path / "set" / "small"
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        (folder / f"{name}.jsonl").write_text((made / f"pace-{split}.jsonl").read_text())
    data = {"dataset": "set", "subset": "small", "train": "train", "val": "validation", "test": "test"}
    suite = tiny.suite_of(base=str(made / "base"))
    suite["tasks"] = [{"model": str(made / "pace"), "data": data | {"text": "sentence"}}]
    (entry,) = read_suite_file(tiny.write_suite(tmp_path / "suite.yaml", suite)).tasks
    assert {split: len(table) for split, table in entry.tables.items()} == tiny.COUNTS
    for change, words in (
        ({"val": "holdout"}, r"suite.yaml:12: .*no split 'holdout'"),
        ({"subset": "smal"}, r"no subset 'smal'.*Did you mean 'small'"),
    ):
        suite["tasks"][0]["data"] = data | {"text": "sentence"} | change
        with pytest.raises(epimer.RecipeError, match=words):
            read_suite_file(tiny.write_suite(tmp_path / "suite.yaml", suite))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the suite is empty"),
        ("- a", "a suite must be a mapping"),
        ("base: [1", "not valid YAML"),
        ("base: b\ntasks: [{model: m, task: causal-lm, head: h}]", "has no classes; leave out 'head'"),
        ("base: b\ntasks: [{model: m}]", r"tasks\[0\] has no 'task'"),
        ("base: b\ntasks: [{task: causal-lm}]", r"tasks\[0\] has no 'model'"),
        ("base: b\ntasks: [{model: m, task: causal-lm, data: {label: x}}]", "'label' is not a column of causal-lm"),
        ("base: b\ntasks: [{model: m, task: text-classification, data: {subset: x, test: y}}]", "'subset' is one of"),
        ("base: b\ntasks: [{model: m, task: text-classification, classes: [a, a]}]", "none of them twice"),
        ("base: b\nbase: c", "'base' is given twice"),
        ("base: !!python/object:os.system {}", "tag"),
        (
            "base: b\ntasks: [{model: m, task: text-classification, head: " + "a" * 300 + "}]",
            "the head .* does not exist",
        ),
        (
            "base: b\ntasks: [{model: m, task: text-classification, data: {test: " + "a" * 300 + "}}]",
            "neither a path|does not",
        ),
        ("base: b\ntasks: [{model: m, task: text-classification, data: {test: ~nobody-here/x}}]", "does not exist"),
        ("base: b\nbatch_size: 0x" + "f" * 4000, "integer of at most 300 digits"),
    ],
)
def test_files_that_are_refused(tmp_path, text, words):
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(epimer.RecipeError, match=words):
        read_suite_file(tmp_path / "suite.yaml")


@pytest.mark.parametrize("bad", ["a\\0b", "\\ud800", "~\\0"])
@pytest.mark.parametrize("key", ["base", "model", "head", "test"])
def test_names_that_no_file_can_have_are_refused_with_their_line(tmp_path, key, bad):
    """JSON and YAML can write NUL and half characters, no file system can."""
    data = {"test": bad if key == "test" else "rows.jsonl", "val": "other.jsonl", "text": "sentence", "label": "label"}
    task = {"name": "a", "model": "one", "data": data, "task": "text-classification"}
    task |= {key: bad} if key in ("model", "head") else {}
    suite = {"base": bad if key == "base" else "base", "tasks": [task]}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite).replace("\\\\", "\\"))
    with pytest.raises(EpimerError) as caught:
        read_suite_file(tmp_path / "suite.yaml")
    assert "suite.yaml:1: " in str(caught.value)
    assert "must be text without NUL and half characters" in str(caught.value)
