"""Files and folders that appear complete or not at all, whatever happens to the process that writes them.

A file `out` is written as `.out.epimer` beside it and then renamed, a folder as `.out.epimer-draft`. The process that
writes a draft holds a lock on it, which ends with the process: what a killed run left is taken over by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from epimer.errors import OutputError
from epimer.plain_text import format_size

NOT_REGULAR = "it is not a regular file; name another"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""how a file system says that it has no locks; two runs at once are then the user's to avoid"""
FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota of the disk is used up",
}
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
REMEDIES = {
    errno.EMFILE: "more files would be open than this process may have; raise the limit (ulimit -n), or write fewer "
    "files (--max-shard-size)",
    errno.ENFILE: "more files are open than the system allows; close other programs",
    errno.EFBIG: "it would be larger than a file may be here; raise the limit (ulimit -f), or choose another disk",
    errno.EIO: "the disk failed (Input/output error); look at it, or choose another place",
}


def draft_path(out: Path) -> Path:
    """Return where an output is kept until it is complete."""
    return out.parent / f".{out.name}.epimer"


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    if path is None:
        return
    path = path.expanduser()
    if path.is_dir():
        why = "it is a folder; name a file"
    elif path.exists() and not path.is_file():
        why = NOT_REGULAR
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}; make it first"
    else:
        return
    raise OutputError(f"{path} cannot be written: {why}.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that could not be made or written into, before any work is done for it."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise OutputError(f"{folder} cannot be written: {there} is no folder; choose another place.")
    if not os.access(there, os.W_OK):
        raise OutputError(f"{folder} cannot be written: {there} may not be changed; choose another place.")


def output_path(out: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an output; a name that no file can have is refused."""
    if not os.fspath(out):
        raise OutputError("the name of the output is empty; give the file or folder to make.")
    try:
        if b"\0" in os.fsencode(out):
            raise ValueError
    except ValueError as error:
        raise OutputError(f"{os.fspath(out)!r} is no name that a file can have; choose another.") from error
    return Path(os.path.abspath(os.path.expanduser(out)))


@contextmanager
def atomic_file(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a file to write, which is moved to its name when the block ends well and `check` does not object."""
    draft = draft_path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OutputError(f"{path} cannot be written: {NOT_REGULAR}.")
    with explain_os_errors(path, "written"), held(draft, path) as handle:
        try:
            yield draft
            os.fsync(handle)
            check()
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def check_new(out: Path, marker: str, *, overwrite: bool) -> None:
    """Refuse to write where something else is; a folder that holds `marker` may be replaced if `overwrite` says so."""
    out = Path(os.path.expanduser(out))
    recover_folder(out)
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / marker).is_file():
        raise OutputError(f"{out} exists and is not a folder with {marker}; choose another name.")
    if not overwrite:
        raise OutputError(f"{out} exists; choose another name, or pass --overwrite to replace it.")


@contextmanager
def atomic_folder(out: Path, marker: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to fill with files, which is moved to its name when the block ends well.

    Only a folder that holds `marker`, so one of the same kind, is replaced, and only with `overwrite`.
    """
    out = output_path(out)
    draft, old, gone = _beside(out)
    with explain_os_errors(out, "written"):
        check_new(out, marker, overwrite=overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(draft, out):
            try:
                keep_old_or_new(out, old, gone)
                empty_folder(draft)  # of what a killed run left
                yield draft
                for path in (*draft.iterdir(), draft):
                    sync(path)
                check_new(out, marker, overwrite=overwrite)
                if out.exists():
                    out.rename(old)
                draft.rename(out)
                sync(out.parent)
            except BaseException:
                remove_folder(draft)
                raise
            finally:
                keep_old_or_new(out, old, gone)


def recover_folder(out: Path) -> None:
    """Finish the replacement of a folder by a run that was killed, unless another run is at work."""
    draft, old, gone = _beside(Path(os.path.abspath(out)))
    if old.exists() or gone.exists() or lock_path(draft).exists():
        with suppress(OSError, OutputError), held_folder(draft, out):
            keep_old_or_new(out, old, gone)
            remove_folder(draft)


def _beside(out: Path) -> tuple[Path, Path, Path]:
    """Return where a folder is made, where the one that it replaces is moved to, and where that is removed."""
    return tuple(out.parent / f".{out.name}.epimer-{name}" for name in ("draft", "old", "gone"))  # type: ignore[return-value]


def keep_old_or_new(out: Path, old: Path, gone: Path) -> None:
    """Move the old folder back if the new one did not appear; otherwise remove it, at `gone`. Ctrl-C waits for it."""
    try:
        _keep_old_or_new(out, old, gone)
    except KeyboardInterrupt:
        _keep_old_or_new(out, old, gone)
        raise


def _keep_old_or_new(out: Path, old: Path, gone: Path) -> None:
    remove_folder(gone)
    if old.is_symlink():  # folders are moved here, never links
        old.unlink()
    if old.exists() and not os.path.lexists(out):
        old.rename(out)
    elif old.exists():
        with suppress(OSError):  # the new one is there; what cannot be removed is left to the next run
            old.rename(gone)  # so that half of it is never taken for the old folder
        remove_folder(gone)


def empty_folder(folder: Path) -> None:
    """Remove what is in a folder, and not the folder, which may be held."""
    for path in folder.iterdir():
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with what is in it: with one file handle at a time, as there may be few."""
    if path.is_dir() and not path.is_symlink():
        empty_folder(path)
        path.rmdir()
    else:
        path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder with what is in it, or a file or link in its place, as far as the system permits."""
    with suppress(OSError):
        remove(folder)


@contextmanager
def held(
    draft: Path, out: Path, what: str = "run", *, folder: bool = False, make: bool = True, wait: bool = False
) -> Iterator[int]:
    """Open the draft of an output and hold it alone; refuse to go on beside a run that holds it.

    Args:
        draft: the file or folder to hold.
        out: what it becomes.
        what: holds it elsewhere, as "merge".
        folder: whether it is a folder.
        make: make it where it is not there.
        wait: wait for the other run instead of refusing.
    """
    while True:
        handle = _open(draft, folder=folder, make=make)
        try:
            _lock(handle, out, what, wait=wait)
            if _is_at(handle, draft):  # otherwise the run that held it has published or removed it
                with _without_empty(draft) if folder and make else nullcontext():
                    yield handle
                return
        finally:
            os.close(handle)


def lock_path(draft: Path) -> Path:
    """Return the file that is locked while a folder is held."""
    return draft.with_name(f"{draft.name}.lock")


@contextmanager
def held_folder(draft: Path, out: Path, what: str = "run", *, make: bool = True) -> Iterator[None]:
    """Hold a draft that is a folder, also against other machines.

    A network disk may show other machines locks of files only, so a file beside the folder is locked as well.
    """
    lock = lock_path(draft)
    if not make and not draft.is_dir() and not lock.exists():  # if it is there alone, it is removed
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(draft))
    with held(lock, out, what):
        try:
            with held(draft, out, what, folder=True, make=make):
                yield
        finally:
            try:
                remove_folder(lock)  # who waits for it sees that it is gone, and makes another
            except KeyboardInterrupt:
                remove_folder(lock)
                raise


def check_draft(draft: Path) -> None:
    """Refuse a draft folder in which writing, removing or renaming would reach what is not its own.

    A link leads elsewhere, and so does a second name of one file. Who owns the draft may put either there at any time,
    so it must belong to this user, to the owner of the folder it lies in, or to root.
    """
    trusted = {os.geteuid(), draft.absolute().parent.stat().st_uid, 0}
    for path in (draft, *draft.iterdir(), *_inside(draft / "model")):
        found = path.lstat()
        linked = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
        if linked or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise OutputError(f"{path} is a link or no regular file, which epimer did not put there; remove it.")
        if found.st_uid not in trusted:
            raise OutputError(f"{path} belongs to another user, so it is not taken up; choose another output.")


def _inside(folder: Path) -> Iterable[Path]:
    """Return what is in a folder; nothing where it is a link or not there."""
    return () if folder.is_symlink() or not folder.is_dir() else folder.iterdir()


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove this user's folders that no living process holds; none where the file system has no locks to tell it."""
    for folder in folders:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid != os.geteuid():
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder)
            finally:
                os.close(handle)


@contextmanager
def _without_empty(draft: Path) -> Iterator[None]:
    """Remove a folder that is empty where the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            draft.rmdir()
        raise


def _open(draft: Path, *, folder: bool, make: bool) -> int:
    if draft.is_symlink():
        raise OutputError(f"{draft} is a link, which epimer did not put there; remove it.")
    if not folder:
        return os.open(draft, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o666)
    while True:
        made = make and _make(draft)
        try:
            return os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not make or not draft.parent.is_dir():
                raise
        except OSError:
            if made:
                draft.rmdir()
            raise


def _make(folder: Path) -> bool:
    """Make a folder; return whether it was not there."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _lock(handle: int, out: Path, what: str, *, wait: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise OutputError(f"another {what} is writing {out}; wait for it, or choose another name.") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Have the system write a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explain_os_errors(path: Path, verb: str) -> Iterator[None]:
    """Turn an error of the system into one line with a reason and a remedy."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number in FULL:
            free = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
            reason = f"{FULL[number]} ({format_size(free)} free); make room, or choose another place"
        elif number in REFUSED:
            reason = f"its folder may not be written to ({error.strerror}); choose another place"
        else:
            reason = REMEDIES.get(number) or f"{error.strerror or error}; choose another place"
        raise OutputError(f"{path} cannot be {verb}: {reason}.") from error
