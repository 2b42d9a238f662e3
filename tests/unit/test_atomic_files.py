"""Drafts: whole or not there, held by one process at a time, taken over from one that was killed."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import network_disk
from epimer.atomic_files import (
    atomic_file,
    atomic_folder,
    check_file,
    check_new,
    explain_os_errors,
    held,
    remove_abandoned,
)
from epimer.errors import OutputError

HOLDER = """
import sys, time
from pathlib import Path
from epimer.atomic_files import atomic_file, atomic_folder
out = Path(sys.argv[2])
with (atomic_file(out) if sys.argv[1] == "file" else atomic_folder(out, "marker", overwrite=True)) as draft:
    (draft if sys.argv[1] == "file" else draft / "half").write_text("half")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder():
    """Starts a process that is in the middle of writing an output."""
    started = []

    def start(kind, out):
        started.append(
            subprocess.Popen([sys.executable, "-c", HOLDER, kind, str(out)], stdout=subprocess.PIPE, text=True)
        )
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def write(kind, out, text="whole"):
    if kind == "file":
        with atomic_file(out) as draft:
            draft.write_text(text)
    else:
        with atomic_folder(out, "marker", overwrite=True) as draft:
            (draft / "marker").write_text(text)


def write_half(kind, out):
    """Begin to write, and be interrupted."""
    whole = atomic_file(out) if kind == "file" else atomic_folder(out, "marker", overwrite=True)
    with whole as draft:
        (draft if kind == "file" else draft / "half").write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_second_process_is_refused_and_takes_over_once_the_first_is_killed(tmp_path, holder, kind):
    out = tmp_path / "out"
    process = holder(kind, out)
    with pytest.raises(OutputError, match=r"another run is writing .*out; wait for it, or choose another name"):
        write(kind, out)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(tmp_path.iterdir())) == (1 if kind == "file" else 2)  # its draft; of a folder also its lock
    write(kind, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (out / "half").exists()
    assert (out if kind == "file" else out / "marker").read_text() == "whole"


@pytest.mark.skipif(not network_disk.available(), reason="FUSE cannot be mounted here")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_another_machine_is_refused(tmp_path, kind):
    """On a disk that shows other machines locks of files only, as NFS does."""
    served, mounted = tmp_path / "served", tmp_path / "mounted"
    served.mkdir()
    mounted.mkdir()
    command = [sys.executable, network_disk.__file__, served, mounted, "--", sys.executable, "-c", HOLDER, kind, "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        other = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        holder.kill()
    assert "another run is writing" in other.stderr
    assert other.returncode == 1


def test_folders_that_nobody_holds_are_removed_and_no_others(tmp_path, holder, monkeypatch):
    holder("folder", tmp_path / "living")
    killed = holder("folder", tmp_path / "dead")
    killed.kill()
    killed.wait()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "file").write_text("mine")
    living, dead = (tmp_path / f".{name}.epimer-draft" for name in ("living", "dead"))
    given = [living, dead, tmp_path / "link", tmp_path / "file", tmp_path / "missing"]

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", no_locks)
        remove_abandoned(given)
    assert dead.exists()
    remove_abandoned(given)
    locks = {f"{path.name}.lock" for path in (living, dead)}
    assert {path.name for path in tmp_path.iterdir()} == {living.name, "theirs", "link", "file"} | locks
    assert (living / "half").exists()
    assert (tmp_path / "theirs" / "thesis").exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, kind):
    out = tmp_path / "out"
    write(kind, out, "before")

    with pytest.raises(KeyboardInterrupt):
        write_half(kind, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out if kind == "file" else out / "marker").read_text() == "before"


def test_a_draft_that_its_holder_publishes_is_not_what_the_next_one_holds(tmp_path):
    """The second one opened the draft before it became the output, so what it has open is the output."""
    draft, out = tmp_path / ".out.epimer", tmp_path / "out"
    opened = []
    real = os.open

    def late(path, *rest):
        handle = real(path, *rest)
        if not opened:
            opened.append(handle)
            draft.replace(out)  # what the first one does between our opening and our locking of it
        return handle

    draft.write_text("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", late)
        with held(draft, out) as handle:
            assert os.path.samestat(os.fstat(handle), draft.stat())
            assert not os.path.samestat(os.fstat(handle), out.stat())
    assert out.read_text() == "whole"


