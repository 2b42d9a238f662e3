"""Models in object stores (s3://, gs://, memory://), through fsspec: only the bytes that are needed are fetched.

Headers and tensors are fetched as byte ranges; small files (config, tokenizer) and LoRA adapters are downloaded to a
temporary folder.
"""

from __future__ import annotations

import atexit
import io
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from epimer.atomic_files import held, remove_abandoned
from epimer.checkpoints.checkpoint import Checkpoint, Rows, ShardedCheckpoint, allocate, nbytes, sample_ranges
from epimer.checkpoints.folder import INDEXES, LARGEST, assemble, inside, read_json
from epimer.checkpoints.hub import SIDECARS, beside_weights
from epimer.checkpoints.safetensors import LONGEST_HEADER, as_bytes, parse_header
from epimer.errors import CheckpointError, EpimerError, first_line, listed, short

URL = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)://(.+)")
PACKAGES = {"s3": ("s3fs", "epimer[s3]"), "gs": ("gcsfs", "epimer[gcs]"), "gcs": ("gcsfs", "epimer[gcs]")}
PROTOCOLS = (
    *PACKAGES,
    "memory",
)  # those that are tested; fsspec has more, some of which run programs or read this disk
PREFIX = "epimer-store-"  # of folders for small files
MOST_FILES, MOST_BYTES = 1000, 1 << 30  # of small files of one model
FIRST = 1 << 20  # bytes of a file that are fetched for its header; most have all of it
RANGE = 1 << 24  # bytes per request
TOGETHER = 8  # requests at a time


def is_store(text: str) -> bool:
    """Whether a text is the address of something in an object store."""
    return URL.fullmatch(text) is not None


def filesystem(url: str, failure: type[EpimerError] = CheckpointError) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it."""
    match = URL.fullmatch(url)
    assert match is not None
    protocol, path = match.groups()
    if protocol not in PROTOCOLS:
        remedy = "give a path, s3://, gs:// or hf://, or copy it to one of these"
        raise failure(f"{url} is in no store that epimer reads ({protocol}://); {remedy}.")
    if "?" in path:
        problem = "has a query string, and addresses are written down with a merge"
        raise failure(f"{url} {problem}; leave it out, and set the store's credentials in the environment.")
    try:
        return import_module("fsspec").filesystem(protocol), path.rstrip("/")
    except (ImportError, ValueError) as error:
        package, extra = PACKAGES.get(protocol, ("fsspec", "fsspec"))
        raise failure(f"{url} needs the package {package}; install it with: pip install '{extra}'") from error


@contextmanager
def explain_store_errors(url: str, verb: str, failure: type[EpimerError] = CheckpointError) -> Iterator[None]:
    """Turn an error of a store into one line with a reason and a remedy."""
    try:
        yield
    except EpimerError:
        raise
    except FileNotFoundError as error:
        raise failure(f"{url} does not exist; check the bucket's name and the path in it.") from error
    except Exception as error:
        reason = first_line(error)
        refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
        remedy = "log in to the store, or set its credentials" if refused else "check the address and the network"
        raise failure(f"{url} cannot be {verb} ({type(error).__name__}: {reason}); {remedy}.") from error


def open_store(url: str) -> Checkpoint:
    """Open a safetensors file, or a folder with one or with shards and an index, in an object store."""
    fs, path = filesystem(url)
    if path.endswith(".safetensors"):
        return StoreFile(fs, path, url)
    with explain_store_errors(url, "read"):
        files = folder_files(fs, path)
        if not files:
            raise FileNotFoundError(path)
        modules = all_files(fs, path) if "modules.json" in files else {}  # of sentence-transformers, in folders
        more = [file for file in modules if "/" in file and beside_weights(file, list(modules))]
        small = {file: size for file, size in files.items() if file.endswith(SIDECARS)}
        folder = download_small_files(fs, path, url, small | {file: modules[file] for file in more})
    name = path.rpartition("/")[2]

    def open_shard(file: str) -> Checkpoint:
        if file not in files or not file.endswith(".safetensors"):
            raise CheckpointError(f"{url} has no safetensors file {file!r}, but its index needs it; upload it again.")
        return StoreFile(fs, f"{path}/{file}", f"{url}/{file}")

    if "model.safetensors" not in files and INDEXES[0] in files:
        index = read_json(inside(folder, INDEXES[0]), f"{url}/{INDEXES[0]}")
        return assemble(index, f"{url}/{INDEXES[0]}", open_shard, where=url, name=name, folder=folder)
    weights = [file for file in files if file.endswith(".safetensors")]
    if "model.safetensors" not in weights and len(weights) != 1:
        held = listed(weights or sorted(files))
        raise CheckpointError(f"{url} holds {held}; expected model.safetensors, or safetensors shards with an index.")
    file = "model.safetensors" if "model.safetensors" in weights else weights[0]
    return ShardedCheckpoint(name, url, [open_shard(file)], folder)


def download(url: str) -> tuple[Path, str]:
    """Download a folder of small files, as an adapter's, from an object store; return where it is, and its name."""
    fs, path = filesystem(url)
    with explain_store_errors(url, "read"):
        files = folder_files(fs, path)
        if not files:
            raise FileNotFoundError(path)
        weights = [file for file in files if file.endswith(".safetensors")]
        small = {file: size for file, size in files.items() if file.endswith(SIDECARS)}
        folder = download_small_files(fs, path, url, small)
        for file in weights:
            fs.get_file(f"{path}/{file}", str(folder / file))
    return folder, path.rpartition("/")[2]


