"""What a second engine costs: one file with a `map`, and a row in `ENGINES` that gives it a name.

This one forks a process for every job, as an engine of a cluster would send it to another machine: it reads and works
there, and only the result comes back.
"""

import multiprocessing
import pickle

import pytest
import torch
from safetensors.torch import save_file

import epimer
from epimer.engine.options import ENGINES


class Processes:
    """Reads and works in a process of its own for every job, one at a time."""

    def __init__(self, devices, *, threads=1, memory=None):
        self.devices = devices

    def map(self, walk):
        context = multiprocessing.get_context("fork")
        for job in walk.jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=self.run, args=(walk, job, self.devices[0], sender))
            process.start()
            result = pickle.loads(receiver.recv_bytes())
            process.join()
            if isinstance(result, Exception):
                raise result
            yield job, result

    @staticmethod
    def run(walk, job, device, sender):
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                sender.send_bytes(pickle.dumps(walk.work(job, walk.read(job), device)))
        except Exception as error:
            sender.send_bytes(pickle.dumps(error))


class OtherMachines(Processes):
    """Works as if on other machines, which share a disk with this one."""

    remote = True
    happens = staticmethod(lambda: None)
    """what happens to the disk before and after a result is consumed"""

    def map(self, walk):
        for one in super().map(walk):
            self.happens()
            yield one
            self.happens()


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENGINES, "processes", Processes)
    monkeypatch.setitem(ENGINES, "machines", OtherMachines)
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "m0", "m1"):
        state = {f"layers.{i}.weight": torch.randn(24, 16, generator=generator) for i in range(3)}
        save_file(state | {"layers.0.bias": torch.randn(24, generator=generator)}, tmp_path / f"{name}.safetensors")
    return {"base_model": "base.safetensors", "models": [{"model": f"m{t}.safetensors"} for t in (0, 1)]}


@pytest.mark.parametrize("other", ["processes", "machines"])
@pytest.mark.parametrize("method", ["tsv", "ties", "epimer_free"])
def test_another_engine_writes_the_same_bytes(models, tmp_path, method, other):
    recipe = {"merge_method": method, **models}
    for engine in ("local", other):
        epimer.merge(recipe, tmp_path / engine, engine=engine, device="cpu", progress=False)
    written = [sorted((tmp_path / engine).iterdir()) for engine in ("local", other)]
    assert [path.name for path in written[0]] == [path.name for path in written[1]]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*written, strict=True))


def damage(path, change):
    """Change a file as a failing disk does."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(data):
    data[-3] ^= 64


@pytest.mark.parametrize(("change", "size"), [(flip, 1536), (bytearray.clear, 0)])
def test_a_parcel_that_is_not_what_the_worker_wrote_is_refused(models, tmp_path, monkeypatch, change, size):
    def happens():
        for parcel in tmp_path.glob(".out.epimer/parcels/*"):
            damage(parcel, change)

    monkeypatch.setattr(OtherMachines, "happens", staticmethod(happens))
    with pytest.raises(epimer.OutputError, match=rf"has {size} bytes of 'layers.*the worker wrote.*every machine"):
        epimer.merge({"merge_method": "tsv", **models}, tmp_path / "out", engine="machines", progress=False)
    assert not list(tmp_path.glob("*out*"))


def test_what_the_disk_loses_after_it_was_written_is_found_before_it_is_published(models, tmp_path, monkeypatch):
    """The first tensor's bytes change once they are in their place."""

    def happens():
        if not list(tmp_path.glob(".out.epimer/parcels/*")):
            damage(tmp_path / ".out.epimer" / "model" / "model.safetensors", flip_first)

    def flip_first(data):
        data[8 + int.from_bytes(data[:8], "little")] ^= 1

    monkeypatch.setattr(OtherMachines, "happens", staticmethod(happens))
    with pytest.raises(epimer.OutputError, match=r"does not return what was .*: 'layers\.0\.bias' differs from"):
        epimer.merge({"merge_method": "tsv", **models}, tmp_path / "out", engine="machines", progress=False)
    assert not list(tmp_path.glob("*out*"))


def test_what_is_wrong_there_is_said_here(models, tmp_path):
    state = {f"layers.{i}.weight": torch.full((24, 16), float("nan")) for i in range(3)}
    save_file(state | {"layers.0.bias": torch.zeros(24)}, tmp_path / "m1.safetensors")
    with pytest.raises(epimer.TensorError, match=r"models\[1\].*holds NaN or Inf in 384 of 384 entries"):
        epimer.merge({"merge_method": "tsv", **models}, tmp_path / "out", engine="processes", progress=False)
    assert not (tmp_path / "out").exists()


def test_an_engine_that_is_not_there_is_refused(models, tmp_path):
    with pytest.raises(epimer.ParameterError, match="There is no engine 'cluster'; engines: local, ray, processes"):
        epimer.merge({"merge_method": "tsv", **models}, tmp_path / "out", engine="cluster", progress=False)
