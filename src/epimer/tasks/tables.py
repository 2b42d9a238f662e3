"""Tables of data in files: rows are read one at a time, and errors name the file and the line or row."""

from __future__ import annotations

import csv
import io
import os
import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from epimer.errors import DataError, first_line, listed, nearest, short
from epimer.json_values import json_value
from epimer.opened_files import OpenedFile, lies_in, reason

BOM = b"\xef\xbb\xbf"
PEEK = 100  # rows of a .jsonl file whose keys are its columns
KEPT = 1 << 30  # bytes of row groups of a .parquet file that are kept once read
MOST_DECODED, SMALL_DECODED = 1 << 30, 1 << 28  # bytes of one row group, and of one in a small file
MOST_PACKED = 16  # bytes of a row group per byte of its file, where that is more
MOST_ROWS = 1_000_000  # of a .parquet file that has fewer bytes than rows
BATCH_ROWS = 64  # of a row group that are decoded at a time
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "FIXED_LEN_BYTE_ARRAY": 1}  # bytes; 8 of other types
LARGEST_FILE = 1 << 28  # bytes of an image or a recording
MOST_PIXELS = 1 << 26  # of an image, which takes four bytes for each while it is decoded
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow runs another program for some of the others


class Table(ABC):
    """Rows by number; a row is parsed when it is accessed, where the format allows it."""

    name: str  # its name in messages, without the path
    columns: list[str]
    classes: list[str] | None = None  # the names of the class folders of a folder of images
    folder: Path  # what paths in its rows are relative to
    roots: tuple[Path, ...] = ()  # folders in which files that its rows name may lie beside its own

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def row(self, i: int) -> dict[str, Any]:
        """Return one row as column -> value; a row may lack columns."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Return the name of a row in messages: its line, counted from 1, or its row, counted from 0."""

    def column(self, name: str | None, usual: Sequence[str], what: str) -> str | None:
        """Return the column `name`, which must exist; without a name the first of the usual ones that exists."""
        if name is None:
            return next((column for column in usual if column in self.columns), None)
        if name not in self.columns:
            known = f"it has {listed(self.columns, 12)}.{nearest(name, self.columns)}"
            raise DataError(f"{self.name} has no column {name!r} for the {what}; {known}")
        return name

    def text(self, i: int, column: str) -> str:
        """Return the text of a row; refuse anything else, and an empty one."""
        value = self.row(i).get(column)
        if not isinstance(value, str):
            raise DataError(f"{self.where(i)} has {short(value)} in {column!r}, expected a text.")
        if not value.strip():
            raise DataError(f"{self.where(i)} has an empty text in {column!r}; leave the row out.")
        return value

    def image(self, i: int, column: str) -> Any:
        """Return the image of a row, in RGB; the value is a path, bytes, or a struct of `bytes` and `path`."""
        return decode_image(self.source(i, self.row(i).get(column), column, "image"), self.where(i))

    def source(self, i: int, value: Any, column: str, what: str) -> Path | bytes:
        """Return an image's or a recording's path or bytes; the value is one of them, or a struct of both."""
        if isinstance(value, dict):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, str | Path) and str(value):
            return self._file(i, str(value), what)
        if not isinstance(value, bytes) or not value:
            problem = f"has no {what} in {column!r}: {short(value)}"
            raise DataError(f"{self.where(i)} {problem}; expected a path or its bytes.")
        return value

    def _file(self, i: int, name: str, what: str) -> Path:
        """Return the path of a file that a row names; only regular files in the data's folder are opened."""
        path = self.folder / name
        try:
            own = any(lies_in(path, root) for root in (self.folder, *self.roots))
        except ValueError as error:
            raise DataError(f"{self.where(i)}: {short(name)} is no name of a file; give the {what}'s path.") from error
        if not own:
            problem = f"the {what} {short(name)} does not lie in the folder of its data"
            raise DataError(f"{self.where(i)}: {problem}; copy it there, and give its path from there.")
        if os.path.exists(path) and not os.path.isfile(path):
            raise DataError(f"{self.where(i)}: the {what} {short(name)} is no regular file; replace it.")
        if os.path.exists(path) and path.stat().st_size > LARGEST_FILE:
            size = f"{path.stat().st_size} bytes, above the {LARGEST_FILE} that are read"
            raise DataError(f"{self.where(i)}: the {what} {short(name)} has {size}; make it smaller.")
        return path


def decode_image(source: Path | bytes, where: str) -> Any:
    """Decode an image to RGB."""
    pil = import_extra("PIL.Image", "pillow", "reading images")
    try:
        with pil.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise DataError(f"{where} is an image of {width} x {height} pixels, above {MOST_PIXELS}; shrink it.")
            # Pillow warns where a palette's transparency is not converted by way of RGBA.
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{where}: the image {Path(str(source)).name} does not exist; copy it there.") from error
    except Exception as error:  # each of Pillow's decoders has errors of its own
        raise DataError(f"{where} is not an image that can be decoded ({short(str(error))}); replace it.") from error


