"""From JSON files to records: what kind a file is of is told by what is in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from epimer.errors import DataError, short
from epimer.recipe.yaml_lines import spell
from epimer.records import Diagnosis, MergeRecord
from epimer.report.kinds import Evaluation, Experiment, Harness, Performance, Records, Score, Sourced, Sweep

FORMAT = 1
EXPECTED = (
    'a record of epimer: JSON with "kind" experiment (epimer bench, epimer demo), diagnosis (epimer diagnose), sweep '
    "(epimer sweep), evaluation or harness (epimer eval), or a merged model's epimer.json"
)
PLAIN: dict[str, tuple[type, str]] = {
    "sweep": (Sweep, "sweeps"),
    "evaluation": (Evaluation, "evaluations"),
    "harness": (Harness, "harnesses"),
}
"""kind -> what it is read as, and where records of it are gathered; nothing else is checked of these"""
MOST_BYTES = 200_000_000
T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Experiment, Score, Diagnosis, Sweep, MergeRecord, Evaluation, Harness)
}


class NotARecordError(DataError):
    """JSON, or not even that, but nothing that epimer wrote."""


def read_records(paths: Iterable[str | os.PathLike[str]]) -> Records:
    """Read records from files, and from folders that hold some; in a folder, what is no record is passed over."""
    found = Records()
    for given in paths:
        path = Path(given)
        if path.is_dir():
            _read_folder(path, found)
        else:
            add(found, _load(path), path.name, str(path))
    return found


def gather(given: Iterable[Mapping[str, Any]]) -> Records:
    """Return records that are at hand as plain data, as `to_dict` gives them."""
    found = Records()
    for one in given:
        add(found, one, str(one.get("name") or one.get("kind") or "epimer.json"))
    return found


def _read_folder(folder: Path, found: Records) -> None:
    """Add the records of a folder and of the folders right in it."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*/*.json"))
    some = False
    for file in files:
        try:
            add(found, _load(file), str(file.relative_to(folder)), str(file))
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


def add(found: Records, given: Any, source: str, where: str | None = None) -> None:
    """Add one record, given as plain data, to `found`; `source` is what the page calls it."""
    where = where or source
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if kind == "experiment":
        _check_format(given, where)
        experiment = _read(Experiment, given, where)
        if experiment.name == "performance":
            found.performances.append(Sourced(_performance(experiment, where), source))
        found.experiments.append(Sourced(experiment, source))
    elif kind == "diagnosis":
        _check_format(given, where)
        found.diagnoses.append(Sourced(_checked(_read(Diagnosis, given, where), where), source))
    elif isinstance(kind, str) and kind in PLAIN:
        _check_format(given, where)
        record, place = PLAIN[kind]
        getattr(found, place).append(Sourced(_read(record, given, where), source))
    elif isinstance(given, Mapping) and {"method", "parameters", "weights", "tensors"} <= given.keys():
        found.merges.append(Sourced(_read(MergeRecord, given, where), source))
    else:
        told = "" if kind is None else f" of kind {short(kind)}"
        raise NotARecordError(f"{where} is JSON{told}, but not {EXPECTED}.")


def _check_format(given: Mapping[str, Any], where: str) -> None:
    if given.get("format") != FORMAT:
        raise DataError(
            f"{where} is of format {short(given.get('format'))}, and this epimer reads {FORMAT}; "
            "make it again, or install the epimer that made it."
        )


def _performance(experiment: Experiment, where: str) -> Performance:
    scores = [_read(Score, row, where, "data", i) for i, row in enumerate(experiment.data)]
    if not scores:
        raise DataError(f"{where}: data is empty; expected a row per method.")
    suite = experiment.suite or experiment.title.partition(": accuracy of merged models")[0]
    against = next((h.removeprefix("against ") for h in experiment.headings if h.startswith("against ")), "")
    return Performance(suite, scores, against, experiment.notes, experiment.metric)


def _checked(found: Diagnosis, where: str) -> Diagnosis:
    """Refuse a diagnosis whose lists do not fit the number of its models."""
    count = len(found.models)
    vectors = {
        "norms": found.norms,
        "total.energy_kept_by_task": found.total.energy_kept_by_task,
        **{f"energy.{k}": values for k, values in found.energy.items()},
        **{f"forecast.{name}.tasks": forecast.tasks for name, forecast in found.forecast.items()},
        **{f"conflict.{name}": rows for name, rows in vars(found.conflict).items()},
        **{f"conflict.{name}[{i}]": row for name, rows in vars(found.conflict).items() for i, row in enumerate(rows)},
        **{f"layers.{name}.norms": layer.norms for name, layer in found.layers.items()},
        **{
            f"layers.{name}.forecast.{method}": values
            for name, layer in found.layers.items()
            for method, values in layer.forecast.items()
        },
    }
    for name, values in vectors.items():
        if len(values) != count:
            raise DataError(f"{where}: {name} has {len(values)} values, and there are {count} models.")
    return found


def _read(kind: type[T], given: Any, where: str, *path: str | int) -> T:
    """Return plain data as a dataclass; say of the first thing that does not fit where it is and what was expected."""
    try:
        return _ADAPTERS[kind].validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        spelled = spell((*path, *first["loc"]))
        got = "" if first["type"] == "missing" else f" Got {short(first['input'])} instead."
        raise DataError(f"{where}: {spelled or 'the record'}: {first['msg'].lower()}.{got}") from error
