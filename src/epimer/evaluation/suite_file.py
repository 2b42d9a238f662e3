"""Your own suite as a YAML file: a base, its fine-tuned models, and for each its data, its head and its metric."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epimer.checkpoints.hub import is_hub_id
from epimer.errors import EpimerError, RecipeError, listed, nearest
from epimer.evaluation.metrics import CLASSES, TOKENS
from epimer.recipe.yaml_lines import Path as Place
from epimer.recipe.yaml_lines import Source, spell
from epimer.tasks.data import open_data
from epimer.tasks.loading import AUTO, CAUSAL_LM, DTYPES, IMAGE, POOLINGS, read_head
from epimer.tasks.tables import READERS, Table
from epimer.tasks.task import IMAGES, LABELS, TEXTS

KEYS = ("name", "base", "task", "metric", "classifier", "batch_size", "max_length", "dtype", "tasks")
TASK_KEYS = ("name", "model", "task", "metric", "head", "pooling", "classifier", "classes", "data")
DATA_KEYS = ("dataset", "subset", "train", "val", "test", "text", "label", "image")
SPLITS = ("train", "val", "test")
BATCH, LONGEST = 16, 512


@dataclass(frozen=True)
class Entry:
    """One task as the file describes it, with its data opened."""

    place: Place
    """where in the file it stands"""
    name: str
    kind: str
    model: str
    metric: str
    tables: Mapping[str, Table]
    """train, val and test, as far as they are given"""
    columns: Mapping[str, str]
    """which columns of the data to read, as far as the file names them: text, label, image"""
    head: Path | None = None
    pooling: str = "auto"
    own: tuple[str, ...] = ()
    """name patterns of the model's tensors that belong to the task, and are not merged"""
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Described:
    """A suite as a file describes it."""

    source: Source
    name: str
    base: str
    entries: tuple[Entry, ...]
    batch: int
    longest: int
    dtype: torch.dtype

    @contextmanager
    def at(self, place: Place) -> Any:
        """Say where in the file something is named that turned out to be at fault."""
        try:
            yield
        except RecipeError:
            raise
        except EpimerError as error:
            raise self.source.error(place, in_file(error)) from error


def in_file(error: EpimerError) -> str:
    """Return an error as it concerns a file: an option of the command line is a key here."""
    return re.sub(r"--(\w+)", r"'\1'", str(error))


def describe_suite(path: str | Path, *, labels: bool = True, progress: bool = False) -> Described:
    """Read a suite's file, check every word of it, and open its data, which may lack `labels` if so asked."""
    source = Source(str(path), "suite")
    return _Reader(source, Path(path).expanduser().parent, progress, labels).suite(source.read())


