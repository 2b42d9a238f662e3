"""Models by hub id, against a stand-in for the hub on this machine; epimer runs in processes of their own."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml
from safetensors.torch import load_file, save

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
SHAPES = {"embed.weight": (7, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,)}


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
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.shutdown()
            self.thread.join()
            self.server_close()

    def files(self, command: str = "GET") -> list[str]:
        """Return the files that were sent, in the order of their names."""
        paths = [path for verb, path in self.asked if verb == command and "/resolve/" in path]
        return sorted(re.sub("/resolve/[0-9a-f]{40}/", ":", path.removeprefix("/")) for path in paths)


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path))
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
            return self.reply(200, json.dumps({"id": about["repo"], "sha": sha, "siblings": siblings}).encode())
        assert file
        if file["file"] not in files:
            return self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
        if repo.gated:
            return self.reply(401, headers={"X-Error-Code": "GatedRepo"})
        data = files[file["file"]]
        headers = {"ETag": f'"{self.entry("", data)["oid"]}"', "X-Repo-Commit": sha}
        return self.reply(200, data, headers)

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


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def model(seed: int, **more: bytes) -> dict[str, bytes]:
    """Return the files of a model repository, with much that a merge has no use for."""
    beside = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b'{"version": "1.0"}', "merges.txt": b"a b"}
    useless = {"README.md": b"# hello", "modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"not a pickle"}
    return {"model.safetensors": save(tensors(seed)), **beside, **useless, "run.log": b"", **more}


def torch_model(seed: int) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.save(tensors(seed), file)
    return {"pytorch_model.bin": file.getvalue(), "config.json": b"{}", "modeling_tiny.py": b"raise SystemExit"}


@pytest.fixture
def hub():
    repos = {
        "org/model": Repo([model(1), model(2)], {"main": -1, "old": 0, "refs/pr/1": 0}),
        "org/base": Repo([model(0)]),
        "org/torch": Repo([torch_model(3)]),
        "classic": Repo([model(4)]),
        "org/secret": Repo([model(5)], hidden=(401, {"X-Error-Code": "RepoNotFound"})),
        "org/gated": Repo([model(6)], hidden=(403, {"X-Error-Code": "GatedRepo"})),
        "org/listed": Repo([model(7)], gated=True),
    }
    hub = Hub(repos)
    yield hub
    hub.stop()


@pytest.fixture
def epimer(hub, tmp_path):
    """Return a function that runs commands with a cache of this test's own: the code, stdout and stderr of each."""

    def run(*commands: list[str], **settings: str) -> list[tuple[int, str, str]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
        own |= {"NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        argv = json.dumps([["epimer", *command] for command in commands])
        command = [sys.executable, "-c", COMMANDS, argv]
        made = subprocess.run(command, env=kept | own | settings, cwd=tmp_path, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout)

    return run


def inspected(answer: tuple[int, str, str]) -> str:
    """Return the name of a checkpoint that was inspected, after a look at its tensors."""
    code, out, err = answer
    assert code == 0, err
    found = json.loads(out)
    assert {row["name"]: tuple(row["shape"]) for row in found["tensors"]} == SHAPES
    return found["name"]


def inspect(name: str) -> list[str]:
    return ["inspect", name, "--json"]


def test_what_is_fetched(hub, epimer):
    old, new = hub.repos["org/model"].shas
    names = [inspected(answer) for answer in epimer(inspect("org/model"), inspect("org/model@main"))]
    assert names == [f"org/model@{new}"] * 2
    needed = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert hub.files() == [f"org/model:{name}" for name in needed]
    hub.asked.clear()
    commands = [inspect(f"org/model@{revision}") for revision in ("main", new, "old", "refs/pr/1", old)]
    assert [inspected(answer) for answer in epimer(*commands)] == [
        f"org/model@{sha}" for sha in (new, new, old, old, old)
    ]
    assert hub.files() == ["org/model:model.safetensors"]  # the old one; all else is in the cache


def test_other_weights_are_not_fetched(hub, epimer):
    """Repositories of large models hold the weights a second time, and what training left behind."""
    others = ("consolidated.safetensors", "checkpoint-10/model.safetensors", "onnx/model.safetensors")
    useless = {name: save({"w": torch.full((3,), i)}) for i, name in enumerate(others)}
    hub.repos["org/crowded"] = Repo([model(8, **useless)])
    (answer,) = epimer(inspect("org/crowded"))
    inspected(answer)
    assert [file for file in hub.files() if file.endswith("safetensors")] == ["org/crowded:model.safetensors"]


def test_without_the_hub(hub, epimer):
    old, new = hub.repos["org/model"].shas
    assert all(code == 0 for code, _, _ in epimer(*map(inspect, ("org/model", "org/model@old", "org/torch"))))
    hub.stop()
    cached = {
        "org/model": new,
        "org/model@main": new,
        "org/model@old": old,
        f"org/model@{new}": new,
        f"org/model@{old}": old,
        "org/torch": hub.repos["org/torch"].shas[0],
    }
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        *answers, lost = epimer(*map(inspect, cached), inspect("org/base"), **settings)
        assert lost[0] == 2
        assert re.fullmatch(
            r"error: org/base is neither a path here nor in the hub's cache, and the hub cannot be reached "
            r"\(.+\); download it where there is a network: hf download org/base\n",
            lost[2],
        )
        names = [inspected(answer) for answer in answers]
        assert names == [f"{name.split('@')[0]}@{sha}" for name, sha in cached.items()]


FAULTS = {
    "org/nothing": "org/nothing is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "nothing": "nothing is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "org/secret": "org/secret is neither a path here nor a model on the hub (a private one needs `hf auth login`).",
    "org/model@v9": "org/model has no revision 'v9' on the hub; see its page for branches.",
    f"org/model@{'0' * 40}": f"org/model has no revision '{'0' * 40}' on the hub; see its page for branches.",
    "org/gated": "org/gated is gated; accept its terms on the hub and log in: hf auth login",
    "org/listed": "org/listed is gated; accept its terms on the hub and log in: hf auth login",
}


def test_faults(hub, epimer, tmp_path):
    recipe = {"merge_method": "linear", "models": [{"model": "org/nothing"}, {"model": "org/gated"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    *answers, merge = epimer(*map(inspect, FAULTS), ["merge", "recipe.yaml", "out"])
    assert {name: (code, err) for name, (code, _, err) in zip(FAULTS, answers, strict=True)} == {
        name: (2, f"error: {message}\n") for name, message in FAULTS.items()
    }
    code, _, err = merge
    assert (code, err.count("\n")) == (2, 1)
    assert "models[0]: org/nothing is neither" in err
    assert "models[1]: org/gated is gated" in err
    assert not (tmp_path / "out").exists()
    assert hub.files() == []


def test_merge(hub, epimer, tmp_path):
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "org/base",
        "models": [
            {"model": "org/model@old", "parameters": {"weight": 0.5}},
            {"model": "org/torch", "parameters": {"weight": 0.25}},
            {"model": "classic", "parameters": {"weight": -0.5}},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ((code, _, err),) = epimer(["merge", "recipe.yaml", "out", "--quiet"])
    assert code == 0, err
    assert err == ""
    torch_files = [file for file in hub.files() if file.startswith("org/torch:")]
    assert torch_files == ["org/torch:config.json", "org/torch:pytorch_model.bin"]
    base, *models = (tensors(seed) for seed in (0, 1, 3, 4))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, W in base.items():
        delta = sum(w * (one[name].double() - W) for w, one in zip((0.5, 0.25, -0.5), models, strict=True))
        torch.testing.assert_close(merged[name].double(), W + delta, rtol=1e-6, atol=1e-6)
    shas = {name: repo.shas[0] for name, repo in hub.repos.items()}
    names = [f"{name}@{shas[name]}" for name in ("org/base", "org/model", "org/torch", "classic")]
    record = json.loads((tmp_path / "out" / "epimer.json").read_text())
    assert [name for name, _ in record["models"]] == names
    card = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == ["org/base", "org/model", "org/torch", "classic"]
    assert head["base_model_relation"] == "merge"
    shown = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert [shown["base_model"], *(entry["model"] for entry in shown["models"])] == names
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("README.md", "config.json", "epimer.json", "merges.txt", "model.safetensors", "tokenizer.json")
    }
