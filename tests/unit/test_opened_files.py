"""Files that change while they are read: every change is noticed by the next read, and nothing crashes."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from epimer.checkpoints.folder import open_file
from epimer.errors import CheckpointError
from epimer.opened_files import OpenedFile

STATE = {f"layer.{i}": torch.full((64, 64), float(i)) for i in range(4)}
BUS = """
import os, sys
from pathlib import Path
from epimer.checkpoints.folder import open_file
from epimer.errors import CheckpointError
path = Path(sys.argv[1])
opened = open_file(path)
os.truncate(path, 4096)
try:
    opened.read("layer.3")
except CheckpointError as error:
    print(error)
"""


def save(path, state):
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("how", ["cut", "rewritten", "replaced", "removed"])
def test_a_tensor_is_read_from_the_file_that_was_opened_or_not_at_all(tmp_path, suffix, how):
    path = tmp_path / f"model{suffix}"
    save(path, STATE)
    opened = open_file(path)
    assert torch.equal(opened.read("layer.2"), STATE["layer.2"])
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    else:
        other = {name: W + 1 for name, W in STATE.items()}
        target = path if how == "rewritten" else tmp_path / f"other{suffix}"
        save(target, other)
        os.utime(target, (1, 1))
        target.replace(path)
    with pytest.raises(CheckpointError, match=r"model\.\w+ (was changed|ends too early|cannot be read: No such file)"):
        opened.read("layer.3")


def test_a_torch_file_that_is_cut_does_not_end_the_process(tmp_path):
    """A mapped file would: the system ends a process that touches a page which the file no longer has."""
    torch.save(STATE, tmp_path / "model.bin")
    ran = subprocess.run([sys.executable, "-c", BUS, str(tmp_path / "model.bin")], capture_output=True, text=True)
    assert ran.returncode == 0, ran
    assert "model.bin ends too early" in ran.stdout


def test_a_file_that_is_only_looked_at_is_no_other_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, STATE)
    opened = open_file(path)
    os.chmod(path, 0o600)
    os.link(path, tmp_path / "again")
    os.utime(path, ns=(0, path.stat().st_mtime_ns))  # a float would round the time of change
    assert torch.equal(opened.read("layer.1"), STATE["layer.1"])


@pytest.mark.parametrize("error", [5, 24])
def test_an_error_of_the_system_says_what_to_do(tmp_path, monkeypatch, error):
    path = tmp_path / "model.safetensors"
    save(path, STATE)
    opened = OpenedFile(path, "model.safetensors")

    def fails(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("pathlib.Path.open", fails)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; (the disk failed|raise the limit \(ulimit -n\))"):
        opened.fill(memoryview(bytearray(8)), 0)
