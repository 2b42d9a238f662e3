"""Read safetensors files: a strict look at the header, then positioned reads of single tensors.

Files are read, not mapped: the pages of a mapped file count as this process's memory until it is unmapped, and a
merge of many files would seem to need all of them at once.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import (
    PACKED_BITS,
    Checkpoint,
    Rows,
    allocate_with_bytes,
    header,
    is_text,
    nbytes,
    sample_ranges,
)
from epimer.errors import CheckpointError
from epimer.json_values import RepeatedKeyError, json_value
from epimer.opened_files import OpenedFile

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # the format's own limit


class Entry(NamedTuple):
    """One tensor of a file: what it is and the bytes it occupies."""

    W: Tensor
    start: int
    stop: int
    dtype: str = ""
    """as the file has it"""


class SafetensorsFile(Checkpoint):
    """One `.safetensors` file."""

    streams = True

    def __init__(self, path: Path, where: str = "") -> None:
        self.path, self.files, self.where, self.name = path, [path], where or str(path), path.stem
        self.file = OpenedFile(path, self.where)
        with self.file.open() as file:
            self.entries, self.metadata = parse_header(file, os.fstat(file.fileno()).st_size, self.where)
        self.headers = {name: entry.W for name, entry in self.entries.items()}
        self.packed = packed_dtypes(self.entries)
        self.ties = {}
        for name, twin in self.metadata.items():  # tensors that were left out because another name holds them
            if twin in self.entries and name not in self.entries and name != "format":
                self.ties[name], self.headers[name] = twin, self.entries[twin].W

    def read(self, name: str, rows: Rows = None) -> Tensor:
        part = self._part(name, rows)
        W, data = allocate_with_bytes(part.W.shape, part.W.dtype)
        self.file.fill(data, part.start)
        return W

    def prefetch(self, name: str, rows: Rows = None) -> None:
        part = self._part(name, rows)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError), self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), part.start, part.stop - part.start, os.POSIX_FADV_WILLNEED)

    def _part(self, name: str, rows: Rows) -> Entry:
        """Return some rows of a tensor as if they were a tensor of the file."""
        entry = self.entries[self.ties.get(name, name)]
        if name in self.packed:
            raise CheckpointError(f"{self.where}: {name!r} is {entry.dtype}, which torch does not compute with.")
        if rows is None:
            return entry
        W, row = entry.W[slice(*rows)], nbytes(entry.W[:1])
        return Entry(W, entry.start + rows[0] * row, entry.start + rows[1] * row)

    def sample(self, name: str) -> bytes:
        entry = self.entries[self.ties.get(name, name)]
        ranges = sample_ranges(entry.stop - entry.start)
        return b"".join(self.file.read([(entry.start + start, entry.start + stop) for start, stop in ranges]))


def packed_dtypes(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the tensors of a file that can only be listed, with their dtype."""
    return {name: entry.dtype for name, entry in entries.items() if entry.dtype in PACKED_BITS}


