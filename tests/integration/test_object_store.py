"""Models in object stores: merged from there and to there, the same bytes as on disk; whole or not at all."""

import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from commands import assert_refused, run
from epimer.checkpoints import object_store, open_checkpoint


@pytest.fixture
def store():
    """fsspec's file system in memory, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "m0", "m1"):
        folder = tmp_path / "disk" / name
        folder.mkdir(parents=True)
        state = {f"layers.{i}.weight": torch.randn(64, 48, generator=generator) for i in range(4)}
        state |= {"norm": torch.randn(48, generator=generator), "empty": torch.zeros(0)}
        names = sorted(state)
        halves = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
        if name == "m1":  # one file, the others have shards
            save_file(state, folder / "model.safetensors")
        else:
            for file, part in halves.items():
                save_file({key: state[key] for key in part}, folder / file)
            index = {"weight_map": {key: file for file, part in halves.items() for key in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return tmp_path / "disk"


def recipe(root, method="tsv", **more):
    models = [{"model": f"{root}/m{t}"} for t in (0, 1)]
    return {"merge_method": method, "base_model": f"{root}/base", "models": models, **more}


def upload(fs, models, root):
    for path in models.glob("*/*"):
        fs.pipe_file(f"{root}/{path.parent.name}/{path.name}", path.read_bytes())


def files_in(fs, path):
    return {name: fs.cat_file(f"{path}/{name}") for name in object_store.folder_files(fs, path)}


def on_disk(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_merge(stored, local):
    """The files of a merge in a store are those of one on disk, whose record also says where its inputs lie."""
    assert stored.keys() == local.keys()
    records = [json.loads(files.pop("epimer.json")) for files in (stored, local)]
    assert stored == local
    assert records[1].pop("places").count("../disk/") == 3
    for record in records:
        del record["sha256"]
    assert records[0] == records[1]


def assert_round_trip(fs, models, url, path):
    """What is merged from a store into it is what is merged on disk."""
    upload(fs, models, path)
    epimer.merge(recipe(models), "local", device="cpu", progress=False)
    ran = run("merge", _written(recipe(url)), f"{url}/merged", "-q")
    assert ran.code == 0, ran.err
    assert_same_merge(files_in(fs, f"{path}/merged"), on_disk(models.parent / "local"))
    assert not object_store.folder_files(fs, f"{path}/merged.epimer-upload")
    assert not list(models.parent.glob(".*"))
    again = run("merge", _written(recipe(url)), f"{url}/merged")
    assert "is already there" in again.out
    assert_refused(run("merge", _written(recipe(url, "ties")), f"{url}/merged"), "holds something else")
    assert run("merge", _written(recipe(url, "ties")), f"{url}/merged", "--overwrite", "-q").code == 0
    epimer.merge(recipe(models, "ties"), "ties", device="cpu", progress=False)
    assert_same_merge(files_in(fs, f"{path}/merged"), on_disk(models.parent / "ties"))


def _written(recipe):
    with open("recipe.yaml", "w") as file:
        json.dump(recipe, file)
    return "recipe.yaml"


def test_a_round_trip(store, models):
    assert_round_trip(store, models, "memory://bucket", "bucket")


def test_only_ranges_are_fetched(store, models, monkeypatch):
    big = {"small": torch.zeros(4), "large": torch.arange(3_000_000).to(torch.int32)}
    save_file(big, "big.safetensors")
    store.put_file("big.safetensors", "bucket/big.safetensors")
    monkeypatch.setattr(object_store, "RANGE", 1 << 20)
    monkeypatch.setattr(object_store, "FIRST", 64)  # so that the header takes a second request
    fetched = []
    cat = type(store).cat_file

    def counting(self, path, start=None, end=None, **more):
        fetched.append(end - start)
        return cat(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(store), "cat_file", counting)
    opened = open_checkpoint("memory://bucket/big.safetensors")
    assert sum(fetched) < 1000
    assert torch.equal(opened.read("large", (1000, 2_000_000)), big["large"][1000:2_000_000])
    assert max(fetched) == 1 << 20
    assert sum(fetched) < 4 * 2_000_000
    assert torch.equal(opened.read("small"), big["small"])
    assert opened.fingerprint == open_checkpoint("big.safetensors").fingerprint


def test_an_upload_that_stops_leaves_no_record_and_is_taken_up(store, models, monkeypatch):
    upload(store, models, "bucket")
    mv, moved = type(store).mv, []

    def stopping(self, old, new, **more):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(new)
        mv(self, old, new, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "mv", stopping)
        with pytest.raises(KeyboardInterrupt):
            epimer.merge(recipe("memory://bucket"), "memory://bucket/out", device="cpu", progress=False)
    assert set(files_in(store, "bucket/out")) == {"README.md", "model.safetensors"}
    with pytest.raises(epimer.OutputError, match="holds something else"):
        epimer.merge(recipe("memory://bucket", "ties"), "memory://bucket/out", device="cpu", progress=False)
    calls = []
    monkeypatch.setattr("epimer.engine.output._merge_all", lambda *args: calls.append(args))
    epimer.merge(recipe("memory://bucket"), "memory://bucket/out", device="cpu", progress=False)
    assert not calls  # the folder was made before
    assert set(files_in(store, "bucket/out")) == {
        *("README.md", "config.json", "epimer.json", "model.safetensors", "recipe.yaml")
    }
    assert not list(models.parent.glob(".*"))


WRITES = ("pipe_file", "put_file", "rm_file", "mv", "rm")


def interrupted(monkeypatch, fs, at, action):
    """Let something happen just before the `at`-th call that changes a store; return the list of such calls."""
    calls = []

    def watched(name, call):
        def watching(self, *args, **more):
            if not calls or calls[-1] != "busy":  # calls of the action and calls within calls do not count
                calls.append(name)
                if len(calls) == at:
                    calls.append("busy")
                    action()
                    calls.pop()
                nested = len(calls)
                calls.append("busy")
                try:
                    return call(self, *args, **more)
                finally:
                    del calls[nested:]
            return call(self, *args, **more)

        return watching

    for name in WRITES:
        monkeypatch.setattr(type(fs), name, watched(name, getattr(type(fs), name)))
    return calls


def stored(fs, url):
    return {name: fs.cat_file(f"{url}/{name}") for name in object_store.all_files(fs, url)}


@pytest.fixture
def two(models, monkeypatch):
    """Two recipes for one address, run in folders of their own, and the files that each makes."""
    made = {}
    for method in ("tsv", "ties"):
        (models.parent / method).mkdir()
        monkeypatch.chdir(models.parent / method)
        epimer.merge(recipe(models, method), models.parent / f"local-{method}", device="cpu", progress=False)
        made[method] = on_disk(models.parent / f"local-{method}")

    def into_store(method):
        with contextlib.chdir(models.parent / method):
            epimer.merge(recipe(models, method), "memory://b/out", device="cpu", progress=False, overwrite=True)

    return into_store, made


@pytest.mark.parametrize("at", range(1, 13))
def test_of_two_runs_into_one_address_one_gives_way(store, two, monkeypatch, at):
    """The second run comes just before each of the calls by which the first changes the store."""
    into_store, made = two
    second = []

    def run_second():
        try:
            into_store("ties")
            second.append("done")
        except epimer.OutputError as error:
            second.append(str(error))

    with monkeypatch.context() as patch:
        calls = interrupted(patch, store, at, run_second)
        into_store("tsv")
    assert at == 1 or len(calls) == 12
    assert_same_merge(stored(store, "b/out"), dict(made["tsv"]))  # which ended last, or alone
    assert second == ["done"] if at == 1 else "another run writes to memory://b/out" in second[0]
    assert not object_store.all_files(store, "b/out.epimer-upload")
    into_store("ties")
    assert_same_merge(stored(store, "b/out"), dict(made["ties"]))


def test_what_the_store_changes_is_found_before_the_record_appears(store, two, monkeypatch):
    into_store, _ = two

    def damage():
        data = bytearray(store.cat_file("b/out/model.safetensors"))
        data[-3] ^= 64
        store.pipe_file("b/out/model.safetensors", bytes(data))

    with monkeypatch.context() as patch:
        calls = interrupted(patch, store, 10, damage)
        with pytest.raises(
            epimer.OutputError, match=r"does not hold what was uploaded \(changed: 'model\.safetensors'"
        ):
            into_store("tsv")
    assert calls[-1] == "mv"
    assert "epimer.json" not in stored(store, "b/out")


def test_the_modules_of_sentence_transformers_go_from_store_to_store(store, models):
    upload(store, models, "bucket")
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    for name in ("base", "m0", "m1"):
        store.pipe_file(f"bucket/{name}/modules.json", json.dumps(modules).encode())
        store.pipe_file(f"bucket/{name}/1_Pooling/config.json", b'{"pooling_mode_cls_token": true}')
    epimer.merge(recipe("memory://bucket"), "memory://bucket/out", device="cpu", progress=False)
    files = {"README.md", "config.json", "epimer.json", "model.safetensors", "recipe.yaml"}
    files |= {"modules.json", "1_Pooling/config.json"}
    assert set(object_store.all_files(store, "bucket/out")) == files
    assert store.cat_file("bucket/out/1_Pooling/config.json") == b'{"pooling_mode_cls_token": true}'
    again = epimer.merge(recipe("memory://bucket"), "memory://bucket/out", device="cpu", progress=False)
    assert again.timings == {}  # already there
    changed = recipe("memory://bucket", "average")
    epimer.merge(changed, "memory://bucket/out", device="cpu", progress=False, overwrite=True)
    assert set(object_store.all_files(store, "bucket/out")) == files
    store.pipe_file("bucket/m1/1_Pooling/config.json", b'{"pooling_mode_mean_tokens": true}')
    with pytest.raises(epimer.CheckpointError, match=r"1_Pooling/config\.json differs between base and models\[1\]"):
        epimer.merge(recipe("memory://bucket"), "memory://bucket/other", device="cpu", progress=False)


def test_an_adapter_in_a_store(store, models):
    A, B = torch.randn(2, 48), torch.randn(64, 2)
    parts = {"lora_A": A, "lora_B": B}
    name = "base_model.model.layers.1"
    save_file({f"{name}.{part}.weight": W for part, W in parts.items()}, "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    upload(store, models, "bucket")
    store.put_file("adapter_model.safetensors", "bucket/adapter/adapter_model.safetensors")
    store.pipe_file("bucket/adapter/adapter_config.json", json.dumps(config).encode())
    adapted = open_checkpoint("memory://bucket/base+memory://bucket/adapter")
    base = load_file(models / "base" / "model-1.safetensors") | load_file(models / "base" / "model-2.safetensors")
    assert torch.equal(adapted.read("layers.1.weight"), base["layers.1.weight"] + (2 * B) @ A)


def test_what_is_wrong_is_one_line(store, models, monkeypatch):
    def refused(url, *words):
        assert_refused(run("merge", _written(recipe(url)), "out"), *words)

    refused("memory://nowhere", "memory://nowhere/base does not exist; check the bucket's name")
    refused("zzz://bucket", "zzz://bucket/base is in no store that epimer reads (zzz://); give a path")
    store.pipe_file("bucket/base/notes.txt", b"")
    refused("memory://bucket", "memory://bucket/base holds 'notes.txt'; expected model.safetensors")
    store.pipe_file("bucket/base/model.safetensors", b"12345678")
    refused("memory://bucket", "memory://bucket/base/model.safetensors is not a whole safetensors file")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    refused("gs://bucket", "gs://bucket/base needs the package gcsfs; install it with: pip install 'epimer[gcs]'")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_small_file_that_is_large_is_refused_before_it_is_fetched(store, models, monkeypatch, name):
    upload(store, models, "bucket")
    ls = type(store).ls

    def listing(self, path, detail=True, **more):
        entries = ls(self, path, detail, **more)
        return [entry | {"size": 1 << 40} if entry["name"].endswith(name) else entry for entry in entries]

    store.pipe_file(f"bucket/base/{name}", b"{}")
    monkeypatch.setattr(type(store), "ls", listing)
    assert_refused(
        run("merge", _written(recipe("memory://bucket")), "out"),
        f"memory://bucket/base/{name} has {1 << 40} bytes, too large for a {name}",
    )


@pytest.mark.parametrize("odd", [{"size": None}, {"size": "12"}, {"size": -1}, {"name": None}, {"name": 3}, None, []])
@pytest.mark.parametrize("call", ["ls", "find", "cat_ranges"])
def test_answers_of_a_store_that_are_of_another_type_are_refused(store, models, monkeypatch, odd, call):
    upload(store, models, "bucket")
    store.pipe_file("bucket/base/modules.json", b"[]")
    answer = getattr(type(store), call)

    def other(self, *args, **more):
        found = answer(self, *args, **more)
        if call == "cat_ranges":
            return [odd for _ in found]
        changed = [entry | odd if odd else odd for entry in (found.values() if call == "find" else found)]
        return dict(enumerate(changed)) if call == "find" else changed

    monkeypatch.setattr(type(store), call, other)
    assert_refused(run("merge", _written(recipe("memory://bucket")), "out"), "memory://bucket/", "cannot be read")


def test_stores_that_nobody_tried_are_refused_by_name(models):
    """Some of fsspec's stores run programs, read this disk or need arguments that no address has."""
    for protocol in sorted({*fsspec.available_protocols()} - {*object_store.PROTOCOLS}):
        for failure in (epimer.CheckpointError, epimer.OutputError):
            with pytest.raises(failure, match=rf"is in no store that epimer reads \({re.escape(protocol)}://\)"):
                object_store.filesystem(f"{protocol}://place/model", failure)