@pytest.mark.parametrize("moment", ["between the renames", "before the old one is removed", "while it is removed"])
def test_a_replacement_that_was_killed_is_finished(tmp_path, moment):
    out = tmp_path / "out"
    write("folder", out, "old")
    if moment == "between the renames":
        out.rename(tmp_path / ".out.epimer-old")
        (tmp_path / ".out.epimer-draft").mkdir()
        (tmp_path / ".out.epimer-draft" / "marker").write_text("new")
    else:
        name = "old" if moment == "before the old one is removed" else "gone"
        (tmp_path / f".out.epimer-{name}").mkdir()
        (tmp_path / f".out.epimer-{name}" / "marker").write_text("older")
    with pytest.raises(OutputError, match="exists; choose another name, or pass --overwrite"):
        check_new(out, "marker", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "marker").read_text() == "old"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"the disk is full \(.* GB free\); make room, or choose another place"),
        (errno.EDQUOT, r"your quota of the disk is used up \(.* GB free\); make room"),
        (errno.EROFS, r"its folder may not be written to \(Read-only file system\); choose another place"),
        (errno.EMFILE, r"raise the limit \(ulimit -n\)"),
        (errno.EFBIG, r"raise the limit \(ulimit -f\)"),
        (errno.EIO, r"the disk failed"),
        (errno.ENAMETOOLONG, r"File name too long; choose another place"),
    ],
)
def test_what_the_system_refuses_is_said_with_what_to_do(tmp_path, number, words):
    with (
        pytest.raises(OutputError, match=f"out cannot be written: .*{words}"),
        explain_os_errors(tmp_path / "out", "written"),
    ):
        raise OSError(number, os.strerror(number))


def test_a_device_is_never_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write_it in (lambda: check_file(pipe), lambda: write("file", pipe)):
        with pytest.raises(OutputError, match="pipe cannot be written: it is not a regular file; name another"):
            write_it()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_where_the_replaced_folder_is_removed_is_not_followed(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis").write_text("mine")
    (tmp_path / ".out.epimer-gone").symlink_to(tmp_path / "theirs")
    write("folder", tmp_path / "out")
    assert (tmp_path / "theirs" / "thesis").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "theirs"}


@pytest.mark.parametrize(("kind", "name"), [("file", ".out.epimer"), ("folder", ".out.epimer-draft")])
@pytest.mark.parametrize("target", ["theirs", "missing"])
def test_a_link_in_the_place_of_a_draft_is_refused(tmp_path, kind, name, target):
    (tmp_path / "theirs").mkdir()
    (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(OutputError, match=r"\.out\.epimer.* is a link, which epimer did not put there; remove it"):
        write(kind, tmp_path / "out")
    assert (tmp_path / name).is_symlink()
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_replaced_folder_that_cannot_be_moved_is_left_to_the_next_run(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write("folder", out, "first")
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith("-old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        write("folder", out, "second")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.epimer-old"}
    assert (out / "marker").read_text() == "second"
    write("folder", out, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "marker").read_text() == "third"


def test_an_interrupt_while_the_replaced_folder_is_removed_leaves_the_new_one_alone(tmp_path, monkeypatch):
    out, removals, rmdir = tmp_path / "out", [], Path.rmdir
    with atomic_folder(out, "made.json") as draft:
        (draft / "made.json").write_text("old")

    def interrupted(folder):
        removals.append(folder)
        if len(removals) == 1:
            raise KeyboardInterrupt
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(out, "made.json", overwrite=True) as draft:
        (draft / "made.json").write_text("new")
    assert removals[0] == tmp_path / ".out.epimer-gone"
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "made.json").read_text() == "new"
