"""Configs and tokenizers are compared when a merge is planned: what changes the function is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.api import plan_merge

CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    "use_sliding_window": False, "sliding_window": None, "attention_dropout": 0.0,
}  # fmt: skip
SHAPES = {"model.embed_tokens.weight": (6, 4), "model.layers.0.mlp.up_proj.weight": (8, 4), "score.weight": (3, 4)}
WORDS = ["<s>", "a", "b", "c", "d"]


def tokenizer(words, added=()):
    vocab = {word: i for i, word in enumerate(words)}
    extra = [{"id": len(words) + i, "content": word} for i, word in enumerate(added)]
    return {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": extra}


def write(folder, seed, config=CONFIG, words=None):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, folder / "model.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if words is not None:
        (folder / "tokenizer.json").write_text(json.dumps(words))


def recipe(folder, **more):
    models = [{"model": str(folder / name)} for name in ("one", "two")]
    return {"merge_method": "average", "base_model": str(folder / "base"), "models": models, **more}


def planned(folder, config=CONFIG, words=None, theirs=None, **more):
    """Plan the merge of a base, an equal model and one that says something else."""
    write(folder / "base", 0, words=words)
    write(folder / "one", 1, words=words)
    write(folder / "two", 2, config, words=words if theirs is None else theirs)
    return plan_merge(recipe(folder, **more))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e6),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("hidden_act", "gelu"),
        ("model_type", "mistral"),
        ("rms_norm_eps", 1e-5),
        ("tie_word_embeddings", True),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("text_config", {"hidden_act": "relu"}),
    ],
)
def test_what_changes_the_function_is_refused_by_name(tmp_path, key, value):
    same = {**CONFIG, "text_config": {"hidden_act": "gelu"}} if key == "text_config" else CONFIG
    write(tmp_path / "base", 0, same)
    write(tmp_path / "one", 1, same)
    write(tmp_path / "two", 2, {**CONFIG, key: value})
    with pytest.raises(epimer.CheckpointError) as caught:
        epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    text = str(caught.value)
    name, shown = (
        ("text_config.hidden_act", "relu")
        if key == "text_config"
        else (key, "linear" if key == "rope_scaling" else str(value))
    )
    assert f"{name} is " in text
    assert shown in text
    assert "in base and" in text
    assert f"models[1] ({tmp_path / 'two'})" in text
    assert "\n" not in text
    assert not (tmp_path / "out").exists()


def test_what_changes_nothing_is_silent_and_the_rest_is_noted(tmp_path):
    other = {
        "torch_dtype": "bfloat16", "transformers_version": "5.0", "_name_or_path": "/x", "use_cache": False,
        "attention_dropout": 0.1, "sliding_window": 4096, "eos_token_id": 2, "architectures": ["A"],
    }  # fmt: skip
    plan = planned(tmp_path, {**CONFIG, **other})
    assert not plan.problems
    assert not [note for note in plan.notes if "config.json" in note]
    (tmp_path / "two" / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 64, "head_dim": 8}))
    (tmp_path / "base" / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 32}))
    plan = plan_merge(recipe(tmp_path))
    assert not plan.problems
    two = f"models[1] ({tmp_path / 'two'})"
    assert f"config.json: only {two} says 'head_dim'; for base the same is assumed." in plan.notes
    assert f"config.json: 'max_position_embeddings' differs between base and {two}; base's is kept." in plan.notes


def test_one_function_in_the_spelling_of_transformers_5(tmp_path):
    new = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    plan = planned(tmp_path, {**new, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})
    assert not plan.problems
    changed = {**new, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    (tmp_path / "two" / "config.json").write_text(json.dumps(changed))
    assert "rope_theta is 10000.0 in base and 500000.0 in models[1]" in str(plan_merge(recipe(tmp_path)).problems[0])


def test_no_config_is_fine(tmp_path):
    write(tmp_path / "base", 0, None)
    write(tmp_path / "one", 1)
    write(tmp_path / "two", 2, None)
    assert not plan_merge(recipe(tmp_path)).problems


LABELS = {"0": "cat", "1": "dog", "2": "cow"}


def test_classes_in_another_order_are_refused_where_the_head_is_merged(tmp_path):
    write(tmp_path / "base", 0, {**CONFIG, "id2label": {str(i): f"LABEL_{i}" for i in range(3)}})
    write(tmp_path / "one", 1, {**CONFIG, "id2label": LABELS})
    write(tmp_path / "two", 2, {**CONFIG, "id2label": {**LABELS, "1": "cow", "2": "dog"}})
    (problem,) = plan_merge(recipe(tmp_path)).problems
    assert "id2label 1 is 'dog' in models[0]" in str(problem)
    assert "'cow' in models[1]" in str(problem)
    assert "'score.weight'" in str(problem)
    assert not plan_merge(recipe(tmp_path, rules={"score.*": "copy"})).problems


def test_tokens_in_another_order_are_refused_where_their_table_is_merged(tmp_path):
    swapped = tokenizer(["<s>", "b", "a", "c", "d"])
    plan = planned(tmp_path, words=tokenizer(WORDS), theirs=swapped)
    (problem,) = plan.problems
    assert "id 1 is 'a' in base and 'b' in models[1]" in str(problem)
    assert "2 ids differ" in str(problem)
    assert not plan_merge(recipe(tmp_path, rules={"*embed_tokens*": "copy"})).problems


def test_tokens_that_were_added_and_padded_tables_are_fine(tmp_path):
    plan = planned(tmp_path, words=tokenizer(WORDS), theirs=tokenizer(WORDS, added=["<im_end>"]))
    assert not plan.problems


def test_a_tokenizer_longer_than_the_table_is_refused(tmp_path):
    plan = planned(tmp_path, words=tokenizer(WORDS), theirs=tokenizer(WORDS, added=["e", "f"]))
    assert not plan.problems
    (problem,) = plan_merge(recipe(tmp_path, tokenizer_source=str(tmp_path / "two"))).problems
    assert "has 7 tokens and 'model.embed_tokens.weight' only 6 rows: 'f' has none" in str(problem)


def test_what_is_merged_is_the_mean(tmp_path):
    planned(tmp_path, words=tokenizer(WORDS))
    epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    found, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "one", "two"))
    for name in SHAPES:
        torch.testing.assert_close(found[name].double(), (one[name].double() + two[name].double()) / 2)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("scoring_func", ("softmax", "sigmoid")),
        ("n_group", (1, 8)),
        ("topk_group", (1, 4)),
        ("topk_method", ("greedy", "noaux_tc")),
        ("clip_qkv", (6.0, 8.0)),
        ("vision_feature_layer", (-2, -1)),
    ],
)
def test_other_routing_clipping_or_image_features_are_refused(tmp_path, key, values):
    for seed, (name, value) in enumerate(zip(("base", "one", "two"), (*values, values[1]), strict=True)):
        write(tmp_path / name, seed, {**CONFIG, key: value})
    with pytest.raises(epimer.CheckpointError, match=f"{key} is "):
        epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
