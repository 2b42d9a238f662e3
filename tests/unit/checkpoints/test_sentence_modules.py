"""Folders of sentence-transformers are carried whole; what differs beside the model is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.api import plan_merge
from epimer.checkpoints.hub import needed
from epimer.engine.options import RunOptions
from epimer.engine.output import write_merge

KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
MODULES = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(KINDS.items())
]
FILES = {
    "config.json": {"model_type": "bert"},
    "modules.json": MODULES,
    "config_sentence_transformers.json": {"prompts": {"query": "query: "}},
    "sentence_bert_config.json": {"max_seq_length": 32},
    "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "2_Dense/config.json": {"in_features": 4, "out_features": 2},
}
CARRIED = {*FILES, "2_Dense/model.safetensors", "qwen.tiktoken"}
CARRIED |= {"additional_chat_templates/tools.jinja", "chat_templates/rag.jinja"}


def write(folder, seed, *, dense=0, sentence=True):
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "2_Dense").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "rag.jinja").write_text("{{ documents }}")
    draw = torch.Generator().manual_seed(seed)
    save_file({"layer.weight": torch.randn(4, 4, generator=draw)}, folder / "model.safetensors")
    for name, value in FILES.items():
        if sentence or name == "config.json":
            (folder / name).write_text(json.dumps(value))
    save_file({"linear.weight": torch.full((2, 4), float(dense))}, folder / "2_Dense" / "model.safetensors")
    (folder / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")


def recipe(folder):
    models = [{"model": str(folder / name)} for name in ("one", "two")]
    return {"merge_method": "average", "base_model": str(folder / "base"), "models": models}


def inside(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(("base", "one", "two")):
        write(tmp_path / name, seed)
    return tmp_path


def test_the_whole_folder_is_carried(folder):
    out = folder / "out"
    epimer.merge(recipe(folder), out, progress=False)
    assert inside(out) == CARRIED | {"README.md", "epimer.json", "model.safetensors", "recipe.yaml"}
    for name in CARRIED - {"config.json"}:
        assert (out / name).read_bytes() == (folder / "base" / name).read_bytes(), name
    one, two = (load_file(folder / name / "model.safetensors")["layer.weight"].double() for name in ("one", "two"))
    torch.testing.assert_close(load_file(out / "model.safetensors")["layer.weight"].double(), (one + two) / 2)
    assert epimer.merge(recipe(folder), out, progress=False).timings == {}  # already there


def test_an_output_with_folders_is_replaced_unless_something_else_lies_in_them(folder):
    out = folder / "out"
    epimer.merge(recipe(folder), out, progress=False)
    changed = {**recipe(folder), "parameters": {"scale": 0.5}}
    epimer.merge(changed, out, progress=False, overwrite=True)
    assert inside(out) == CARRIED | {"README.md", "epimer.json", "model.safetensors", "recipe.yaml"}
    (out / "1_Pooling" / "mine.txt").write_text("keep me")
    with pytest.raises(epimer.OutputError, match=r"1_Pooling/mine\.txt"):
        epimer.merge(recipe(folder), out, progress=False, overwrite=True)
    assert (out / "1_Pooling" / "mine.txt").read_text() == "keep me"


def test_a_plain_base_gets_the_modules_of_its_models(tmp_path):
    write(tmp_path / "base", 0, sentence=False)
    for seed, name in enumerate(("one", "two"), 1):
        write(tmp_path / name, seed)
    epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())["pooling_mode_cls_token"] is True


@pytest.mark.parametrize("method", ["average", "tsv", "task_arithmetic"])
def test_dense_layers_that_differ_are_averaged(folder, method):
    draw = torch.Generator().manual_seed(7)
    W = {name: torch.randn(2, 4, generator=draw) for name in ("base", "one", "two")}
    for name, value in W.items():
        save_file({"linear.weight": value}, folder / name / "2_Dense" / "model.safetensors")
    settings = {**recipe(folder), "merge_method": method, "parameters": {"scale": 0.5}}
    epimer.merge(settings, folder / "out", progress=False)
    expected = W["base"] + 0.5 * ((W["one"] + W["two"]) / 2 - W["base"])
    found = load_file(folder / "out" / "2_Dense" / "model.safetensors")
    assert found.keys() == {"linear.weight"}
    torch.testing.assert_close(found["linear.weight"], expected)
    assert inside(folder / "out") == CARRIED | {"README.md", "epimer.json", "model.safetensors", "recipe.yaml"}
    assert epimer.merge(settings, folder / "out", progress=False).timings == {}  # already there


def test_dense_layers_of_models_of_a_plain_base(tmp_path):
    write(tmp_path / "base", 0, sentence=False)
    for seed, name in enumerate(("one", "two"), 1):
        write(tmp_path / name, seed, dense=seed)
    (tmp_path / "base" / "2_Dense" / "model.safetensors").unlink()
    epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    W = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")["linear.weight"]
    assert torch.equal(W, torch.full((2, 4), 1.5))


@pytest.mark.parametrize("what", ["dense", "pooling", "modules"])
def test_modules_that_differ_are_refused(folder, what):
    two = folder / "two"
    if what == "dense":
        save_file({"linear.weight": torch.ones(3, 4)}, two / "2_Dense" / "model.safetensors")
    if what == "pooling":
        (two / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    if what == "modules":
        (two / "modules.json").write_text(json.dumps(MODULES[:2]))
    file = {"dense": "2_Dense/model.safetensors", "pooling": "1_Pooling/config.json", "modules": "modules.json"}[what]
    (problem,) = plan_merge(recipe(folder)).problems
    assert f"{file} differs between base and models[1]" in str(problem)


def test_the_same_tensors_in_other_bytes_are_the_same(folder):
    save_file({"linear.weight": torch.zeros(2, 4)}, folder / "two" / "2_Dense" / "model.safetensors", {"format": "pt"})
    (folder / "two" / "1_Pooling" / "config.json").write_text(json.dumps(FILES["1_Pooling/config.json"], indent=4))
    assert not plan_merge(recipe(folder)).problems


def test_what_leads_out_or_is_missing_is_refused(folder):
    for name in ("base", "one", "two"):
        (folder / name / "modules.json").write_text(json.dumps([*MODULES, {**MODULES[1], "path": "4_LSTM"}]))
    (problem,) = plan_merge(recipe(folder)).problems
    assert "base has no folder '4_LSTM'" in str(problem)
    for name in ("base", "one", "two"):
        (folder / name / "modules.json").write_text(json.dumps([{**MODULES[1], "path": "../secret"}]))
    assert "leads out of the folder" in str(plan_merge(recipe(folder)).problems[0])


def test_what_is_not_carried_is_named(folder):
    (folder / "base" / "onnx").mkdir()
    (folder / "base" / "LICENSE").write_text("free")
    (folder / "base" / ".gitattributes").write_text("")
    plan = plan_merge(recipe(folder))
    write_merge(plan, folder / "out", RunOptions(device="cpu", progress=False))
    assert "not carried over from base: 'LICENSE', 'onnx/'; copy what you need." in plan.notes


def test_the_modules_are_fetched_from_the_hub_too():
    files = [*CARRIED, "model.safetensors", "2_Dense/pytorch_model.bin", "onnx/model.onnx", "openvino/config.json"]
    assert set(needed(files, "org/name")) == CARRIED | {"model.safetensors"}
