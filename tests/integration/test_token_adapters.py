"""Adapters with rows of a table (`trainable_token_indices`) are read as PEFT merges them, and merged as tables are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.tasks.loading import CAUSAL_LM, load_model

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from adapters import PEFT_REMARKS, SIZES, TOKENS, copied, gpt2, llava, save_adapter, save_base, unloaded  # noqa: E402

pytestmark = [*PEFT_REMARKS, pytest.mark.usefixtures("no_progress_bars")]

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def untied() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS))


def tied() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS, tie_word_embeddings=True))


def save(folder: Path, build, *configs: dict) -> tuple[nn.Module, dict]:
    """Save a base and adapters of it; return the base and a recipe of them."""
    model = save_base(folder / "base", build)
    for t, config in enumerate(configs):
        save_adapter(model, folder / f"adapter{t}", seed=t + 1, **{"target_modules": ["q_proj"], **config})
    models = [{"model": f"{folder / 'base'}+{folder / f'adapter{t}'}"} for t in range(len(configs))]
    return model, {"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "models": models}


def states(model: nn.Module, folder: Path, count: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the base in float64, and what PEFT makes of it with every adapter."""
    base = {name: W.double() for name, W in model.state_dict().items()}
    return base, [unloaded(model, folder / f"adapter{t}", torch.float64) for t in range(count)]


def loaded(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    return type(model).from_pretrained(folder).state_dict()


ALONE = {
    "untied": (untied, [3, 1, 59], {TABLE: [1, 3, 59], HEAD: []}),
    "tied": (tied, [3, 1, 59], {TABLE: [1, 3, 59], HEAD: [1, 3, 59]}),
    "table and head": (untied, {"embed_tokens": [5], "lm_head": [4, 2]}, {TABLE: [5], HEAD: [2, 4]}),
    "the same rows of a tied head": (tied, {"embed_tokens": [5], "lm_head": [5]}, {TABLE: [5], HEAD: [5]}),
    "a table of another name": (gpt2, [7, 2], {"transformer.wte.weight": [2, 7], HEAD: [2, 7]}),
    "a language model inside": (llava, [6, 9], {"model.language_model.embed_tokens.weight": [6, 9], HEAD: []}),
}


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ALONE)
def test_one_adapter_is_what_peft_merges(name, kind, tmp_path):
    build, indices, rows = ALONE[name]
    targets = ["c_attn"] if build is gpt2 else ["q_proj", "down_proj"]
    model, recipe = save(tmp_path, build, {"target_modules": targets, "trainable_token_indices": indices})
    if kind == "bin":  # in which the head is stored as well, as the same tensor
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    epimer.merge(recipe, tmp_path / "out", progress=False)
    found, expected = loaded(model, tmp_path / "out"), unloaded(model, tmp_path / "adapter0")
    for tensor, before in model.state_dict().items():
        torch.testing.assert_close(found[tensor], expected[tensor], atol=1e-6, rtol=0)
        if tensor in rows:
            assert (found[tensor] != before).any(dim=1).nonzero().flatten().tolist() == rows[tensor]


def test_some_rows_are_read_as_of_the_whole_table(tmp_path):
    save(tmp_path, untied, {"trainable_token_indices": [40, 3, 12]})
    opened = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter0'}")
    rows = load_file(tmp_path / "adapter0" / "adapter_model.safetensors")[ROWS]
    table = load_file(tmp_path / "base" / "model.safetensors")[TABLE]
    table[40], table[3], table[12] = rows
    for block in (None, (0, 60), (0, 3), (3, 4), (4, 12), (10, 41), (41, 60)):
        assert torch.equal(opened.read(TABLE, block), table if block is None else table[slice(*block)])


