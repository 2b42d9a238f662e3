"""Read the tensors of a whole module that was saved with `torch.save`, without executing anything in the file.

A pickle is a program that imports what it names and calls it. Here no name is ever looked up: each stands for a
record, a call notes its arguments, and what would be set on an object is kept beside them. The tensors are made
afterwards, from those notes and the bytes of the storages.
"""

from __future__ import annotations

import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor, UntypedStorage

from epimer.errors import CheckpointError

MOST = 100_000  # modules and tensors, each counted by every name it has; a file could name one in endlessly many ways
DEEPEST = 200  # modules inside each other
MAGIC = 0x1950A86A20F9469CFC6C  # how files begin that are older than torch's zip format
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and of what follows that

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
BUILTINS = ("builtins", "__builtin__")


class Inert:
    """Whatever a pickle wants made: the name of its maker, the arguments, the items and the state, all unused."""

    maker: ClassVar[tuple[str, str]] = ("", "")
    args: tuple[Any, ...]
    items: list[tuple[Any, Any]]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.items, made.state = args, [], None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Inert:
        return Inert(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Take what a pickle adds to a list of a kind of its own, and forget it."""

    def extend(self, values: Any) -> None:
        """Likewise."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor's numbers are: a storage by its key, of so many entries."""

    kind: str
    key: str
    size: int


class InertUnpickler(pickle._Unpickler):
    """Unpickles builtin containers, numbers and texts; everything else becomes `Inert`.

    It is the unpickler in Python, whose memo is a dict: the one in C can be made to fill the memory by a few bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8")
        self._known: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class that stands for the named one, which is not looked for."""
        maker = (str(module), str(name))
        if maker not in self._known:
            self._known[maker] = type("Inert", (Inert,), {"maker": maker})
        return self._known[maker]

    def get_extension(self, code: int) -> None:
        """Refuse names by number, which a registry of this process would give."""
        raise pickle.UnpicklingError(f"extension {code} is not known")

    def persistent_load(self, pid: Any) -> Any:
        """Return where a storage's entries are; of a class with its source, as old files have them, the class."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and _stands_in(pid[1]):
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage" or (pid[5:] or (None,))[0]:
            raise pickle.UnpicklingError("a storage is not described as torch does")
        _, kind, key, _, size = pid[:5]
        if not (_stands_in(kind) and isinstance(key, str) and _is_count(size)):
            raise pickle.UnpicklingError("a storage is not described as torch does")
        return Stored(kind.maker[1], key, size)


Fetch = Callable[[str, int], UntypedStorage]
"""(key, bytes) -> a storage"""


def module_tensors(path: Path, where: str, key: str | None = None) -> dict[str, Tensor] | None:
    """Return the state dict of the module in a torch file, under `key` if it is nested; None if there is no module."""
    try:
        found, fetch = _read_zip(path) if zipfile.is_zipfile(path) else _read_old(path)
    except Exception:  # it is damaged or of another kind, for which the caller has words
        return None
    if key is not None:
        found = dict(_pairs(found)).get(key)
    if not _is_module(found):
        return None
    specs: dict[str, Any] = {}
    _collect(found, "", specs, where, [0], 0)
    kept: dict[str, UntypedStorage] = {}
    return {name: _tensor(value, fetch, kept, f"{where}: {name!r}") for name, value in specs.items()}


# --- files -----------------------------------------------------------------------------------------------------------


def _read_zip(path: Path) -> tuple[Any, Fetch]:
    """Return what is in a file of torch's zip format; storages are mapped, not read."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (top,) = (name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1)
        root = top.removesuffix("data.pkl")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("torch stores entries as they are")
        order = archive.read(root + "byteorder").decode() if root + "byteorder" in entries else "little"
        if order != sys.byteorder:
            raise ValueError("the bytes are in another order")
        found = InertUnpickler(BytesIO(archive.read(top))).load()
    whole = UntypedStorage.from_file(str(path), False, path.stat().st_size)

    def fetch(key: str, nbytes: int) -> UntypedStorage:
        entry = entries[f"{root}data/{key}"]
        with path.open("rb") as file:
            file.seek(entry.header_offset)
            name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        start = entry.header_offset + LOCAL_HEADER.size + name + extra
        if nbytes > entry.file_size or start + nbytes > whole.nbytes():
            raise ValueError("the storage is shorter than it says")
        return whole[start : start + nbytes]

    return found, fetch


def _read_old(path: Path) -> tuple[Any, Fetch]:
    """Return what is in a file from before torch's zip format: pickles, then each storage's size and bytes."""
    with path.open("rb") as file:
        magic, _, about, found, keys = (InertUnpickler(file).load() for _ in range(5))
        if magic != MAGIC or about.get("little_endian") != (sys.byteorder == "little"):
            raise ValueError("not a torch file of this machine's byte order")
        start = file.tell()

    def fetch(key: str, nbytes: int) -> UntypedStorage:
        with path.open("rb") as file:
            file.seek(start)
            for one in keys:
                (size,) = struct.unpack("<q", file.read(8))
                itemsize = sizes[one]
                if one != key:
                    file.seek(size * itemsize, 1)
                    continue
                data = file.read(size * itemsize)
                if len(data) != nbytes:
                    raise ValueError("the storage is shorter than it says")
                return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        raise KeyError(key)

    sizes = {stored.key: DTYPES[stored.kind].itemsize for stored in _storages(found)}
    return found, fetch


def _storages(found: Any) -> Iterable[Stored]:
    """Yield the storages that anything in an unpickled object refers to."""
    seen, left = set[int](), [found]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Stored):
            yield one
        elif isinstance(one, Inert):
            left += [one.args, one.items, one.state]
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one


