"""Answers from elsewhere: an object store in memory, and a stand-in for the hub that answers with byte ranges."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.engine.store_output import staging_folder
from fuzz.harness import Reader
from fuzz.mutations import as_text, damage_content, mutated
from fuzz.readers.checkpoints import _build_index, _damage_index, _damage_safetensors
from fuzz.readers.models import damage_record, merge, merge_and_compare, recipe, write_models


def _read_all(text: str, **options: Any) -> None:
    checkpoint = open_checkpoint(text, **options)
    assert checkpoint.fingerprint
    for name, W in checkpoint.headers.items():
        found = checkpoint.read(name)
        assert tuple(found.shape) == tuple(W.shape)
        assert W.dim() < 1 or W.shape[0] < 2 or checkpoint.read(name, (1, 2)).shape == found[1:2].shape


# an object store


def _build_store(folder: Path) -> None:
    (folder / "index").mkdir()
    (folder / "single").mkdir()
    _build_index(folder / "index")
    write_models(folder / "single", "base", "one", "two")


def _damage_store(rng: Random, folder: Path) -> None:
    which = rng.choice(("index", "single"))
    (folder / "which").write_text(which)
    (_damage_index if which == "index" else _damage_safetensors)(rng, folder / which)


def _put(folder: Path) -> Any:
    """Return a store in memory that holds the files of a folder."""
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size < 1 << 20:
            fs.pipe_file(f"/{path.relative_to(folder)}", path.read_bytes())
    return fs


def _read_store(folder: Path) -> None:
    _put(folder / ((folder / "which").read_text() if (folder / "which").exists() else "single"))
    models = [{"model": f"memory://{name}"} for name in ("one", "two")]
    _read_all("memory://base")
    made = {"merge_method": "task_arithmetic", "base_model": "memory://base", "models": models}
    merge_and_compare(made, folder / "out")


# an output in an object store, and what a killed upload left beside it


UPLOAD = "0123456789abcdef" * 2
STORED = ("out", f"out.epimer-upload/{UPLOAD}")


def _build_stored(folder: Path) -> None:
    write_models(folder, "base", "one", "two")
    for name in STORED:
        merge(recipe(folder, "ties"), folder / "store" / name)
    (folder / f"{staging_folder('memory://out').name}.lock").write_text(UPLOAD)


def _damage_stored(rng: Random, folder: Path) -> None:
    damaged, whole = rng.sample([folder / "store" / name for name in STORED], 2)
    damage_record(rng, damaged / "epimer.json")
    if rng.random() < 0.5:
        shutil.rmtree(whole)


def _read_stored(folder: Path) -> None:
    """Merge into the store; the weights that are there afterwards are those of the merge."""
    fs = _put(folder / "store")
    before = os.getcwd()
    os.chdir(folder)  # where files are until they are uploaded
    try:
        epimer.merge(recipe(folder, "ties"), "memory://out", overwrite=True, progress=False, workers=1)
    finally:
        os.chdir(before)
    expected = merge(recipe(folder, "ties"), folder / "fresh")
    stored = load(fs.cat_file("/out/model.safetensors"))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], W) for name, W in expected.items()), "the store holds another merge"


# the hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Answer(BaseHTTPRequestHandler):
    """Answers for one model from the folder of the case, as its `answers.json` says."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and content in one packet, for which nobody waits
    folder: Path

    def do_GET(self) -> None:
        odd = json.loads((self.folder / "answers.json").read_text())
        file = re.fullmatch(r"/org/model/resolve/[^/]+/(.+)", self.path)
        if self.path.startswith("/api/models/org/model/tree/"):
            return self._reply(200, (self.folder / "tree.json").read_bytes(), {})
        if self.path.startswith("/api/models/org/model"):
            return self._reply(200, (self.folder / "about.json").read_bytes(), {})
        path = self.folder / "model" / file[1] if file else None
        if path is None or not path.is_file():
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        headers = {"ETag": '"abc"', "X-Repo-Commit": COMMIT}
        headers |= {name: value for name, value in odd.get("headers", {}).items() if value is not None}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if part is None or odd.get("whole"):
            return self._reply(200, data, headers, odd.get("size"))
        first, last = map(int, part.groups())
        headers["Content-Range"] = odd.get("range") or f"bytes {first}-{last}/{len(data)}"
        content = data[first : last + 1]
        content = content[: odd["short"]] if "short" in odd else content + b"x" * odd.get("long", 0)
        return self._reply(odd.get("status", 206), content, headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _reply(self, status: int, data: bytes, headers: dict[str, str], size: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)) if size is None else size)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


_SERVERS: list[ThreadingHTTPServer] = []


def _serve(folder: Path) -> None:
    """Answer from a folder, and have huggingface_hub ask there; the first call starts the server."""
    Answer.folder = folder
    if not _SERVERS:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _SERVERS.append(server)
    address = f"http://127.0.0.1:{_SERVERS[0].server_port}"
    os.environ.update(
        HF_ENDPOINT=address,
        HF_HUB_OFFLINE="0",
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DOWNLOAD_TIMEOUT="2",
        HF_HUB_ETAG_TIMEOUT="2",
    )
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_OFFLINE = address, False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"


def _build_hub(folder: Path) -> None:
    write_models(folder, "model")
    files = sorted(path.name for path in (folder / "model").iterdir())
    about = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "private": False}
    (folder / "about.json").write_text(json.dumps(about))
    tree = [
        {"type": "file", "path": name, "oid": "abc", "size": (folder / "model" / name).stat().st_size} for name in files
    ]
    (folder / "tree.json").write_text(json.dumps(tree))
    (folder / "answers.json").write_text("{}")


def _damage_hub(rng: Random, folder: Path) -> None:
    odd: dict[str, Any] = {}
    kind = rng.randrange(8)
    if kind == 0:
        odd["status"] = rng.choice((200, 204, 301, 403, 404, 416))
    elif kind == 1:
        odd["short"] = rng.choice((0, 1, 7, 8, 9, 100))
    elif kind == 2:
        odd["long"] = rng.choice((1, 8, 1000))
    elif kind == 3:
        odd["whole"] = True
    elif kind == 4:
        odd["range"] = rng.choice(("bytes */0", "x", "bytes 0-0/1", "bytes 5-9/99999999999999999999"))
    elif kind == 5:
        names = ("ETag", "X-Linked-Size", "X-Linked-Etag", "X-Repo-Commit", "Location")
        values = ("", "x", "-1", "9" * 400, "99999999999", '""', "0", "1e5", "../../x", "a" * 5000)
        odd["headers"] = {rng.choice(names): rng.choice(values)}
    elif kind == 6:
        path = folder / rng.choice(("about.json", "about.json", "tree.json"))
        path.write_text(as_text(mutated(rng, json.loads(path.read_text()))))
    else:
        damage_content(rng, rng.choice(sorted((folder / "model").iterdir())))
    (folder / "answers.json").write_text(json.dumps(odd))


def _read_hub(folder: Path) -> None:
    from huggingface_hub import constants

    _serve(folder)
    constants.HF_HUB_CACHE = str(folder / "cache")
    _read_all("org/model", download=False)


READERS = [
    Reader("object-store", _build_store, _damage_store, _read_store, share=4),
    Reader("store-output", _build_stored, _damage_stored, _read_stored, share=2),
    Reader("hub-ranges", _build_hub, _damage_hub, _read_hub, share=2),
]
