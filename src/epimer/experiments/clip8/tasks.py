"""The eight tasks and three models of clip8, and where each of them is on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from epimer.errors import DataError, listed
from epimer.experiments.clip8 import names


@dataclass(frozen=True)
class ClipTask:
    """A task: its data on the hub, its classes in the order of the labels, and the sentences they are put into."""

    name: str
    """as in the ids of fine-tuned models"""
    title: str
    """as in tables, and in the folders of the task_vectors family"""
    data: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    subset: str | None = None
    aliases: tuple[str, ...] = ()
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

OVERHEAD = tuple(
    f"{kind} {noun} of {article}{{}}."
    for article in ("", "a ", "the ")
    for noun in ("imagery", "photo", "view")
    for kind in ("satellite", "aerial")
)
NUMBER = ('a photo of the number: "{}".',)

TASKS = (
    ClipTask("sun397", "SUN397", "tanganke/sun397", names.SUN397, ("a photo of a {}.", "a photo of the {}.")),
    ClipTask(
        "stanford-cars",
        "Cars",
        "tanganke/stanford_cars",
        names.CARS,
        (
            *("a photo of a {}.", "a photo of the {}.", "a photo of my {}.", "i love my {}!"),
            *(f"a photo of my {adjective} {{}}." for adjective in ("dirty", "clean", "new", "old")),
        ),
    ),
    ClipTask("resisc45", "RESISC45", "tanganke/resisc45", names.RESISC45, OVERHEAD),
    ClipTask(
        "eurosat",
        "EuroSAT",
        "tanganke/eurosat",
        names.EUROSAT,
        tuple(f"a centered satellite photo of {article}{{}}." for article in ("", "a ", "the ")),
        aliases=names.EUROSAT_FOLDERS,
    ),
    ClipTask("svhn", "SVHN", "ufldl-stanford/svhn", names.DIGITS, NUMBER, subset="cropped_digits"),
    ClipTask(
        "gtsrb",
        "GTSRB",
        "tanganke/gtsrb",
        names.GTSRB,
        tuple(f'a {adjective} photo of a "{{}}" traffic sign.' for adjective in ("zoomed in", "centered", "close up")),
    ),
    ClipTask("mnist", "MNIST", "ylecun/mnist", names.DIGITS, NUMBER),
    ClipTask(
        "dtd",
        "DTD",
        "tanganke/dtd",
        names.DTD,
        tuple(
            f"a photo of {article} {{}} {noun}."
            for article in ("a", "the")
            for noun in ("texture", "pattern", "thing", "object")
        ),
    ),
)


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
    numbered = all(name.isdecimal() and int(name) < len(labels) for name in labels)
    if numbered and task.classes != names.DIGITS:
        return [task.classes[int(name)] for name in labels]
    return [known.get(_normalized(name), " ".join(name.replace("_", " ").split())) for name in labels]


def _normalized(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", name.lower())
