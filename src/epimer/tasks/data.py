"""Open data sets: a file, a folder of images, a folder in the hub's layout, or a data set on the hub."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path, PurePosixPath
from random import Random

from epimer.errors import DataError, listed, nearest
from epimer.opened_files import lies_in
from epimer.tasks.tables import READERS, Images, Joined, Table, files_under

IMAGES = (".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "package.json")
NOT_DATA_TEXT = re.compile(r"(readme|licen[cs]e|notice|requirements|classes|labels|copying)\b.*\.txt", re.IGNORECASE)
SPLITS = {  # word in a file's or folder's name -> the split it stands for
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SHARD = re.compile(r"-([0-9]{1,9})-of-([0-9]{1,9})(?:-[0-9a-f]{16})?$")


def open_data(text: str, *, split: str | None = None, subset: str | None = None, progress: bool = False) -> Table:
    """Open a data set by path or by hub id (`org/name[@revision]`)."""
    if not text.strip():
        raise DataError("the name of the data is empty; give a path or a hub dataset (org/name@revision).")
    if "\0" in text:
        raise DataError(f"{text} is no name that a file can have; give a path or a hub dataset (org/name@revision).")
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        table = _open_folder(path, split, subset) if path.is_dir() else _open_file(path, split, subset)
    else:
        table = _open_hub(text, split, subset, progress=progress)
    if not len(table):
        raise DataError(f"{table.name} holds no rows; give data with at least one.")
    return table


def choose(count: int, *, samples: int | None, fraction: float | None, seed: int, least: int = 1) -> list[int]:
    """Return the rows to use: of `count` shuffled rows the first `samples`, or a fraction of all, `least` at least."""
    if samples is not None and fraction is not None:
        raise DataError("'samples' and 'fraction' both say how many rows to use; give one of them.")
    if samples is not None and samples < 1:
        raise DataError(f"'samples' must be at least 1. Got {samples} instead.")
    if fraction is not None and not 0 < fraction <= 1:
        raise DataError(f"'fraction' must be above 0 and at most 1. Got {fraction} instead.")
    rows = list(range(count))
    Random(seed).shuffle(rows)
    if fraction is not None:  # exact in decimals: 0.07 of 100 rows are 7, while 0.07 * 100 > 7 in floats
        samples = max(least, math.ceil(Fraction(str(fraction)) * count))
    return rows[:samples]


def _open_file(path: Path, split: str | None, subset: str | None) -> Table:
    if path.suffix.lower() not in READERS or not path.is_file():
        expected = f"expected {', '.join(READERS)}, or a folder of images"
        raise DataError(f"{path.name} is not data that can be read: {expected}.")
    for option, value in (("--split", split), ("--subset", subset)):
        if value is not None:
            raise DataError(f"{path.name} is one file, of which {option} {value} cannot be chosen; leave it out.")
    table = READERS[path.suffix.lower()](path)
    table.roots = (path.resolve().parent,)  # where the file lies that the user named by a link
    return table


def _open_folder(folder: Path, split: str | None, subset: str | None) -> Table:
    """Open a folder: parquet files if it holds any, else images in two or more folders, else other data files."""
    name = folder.resolve().name
    files = [file for file in files_under(folder) if _is_data(file)]
    if not any(file.endswith(".parquet") for file in files) and subset is None:
        images = _open_images(folder, name, split)
        if images is not None and (not files or len(images.classes or ()) > 1):
            return images
    if not files:
        expected = f"expected images in one folder per class, or files that end in {', '.join(READERS)}"
        raise DataError(f"{name} holds no data: {expected}.")
    return _join(folder, pick(files, name, split, subset), name)


def _open_images(folder: Path, name: str, split: str | None) -> Images | None:
    """Open the images in a folder's class folders, or in those of its split's folder; None if there are none."""
    below = sorted(child.name for child in os.scandir(folder) if child.is_dir() and not child.name.startswith("."))
    splits = [child for child in below if child == split or (child.lower() in SPLITS and _classes(folder / child))]
    if split is not None and not splits:
        if _classes(folder):
            raise DataError(f"{name} holds folders of images for no splits, so there is no {split!r}; leave it out.")
        return None
    if splits:
        chosen = _choose_split(splits, split, name)
        folder, name = folder / chosen, f"{name}/{chosen}"
    classes = _classes(folder)
    return Images(folder, name, classes) if classes else None


def _classes(folder: Path) -> dict[str, list[str]]:
    """Return class folder -> its images, for every folder in a folder that holds any."""
    classes: dict[str, list[str]] = {}
    for file in files_under(folder):
        label, _, rest = file.partition("/")
        if rest and file.lower().endswith(IMAGES):
            classes.setdefault(label, []).append(file)
    return classes


def _join(folder: Path, files: Sequence[str], name: str) -> Table:
    """Open files as one table."""
    for file in files:
        if not lies_in(folder / file, folder) or not (folder / file).is_file():
            raise DataError(f"{name}/{file} is no regular file in its folder; put the file itself there.")
    parts = [READERS[PurePosixPath(file).suffix.lower()](folder / file) for file in files]
    table = parts[0] if len(parts) == 1 else Joined(name, parts)
    for part in (*parts, table):
        part.roots = (folder,)
    table.name = name
    return table


def pick(files: Iterable[str], name: str, split: str | None, subset: str | None) -> list[str]:
    """Return the files of one split of one subset, from the names of a data set's files."""
    suffixes = {PurePosixPath(file).suffix.lower() for file in files}
    kind = min(suffixes, key=list(READERS).index)
    subsets: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        if file.lower().endswith(kind):
            subsets.setdefault(_subset(file), {}).setdefault(_split(file), []).append(file)
    if subset is None and len(subsets) > 1:
        raise DataError(f"{name} has {len(subsets)} subsets: {listed(subsets, 24)}; choose one with --subset.")
    if subset is not None and subset not in subsets:
        raise DataError(f"{name} has no subset {subset!r}; it has {listed(subsets, 24)}.{nearest(subset, subsets)}")
    splits = subsets[subset] if subset is not None else next(iter(subsets.values()))
    chosen = splits[_choose_split(list(splits), split, name)]
    _check_complete(chosen, name)
    return chosen


