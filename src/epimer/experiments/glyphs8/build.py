"""glyphs8: eight image tasks and their models, built once in about two minutes, then kept in the user's cache folder.

See docs/glyphs8.md for the choices behind it and for its results.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from epimer.atomic_files import draft_path, empty_folder, explain_os_errors, held
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import as_json, save_tensors
from epimer.errors import DataError, EpimerError
from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.experiments.glyphs8.tasks import SPLITS, TASKS, GlyphTask, LabeledImages, draw_pool
from epimer.experiments.glyphs8.train import Settings, State, few_shot_head, fine_tune, pretrain, to_float
from epimer.experiments.glyphs8.vit import FrozenHead, Shape, Vit
from epimer.progress import Progress

NAME = "glyphs8"
PACKAGES = ("matplotlib", "pillow", "scikit-learn")
"""packages that the images are drawn with"""
CODE = ("render.py", "tasks.py", "train.py", "vit.py")
"""files that determine the suite"""
FORMAT = 1  # of the suite's folder; another one builds every suite again
METADATA = "suite.json"

Images = dict[tuple[str, str], LabeledImages]
"""by task and split"""


def load(
    folder: Path | None = None, *, seed: int = 0, progress: bool = True, settings: Settings | None = None
) -> Suite:
    """Return the suite; it is built first where `folder` does not have it yet, in a folder named by its `fingerprint`.

    By default `folder` is the user's cache: EPIMER_CACHE, else XDG_CACHE_HOME/epimer, else ~/.cache/epimer.
    """
    settings = replace(settings or Settings(), seed=seed)
    place = Path(os.path.abspath(folder or cache_folder())) / f"{NAME}-{fingerprint(settings)}"
    if not (place / METADATA).is_file():
        with _locked_draft(place) as draft:
            if not (place / METADATA).is_file():  # another process may have built it while this one waited
                _build(settings, draft, progress)
                draft.rename(place)
    try:
        return _open(settings, place)
    except (EpimerError, KeyError) as error:
        raise DataError(f"the suite {NAME} is damaged: {error} Delete {place}, and it is built again.") from error


def cache_folder() -> Path:
    """Return the folder for files that epimer can build again."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("EPIMER_CACHE") or os.path.join(shared, "epimer")).expanduser()


