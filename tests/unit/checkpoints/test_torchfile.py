"""Torch files: read as torch.load reads them, and nothing in them is ever executed."""

import copy
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from epimer.checkpoints.convert import convert
from epimer.checkpoints.folder import open_file
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.torchfile import TorchFile
from epimer.errors import CheckpointError
from tensors import bits, every_dtype

W = torch.arange(6.0).reshape(2, 3)


def everything() -> dict[str, Tensor]:
    """Return a tensor of random bytes for each dtype of safetensors, shapes and names of all kinds."""
    generator = torch.Generator().manual_seed(0)
    found = every_dtype(2, 3)
    found |= {str(shape): torch.randn(shape, generator=generator) for shape in ((), (0,), (3, 0, 2), (2, 1, 4, 5))}
    return found | {name: torch.ones(3) for name in ("", "größe", "重み", 'quo"te', "line\nbreak", "../up")}


class Marks:
    """When unpickled, makes a file: what a hostile checkpoint would do."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def save(tmp_path):
    def write(content: object, name: str = "model.bin", **how) -> Path:
        torch.save(content, tmp_path / name, **how)
        return tmp_path / name

    return write


def refused(path: Path) -> str:
    """Return why a file is refused; a refusal is one line that names it."""
    with pytest.raises(CheckpointError) as caught:
        _ = TorchFile(path).fingerprint
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_reads_what_torch_load_reads(save, suffix):
    path = save(everything(), f"model{suffix}")
    read = open_file(path)
    assert isinstance(read, TorchFile)
    expected = torch.load(path, weights_only=True)
    assert list(read.headers) == list(expected)
    assert {name: bits(read.read(name)) for name in read.headers} == {name: bits(W) for name, W in expected.items()}
    assert all(W.is_meta for W in read.headers.values())
    assert read.files == [path]


def test_fingerprint_is_that_of_the_same_tensors_in_safetensors(save, tmp_path):
    state = everything() | {"large": torch.randn(200, 300)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert TorchFile(save(state)).fingerprint == SafetensorsFile(tmp_path / "model.safetensors").fingerprint


def test_tensors_that_are_views(save, tmp_path):
    big = torch.arange(100.0).reshape(10, 10)
    state = {
        "transposed": big.mT,
        "row": big[3],
        "column": big[:, 3],
        "block": big[2:4, 5:7],
    }
    read = TorchFile(save(state))
    assert {name: bits(read.read(name)) for name in state} == {name: bits(V) for name, V in state.items()}
    assert not read.ties
    safetensors.torch.save_file({name: V.contiguous() for name, V in state.items()}, tmp_path / "model.safetensors")
    assert read.fingerprint == SafetensorsFile(tmp_path / "model.safetensors").fingerprint


def test_parameters_and_ordered_dicts(save):
    read = TorchFile(save(OrderedDict(b=nn.Parameter(W), a=W + 1)))
    assert list(read.headers) == ["b", "a"]
    assert torch.equal(read.read("b"), W)
    assert not read.read("b").requires_grad


def test_shared_storage_is_a_tie(save):
    state = {"embed": W, "norm": torch.ones(2), "head": W, "empty": torch.ones(0), "none": torch.ones(0)}
    read = TorchFile(save(state))
    assert read.ties == {"head": "embed"}
    assert bits(read.read("head")) == bits(W) == bits(read.read("embed"))


def test_what_only_overlaps_is_no_tie(save):
    state = {"all": W, "flat": W.view(6), "row": W[0], "turned": W.T}
    assert TorchFile(save(state)).ties == {}


def test_the_saved_model_of_a_module_with_ties(save):
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    read = TorchFile(save(model.state_dict()))
    assert read.ties == {"head.weight": "embed.weight"}


def test_a_tensor_is_memory_of_its_own(save):
    read = TorchFile(save({"a": W, "b": W + 1}))
    first = read.read("a")
    first.zero_()
    assert torch.equal(read.read("a"), W)
    assert torch.equal(read.read("b"), W + 1)
    assert torch.equal(first, torch.zeros(2, 3))


# nothing is executed

UNTRUSTED = "holds Python objects that would have to be executed to be read, which epimer never does"


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def test_the_hostile_object_works(marker):
    pickle.loads(pickle.dumps(Marks(marker)))
    assert marker.is_dir()
    marker.rmdir()


@pytest.mark.parametrize("where", ["alone", "in a state dict", "as a key", "in a list"])
def test_code_in_a_torch_file_is_not_executed(save, marker, where):
    evil = Marks(marker)
    content = {"alone": evil, "in a state dict": {"a": W, "b": evil}, "as a key": {evil: W}, "in a list": [W, [evil]]}
    assert UNTRUSTED in refused(save(content[where]))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_plain_pickle_is_not_executed(tmp_path, marker, protocol):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps(Marks(marker), protocol))
    assert "is not in torch's zip format" in refused(path)
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        convert(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_an_old_torch_file_is_not_executed(save, tmp_path, marker, protocol):
    path = save({"a": W, "b": Marks(marker)}, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    assert "is not in torch's zip format" in refused(path)
    with pytest.raises(CheckpointError, match=UNTRUSTED):
        convert(path, tmp_path / "model.safetensors")


def test_code_in_a_zip_made_by_hand_is_not_executed(tmp_path, marker):
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Marks(marker), 2))
        archive.writestr("archive/version", "3\n")
    assert UNTRUSTED in refused(path)


def test_objects_that_are_no_module_are_refused_with_what_to_save_instead(save):
    message = refused(save({"model": nn.Linear(2, 3), "path": Path("x")}))
    assert UNTRUSTED in message
    assert "torch.save(model.state_dict(), path)" in message


# what is no state dict


def test_a_nested_state_dict_says_how_to_take_it_out(save):
    message = refused(save({"model": {"a": W}, "epoch": 3}))
    assert "keeps its state dict under 'model'" in message
    assert message.endswith("take it out: epimer convert model.bin model.safetensors --key model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": W, "epoch": 3}, "'epoch' is a int, expected only tensors"),
        ({"a": W, "note": "hello"}, "'note' is a str, expected only tensors"),
        ({"a": W, "none": None}, "'none' is a NoneType, expected only tensors"),
        ({"a": W, "more": [W]}, "'more' is a list, expected only tensors"),
        ({"a": W, "more": {"b": {"c": W}}}, "'more' is a dict, expected only tensors"),
        ({"a": W, 3: W}, "3 "),
        (W, "holds a Tensor, expected a state dict"),
        ([W], "holds a list, expected a state dict"),
        (7, "holds a int, expected a state dict"),
        ({"a": W.to_sparse()}, "'a' is stored as torch.sparse_coo, expected a dense tensor"),
        ({"a": W.to("meta")}, "'a'"),
    ],
    ids=[
        "int",
        "str",
        "None",
        "list",
        "nested twice",
        "number as name",
        "tensor",
        "list of",
        "number",
        "sparse",
        "meta",
    ],
)
def test_what_is_no_state_dict_is_refused(save, content, message):
    assert message in refused(save(content))


def test_names_that_are_no_text_are_refused(save):
    assert "'a\\ud800'" in refused(save({"a\ud800": W}))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch is about to drop them
def test_quantized_tensors_are_refused(save):
    with pytest.raises(CheckpointError, match="'a'"):
        TorchFile(save({"a": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)}))


@pytest.mark.parametrize("name", ["conjugated", "negated"])
def test_lazily_changed_tensors_are_read_as_torch_reads_them(save, name):
    state = {"conjugated": torch.complex(W, W).conj(), "negated": torch._neg_view(W)}
    read = TorchFile(save({"a": state[name]}))
    assert torch.equal(read.read("a"), state[name].resolve_conj().resolve_neg())
    assert not read.read("a").is_conj()
    assert not read.read("a").is_neg()
    assert len(read.fingerprint) == 32


def test_a_small_file_cannot_claim_a_huge_tensor(save):
    assert "'a'" in refused(save({"a": torch.zeros(1).expand(2**40)}))


# files that would grow


def rezipped(path, compress=(), lie=0):
    """Pack a torch file anew: some of its entries compressed, or its list of entries `lie` bytes before its place."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            kind = zipfile.ZIP_DEFLATED if name.endswith(compress) and compress else zipfile.ZIP_STORED
            archive.writestr(name, data, kind)
    data = path.read_bytes()
    if lie:
        offset = int.from_bytes(data[-6:-2], "little") - lie
        path.write_bytes(data[:-6] + offset.to_bytes(4, "little") + data[-2:])
    return path


