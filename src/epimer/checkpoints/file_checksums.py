"""Checksums of files and their tensors: CRC-32 of weights, joined from those of their parts; SHA-256 of the rest.

The CRC-32 of a tensor is formed by the worker that writes it, while its bytes are in the cache, so that of a whole file
costs nothing more. It finds damage and mix-ups. It does not stop a forger, who could as well edit the record.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO

from epimer.checkpoints.safetensors import parse_header
from epimer.errors import CheckpointError

POLYNOMIAL = 0xEDB88320  # of CRC-32, the coefficient of x^0 in the highest bit
BLOCK = 1 << 24  # bytes that are read at a time

Part = tuple[int, int]
"""the number of bytes and their CRC-32"""


def join_crc(parts: Iterable[Part]) -> Part:
    """Return the length and CRC-32 of parts in a row, from those of each: crc(a b) = x^(8 |b|) crc(a) + crc(b)."""
    total, crc = 0, 0
    for size, other in parts:
        crc = _product(_power(size), crc) ^ other
        total += size
    return total, crc


def _product(a: int, b: int) -> int:
    """Return a·b over GF(2), modulo the polynomial."""
    total = 0
    for place in range(31, -1, -1):  # of x^0, x^1, ... in a
        if a >> place & 1:
            total ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)  # b·x
    return total


@cache
def _power(size: int) -> int:
    """Return x^(8·size) modulo the polynomial; the tensors of a model have few sizes."""
    result, square = 1 << 31, 1 << 23  # 1, and x^8
    while size:
        if size & 1:
            result = _product(result, square)
        square, size = _product(square, square), size >> 1
    return result


def spelled_crc(crc: int) -> str:
    """Return a CRC-32 as eight digits, as other tools print it."""
    return f"{crc:08x}"


def sha256_of(chunks: Iterable[bytes]) -> str:
    """Return the SHA-256 of bytes in a row, in hexadecimal digits."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def hash_files(paths: Sequence[Path], workers: int, advance: Callable[[int, str], None]) -> list[str]:
    """Return the SHA-256 of whole files, several at a time; `advance` is told the bytes that are done and the file."""

    def hashed(path: Path) -> str:
        def blocks() -> Iterable[bytes]:
            with path.open("rb", buffering=0) as file:
                for block in in_blocks(file):
                    yield block
                    advance(len(block), path.name)

        try:
            return sha256_of(blocks())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(hashed, paths))


def in_blocks(file: BinaryIO) -> Iterable[bytes]:
    """Yield what is left of an open file, some of it at a time."""
    while block := file.read(BLOCK):
        yield block


def weights_checksum(header: bytes, starts: Mapping[str, int], tensors: Mapping[str, Sequence[Part]]) -> str:
    """Return the checksum of a safetensors file from its header and the parts of its tensors, in their order."""
    ordered = sorted(starts, key=lambda name: starts[name])
    parts = [(len(header), zlib.crc32(header)), *(join_crc(tensors[name]) for name in ordered)]
    return f"crc32:{spelled_crc(join_crc(parts)[1])}"


def data_checksum(data: bytes) -> str:
    """Return the checksum of a small file from its content."""
    return f"sha256:{sha256_of([data])}"


def read_checksum(open_file: Callable[[], BinaryIO], size: int, kind: str, where: str) -> tuple[str, dict[str, str]]:
    """Return the checksum of a file as it is, and that of every tensor in it, where it is a safetensors file.

    Args:
        open_file: opens the file for reading.
        size: of the file in bytes.
        kind: of the checksum that is recorded, crc32 or sha256.
        where: what to call the file in errors.
    """
    if kind != "crc32":
        with open_file() as file:
            return f"sha256:{sha256_of(in_blocks(file))}", {}
    try:
        with open_file() as file:
            entries = parse_header(file, size, where)[0]
    except CheckpointError:  # damaged, or no longer a safetensors file: it is told by its own checksum
        entries = {}
    tensors: dict[str, str] = {}
    with open_file() as file:
        parts = [read_crc(file, min((entry.start for entry in entries.values()), default=size))]
        for name, entry in entries.items():  # in the order of their data, without gaps
            parts.append(read_crc(file, entry.stop - entry.start))
            tensors[name] = spelled_crc(parts[-1][1])
    return f"crc32:{spelled_crc(join_crc(parts)[1])}", tensors


def read_crc(file: BinaryIO, size: int) -> Part:
    """Return the CRC-32 of the next bytes of a file, and how many there were."""
    crc, left = 0, size
    while left and (block := file.read(min(left, BLOCK))):
        crc = zlib.crc32(block, crc)
        left -= len(block)
    return size - left, crc