def fingerprint(settings: Settings) -> str:
    """Return a hash of everything that determines the suite: settings, code, versions of packages."""
    code = b"".join((Path(__file__).parent / file).read_bytes() for file in CODE)
    digest = hashlib.sha256(code).hexdigest()
    parts = {"settings": asdict(settings), "code": digest, "packages": versions(), "format": FORMAT}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions of the packages that the images are drawn with."""
    try:
        return {package: version(package) for package in PACKAGES}
    except PackageNotFoundError as error:
        raise DataError(f"the suite {NAME} needs {error.name}; install it: pip install 'epimer[suites]'") from error


@contextmanager
def _locked_draft(place: Path) -> Iterator[Path]:
    """Wait until no other process builds this suite, then yield an empty folder next to its place to build it in."""
    draft = draft_path(place)
    with explain_os_errors(place, "written"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with held(draft, place, folder=True, wait=True):
            try:
                empty_folder(draft)  # of what a killed process left
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def _build(settings: Settings, folder: Path, progress: bool) -> None:
    """Draw the data, train the models, write them as ordinary model folders, and their accuracies as metadata."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[stage] = round(time.perf_counter() - began, 2)

    with Progress(progress, unit="images") as bar:
        with timed("data"):
            data, pool = _draw(settings, bar), draw_pool(settings.pool)
        with timed("pretrain"):
            stage = bar.begin("pre-training", settings.pretrain_steps * settings.batch)
            base, pool_accuracy = pretrain(settings, pool, stage)
        with timed("heads"):
            heads = {
                task.name: few_shot_head(settings, base, data[task.name, "train"], len(task.classes)) for task in TASKS
            }
        with timed("fine-tune"):
            stage = bar.begin("fine-tuning", len(TASKS) * settings.epochs * settings.train)
            models = {
                name: fine_tune(settings, base, head, data[name, "train"], name, stage) for name, head in heads.items()
            }
    _write(settings, folder, base, models, heads, data)
    with timed("evaluate"):
        suite = _open(settings, folder)
        tasks = {}
        for task, model in zip(suite.tasks, suite.models, strict=True):
            accuracy = {"probe": _accuracies(suite, suite.base, task), "fine-tuned": _accuracies(suite, model, task)}
            tasks[task.name] = {"classes": task.classes, "accuracy": accuracy}
    metadata = {
        "name": NAME,
        "settings": asdict(settings),
        "versions": {**versions(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "tasks": tasks,
        "pool accuracy": pool_accuracy,
        "seconds": seconds,
    }
    (folder / METADATA).write_bytes(as_json(metadata))


def _draw(settings: Settings, bar: Progress) -> Images:
    """Draw all splits of all tasks."""
    stage = bar.begin("drawing", len(TASKS) * sum(map(settings.size, SPLITS)))
    data: Images = {}
    for task, split in itertools.product(TASKS, SPLITS):
        data[task.name, split] = task.samples(split, settings.size(split), settings.seed)
        stage.advance(settings.size(split), task.name)
    return data


def _accuracies(suite: Suite, state: Mapping[str, Tensor], task: SuiteTask) -> dict[str, float]:
    return {split: float(suite.scores_on(state, task, split).mean()) for split in ("val", "test")}


def _network(shape: Shape, state: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> nn.Module:
    template = _template(shape)
    shared = {id(W): W for W in template.parameters()}  # not copied, as the state's tensors replace them
    network = copy.deepcopy(template, shared)
    network.head = FrozenHead(head)
    network.load_state_dict(dict(state), assign=True)
    return network.eval()


@cache
def _template(shape: Shape) -> Vit:
    """Return a network with random weights, built once, as drawing them takes longer than using them."""
    return Vit(shape)


def _write(
    settings: Settings, folder: Path, base: State, models: dict[str, State], heads: dict[str, State], data: Images
) -> None:
    """Write the suite's models, heads and data."""
    (folder / "heads").mkdir()
    for name, state in {"base": base, **{f"models/{name}": state for name, state in models.items()}}.items():
        (folder / name).mkdir(parents=True)
        save_tensors(folder / name / "model.safetensors", state)
        config = {"model_type": "epimer_glyphs_vit", "dtype": "float32", **asdict(settings.shape)}
        (folder / name / "config.json").write_bytes(as_json(config))
    for name, head in heads.items():
        save_tensors(folder / "heads" / f"{name}.safetensors", head)
    drawn = {f"{name}.{split}": images for (name, split), images in data.items()}
    tensors = {f"{key}.{part}": W for key, images in drawn.items() for part, W in zip("xy", images, strict=True)}
    save_tensors(folder / "data.safetensors", tensors)


def _open(settings: Settings, folder: Path) -> Suite:
    """Read a suite that was built."""
    data = _read(folder / "data.safetensors")

    def read_task(task: GlyphTask) -> SuiteTask:
        name = task.name
        splits = {split: Split(to_float(data[f"{name}.{split}.x"]), data[f"{name}.{split}.y"]) for split in SPLITS}
        return SuiteTask(name, task.classes, splits, _read(folder / "heads" / f"{name}.safetensors"))

    return Suite(
        name=NAME,
        base=_read(folder / "base"),
        models=[_read(folder / "models" / task.name) for task in TASKS],
        tasks=[read_task(task) for task in TASKS],
        network=lambda state, task: _network(settings.shape, state, task.head),
        folder=folder,
        untrained="few-shot probe",
    )


def _read(path: Path) -> State:
    """Read all tensors of a file or folder."""
    checkpoint = open_checkpoint(str(path))
    return {name: checkpoint.read(name) for name in checkpoint.headers}
