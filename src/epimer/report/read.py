"""From JSON files to records: a file's content tells its kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from epimer.errors import DataError, short
from epimer.records import (
    KINDS,
    Diagnosis,
    EvaluationRecord,
    Experiment,
    HarnessRecord,
    MergeRecord,
    Record,
    SweepRecord,
)
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
class Sourced(Generic[T]):
    """A record and the file it came from."""

    record: T
    source: str


@dataclass(frozen=True)
class Records:
    """All that goes into one page, by kind, in the order it was read."""

    performances: list[Sourced[Performance]] = field(default_factory=list)
    """the experiments called performance, as scores"""
    experiments: list[Sourced[Experiment]] = field(default_factory=list)
    """all of them, performances included"""
    diagnoses: list[Sourced[Diagnosis]] = field(default_factory=list)
    sweeps: list[Sourced[SweepRecord]] = field(default_factory=list)
    evaluations: list[Sourced[EvaluationRecord]] = field(default_factory=list)
    harnesses: list[Sourced[HarnessRecord]] = field(default_factory=list)
    merges: list[Sourced[MergeRecord]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sourced[Any]]:
        """Go through all of them, kind by kind."""
        return chain.from_iterable(vars(self).values())

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return any(vars(self).values())

    def add(self, data: Any, source: str, where: str | None = None) -> None:
        """Add one record in plain data; the page calls it `source`, errors call it `where`."""
        where = where or source
        record = read_record(data, where)
        if isinstance(record, Experiment) and record.name == "performance":
            self.performances.append(Sourced(Performance.of(record, where), source))
        lists: dict[type[Record], list[Any]] = {
            Experiment: self.experiments, Diagnosis: self.diagnoses, SweepRecord: self.sweeps, MergeRecord: self.merges,
            EvaluationRecord: self.evaluations, HarnessRecord: self.harnesses,
        }  # fmt: skip
        lists[type(record)].append(Sourced(record, source))


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
        if path.is_dir():
            _read_folder(path, records)
        else:
            records.add(_load(path), path.name, str(path))
    return records


def gather(data: Iterable[Mapping[str, Any]]) -> Records:
    """Return the records of plain data, as `to_dict` gives it."""
    records = Records()
    for one in data:
        records.add(one, str(one.get("name") or one.get("kind") or "epimer.json"))
    return records


def _read_folder(folder: Path, records: Records) -> None:
    """Add the records of a folder and of the folders directly in it."""
    some = False
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*/*.json")):
        try:
            records.add(_load(file), str(file.relative_to(folder)), str(file))
        except NotARecordError:
            continue
        some = True
    if not some:
        raise DataError(f"{folder} holds no {EXPECTED.removeprefix('a ')}; give a file or another folder.")


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise NotARecordError(f"{path} is larger than any record; expected {EXPECTED}.")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; expected {EXPECTED}.") from error
    except (ValueError, RecursionError) as error:
        raise NotARecordError(f"{path} is not JSON; expected {EXPECTED}.") from error
