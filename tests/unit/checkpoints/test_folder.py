"""Model folders: one model found, whatever its files are called, and nothing outside the folder touched."""

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.checkpoints.checkpoint import Checkpoint
from epimer.checkpoints.folder import open_folder
from epimer.checkpoints.hub import needed
from epimer.checkpoints.sidecar_files import sidecar_files
from epimer.errors import CheckpointError
from models import make_base, make_models

INDEX = "model.safetensors.index.json"


def put(folder: Path, files: dict[str, dict[str, Tensor]], weight_map: object = None, index: str = INDEX) -> Path:
    """Write weights and, if given, an index into a folder."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, state in files.items():
        path = folder / name
        (safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    if weight_map is not None:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tensors(model: Checkpoint) -> dict[str, Tensor]:
    return {name: model.read(name) for name in model.headers}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, W in expected.items():
        assert found[name].dtype == W.dtype
        assert torch.equal(found[name], W), name


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    assert folder.name in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


A, B = {"a": torch.arange(4.0)}, {"b": torch.ones(2, 3)}


# what is found


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "weights.safetensors", "weights.pt"])
def test_a_single_file(folder, file):
    put(folder, {file: {**A, **B}, "training_args.bin": {}, "optimizer.pt": {}})
    model = open_folder(folder)
    assert_same(tensors(model), {**A, **B})
    assert model.files == [folder / file]
    assert model.folder == folder
    assert model.name == "model"


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_shards_as_the_hub_writes_them(folder, safe):
    state = make_base()
    save_torch_state_dict(state, folder, max_shard_size=2000, safe_serialization=safe)
    assert len(list(folder.iterdir())) > 3
    model = open_folder(folder)
    assert_same(tensors(model), state)
    assert {file.parent for file in model.files} == {folder}


def test_shards_in_a_subfolder(folder):
    put(folder / "shards", {"1.safetensors": A, "2.safetensors": B})
    put(folder, {}, {"a": "shards/1.safetensors", "b": "shards/2.safetensors"})
    assert_same(tensors(open_folder(folder)), {**A, **B})


def test_safetensors_are_preferred(folder):
    put(folder, {"model.safetensors": A, "pytorch_model.bin": B})
    assert_same(tensors(open_folder(folder)), A)
    put(folder, {"1.safetensors": B, "pytorch_model.bin": A}, {"b": "1.safetensors"})
    (folder / "model.safetensors").unlink()
    assert_same(tensors(open_folder(folder)), B)


def test_a_bin_index_beside_safetensors_is_left_alone(folder):
    put(folder, {"model.safetensors": A}, {"b": "../lost.bin"}, "pytorch_model.bin.index.json")
    assert_same(tensors(open_folder(folder)), A)


def test_a_folder_is_called_by_its_real_name(tmp_path, folder, monkeypatch):
    put(folder, {"model.safetensors": A})
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").name == "model"
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint(str(tmp_path / "link")).name == "model"
    assert open_checkpoint(str(folder / "model.safetensors")).name == "model"


# fingerprints


def every_way(folder: Path, state: dict[str, Tensor]) -> dict[str, str]:
    """Store a model in every way there is; return the fingerprints."""
    put(folder / "single", {"model.safetensors": state})
    put(folder / "bin", {"pytorch_model.bin": state})
    for safe in (True, False):
        where = folder / ("shards" if safe else "bin shards")
        where.mkdir(exist_ok=True)
        save_torch_state_dict(state, where, max_shard_size=2000, safe_serialization=safe)
    put(folder, {"file.safetensors": state, "file.pt": dict(reversed(state.items()))})
    return {where.name: open_checkpoint(str(where)).fingerprint for where in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fingerprints_do_not_depend_on_how_a_model_is_stored(tmp_path, dtype):
    found = every_way(tmp_path, make_base(dtype))
    assert len(found) == 6
    assert len(set(found.values())) == 1


def test_fingerprints_differ_between_models(tmp_path):
    base = make_base()
    different = [
        base,
        *make_models(base, 2),
        make_base(torch.bfloat16),
        {f"model.{name}": W for name, W in base.items()},
        {**base, "conv.weight": base["conv.weight"].flatten(1)},
        {**base, "temperature": base["temperature"] + 1e-6},
        {**base, "empty": torch.ones(3, 0)},
        {**base, "steps": base["steps"].int()},
        {name: W for name, W in base.items() if name != "steps"},
    ]
    found = [open_folder(put(tmp_path / str(i), {"model.safetensors": state})) for i, state in enumerate(different)]
    assert len({model.fingerprint for model in found}) == len(different)


@pytest.mark.parametrize(("first", "second"), [("embed", "head"), ("model.embed.weight", "lm_head.weight")])
def test_ties_are_the_same_however_a_model_is_stored(tmp_path, first, second):
    W = torch.randn(5, 3)
    state = {first: W, "norm": torch.ones(3), second: W}
    (tmp_path / "hub").mkdir()
    save_torch_state_dict(dict(state), tmp_path / "hub")
    put(tmp_path / "torch", {"pytorch_model.bin": state})
    models = [open_checkpoint(str(tmp_path / where)) for where in ("hub", "torch")]
    for model in models:
        assert_same(tensors(model), state)
        assert {name for pair in model.ties.items() for name in pair} == {first, second}
    assert len({model.fingerprint for model in models}) == 1


# what is refused


def test_both_a_file_and_an_index(folder):
    put(folder, {"model.safetensors": A}, {"a": "model.safetensors"})
    assert f"has both model.safetensors and {INDEX}, and only one can be the model; remove the other" in refused(folder)


def test_no_weights(folder):
    (folder / "config.json").write_text("{}")
    put(folder, {"training_args.bin": {}, "optimizer.pt": {}})
    assert "holds no weights; expected model.safetensors or shards with an index" in refused(folder)


def test_several_files_and_no_index(folder):
    put(folder, {"one.safetensors": A, "two.safetensors": B})
    assert "holds 2 weight files and no index: 'one.safetensors', 'two.safetensors'" in refused(folder)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_alone(folder, file):
    put(folder, {file: A})
    (folder / "adapter_config.json").write_text("{}")
    assert f"is a LoRA adapter, not a whole model; write it as BASE+{folder}" in refused(folder)


def test_an_index_that_names_a_missing_shard(folder):
    put(folder, {"1.safetensors": A}, {"a": "1.safetensors", "b": "2.safetensors"})
    assert "2.safetensors does not exist, but its folder needs it; copy or download it again" in refused(folder)


def test_an_index_that_names_missing_tensors(folder):
    put(folder, {"1.safetensors": A}, {"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"})
    assert f"{INDEX} names 2 tensors that their shards lack: 'b', 'c'" in refused(folder)


def test_an_index_that_swaps_shards(folder):
    put(folder, {"1.safetensors": A, "2.safetensors": B}, {"a": "2.safetensors", "b": "1.safetensors"})
    assert "names 2 tensors that their shards lack" in refused(folder)


def test_an_index_that_forgets_a_tensor(folder):
    put(folder, {"1.safetensors": A, "2.safetensors": {**B, "c": A["a"]}}, {"a": "1.safetensors", "b": "2.safetensors"})
    assert "lacks 1 tensors that the shards have: 'c'; is it stale?" in refused(folder)


def test_a_tensor_in_two_shards(folder):
    put(folder, {"1.safetensors": A, "2.safetensors": {**A, **B}}, {"a": "1.safetensors", "b": "2.safetensors"})
    message = refused(folder)
    assert "'a' is in both" in message
    assert "remove the shard that is left over from another save" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[]", "holds a list, expected an object"),
        (b"{}", "has no weight_map from tensor names to file names"),
        (b'{"weight_map": ["a"]}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "has no weight_map"),
        (b'{"weight_map": {"a": null}}', "has no weight_map"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not JSON"),
    ],
    ids=["empty", "cut", "binary", "nested", "long number", "list", "nothing", "names", "number", "null", "LFS"],
)
def test_an_index_that_is_none(folder, text, message):
    (folder / INDEX).write_bytes(text)
    assert message in refused(folder)
    assert INDEX in refused(folder)


# nothing leads out


@pytest.fixture
def secret(tmp_path):
    """A readable model outside the folder."""
    path = tmp_path / "secret.safetensors"
    safetensors.torch.save_file(A, path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "./../secret.safetensors",
        "{absolute}",
        "link.safetensors",
    ],
)
def test_an_index_that_leads_out(folder, secret, name):
    (folder / "link.safetensors").symlink_to(secret)
    (folder / "sub").mkdir()
    name = name.replace("{absolute}", str(secret))
    put(folder, {}, {"a": name})
    assert f"{name!r} leads out of the folder" in refused(folder)


def test_an_index_through_a_linked_folder(tmp_path, folder, secret):
    (folder / "sub").symlink_to(tmp_path)
    put(folder, {}, {"a": "sub/secret.safetensors"})
    assert "'sub/secret.safetensors' leads out of the folder" in refused(folder)


@pytest.mark.parametrize(
    "name", ["", ".", "a\0b.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "sub", "x.txt", INDEX]
)
def test_an_index_that_names_no_file_of_weights(folder, name):
    (folder / "sub").mkdir()
    (folder / "x.txt").write_text("x")
    put(folder, {}, {"a": name})
    refused(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "weights.safetensors", INDEX])
def test_a_link_that_leads_out(folder, secret, file):
    target = secret
    if file == INDEX:
        target = secret.with_name("index.json")
        target.write_text('{"weight_map": {}}')
    elif file.endswith(".bin"):
        target = secret.with_suffix(".bin")
        torch.save(A, target)
    (folder / file).symlink_to(target)
    assert f"{file!r} leads out of the folder" in refused(folder)
    (folder / file).unlink()
    (folder / file).symlink_to(os.path.relpath(target, folder))
    assert f"{file!r} leads out of the folder" in refused(folder)


def test_a_link_within_the_folder_is_fine(folder):
    put(folder / "weights", {"1.safetensors": A})
    (folder / "model.safetensors").symlink_to("weights/1.safetensors")
    assert_same(tensors(open_folder(folder)), A)


@pytest.mark.parametrize("target", ["model.safetensors", "nowhere.safetensors"], ids=["itself", "nothing"])
def test_a_link_to(folder, target):
    (folder / "model.safetensors").symlink_to(target)
    refused(folder)


def test_a_folder_without_weights_is_not_searched_to_its_depth(tmp_path):
    """It may be a home folder, with a million files below."""
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "old.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="holds no weights; expected"):
        open_folder(tmp_path)
    (tmp_path / "a" / "near.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"a/near\.gguf is a GGUF file"):
        open_folder(tmp_path)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "model.safetensors")
    refused(folder)


def hub(root: Path, target: str) -> Path:
    """Lay out a model as the hub's cache does; return its snapshot."""
    snapshot = root / "models--org--name" / "snapshots" / ("0123456789" * 4)
    blobs = root / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file(A, blobs / "abc")
    (blobs / "def").write_text('{"model_type": "bert"}')
    (snapshot / "model.safetensors").symlink_to(target)
    (snapshot / "config.json").symlink_to("../../blobs/def")
    return snapshot


