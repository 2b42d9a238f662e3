"""Read the tensors of a whole module that was saved with `torch.save`, without executing anything in the file.

A pickle is a program that imports what it names and calls it. Here no name is ever looked up: every object becomes a
placeholder that records the arguments of its constructor and its state. The tensors are built afterwards, from those
records and the bytes of the storages.
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
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor, UntypedStorage

from epimer.errors import CheckpointError

MAX_ENTRIES = 100_000  # modules and tensors, counted by every name: a file could give one of them endlessly many
MAX_DEPTH = 200  # modules inside each other
MAGIC = 0x1950A86A20F9469CFC6C  # how files begin that are older than torch's zip format
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: the lengths of its name and of what follows that
END, END64, LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"  # the records that close a zip archive
MOST_HASHED = 10_000_000  # words of keys that a pickle may have hashed; a tuple in tuples counts every time it occurs

DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
BUILTINS = ("builtins", "__builtin__")


class Placeholder:
    """An object of a pickle that is not built: the name of its factory, the arguments, the items and the state."""

    factory: ClassVar[tuple[str, str]] = ("", "")
    args: tuple[Any, ...]
    items: list[tuple[Any, Any]]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Placeholder:
        self = object.__new__(cls)
        self.args, self.items, self.state = args, [], None
        return self

    def __call__(self, *args: Any, **_: Any) -> Placeholder:
        return Placeholder(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Ignore what a pickle adds to a subclass of list."""

    extend = append


@dataclass(frozen=True)
class StorageReference:
    """The storage of a tensor: its class, its key in the file and its number of entries."""

    kind: str
    key: str
    size: int


class PickledTuple(tuple[Any, ...]):
    """A tuple that knows what hashing it costs: tuples inside each other, each twice, double it with every level."""

    cost = 1


def _hash_cost(value: Any) -> int:
    """Return about how many words the hash of an object reads."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 64
    return value.cost if isinstance(value, PickledTuple) else 1


class SafeUnpickler(pickle._Unpickler):
    """Unpickles builtin containers, numbers and texts; everything else becomes a `Placeholder`.

    It is the unpickler in Python, whose memo is a dict: the one in C can be made to fill the memory by a few bytes.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, file: IO[bytes] | mmap) -> None:
        super().__init__(file, encoding="utf-8")
        self._known: dict[tuple[str, str], type[Placeholder]] = {}
        self._hashed = 0

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class of placeholders for the named one, which is not imported."""
        factory = (str(module), str(name))
        if factory not in self._known:
            self._known[factory] = type("Placeholder", (Placeholder,), {"factory": factory})
        return self._known[factory]

    def get_extension(self, code: int) -> None:
        """Refuse names by number, which a registry of this process would give."""
        raise pickle.UnpicklingError(f"extension {code} is not known")

    def load_bytearray8(self) -> None:
        """Refuse a bytearray, for which the unpickler would take as much memory as the file says that it has."""
        raise pickle.UnpicklingError("bytearrays are not read")

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def _note_tuple(self) -> None:
        """Note what it costs to hash the tuple that was just built."""
        built = PickledTuple(self.stack[-1])
        built.cost = min(MOST_HASHED + 1, 1 + sum(map(_hash_cost, built)))
        self.stack[-1] = built

    def _charge(self, keys: Iterable[Any]) -> None:
        """Refuse keys whose hashes take longer than any file of tensors needs: torch hashes the same keys."""
        self._hashed += sum(map(_hash_cost, keys))
        if self._hashed > MOST_HASHED:
            raise ValueError("its keys are tuples inside tuples without end")

    def persistent_load(self, pid: Any) -> Any:
        """Return a reference to a storage; for a class with its source, as old files have them, the class."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and _is_placeholder_class(pid[1]):
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage" or (pid[5:] or (None,))[0]:
            raise pickle.UnpicklingError("a storage is not described as torch does")
        _, kind, key, _, size = pid[:5]
        if not (_is_placeholder_class(kind) and isinstance(key, str) and _is_count(size)):
            raise pickle.UnpicklingError("a storage is not described as torch does")
        return StorageReference(kind.factory[1], key, size)