@pytest.mark.parametrize("entry", ["data.pkl", "data/0", "version", ".data/serialization_id"])
def test_compressed_entries_are_not_unpacked(save, entry):
    """A million zeros take a thousand bytes, and torch would unpack each of them."""
    path = save({"a": torch.zeros(1 << 20), "b" * (1 << 20): torch.zeros(1)})
    assert "are compressed" in refused(rezipped(path, (entry,)))
    with pytest.raises(CheckpointError, match="are compressed"):
        convert(path, path.with_suffix(".safetensors"))


def test_entries_that_lie_over_each_other_are_refused(save):
    """A hundred entries of one place would be read a hundred times."""
    path = save({"a": torch.zeros(1 << 16)})
    with zipfile.ZipFile(path) as archive:
        (large,) = [entry for entry in archive.infolist() if entry.filename.endswith("data/0")]
        with zipfile.ZipFile(path, "a") as more:
            for i in range(100):
                copied = copy.copy(large)
                copied.filename = copied.filename[:-1] + f"x{i}"
                more.filelist.append(copied)
                more.NameToInfo[copied.filename] = copied
            more._didModify = True
    assert "larger than the file" in refused(path)


def test_a_second_list_of_entries_is_refused(save):
    """Readers that look for the list in different places would see different files."""
    path = rezipped(save({"a": W}))
    assert TorchFile(path).headers.keys() == {"a"}
    assert "list of the archive's entries is damaged" in refused(rezipped(path, lie=8))
    path.write_bytes(rezipped(save({"a": W})).read_bytes() + b"PK\5\6" + bytes(18))
    assert "list of the archive's entries is damaged" in refused(path)


