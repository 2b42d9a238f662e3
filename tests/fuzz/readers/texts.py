"""Texts: recipes, suites, data, and the records that a report is made of."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import torch
import yaml
from safetensors.torch import save_file

import found
from epimer.api import plan_merge
from epimer.evaluation.suite_file import read_suite_file
from epimer.recipe.documents import merge_steps
from epimer.recipe.load import load_recipe
from epimer.report.write import make_report
from epimer.tasks.conversations import find_layout
from epimer.tasks.data import open_data
from fuzz.harness import Reader
from fuzz.mutations import NAMES, YAML_LITERALS, as_text, damage_content, mutated, mutated_bytes
from fuzz.readers.models import write_models
from fuzz.readers.sidecars import WORDS, tokenizer

# recipes

RECIPES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {
            "merge_method": "ties", "base_model": "base", "dtype": "float32", "out_dtype": "bfloat16",
            "models": [
                {"model": "one", "parameters": {"weight": 0.5, "density": [0.5, 0.7]}},
                {"model": "two", "parameters": {"weight": [{"filter": "up", "value": 0.3}, {"value": 1}]}},
            ],
            "parameters": {"normalize": True, "lambda": 0.9, "int8_mask": True}, "rules": [["*.norm.*", "average"]],
            "tokenizer_source": "base",
        },
    ],
    "slices": [
        {
            "merge_method": "slerp", "base_model": "one", "dtype": "float32",
            "slices": [
                {"sources": [{"model": "one", "layer_range": [0, 2]}, {"model": "two", "layer_range": [0, 2]}]},
            ],
            "parameters": {"t": [{"filter": "up", "value": [0, 0.5, 1]}, {"value": 0.5}]},
        },
    ],
    "passthrough": [
        {
            "merge_method": "passthrough", "dtype": "float32",
            "slices": [
                {"sources": [{"model": "one", "layer_range": [0, 1]}]},
                {"sources": [{"model": "two", "layer_range": [0, 2], "parameters": {"scale": 0.5}}]},
            ],
        },
    ],
    "tokenizer": [
        {
            "merge_method": "linear", "models": [{"model": "one"}, {"model": "two"}],
            "tokenizer": {
                "source": "union", "pad_to_multiple_of": 2,
                "tokens": {
                    "<x>": {"source": "one", "force": True},
                    "<y>": {"source": {"kind": "model_token", "model": "two", "token_id": 1}},
                    "a": {"source": {"kind": "zero"}},
                },
            },
            "chat_template": "chatml",
        },
    ],
    "several": [
        {"name": "first", "merge_method": "linear", "models": [{"model": "one"}, {"model": "two"}]},
        {"merge_method": "dare_ties", "base_model": "base", "models": [{"model": "first"}, {"model": "two"}],
         "parameters": {"density": 0.5, "seed": 3, "scale": 1.5}, "output": "model"},
    ],
    "modules": [
        {
            "merge_method": "linear",
            "modules": {"model": {"slices": [{"sources": [
                {"model": "one", "layer_range": [0, 2]}, {"model": "two", "layer_range": [0, 2]}]}]}},
        },
    ],
}  # fmt: skip


def _build_recipe(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    for name, added in (("base", "<x>"), ("one", "<x>"), ("two", "<y>")):
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer(WORDS, [added])))
    (folder / "recipe.yaml").write_text(yaml.safe_dump_all(RECIPES["plain"]))


def yaml_text(rng: Random, documents: list[Any]) -> bytes:
    """Return documents, one of them changed, as YAML: in the flow style of JSON, or as people write it."""
    documents = list(documents)
    i = rng.randrange(len(documents))
    dice = rng.random()
    if dice < 0.2:
        return mutated_bytes(rng, yaml.safe_dump_all(documents).encode())
    if dice < 0.35:  # a value in block style that only YAML has
        lines = yaml.safe_dump_all(documents).splitlines()
        k = rng.randrange(len(lines))
        head = lines[k].split(":")[0]
        lines[k] = f"{head}: {rng.choice((*map(str, YAML_LITERALS), *NAMES))}"
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    documents[i] = mutated(rng, documents[i], yaml=True)
    return "\n---\n".join(map(as_text, documents)).encode("utf-8", "surrogatepass")


def _damage_recipe(rng: Random, folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(yaml_text(rng, RECIPES[rng.choice(tuple(RECIPES))]))


def _read_recipe(folder: Path) -> None:
    for step in merge_steps(folder / "recipe.yaml", folder / "out"):
        assert load_recipe(step.recipe.to_dict()).to_dict() == step.recipe.to_dict(), "the recipe reads back as another"
        step.recipe.to_yaml().encode("utf-8")
        plan = plan_merge(step.recipe, folder=step.folder)
        assert plan.problems or plan.parts
        for problem in plan.problems:
            assert len(str(problem).splitlines()) == 1, f"a problem is not one line: {problem!r}"


# suites

SUITE = {
    "name": "words", "base": "base", "task": "text-classification", "classifier": ["classifier.*"], "batch_size": 4,
    "max_length": 16, "dtype": "float32", "metric": "accuracy",
    "tasks": [
        {"name": "a", "model": "one", "head": "head.safetensors", "pooling": "mean", "classes": ["x", "y"],
         "data": {"val": "val.jsonl", "test": "test.jsonl", "text": "sentence", "label": "label"}},
        {"name": "b", "model": "two", "task": "causal-lm", "metric": "loss", "doubtful": "it is small",
         "data": {"test": "test.jsonl", "text": "sentence"}},
    ],
}  # fmt: skip


def _build_suite(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    rows = [{"sentence": f"a b c {i}", "label": i % 2} for i in range(4)]
    for name in ("val.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"weight": torch.randn(2, 4), "bias": torch.zeros(2)}, folder / "head.safetensors")
    (folder / "suite.yaml").write_text(yaml.safe_dump(SUITE))


def _damage_suite(rng: Random, folder: Path) -> None:
    if rng.random() < 0.1:
        damage_content(rng, folder / "head.safetensors")
    else:
        (folder / "suite.yaml").write_bytes(yaml_text(rng, [SUITE]))


def _read_suite(folder: Path) -> None:
    suite = read_suite_file(folder / "suite.yaml")
    assert suite.tasks
    assert suite.batch >= 1
    for task in suite.tasks:
        assert task.tables
        for table in task.tables.values():
            _read_table(table)


# data

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ROWS: list[dict[str, Any]] = [
    {"text": "one two", "label": 0, "score": 0.5, "messages": TALK},
    {"text": "three", "label": 1, "score": -1.0, "messages": TALK * 2},
    {"text": "ünï", "label": 1, "score": 2.0, "messages": []},
]


def _build_data(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "rows.txt").write_text("one\ntwo\n\nthree\n")
    for name, separator in (("rows.csv", ","), ("rows.tsv", "\t")):
        out = io.StringIO()
        writer = csv.writer(out, delimiter=separator)
        writer.writerows([["text", "label"], *([row["text"], row["label"]] for row in ROWS)])
        (folder / name).write_text(out.getvalue())
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), folder / "rows.parquet", row_group_size=1)
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (3, 2), (1, 2, 3)).save(folder / "images" / name / "x.png")
        Image.new("P", (3, 2)).save(folder / "images" / name / "y.gif")
    (folder / "which").write_text("rows.jsonl")


def _damage_data(rng: Random, folder: Path) -> None:
    name = rng.choice(
        ("rows.jsonl", "rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.txt", "rows.parquet", "images")
    )
    (folder / "which").write_text(name)
    if name == "images":
        damage_content(rng, rng.choice(sorted((folder / "images").rglob("*.*"))))
    else:
        damage_content(rng, folder / name)


def _read_data(folder: Path) -> None:
    which = (folder / "which").read_text()
    table = open_data(str(folder / which))
    _read_table(table)
    if which == "images":
        for i in range(len(table)):
            assert table.image(i, "image").mode == "RGB"


def _read_table(table: Any) -> None:
    """Read every row, and the texts and conversations in it; what comes out can be written down."""
    assert len(table) > 0
    for i in range(len(table)):
        row = table.row(i)
        assert isinstance(row, dict)
        assert len(table.where(i).splitlines()) == 1
        for value in row.values():
            if isinstance(value, str):
                value.encode("utf-8")
    column = table.column(None, ("text", "sentence"), "text")
    if column is not None:
        for i in range(len(table)):
            table.text(i, column).encode("utf-8")
    if table.classes is None:
        find_layout(table, next((name for name in ("messages", "sentence", "text") if name in table.columns), None))


# records


def _build_records(folder: Path) -> None:
    (folder / "records").mkdir()
    for name, record in found.everything().items():
        (folder / "records" / f"{Path(name).stem}.json").write_text(json.dumps(record))


def _damage_records(rng: Random, folder: Path) -> None:
    files = sorted((folder / "records").iterdir())
    path = rng.choice(files)
    damage_content(rng, path)
    for other in files:  # the damaged one alone, so that it is quick, or with one other
        if other != path and rng.random() < 0.95:
            other.unlink()


def _read_records(folder: Path) -> None:
    files = sorted((folder / "records").iterdir())
    written = make_report(files, folder / "page.html", folder / "figures")
    for path in written:
        text = path.read_bytes().decode("utf-8")
        assert text.rstrip().endswith(("</html>", "</svg>"))
        if path.suffix == ".svg":
            ElementTree.fromstring(text)


READERS = [
    Reader("recipe", _build_recipe, _damage_recipe, _read_recipe, share=8),
    Reader("suite", _build_suite, _damage_suite, _read_suite, share=4),
    Reader("data", _build_data, _damage_data, _read_data, share=6),
    Reader("records", _build_records, _damage_records, _read_records, share=6),
]
