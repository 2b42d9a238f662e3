"""Models on the hub without a download of their weights: headers and tensors are fetched as byte ranges."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import open_folder
from epimer.checkpoints.hub import explain_refusals, fetch_repo, needed
from epimer.checkpoints.object_store import TOGETHER, StoreFile
from epimer.errors import CheckpointError


def open_hub(text: str) -> Checkpoint:
    """Open a hub model by its id: from the cache what is there, the rest of its weights by byte ranges.

    Small files are fetched into the cache; so are torch files and adapters, which cannot be read by ranges.
    """
    weights: list[str] = []

    def choose(files: Sequence[str]) -> list[str]:
        chosen = needed(files, text)
        found = [file for file in chosen if "/" not in file and file.endswith((".safetensors", ".bin"))]
        if all(file.endswith(".safetensors") and not file.startswith("adapter_model") for file in found):
            weights.extend(found)
        small = [file for file in chosen if file not in weights]
        return small or [file for file in files if file == ".gitattributes"]  # huggingface_hub warns of no files

    folder, name = fetch_repo(text, "model", choose, CheckpointError, progress=False)
    source = HubRanges(*name.rsplit("@", 1))
    lacking = [file for file in weights if not (folder / file).is_file()]
    return open_folder(folder, text, name, {file: partial(HubFile, source, file, f"{text}/{file}") for file in lacking})


class HubRanges:
    """The files of one commit of a hub model, read as `StoreFile` reads those of a store."""

    def __init__(self, repo: str, commit: str) -> None:
        self.repo, self.commit = repo, commit
        self._places: dict[str, Any] = {}

    def info(self, path: str) -> dict[str, Any]:
        """Return the size and the version of a file."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        if path not in self._places:
            with explain_refusals(self.repo, "model", self.commit, CheckpointError):
                self._places[path] = get_hf_file_metadata(hf_hub_url(self.repo, path, revision=self.commit))
        return {"size": self._places[path].size, "ETag": self._places[path].etag}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to `end`."""
        from huggingface_hub import hf_hub_url

        utils: Any = import_module("huggingface_hub.utils")
        self.info(path)
        place = self._places[path].location
        headers = utils.build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if urlsplit(place).netloc != urlsplit(hf_hub_url(self.repo, path)).netloc:
            headers.pop("authorization", None)  # the address of a file elsewhere holds its own permission
        answer = utils.http_backoff("GET", place, headers=headers)
        utils.hf_raise_for_status(answer)
        if answer.status_code != 206:
            remedy = f"download the model first: hf download {self.repo}"
            raise CheckpointError(f"{self.repo}/{path} is not sent in parts by the hub; {remedy}")
        return bytes(answer.content)

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str) -> list[bytes]:
        """Return byte ranges of files, several fetched at a time; the first error is raised."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(self.cat_file, paths, starts, ends))


class HubFile(StoreFile):
    """One `.safetensors` file on the hub."""

    streams = True

    def __init__(self, source: HubRanges, file: str, where: str) -> None:
        super().__init__(source, file, where)
        self.downloads = {where: self.bytes}