@pytest.mark.parametrize("site", ["key", "ordered", "set"])
def test_keys_that_take_for_ever_to_hash_are_refused(save, site):
    """A tuple of the same tuple twice, 60 times: its hash would take 2^60 steps."""
    start = {"key": b"\x80\x02}", "ordered": b"\x80\x02ccollections\nOrderedDict\n)R", "set": b"\x80\x04\x8f("}[site]
    bomb = start + b")" + b"2\x86" * 60 + {"key": b"Ns.", "ordered": b"Ns.", "set": b"\x90."}[site]
    path = save({"a": W})
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, bomb if name.endswith("data.pkl") else data)
    assert "tuples inside tuples without end" in refused(path)


def test_names_of_any_length_make_a_short_message(save):
    assert len(refused(save({"a" * 10**7: "x"}))) < 5000
    path = save({"y" * 10**7: {"a": W}})
    with pytest.raises(CheckpointError, match="has no entry 'x'") as caught:
        convert(path, path.with_suffix(".safetensors"), key="x")
    assert len(str(caught.value)) < 5000


# damaged files


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_cut_anywhere_is_refused(save, tmp_path, legacy):
    path = save({"a": W, "b": torch.ones(100)}, _use_new_zipfile_serialization=not legacy)
    whole = path.read_bytes()
    for end in [0, 1, 2, 3, 7, 8, 9, *range(10, len(whole), 41), len(whole) - 1]:
        path.write_bytes(whole[:end])
        assert "cut short" in refused(path)
        with pytest.raises(CheckpointError, match=r"model\.bin"):
            convert(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_an_old_file_says_how_to_convert_it(save, tmp_path):
    path = save({"a": W}, _use_new_zipfile_serialization=False)
    assert refused(path).endswith("convert it: epimer convert model.bin model.safetensors")
    convert(path, tmp_path / "model.safetensors")
    assert torch.equal(SafetensorsFile(tmp_path / "model.safetensors").read("a"), W)


def test_a_zip_of_something_else_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "world")
    assert "is damaged or not a torch file" in refused(path)


def test_a_git_lfs_pointer_says_what_to_do(tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n")
    assert "is a Git LFS pointer, not the weights; run `git lfs pull`" in refused(path)


def test_what_is_not_a_readable_file_is_refused(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "model.bin")
    (tmp_path / "folder.bin").mkdir()
    assert "cannot be read: Is a directory" in refused(tmp_path / "folder.bin")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A torch file and where in it the pickle lies."""
    path = tmp_path_factory.mktemp("fuzz") / "model.bin"
    torch.save({"a": W, "b": W.mT, "c": torch.zeros(3, dtype=torch.int64), "d": W}, path)
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        content = archive.read(name)
    start = path.read_bytes().index(content)
    return path, path.read_bytes(), start, start + len(content)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_pickle_is_refused_or_read_as_torch_does(whole, data):
    path, content, start, stop = whole
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(start, stop - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    found, refusal = {}, ""
    try:
        read = TorchFile(path)
        found = {name: bits(read.read(name)) for name in read.headers}
        assert len(read.fingerprint) == 32
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal
    else:
        expected = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        assert found == {name: bits(V) for name, V in expected.items()}


def test_rows(save):
    V = torch.randn(7, 2, 3)
    read = TorchFile(save({"a": V, "turned": V.mT}))
    assert torch.equal(read.read("a", (2, 5)), V[2:5])
    assert torch.equal(read.read("turned", (0, 1)), V.mT[:1])
