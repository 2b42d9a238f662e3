"""A suite as a YAML file: a base, its fine-tuned models, and for each its data, its head and its metric."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epimer.checkpoints.checkpoint import is_text
from epimer.checkpoints.hub import is_hub_id
from epimer.errors import EpimerError, RecipeError, listed, nearest
from epimer.evaluation.metrics import CLASSIFIER_SCORES, TOKEN_SCORES
from epimer.recipe.yaml_lines import Location, YamlFile, spell
from epimer.tasks.conversations import TEXTS, find_layout
from epimer.tasks.data import open_data
from epimer.tasks.generation import RECORDINGS, TRANSCRIPTS, source_and_target
from epimer.tasks.image_text import IMAGES as PICTURES
from epimer.tasks.loading import (
    AUTO,
    CAUSAL_LM,
    CLASSIFIERS,
    DTYPES,
    IMAGE,
    IMAGE_TEXT,
    POOLINGS,
    SEQ2SEQ,
    SPEECH,
    TEXT,
    read_head,
)
from epimer.tasks.tables import READERS, Table
from epimer.tasks.task import IMAGES, LABELS

KEYS = ("name", "base", "task", "metric", "classifier", "batch_size", "max_length", "dtype", "tasks")
TASK_KEYS = ("name", "model", "task", "metric", "head", "pooling", "classifier", "classes", "data", "doubtful")
DATA_COLUMNS = ("text", "label", "image", "audio")
DATA_KEYS = ("dataset", "subset", "train", "val", "test", *DATA_COLUMNS)
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    TEXT: {"text": TEXTS, "label": LABELS},
    IMAGE: {"image": IMAGES, "label": LABELS},
    IMAGE_TEXT: {"text": TEXTS, "image": PICTURES},
    SPEECH: {"text": TRANSCRIPTS, "audio": RECORDINGS},
}
"""task -> the columns that it reads, by their usual names; others read texts alone"""
SPLITS = ("train", "val", "test")
BATCH, MAX_LENGTH = 16, 512


def _column(kind: str, table: Table, key: str, chosen: str | None, usual: tuple[str, ...]) -> object:
    """Return what a task reads from a table as its `key`; None where it needs that and there is none."""
    if key == "text" and kind in (CAUSAL_LM, IMAGE_TEXT):
        return find_layout(table, chosen)
    if key == "text" and kind == SEQ2SEQ:
        return source_and_target(table, chosen)
    column = table.column(chosen, usual, key)
    return key if column is None and kind == IMAGE_TEXT else column  # images may be in the messages


@dataclass(frozen=True)
class TaskEntry:
    """One task as the file describes it, with its data opened."""

    location: Location
    """of its keys in the file"""
    name: str
    kind: str
    model: str
    metric: str
    tables: Mapping[str, Table]
    """train, val and test, those that the file names"""
    columns: Mapping[str, str]
    """text, label, image and audio -> the column of the data, those that the file names"""
    head: Path | None = None
    pooling: str = "auto"
    classifier: tuple[str, ...] = ()
    """name patterns of the model's tensors that belong to the task, and are not merged"""
    classes: tuple[str, ...] = ()
    doubtful: str = ""
    """why its scores say little, where they do"""


@dataclass(frozen=True)
class SuiteFile:
    """A suite as a file describes it."""

    source: YamlFile
    name: str
    base: str
    tasks: tuple[TaskEntry, ...]
    batch: int
    max_length: int
    dtype: torch.dtype


def read_suite_file(path: str | Path, *, labels: bool = True, progress: bool = False) -> SuiteFile:
    """Read and check a suite's file and open its data, which must have a column of labels if `labels`."""
    source = YamlFile(str(path), "suite")
    return _Reader(source, Path(os.path.expanduser(path)).parent, progress, labels).suite(source.read())


@contextmanager
def errors_at(source: YamlFile, location: Location) -> Iterator[None]:
    """Add the line of the file to errors; an option that they name, as --text, is a key of the file: 'text'."""
    try:
        yield
    except RecipeError:
        raise
    except EpimerError as error:
        raise source.error(location, re.sub(r"--(\w+)", r"'\1'", str(error))) from error


