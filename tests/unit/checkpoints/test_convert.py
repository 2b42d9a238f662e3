"""`epimer convert`: the safetensors file holds what torch.load gives, and a failure leaves nothing behind."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from epimer.checkpoints.convert import convert
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.torchfile import TorchFile
from epimer.errors import CheckpointError, OutputError
from tensors import bits, every_dtype

W = torch.arange(6.0).reshape(2, 3)
TOO_NEW = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
"""what torch itself cannot load from its old format"""


def everything() -> dict[str, Tensor]:
    """Return a tensor of random bytes for each dtype of safetensors, shapes, names and views of all kinds."""
    generator = torch.Generator().manual_seed(0)
    found = every_dtype(3)
    found |= {str(shape): torch.randn(shape, generator=generator) for shape in ((), (0,), (3, 0, 2), (2, 1, 4, 5))}
    found |= {name: torch.ones(3) for name in ("", "größe", "重み", 'quo"te', "line\nbreak", "../up")}
    big = torch.randn(10, 10, generator=generator)
    return found | {"transposed": big.mT, "column": big[:, 3], "block": big[2:4, 5:7]}


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "model.bin", tmp_path / "model.safetensors"


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_the_library_reads_what_torch_load_gives(paths, legacy, suffix):
    source, target = paths[0].with_suffix(suffix), paths[1]
    state = everything()
    if legacy:
        state = {name: V for name, V in state.items() if V.dtype not in TOO_NEW}
    torch.save(state, source, _use_new_zipfile_serialization=not legacy)
    assert convert(source, target) == {}
    expected = torch.load(source, weights_only=True)
    found = safetensors.torch.load_file(target)
    assert {name: bits(V) for name, V in found.items()} == {name: bits(V) for name, V in expected.items()}
    assert left(target.parent) == {source.name, target.name}


@pytest.mark.parametrize("dtype", TOO_NEW, ids=str)
def test_what_torch_cannot_load_from_its_old_format_is_refused(paths, dtype):
    torch.save({"a": W.to(dtype)}, paths[0], _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        convert(*paths)


def test_every_tensor_is_aligned_to_its_element(paths):
    torch.save(everything(), paths[0])
    convert(*paths)
    for entry in SafetensorsFile(paths[1]).entries.values():
        assert entry.start % entry.W.dtype.itemsize == 0


def test_the_fingerprint_stays(paths):
    state = {"a": W, "b": torch.randn(100, 100), "tied": W, "scalar": torch.tensor(3)}
    torch.save(state, paths[0])
    convert(*paths)
    assert SafetensorsFile(paths[1]).fingerprint == TorchFile(paths[0]).fingerprint


def test_ties_stay_and_are_stored_once(paths):
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    torch.save(model.state_dict(), paths[0])
    assert convert(*paths) == {"head.weight": "embed.weight"}
    assert list(safetensors.torch.load_file(paths[1])) == ["embed.weight"]
    read = SafetensorsFile(paths[1])
    assert read.ties == {"head.weight": "embed.weight"}
    assert torch.equal(read.read("head.weight"), embed.weight)
    before = embed.weight.detach().clone()
    embed.weight.data.zero_()
    missing, unexpected = safetensors.torch.load_model(model, paths[1])
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(head.weight, before)


def test_a_nested_state_dict(paths):
    torch.save({"epoch": 3, "model": {"a": W, "b": W}, "optimizer": {"lr": 0.1}}, paths[0])
    with pytest.raises(CheckpointError, match=r"'epoch' is a int|under 'model'"):
        convert(*paths)
    with pytest.raises(CheckpointError, match=r"has no entry 'net'; it holds 'epoch', 'model', 'optimizer'"):
        convert(*paths, key="net")
    with pytest.raises(CheckpointError, match="'lr' is a float, expected only tensors"):
        convert(*paths, key="optimizer")
    with pytest.raises(CheckpointError, match="holds a int, expected a state dict"):
        convert(*paths, key="epoch")
    assert not paths[1].exists()
    assert convert(*paths, key="model") == {"b": "a"}
    assert torch.equal(safetensors.torch.load_file(paths[1])["a"], W)


def test_a_list_has_no_keys(paths):
    torch.save([W], paths[0])
    with pytest.raises(CheckpointError, match="has no entry 'model'; it holds list"):
        convert(*paths, key="model")


def test_an_existing_file_is_replaced_only_when_asked(paths):
    torch.save({"a": W}, paths[0])
    paths[1].write_text("mine")
    with pytest.raises(OutputError, match=r"model\.safetensors exists; choose another name, or pass --overwrite"):
        convert(*paths)
    assert paths[1].read_text() == "mine"
    convert(*paths, overwrite=True)
    assert torch.equal(safetensors.torch.load_file(paths[1])["a"], W)


def test_a_failure_keeps_the_existing_file(paths):
    paths[0].write_bytes(b"")
    paths[1].write_text("mine")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        convert(*paths, overwrite=True)
    assert paths[1].read_text() == "mine"
    assert left(paths[0].parent) == {"model.bin", "model.safetensors"}


def test_a_write_that_fails_leaves_nothing(paths, monkeypatch):
    torch.save({"a": W}, paths[0])

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"model\.safetensors cannot be written: the disk is full"):
        convert(*paths)
    assert left(paths[0].parent) == {"model.bin"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "holds no tensor"),
        ({"a": W.to(torch.complex128)}, "'a' is torch.complex128, which safetensors cannot hold; convert it first"),
        ({"a": W, "__metadata__": W + 1}, "__metadata__"),
        ({"a\ud800": W}, "'a\\ud800'"),
        ({"a": torch.zeros(1).expand(2**40)}, "'a'"),
    ],
    ids=["nothing", "complex128", "a reserved name", "a name that is no text", "a huge claim"],
)
def test_what_safetensors_cannot_hold_is_refused(paths, state, message):
    torch.save(state, paths[0])
    with pytest.raises(CheckpointError) as caught:
        convert(*paths)
    assert message in str(caught.value)
    assert str(paths[0]) in str(caught.value)
    assert left(paths[0].parent) == {"model.bin"}


def test_the_suffixes_are_checked(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.ckpt is not a torch file: expected \.bin, \.pt, \.pth"):
        convert(tmp_path / "model.ckpt", tmp_path / "model.safetensors")
    with pytest.raises(OutputError, match=r"model\.bin should end in \.safetensors"):
        convert(tmp_path / "model.bin", tmp_path / "model.bin")


def test_places_that_cannot_be_read_or_written(paths):
    source, target = paths
    with pytest.raises(CheckpointError, match=r"model\.bin cannot be read: No such file"):
        convert(source, target)
    torch.save({"a": W}, source)
    with pytest.raises(OutputError, match=r"model\.safetensors cannot be written: No such file or directory"):
        convert(source, target.parent / "nowhere" / "model.safetensors")
    with pytest.raises(OutputError, match=r"x\.safetensors cannot be written: Not a directory"):
        convert(source, source / "x.safetensors")
    target.mkdir()
    with pytest.raises(OutputError, match=r"model\.safetensors cannot be written: Is a directory"):
        convert(source, target, overwrite=True)
    assert left(source.parent) == {"model.bin", "model.safetensors"}
