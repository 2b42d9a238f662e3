"""What goes to other machines: absolute paths, methods by name, large tensors by the disk; nothing they lack."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.memory import Cached
from epimer.engine import ray as ray_engine
from epimer.engine.parcels import LARGE, Scratch, map_tensor, pack, pack_walk, read_tensor, unpack
from epimer.engine.ray import PROCESS, check_address, run_job, task_memory, versions
from epimer.methods.registry import describe_method

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]


@pytest.mark.parametrize("load", [map_tensor, read_tensor])
def test_tensors_come_back_and_large_ones_go_by_the_disk(tmp_path, load):
    large = [torch.arange(LARGE + 24).reshape(8, -1).to(dtype) for dtype in DTYPES]
    value = {"large": large, "column": large[0].T, "small": torch.ones(3), "header": torch.empty(5, device="meta")}
    data = pack(value, tmp_path, "7", load=load)
    assert len(data) < LARGE
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("7-")
    back = unpack(data)
    if load is read_tensor:
        file.unlink()
    for sent, received in zip([*large, large[0].T], [*back["large"], back["column"]], strict=True):
        assert torch.equal(sent, received)
        assert sent.dtype == received.dtype
    assert torch.equal(back["small"], torch.ones(3))
    assert back["header"].is_meta
    assert back["header"].shape == (5,)
    back["large"][0] += 1  # what one receiver changes is its own
    if load is map_tensor:
        assert torch.equal(unpack(data)["large"][0], large[0])


def test_paths_hold_elsewhere_and_methods_go_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pack({"path": Path("models/base"), "method": describe_method("tsv")}, tmp_path, "walk", load=map_tensor)
    monkeypatch.chdir(os.path.dirname(tmp_path))
    back = unpack(data)
    assert back["path"] == tmp_path / "models" / "base"
    assert back["method"] is describe_method("tsv")


def test_a_walk_with_tensors_in_memory_makes_the_folder_that_they_go_by(tmp_path):
    W = torch.randn(LARGE)
    back = unpack(pack_walk({"corrections": {"a": W}}, Scratch(tmp_path / "scratch")))
    assert torch.equal(back["corrections"]["a"], W)
    pack_walk({"nothing": torch.zeros(2)}, Scratch(tmp_path / "other"))
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]


def test_a_worker_with_other_versions_is_refused(tmp_path):
    sent = run_job(0, [], "walk", tmp_path, "cpu", 1, ("0.0.1", "1.0.0"))
    with pytest.raises(epimer.ParameterError, match=r"has epimer .*, the driver epimer 0.0.1 and torch 1.0.0; install"):
        raise unpack(sent)


def test_a_worker_with_too_little_memory_says_so_with_what_to_do(tmp_path, monkeypatch):
    class Greedy:
        jobs = (SimpleNamespace(name="layers.0.weight"),)

        def read(self, job):
            return None

        def work(self, job, loaded, device):
            return torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(ray_engine, "_walk", ("walk", Greedy()))
    sent = run_job(0, [], "walk", tmp_path, "cpu", 1, versions())
    expected = rf"{os.uname().nodename} has too little memory for 'layers.0.weight'; set --max-memory lower, or take"
    with pytest.raises(epimer.OutputError, match=expected):
        raise unpack(sent)


def test_an_address_where_nothing_listens_is_refused_at_once():
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(epimer.ParameterError, match=f"there is no Ray cluster at '{address}'.*give --address"):
            check_address(address)
        bound.listen()
        check_address(address)
    with pytest.raises(epimer.ParameterError, match=r"there is no Ray cluster at '127.0.0.1:99999'"):
        check_address("127.0.0.1:99999")
    check_address("auto")


def test_a_task_asks_for_its_memory_and_little_more():
    needs = [10**3, 10**8, 10**9, 3 * 10**9, 7 * 10**10]
    asked = [task_memory(SimpleNamespace(memory=need)) for need in needs]
    for need, ask in zip(needs, asked, strict=True):
        assert need + PROCESS <= ask <= 1.13 * (need + PROCESS)
    assert task_memory(SimpleNamespace(memory=1_000_000)) == task_memory(SimpleNamespace(memory=9_000_000))


def test_known_objects_are_not_sent(tmp_path):
    sent, mine = {"a": "x" * 10_000}, {"b": 1}
    data = pack([sent, 3], tmp_path, "0", known=[sent], load=read_tensor)
    assert len(data) < 100
    assert unpack(data, [mine])[0] is mine


def test_models_that_are_kept_in_memory_are_read_again_elsewhere(tmp_path):
    save_file({"W": torch.randn(300, 300)}, tmp_path / "m.safetensors")
    kept = Cached(open_checkpoint(str(tmp_path / "m.safetensors")))
    kept.read("W")
    data = pack(kept, tmp_path, "walk", load=map_tensor)
    assert len(data) < 10_000
    assert torch.equal(unpack(data).read("W"), kept.read("W"))
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_model_in_a_store_is_sent_as_its_address(tmp_path):
    W = torch.randn(300, 300)
    save_file({"W": W}, tmp_path / "m.safetensors")
    fsspec.filesystem("memory").put_file(str(tmp_path / "m.safetensors"), "parcels/m.safetensors")
    data = pack(open_checkpoint("memory://parcels/m.safetensors"), tmp_path, "walk", load=map_tensor)
    assert len(data) < 10_000
    assert torch.equal(unpack(data).read("W"), W)


def test_what_other_machines_lack_is_refused_in_one_line(tmp_path):
    with pytest.raises(epimer.ParameterError, match=r"cannot be sent to other machines \(.*; use --engine local"):
        pack_walk({"function": lambda: 1}, Scratch(tmp_path))
    with open(os.devnull) as file, pytest.raises(epimer.ParameterError, match="cannot be sent to other machines"):
        pack_walk(file, Scratch(tmp_path))
    mine = type("Mine", (), {"__module__": "__main__"})
    with pytest.raises(epimer.ParameterError, match="'Mine' is code of this process, which other machines do not have"):
        pack_walk(mine, Scratch(tmp_path))
    missing = tmp_path / "missing"
    with pytest.raises(epimer.OutputError, match=r"missing cannot be written on .*start from a folder that every"):
        pack(torch.zeros(LARGE), missing, "0", load=read_tensor)