def all_files(fs: Any, path: str) -> dict[str, int]:
    """Return the files in a folder of a store and in the folders in it, by their path there, with their sizes."""
    fs.invalidate_cache()
    root = fs._strip_protocol(path).rstrip("/") + "/"
    found = _sizes(fs.find(path, detail=True).values())
    return {name.removeprefix(root): size for name, size in found.items() if name.startswith(root)}


def folder_files(fs: Any, path: str) -> dict[str, int]:
    """Return the files directly in a folder of a store, with their sizes; none where there is no such folder."""
    fs.invalidate_cache()
    try:
        entries = fs.ls(path, detail=True)
    except FileNotFoundError:
        return {}
    files = _sizes(entry for entry in entries if entry["type"] == "file")
    return {name.rpartition("/")[2]: size for name, size in files.items()}


def _sizes(entries: Iterable[Any]) -> dict[str, int]:
    """Return name -> size of the entries of a store's answer, which must be names and sizes."""
    sizes = {}
    for entry in entries:
        name, size = entry["name"], entry["size"]
        if not isinstance(name, str) or type(size) is not int or size < 0:
            raise TypeError(f"its list of files holds {short(entry)}")
        sizes[name] = size
    return sizes


def download_small_files(fs: Any, path: str, url: str, files: Mapping[str, int]) -> Path:
    """Download files whose sizes are known to a folder that is removed when the process ends."""
    large = next((file for file, size in files.items() if size > LARGEST), None)
    if large is not None:
        raise CheckpointError(f"{url}/{large} has {files[large]} bytes, too large for a {large}; remove it.")
    if len(files) > MOST_FILES or sum(files.values()) > MOST_BYTES:
        held = f"{len(files)} files of {sum(files.values())} bytes beside its weights"
        raise CheckpointError(f"{url} has {held}, more than any model; remove those that are not the model's.")
    folder = _temporary_folder()
    for file, size in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(fs.cat_file(f"{path}/{file}", start=0, end=size) if size else b"")
    return folder


def _temporary_folder() -> Path:
    """Make a folder that this process holds and removes at its end; remove those of processes that were killed."""
    place = Path(tempfile.gettempdir())
    remove_abandoned(place.glob(f"{PREFIX}*"))
    while True:
        folder, lock = Path(tempfile.mkdtemp(prefix=PREFIX)), ExitStack()
        with suppress(FileNotFoundError):  # another process removed it before it was held
            lock.enter_context(held(folder, folder, folder=True, make=False, wait=True))
            atexit.register(lock.close)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder


class StoreFile(Checkpoint):
    """One `.safetensors` file in an object store."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self.fs, self.path, self.where = fs, path, url
        self.name = path.rpartition("/")[2].removesuffix(".safetensors")
        with explain_store_errors(url, "read"):
            about = fs.info(path)
            self.bytes = int(about["size"])
            version = next((about[key] for key in ("ETag", "etag", "LastModified", "updated") if key in about), "")
            self.version = str(version or about.get("created", ""))
            first = fs.cat_file(path, start=0, end=min(FIRST, self.bytes))
            length = 8 + int.from_bytes(first[:8], "little")
            if FIRST < length <= min(self.bytes, 8 + LONGEST_HEADER):
                first += fs.cat_file(path, start=FIRST, end=length)
        self.entries, metadata = parse_header(io.BytesIO(first), self.bytes, url)
        self.headers = {name: entry.W for name, entry in self.entries.items()}
        self.ties = {}
        for name, twin in metadata.items():
            if twin in self.entries and name not in self.entries and name != "format":
                self.ties[name], self.headers[name] = twin, self.entries[twin].W

    @property
    def state(self) -> list[tuple[str, int, int | str]]:
        return [(self.where, self.bytes, self.version)]

    def read(self, name: str, rows: Rows = None) -> Tensor:
        entry = self.entries[self.ties.get(name, name)]
        shape, start = list(entry.W.shape), entry.start
        if rows is not None:
            start += rows[0] * nbytes(entry.W[:1])
            shape[0] = rows[1] - rows[0]
        W = allocate(shape, entry.W.dtype)
        buffer, done = memoryview(as_bytes(W)), 0
        for first in range(0, len(buffer), RANGE * TOGETHER):
            last = min(first + RANGE * TOGETHER, len(buffer))
            ranges = [(start + at, start + min(at + RANGE, last)) for at in range(first, last, RANGE)]
            for part in self._fetch(ranges):
                buffer[done : done + len(part)] = part
                done += len(part)
        return W

    def sample(self, name: str) -> bytes:
        return self._samples[self.ties.get(name, name)]

    @cached_property
    def _samples(self) -> dict[str, bytes]:
        """The sample of every tensor, fetched together."""
        ranges = {name: sample_ranges(entry.stop - entry.start) for name, entry in self.entries.items()}
        offsets = [
            (self.entries[n].start + a, self.entries[n].start + b) for n, many in ranges.items() for a, b in many
        ]
        fetched = iter(self._fetch(offsets))
        return {name: b"".join(next(fetched) for _ in many) for name, many in ranges.items()}

    def _fetch(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Fetch byte ranges, several at a time where the store can."""
        wanted = [(start, stop) for start, stop in ranges if stop > start]
        starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
        with explain_store_errors(self.where, "read"):
            parts = self.fs.cat_ranges([self.path] * len(wanted), starts, stops, on_error="raise")
            if not all(isinstance(part, bytes | bytearray | memoryview) for part in parts):
                raise TypeError("it answers with something else than bytes")
        if [len(part) for part in parts] != [stop - start for start, stop in wanted]:
            raise CheckpointError(f"{self.where} ends too early: it was replaced while being read; try again.")
        filled = iter(parts)
        return [next(filled) if stop > start else b"" for start, stop in ranges]
