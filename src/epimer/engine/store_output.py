"""Merge into an object store or the hub: the folder is made on this disk, then uploaded; its record appears last.

The hub takes a folder in one commit. An object store has no renaming of folders: files are uploaded next to their place
and then copied within the store, the config and the record last, so that a folder with epimer.json is complete.

Nor has a store locks. A run claims an address before it changes anything there: it writes a file under a name of its
own, then lists all such files, and gives way if there is another. As stores list whatever was written before, of two
runs at least one sees the other.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from epimer.atomic_files import explain_os_errors, held, output_path
from epimer.checkpoints.folder import LARGEST
from epimer.checkpoints.hub_upload import check_upload, upload_folder
from epimer.checkpoints.object_store import all_files, explain_store_errors, filesystem, is_store
from epimer.engine.adapter_output import write_adapter
from epimer.engine.options import RunOptions
from epimer.engine.output import RECORD, write_merge
from epimer.engine.output_files import OutputFiles, check_files
from epimer.errors import DataError, OutputError, listed
from epimer.plan.jobs import Plan
from epimer.records import MergeRecord, Outcome

LAST = ("config.json", RECORD)
CLAIM = "claim"
UPLOAD_NAME = re.compile("[0-9a-f]{32}")
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
    url, plan = url.rstrip("/"), without_places(plan)
    fs, path = filesystem(url, OutputError)
    plan.check()
    staged = staging_folder(url)
    with _upload_name(staged) as name:
        with explain_store_errors(url, "written", OutputError):
            done = _finished(fs, path, url, name, plan, overwrite=overwrite)
        if done is None:
            done = write_folder(plan, staged, run, overwrite=True, **options)  # what is staged is ours
            with explain_store_errors(url, "written", OutputError):
                claim(fs, path, url, name)
                if _finished(fs, path, url, name, plan, overwrite=overwrite) is None:
                    upload(fs, staged, path, url, name, done)
        with explain_store_errors(url, "written", OutputError):
            release(fs, path, name)
        if staged.exists():
            shutil.rmtree(staged)
    return done


def _finished(fs: Any, path: str, url: str, name: str, plan: Plan, *, overwrite: bool) -> MergeRecord | None:
    """Return the record of what the plan would make and is there; refuse to replace anything else that is not ours."""
    old = _recorded(fs, path)
    if old is not None and old.request == plan.request and _complete(fs, path, old):
        return old
    stopped = _recorded(fs, f"{beside(path)}/{name}")
    ours = stopped is not None and stopped.request == plan.request  # files of an upload that was stopped
    check_store(fs, path, url, name, old or stopped, overwrite=overwrite or ours)
    return None


def merge_into_hub(plan: Plan, url: str, run: RunOptions, **options: Any) -> MergeRecord:
    """Carry out a plan into the current folder, and upload that to a repository of the hub in one commit.

    The repository is made where there is none; what it held before stays in its history.
    """
    url, plan = url.rstrip("/"), without_places(plan)
    repo, staged = url.removeprefix(HUB), staging_folder(url)
    plan.check()
    check_upload(repo)
    with _upload_name(staged):
        record = write_folder(plan, staged, run, overwrite=True, **options)  # what is staged is ours
        upload_folder(staged, repo, progress=run.progress)
        shutil.rmtree(staged)
    return record


def without_places(plan: Plan) -> Plan:
    """Return a plan whose record does not say where inputs lie: the folder is made here and used elsewhere."""
    return replace(plan, participants=replace(plan.participants, places={}))


def staging_folder(url: str) -> Path:
    """Return the folder in the current one that is made before it is uploaded to an address."""
    digest = hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    return Path.cwd() / f".{url.rpartition('/')[2]}-{digest}.epimer-upload"


@contextmanager
def _upload_name(staged: Path) -> Iterator[str]:
    """Yield the name of the upload of a staged folder, which the next run here takes up; one run at a time."""
    file = staged.with_name(f"{staged.name}.lock")
    with explain_os_errors(file, "written"), held(file, staged, "merge") as handle:
        name = os.pread(handle, 64, 0).decode(errors="replace")
        if not UPLOAD_NAME.fullmatch(name):
            name = uuid4().hex
            os.ftruncate(handle, 0)
            os.pwrite(handle, name.encode(), 0)
        try:
            yield name
        finally:
            if not staged.exists():  # otherwise it is still to be uploaded
                file.unlink()


def claim(fs: Any, path: str, url: str, name: str) -> None:
    """Keep other runs from writing to an address, or give way to one that writes there."""
    file = f"{beside(path)}/{name}/{CLAIM}"
    fs.makedirs(file.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(file, name.encode())
    try:
        _check_alone(fs, path, url, name)
    except OutputError:
        fs.rm_file(file)
        raise


def _check_alone(fs: Any, path: str, url: str, name: str) -> None:
    """Refuse to write to an address that another run has claimed."""
    if others := sorted({file.partition("/")[0] for file in all_files(fs, beside(path))} - {name}):
        raise OutputError(
            f"another run writes to {url}, or was stopped: {beside(url)}/{others[0]} is there; wait for it, repeat its "
            "command where it ran, or remove that."
        )


def release(fs: Any, path: str, name: str) -> None:
    """Remove what was uploaded and not moved, and with it the claim."""
    if all_files(fs, f"{beside(path)}/{name}"):
        fs.rm(f"{beside(path)}/{name}", recursive=True)
        with suppress(OSError):
            fs.rmdir(beside(path))  # in stores that have folders
    fs.invalidate_cache()


def upload(fs: Any, folder: Path, path: str, url: str, name: str, record: MergeRecord) -> None:
    """Upload a model folder under another name, then move its files to their places and compare them, the record last.

    Before the record appears, all files are read again in their places and compared with its checksums.
    """
    paths = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = sorted(paths, key=lambda name: (name in LAST, name == RECORD, name))
    staging = f"{beside(path)}/{name}"
    for file in files:
        fs.makedirs(f"{staging}/{file}".rpartition("/")[0], exist_ok=True)
        fs.put_file(str(folder / file), f"{staging}/{file}")
    there = sorted(all_files(fs, path), key=lambda name: name != RECORD)
    for file in there:  # the record of what is replaced goes first: from now on the folder is not complete
        fs.rm_file(f"{path}/{file}")
    fs.makedirs(path, exist_ok=True)
    for file in files:
        if file == RECORD:
            _check_uploaded(OutputFiles(url, fs, path), record)
        fs.makedirs(f"{path}/{file}".rpartition("/")[0], exist_ok=True)
        fs.mv(f"{staging}/{file}", f"{path}/{file}")


def _check_uploaded(folder: OutputFiles, record: MergeRecord) -> None:
    """Refuse to go on if the store does not return what was uploaded."""
    if wrong := [check for check in check_files(folder, record) if check.outcome != Outcome.OK]:
        raise OutputError(
            f"{folder.place} does not hold what was uploaded ({wrong[0].text}), and has no {RECORD}: another program "
            "writes there, or the store failed; run the command again."
        )


def beside(path: str) -> str:
    """Return where the files of a folder are uploaded before they are moved there."""
    return f"{path}.epimer-upload"


def check_store(fs: Any, path: str, url: str, name: str, record: MergeRecord | None, *, overwrite: bool) -> None:
    """Refuse to write beside another run, over what is there unless it was asked for and is ours, or into no bucket."""
    bucket, _, rest = path.partition("/")
    if rest and not fs.exists(bucket) and fs.protocol not in ("memory", ("memory",)):
        raise OutputError(f"{url} cannot be written: there is no bucket {bucket!r}; make it first.")
    _check_alone(fs, path, url, name)
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
