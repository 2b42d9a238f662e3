"""Recordings: what they hold, and damaged ones refused in one line that names the row."""

import io
import json
import wave

import numpy as np
import pytest

from epimer.errors import DataError
from epimer.tasks.audio import read_recording
from epimer.tasks.data import open_data


def recorded(width, values=b"\1\2\3\4" * 12, rate=8000):
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, width, rate, 0, "NONE", ""))
        file.writeframes(values)
    return made.getvalue()


def row(tmp_path, audio):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"audio": audio}))
    return open_data(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integers_of_every_width(tmp_path, width):
    (tmp_path / "a.wav").write_bytes(recorded(width))
    found = read_recording(row(tmp_path, "a.wav"), 0, "audio")
    first = int.from_bytes(b"\1\2\3\4"[:width], "little", signed=True) - (128 if width == 1 else 0)
    assert (len(found.samples), found.rate) == (48 // width, 8000)
    assert found.samples[0] == np.float32(first / 2 ** (8 * width - 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:20],
        lambda data: data.replace(b"data", b"dat\0"),
        lambda data: data[:34] + (5632).to_bytes(2, "little") + data[36:],
        lambda data: data[:24] + bytes(4) + data[28:],
        lambda data: data[:16] + b"\xff" * 8 + data[24:],
        lambda data: b"",
    ],
    ids=["cut", "no data", "bits", "rate", "header", "empty"],
)
def test_a_damaged_recording_is_refused(tmp_path, damage):
    (tmp_path / "a.wav").write_bytes(damage(recorded(2)))
    with pytest.raises(DataError, match=r"rows\.jsonl line 1"):
        read_recording(row(tmp_path, "a.wav"), 0, "audio")


@pytest.mark.parametrize("array", [{"a": 1}, "text", [1, "x"], [[1, 2], [3]], [1e300], [10**299], [[1.0]], []])
def test_an_array_that_is_no_recording_is_refused(tmp_path, array):
    with pytest.raises(DataError, match=r"rows\.jsonl line 1"):
        read_recording(row(tmp_path, {"array": array, "sampling_rate": 8000}), 0, "audio")


@pytest.mark.parametrize("rate", [0, -1, 10**299])
def test_a_rate_that_is_none_is_refused(tmp_path, rate):
    with pytest.raises(DataError, match="samples a second"):
        read_recording(row(tmp_path, {"array": [0.5], "sampling_rate": rate}), 0, "audio")
