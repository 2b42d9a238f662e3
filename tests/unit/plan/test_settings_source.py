"""Chat template, end of text and generation settings: what all models agree on, or the base's, and it is said."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

import epimer

BASE = {"template": "{{ base }}", "eos": "</s>", "eos_id": 2, "generation": {"eos_token_id": 2, "temperature": 0.6}}
CHAT = {
    "template": "{{ chat }}",
    "eos": "<|im_end|>",
    "eos_id": 5,
    "generation": {"eos_token_id": [2, 5], "transformers_version": "4"},
}
OTHER = {**CHAT, "template": "{{ other }}", "eos_id": 4, "generation": {"eos_token_id": 4}}


def write(folder, seed, settings, *, jinja=False):
    folder.mkdir()
    template = {} if jinja else {"chat_template": settings["template"]}
    W = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"layer.weight": W}, folder / "model.safetensors")
    texts = {
        "config.json": {"model_type": "llama", "eos_token_id": settings["eos_id"], "pad_token_id": 0},
        "generation_config.json": settings["generation"],
        "tokenizer_config.json": {"eos_token": settings["eos"]} | template,
    }
    for file, value in texts.items():
        (folder / file).write_text(json.dumps(value))
    if jinja:
        (folder / "chat_template.jinja").write_text(settings["template"] + "\n")


def recipe(folder, **more):
    models = [{"model": str(folder / name)} for name in ("one", "two")]
    return {"merge_method": "average", "base_model": str(folder / "base"), "models": models, **more}


def written(folder, **more):
    """Return what the merged folder says, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epimer.merge(recipe(folder, **more), folder / "out", progress=False)
    read = {file.name: file.read_text() for file in (folder / "out").iterdir() if file.suffix in (".json", ".jinja")}
    config, generation = json.loads(read["config.json"]), json.loads(read["generation_config.json"])
    tokenizer = json.loads(read["tokenizer_config.json"])
    template = read.get("chat_template.jinja", tokenizer.get("chat_template"))
    ids = config["eos_token_id"], generation["eos_token_id"]
    assert config["pad_token_id"] == 0
    return (template.strip(), tokenizer["eos_token"], *ids), " ".join(str(one.message) for one in caught)


FROM_BASE, FROM_CHAT = ("{{ base }}", "</s>", 2, 2), ("{{ chat }}", "<|im_end|>", 5, [2, 5])


@pytest.mark.parametrize("jinja", [False, True])
def test_what_all_models_agree_on_is_taken_and_said(tmp_path, jinja):
    write(tmp_path / "base", 0, BASE)
    write(tmp_path / "one", 1, CHAT, jinja=jinja)
    newer = {**CHAT, "generation": {**CHAT["generation"], "transformers_version": "5"}}
    write(tmp_path / "two", 2, newer)
    found, notes = written(tmp_path)
    assert found == FROM_CHAT
    assert "the tokenizer ('chat template', 'eos_token') is not the base's but models[0]" in notes
    assert "the generation settings ('eos_token_id', 'temperature') are not the base's but models[0]" in notes


def test_models_that_only_sample_differently_still_stop_at_their_token(tmp_path):
    write(tmp_path / "base", 0, BASE)
    write(tmp_path / "one", 1, CHAT)
    write(tmp_path / "two", 2, {**CHAT, "generation": {**CHAT["generation"], "top_p": 0.8}})
    found, notes = written(tmp_path)
    assert found == FROM_CHAT
    assert "are not the base's but models[0]" in notes
    assert "as all models agree on all but 'top_p'" in notes


def test_where_they_do_not_agree_it_is_the_base_and_said(tmp_path):
    for seed, (name, settings) in enumerate({"base": BASE, "one": CHAT, "two": OTHER}.items()):
        write(tmp_path / name, seed, settings)
    found, notes = written(tmp_path)
    assert found == FROM_BASE
    assert "the models do not agree on the tokenizer ('chat template', 'eos_token'): the base's is written" in notes
    assert "the models do not agree on the generation settings" in notes


@pytest.mark.parametrize(("source", "expected"), [("base", FROM_BASE), ("one", FROM_CHAT)])
def test_they_follow_the_tokenizer_that_is_named(tmp_path, source, expected):
    for seed, (name, settings) in enumerate({"base": BASE, "one": CHAT, "two": OTHER}.items()):
        write(tmp_path / name, seed, settings)
    named = "base" if source == "base" else str(tmp_path / source)
    found, notes = written(tmp_path, tokenizer_source=named)
    assert found == expected
    assert "agree" not in notes


def test_equal_settings_are_no_reason_to_say_anything(tmp_path):
    for seed, name in enumerate(("base", "one", "two")):
        write(tmp_path / name, seed, BASE, jinja=name == "one")
    found, notes = written(tmp_path)
    assert found == FROM_BASE
    assert not notes


def test_an_adapter_that_was_saved_with_its_tokenizer_gives_it(tmp_path):
    write(tmp_path / "base", 0, BASE)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        factors = {"base_model.model.layer.lora_A.weight": torch.ones(2, 4)}
        factors |= {"base_model.model.layer.lora_B.weight": torch.ones(4, 2)}
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "lora_alpha": 2, "r": 2}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(about))
        chat = {"chat_template": CHAT["template"], "eos_token": {"content": CHAT["eos"], "special": True}}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(chat))
    models = [{"model": f"{tmp_path / 'base'}+{tmp_path / name}"} for name in ("one", "two")]
    given = {"merge_method": "average", "base_model": str(tmp_path / "base"), "models": models}
    epimer.merge(given, tmp_path / "out", progress=False)
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert found["chat_template"] == CHAT["template"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