def _then_note(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return an opcode that builds a tuple, which notes what hashing it costs."""

    def noted(unpickler: SafeUnpickler) -> None:
        load(unpickler)
        unpickler._note_tuple()

    return noted


def _charged(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return an opcode that hashes the objects at `keys` of the stack, which charges for them first."""

    def charged(unpickler: SafeUnpickler) -> None:
        unpickler._charge(unpickler.stack[keys])
        load(unpickler)

    return charged


for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    SafeUnpickler.dispatch[_opcode[0]] = _then_note(SafeUnpickler.dispatch[_opcode[0]])
for _opcode, _keys in (
    (pickle.SETITEM, slice(-2, -1)),
    (pickle.SETITEMS, slice(None, None, 2)),
    (pickle.DICT, slice(None, None, 2)),
    (pickle.ADDITEMS, slice(None)),
    (pickle.FROZENSET, slice(None)),
):
    SafeUnpickler.dispatch[_opcode[0]] = _charged(SafeUnpickler.dispatch[_opcode[0]], _keys)

Fetch = Callable[[str, int], UntypedStorage]
"""(key, bytes) -> a storage"""


def is_zip(path: Path) -> bool:
    """Whether a file is a zip archive that can be opened."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # which it raises where the archive says that it spans several disks
        return False


def stored_entries(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a zip archive of torch's, which stores each once and as it is; a ValueError says otherwise.

    zipfile and torch's own reader must find the same list of entries, so the records at the end that say where it lies
    must leave no choice.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, size - 22 - 20 - 56))
        end64, locator, end = (file.read(length) for length in (56, 20, 22))
    if start != b"PK\x03\x04" or not end.startswith(END) or end[-2:] != b"\0\0":
        raise ValueError("the archive begins or ends with something else")
    count, length, offset = struct.unpack("<10xHLL2x", end)
    place = size - 22
    if locator.startswith(LOCATOR64):
        place -= 20 + 56
        if not end64.startswith(END64) or struct.unpack("<8xQ4x", locator) != (place,):
            raise ValueError("the end of the archive is damaged")
        count, length, offset = struct.unpack("<32xQQQ", end64)
    with zipfile.ZipFile(path) as archive:
        listed = archive.infolist()
    entries = {entry.filename: entry for entry in listed}
    if offset + length != place or not len(entries) == len(listed) == count:
        raise ValueError("the list of the archive's entries is damaged")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size for entry in listed):
        raise ValueError("its entries are compressed, and torch stores them as they are")
    if sum(entry.file_size for entry in listed) > size:
        raise ValueError("its entries are larger than the file")
    return entries


def check_pickles(path: Path) -> None:
    """Unpickle what is in a torch file without building it; an error says what no other reader should be given."""
    if is_zip(path):
        _unpickled_zip(path, stored_entries(path))
        return
    with path.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as file:
        _unpickled_old(file)


def module_tensors(path: Path, where: str, key: str | None = None) -> dict[str, Tensor] | None:
    """Return the state dict of the module in a torch file, under `key` if it is nested; None if there is no module."""
    try:
        content, fetch = _read_zip(path) if is_zip(path) else _read_old(path)
    except Exception:  # it is damaged or of another kind, which the caller's error explains
        return None
    if key is not None:
        content = dict(_pairs(content)).get(key)
    if not _is_module(content):
        return None
    entries: dict[str, Any] = {}
    _collect(content, "", entries, where, [0], 0)
    storages: dict[str, UntypedStorage] = {}
    return {name: _tensor(value, fetch, storages, f"{where}: {name!r}") for name, value in entries.items()}


def _read_zip(path: Path) -> tuple[Any, Fetch]:
    """Return what is in a file of torch's zip format; storages are mapped, not read."""
    entries = stored_entries(path)
    content, root = _unpickled_zip(path, entries)
    with zipfile.ZipFile(path) as archive:
        order = archive.read(root + "byteorder").decode() if root + "byteorder" in entries else "little"
    if order != sys.byteorder:
        raise ValueError("the bytes are in another order")
    mapped = UntypedStorage.from_file(str(path), False, path.stat().st_size)

    def fetch(key: str, nbytes: int) -> UntypedStorage:
        entry = entries[f"{root}data/{key}"]
        with path.open("rb") as file:
            file.seek(entry.header_offset)
            name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        start = entry.header_offset + LOCAL_HEADER.size + name + extra
        if nbytes > entry.file_size or start + nbytes > mapped.nbytes():
            raise ValueError("the storage is shorter than it says")
        return mapped[start : start + nbytes]

    return content, fetch


def _unpickled_zip(path: Path, entries: Iterable[str]) -> tuple[Any, str]:
    """Return what is pickled in a file of torch's zip format, and what the names of its entries begin with."""
    (top,) = (name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1)
    with zipfile.ZipFile(path) as archive:
        return SafeUnpickler(BytesIO(archive.read(top))).load(), top.removesuffix("data.pkl")


def _unpickled_old(file: mmap) -> list[Any]:
    """Return what the five pickles hold that a file from before torch's zip format begins with."""
    return [SafeUnpickler(file).load() for _ in range(5)]


def _read_old(path: Path) -> tuple[Any, Fetch]:
    """Return what is in a file from before torch's zip format: pickles, then each storage's size and bytes."""
    with path.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as file:  # reads what is there only
        magic, _, system, content, keys = _unpickled_old(file)
        if magic != MAGIC or system.get("little_endian") != (sys.byteorder == "little"):
            raise ValueError("not a torch file of this machine's byte order")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("its list of storages is damaged")
        start = file.tell()
    sizes = {storage.key: DTYPES[storage.kind].itemsize for storage in _storages(content)}

    def fetch(key: str, nbytes: int) -> UntypedStorage:
        with path.open("rb") as file:
            file.seek(start)
            for other in keys:
                (size,) = struct.unpack("<q", file.read(8))
                if other != key:
                    file.seek(size * sizes[other], 1)
                    continue
                data = file.read(size * sizes[other])
                if len(data) != nbytes:
                    raise ValueError("the storage is shorter than it says")
                return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        raise KeyError(key)

    return content, fetch


def _storages(content: Any) -> Iterable[StorageReference]:
    """Yield the storages that anything in an unpickled object refers to."""
    seen, left = set[int](), [content]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, StorageReference):
            yield value
        elif isinstance(value, Placeholder):
            left += [value.args, value.items, value.state]
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += value


