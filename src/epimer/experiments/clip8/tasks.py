"""What clip8 is made of: the eight tasks, the three models, and where each of them is on the hub."""

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
"""what every dataset has; none of them has a split for validation"""

OVERHEAD = tuple(
    f"{kind} {what} of {article}{{}}."
    for article in ("", "a ", "the ")
    for what in ("imagery", "photo", "view")
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
            *(f"a photo of my {how} {{}}." for how in ("dirty", "clean", "new", "old")),
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
        tuple(f'a {how} photo of a "{{}}" traffic sign.' for how in ("zoomed in", "centered", "close up")),
    ),
    ClipTask("mnist", "MNIST", "ylecun/mnist", names.DIGITS, NUMBER),
    ClipTask(
        "dtd",
        "DTD",
        "tanganke/dtd",
        names.DTD,
        tuple(
            f"a photo of {article} {{}} {what}."
            for article in ("a", "the")
            for what in ("texture", "pattern", "thing", "object")
        ),
    ),
)


def class_names(task: ClipTask, own: Sequence[str] | None) -> list[str]:
    """Return what to call each label: the data's own names decide the order, ours how a class is written.

    Data without names of their own are taken to be labelled in the order of `task.classes`.
    """
    if own is None:
        return list(task.classes)
    if len(own) != len(task.classes):
        raise DataError(
            f"{task.data} has {len(own)} classes ({listed(own)}), expected the {len(task.classes)} of {task.title}; "
            "is it the right dataset?"
        )
    known = {_plain(name): name for name in task.classes}
    known |= {_plain(alias): name for alias, name in zip(task.aliases, task.classes, strict=False)}
    numbered = all(name.isdecimal() and int(name) < len(own) for name in own)
    if numbered and task.classes != names.DIGITS:
        return [task.classes[int(name)] for name in own]
    return [known.get(_plain(name), " ".join(name.replace("_", " ").split())) for name in own]


def _plain(name: str) -> str:
    """Return the letters and digits of a name."""
    return re.sub(r"[\W_]", "", name.lower())