def test_the_hub_cache_links_to_its_blobs(tmp_path):
    snapshot = hub(tmp_path, "../../blobs/abc")
    assert_same(tensors(open_folder(snapshot)), A)
    assert json.loads(sidecar_files(snapshot, None, None)["config.json"]) == {"model_type": "bert"}


def test_the_hub_cache_of_one_model_does_not_lead_to_another(tmp_path, secret):
    assert "leads out of the folder" in refused(hub(tmp_path / "one", str(secret)))
    hub(tmp_path / "two", "../../blobs/abc")
    other = tmp_path / "two" / "models--org--name" / "blobs" / "abc"
    (tmp_path / "two" / "models--org--other" / "snapshots" / "1").mkdir(parents=True)
    snapshot = tmp_path / "two" / "models--org--other" / "snapshots" / "1"
    (snapshot / "model.safetensors").symlink_to(other)
    assert "leads out of the folder" in refused(snapshot)


# what goes along


def test_config_and_tokenizer_go_along_and_nothing_else(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for where in (folder, other):
        for file in ("config.json", "tokenizer.json", "preprocessor_config.json", "modeling.py", "notes.txt", ".env"):
            (where / file).write_text(json.dumps({"from": where.name}))
    found = {name: json.loads(data)["from"] for name, data in sidecar_files(folder, other, None).items()}
    assert found == {"config.json": "model", "preprocessor_config.json": "model", "tokenizer.json": "other"}


def test_the_config_names_the_dtype_and_no_path(folder):
    config = {"_name_or_path": "/home/me", "torch_dtype": "float32", "text": {"dtype": "float16", "_name_or_path": "x"}}
    (folder / "config.json").write_text(json.dumps({**config, "größe": "重み"}))
    found = json.loads(sidecar_files(folder, folder, "bfloat16")["config.json"])
    assert found == {"torch_dtype": "bfloat16", "text": {"dtype": "bfloat16"}, "größe": "重み"}
    assert json.loads(sidecar_files(folder, folder, None)["config.json"])["torch_dtype"] == "float32"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "vocab.txt"])