def test_a_signature_in_an_address_goes_nowhere(store, models):
    upload(store, models, "bucket")
    store.pipe_file("bucket/base/model.safetensors?X-Amz-Signature=5ecre7", b"")
    given = recipe("memory://bucket") | {"base_model": "memory://bucket/base/model.safetensors?X-Amz-Signature=5ecre7"}
    for ran in (
        run("merge", _written(given), "out"),
        run("merge", _written(recipe(models)), "memory://bucket/out?X-Amz-Signature=5ecre7"),
    ):
        assert_refused(ran, "?... has a query string")
        assert "5ecre7" not in ran.out + ran.err


KILLED = """
import os, signal, sys
import fsspec
from epimer.checkpoints import object_store
fs = fsspec.filesystem("memory")
fs.pipe_file("bucket/base/config.json", b"{}")
print(object_store.download_small_files(fs, "bucket/base", "memory://bucket/base", {"config.json": 2}), flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_merge_leaves_in_the_temporary_folder_is_removed_by_the_next(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    first = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(first.stdout.readline().strip())
    store.pipe_file("bucket/base/config.json", b"{}")
    small = "bucket/base", "memory://bucket/base", {"config.json": 2}
    second = object_store.download_small_files(store, *small)
    assert (folder / "config.json").is_file()  # the first is alive
    first.communicate("x")
    third = object_store.download_small_files(store, *small)
    assert {*tmp_path.iterdir()} == {second, third}


# a server that speaks S3


@pytest.fixture
def s3(models, monkeypatch):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            urlopen(f"http://127.0.0.1:{port}/moto-api/").close()
            break
        except OSError:
            time.sleep(0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield fs
    server.terminate()
    server.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_round_trip_through_an_s3_server(s3, models, monkeypatch):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    assert_round_trip(s3, models, "s3://bucket/models", "bucket/models")
    assert_refused(run("merge", _written(recipe("s3://nowhere")), "out"), "s3://nowhere/base does not exist")
    missing = run("merge", _written(recipe(models)), "s3://nowhere/out")
    assert_refused(missing, "s3://nowhere/out cannot be written: there is no bucket 'nowhere'")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert_refused(run("merge", _written(recipe("s3://bucket/models")), "out"), "log in to the store")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_processes_that_write_to_one_address_of_an_s3_server_at_once(s3, models):
    """Whoever ends well says so of a folder that is wholly its own; the other gives way, or both do."""
    made = {}
    for method in ("tsv", "ties"):
        (models.parent / method).mkdir()
        (models.parent / method / "recipe.yaml").write_text(json.dumps(recipe(models, method)))
        epimer.merge(recipe(models, method), models.parent / f"local-{method}", device="cpu", progress=False)
        made[method] = on_disk(models.parent / f"local-{method}")
    command = [sys.executable, "-m", "epimer", "merge", "recipe.yaml", "s3://bucket/out", "--overwrite", "-q"]
    for _ in range(2):
        runs = {
            method: subprocess.Popen(command, cwd=models.parent / method, stderr=subprocess.PIPE, text=True)
            for method in made
        }
        errors = {method: process.communicate(timeout=120)[1] for method, process in runs.items()}
        ended_well = [method for method, process in runs.items() if process.returncode == 0]
        assert all("another run writes to s3://bucket/out" in errors[method] for method in made.keys() - ended_well)
        if ended_well:
            files = stored(s3, "bucket/out")
            method = json.loads(files["epimer.json"])["method"]
            assert method in ended_well
            assert_same_merge(files, dict(made[method]))
        assert not object_store.all_files(s3, "bucket/out.epimer-upload")
