"""Whole modules in torch files: their tensors are those of torch's own state dict, and nothing is executed."""

import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from epimer.checkpoints.convert import convert
from epimer.checkpoints.folder import open_file
from epimer.checkpoints.safe_unpickle import MAGIC, module_tensors
from epimer.checkpoints.safetensors import SafetensorsFile
from epimer.checkpoints.torchfile import TorchFile
from epimer.errors import CheckpointError
from tensors import bits


class Encoder(nn.Module):
    """With a bit of everything that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.BatchNorm1d(4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.tied, self.none = self.blocks[0], None
        self.register_parameter("absent", None)
        self.scale = nn.Parameter(torch.ones([]))
        self.narrow = nn.Parameter(torch.randn(3, 2).half().T)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, 4), persistent=False)
        self.activation, self.path, self.names = torch.nn.functional.gelu, Path("x"), {"a", "b"}


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return Encoder()


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


class Calls:
    """When unpickled, calls something: what a hostile file would do."""

    def __init__(self, function, *args) -> None:
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def attacks(marker: Path) -> dict[str, Calls]:
    make = f"__import__('os').mkdir({str(marker)!r})"
    return {
        "os.mkdir": Calls(os.mkdir, str(marker)),
        "os.system": Calls(os.system, f"mkdir {marker}"),
        "eval": Calls(eval, make),
        "exec": Calls(exec, make),
        "subprocess": Calls(subprocess.check_output, ["mkdir", str(marker)]),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "download": Calls(torch.hub.download_url_to_file, "file:///etc/hostname", str(marker)),
    }


def check(found, expected) -> None:
    assert list(found) == list(expected)
    assert {name: bits(W) for name, W in found.items()} == {name: bits(W) for name, W in expected.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_tensors_of_a_module_are_its_state_dict(tmp_path, encoder, protocol):
    path = tmp_path / "encoder.pt"
    torch.save(encoder, path, pickle_protocol=protocol)
    read = open_file(path)
    assert isinstance(read, TorchFile)
    check({name: read.read(name) for name in read.headers}, encoder.state_dict())
    assert read.ties == {"tied.weight": "blocks.0.weight", "tied.bias": "blocks.0.bias"}
    assert "mask" not in read.headers
    assert len(read.fingerprint) == 32


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_module_is_converted(tmp_path, encoder, zipped):
    path, out = tmp_path / "encoder.pt", tmp_path / "encoder.safetensors"
    torch.save(encoder, path, _use_new_zipfile_serialization=zipped)
    convert(path, out)
    made = SafetensorsFile(out)
    for name, W in encoder.state_dict().items():
        if not name.startswith("tied."):
            assert bits(made.read(name)) == bits(W.contiguous())
    nested = tmp_path / "nested.pt"
    torch.save({"model": encoder, "path": Path("x")}, nested, _use_new_zipfile_serialization=zipped)
    check(module_tensors(nested, "nested.pt", "model"), encoder.state_dict())


@pytest.mark.slow
def test_classes_that_do_not_exist_here_are_not_missed(tmp_path):
    """As in files of a library that is not installed: the class's name is noted, and that is all."""
    script = """
import sys, types, torch
from torch import nn
module = types.ModuleType("src.modeling"); sys.modules["src.modeling"] = module
class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__(); self.model = nn.Linear(2, 3)
ImageEncoder.__module__, ImageEncoder.__qualname__ = "src.modeling", "ImageEncoder"
module.ImageEncoder = ImageEncoder
torch.manual_seed(0); torch.save(ImageEncoder(), sys.argv[1])
"""
    path = tmp_path / "zeroshot.pt"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    torch.manual_seed(0)
    linear = nn.Linear(2, 3)
    check(module_tensors(path, "zeroshot.pt"), {"model.weight": linear.weight, "model.bias": linear.bias})
    assert "src.modeling" not in sys.modules