class _Reader:
    """Turns plain data into a suite, or raises an error with the line of what is wrong."""

    def __init__(self, source: YamlFile, folder: Path, progress: bool, labels: bool) -> None:
        self.source, self.folder, self.progress, self.labels = source, folder, progress, labels
        self.error, self.wrong = source.error, source.wrong

    def text(self, path: Location, value: Any) -> str | None:
        """Return a text; refuse one that neither a file's name nor a column can be."""
        text = self.source.text(path, value)
        if text is not None and ("\0" in text or not is_text(text)):
            raise self.wrong(path, value, "text without NUL and half characters")
        return text

    def suite(self, raw: Any) -> SuiteFile:
        if raw is None or raw == {}:
            raise self.error((), "the suite is empty; it needs at least base and tasks.")
        keys = self.source.mapping((), raw, KEYS, {})
        base = self.required((), keys, "base", "the model that the others were fine-tuned from")
        tasks = keys.get("tasks")
        if not isinstance(tasks, list) or not tasks:
            raise self.wrong(("tasks",), tasks, "a list of tasks, each with a model and its data")
        dtype = getattr(torch, self.choice(("dtype",), keys, DTYPES) or "float32")
        entries: dict[str, TaskEntry] = {}
        for t, item in enumerate(tasks):
            entry = self.task(("tasks", t), item, keys, dtype)
            if entry.name in entries:
                raise self.error(("tasks", t), f"two tasks are called {entry.name!r}; give them different names.")
            entries[entry.name] = entry
        return SuiteFile(
            self.source,
            self.text(("name",), keys.get("name")) or Path(str(self.source.file)).stem,
            self.resolve(base),
            tuple(entries.values()),
            self.count(("batch_size",), keys, BATCH),
            self.count(("max_length",), keys, MAX_LENGTH),
            dtype,
        )

    def task(self, path: Location, raw: Any, defaults: Mapping[str, Any], dtype: torch.dtype) -> TaskEntry:
        keys = self.source.mapping(path, raw, TASK_KEYS, {})
        model = self.required(path, keys, "model", "the model that was fine-tuned for the task")
        kind = self.choice((*path, "task"), keys, tuple(AUTO)) or self.choice(("task",), defaults, tuple(AUTO))
        if kind is None:
            raise self.error(path, f"{spell(path)} has no 'task'; add it here or for all: {', '.join(AUTO)}.")
        known = tuple(CLASSIFIER_SCORES if kind in CLASSIFIERS else TOKEN_SCORES)
        metric = self.choice((*path, "metric"), keys, known) or self.choice(("metric",), defaults, known) or known[0]
        head = self.text((*path, "head"), keys.get("head"))
        if kind not in CLASSIFIERS and (head is not None or keys.get("classes") is not None):
            raise self.error(path, f"{spell(path)} is {kind}, which has no classes; leave out 'head' and 'classes'.")
        if keys.get("pooling") is not None and head is None:
            raise self.error((*path, "pooling"), "'pooling' is what a 'head' reads; add one, or leave pooling out.")
        classes = self.names((*path, "classes"), keys.get("classes"))
        file = None if head is None else self.folder / os.path.expanduser(head)
        if file is not None:
            with errors_at(self.source, (*path, "head")):
                count = read_head(file, dtype).out_features
            if classes and len(classes) != count:
                message = f"the head has {count} classes, but 'classes' names {len(classes)} of them."
                raise self.error((*path, "classes"), message)
        shared = self.names(("classifier",), defaults.get("classifier"))
        return TaskEntry(
            path,
            self.text((*path, "name"), keys.get("name")) or Path(model.rstrip("/")).name,
            kind,
            self.resolve(model),
            metric,
            *self.data((*path, "data"), keys.get("data"), kind),
            file,
            self.choice((*path, "pooling"), keys, POOLINGS) or "auto",
            (*shared, *self.names((*path, "classifier"), keys.get("classifier"))),
            classes,
            self.text((*path, "doubtful"), keys.get("doubtful")) or "",
        )

    def data(self, path: Location, raw: Any, kind: str) -> tuple[dict[str, Table], dict[str, str]]:
        """Open the splits; check that they have the columns to read."""
        columns = COLUMNS.get(kind, {"text": TEXTS})
        refused = {key: f"'{key}' is not a column of {kind}." for key in {*DATA_COLUMNS} - columns.keys()}
        raw = self.source.mapping(path, {} if raw is None else raw, DATA_KEYS, refused)
        keys = {key: text for key in DATA_KEYS if (text := self.text((*path, key), raw.get(key))) is not None}
        splits = [split for split in SPLITS if split in keys]
        if not splits:
            raise self.error(path, f"{spell(path)} names no data; add test, and val and train for benches.")
        if "subset" in keys and "dataset" not in keys:
            raise self.error((*path, "subset"), "'subset' is one of a 'dataset', which is missing; add it.")
        if "val" in keys and "test" in keys and self.origin(keys, "val") == self.origin(keys, "test"):
            raise self.error((*path, "test"), "val and test are the same data; what was chosen on val proves nothing.")
        tables, chosen = {}, {key: keys[key] for key in columns if key in keys}
        for split in splits:
            with errors_at(self.source, (*path, split)):
                tables[split] = self.table(keys, split)
        for split, table in tables.items():
            for key, usual in columns.items():
                with errors_at(self.source, (*path, key)):
                    found = _column(kind, table, key, chosen.get(key), usual)
                if found is None and (key != "label" or self.labels):
                    has = f"{table.name} has no column {' or '.join(map(repr, usual))}"
                    raise self.error((*path, split), f"{has}; it has {listed(table.columns, 12)}: name it in {key!r}.")
        return tables, chosen

    def origin(self, keys: Mapping[str, str], split: str) -> str:
        """Return what a split's data is read from, however its path is written."""
        return keys[split] if "dataset" in keys else os.path.realpath(self.resolve(keys[split]))

    def table(self, keys: Mapping[str, str], split: str) -> Table:
        if "dataset" not in keys:
            return open_data(self.resolve(keys[split]), progress=self.progress)
        dataset = self.resolve(keys["dataset"])
        return open_data(dataset, split=keys[split], subset=keys.get("subset"), progress=self.progress)

    def resolve(self, text: str) -> str:
        """Return a path that is relative to the file's folder as one from here; a hub id stays as it is."""
        path = self.folder / os.path.expanduser(text)
        if os.path.exists(path):
            return str(path)
        if "+" in text:
            base, adapter = text.rsplit("+", 1)
            return f"{self.resolve(base.strip())}+{self.resolve(adapter.strip())}"
        return text if is_hub_id(text) and not text.lower().endswith(tuple(READERS)) else str(path)

    def required(self, path: Location, keys: Mapping[str, Any], key: str, meaning: str) -> str:
        value = self.text((*path, key), keys.get(key))
        if value is None:
            raise self.error(path, f"{spell(path) or 'the suite'} has no {key!r}: {meaning}.")
        return value

    def choice(self, path: Location, keys: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
        value = keys.get(str(path[-1]))
        if value is not None and value not in known:
            hint = nearest(str(value), known)
            raise self.error(path, f"{spell(path)} must be one of {', '.join(known)}. Got {value!r} instead.{hint}")
        return value

    def count(self, path: Location, keys: Mapping[str, Any], default: int) -> int:
        value = keys.get(str(path[-1]), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(path, value, "an integer, at least 1")
        return value

    def names(self, path: Location, raw: Any) -> tuple[str, ...]:
        """Return a list of texts; a single one may stand without brackets."""
        items = [raw] if isinstance(raw, str) else [] if raw is None else raw
        if not isinstance(items, list):
            raise self.wrong(path, raw, "a list of texts")
        texts = [self.text((*path, i), str(item) if isinstance(item, int) else item) for i, item in enumerate(items)]
        if not all(texts) or len(set(texts)) < len(texts):
            raise self.wrong(path, raw, "a list of texts, none of them twice")
        return tuple(str(text) for text in texts)
