"""Open clip8: models and data from the hub, its cache or local folders; heads from the text tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import open_file
from epimer.checkpoints.hub import fetch_repo
from epimer.errors import CheckpointError, DataError, EpimerError, ParameterError, listed, nearest
from epimer.evaluation.suite import Suite, SuiteTask
from epimer.experiments.clip8.heads import Networks, vision_state, zero_shot_head
from epimer.experiments.clip8.openclip import to_transformers
from epimer.experiments.clip8.pictures import Pictures, card_names, label_names, split_rows
from epimer.experiments.clip8.published import OWN, PUBLISHED, remarks
from epimer.experiments.clip8.tasks import SPLITS, TASKS, VARIANTS, ClipTask, class_names
from epimer.progress import Progress
from epimer.tasks.data import open_data
from epimer.tasks.loading import check_folder, failed, quiet_transformers, transformers
from epimer.tasks.tables import Table

BATCH = 128  # images evaluated at a time
FAMILIES = tuple(OWN)
State = dict[str, Tensor]


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
    """Return the suite.

    Args:
        variant: B/32, B/16 or L/14.
        limit: samples of each split, for a quick look; all of them by default.
        seed: of which samples of the training split are for validation, and of which ones a limit takes.
        progress: show bars on a terminal.
        family: tanganke (model folders on the hub) or task_vectors (modules of open_clip, pickled, in `checkpoints`).
        checkpoints: a folder with models by their hub ids (with or without the organisation) or, for task_vectors, with
            ViT-B-32/zeroshot.pt and ViT-B-32/MNIST/finetuned.pt; what it lacks comes from the hub.
        data: a folder with datasets by their hub ids (with or without the organisation); likewise.
    """
    _check("variant", variant, tuple(VARIANTS))
    _check("family", family, FAMILIES)
    if limit is not None and limit < 1:
        raise ParameterError(f"The 'limit' parameter of clip8 must be at least 1. Got {limit} instead.")
    sizes = VARIANTS[variant]
    if family == "task_vectors" and checkpoints is None:
        raise CheckpointError(
            "the task_vectors family is not on the hub; download its checkpoints and give their folder with "
            f"--checkpoints (it should hold {sizes.folder}/zeroshot.pt and {sizes.folder}/MNIST/finetuned.pt)."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _kindly():
        opened = open_checkpoint(_locate(sizes.base, checkpoints), progress=progress)
        clip, tokenizer, processor = _load_clip(opened)
        base = vision_state(clip, projection=family == "task_vectors")
        if family == "task_vectors" and checkpoints is not None:
            base, models = _pickled(checkpoints, sizes.folder, base)
        else:
            models = [
                _tuned(open_checkpoint(_locate(sizes.tuned.format(task.name), checkpoints), progress=progress), base)
                for task in TASKS
            ]
        tables = {task.name: _tables(task, data, progress=progress) for task in TASKS}
        own = {task.name: _own_names(task, data, tables[task.name]) for task in TASKS}
    names = {task.name: class_names(task, own[task.name]) for task in TASKS}
    heads = _heads(clip.to(device), tokenizer, names, progress=progress)
    networks = Networks(clip.to("cpu"), device)

    def splits(task: ClipTask) -> dict[str, Pictures]:
        found = tables[task.name]
        rows = split_rows(len(found["train"]), len(found["test"]), limit=limit, seed=seed)
        numbers = {name: i for i, name in enumerate(own[task.name] or ())}
        return {
            split: Pictures(found[_source(split)], rows[split], processor, numbers, len(task.classes), device)
            for split in rows
        }

    def network(state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        return networks(state, task.head["weight"])

    return Suite(
        name=f"clip8 ViT-{variant}, {family} checkpoints" + (f", {limit} samples a split" if limit else ""),
        base=base,
        models=models,
        tasks=[
            SuiteTask(task.title, names[task.name], splits(task), {"weight": heads[task.name].to(device)})
            for task in TASKS
        ],
        network=network,
        batch=BATCH,
        untrained="zero-shot",
        published=PUBLISHED[variant],
        remarks=remarks(family),
    )


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ParameterError(
            f"The {name!r} parameter of clip8 must be one of {', '.join(known)}. Got {value!r} instead."
            f"{nearest(value, known)}"
        )


@contextmanager
def _kindly() -> Iterator[None]:
    """Say, of what the hub did not give, how else it can be given."""
    try:
        yield
    except EpimerError as error:
        if "the hub" not in str(error):
            raise
        raise type(error)(
            f"clip8 could not open one of its models and datasets: {error}; or copy a cache that has it to HF_HOME, or "
            "give folders that have it with --checkpoints and --data."
        ) from error


def _locate(name: str, folder: Path | None) -> str:
    """Return where a hub id is in a local folder, or the id."""
    if folder is not None:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give one with models or datasets by their hub ids.")
        for place in (folder / name, folder / name.rpartition("/")[2]):
            if place.is_dir():
                return str(place)
    return name


# --- models ----------------------------------------------------------------------------------------------------------


def _load_clip(checkpoint: Checkpoint) -> tuple[Any, Any, Any]:
    """Return the pre-trained model with both towers, in float32, its tokenizer and its image processor."""
    folder, library = check_folder(checkpoint), transformers()
    options = {"local_files_only": True, "trust_remote_code": False}
    parts: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("the model", lambda: library.CLIPModel.from_pretrained(folder, dtype=torch.float32, **options)),
        ("the tokenizer", lambda: library.AutoTokenizer.from_pretrained(folder, **options)),
        ("the image processor", lambda: library.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)),
    )
    made = []
    with quiet_transformers(shown=False):
        for what, make in parts:
            try:
                made.append(make())
            except Exception as error:  # whatever is wrong with the files, transformers has some error for it
                raise failed(checkpoint.where, what, error) from error
    return made[0].eval(), made[1], made[2]


def _tuned(checkpoint: Checkpoint, base: State) -> State:
    """Read a fine-tuned vision tower; older and newer files differ in whether names begin with `vision_model.`."""
    found = {f"vision_model.{name.removeprefix('vision_model.')}": name for name in checkpoint.headers}
    return _fitting(
        {name: checkpoint.read(found[name]).float() for name in base if name in found}, base, checkpoint.where
    )


def _pickled(checkpoints: Path, folder: str, like: State) -> tuple[State, list[State]]:
    """Read the task_vectors family: zeroshot.pt and <task>/finetuned.pt, each a pickled module of open_clip."""
    top = checkpoints.expanduser()
    top = top / folder if (top / folder).is_dir() else top

    def read(name: str) -> State:
        path = top / name
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; the task_vectors family has a file there: download it.")
        opened = open_file(path, str(path))
        return _fitting(to_transformers({key: opened.read(key) for key in opened.headers}, str(path)), like, str(path))

    return read("zeroshot.pt"), [read(f"{task.title}/finetuned.pt") for task in TASKS]


def _fitting(state: State, base: State, where: str) -> State:
    """Return the tensors in the order of the base, after a look at names and shapes."""
    missing = [name for name in base if name not in state]
    if missing:
        raise CheckpointError(
            f"{where} lacks {listed(missing)} of the base's vision tower; give a model of this variant."
        )
    for name, W in base.items():
        if state[name].shape != W.shape:
            raise CheckpointError(
                f"{where}: {name!r} is {tuple(state[name].shape)}, in the base {tuple(W.shape)}; give a model of this "
                "variant."
            )
    return {name: state[name] for name in base}


# --- data and heads --------------------------------------------------------------------------------------------------


def _tables(task: ClipTask, data: Path | None, *, progress: bool) -> dict[str, Table]:
    place = _locate(task.data, data)
    return {split: open_data(place, split=split, subset=_subset(task, place), progress=progress) for split in SPLITS}


def _subset(task: ClipTask, place: str) -> str | None:
    """Return the subset to read; a local folder need not have its name in it."""
    return task.subset if place == task.data or (Path(place) / str(task.subset)).is_dir() else None


def _source(split: str) -> str:
    """Return which split of the data one of the suite's is taken from."""
    return "test" if split == "test" else "train"


