"""Files beside the weights that are damaged or hostile: refused in a line where they are read, never carried over."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.checkpoints.sidecar_files import vocabulary
from epimer.errors import CheckpointError, EpimerError, OutputError

WORDS = {"a": 0, "b": 1, "c": 2}


def tokenizer(vocab=None, added=()):
    return {"model": {"vocab": WORDS if vocab is None else vocab}, "added_tokens": list(added)}


@pytest.fixture
def recipe(tmp_path):
    draw = torch.Generator().manual_seed(0)
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
        state = {"model.embed_tokens.weight": torch.randn(3, 4, generator=draw)}
        save_file(state, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "llama", "vocab_size": 3}')
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer()))
    models = [{"model": str(tmp_path / name)} for name in ("one", "two")]
    return {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base"), "models": models}


HOSTILE = {
    "half a character": (rb'{"x": "\ud800"}', "half a character"),
    "half a key": (rb'{"\udfff": 1}', "half a character"),
    "too many digits": (b'{"x": ' + b"7" * 4500 + b"}", "an integer of 4500 digits"),
    "too large for a float": (b'{"x": ' + b"7" * 400 + b"}", "an integer of 400 digits"),
    "nested": (b'{"x": ' + b"[" * 400 + b"]" * 400 + b"}", "nested deeper than 100 levels"),
    "cut": (b'{"x": ', "Expecting value"),
    "binary": (b"\xff\xfe\0", "can't decode byte"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json"])
@pytest.mark.parametrize("case", HOSTILE)
def test_what_could_not_be_written_down_is_refused(recipe, tmp_path, file, case):
    content, words = HOSTILE[case]
    (tmp_path / "base" / file).write_bytes(content)
    with pytest.raises(EpimerError, match=words) as error:
        epimer.merge(recipe, tmp_path / "out", progress=False)
    assert str(tmp_path / "base" / file) in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content",
    [
        tokenizer({"a": 0, "b": 1 << 40}),
        tokenizer({"a": 0, "b": -1}),
        tokenizer({"a": 0, "b": True}),
        tokenizer({"a": 0, "b": 1.0}),
        tokenizer([["a", 0.0], ["b"]]),
        tokenizer([["a", 0.0], ["b", 0.0, 1]]),
        tokenizer([["a", 0.0], [3, 0.0]]),
        tokenizer(added=[{"id": "x", "content": "y"}]),
        tokenizer(added=[{"id": 3}]),
        tokenizer(added=["<y>"]),
        {**tokenizer(), "added_tokens": "<y>"},
    ],
)
def test_a_vocabulary_that_maps_no_tokens_to_ids_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"vocabulary that maps no tokens to ids|added_tokens without id or content"
    ):
        vocabulary(tmp_path)


def test_an_unusual_but_valid_config_is_carried_over(recipe, tmp_path):
    config = {
        "model_type": "llama",
        "vocab_size": 3,
        "limit": [0.0, float("inf")],
        "most": 10**30,
        "name": "é\U0001f600",
    }
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    epimer.merge(recipe, tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")) == config
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("name", ["a\0b", "x\udfff"])
def test_an_output_whose_name_no_file_can_have_is_refused(recipe, tmp_path, name):
    with pytest.raises(OutputError, match="no name that a file can have"):
        epimer.merge(recipe, tmp_path / name, progress=False)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000])
def test_an_output_with_a_name_that_is_too_long_is_refused(recipe, tmp_path, name):
    with pytest.raises(OutputError, match="too long"):
        epimer.merge(recipe, tmp_path / name, progress=False)


def test_a_record_that_is_a_device_is_not_read(recipe, tmp_path):
    epimer.merge(recipe, tmp_path / "out", progress=False)
    (tmp_path / "out" / "epimer.json").unlink()
    (tmp_path / "out" / "epimer.json").symlink_to("/dev/zero")
    with pytest.raises(EpimerError, match="was not made by epimer"):
        epimer.merge(recipe, tmp_path / "out", overwrite=True, progress=False)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "a\0b", "~nobody-here/x", "x\udfff"])
def test_names_in_a_recipe_that_no_file_can_have_are_refused(recipe, tmp_path, name):
    for changes in (
        {"base_model": name},
        {"tokenizer_source": name},
        {"merge_method": "epimer_kron", "basis": name},
        {"merge_method": "epimer", "models": [{**one, "curvature": name} for one in recipe["models"]]},
    ):
        with pytest.raises(EpimerError) as error:
            epimer.merge({**recipe, **changes}, tmp_path / "out", progress=False)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("pattern", ["(.*)*x", "(a|b)+x", "(a)\\1", "(?:a*){9}"])
def test_a_pattern_of_an_adapter_that_could_match_without_end_is_refused(recipe, tmp_path, pattern):
    (tmp_path / "lora").mkdir()
    name = "model.embed_tokens"
    factors = {f"base_model.model.{name}.lora_embedding_A": torch.ones(2, 3)}
    factors[f"base_model.model.{name}.lora_embedding_B"] = torch.ones(4, 2)
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    model = f"{tmp_path / 'base'}+{tmp_path / 'lora'}"
    for patterns, words in (
        ({"embed_tokens": 4}, None),
        ({pattern: 4}, "is not one of the patterns that are read .*; name the modules"),
    ):
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": patterns}))
        if words is None:
            assert epimer.merge({**recipe, "models": [{"model": model}]}, tmp_path / "out", progress=False).tensors
            continue
        with pytest.raises(EpimerError, match=words):
            epimer.merge({**recipe, "models": [{"model": model}]}, tmp_path / "out", progress=False)