def test_a_head_that_is_stored_as_a_copy_of_the_table_follows_it(tmp_path):
    model, recipe = save(tmp_path, tied, {"trainable_token_indices": [3, 1]})
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, HEAD: tensors[TABLE].clone()}, path, metadata={"format": "pt"})
    epimer.merge(recipe, tmp_path / "out", progress=False)
    found, expected = loaded(model, tmp_path / "out"), unloaded(model, tmp_path / "adapter0")
    assert not torch.equal(expected[HEAD], model.state_dict()[HEAD])
    epimer.merge({**recipe, "output": "lora"}, tmp_path / "lora", progress=False)
    again = unloaded(model, tmp_path / "lora")
    for tensor in (TABLE, HEAD):
        torch.testing.assert_close(found[tensor], expected[tensor], atol=1e-6, rtol=0)
        torch.testing.assert_close(again[tensor], expected[tensor], atol=1e-6, rtol=0)


def test_rows_on_rows(tmp_path):
    """The adapter on top has the last word on rows that both have."""
    model, recipe = save(tmp_path, untied, {"trainable_token_indices": [3, 1]}, {"trainable_token_indices": [3, 8]})
    stacked = f"{recipe['models'][0]['model']}+{tmp_path / 'adapter1'}"
    both = open_checkpoint(stacked).read(TABLE)
    below, above = (load_file(tmp_path / f"adapter{t}" / "adapter_model.safetensors")[ROWS] for t in range(2))
    assert torch.equal(both[[3, 1, 8]], torch.stack([above[0], below[1], above[1]]))
    epimer.merge({**recipe, "models": [{"model": stacked}], "output": "lora"}, tmp_path / "out", progress=False)
    torch.testing.assert_close(unloaded(model, tmp_path / "out")[TABLE], both, atol=1e-6, rtol=0)


def test_rows_of_a_bfloat16_table_keep_their_own_digits(tmp_path):
    model = save_base(tmp_path / "base", untied, torch.bfloat16)
    save_adapter(model, tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=[3, 1])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    fine = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    save_file({**load_file(path), ROWS: fine}, path)
    table = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}").read(TABLE)
    assert torch.equal(table[[3, 1]], fine)
    assert torch.equal(table[4:].bfloat16(), model.state_dict()[TABLE][4:])


def test_a_table_that_was_saved_along_is_read_too(tmp_path):
    """PEFT stores the whole table beside its rows where it is asked to."""
    model, recipe = save(tmp_path, untied, {"trainable_token_indices": [3, 1]})
    path, table = tmp_path / "adapter0" / "adapter_model.safetensors", torch.rand(60, 32)
    save_file({**load_file(path), ROWS.replace("trainable_tokens_delta", "base_layer.weight"): table}, path)
    expected = unloaded(model, tmp_path / "adapter0")[TABLE]
    assert torch.equal(expected[4:], table[4:])
    assert torch.equal(open_checkpoint(recipe["models"][0]["model"]).read(TABLE), expected)


# --- merges ---------------------------------------------------------------------------------------------------------

SEVERAL = [
    {"trainable_token_indices": [3, 1, 59]},
    {"trainable_token_indices": [8, 4, 3]},
    {"target_modules": ["v_proj"]},
]