def test_a_linked_file_is_not_carried_out_of_its_place(folder, tmp_path, file):
    (tmp_path / "password").write_text('{"secret": 1}')
    (folder / file).symlink_to("../password")
    with pytest.raises(CheckpointError, match=f"'{file}' leads out of the folder"):
        sidecar_files(folder, folder, None)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}'],
    ids=["empty", "cut", "list", "binary", "nested without end", "a lone surrogate"],
)
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        sidecar_files(folder, folder, None)


# names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "no/such/folder",
        "org/na me",
        "a\0b",
        "x" * 5000,
        "nowhere.safetensors",
        "nowhere.bin",
        "+",
        "a+",
        "~nobody-of-this-name/model",
    ],
)
def test_a_name_that_is_neither_a_path_nor_a_model(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError):
        open_checkpoint(text)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"model\.npz is not a checkpoint: expected \.safetensors, \.bin"):
        open_checkpoint(str(tmp_path / "model.npz"))


FORMATS_REFUSED = {
    "model.onnx": "is an ONNX graph",
    "onnx/model_quantized.onnx": "is an ONNX graph",
    "tf_model.h5": "from_tf=True",
    "flax_model.msgpack": "from_flax=True",
    "model.gguf": "gguf_file=",
}


@pytest.mark.parametrize("file", FORMATS_REFUSED)
def test_weights_that_cannot_be_merged_are_refused_by_their_format(tmp_path, file):
    """A file, a folder of it and a hub repository of it; not where there are weights beside it that can be merged."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    way_out = re.escape(FORMATS_REFUSED[file])
    for place in (tmp_path, tmp_path / file):
        with pytest.raises(CheckpointError, match=rf"{re.escape(file)} .*{way_out}") as error:
            open_checkpoint(str(place))
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=rf"org/name/{re.escape(file)} is "):
        needed(["config.json", file], "org/name")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(str(tmp_path)).headers) == ["w"]
    assert needed(["config.json", file, "model.safetensors"], "org/name") == ["model.safetensors", "config.json"]


def test_a_diffusers_pipeline_names_the_parts_to_merge(tmp_path):
    """The root also where it holds the whole pipeline in one file, as Stable Diffusion's does; a part is a model."""
    files = ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors", "vae/config.json"]
    files += ["vae/diffusion_pytorch_model.bin", "scheduler/scheduler_config.json"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "v1-5.safetensors")
    reason = "is a diffusers pipeline (model_index.json); merge its parts, each as a model of its own:"
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path))
    assert str(error.value) == f"{tmp_path} {reason} {tmp_path}/unet, {tmp_path}/vae."
    with pytest.raises(CheckpointError) as error:
        needed([*files, "v1-5.safetensors"], "org/sd@main")
    assert str(error.value) == f"sd {reason} sd/unet, sd/vae; download it first: hf download org/sd --local-dir sd"
    assert list(open_checkpoint(str(tmp_path / "unet")).headers) == ["w"]