def as_bytes(W: Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as a writable array of bytes."""
    return W.reshape(-1).view(torch.uint8).numpy() if W.numel() else bytearray()


def description(W: Tensor) -> str:
    """Return the dtype and the shape of a tensor, as `F32 12x10`."""
    return f"{DTYPE_NAMES[W.dtype]} {'x'.join(map(str, W.shape))}"


def tensor_checksum(W: Tensor) -> str:
    """Return the description of a CPU tensor and the CRC-32 of its bytes, as `F32 12x10 0a1b2c3d`."""
    return f"{description(W)} {zlib.crc32(as_bytes(W.contiguous())):08x}"


def parse_header(file: BinaryIO, size: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of an open file of `size` bytes in the order of their data, and its metadata.

    What the format does not allow is refused.
    """
    first = file.read(8)
    if first.startswith(b"version "):
        raise CheckpointError(f"{where} is a Git LFS pointer, not the weights; run `git lfs pull` there.")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > LONGEST_HEADER or 8 + length > size:
        raise CheckpointError(
            f"{where} is not a whole safetensors file: it says its header has {length} bytes, "
            f"the file has {size}; copy or download it again."
        )
    text = file.read(length)
    parsed = _parse(text, where)
    del text
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings; save the file again.")
    entries = {name: _entry(name, parsed.pop(name), where) for name in [*parsed]}  # of a million, one copy at a time
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_layout(entries, size - 8 - length, where)
    start = 8 + length
    for name, entry in entries.items():
        entries[name] = Entry(entry.W, start + entry.start, start + entry.stop, entry.dtype)
    return entries, metadata


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json_value(text.decode(), strict=True, compact=_compact)
    except RepeatedKeyError as error:
        raise CheckpointError(f"{where} has {error.key!r} twice in its header; save the file again.") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not a safetensors file: its header is not JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is not a safetensors file: its header is a {type(parsed).__name__}.")
    return parsed


class _Compact(NamedTuple):
    """A well-formed description of a tensor, in a third of the memory that its JSON object takes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _compact(table: dict[str, Any]) -> Any:
    """Return what to keep of an object in a header: of a well-formed description its values."""
    dtype: Any = table.get("dtype")
    shape: Any = table.get("shape")
    offsets: Any = table.get("data_offsets")
    if len(table) != 3 or not isinstance(dtype, str) or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        return table
    return _Compact(sys.intern(dtype), tuple(shape), *offsets)


def _entry(name: str, description: Any, where: str) -> Entry:
    """Return one tensor of a header, its offsets relative to the end of the header."""

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"{where}: {name!r} {problem}; save the file again.")

    if isinstance(description, _Compact):
        offsets = [description.start, description.stop]
        description = {"dtype": description.dtype, "shape": [*description.shape], "data_offsets": offsets}
    if not isinstance(description, dict) or not {"dtype", "shape", "data_offsets"} <= description.keys():
        raise refuse("lacks dtype, shape or data_offsets")
    dtype, shape, offsets = (description[key] for key in ("dtype", "shape", "data_offsets"))
    bits = PACKED_BITS | {known: 8 * torch_dtype.itemsize for known, torch_dtype in DTYPES.items()}
    if str(dtype) not in bits:
        raise CheckpointError(f"{where}: {name!r} has dtype {dtype!r}; known are {', '.join(DTYPES)}.")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise refuse(f"has shape {shape!r} and offsets {offsets!r}")
    if not is_text(name):
        raise refuse("is not a valid name")
    start, stop = offsets
    expected = bits[dtype]
    for side in shape:
        expected *= side
        if expected >= 2**66:
            raise refuse("has a shape whose size overflows")
    expected = -(-expected // 8)
    if stop - start != expected:
        size = f"of shape {tuple(shape)} in {dtype} takes {expected} bytes"
        raise refuse(f"{size}, but its offsets span {stop - start}")
    return Entry(header(tuple(shape), DTYPES.get(dtype, torch.uint8)), start, stop, dtype)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _check_layout(entries: dict[str, Entry], size: int, where: str) -> None:
    """Refuse tensors that overlap, gaps between them, and a file that is longer or shorter than they are."""
    end, previous = 0, ""
    for name, entry in entries.items():
        if entry.start < end:
            raise CheckpointError(f"{where}: the data of {name!r} and {previous!r} overlap; save the file again.")
        if entry.start > end:
            raise CheckpointError(f"{where} has {entry.start - end} unused bytes before {name!r}; save it again.")
        end, previous = entry.stop, name
    if end > size:
        raise CheckpointError(
            f"{where} is truncated: its tensors take {end} bytes, the file has {size}; copy or download it again."
        )
    if end < size:
        raise CheckpointError(f"{where} has {size - end} bytes that no tensor owns at its end; save it again.")


def encode_header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors in this order, and where in the file each begins."""
    table: dict[str, Any] = {"__metadata__": metadata}
    end, starts = 0, {}
    for name, W in tensors.items():
        starts[name] = end
        end += nbytes(W)
        table[name] = {"dtype": DTYPE_NAMES[W.dtype], "shape": list(W.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    offset = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: offset + start for name, start in starts.items()}
