"""A stand-in for the hub on this machine, and what a process that asks it needs."""

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# The command line, several times in one process: importing torch is most of what a command costs.
COMMANDS = """
import contextlib, io, json, sys
from epimer.cli import main

done = []
for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            done.append([end.code or 0, out.getvalue(), err.getvalue()])
json.dump(done, sys.stdout)
"""


@dataclass
class Repo:
    """A repository: its commits, the newest last, and who may see it."""

    commits: list[dict[str, bytes]]
    branches: dict[str, int] = field(default_factory=lambda: {"main": -1})
    hidden: tuple[int, dict[str, str]] | None = None
    """status and headers of the answer to everything"""
    gated: bool = False
    """whether files are refused while the list of them is not, as the hub does"""

    @property
    def shas(self) -> list[str]:
        return [hashlib.sha1(repr(files).encode()).hexdigest() for files in self.commits]

    def find(self, revision: str) -> str | None:
        if revision in self.branches:
            return self.shas[self.branches[revision]]
        return revision if revision in self.shas else None


class Hub(ThreadingHTTPServer):
    """Answers what huggingface_hub asks about models, and remembers what that was."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos, self.asked = repos, list[tuple[str, str]]()
        self.parts, self.address = list[tuple[str, int, int]](), f"http://127.0.0.1:{self.server_port}"
        self.large: int | None = None  # bytes from which a file is stored by LFS
        self.chunk: int | None = None  # bytes of a part of it, where it is sent in parts
        self.stored: dict[str, bytes] = {}  # files that LFS stores, and parts of them, by SHA-256
        self.full = False  # whether that store takes no more
        self.silent = False  # whether it tells no commit
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.shutdown()
            self.thread.join()
            self.server_close()

    def files(self, command: str = "GET") -> list[str]:
        """Return the files that were sent whole, in the order of their names."""
        paths = [path for verb, path in self.asked if verb == command and "/resolve/" in path]
        return sorted(re.sub("/resolve/[0-9a-f]{40}/", ":", path.removeprefix("/")) for path in paths)


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        self.server.asked.append(("PART" if part else self.command, path))
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") in ("Bearer good", "Bearer read")
            return self.reply(200 if known else 401, b'{"name": "me", "type": "user"}')
        about = re.fullmatch(r"/api/models/(?P<repo>.+?)(/(?P<what>revision|tree)/(?P<revision>.+))?", path)
        file = re.fullmatch(r"/(?P<repo>.+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        asked = about or file
        repo = self.server.repos.get(asked["repo"]) if asked else None
        if asked is None or repo is None:
            return self.reply(404, headers={"X-Error-Code": "RepoNotFound"})
        if repo.hidden:
            return self.reply(repo.hidden[0], headers=repo.hidden[1])
        sha = repo.find(asked["revision"] or "main")
        if sha is None:
            return self.reply(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[repo.shas.index(sha)]
        if about and about["what"] == "tree":
            return self.reply(200, json.dumps([self.entry(name, data) for name, data in files.items()]).encode())
        if about:
            siblings = [{"rfilename": name} for name in files]
            said = {"id": about["repo"], "sha": None if self.server.silent else sha, "siblings": siblings}
            return self.reply(200, json.dumps(said).encode())
        assert file
        if file["file"] not in files:
            return self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
        if repo.gated:
            return self.reply(401, headers={"X-Error-Code": "GatedRepo"})
        data = files[file["file"]]
        headers = {"ETag": f'"{self.entry("", data)["oid"]}"', "X-Repo-Commit": sha}
        if part is None:
            return self.reply(200, data, headers)
        first, last = map(int, part.groups())
        self.server.parts.append((f"{file['repo']}:{file['file']}", first, last + 1))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.reply(206, data[first : last + 1], headers)

    def do_POST(self) -> None:
        """Answer as the hub does to who makes a repository and commits to it."""
        path, body = urlsplit(self.path).path, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, path))
        if path.startswith("/complete/"):  # whose address only the batch tells
            oid, count = path.split("/")[2], len(json.loads(body)["parts"])
            self.server.stored[oid] = b"".join(self.server.stored.pop(f"{oid}/{i}") for i in range(1, count + 1))
            return self.reply(200, b"{}")
        if self.headers.get("Authorization") != "Bearer good":
            return self.reply(401)
        if path.endswith("/info/lfs/objects/batch"):
            return self.reply(200, json.dumps(self.batch(json.loads(body))).encode())
        if path == "/api/validate-yaml":
            return self.reply(200, b'{"errors": [], "warnings": []}')
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if wanted["organization"] != "org":
                return self.reply(403, b'{"error": "not a member"}')
            if name in self.server.repos:
                return self.reply(409, json.dumps({"url": f"{self.server.address}/{name}"}).encode())
            self.server.repos[name] = Repo([{}])
            return self.reply(200, json.dumps({"url": f"{self.server.address}/{name}"}).encode())
        asked = re.fullmatch(r"/api/models/(?P<repo>.+?)/(?P<what>preupload|commit)/main", path)
        assert asked, path
        if asked["what"] == "preupload":
            least = self.server.large
            files = [
                {**file, "uploadMode": "regular" if least is None or file["size"] < least else "lfs"}
                for file in json.loads(body)["files"]
            ]
            files = [{**file, "shouldIgnore": False} for file in files]
            return self.reply(200, json.dumps({"files": files}).encode())
        lines = [(line["key"], line["value"]) for line in map(json.loads, body.splitlines())]
        added = {one["path"]: base64.b64decode(one["content"]) for key, one in lines if key == "file"}
        added |= {one["path"]: self.server.stored[one["oid"]] for key, one in lines if key == "lfsFile"}
        commits = self.server.repos[asked["repo"]].commits
        commits.append(commits[-1] | added)
        sha = self.server.repos[asked["repo"]].shas[-1]
        url = f"{self.server.address}/{asked['repo']}/commit/{sha}"
        return self.reply(200, json.dumps({"success": True, "commitOid": sha, "commitUrl": url}).encode())

    def batch(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return where to put the objects of an LFS batch that are not stored yet, in parts where they are to be."""
        objects, chunk = [], self.server.chunk
        for one in wanted["objects"]:
            oid, size = one["oid"], one["size"]
            upload: dict[str, Any] = {"href": f"{self.server.address}/store/{oid}"}
            if chunk is not None:
                places = {f"{i:05d}": f"{self.server.address}/store/{oid}/{i}" for i in range(1, -(-size // chunk) + 1)}
                upload = {
                    "href": f"{self.server.address}/complete/{oid}",
                    "header": {"chunk_size": str(chunk), **places},
                }
            objects.append({**one, **({} if oid in self.server.stored else {"actions": {"upload": upload}})})
        return {"transfer": "basic" if chunk is None else "multipart", "objects": objects}

    def do_PUT(self) -> None:
        """Store a file of LFS, or a part of one."""
        body, key = self.rfile.read(int(self.headers["Content-Length"])), self.path.removeprefix("/store/")
        self.server.asked.append((self.command, self.path))
        if self.server.full:
            return self.reply(403)
        assert "/" in key or hashlib.sha256(body).hexdigest() == key
        self.server.stored[key] = body
        return self.reply(200, headers={"ETag": hashlib.sha256(body).hexdigest()})

    def do_HEAD(self) -> None:
        self.do_GET()

    @staticmethod
    def entry(name: str, data: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class DatasetAnswer(Answer):
    """Answers about datasets as about models: the hub's addresses differ by a word."""

    def do_GET(self) -> None:
        self.path = re.sub("^/api/datasets/", "/api/models/", self.path)
        self.path = re.sub("^/datasets/", "/", self.path)
        super().do_GET()


def environment(hub: Hub, home: Path, **settings: str) -> dict[str, str]:
    """Return the variables of a process that knows this hub alone, with a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return kept | own | settings
