"""Read recordings: PCM `.wav` files by Python itself, all else by soundfile where it is installed."""

from __future__ import annotations

import io
import wave
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from epimer.errors import DataError, short
from epimer.tasks.tables import Table

HIGHEST = 10_000_000  # samples a second


class Recording(NamedTuple):
    """A recording's samples, [time] between -1 and 1, channels averaged, and how many there are a second."""

    samples: np.ndarray
    rate: int


def read_recording(table: Table, i: int, column: str) -> Recording:
    """Return the recording of a row: a path, bytes, or a struct: `bytes` and `path`, or `array` and `sampling_rate`."""
    value: Any = table.row(i).get(column)
    where = table.where(i)
    if isinstance(value, dict) and value.get("array") is not None and isinstance(value.get("sampling_rate"), int):
        try:
            with np.errstate(over="ignore"):  # what becomes infinite is refused below
                recording = Recording(np.asarray(value["array"], dtype=np.float32), value["sampling_rate"])
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where} has {short(value['array'])} as a recording, expected numbers.") from error
    else:
        recording = _decode(table.source(i, value, column, "recording"), where)
    if recording.samples.ndim != 1 or not len(recording.samples) or not np.isfinite(recording.samples).all():
        raise DataError(f"{where} has a recording in {column!r} that is empty or not finite; leave the row out.")
    if not 0 < recording.rate <= HIGHEST:
        raise DataError(
            f"{where} has a recording in {column!r} of {short(recording.rate)} samples a second; replace it."
        )
    return recording


def _decode(source: Path | bytes, where: str) -> Recording:
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        name = Path(str(source)).name
        raise DataError(f"{where}: the recording {name} cannot be read ({error.strerror}); copy it there.") from error
    try:
        return _from_wave(data)
    except (wave.Error, EOFError, ValueError, TypeError, RuntimeError):  # another format, or a damaged .wav file
        pass
    try:
        soundfile = import_module("soundfile")
    except ImportError as error:
        remedy = "write it as 16-bit .wav (ffmpeg -i FILE -c:a pcm_s16le FILE.wav), or pip install soundfile"
        raise DataError(f"{where} is not a PCM .wav recording; {remedy}.") from error
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:  # soundfile passes on what its library says
        raise DataError(f"{where} is not a recording that can be decoded ({short(str(error))}); replace it.") from error
    return Recording(samples.mean(1), int(rate))


def _from_wave(data: bytes) -> Recording:
    """Decode integers of one to four bytes; those of one byte are unsigned."""
    with wave.open(io.BytesIO(data)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        raw = file.readframes(file.getnframes())
    if width not in (1, 2, 3, 4):
        raise ValueError(f"{width} bytes per sample")
    if width == 1:
        values = np.frombuffer(raw, np.uint8).astype(np.float64) - 128
    elif width == 3:  # as the upper bytes of four
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = (padded.view("<i4")[:, 0] >> 8).astype(np.float64)
    else:
        values = np.frombuffer(raw, f"<i{width}").astype(np.float64)
    scaled = values / 2.0 ** (8 * width - 1)
    return Recording(scaled.reshape(-1, channels).mean(1).astype(np.float32), rate)
