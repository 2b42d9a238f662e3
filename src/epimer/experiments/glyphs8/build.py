"""glyphs8: eight image tasks and their models, built once in about two minutes, then kept in the user's cache folder.

See docs/glyphs8.md for what was chosen, and why, and what it measures.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.writer import as_json, draft_of, explained, save_tensors
from epimer.errors import DataError, EpimerError
from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.experiments.glyphs8.tasks import SPLITS, TASKS, Drawn, Task, pool
from epimer.experiments.glyphs8.train import Settings, State, accuracy, few_shot_head, fine_tune, pixels, pretrain
from epimer.experiments.glyphs8.vit import FrozenHead, Shape, Vit
from epimer.progress import Progress

NAME = "glyphs8"
SOURCES = ("matplotlib", "pillow", "scikit-learn")
"""packages that the pictures come from"""
MAKERS = ("render.py", "tasks.py", "train.py", "vit.py")
"""code that decides what a suite holds"""
FORM = 1  # of the suite's folder; another one makes every suite anew
ABOUT = "suite.json"


def load(
    folder: Path | None = None, *, seed: int = 0, progress: bool = True, settings: Settings | None = None
) -> Suite:
    """Return the suite; it is built first where `folder` does not have it yet.

    Args:
        folder: where suites are kept; the user's cache folder by default (EPIMER_CACHE, else XDG_CACHE_HOME/epimer,
            else ~/.cache/epimer). The suite's own folder in it is named by a fingerprint of all that decides it.
        seed: of everything that is random.
        progress: show bars on a terminal.
        settings: other sizes and rates than the suite's own.
    """
    settings = replace(settings or Settings(), seed=seed)
    place = Path(os.path.abspath(folder or cache_folder())) / f"{NAME}-{fingerprint(settings)}"
    if not (place / ABOUT).is_file():
        with _alone(place) as draft:
            if not (place / ABOUT).is_file():  # it may have been built while this process waited
                _build(settings, draft, progress)
                draft.rename(place)
    try:
        return _open(settings, place)
    except (EpimerError, KeyError) as error:
        raise DataError(f"the suite {NAME} is damaged: {error} Delete {place}, and it is built again.") from error


def cache_folder() -> Path:
    """Return where epimer keeps what it can make again."""
    given = os.environ.get("EPIMER_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or os.path.join(shared, "epimer")).expanduser()


def fingerprint(settings: Settings) -> str:
    """Return a name for all that decides the suite: settings, the code that makes it, the packages it draws with."""
    code = b"".join((Path(__file__).parent / file).read_bytes() for file in MAKERS)
    about = {
        "settings": asdict(settings),
        "code": hashlib.sha256(code).hexdigest(),
        "sources": versions(),
        "form": FORM,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions of the packages that the pictures come from."""
    try:
        return {package: version(package) for package in SOURCES}
    except PackageNotFoundError as error:
        raise DataError(f"the suite {NAME} needs {error.name}; install it: pip install 'epimer[suites]'") from error


@contextmanager
def _alone(place: Path) -> Iterator[Path]:
    """Wait until no other process builds this suite, then give an empty folder beside its place to build it in."""
    draft = draft_of(place)
    with explained(place, "written"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with draft.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(draft, ignore_errors=True)  # what a killed process left
            draft.mkdir()
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)