def _own_names(task: ClipTask, data: Path | None, tables: Mapping[str, Table]) -> list[str] | None:
    """Return the data's own names of the labels, of its files or of its card."""
    found, tested = (label_names(tables[split]) for split in SPLITS)
    folders = tables["test"].classes is not None  # of which a small test split may lack some
    if tested is not None and (found is None or (not set(tested) <= set(found) if folders else tested != found)):
        raise DataError(
            f"{task.data} names its classes in test ({listed(tested)}) not as in train ({listed(found or ())}); give "
            "one dataset for both."
        )
    place = _locate(task.data, data)
    if found is not None or place != task.data:
        return found if found is not None else card_names(Path(place) / "README.md")
    try:
        folder, _ = fetch_repo(place, "dataset", lambda files: ["README.md"], DataError, progress=False)
    except DataError:  # out of reach, and not in the cache
        return None
    return card_names(folder / "README.md")


def _heads(clip: Any, tokenizer: Any, names: Mapping[str, list[str]], *, progress: bool) -> dict[str, Tensor]:
    """Encode every class of every task."""
    heads = {}
    with Progress(progress, unit="sentences") as bar:
        stage = bar.begin("heads", sum(len(task.classes) * len(task.templates) for task in TASKS))
        for task in TASKS:
            report = partial(stage.advance, item=task.title)
            heads[task.name] = zero_shot_head(clip, tokenizer, names[task.name], task.templates, report)
    return heads