@pytest.mark.parametrize("kind", list(attacks(Path())))
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_module_is_not_executed(tmp_path, encoder, marker, kind, zipped, protocol):
    encoder.extra = attacks(marker)[kind]
    encoder.blocks.hooks = [encoder.extra]
    encoder.names = {1: encoder.extra}
    path = tmp_path / "encoder.pt"
    torch.save(encoder, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    check(module_tensors(path, "encoder.pt"), encoder.state_dict())


@pytest.mark.parametrize("kind", list(attacks(Path())))
def test_code_in_the_place_of_a_tensor_or_a_module_is_not_executed(tmp_path, encoder, marker, kind):
    for place in ("_parameters", "_modules", "_buffers"):
        bad = Encoder()
        getattr(bad, place)["evil"] = attacks(marker)[kind]
        torch.save(bad, tmp_path / "bad.pt")
        with pytest.raises(CheckpointError, match=r"evil.*save model\.state_dict\(\) instead"):
            module_tensors(tmp_path / "bad.pt", "bad.pt")


WATCHED = """
import io, sys
from epimer.checkpoints.safe_unpickle import Placeholder, SafeUnpickler

seen, watching = [], False
sys.addaudithook(lambda event, args: seen.append(event) if watching else None)
for text in map(bytes.fromhex, sys.argv[1:]):
    unpickler = SafeUnpickler(io.BytesIO(text))
    watching = True
    found = unpickler.load()
    watching = False
    assert all(isinstance(one, Placeholder) for one in found), found
print(seen)
"""


@pytest.mark.slow
def test_no_name_is_looked_up_and_nothing_happens(marker):
    """Python itself reports what is imported, executed, opened or started; while a file is unpickled it is nothing."""
    content = [*attacks(marker).values(), marker, ValueError("x")]
    texts = [pickle.dumps(content, protocol).hex() for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    command = [sys.executable, "-c", WATCHED, *texts]
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert made.stdout == "[]\n", made.stderr


def by_hand(tmp_path: Path, program: bytes) -> Path:
    path = tmp_path / "hand.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    return path


PROGRAMS = {
    "memo bomb": b"\x80\x02Nr\xff\xff\xff\x7f.",  # the unpickler in C would make room for 2**31 entries
    "extension": b"\x80\x02\x82\x01.",
    "reduce a text": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "build a number": b"\x80\x02K\x01}b.",
    "new object of a number": b"\x80\x02K\x01)\x81.",
    "build a class": b"\x80\x02cos\nsystem\n}b.",
    "append to a class": b"\x80\x02cos\nsystem\nK\x01a.",
    "set an item of a class": b"\x80\x02cos\nsystem\nK\x01K\x02s.",
    "old instance": b"(X\x02\x00\x00\x00idios\nsystem\n.",
    "old object": b"(cos\nsystem\nX\x02\x00\x00\x00ido.",
    "a call of what a call gave": b"\x80\x02cos\nsystem\n)R)R.",
    "persistent text": b"Phello\n.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_written_by_hand_are_refused(tmp_path, name):
    path = by_hand(tmp_path, PROGRAMS[name])
    assert module_tensors(path, "hand.pt") is None
    with pytest.raises(CheckpointError):
        open_file(path)


def test_a_module_inside_itself_ends(tmp_path):
    loop = nn.Module()
    loop._modules["again"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(CheckpointError, match="holds modules without end"):
        module_tensors(tmp_path / "loop.pt", "loop.pt")


def test_one_module_by_endlessly_many_names_ends(tmp_path):
    module = nn.Linear(1, 1)
    for _ in range(60):  # 2**60 names
        module = nn.Sequential(module, module)
    torch.save(module, tmp_path / "many.pt")
    with pytest.raises(CheckpointError, match="holds modules without end"):
        module_tensors(tmp_path / "many.pt", "many.pt")


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path, monkeypatch):
    path = tmp_path / "encoder.pt"
    torch.save(nn.Linear(3, 2, bias=False), path)
    with zipfile.ZipFile(path) as archive:
        (top,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        program = archive.read(top)
    # The shape (2, 3) is pushed as K\x02K\x03\x86; of another shape there are more entries than the file has.
    assert program.count(b"K\x02K\x03\x86") == 1
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"K\x02K\x03\x86", b"K\x7fK\x03\x86"))
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda *_: None)
    with pytest.raises(CheckpointError, match="'weight' claims more entries than are stored"):
        module_tensors(path, "encoder.pt")


def test_a_compressed_archive_is_not_unpacked(tmp_path, encoder):
    """A few bytes could become as many as they like."""
    path, packed = tmp_path / "encoder.pt", tmp_path / "packed.pt"
    torch.save(encoder, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert module_tensors(packed, "packed.pt") is None


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_module_cut_anywhere_is_refused(tmp_path, zipped):
    path = tmp_path / "encoder.pt"
    torch.save(nn.Linear(5, 7), path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for end in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"damaged|cut short|in torch's zip format"):
            TorchFile(path)
        found = None
        with suppress(CheckpointError):
            found = module_tensors(path, "encoder.pt")
        assert found is None


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_size_in_a_pickle_takes_no_memory(tmp_path, zipped):
    """A bytearray, a text and bytes that say they have a quarter of a gigabyte, and have three."""
    path, changed = tmp_path / "module.pt", tmp_path / "changed.pt"
    torch.save(nn.Linear(2, 2), path, _use_new_zipfile_serialization=zipped)
    for opcode in (pickle.BYTEARRAY8, pickle.BINUNICODE8, pickle.BINBYTES8):
        claim = opcode + (1 << 28).to_bytes(8, "little") + b"abc"
        if zipped:
            with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as target:
                for name in source.namelist():
                    target.writestr(name, claim if name.endswith("data.pkl") else source.read(name))
        else:
            changed.write_bytes(pickle.dumps(MAGIC, 2) + claim)
        tracemalloc.start()
        try:
            assert module_tensors(changed, "changed.pt") is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


def test_an_archive_that_says_it_spans_several_disks_is_refused(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": torch.ones(2)}, path)
    whole = bytearray(path.read_bytes())
    place = whole.index(b"PK\6\7")  # where the end of a large archive is found
    whole[place + 16 : place + 20] = (3).to_bytes(4, "little")
    path.write_bytes(whole)
    with pytest.raises(zipfile.BadZipFile):
        zipfile.is_zipfile(path)
    with pytest.raises(CheckpointError, match="is cut short"):
        TorchFile(path)
    with pytest.raises(CheckpointError, match="is cut short"):
        convert(path, tmp_path / "state.safetensors")
