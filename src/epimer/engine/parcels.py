"""Pack walks and results for another machine: paths are absolute, methods go by name, tensors by the shared disk."""

from __future__ import annotations

import glob
import io
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from epimer.atomic_files import held, remove_abandoned, remove_folder
from epimer.checkpoints.checkpoint import header
from epimer.checkpoints.safetensors import as_bytes
from epimer.errors import OutputError, ParameterError, short
from epimer.methods.plugins import method_in_plugin, plugin_of_method, plugin_of_module, value_in_plugin
from epimer.methods.registry import Method, describe_method, is_installed

LARGE = 1 << 16  # bytes from which a tensor goes by the disk
ALIGNMENT = 64  # bytes

Loader = Callable[[Path, int, tuple[int, ...], torch.dtype], Tensor]
"""a file, an offset, a shape and a dtype -> the tensor there"""


class Scratch:
    """A folder that large tensors go by: made when it is needed, and held by this process until it is removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = ExitStack()

    def make(self) -> None:
        """Make the folder, if it is not there."""
        if self.folder.is_dir():
            return
        try:
            self._held.enter_context(held(self.folder, self.folder, folder=True))
        except OSError as error:
            raise OutputError(
                f"{self.folder} cannot be made ({error.strerror}); start from a folder that every machine can write to."
            ) from error

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        remove_folder(self.folder)
        self._held.close()


def own_scratch(place: Path) -> Scratch:
    """Return a new scratch folder in a place; those of processes of this machine that were killed are removed there.

    A folder has its machine's name, because on a shared disk a machine may not see the locks of another.
    """
    prefix = f".epimer-ray-{os.uname().nodename}-"
    remove_abandoned(list(place.glob(f"{glob.escape(prefix)}*")))
    return Scratch(place / f"{prefix}{uuid4().hex[:12]}")


def pack(
    value: Any, scratch: Path, name: str, *, known: Sequence[Any] = (), load: Loader,
    make_folder: Callable[[], None] | None = None,
) -> bytes:  # fmt: skip
    """Return a value as bytes that `unpack` reads in another process.

    Args:
        value: what to send.
        scratch: a folder on a disk that both see, for large tensors.
        name: what the name of a file there begins with.
        known: objects that the receiver has already, which are sent as their number.
        load: how the receiver gets a large tensor: `map_tensor` or `read_tensor`.
        make_folder: makes `scratch` where it is needed; a receiver has none, or it would make its own on another disk.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, scratch / f"{name}-{uuid4().hex[:12]}.bin", known, load, make_folder)
    try:
        packer.dump(value)
    finally:
        packer.close()
    return buffer.getvalue()


def unpack(data: bytes, known: Sequence[Any] = ()) -> Any:
    """Return the value that was packed, with the receiver's own `known` objects in their places."""
    return _Unpacker(io.BytesIO(data), known).load()


def pack_walk(walk: Any, scratch: Scratch) -> bytes:
    """Return a walk as bytes; refuse in one line what other machines would not know."""
    try:
        return pack(walk, scratch.folder, "walk", load=map_tensor, make_folder=scratch.make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParameterError(
            f"this cannot be sent to other machines ({short(str(error))}); use --engine local."
        ) from error


class _Packer(pickle.Pickler):
    def __init__(
        self, buffer: io.BytesIO, path: Path, known: Sequence[Any], load: Loader, make_folder: Callable[[], None] | None
    ) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.path, self.load, self.make_folder = path, load, make_folder
        self.known = {id(one): number for number, one in enumerate(known)}
        self.file: BinaryIO | None = None

    def persistent_id(self, value: Any) -> int | None:
        return self.known.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Path):
            return Path, (os.path.abspath(value),)
        if isinstance(value, Method):
            if (plugin := plugin_of_method(value.name)) is not None:
                return method_in_plugin, (plugin.path, plugin.sha256, value.name)
            if not is_installed(value.name):
                raise _own_code(f"the method {value.name!r}")
            return describe_method, (value.name,)
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__":
                raise _own_code(repr(value.__qualname__))
            if (plugin := plugin_of_module(value.__module__)) is not None:
                return value_in_plugin, (plugin.path, plugin.sha256, value.__qualname__)
        return NotImplemented

    def _tensor(self, W: Tensor) -> Any:
        if W.is_meta:
            return header, (tuple(W.shape), W.dtype)
        if W.layout != torch.strided or W.nbytes < LARGE:
            return Tensor.__reduce_ex__(W.detach().cpu(), pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        path, offset = self._write(W.detach().cpu().contiguous())
        return self.load, (path, offset, tuple(W.shape), W.dtype)

    def _write(self, W: Tensor) -> tuple[Path, int]:
        if self.file is None:
            if self.make_folder is not None:
                self.make_folder()
            try:
                self.file = self.path.open("xb")
            except OSError as error:
                raise OutputError(
                    f"{self.path.parent} cannot be written on {os.uname().nodename} ({error.strerror}); start from a "
                    "folder that every machine sees."
                ) from error
        offset = self.file.tell()
        self.file.write(memoryview(as_bytes(W)))
        self.file.write(bytes(-self.file.tell() % ALIGNMENT))
        return self.path, offset

    def close(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()


def _own_code(what: str) -> ParameterError:
    return ParameterError(
        f"{what} is code of this process, which other machines do not have; install it on every machine as a package "
        "(entry point epimer.methods), name its file with --plugin, or use --engine local."
    )


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, known: Sequence[Any]) -> None:
        super().__init__(buffer)
        self.known = known

    def persistent_load(self, number: Any) -> Any:
        return self.known[number]


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose pages are read from a file when they are used; the file must stay there until then."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.memmap(path, np.uint8, "c", offset, (size,))).view(dtype).reshape(shape)


def read_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor read from a file."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.fromfile(path, np.uint8, size, offset=offset)).view(dtype).reshape(shape)
