"""Models in object stores: merged from there and to there, the same bytes as on disk; whole or not at all."""

import json
import logging
import socket
import subprocess
import sys
import time
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
    refused("zzz://bucket", "zzz://bucket/base is in no store that fsspec knows")
    store.pipe_file("bucket/base/notes.txt", b"")
    refused("memory://bucket", "memory://bucket/base holds 'notes.txt'; expected model.safetensors")
    store.pipe_file("bucket/base/model.safetensors", b"12345678")
    refused("memory://bucket", "memory://bucket/base/model.safetensors is not a whole safetensors file")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    refused("gs://bucket", "gs://bucket/base needs the package gcsfs; install it with: pip install 'epimer[gcs]'")


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
