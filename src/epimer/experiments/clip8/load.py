"""Load clip8: models and data from the hub, its cache or local folders; heads from the text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import open_file
from epimer.checkpoints.hub import fetch_repo
from epimer.errors import CheckpointError, DataError, EpimerError, ParameterError, listed, nearest
from epimer.evaluation.suite import Suite, SuiteTask
from epimer.experiments.clip8.heads import Networks, vision_state, zero_shot_head
from epimer.experiments.clip8.images import ImageSplit, card_names, label_names, split_rows
from epimer.experiments.clip8.openclip import to_transformers
from epimer.experiments.clip8.published import FAMILY_SOURCES, PUBLISHED, remarks
from epimer.experiments.clip8.tasks import SPLITS, TASKS, VARIANTS, ClipTask, class_names
from epimer.progress import Progress
from epimer.tasks.data import open_data
from epimer.tasks.loading import check_folder, failed, quiet_transformers, transformers
from epimer.tasks.tables import Table

BATCH = 128  # images evaluated at a time
State = dict[str, Tensor]
T = TypeVar("T")


def load(
    variant: str = "B/32",
    *,
    limit: int | None = None,
    seed: int = 0,
    progress: bool = True,
    family: str = "tanganke",
    checkpoints: Path | None = None,
    data: Path | None = None,
) -> Suite:
    """Return the suite of a variant (B/32, B/16, L/14), with at most `limit` samples in each split.

    The family is tanganke (model folders on the hub) or task_vectors (pickled modules of open_clip, in the folder
    `checkpoints`: ViT-B-32/zeroshot.pt, ViT-B-32/MNIST/finetuned.pt). The folders `checkpoints` and `data` may have
    models and datasets by their hub ids, with or without the organisation; what they lack comes from the hub. The seed
    chooses the samples of the training split that are for validation, and those that a limit takes.
    """
    _check_settings(variant, family, limit, checkpoints)
    sizes = VARIANTS[variant]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    open_model = partial(open_checkpoint, progress=progress)
    clip, tokenizer, processor = _load_clip(_open(open_model, sizes.base, checkpoints))
    base = vision_state(clip, projection=family == "task_vectors")
    if family == "task_vectors" and checkpoints is not None:
        base, models = _read_pickled(checkpoints, sizes.folder, base)
    else:
        tuned = [sizes.tuned.format(task.name) for task in TASKS]
        models = [_read_tuned(_open(open_model, name, checkpoints), base) for name in tuned]
    tables = {task.name: _open(partial(_open_tables, task, progress), task.data, data) for task in TASKS}
    labels = {task.name: _label_names(task, data, tables[task.name]) for task in TASKS}
    classes = {task.name: class_names(task, labels[task.name]) for task in TASKS}
    heads = _encode_classes(clip.to(device), tokenizer, classes, progress=progress)
    networks = Networks(clip.to("cpu"), device)

    def splits(task: ClipTask) -> dict[str, ImageSplit]:
        train, test = (tables[task.name][split] for split in SPLITS)
        numbers = {name: i for i, name in enumerate(labels[task.name] or ())}
        return {
            split: ImageSplit(test if split == "test" else train, rows, processor, numbers, len(task.classes), device)
            for split, rows in split_rows(len(train), len(test), limit=limit, seed=seed).items()
        }

    return Suite(
        name=f"clip8 ViT-{variant}, {family} checkpoints" + (f", {limit} samples a split" if limit else ""),
        base=base,
        models=models,
        tasks=[
            SuiteTask(task.title, classes[task.name], splits(task), {"weight": heads[task.name].to(device)})
            for task in TASKS
        ],
        network=lambda state, task: networks(state, task.head["weight"]),
        batch=BATCH,
        untrained="zero-shot",
        published=PUBLISHED[variant],
        remarks=remarks(family),
    )


def _check_settings(variant: str, family: str, limit: int | None, checkpoints: Path | None) -> None:
    """Refuse a variant, a family or a limit that clip8 does not have."""
    for name, value, known in (("variant", variant, VARIANTS), ("family", family, FAMILY_SOURCES)):
        if value not in known:
            raise ParameterError(
                f"The {name!r} parameter of clip8 must be one of {', '.join(known)}. Got {value!r} instead."
                f"{nearest(value, known)}"
            )
    if limit is not None and limit < 1:
        raise ParameterError(f"The 'limit' parameter of clip8 must be at least 1. Got {limit} instead.")
    if family == "task_vectors" and checkpoints is None:
        folder = VARIANTS[variant].folder
        raise CheckpointError(
            "the task_vectors family is not on the hub; download its checkpoints and give their folder with "
            f"--checkpoints (it should hold {folder}/zeroshot.pt and {folder}/MNIST/finetuned.pt)."
        )


def _locate(name: str, folder: Path | None) -> str:
    """Return the path of a hub id in a local folder, or the id."""
    if folder is not None:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give one with models or datasets by their hub ids.")
        for place in (folder / name, folder / name.rpartition("/")[2]):
            if place.is_dir():
                return str(place)
    return name


def _open(function: Callable[[str], T], name: str, folder: Path | None) -> T:
    """Open a model or dataset in a local folder or on the hub; an error with the hub says how else to provide it."""
    place = _locate(name, folder)
    try:
        return function(place)
    except EpimerError as error:
        if place != name:
            raise
        raise type(error)(
            f"clip8 could not open one of its models and datasets: {str(error).rstrip('.')}; or copy a cache that has "
            "it to HF_HOME, or give folders that have it with --checkpoints and --data."
        ) from error


# --- models ----------------------------------------------------------------------------------------------------------


def _load_clip(checkpoint: Checkpoint) -> tuple[Any, Any, Any]:
    """Return the pre-trained model with both towers, in float32, its tokenizer and its image processor."""
    folder, library = check_folder(checkpoint), transformers()
    parts: dict[str, tuple[Any, dict[str, Any]]] = {
        "the model": (library.CLIPModel, {"dtype": torch.float32}),
        "the tokenizer": (library.AutoTokenizer, {}),
        "the image processor": (library.AutoImageProcessor, {"backend": "pil"}),
    }
    loaded = []
    with quiet_transformers(shown=False):
        for part, (kind, options) in parts.items():
            try:
                loaded.append(kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options))
            except Exception as error:  # whatever is wrong with the files, transformers has some error for it
                raise failed(checkpoint.where, part, error) from error
    return loaded[0].eval(), loaded[1], loaded[2]


def _read_tuned(checkpoint: Checkpoint, base: State) -> State:
    """Read a fine-tuned vision tower; older and newer files differ in whether names begin with `vision_model.`."""
    stored = {f"vision_model.{name.removeprefix('vision_model.')}": name for name in checkpoint.headers}
    state = {name: checkpoint.read(stored[name]).float() for name in base if name in stored}
    return _check_tower(state, base, checkpoint.where)


def _read_pickled(checkpoints: Path, folder: str, like: State) -> tuple[State, list[State]]:
    """Read the task_vectors family: zeroshot.pt and <task>/finetuned.pt, each a pickled module of open_clip."""
    top = checkpoints.expanduser()
    top = top / folder if (top / folder).is_dir() else top

    def read(name: str) -> State:
        path = top / name
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; the task_vectors family has a file there: download it.")
        opened = open_file(path, str(path))
        state = to_transformers({key: opened.read(key) for key in opened.headers}, str(path))
        return _check_tower(state, like, str(path))

    return read("zeroshot.pt"), [read(f"{task.title}/finetuned.pt") for task in TASKS]


def _check_tower(state: State, base: State, where: str) -> State:
    """Return the tensors in the order of the base; refuse other names and shapes."""
    missing = [name for name in base if name not in state]
    if missing:
        raise CheckpointError(f"{where} lacks {listed(missing)} of the vision tower; give a model of this variant.")
    for name, W in base.items():
        if state[name].shape != W.shape:
            raise CheckpointError(
                f"{where}: {name!r} is {tuple(state[name].shape)}, in the base {tuple(W.shape)}; give a model of this "
                "variant."
            )
    return {name: state[name] for name in base}


# --- data and heads --------------------------------------------------------------------------------------------------


def _open_tables(task: ClipTask, progress: bool, place: str) -> dict[str, Table]:
    """Open a task's splits; a local folder need not have the subset's name in it."""
    subset = task.subset if place == task.data or (Path(place) / str(task.subset)).is_dir() else None
    return {split: open_data(place, split=split, subset=subset, progress=progress) for split in SPLITS}


def _label_names(task: ClipTask, data: Path | None, tables: Mapping[str, Table]) -> list[str] | None:
    """Return the names of the labels in the data's files or on its card, None where it has none."""
    train, test = (label_names(tables[split]) for split in SPLITS)
    folders = tables["test"].classes is not None  # of which a small test split may lack some
    if test is not None and (train is None or (not set(test) <= set(train) if folders else test != train)):
        raise DataError(
            f"{task.data} names its classes in test ({listed(test)}) not as in train ({listed(train or ())}); give "
            "one dataset for both."
        )
    if train is not None:
        return train
    place = _locate(task.data, data)
    if place != task.data:
        return card_names(Path(place) / "README.md")
    try:
        folder, _ = fetch_repo(place, "dataset", lambda files: ["README.md"], DataError, progress=False)
    except DataError:  # out of reach, and not in the cache
        return None
    return card_names(folder / "README.md")


def _encode_classes(clip: Any, tokenizer: Any, names: Mapping[str, list[str]], *, progress: bool) -> dict[str, Tensor]:
    """Return the zero-shot head of every task."""
    heads = {}
    with Progress(progress, unit="sentences") as bar:
        stage = bar.begin("heads", sum(len(task.classes) * len(task.templates) for task in TASKS))
        for task in TASKS:
            report = partial(stage.advance, item=task.title)
            heads[task.name] = zero_shot_head(clip, tokenizer, names[task.name], task.templates, report)
    return heads