@dataclass
class _Clock:
    """Seconds that each stage took."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - began, 2)


def _build(settings: Settings, folder: Path, progress: bool) -> None:
    """Draw the data, make the models, write them as ordinary folders with a note of what was measured."""
    clock = _Clock()
    with Progress(progress, unit="images") as bar:
        with clock.time("data"):
            data = _draw(settings, bar)
            characters = pool(settings.pool)
        with clock.time("pretrain"):
            total = settings.pretrain_steps * settings.batch
            base, pool_score = pretrain(settings, characters, bar.begin("pre-training", total))
        with clock.time("heads"):
            heads = {
                task.name: few_shot_head(settings, base, data[task.name]["train"], len(task.classes)) for task in TASKS
            }
        with clock.time("fine-tune"):
            stage = bar.begin("fine-tuning", len(TASKS) * settings.epochs * settings.train)
            models = {
                name: fine_tune(settings, base, head, data[name]["train"], name, stage) for name, head in heads.items()
            }
        with clock.time("evaluate"):
            scores = {
                name: {
                    "probe": _scores(settings, base, heads[name], data[name]),
                    "fine-tuned": _scores(settings, models[name], heads[name], data[name]),
                }
                for name in heads
            }
    _write(settings, folder, base, models, heads, data)
    about = {
        "name": NAME,
        "settings": asdict(settings),
        "versions": {**versions(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "tasks": {task.name: {"classes": task.classes, "accuracy": scores[task.name]} for task in TASKS},
        "pool accuracy": pool_score,
        "seconds": clock.seconds,
    }
    (folder / ABOUT).write_bytes(as_json(about))


def _draw(settings: Settings, bar: Progress) -> dict[str, dict[str, Drawn]]:
    """Draw all splits of all tasks."""
    stage = bar.begin("drawing", len(TASKS) * sum(map(settings.size, SPLITS)))
    data: dict[str, dict[str, Drawn]] = {}
    for task in TASKS:
        data[task.name] = {}
        for split in SPLITS:
            data[task.name][split] = task.samples(split, settings.size(split), settings.seed)
            stage.advance(settings.size(split), task.name)
    return data


def _scores(settings: Settings, state: State, head: State, data: Mapping[str, Drawn]) -> dict[str, float]:
    network = _network(settings.shape, state, head)
    return {split: accuracy(network, Split(pixels(data[split][0]), data[split][1])) for split in ("val", "test")}


def _network(shape: Shape, state: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> nn.Module:
    template = _template(shape)
    shared = {id(W): W for W in template.parameters()}  # not copied: the state's own tensors take their place
    network = copy.deepcopy(template, shared)
    network.head = FrozenHead(head)
    network.load_state_dict(dict(state), assign=True)
    return network.eval()


@cache
def _template(shape: Shape) -> Vit:
    """Return a network whose weights were drawn once; drawing them takes longer than using them."""
    return Vit(shape)


def _write(
    settings: Settings, folder: Path, base: State, models: Mapping[str, State], heads: Mapping[str, State],
    data: Mapping[str, Mapping[str, Drawn]],
) -> None:  # fmt: skip
    """Write the suite's files."""
    (folder / "heads").mkdir()
    for name, state in {"base": base, **{f"models/{name}": state for name, state in models.items()}}.items():
        (folder / name).mkdir(parents=True)
        save_tensors(folder / name / "model.safetensors", state)
        config = {"model_type": "epimer_glyphs_vit", "dtype": "float32", **asdict(settings.shape)}
        (folder / name / "config.json").write_bytes(as_json(config))
    for name, head in heads.items():
        save_tensors(folder / "heads" / f"{name}.safetensors", head)
    flat = {f"{name}.{split}": drawn for name, splits in data.items() for split, drawn in splits.items()}
    tensors = {f"{key}.{part}": W for key, drawn in flat.items() for part, W in zip("xy", drawn, strict=True)}
    save_tensors(folder / "data.safetensors", tensors)


def _open(settings: Settings, folder: Path) -> Suite:
    """Read a suite that was built."""
    data = _read(folder / "data.safetensors")

    def task(given: Task) -> SuiteTask:
        splits = {
            split: Split(pixels(data[f"{given.name}.{split}.x"]), data[f"{given.name}.{split}.y"]) for split in SPLITS
        }
        return SuiteTask(given.name, given.classes, splits, _read(folder / "heads" / f"{given.name}.safetensors"))

    def network(state: Mapping[str, Tensor], task: SuiteTask) -> nn.Module:
        return _network(settings.shape, state, task.head)

    return Suite(
        name=NAME,
        base=_read(folder / "base"),
        models=[_read(folder / "models" / given.name) for given in TASKS],
        tasks=[task(given) for given in TASKS],
        network=network,
        folder=folder,
        untrained="few-shot probe",
    )


def _read(path: Path) -> State:
    """Read all tensors of a file or folder."""
    checkpoint = open_checkpoint(str(path))
    return {name: checkpoint.read(name) for name in checkpoint.headers}
