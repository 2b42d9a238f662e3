"""What all records share: a kind and a version, how they are written as JSON, and how JSON is read and checked."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from epimer.checksums import is_intact
from epimer.errors import DataError, short
from epimer.json_values import json_value

T = TypeVar("T")


class Record:
    """A dataclass that is written to a JSON file under its kind and version, and read back from it."""

    kind: ClassVar[str]
    format: ClassVar[int] = 1
    """the version of its JSON"""
    omitted: ClassVar[frozenset[str]] = frozenset()
    """fields, of the record or of its parts, that are not written where they are None"""

    def to_dict(self) -> dict[str, Any]:

        def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if value is not None or name not in self.omitted}

        record: Any = self  # a dataclass, as every child is
        return {"kind": self.kind, "format": self.format, **asdict(record, dict_factory=fields)}

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Self:
        """Return the record in the text of a JSON file, or raise a DataError that names the file `where`."""
        try:
            data = json_value(text)
        except ValueError as error:
            raise DataError(f"{where} is not a record of epimer: it is not JSON; make it again.") from error
        if not isinstance(data, dict):
            raise DataError(f"{where} is not a record of epimer: expected an object; make it again.")
        return cls.from_dict(data, where)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the record") -> Self:
        """Return the record that `to_dict` wrote, or raise a DataError that names the file `where`."""
        if not is_intact(data):
            raise DataError(f"{where} was damaged or edited: its sha256 does not fit; make it again.")
        if data.get("format") != cls.format:
            raise DataError(
                f"{where} is of format {short(data.get('format'))}, and this epimer reads {cls.format}; "
                "make it again, or install the epimer that made it."
            )
        return checked(cls, data, where)


def checked(kind: type[T], data: Any, where: str, *path: str | int) -> T:
    """Return plain data, which is at `path` in the file `where`, as a dataclass; the first misfit is an error."""
    adapter: TypeAdapter[T] = _adapter(cast("Hashable", kind))
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (*path, *first["loc"]))
        place = f"{where}: {place.lstrip('.')}".removesuffix(": ")
        if first["type"] == "value_error":  # from a record's own check
            raise DataError(f"{place}: {first['ctx']['error']}.") from error
        got = "" if first["type"] == "missing" else f" Got {short(first['input'])} instead."
        raise DataError(f"{place}: {first['msg'].lower()}.{got}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
