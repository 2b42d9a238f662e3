"""Models with different tokenizers through mergekit's command line and through epimer: the same row for every token.

The two may number the tokens of a union differently, so rows are compared token by token.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import epimer
from peer_mergekit import run_mergekit

if importlib.util.find_spec("mergekit") is None:
    pytest.skip("mergekit is installed by `make conformance`", allow_module_level=True)

WORDS = ["<s>", "</s>", *"abcdefghijkl", "ab", "cd"]
MODELS = {  # name -> words of the vocabulary, added tokens, rows of the table
    "base": (WORDS, ["<u>"], 17),
    "a": (WORDS, ["<u>", "<x>", "<a>"], 19),
    "b": ([*WORDS[:4], "d", "c", *WORDS[6:]], ["<x>", "<b>"], 18),
    "c": (WORDS, ["<u>"], 24),
    "d": (WORDS, ["<u>"], 17),
}
TWO = """
models:
  - {model: a, parameters: {weight: 0.3}}
  - {model: b, parameters: {weight: 0.5}}
  - {model: d, parameters: {weight: 0.7}}
"""
LINEAR = "merge_method: linear\n" + TWO
ARITHMETIC = "merge_method: task_arithmetic\nbase_model: base\n" + TWO
TOKENS = """
tokenizer:
  source: union
  tokens:
    <a>: {source: d}
    <x>: {source: a, force: true}
    <b>: {source: {kind: zero}}
    <u>: {source: {kind: model_token, model: base, token: ab}, force: true}
""".replace("<a>: {source: d}", "<a>: {source: {kind: model_token, model: b, token_id: 3}}")
RECIPES = {
    "linear, union": LINEAR + "tokenizer_source: union",
    "linear, a path": LINEAR + "tokenizer_source: a",
    "task_arithmetic, union": ARITHMETIC + "tokenizer_source: union",
    "task_arithmetic, the base's": ARITHMETIC + "tokenizer_source: base",
    "task_arithmetic, a model's": ARITHMETIC + "tokenizer_source: b",
    "task_arithmetic, a padded table": ARITHMETIC.replace("model: d", "model: c") + "tokenizer: {source: union}",
    "task_arithmetic, chosen rows": ARITHMETIC + TOKENS,
    "task_arithmetic, padded": ARITHMETIC + "tokenizer: {source: union, pad_to_multiple_of: 16}",
    "slices": """
merge_method: linear
parameters: {weight: 1}
slices:
  - sources: [{model: a, layer_range: [0, 1]}]
  - sources: [{model: b, layer_range: [0, 2]}]
tokenizer_source: union
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    for seed, (name, (words, added, rows)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=False, **sizes))
        for W in model.parameters():
            W.data = torch.randn(W.shape)
        model.save_pretrained(folder / name)
        vocab = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("c", "d")]))
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
        tokenizer.add_tokens([AddedToken(word, special=word == "<x>") for word in added])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        fast.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def merged(folder):
    files = {name: folder / f"{i}.yaml" for i, name in enumerate(RECIPES)}
    for name, file in files.items():
        file.write_text(RECIPES[name])
    said = run_mergekit(files.values(), folder)

    def both(name: str) -> tuple[Path, Path]:
        ours, theirs = files[name].with_suffix(".epimer"), files[name].with_suffix(".mergekit")
        assert (theirs / "model.safetensors").exists(), said
        epimer.merge(files[name], ours, progress=False)
        return ours, theirs

    return both


def tokens_of(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).get_vocab()


@pytest.mark.parametrize("name", RECIPES)
def test_every_token_has_the_same_rows(merged, name):
    folders = merged(name)
    ours, theirs = (load_file(one / "model.safetensors") for one in folders)
    our_ids, their_ids = map(tokens_of, folders)
    assert our_ids.keys() == their_ids.keys()
    apart = {}
    for key in theirs:
        W, V = ours[key].double(), theirs[key].double()
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            pick = sorted(our_ids)
            W, V = W[[our_ids[token] for token in pick]], V[[their_ids[token] for token in pick]]
            if name == "slices":  # mergekit leaves zeros for tokens that a slice's models lack; we take another's row
                W, V = W[V.any(1)], V[V.any(1)]
                assert len(V) >= len(WORDS)
        apart[key] = float((W - V).abs().max())
    assert {key: gap for key, gap in apart.items() if gap > 1e-6} == {}
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["vocab_size"] == len(ours["model.embed_tokens.weight"])
    if "padded" in name and "table" not in name:
        assert config["vocab_size"] % 16 == 0
