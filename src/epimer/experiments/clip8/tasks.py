"""The eight tasks and three models of clip8, and where each of them is on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

from epimer.errors import DataError, listed


@dataclass(frozen=True)
class ClipTask:
    """A task: its data on the hub, its classes in the order of the labels, and the sentences they are put into."""

    name: str
    """as in the ids of fine-tuned models"""
    title: str
    """as in tables, and in the folders of the task_vectors family"""
    data: str
    classes: Sequence[str]
    templates: Sequence[str]
    subset: str | None = None
    aliases: Sequence[str] = ()
    """other names of the classes, in the same order"""


@dataclass(frozen=True)
class Variant:
    """A size of the model."""

    base: str
    """the pre-trained model, both towers"""
    tuned: str
    """a fine-tuned vision tower, by task"""
    folder: str
    """where the task_vectors family has it"""


VARIANTS = {
    "B/32": Variant("openai/clip-vit-base-patch32", "tanganke/clip-vit-base-patch32_{}", "ViT-B-32"),
    "B/16": Variant("openai/clip-vit-base-patch16", "tanganke/clip-vit-base-patch16_{}", "ViT-B-16"),
    "L/14": Variant("openai/clip-vit-large-patch14", "tanganke/clip-vit-large-patch14_{}", "ViT-L-14"),
}
SPLITS = ("train", "test")
"""of every dataset; none has a split for validation"""

_ENTRIES = yaml.safe_load(files(__package__).joinpath("tasks.yaml").read_text(encoding="utf-8"))
TASKS = tuple(ClipTask(**entry) for entry in _ENTRIES)


def class_names(task: ClipTask, labels: Sequence[str] | None) -> list[str]:
    """Return the class name of each label: the names in the data decide the order, ours how a class is written.

    Data without names (`labels` is None) are taken to be labelled in the order of `task.classes`.
    """
    if labels is None:
        return list(task.classes)
    if len(labels) != len(task.classes):
        raise DataError(
            f"{task.data} has {len(labels)} classes ({listed(labels)}), expected the {len(task.classes)} of "
            f"{task.title}; is it the right dataset?"
        )
    known = {_normalized(name): name for name in task.classes}
    known |= {_normalized(alias): name for alias, name in zip(task.aliases, task.classes, strict=False)}
    if all(name.isdecimal() and int(name) < len(labels) for name in labels):
        return [task.classes[int(name)] for name in labels]
    return [known.get(_normalized(name), " ".join(name.replace("_", " ").split())) for name in labels]


def _normalized(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", name.lower())