@pytest.mark.parametrize("most", ["5GB", "100B"])
def test_diffusers_file_names_are_read_and_written(tmp_path, most):
    """A variant beside the weights is not the model, and the output has the names that diffusers looks for."""
    state = {"a": torch.arange(20.0).view(4, 5), "b": torch.ones(4, 5)}
    for i, name in enumerate(("base", "one", "two")):
        files = {"diffusion_pytorch_model.safetensors": {key: W + i for key, W in state.items()}}
        files["diffusion_pytorch_model.fp16.safetensors"] = {key: W.half() for key, W in state.items()}
        put(tmp_path / name, files)
        (tmp_path / name / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    models = [{"model": str(tmp_path / name)} for name in ("one", "two")]
    recipe = {"merge_method": "average", "base_model": str(tmp_path / "base"), "models": models}
    epimer.merge(recipe, tmp_path / "out", progress=False, max_shard_size=most)
    written = sorted(path.name for path in (tmp_path / "out").glob("*model*"))
    if most == "5GB":
        assert written == ["diffusion_pytorch_model.safetensors"]
    else:
        assert written == [
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model-00002-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
        ]
    again = open_checkpoint(str(tmp_path / "out"))
    for key, W in state.items():
        assert torch.equal(again.read(key), W + 1.5)