def _choose_split(splits: Sequence[str], requested: str | None, name: str) -> str:
    """Return the split that fits the requested name best; without one the training split, or the only split."""
    if requested is None and len(splits) == 1:
        return splits[0]
    wanted = requested or "train"
    meaning = SPLITS.get(wanted.lower(), wanted)
    words = (wanted, *(word for word in SPLITS if SPLITS[word] == meaning))
    for fitting in (
        [split for split in splits if split == wanted],
        [split for split in splits if SPLITS.get(split.lower(), split) == meaning],
        [split for split in splits if any(_has_word(split, word) for word in words)],
    ):
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise DataError(f"{name} has several splits for {wanted!r}: {listed(fitting, 12)}; choose with --split.")
    if requested is None:
        raise DataError(f"{name} has splits {listed(splits, 12)} and none to train on; choose one with --split.")
    raise DataError(f"{name} has no split {requested!r}; it has {listed(splits, 12)}.{nearest(requested, splits)}")


def _is_data(file: str) -> bool:
    """Whether a file may hold rows: it has a known suffix and is not a description of the data set."""
    name = PurePosixPath(file).name.lower()
    return name.endswith(tuple(READERS)) and name not in NOT_DATA and not NOT_DATA_TEXT.fullmatch(name)


def _folders(file: str) -> list[str]:
    return [part for part in PurePosixPath(file).parts[:-1] if part != "data"]


def _subset(file: str) -> str:
    """Return the subset of a file: the first of its folders that is no split, or `default`."""
    return next((part for part in _folders(file) if part.lower() not in SPLITS), "default")


def _split(file: str) -> str:
    """Return the split of a file: its folder, where that is the word for one, or its name without a number."""
    if named := [part for part in _folders(file) if part.lower() in SPLITS]:
        return named[-1]
    return re.sub(r"[-_.]?\d+$", "", SHARD.sub("", PurePosixPath(file).stem)) or "train"


def _has_word(name: str, word: str) -> bool:
    """Whether a name contains a word that no letter or digit adjoins."""
    return re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", name, re.IGNORECASE) is not None


def _check_complete(files: Sequence[str], name: str) -> None:
    """Refuse a split with missing shards; `train-00000-of-00002` says how many there are."""
    counts = {int(shard[2]) for file in files if (shard := SHARD.search(PurePosixPath(file).stem))}
    if counts and counts != {len(files)}:
        present = f"{len(files)} of the {max(counts)} files that {files[0]} says there are"
        raise DataError(f"{name} has {present}; download the rest.")


def _open_hub(text: str, split: str | None, subset: str | None, *, progress: bool) -> Table:
    from epimer.checkpoints.hub import fetch_repo, is_hub_id  # imports torch, which local files do not need

    if text.lower().endswith(tuple(READERS)) or not is_hub_id(text):
        remedy = f"give a file ({', '.join(READERS)}), a folder or a hub dataset (org/name@revision)"
        raise DataError(f"{text} does not exist; {remedy}.")

    def needed(files: Iterable[str]) -> list[str]:
        data = [file for file in files if _is_data(file)]
        if not data:
            raise DataError(f"{text} holds no data files that can be read: expected {', '.join(READERS)}.")
        return pick(data, text, split, subset)

    folder, name = fetch_repo(text, "dataset", needed, DataError, progress=progress)
    return _join(folder, needed(files_under(folder)), name)