@pytest.mark.parametrize("build", [untied, tied])
def test_the_task_vectors_of_several_add_up(build, tmp_path):
    model, recipe = save(tmp_path, build, *SEVERAL)
    epimer.merge({**recipe, "parameters": {"weight": 1}}, tmp_path / "out", progress=False)
    base, made = states(model, tmp_path, 3)
    found = loaded(model, tmp_path / "out")
    for name, W in base.items():
        expected = W + sum(state[name] - W for state in made)
        torch.testing.assert_close(found[name].double(), expected, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert (found[TABLE] != base[TABLE]).any(dim=1).nonzero().flatten().tolist() == [1, 3, 4, 8, 59]


@pytest.mark.parametrize("build", [untied, tied])
@pytest.mark.parametrize("method", ["average", "tsv", "epimer_free"])
def test_tables_are_averaged_by_default(build, method, tmp_path):
    model, recipe = save(tmp_path, build, *SEVERAL)
    epimer.merge({**recipe, "merge_method": method}, tmp_path / "out", progress=False)
    base, made = states(model, tmp_path, 3)
    found = loaded(model, tmp_path / "out")
    for name in (TABLE, HEAD):
        expected = sum(state[name] for state in made) / 3
        torch.testing.assert_close(found[name].double(), expected, atol=1e-6, rtol=0)
    assert (found[TABLE] != base[TABLE]).any(dim=1).sum() == 5


INTO_ADAPTERS = {
    "untied": (untied, SEVERAL, {"model.embed_tokens": [1, 3, 4, 8, 59]}),
    "tied": (tied, SEVERAL, {"model.embed_tokens": [1, 3, 4, 8, 59]}),
    "table and head": (
        untied,
        [{"trainable_token_indices": {"embed_tokens": [5], "lm_head": [4, 2]}}, {"trainable_token_indices": [7]}],
        {"model.embed_tokens": [5, 7], "lm_head": [2, 4]},
    ),
}


@pytest.mark.parametrize("method", ["task_arithmetic", "average"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", INTO_ADAPTERS)
def test_rows_become_rows_of_one_adapter(name, kind, method, tmp_path):
    build, configs, indices = INTO_ADAPTERS[name]
    model, recipe = save(tmp_path, build, *configs)
    if kind == "bin":
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    given = {**recipe, "merge_method": method, "output": "lora", "parameters": {"weight": 1}}
    epimer.merge(given, tmp_path / "out", progress=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == indices
    base, made = states(model, tmp_path, len(configs))
    share = 1 if method == "task_arithmetic" else 1 / len(configs)
    found = unloaded(model, tmp_path / "out", torch.float64)
    for tensor, W in base.items():
        expected = W + share * sum(state[tensor] - W for state in made)
        torch.testing.assert_close(found[tensor], expected, atol=1e-6, rtol=0, msg=lambda m, n=tensor: f"{n}: {m}")
    assert not torch.equal(found[TABLE], base[TABLE])
    assert epimer.verify(tmp_path / "out", sample=None).verified


@pytest.mark.parametrize("build", [untied, tied])
@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("ties", {"trainable_token_indices": [8]}),  # whose threshold is that of the whole table
        ("average", {"target_modules": ["q_proj", "embed_tokens"]}),
    ],
)
def test_rows_are_not_written_where_the_merge_changes_others(build, method, other, tmp_path):
    _, recipe = save(tmp_path, build, {"trainable_token_indices": [3, 1]}, other)
    given = {**recipe, "merge_method": method, "output": "lora", "lora_rank": 4}
    with pytest.raises(epimer.EpimerError, match=r"trainable_token_indices.*remove 'output'") as error:
        epimer.merge(given, tmp_path / "out", progress=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_network_that_curvature_is_measured_of_has_the_rows(tmp_path):
    model, recipe = save(tmp_path, tied, {"trainable_token_indices": [3, 1]})
    opened = open_checkpoint(recipe["models"][0]["model"])
    measured, _, _ = load_model(opened, CAUSAL_LM, None, "auto", torch.float32, progress=False)
    expected = unloaded(model, tmp_path / "adapter0")
    for name, W in measured.state_dict().items():
        torch.testing.assert_close(W, expected[name], atol=1e-6, rtol=0)


# --- refusals -------------------------------------------------------------------------------------------------------


def without_rows(tensors: dict[str, Tensor]) -> None:
    del tensors[ROWS]


def of_shape(*shape: int, dtype: torch.dtype = torch.float32):
    return lambda tensors: tensors.update({ROWS: torch.ones(shape, dtype=dtype)})


def with_factors(tensors: dict[str, Tensor]) -> None:
    table = ROWS.partition(".token_adapter")[0]
    tensors |= {f"{table}.lora_embedding_A": torch.ones(4, 60), f"{table}.lora_embedding_B": torch.ones(32, 4)}


def kept(tensors: dict[str, Tensor]) -> None:
    pass


DAMAGED = {
    "twice": ([3, 3], kept, "row 3 twice"),
    "negative": ([3, -1], kept, "row -1, but the base's table has rows 0 to 59"),
    "beyond the table": ([60, 3], kept, "row 60, but the base's table has rows 0 to 59"),
    "no numbers": (["3", 1], kept, "expected a list of rows"),
    "true": ([True, 3], kept, "expected a list of rows"),
    "a number": (3, kept, "expected a list of rows"),
    "none": (None, kept, "expected a list of rows"),
    "of another module": ({"lm_head": [3, 1]}, kept, "expected a list of rows"),
    "of two modules": ({"embed_tokens": [3, 1], "model.embed_tokens": [3, 2]}, kept, "expected a list of rows"),
    "one more": ([3, 1, 2], kept, "shape (2, 32), for 3 of a table of shape (60, 32)"),
    "narrow rows": ([3, 1], of_shape(2, 31), "shape (2, 31), for 2 of a table of shape (60, 32)"),
    "a vector": ([3, 1], of_shape(64), "shape (64,), for 2"),
    "integers": ([3, 1], of_shape(2, 32, dtype=torch.int64), "torch.int64 of shape (2, 32)"),
    "no rows": ([3, 1], without_rows, "trainable_token_indices, but no rows of a table in its file"),
    "no rows of the head": ({"embed_tokens": [3, 1], "lm_head": [3, 1]}, kept, "no rows of lm_head in its file"),
    "factors too": ([3, 1], with_factors, "both factors and rows"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_adapter_is_refused_in_one_line(name, tmp_path):
    indices, change, words = DAMAGED[name]
    _, recipe = save(tmp_path, untied, {"trainable_token_indices": [3, 1]})
    config, weights = (tmp_path / "adapter0" / file for file in ("adapter_config.json", "adapter_model.safetensors"))
    config.write_text(json.dumps({**json.loads(config.read_text()), "trainable_token_indices": indices}))
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    with pytest.raises(epimer.CheckpointError) as alone:
        open_checkpoint(recipe["models"][0]["model"])
    with pytest.raises(epimer.EpimerError) as merged:
        epimer.merge(recipe, tmp_path / "out", progress=False)
    for error in (alone, merged):
        assert words in str(error.value)
        assert str(tmp_path / "adapter0") in str(error.value)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_rows_of_a_longer_vocabulary_are_refused(tmp_path):
    """As after tokens were added: PEFT saves the resized table too."""
    model, recipe = save(tmp_path, untied)
    longer = copied(model)
    longer.resize_token_embeddings(64, mean_resizing=False)
    save_adapter(longer, tmp_path / "adapter", target_modules=["q_proj"], trainable_token_indices=[62, 3])
    with pytest.raises(epimer.CheckpointError, match=r"\(64, 32\).*\(60, 32\)|row 62.*0 to 59"):
        open_checkpoint(f"{recipe['base_model']}+{tmp_path / 'adapter'}")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_rows_of_a_tied_head_alone_are_refused(kind, tmp_path):
    """PEFT computes with a head of its own, and merges the rows into the table too."""
    model, recipe = save(tmp_path, tied, {"trainable_token_indices": {"lm_head": [3]}})
    if kind == "bin":
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(epimer.CheckpointError, match="lm_head"):
        open_checkpoint(recipe["models"][0]["model"])


def test_rows_of_a_table_with_a_head_of_its_own_that_was_tied_are_refused(tmp_path):
    model, recipe = save(tmp_path, tied, {"trainable_token_indices": [3, 1]})
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    path = tmp_path / "adapter0" / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.lm_head.weight": torch.ones(60, 32)}, path)
    with pytest.raises(epimer.CheckpointError, match=r"trainable_token_indices.*lm_head.*merge_and_unload"):
        open_checkpoint(recipe["models"][0]["model"])
