"""Checksums of whole files from those of their parts: the numbers that zlib and hashlib give for all bytes at once."""

import hashlib
import io
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from epimer.checkpoints.file_checksums import data_checksum, join_crc, read_checksum, weights_checksum
from epimer.checkpoints.writer import encode_tensors, plan_shards

TENSORS = {
    "a": torch.arange(7.0),
    "b": torch.ones(3, 5, dtype=torch.bfloat16),
    "none": torch.zeros(0),
    "c": torch.ones(2),
}


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_parts_join_to_the_checksum_of_all_bytes(parts):
    whole = b"".join(parts)
    assert join_crc([(len(part), zlib.crc32(part)) for part in parts]) == (len(whole), zlib.crc32(whole))


def test_long_parts_join_too():
    parts = [bytes(1 << 20), b"x" * 12_345, bytes(range(256)) * 999]
    assert join_crc([(len(part), zlib.crc32(part)) for part in parts])[1] == zlib.crc32(b"".join(parts))


def test_a_file_of_weights_has_the_checksum_of_its_bytes():
    (shard,) = plan_shards(TENSORS, {}, 1 << 40)
    whole = encode_tensors(TENSORS)
    raw = {name: W.view(torch.uint8).numpy().tobytes() if W.numel() else b"" for name, W in TENSORS.items()}
    parts = {name: [(len(data), zlib.crc32(data))] for name, data in raw.items()}
    parts["b"] = [(10, zlib.crc32(raw["b"][:10])), (20, zlib.crc32(raw["b"][10:]))]
    expected = f"crc32:{zlib.crc32(whole):08x}"
    assert weights_checksum(shard.header, shard.starts, parts) == expected
    found, tensors = read_checksum(lambda: io.BytesIO(whole), len(whole), "crc32", "it")
    assert found == expected
    assert tensors == {name: f"{zlib.crc32(data):08x}" for name, data in raw.items()}


@pytest.mark.parametrize("data", [b"", b"not a model", save(TENSORS)[:-3]])
def test_what_is_no_file_of_weights_still_has_a_checksum(data):
    assert read_checksum(lambda: io.BytesIO(data), len(data), "crc32", "it") == (f"crc32:{zlib.crc32(data):08x}", {})


def test_other_files_have_a_sha256():
    expected = f"sha256:{hashlib.sha256(b'config').hexdigest()}"
    assert data_checksum(b"config") == expected
    assert read_checksum(lambda: io.BytesIO(b"config"), 6, "sha256", "it") == (expected, {})