def _is_module(value: Any) -> bool:
    """Whether an object has what a `torch.nn.Module` keeps its tensors in."""
    state = value.state if isinstance(value, Placeholder) else None
    return isinstance(state, dict) and {"_parameters", "_modules"} <= set(state)


def _collect(module: Any, prefix: str, entries: dict[str, Any], where: str, seen: list[int], depth: int) -> None:
    """Gather a module's parameters and saved buffers, then those of the modules in it, as torch names them."""
    seen[0] += 1
    if depth > MAX_DEPTH or seen[0] > MAX_ENTRIES:
        raise CheckpointError(f"{where} holds modules without end; save model.state_dict() instead.")
    if not _is_module(module):
        raise CheckpointError(f"{where}: {prefix[:-1]!r} is not a readable module; save model.state_dict() instead.")
    unsaved = set(_members(module.state.get("_non_persistent_buffers_set")))
    for name, value in (*_pairs(module.state["_parameters"]), *_pairs(module.state.get("_buffers"))):
        if value is not None and name not in unsaved:
            seen[0] += 1
            entries[f"{prefix}{name}"] = value
    for name, value in _pairs(module.state["_modules"]):
        if value is not None:
            _collect(value, f"{prefix}{name}.", entries, where, seen, depth + 1)


def _pairs(value: Any) -> list[tuple[str, Any]]:
    """Return the entries with string keys of a dict, or of an ordered one's placeholder."""
    with suppress(TypeError, ValueError):
        if isinstance(value, Placeholder) and value.factory == ("collections", "OrderedDict"):
            value = dict([*(value.args[0] if value.args else ()), *value.items])
        if isinstance(value, dict):
            return [(name, entry) for name, entry in value.items() if isinstance(name, str)]
    return []


def _members(value: Any) -> list[str]:
    """Return the strings in a set or its placeholder."""
    if isinstance(value, Placeholder) and value.factory[0] in BUILTINS and value.factory[1] == "set" and value.args:
        value = value.args[0]
    return [item for item in value if isinstance(item, str)] if isinstance(value, set | frozenset | list) else []


def _tensor(value: Any, fetch: Fetch, storages: dict[str, UntypedStorage], where: str) -> Tensor:
    """Build the tensor that a placeholder of one of torch's `_rebuild` functions describes."""
    factory, args = (value.factory, value.args) if isinstance(value, Placeholder) else (("", ""), ())
    if factory == ("torch._tensor", "_rebuild_from_type_v2") and len(args) == 4 and _is_placeholder_class(args[0]):
        factory, args = args[0].factory, args[2]
    if factory[0] == "torch._utils" and factory[1].startswith("_rebuild_parameter") and args:
        return _tensor(args[0], fetch, storages, where)
    if factory != ("torch._utils", "_rebuild_tensor_v2") or not isinstance(args, tuple) or len(args) < 4:
        raise CheckpointError(f"{where} is no plain tensor; save model.state_dict() instead.")
    stored, offset, shape, stride = args[:4]
    dtype = DTYPES.get(stored.kind) if isinstance(stored, StorageReference) else None
    plain = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if dtype is None or not plain or not all(map(_is_count, (offset, *shape, *stride))):
        raise CheckpointError(f"{where} is no plain tensor; save model.state_dict() instead.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if prod(shape) else -1
    if last >= stored.size:
        raise CheckpointError(f"{where} claims more entries than are stored; save it contiguous.")
    try:
        if stored.key not in storages:
            storages[stored.key] = fetch(stored.key, stored.size * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(storages[stored.key], offset, shape, stride)
    except (KeyError, OSError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{where} is damaged or cut short; copy or download the file again.") from error


def _is_placeholder_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Placeholder)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