# --- modules ---------------------------------------------------------------------------------------------------------


def _is_module(value: Any) -> bool:
    """Whether an object has what a `torch.nn.Module` keeps its tensors in."""
    return (
        isinstance(value, Inert) and isinstance(value.state, dict) and {"_parameters", "_modules"} <= set(value.state)
    )


def _collect(module: Any, prefix: str, found: dict[str, Any], where: str, seen: list[int], depth: int) -> None:
    """Gather a module's parameters and saved buffers, then those of the modules in it, as torch names them."""
    seen[0] += 1
    if depth > DEEPEST or seen[0] > MOST:
        raise CheckpointError(f"{where} holds modules without end; save model.state_dict() instead.")
    if not _is_module(module):
        raise CheckpointError(
            f"{where}: {prefix[:-1]!r} is no module that can be read; save model.state_dict() instead."
        )
    unsaved = set(_members(module.state.get("_non_persistent_buffers_set")))
    for name, value in (*_pairs(module.state["_parameters"]), *_pairs(module.state.get("_buffers"))):
        if value is not None and name not in unsaved:
            seen[0] += 1
            found[f"{prefix}{name}"] = value
    for name, value in _pairs(module.state["_modules"]):
        if value is not None:
            _collect(value, f"{prefix}{name}.", found, where, seen, depth + 1)


def _pairs(value: Any) -> list[tuple[str, Any]]:
    """Return the entries of a dict or of what stands for an ordered one; those that texts name."""
    with suppress(TypeError, ValueError):
        if isinstance(value, Inert) and value.maker == ("collections", "OrderedDict"):
            value = dict([*(value.args[0] if value.args else ()), *value.items])
        if isinstance(value, dict):
            return [(name, entry) for name, entry in value.items() if isinstance(name, str)]
    return []


def _members(value: Any) -> list[str]:
    """Return the texts in a set or in what stands for one."""
    if isinstance(value, Inert) and value.maker[0] in BUILTINS and value.maker[1] == "set" and value.args:
        value = value.args[0]
    return [one for one in value if isinstance(one, str)] if isinstance(value, set | frozenset | list) else []


# --- tensors ---------------------------------------------------------------------------------------------------------


def _tensor(value: Any, fetch: Fetch, kept: dict[str, UntypedStorage], where: str) -> Tensor:
    """Make the tensor that a note of torch's functions for it describes."""
    maker, args = _call(value)
    if maker == ("torch._tensor", "_rebuild_from_type_v2") and len(args) == 4 and _stands_in(args[0]):
        maker, args = args[0].maker, args[2]
    if maker[0] == "torch._utils" and maker[1].startswith("_rebuild_parameter") and args:
        return _tensor(args[0], fetch, kept, where)
    if maker != ("torch._utils", "_rebuild_tensor_v2") or not isinstance(args, tuple) or len(args) < 4:
        raise CheckpointError(f"{where} is no plain tensor; save model.state_dict() instead.")
    stored, offset, shape, stride = args[:4]
    dtype = DTYPES.get(stored.kind) if isinstance(stored, Stored) else None
    plain = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if dtype is None or not plain or not all(map(_is_count, (offset, *shape, *stride))):
        raise CheckpointError(f"{where} is no plain tensor; save model.state_dict() instead.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if prod(shape) else -1
    if last >= stored.size:
        raise CheckpointError(f"{where} claims more entries than are stored; save it contiguous.")
    try:
        if stored.key not in kept:
            kept[stored.key] = fetch(stored.key, stored.size * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(kept[stored.key], offset, shape, stride)
    except (KeyError, OSError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{where} is damaged or cut short; copy or download the file again.") from error


def _call(value: Any) -> tuple[tuple[str, str], Any]:
    return (value.maker, value.args) if isinstance(value, Inert) else (("", ""), ())


def _stands_in(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Inert)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
