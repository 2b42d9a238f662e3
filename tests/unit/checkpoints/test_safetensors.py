"""Our reader and writer of safetensors headers against the safetensors library, and against files that lie."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor, nn

from epimer.checkpoints.checkpoint import SAMPLE, header
from epimer.checkpoints.safetensors import LONGEST_HEADER, SafetensorsFile, as_bytes, encode_header
from epimer.errors import CheckpointError
from tensors import bits, every_dtype

NAMES = (
    "",
    " ",
    "a.b.weight",
    "größe",
    "重み",
    "🧬",
    'quo"te',
    "back\\slash",
    "line\nbreak",
    "nul\0",
    "../up",
    "x" * 999,
)
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"


def shapes() -> dict[str, Tensor]:
    return {str(shape): torch.randn(shape) for shape in ((), (1,), (0,), (3, 0, 2), (2, 3, 4, 5), (1,) * 12)}


def states() -> dict[str, dict[str, Tensor]]:
    return {"dtypes": every_dtype(2, 3), "shapes": shapes(), "names": {name: torch.randn(3) for name in NAMES}}


def ours(path: Path) -> dict[str, Tensor]:
    """Read a whole file with our reader, ties left out."""
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.headers if name not in file.ties}


def write_ours(path: Path, state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    text, _ = encode_header(state, {"format": "pt"} if metadata is None else metadata)
    path.write_bytes(text + b"".join(bytes(as_bytes(W.contiguous())) for W in state.values()))
    return path


def write_raw(path: Path, table: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file by hand: any header, any length, any data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("state", states().values(), ids=states())
def test_reads_what_the_library_writes(file, state):
    safetensors.torch.save_file(state, file)
    read = SafetensorsFile(file)
    assert {name: bits(read.read(name)) for name in read.headers} == {name: bits(W) for name, W in state.items()}
    assert {n: (W.dtype, W.shape) for n, W in read.headers.items()} == {n: (W.dtype, W.shape) for n, W in state.items()}
    assert all(W.is_meta for W in read.headers.values())
    assert not read.ties


@pytest.mark.parametrize("state", states().values(), ids=states())
def test_the_library_reads_what_we_write(file, state):
    found = safetensors.torch.load_file(write_ours(file, state))
    assert {name: bits(W) for name, W in found.items()} == {name: bits(W) for name, W in state.items()}


def test_metadata_goes_both_ways(file):
    metadata = {"format": "pt", "größe": "重み", "": ""}
    write_ours(file, {"a": torch.ones(2)}, metadata)
    with safetensors.safe_open(file, "pt") as library:
        assert library.metadata() == metadata
    safetensors.torch.save_file({"a": torch.ones(2)}, file, metadata)
    assert SafetensorsFile(file).metadata == metadata


def test_tensors_begin_where_the_header_says(file):
    state = states()["shapes"]
    text, starts = encode_header(state, {})
    write_ours(file, state, {})
    data = file.read_bytes()
    assert len(text) % 8 == 0
    for name, W in state.items():
        assert data[starts[name] :][: W.nbytes] == bits(W)[2]


def test_headers_come_in_the_order_of_the_data(file):
    tables = {name: {**GOOD, "data_offsets": [8 * i, 8 * i + 8]} for name, i in (("c", 2), ("a", 0), ("b", 1))}
    assert list(SafetensorsFile(write_raw(file, tables, bytes(24))).headers) == ["a", "b", "c"]


def test_a_tensor_is_memory_of_its_own(file):
    safetensors.torch.save_file({"a": torch.ones(4)}, file)
    read = SafetensorsFile(file)
    read.read("a").zero_()
    assert torch.equal(read.read("a"), torch.ones(4))
    assert torch.equal(safetensors.torch.load_file(file)["a"], torch.ones(4))


def test_rows(file):
    V = torch.randn(7, 2, 3)
    safetensors.torch.save_file({"before": torch.ones(5), "a": V}, file, {"tied": "a"})
    read = SafetensorsFile(file)
    for rows in ((0, 7), (0, 1), (2, 5), (6, 7), (3, 3)):
        assert torch.equal(read.read("a", rows), V[slice(*rows)])
        assert torch.equal(read.read("tied", rows), V[slice(*rows)])


def test_a_file_without_tensors(file):
    assert ours(write_raw(file, {})) == {} == safetensors.torch.load_file(file)
    assert ours(write_raw(file, {"__metadata__": {"format": "pt"}})) == {}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3)


def test_ties_of_save_model_are_recognised(file):
    model = Tied()
    safetensors.torch.save_model(model, str(file))
    assert "head.weight" not in safetensors.torch.load_file(file)
    read = SafetensorsFile(file)
    assert read.ties == {"head.weight": "embed.weight"}
    assert {n: bits(read.read(n)) for n in read.headers} == {n: bits(W) for n, W in model.state_dict().items()}
    assert read.sample("head.weight") == read.sample("embed.weight")


@pytest.mark.parametrize(
    "metadata",
    [{"a": "b"}, {"format": "a"}, {"x": "nowhere"}, {"x": "y", "y": "x"}],
    ids=["present", "format", "lost", "loop"],
)
def test_metadata_that_is_no_tie(file, metadata):
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    safetensors.torch.save_file(state, file, metadata)
    read = SafetensorsFile(file)
    assert not read.ties
    assert read.headers.keys() == state.keys()


def test_the_library_reads_our_ties(file):
    W = torch.randn(5, 3)
    write_ours(
        file, {"embed.weight": W, "norm.weight": torch.ones(3), "norm.bias": W[0]}, {"head.weight": "embed.weight"}
    )
    model = Tied()
    missing, unexpected = safetensors.torch.load_model(model, file)
    assert not missing
    assert not unexpected
    assert torch.equal(model.head.weight, W)


# fingerprints


def fingerprint(file: Path, state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    safetensors.torch.save_file(state, file, metadata)
    return SafetensorsFile(file).fingerprint


def test_fingerprint_knows_tensors_not_files(file):
    state = {**every_dtype(2, 3), **shapes()}
    found = fingerprint(file, state)
    assert len(found) == 32
    assert found == fingerprint(file, dict(reversed(state.items())), {"by": "someone else"})
    assert found == SafetensorsFile(write_ours(file.with_stem("other"), state)).fingerprint


def test_fingerprint_differs_with_names_dtypes_shapes_and_values(file):
    W = torch.zeros(4, 6)
    state = {"a": W, "b": torch.ones(3)}
    variants = [
        state,
        {"A": W, "b": state["b"]},
        {"a": state["b"], "b": W},
        {"a": W},
        {**state, "c": torch.ones(0)},
        {**state, "a": W.int()},
        {**state, "a": W.half()},
        {**state, "a": W.reshape(6, 4)},
        {**state, "a": W.reshape(24)},
        {**state, "a": W.reshape(1, 4, 6)},
        {**state, "a": W.index_fill(0, torch.tensor(3), 1e-30)},
        {"ab": W, "": state["b"]},
    ]
    assert len({fingerprint(file, variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize("where", [0, SAMPLE // 4 - 1, 25_000, 49_999])
def test_fingerprint_sees_the_ends_and_the_middle_of_a_large_tensor(file, where):
    W = torch.zeros(50_000)
    before = fingerprint(file, {"a": W})
    W[where] = 1
    assert fingerprint(file, {"a": W}) != before


def test_fingerprint_differs_after_fine_tuning(file):
    W = torch.randn(300, 200).bfloat16()
    assert fingerprint(file, {"a": W}) != fingerprint(
        file, {"a": (W.float() + 0.01 * torch.randn(300, 200)).bfloat16()}
    )


def test_state_tells_that_a_file_was_written_to(file):
    safetensors.torch.save_file({"a": torch.ones(2)}, file)
    read = SafetensorsFile(file)
    before = read.state
    assert before == read.state
    safetensors.torch.save_file({"a": torch.ones(3)}, file)
    assert read.state != before
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        _ = read.state


# files that lie

A = json.dumps(GOOD).encode()
BAD_HEADERS: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"hello, world", b"", "its header is not JSON"),
    "not UTF-8": (b'{"\xff": ' + A + b"}", bytes(8), "its header is not JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", b"", "its header is not JSON"),
    "cut JSON": (b'{"a": ' + A[:-1], bytes(8), "its header is not JSON"),
    "two values": (b"{}{}", b"", "its header is not JSON"),
    "a lone surrogate": (b'{"\\ud800": ' + A + b"}", bytes(8), "model.safetensors"),
    "nested deeply": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "its header is not JSON"),
    "nested objects": (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, b"", "its header is not JSON"),
    "a number without end": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "its header is not JSON"),
    "a list": ([], b"", "its header is a list"),
    "a text": ("text", b"", "its header is a str"),
    "null": (None, b"", "its header is a NoneType"),
    "the same name twice": (b'{"a": %s, "a": %s}' % (A, A), bytes(8), "has 'a' twice"),
    "the same field twice": (b'{"a": {"dtype": "F32", ' + A[1:] + b"}", bytes(8), "has 'dtype' twice"),
    "metadata twice": (b'{"__metadata__": {}, "__metadata__": {}}', b"", "has '__metadata__' twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map strings to strings"),
    "metadata as a list": ({"__metadata__": []}, b"", "__metadata__ must map strings to strings"),
    "an entry that is a list": ({"a": []}, b"", "'a' lacks dtype, shape or data_offsets"),
    "an entry that is null": ({"a": None}, b"", "'a' lacks dtype, shape or data_offsets"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), "'a' lacks dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "'a' lacks dtype, shape"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "'a' lacks dtype, shape or data_offsets"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 8, 8]}}, bytes(8), "'a' has shape"),
    "offsets as a text": ({"a": {**GOOD, "data_offsets": "08"}}, bytes(8), "'a' has shape"),
    "offsets reversed": ({"a": {**GOOD, "data_offsets": [8, 0]}}, bytes(8), "offsets span -8"),
    "negative offsets": ({"a": {**GOOD, "data_offsets": [-8, 0]}}, bytes(8), "model.safetensors"),
    "a negative zero": (b'{"a": ' + A.replace(b"[0,", b"[-0,") + b"}", bytes(8), "model.safetensors"),
    "float offsets": ({"a": {**GOOD, "data_offsets": [0.0, 8.0]}}, bytes(8), "'a' has shape"),
    "boolean offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"1", "'a' has shape"),
    "huge offsets": ({"a": {**GOOD, "data_offsets": [2**64, 2**64 + 8]}}, bytes(8), "'a' has shape"),
    "offsets beyond the end": (
        {"a": {**GOOD, "data_offsets": [2**40, 2**40 + 8]}},
        bytes(8),
        "unused bytes before 'a'",
    ),
    "a negative side": ({"a": {**GOOD, "shape": [-2]}}, bytes(8), "model.safetensors"),
    "two negative sides": ({"a": {**GOOD, "shape": [-1, -2]}}, bytes(8), "model.safetensors"),
    "a float side": ({"a": {**GOOD, "shape": [2.0]}}, bytes(8), "'a' has shape"),
    "NaN as a side": (b'{"a": ' + A.replace(b"[2]", b"[NaN]") + b"}", bytes(8), "model.safetensors"),
    "a boolean side": ({"a": {**GOOD, "shape": [True, 2]}}, bytes(8), "'a' has shape"),
    "a null side": ({"a": {**GOOD, "shape": [None]}}, bytes(8), "'a' has shape"),
    "a nested shape": ({"a": {**GOOD, "shape": [[2]]}}, bytes(8), "'a' has shape"),
    "a shape of a text": ({"a": {**GOOD, "shape": "2"}}, bytes(8), "'a' has shape"),
    "a huge side": ({"a": {**GOOD, "shape": [2**64]}}, bytes(8), "'a' has shape"),
    "sides that overflow to the right size": ({"a": {**GOOD, "shape": [2**33, 2**31 + 1]}}, bytes(8), "'a'"),
    "sides that overflow before a zero": (
        {"a": {"dtype": "F32", "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]}},
        b"",
        "'a'",
    ),
    "sides with a product of thousands of digits": ({"a": {**GOOD, "shape": [2**61] * 300}}, bytes(8), "'a'"),
    "a shape that needs more bytes": (
        {"a": {**GOOD, "shape": [3]}},
        bytes(8),
        "takes 12 bytes, but its offsets span 8",
    ),
    "a shape that needs less bytes": ({"a": {**GOOD, "shape": []}}, bytes(8), "takes 4 bytes, but its offsets span 8"),
    "an unknown dtype": ({"a": {**GOOD, "dtype": "F33"}}, bytes(8), "'a' has dtype 'F33'; known are F64, F32"),
    "a dtype in lower case": ({"a": {**GOOD, "dtype": "f32"}}, bytes(8), "'a' has dtype 'f32'"),
    "a dtype by torch's name": ({"a": {**GOOD, "dtype": "torch.float32"}}, bytes(8), "'a' has dtype 'torch.float32'"),
    "a dtype that is null": ({"a": {**GOOD, "dtype": None}}, bytes(8), "'a' has dtype None"),
    "a dtype that is a list": ({"a": {**GOOD, "dtype": ["F32"]}}, bytes(8), "'a' has dtype"),
    "the same data twice": ({"a": GOOD, "b": GOOD}, bytes(8), "the data of 'b' and 'a' overlap"),
    "data that overlap": ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, bytes(12), "'b' and 'a' overlap"),
    "an empty tensor inside another": (
        {"a": GOOD, "b": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}},
        bytes(8),
        "'b' and 'a' overlap",
    ),
    "a hole": ({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, bytes(20), "4 unused bytes before 'b'"),
    "a hole at the start": ({"a": {**GOOD, "data_offsets": [4, 12]}}, bytes(12), "4 unused bytes before 'a'"),
    "bytes at the end": ({"a": GOOD}, bytes(9), "1 bytes that no tensor owns at its end"),
    "bytes and no tensor": ({}, bytes(8), "8 bytes that no tensor owns"),
    "data cut": ({"a": GOOD}, bytes(7), "truncated: its tensors take 8 bytes, the file has 7"),
    "data missing": ({"a": GOOD}, b"", "truncated: its tensors take 8 bytes, the file has 0"),
}
LENIENT = {"the same name twice"}  # the library takes the last one


@pytest.mark.parametrize(("table", "data", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_header_that_lies_is_refused(file, request, table, data, message):
    write_raw(file, table, data)
    with pytest.raises(CheckpointError) as caught:
        _ = SafetensorsFile(file).fingerprint
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    if request.node.callspec.id not in LENIENT:
        with pytest.raises(SafetensorError):
            safetensors.torch.load_file(file)


@pytest.mark.parametrize(
    "length", [0, 1, 7, 63, 10_000, LONGEST_HEADER, LONGEST_HEADER + 1, 2**31, 2**63, 2**64 - 1], ids=str
)
def test_a_header_length_that_lies_is_refused(file, length):
    write_raw(file, {"a": GOOD}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file|header is not JSON|no tensor owns"):
        SafetensorsFile(file)
    with pytest.raises(SafetensorError):
        safetensors.torch.load_file(file)


def test_a_header_longer_than_the_format_allows_is_not_read(file, monkeypatch):
    write_raw(file, b"", length=LONGEST_HEADER + 1)
    with file.open("r+b") as handle:
        handle.truncate(2 * LONGEST_HEADER)  # sparse: takes no room
    monkeypatch.setattr("epimer.checkpoints.safetensors._parse", lambda *_: pytest.fail("the header was read"))
    with pytest.raises(CheckpointError, match="says its header has 100000001 bytes, the file has 200000000"):
        SafetensorsFile(file)


def test_a_file_cut_anywhere_is_refused(file):
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(0), "größe": torch.ones(1, 3)}, file)
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsFile(file)


def test_a_git_lfs_pointer_says_what_to_do(file):
    file.write_bytes(LFS)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, not the weights; run `git lfs pull`"):
        SafetensorsFile(file)


def test_what_is_not_a_readable_file_is_refused(tmp_path, file):
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        SafetensorsFile(file)
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)


def test_a_file_that_changes_after_it_was_opened(file):
    safetensors.torch.save_file({"a": torch.ones(1000)}, file)
    read = SafetensorsFile(file)
    with file.open("r+b") as handle:
        handle.truncate(1000)
    with pytest.raises(CheckpointError, match="ends too early"):
        read.read("a")
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read.sample("a")


VALID = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.arange(10).to(torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "ß": torch.tensor(True),
    "scalar": torch.tensor(1, dtype=torch.int64),
}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_damage_to_the_header_is_refused_or_read_as_the_library_does(fuzzed, data):
    safetensors.torch.save_file(VALID, fuzzed, {"format": "pt", "tied": "a"})
    damaged = bytearray(fuzzed.read_bytes())
    end = 8 + int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 7), st.integers(8, end - 1)))
        damaged[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789-.eE"{}[],: FIUB\\')))
    fuzzed.write_bytes(damaged)
    refusal = ""
    try:
        read = SafetensorsFile(fuzzed)
        found = {name: bits(read.read(name)) for name in read.headers}
        assert len(read.fingerprint) == 32
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert str(fuzzed) in refusal
    else:
        library = {name: bits(W) for name, W in safetensors.torch.load(bytes(damaged)).items()}
        assert found == library | {name: library[twin] for name, twin in read.ties.items()}


def test_meta_tensors_are_enough_for_a_header():
    state = every_dtype(2, 3)
    assert encode_header({n: header(W.shape, W.dtype) for n, W in state.items()}, {}) == encode_header(state, {})


def test_tensors_of_one_shape_share_their_header(tmp_path):
    """A file may list a million tensors, and each header without data takes half a kilobyte."""
    safetensors.torch.save_file(
        {f"layers.{i}.w": torch.full((2, 3), float(i)) for i in range(50)}, tmp_path / "model.safetensors"
    )
    opened = SafetensorsFile(tmp_path / "model.safetensors")
    assert len({id(W) for W in opened.headers.values()}) == 1
    assert all(torch.equal(opened.read(f"layers.{i}.w"), torch.full((2, 3), float(i))) for i in range(50))