def import_extra(module: str, package: str, purpose: str) -> Any:
    """Import a module of the `hf` extra, or say how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{purpose} needs {package}; install it: pip install 'epimer[hf]'") from error


class Lines(Table):
    """A `.jsonl` or `.txt` file; a line is read when its row is accessed, at an offset found once."""

    def __init__(self, path: Path, *, plain: bool = False) -> None:
        self.path, self.name, self.folder, self.plain = path, path.name, path.parent, plain
        self.starts, self.numbers = array("Q"), array("Q")
        self.file, position = OpenedFile(path, path.name, DataError), 0
        with self.file.open() as file:
            for number, line in enumerate(file, 1):
                if line.removeprefix(BOM if number == 1 else b"").strip():
                    self.starts.append(position)
                    self.numbers.append(number)
                position += len(line)
        self.columns = ["text"] if plain else columns_of(self.row(i) for i in range(min(PEEK, len(self))))

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, i: int) -> dict[str, Any]:
        with self.file.open() as file:
            file.seek(self.starts[i])
            line = file.readline().removeprefix(BOM if self.starts[i] == 0 else b"")
        try:
            text = line.decode("utf-8").strip()
            value = {"text": text} if self.plain else json_value(text)
        except ValueError as error:
            kind = "UTF-8 text" if self.plain or isinstance(error, UnicodeDecodeError) else "JSON"
            raise DataError(f"{self.where(i)} is not {kind}: {error}; write one row per line.") from error
        return _object(value, self.where(i))

    def where(self, i: int) -> str:
        return f"{self.path.name} line {self.numbers[i]}"


class Records(Table):
    """Rows in memory: a `.json` list, a `.csv` or a `.tsv` file."""

    def __init__(self, path: Path, rows: list[dict[str, Any]], places: Sequence[str], columns: Sequence[str]) -> None:
        self.name, self.folder, self.columns = path.name, path.parent, list(columns)
        self.rows, self.places = rows, places

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    def where(self, i: int) -> str:
        return self.places[i]


def read_json_table(path: Path) -> Table:
    """Read a `.json` file: a list of objects, or one object per line."""
    with reading(path):
        data = path.read_bytes()
    first = data.removeprefix(BOM).lstrip()
    if first.startswith(b"{") and _is_json(first.splitlines()[0]):
        return Lines(path)
    try:
        values = json_value(data) if first else []
    except ValueError as error:
        raise DataError(f"{path.name} is not JSON: {error}; expected a list of objects.") from error
    if not isinstance(values, list):
        raise DataError(f"{path.name} holds a {type(values).__name__}, expected a list of objects, one per row.")
    places = [f"{path.name} row {i}" for i in range(len(values))]
    rows = [_object(value, place) for value, place in zip(values, places, strict=True)]
    return Records(path, rows, places, columns_of(rows))


def read_csv_table(path: Path) -> Table:
    """Read a `.csv` or `.tsv` file whose first line names the columns."""
    rows, places = [], []
    longest = csv.field_size_limit(sys.maxsize)  # a text may be longer than the module's 128 KiB
    try:
        with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            columns = next(reader, [])
            if len(set(columns)) != len(columns):
                raise DataError(f"{path.name} line 1 names a column twice: {listed(columns, 12)}; rename one.")
            before = reader.line_num
            for values in reader:
                place, before = f"{path.name} line {before + 1}", reader.line_num
                if values and len(values) != len(columns):
                    counts = f"{len(values)} fields, but line 1 names {len(columns)} columns"
                    raise DataError(f"{place} has {counts}; quote fields that hold a separator.")
                if values:
                    rows.append(dict(zip(columns, values, strict=True)))
                    places.append(place)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} cannot be read near line {len(rows) + 2}: {error}; save it as UTF-8.") from error
    finally:
        csv.field_size_limit(longest)
    return Records(path, rows, places, columns)


class Parquet(Table):
    """A `.parquet` file, read by row group; the latest groups stay in memory."""

    def __init__(self, path: Path) -> None:
        parquet = import_extra("pyarrow.parquet", "pyarrow", "reading .parquet files")
        self.path, self.name, self.folder = path, path.name, path.parent
        with self._reading():
            self.file = parquet.ParquetFile(path)
            self.columns = list(self.file.schema_arrow.names)
            groups, size = self.file.metadata, path.stat().st_size
        self.most = min(MOST_DECODED, max(SMALL_DECODED, MOST_PACKED * size))
        self._check_sizes(groups, size)
        self.ends = list(accumulate(groups.row_group(g).num_rows for g in range(groups.num_row_groups)))
        self.kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def row(self, i: int) -> dict[str, Any]:
        group = bisect_right(self.ends, i)
        if group not in self.kept:
            self.kept[group] = self._read(group)
            while len(self.kept) > 1 and sum(table.nbytes for table in self.kept.values()) > KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(group)
        start = self.ends[group - 1] if group else 0
        with self._reading():
            (row,) = self.kept[group].slice(i - start, 1).to_pylist()
        return dict(row)

    def where(self, i: int) -> str:
        return f"{self.path.name} row {i}"

    def _check_sizes(self, metadata: Any, size: int) -> None:
        """Refuse row groups that would take too much memory, and more rows than a file of `size` bytes can have."""
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        for g, group in enumerate(groups):
            columns = [group.column(c) for c in range(group.num_columns)]
            values = sum(column.num_values * WIDTHS.get(column.physical_type, 8) for column in columns)
            if (decoded := max(group.total_byte_size, values)) > self.most:
                raise self._too_large(g, decoded)
        rows = [group.num_rows for group in groups]
        if min(rows, default=0) < 0 or sum(rows) > max(MOST_ROWS, size):
            raise DataError(f"{self.name} says that it has {sum(rows)} rows in {size} bytes; write it again.")

    def _read(self, group: int) -> Any:
        """Read a row group, some rows at a time: repeated values are stored once, so only decoding tells its size."""
        arrow, batches, size = import_extra("pyarrow", "pyarrow", "reading .parquet files"), [], 0
        with self._reading():
            for batch in self.file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False):
                size += batch.nbytes
                if size > self.most:
                    raise self._too_large(group, size)
                batches.append(batch)
            return arrow.Table.from_batches(batches, self.file.schema_arrow)

    def _too_large(self, group: int, size: int) -> DataError:
        problem = f"{self.name} has a row group ({group}) of {size} bytes or more, above {self.most}"
        return DataError(f"{problem}; write it with smaller ones (row_group_size).")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (DataError, MemoryError):
            raise
        except Exception as error:  # pyarrow raises its own and Python's, as of names that are no UTF-8
            problem = f"{self.path.name} cannot be read as parquet: {first_line(error)}"
            raise DataError(f"{problem}; download it again.") from error


class Images(Table):
    """A folder of images in class folders."""

    def __init__(self, folder: Path, name: str, classes: dict[str, list[str]]) -> None:
        self.name, self.folder, self.classes, self.columns = name, folder, sorted(classes), ["image", "label"]
        self.files = [(file, label) for label in self.classes for file in classes[label]]

    def __len__(self) -> int:
        return len(self.files)

    def row(self, i: int) -> dict[str, Any]:
        return {"image": self.files[i][0], "label": self.files[i][1]}

    def where(self, i: int) -> str:
        return self.files[i][0]


class Joined(Table):
    """Several tables with the same columns, one after the other."""

    def __init__(self, name: str, parts: Sequence[Table]) -> None:
        self.name, self.parts = name, list(parts)
        self.columns, self.folder = parts[0].columns, parts[0].folder
        for part in parts:
            if set(part.columns) != set(self.columns):
                problem = f"{part.name} has columns {listed(part.columns, 12)}, but {parts[0].name} has"
                raise DataError(f"{problem} {listed(self.columns, 12)}; give one of the files.")
        self.ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def row(self, i: int) -> dict[str, Any]:
        part, j = self._find(i)
        return part.row(j)

    def where(self, i: int) -> str:
        part, j = self._find(i)
        return part.where(j)

    def image(self, i: int, column: str) -> Any:
        part, j = self._find(i)
        return part.image(j, column)

    def _find(self, i: int) -> tuple[Table, int]:
        part = bisect_right(self.ends, i)
        return self.parts[part], i - (self.ends[part - 1] if part else 0)


READERS: dict[str, Callable[[Path], Table]] = {
    ".parquet": Parquet,
    ".jsonl": Lines,
    ".json": read_json_table,
    ".csv": read_csv_table,
    ".tsv": read_csv_table,
    ".txt": lambda path: Lines(path, plain=True),
}
"""suffix -> how it is read; where a folder holds several kinds of files, the first kind is its data"""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a DataError for an OSError within the block."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {reason(error)}.") from error


def files_under(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, sorted, without hidden ones."""
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        below = Path(top).relative_to(folder)
        yield from ((below / name).as_posix() for name in sorted(files) if not name.startswith("."))


def columns_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the keys of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {short(value)}, expected an object such as {{'text': '...', 'label': 0}}.")
    return value


def _is_json(line: bytes) -> bool:
    try:
        json_value(line)
    except ValueError:
        return False
    return True