class _Reader:
    """Turns plain data into a suite, or says where and what is wrong."""

    def __init__(self, source: Source, folder: Path, progress: bool, labels: bool) -> None:
        self.source, self.folder, self.progress, self.labels = source, folder, progress, labels
        self.error, self.wrong, self.text = source.error, source.wrong, source.text

    def suite(self, raw: Any) -> Described:
        if raw is None or raw == {}:
            raise self.error((), "the suite is empty; it needs at least base and tasks.")
        given = self.source.mapping((), raw, KEYS, {})
        base = self.needed((), given, "base", "the model that the others were fine-tuned from")
        tasks = given.get("tasks")
        if not isinstance(tasks, list) or not tasks:
            raise self.wrong(("tasks",), tasks, "a list of tasks, each with a model and its data")
        dtype = self.choice(("dtype",), given, DTYPES) or "float32"
        entries: dict[str, Entry] = {}
        for t, item in enumerate(tasks):
            entry = self.entry(("tasks", t), item, given, getattr(torch, dtype))
            if entry.name in entries:
                raise self.error(("tasks", t), f"two tasks are called {entry.name!r}; give them names of their own.")
            entries[entry.name] = entry
        return Described(
            self.source,
            self.text(("name",), given.get("name")) or Path(str(self.source.file)).stem,
            self.place(base),
            tuple(entries.values()),
            self.count(("batch_size",), given, BATCH),
            self.count(("max_length",), given, LONGEST),
            getattr(torch, dtype),
        )

    def entry(self, path: Place, raw: Any, above: Mapping[str, Any], dtype: torch.dtype) -> Entry:
        given = self.source.mapping(path, raw, TASK_KEYS, {})
        model = self.needed(path, given, "model", "the model that was fine-tuned for the task")
        kind = self.choice((*path, "task"), given, tuple(AUTO)) or self.choice(("task",), above, tuple(AUTO))
        if kind is None:
            raise self.error(path, f"{spell(path)} has no 'task'; add it here or for all: {', '.join(AUTO)}.")
        known = tuple(TOKENS if kind == CAUSAL_LM else CLASSES)
        metric = self.choice((*path, "metric"), given, known) or self.choice(("metric",), above, known) or known[0]
        head = self.text((*path, "head"), given.get("head"))
        if kind == CAUSAL_LM and (head is not None or given.get("classes") is not None):
            raise self.error(path, f"{spell(path)} is causal-lm, which has no classes; leave out 'head' and 'classes'.")
        if given.get("pooling") is not None and head is None:
            raise self.error((*path, "pooling"), "'pooling' is what a 'head' reads; add one, or leave pooling out.")
        classes = self.names((*path, "classes"), given.get("classes"))
        file = None if head is None else self.folder / Path(head).expanduser()
        if file is not None:
            self.check_head((*path, "head"), file, classes, dtype)
        shared = self.names(("classifier",), above.get("classifier"))
        return Entry(
            path,
            self.text((*path, "name"), given.get("name")) or Path(model.rstrip("/")).name,
            kind,
            self.place(model),
            metric,
            *self.data((*path, "data"), given.get("data"), kind),
            file,
            self.choice((*path, "pooling"), given, POOLINGS) or "auto",
            (*shared, *self.names((*path, "classifier"), given.get("classifier"))),
            classes,
        )

    def data(self, path: Place, raw: Any, kind: str) -> tuple[dict[str, Table], dict[str, str]]:
        """Open the splits; check that they have the columns to read."""
        what, usual = ("image", IMAGES) if kind == IMAGE else ("text", TEXTS)
        columns: dict[str, tuple[str, ...]] = {what: usual} if kind == CAUSAL_LM else {what: usual, "label": LABELS}
        refused = {key: f"'{key}' is no column of {kind}." for key in ("text", "label", "image") if key not in columns}
        given = self.source.mapping(path, {} if raw is None else raw, DATA_KEYS, refused)
        found = {key: text for key in DATA_KEYS if (text := self.text((*path, key), given.get(key))) is not None}
        splits = [split for split in SPLITS if split in found]
        if not splits:
            raise self.error(path, f"{spell(path)} names no data; add test, and val and train for benches.")
        if "subset" in found and "dataset" not in found:
            raise self.error((*path, "subset"), "'subset' is one of a 'dataset', which is not given; add it.")
        if "val" in found and "test" in found and self.source_of(found, "val") == self.source_of(found, "test"):
            raise self.error((*path, "test"), "val and test are the same data; what was chosen on val proves nothing.")
        tables = {split: self.table((*path, split), split, found) for split in splits}
        asked = {key: found[key] for key in columns if key in found}
        for split, table in tables.items():
            for key, names in columns.items():
                try:
                    column = table.column(asked.get(key), names, key)
                except EpimerError as error:
                    raise self.error((*path, key), in_file(error)) from error
                if column is None and (key != "label" or self.labels):
                    has = f"{table.name} has no column {' or '.join(map(repr, names))}"
                    raise self.error((*path, split), f"{has}; it has {listed(table.columns, 12)}: name it in {key!r}.")
        return tables, asked

    def source_of(self, found: Mapping[str, str], split: str) -> str:
        """Return what a split's data is read from, however its path is written."""
        return found[split] if "dataset" in found else os.path.realpath(self.place(found[split]))

    def table(self, path: Place, split: str, found: Mapping[str, str]) -> Table:
        try:
            if "dataset" in found:
                where = self.place(found["dataset"])
                return open_data(where, split=found[split], subset=found.get("subset"), progress=self.progress)
            return open_data(self.place(found[split]), progress=self.progress)
        except EpimerError as error:
            raise self.error(path, in_file(error)) from error

    def check_head(self, path: Place, file: Path, classes: tuple[str, ...], dtype: torch.dtype) -> None:
        try:
            count = read_head(file, dtype).out_features
        except EpimerError as error:
            raise self.error(path, in_file(error)) from error
        if classes and len(classes) != count:
            raise self.error(
                (*path[:-1], "classes"), f"the head has {count} classes, but 'classes' names {len(classes)} of them."
            )

    # --- values

    def place(self, text: str) -> str:
        """Return a path that is relative to the file as one from here; a hub id stays as it is."""
        path = self.folder / Path(text).expanduser()
        if path.exists():
            return str(path)
        if "+" in text:
            base, adapter = text.rsplit("+", 1)
            return f"{self.place(base.strip())}+{self.place(adapter.strip())}"
        return text if is_hub_id(text) and not text.lower().endswith(tuple(READERS)) else str(path)

    def needed(self, path: Place, given: Mapping[str, Any], key: str, what: str) -> str:
        found = self.text((*path, key), given.get(key))
        if found is None:
            raise self.error(path, f"{spell(path) or 'the suite'} has no {key!r}: {what}.")
        return found

    def choice(self, path: Place, given: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
        value = given.get(str(path[-1]))
        if value is not None and value not in known:
            hint = nearest(str(value), known)
            raise self.error(path, f"{spell(path)} must be one of {', '.join(known)}. Got {value!r} instead.{hint}")
        return value

    def count(self, path: Place, given: Mapping[str, Any], default: int) -> int:
        value = given.get(str(path[-1]), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(path, value, "an integer, at least 1")
        return value

    def names(self, path: Place, raw: Any) -> tuple[str, ...]:
        """Return a list of texts; one alone may stand without its brackets."""
        many = [raw] if isinstance(raw, str) else [] if raw is None else raw
        if not isinstance(many, list):
            raise self.wrong(path, raw, "a list of texts")
        found = tuple(
            self.text((*path, i), str(item) if isinstance(item, int) else item) for i, item in enumerate(many)
        )
        if not all(found) or len(set(found)) < len(found):
            raise self.wrong(path, raw, "a list of texts, none of them twice")
        return tuple(str(item) for item in found)
