"""From JSON files to records: a file's content tells its kind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from epimer.errors import DataError, short
from epimer.json_values import json_value
from epimer.opened_files import reason
from epimer.records import KINDS, Experiment, MergeRecord, Record
from epimer.report.performance import Performance

EXPECTED = (
    'a record of epimer: JSON with "kind" experiment (epimer bench, epimer demo), diagnosis (epimer diagnose), sweep '
    "(epimer sweep), evaluation or harness (epimer eval), or a merged model's epimer.json"
)
MOST_BYTES = 200_000_000
T = TypeVar("T")


class NotARecordError(DataError):
    """JSON, or not even that, but nothing that epimer wrote."""


@dataclass(frozen=True)
class Records:
    """All that goes into one page, in the order it was read: every record with the name of its file."""

    entries: list[tuple[str, Record]] = field(default_factory=list)
    dates: dict[str, str] = field(default_factory=dict)
    """source -> when its file was written"""

    def of(self, kind: type[T]) -> list[T]:
        return [record for _, record in self.entries if isinstance(record, kind)]

    def add(self, data: Any, source: str, where: str | None = None) -> None:
        """Add one record in plain data; the page calls it `source`, errors call it `where`."""
        record = read_record(data, where or source)
        if isinstance(record, Experiment) and record.name == "performance":
            record = Performance.of(record, where or source)
        if isinstance(record, MergeRecord) and record.request:
            doubles = [
                i
                for i, (_, other) in enumerate(self.entries)
                if isinstance(other, MergeRecord) and other.request == record.request
            ]
            if doubles:  # the folder's record and the one that --record wrote, which has the run's time too
                self._replace(doubles[0], source, record)
                return
        self.entries.append((source, record))

    def _replace(self, i: int, source: str, record: MergeRecord) -> None:
        """Keep the one of two records of a merge that says more, under both names."""
        first, other = self.entries[i]
        assert isinstance(other, MergeRecord)
        both = f"{first}, {source}"
        self.dates[both] = self.dates.get(first, "")
        self.entries[i] = (both, record if record.timings and not other.timings else other)


def read_record(data: Any, where: str) -> Record:
    """Return the record that plain data is of, checked; merge records that name no kind are told by their keys."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind].from_dict(data, where)
    if kind is None and isinstance(data, Mapping) and {"method", "parameters", "weights", "tensors"} <= data.keys():
        return MergeRecord.from_dict(data, where)
    told = "" if kind is None else f" of kind {short(kind)}"
    raise NotARecordError(f"{where} is JSON{told}, but not {EXPECTED}.")


def read_records(paths: Iterable[str | os.PathLike[str]]) -> Records:
    """Read records from files, and from folders that hold some; in a folder, what is not a record is passed over."""
    records = Records()
    for path in map(Path, paths):
        if os.path.isdir(path):
            _read_folder(path, records)
        else:
            _read_file(path, path.name, records)
    return records


def _read_file(path: Path, source: str, records: Records) -> None:
    """Add the record of a file."""
    content = _load(path)
    records.dates[source] = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
    records.add(content, source, str(path))


def gather(data: Iterable[Mapping[str, Any]]) -> Records:
    """Return the records of plain data, as `to_dict` gives it."""
    records = Records()
    for record in data:
        records.add(record, str(record.get("name") or record.get("kind") or "epimer.json"))
    return records


def _read_folder(folder: Path, records: Records) -> None:
    """Add the records of a folder and of the folders directly in it."""
    before = len(records.entries)
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*/*.json")):
        if not file.is_file():  # a pipe would be waited for, and a device read without end
            continue
        try:
            _read_file(file, str(file.relative_to(folder)), records)
        except NotARecordError:
            continue
    if len(records.entries) == before:
        raise DataError(f"{folder} holds no {EXPECTED.removeprefix('a ')}; give a file or another folder.")


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; expected {EXPECTED}.") from error
    except ValueError as error:
        raise DataError(f"{path} is no name that a file can have; expected {EXPECTED}.") from error
    if len(data) > MOST_BYTES:
        raise NotARecordError(f"{path} is larger than any record; expected {EXPECTED}.")
    try:
        return json_value(data)
    except ValueError as error:
        raise NotARecordError(f"{path} is not JSON; expected {EXPECTED}.") from error
