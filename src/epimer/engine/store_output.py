"""Merge into an object store or the hub: the folder is made on this disk, then uploaded; its record appears last.

The hub takes a folder in one commit. An object store has no renaming of folders: files are uploaded next to their place
and then copied within the store, the config and the record last, so that a folder with epimer.json is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from epimer.atomic_files import output_path
from epimer.checkpoints.folder import LARGEST
from epimer.checkpoints.hub_upload import check_upload, upload_folder
from epimer.checkpoints.object_store import all_files, explain_store_errors, filesystem, is_store
from epimer.engine.adapter_output import write_adapter
from epimer.engine.options import RunOptions
from epimer.engine.output import RECORD, write_merge
from epimer.errors import DataError, OutputError, listed
from epimer.plan.jobs import Plan
from epimer.records import MergeRecord

LAST = ("config.json", RECORD)
HUB = "hf://"


def write_output(
    plan: Plan, out: str | os.PathLike[str], run: RunOptions, *, overwrite: bool, **options: Any
) -> MergeRecord:
    """Carry out a plan into a folder here or, where `out` is an address, in an object store; options of write_merge."""
    if str(out).startswith(HUB):
        return merge_into_hub(plan, str(out), run, **options)
    if is_store(str(out)):
        return merge_into_store(plan, str(out), run, overwrite=overwrite, **options)
    return write_folder(plan, output_path(out), run, overwrite=overwrite, **options)


def write_folder(
    plan: Plan, out: Path, run: RunOptions, *, overwrite: bool, hash_inputs: bool = False, **options: Any
) -> MergeRecord:
    """Carry out a plan into a folder: of a model, or of an adapter where the recipe says so."""
    if plan.recipe is not None and plan.recipe.output == "lora":
        return write_adapter(plan, out, run, overwrite=overwrite, hash_inputs=hash_inputs)
    return write_merge(plan, out, run, overwrite=overwrite, hash_inputs=hash_inputs, **options)


def merge_into_store(plan: Plan, url: str, run: RunOptions, *, overwrite: bool = False, **options: Any) -> MergeRecord:
    """Carry out a plan into a folder of an object store, or find that it has been carried out.

    The folder is made in the current folder first, and removed once it is uploaded; a killed run is taken up.
    """
    url = url.rstrip("/")
    fs, path = filesystem(url, OutputError)
    plan.check()
    with explain_store_errors(url, "written", OutputError):
        old = _recorded(fs, path)
        if old is not None and old.request == plan.request and _complete(fs, path, old):
            return old
        stopped = _recorded(fs, beside(path))
        ours = stopped is not None and stopped.request == plan.request  # files of an upload that was stopped
        check_store(fs, path, url, old or stopped, overwrite=overwrite or ours)
        if not ours and all_files(fs, beside(path)):
            fs.rm(beside(path), recursive=True)
    staged = staging_folder(url)
    record = write_folder(plan, staged, run, overwrite=True, **options)  # what is staged is ours
    with explain_store_errors(url, "written", OutputError):
        check_store(fs, path, url, old or stopped, overwrite=overwrite or ours)
        upload(fs, staged, path)
    shutil.rmtree(staged)
    return record


def merge_into_hub(plan: Plan, url: str, run: RunOptions, **options: Any) -> MergeRecord:
    """Carry out a plan into the current folder, and upload that to a repository of the hub in one commit.

    The repository is made where there is none; what it held before stays in its history.
    """
    url = url.rstrip("/")
    repo, staged = url.removeprefix(HUB), staging_folder(url)
    plan.check()
    check_upload(repo)
    record = write_folder(plan, staged, run, overwrite=True, **options)  # what is staged is ours
    upload_folder(staged, repo, progress=run.progress)
    shutil.rmtree(staged)
    return record


def staging_folder(url: str) -> Path:
    """Return the folder in the current one that is made before it is uploaded to an address."""
    digest = hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    return Path.cwd() / f".{url.rpartition('/')[2]}-{digest}.epimer-upload"


def upload(fs: Any, folder: Path, path: str) -> None:
    """Upload a model folder under another name, then move its files to their places, the record last."""
    paths = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = sorted(paths, key=lambda name: (name in LAST, name == RECORD, name))
    fs.makedirs(beside(path), exist_ok=True)
    for name in files:
        fs.makedirs(f"{beside(path)}/{name}".rpartition("/")[0], exist_ok=True)
        fs.put_file(str(folder / name), f"{beside(path)}/{name}")
    there = sorted(all_files(fs, path), key=lambda name: name != RECORD)
    for name in there:  # the record of what is replaced goes first: from now on the folder is not complete
        fs.rm_file(f"{path}/{name}")
    fs.makedirs(path, exist_ok=True)
    for name in files:
        fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.mv(f"{beside(path)}/{name}", f"{path}/{name}")
    if fs.exists(beside(path)):
        fs.rm(beside(path), recursive=True)
    fs.invalidate_cache()


def beside(path: str) -> str:
    """Return where the files of a folder are uploaded before they are moved there."""
    return f"{path}.epimer-upload"


def check_store(fs: Any, path: str, url: str, record: MergeRecord | None, *, overwrite: bool) -> None:
    """Refuse to write over what is there, unless it was asked for and is ours; refuse a bucket that is not there."""
    bucket, _, rest = path.partition("/")
    if rest and not fs.exists(bucket) and fs.protocol not in ("memory", ("memory",)):
        raise OutputError(f"{url} cannot be written: there is no bucket {bucket!r}; make it first.")
    there = set(all_files(fs, path))
    if not there:
        return
    if not overwrite:
        raise OutputError(f"{url} holds something else, or another version's; choose another name, or --overwrite.")
    if record is None or (foreign := sorted(there - {*record.files, RECORD, "README.md"})):
        held = "was not made by epimer" if record is None else f"also holds {listed(foreign)}"
        raise OutputError(f"{url} {held}, so it is not replaced; remove it yourself first.")


def _recorded(fs: Any, path: str) -> MergeRecord | None:
    """Return the record in a folder of a store, if epimer made it."""
    try:
        data = fs.cat_file(f"{path}/{RECORD}", start=0, end=LARGEST)  # of a longer one a part, which is no record
        return MergeRecord.from_json(data, f"{path}/{RECORD}")
    except (FileNotFoundError, DataError):
        return None


def _complete(fs: Any, path: str, record: MergeRecord) -> bool:
    return record.files.items() <= all_files(fs, path).items()
