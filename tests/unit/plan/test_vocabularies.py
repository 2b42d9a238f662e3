"""Rows of embeddings and heads follow tokens, not places, where tokenizers differ."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.api import plan_merge
from epimer.checkpoints import tokenizer_files
from epimer.curvature.format import Provenance, model_fingerprint
from epimer.errors import EpimerError
from epimer.recipe.load import load_recipe

WORDS = ["<s>", "a", "b", "c"]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def save(folder, name, words, added=(), rows=None, seed=0):
    """Save a model with a tokenizer; return the row of every token in float64."""
    place, draw = folder / name, torch.Generator().manual_seed(seed)
    place.mkdir()
    vocab = {word: i for i, word in enumerate(words)}
    extra = [
        {"id": len(words) + i, "content": word, "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, word in enumerate(added)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None, "added_tokens": extra,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "dropout": None, "fuse_unk": False,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False},
    }  # fmt: skip
    rows = rows or len(words) + len(added)
    state = {table: torch.randn(rows, 3, generator=draw) for table in TABLES}
    state["model.layers.0.mlp.weight"] = torch.randn(5, 3, generator=draw)
    save_file(state, place / "model.safetensors")
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (place / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}, "name_or_path": "/home/me"}))
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    ids = {**vocab, **{one["content"]: one["id"] for one in extra}}
    return {table: {token: state[table][i].double() for token, i in ids.items()} for table in TABLES}


@pytest.fixture
def models(tmp_path):
    return {
        "base": save(tmp_path, "base", WORDS, rows=6, seed=1),
        "plain": save(tmp_path, "plain", WORDS, rows=6, seed=2),
        "added": save(tmp_path, "added", WORDS, ["<im>", "<x>"], seed=3),
        "long": save(tmp_path, "long", WORDS, ["<y>", "<im>", "<z>"], seed=4),
        "swapped": save(tmp_path, "swapped", ["<s>", "c", "a", "b"], rows=6, seed=5),
        "padded": save(tmp_path, "padded", WORDS, rows=9, seed=6),
    }


@pytest.fixture
def merge(tmp_path, models):
    """Merge models with weight 0.5 each; return the rows of every token, by table, and the config."""

    def merged(*names, **more):
        listed = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
        recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": listed, "dtype": "float64"}
        epimer.merge(recipe | more, tmp_path / "out", folder=tmp_path, progress=False, overwrite=True)
        state = load_file(tmp_path / "out" / "model.safetensors")
        ids = vocabulary(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["vocab_size"] == len(state[TABLES[0]]) == len(state[TABLES[1]])
        return {table: {token: state[table][i] for token, i in ids.items()} for table in TABLES}, config

    return merged


def vocabulary(folder):
    """Return the ids as the library that reads tokenizer.json has them, which renumbers what does not fit."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()


def arithmetic(models, names, table, token, missing):
    """Base + 0.5 (model - base) for each; where a model has no such token its row is `missing`."""
    base = models["base"][table].get(token, missing)
    return base + sum(0.5 * (models[name][table].get(token, missing) - base) for name in names)


def check(found, models, names, default):
    for table in TABLES:
        for token, row in found[table].items():
            missing = models["base"][table].get(token)
            missing = default(table, token) if missing is None else missing
            expected = arithmetic(models, names, table, token, missing)
            torch.testing.assert_close(row, expected, rtol=1e-6, atol=1e-6, msg=f"{table} {token}")  # rows are float32


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
@pytest.mark.parametrize("more", [{}, {"tokenizer_source": "union"}])
def test_added_tokens_are_kept_from_the_models_that_have_them(merge, models, more):
    """Ids of different models clash, and base's table has rows to spare: neither mixes rows."""
    found, config = merge("added", "long", "plain", **more)
    assert found[TABLES[0]].keys() == {*WORDS, "<im>", "<x>", "<y>", "<z>"}

    def default(table, token):
        return torch.stack([models[m][table][token] for m in ("added", "long") if token in models[m][table]]).mean(0)

    check(found, models, ("added", "long", "plain"), default)
    assert config["vocab_size"] == 8


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_tokens_in_another_order_are_aligned_where_a_tokenizer_is_named(merge, models):
    found, config = merge("swapped", "plain", tokenizer_source="base")
    check(found, models, ("swapped", "plain"), None)
    assert config["vocab_size"] == 6
    found, config = merge("swapped", "plain", tokenizer_source="swapped")
    check(found, models, ("swapped", "plain"), None)
    assert config["vocab_size"] == 4


def test_a_head_alone_is_not_merged_across_tokens(merge):
    """Embeddings that are copied leave the head, whose rows are tokens too."""
    with pytest.raises(EpimerError, match="swapped"):
        merge("swapped", rules=[["*embed*", "copy"]])
    merge("swapped", rules=[["*embed*", "copy"], ["lm_head.weight", "copy"]])


def measure(folder, name, kind="diagonal"):
    """Save curvature of random numbers for a model's tensors; return the diagonal of each token's row by table."""
    state = load_file(folder / name / "model.safetensors")
    draw = torch.Generator().manual_seed(len(name))
    F = {tensor: torch.rand(W.shape, generator=draw) for tensor, W in state.items()}
    metrics = {tensor: epimer.Diagonal(value) for tensor, value in F.items()}
    if kind == "kronecker":
        for tensor, W in state.items():
            sides = [torch.randn(n, 2 * n, generator=draw) for n in W.shape]
            G, A = (side @ side.T for side in sides)
            metrics[tensor] = epimer.Kronecker(A=A, G=G)
    if kind == "samples":
        metrics = {
            t: epimer.Samples(g=torch.ones(2, 1, len(W)), x=torch.ones(2, 1, W.shape[1])) for t, W in state.items()
        }
    provenance = Provenance(kind, samples=2, model=model_fingerprint(state))
    epimer.Curvature(metrics, provenance).save(folder / f"{name}.curv")
    ids = vocabulary(folder / name)
    return {t: {token: F[t][i].double() for token, i in ids.items()} for t in TABLES}, metrics, ids


def curved(folder, *names, **more):
    entries = [{"model": name, "curvature": f"{name}.curv"} for name in names]
    recipe = {"base_model": "base", "models": entries, "dtype": "float64", **more}
    epimer.merge(recipe, folder / "out", folder=folder, progress=False, overwrite=True)
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
@pytest.mark.parametrize(
    ("names", "more"),
    [
        (("swapped", "plain"), {"tokenizer_source": "base"}),
        (("added", "long", "plain"), {"tokenizer_source": "union"}),
        (("added", "long", "plain"), {}),
    ],
)
def test_diagonal_curvature_follows_the_tokens(models, tmp_path, names, more):
    """fisher: Σ F θ / Σ F over the models that know a token, whichever row each of them has it in."""
    F = {name: measure(tmp_path, name)[0] for name in names}
    state = curved(tmp_path, *names, merge_method="fisher", rules=[["*", "fisher"]], **more)
    for token, i in vocabulary(tmp_path / "out").items():
        for table in TABLES:
            owners = [name for name in names if token in models[name][table]]
            total = sum(F[name][table][token] for name in owners)
            mean = sum(F[name][table][token] * models[name][table][token] for name in owners) / total
            torch.testing.assert_close(state[table][i], mean, rtol=1e-5, atol=1e-6, msg=f"{table} {token}")


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_a_heads_factor_follows_the_tokens(models, tmp_path):
    """mats of a head: Σ G D A solved densely, with rows and columns of G by token."""
    found = {name: measure(tmp_path, name, "kronecker") for name in ("swapped", "plain")}
    rules = [["lm_head.weight", "matrix"], ["*embed*", "average"]]
    how = {"tokenizer_source": "base", "parameters": {"normalize": "none", "damping": 0.0, "jitter": 0.0}}
    state = curved(tmp_path, *found, merge_method="mats", rules=rules, **how)
    head, spare = "lm_head.weight", [4, 5]  # rows of no token, in every model
    H, b = torch.zeros(18, 18, dtype=torch.float64), torch.zeros(18, dtype=torch.float64)
    base = load_file(tmp_path / "base" / "model.safetensors")[head].double()
    for name, (_, metrics, own) in found.items():
        rows = torch.tensor([own[token] for token in WORDS] + spare)
        one = torch.kron(metrics[head].G[rows][:, rows].double(), metrics[head].A.double())
        H += one
        b += one @ (load_file(tmp_path / name / "model.safetensors")[head][rows].double() - base).flatten()
    expected = base + torch.linalg.solve(H, b).view(6, 3)
    torch.testing.assert_close(state[head], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_curvature_that_cannot_follow_is_refused(models, tmp_path):
    for name in ("swapped", "plain"):
        measure(tmp_path, name, "samples")
    how = {"merge_method": "epimer_exact", "tokenizer_source": "base", "rules": [["lm_head.weight", "matrix"]]}
    with pytest.raises(EpimerError, match=r"'lm_head.weight' are aligned by token, which its samples curvature cannot"):
        curved(tmp_path, "swapped", "plain", **how)
    curved(tmp_path, "swapped", "plain", **how | {"rules": []})


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_padded_tables_are_cut_to_the_bases(merge, models):
    found, config = merge("padded", "plain")
    check(found, models, ("padded", "plain"), None)
    assert config["vocab_size"] == 6


def test_models_with_the_bases_tokenizer_are_untouched(models, tmp_path):
    for source in ("base", "union", None):
        recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in ("base", "plain")]}
        plan = plan_merge(recipe | ({"tokenizer_source": source} if source else {}))
        assert not plan.problems
        assert not plan.tokenizer_files
        assert {type(one.checkpoint).__name__ for one in plan.participants.models} == {"ShardedCheckpoint"}


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_rows_can_be_chosen_and_tables_padded(merge, models):
    tokens = {
        "<im>": {"source": "long"},
        "<x>": {"source": {"kind": "zero"}},
        "<y>": {"source": {"kind": "model_token", "model": "plain", "token": "b"}, "force": True},
        "<z>": {"source": {"kind": "model_token", "model": "added", "token_id": 1}},
    }
    options = {"source": "union", "tokens": tokens, "pad_to_multiple_of": 16}
    found, config = merge("added", "long", "plain", tokenizer=options)
    for table in TABLES:
        choices = {
            "<im>": models["long"][table]["<im>"],
            "<x>": torch.zeros(3, dtype=torch.float64),
            "<z>": models["added"][table]["a"],
        }
        for token, missing in choices.items():
            expected = arithmetic(models, ("added", "long", "plain"), table, token, missing)
            torch.testing.assert_close(found[table][token], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[table]["<y>"], models["plain"][table]["b"], rtol=1e-6, atol=1e-6)
    assert config["vocab_size"] == 16


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_the_union_is_a_tokenizer_that_knows_the_added_tokens(merge, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    merge("added", "long", tokenizer_source="union")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert made.encode("a<im>b<z>", add_special_tokens=False).tokens == ["a", "<im>", "b", "<z>"]
    assert made.encode("abc").ids == [1, 2, 3], "the base's ids stay"
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    ids = made.get_vocab()
    assert {one["content"]: int(i) for i, one in config["added_tokens_decoder"].items()} == {
        token: ids[token] for token in ("<im>", "<x>", "<y>", "<z>")
    }
    assert "name_or_path" not in config


@pytest.mark.filterwarnings("ignore::epimer.errors.EpimerWarning")
def test_a_chat_template_is_written_where_both_readers_look(merge, models, tmp_path):
    def written():
        folder = tmp_path / "out"
        config = json.loads((folder / "tokenizer_config.json").read_text())
        return config["chat_template"], (folder / "chat_template.jinja").read_text()

    merge("plain", chat_template="{{ messages }}")
    assert written() == ("{{ messages }}", "{{ messages }}")
    merge("plain", chat_template="chatml")
    assert "<|im_start|>" in written()[0]
    for name in ("plain", "added"):
        (tmp_path / name / "chat_template.jinja").write_text("{{ theirs }}")
    merge("plain", "added", "long", chat_template="auto", tokenizer_source="union")
    assert written() == ("{{ theirs }}", "{{ theirs }}")


@pytest.mark.parametrize("many", ["pad_to_multiple_of", "a gap between ids"])
def test_tables_have_few_rows_to_spare(models, tmp_path, many):
    """A recipe of one line, or a tokenizer of a few tokens, cannot ask for tables that no memory holds."""
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / name)} for name in ("added", "long")]}
    if many == "pad_to_multiple_of":
        recipe["tokenizer"] = {"source": "union", "pad_to_multiple_of": 10**6}
    else:
        save(tmp_path, "gap", WORDS)
        tokenizer = json.loads((tmp_path / "gap" / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["c"] = 10**6
        (tmp_path / "gap" / "tokenizer.json").write_text(json.dumps(tokenizer))
        recipe["tokenizer_source"] = str(tmp_path / "gap")
    with pytest.raises(EpimerError, match=r"rows to spare; take a smaller pad_to_multiple_of, or a tokenizer without"):
        plan_merge(recipe)


def bytecodes(module, function):
    """Return how many bytecodes of a module's own code a function runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["added tokens", "pieces with scores"])
def test_the_work_of_a_union_grows_with_its_tokens_alone(tmp_path, kind):
    def joined(n):
        """Return a function that joins a tokenizer of one word with one of `n` more."""
        for name, words in (("base", []), ("more", [f"<{i}>" for i in range(n)])):
            folder = tmp_path / f"{name}-{n}"
            folder.mkdir()
            flags = [{"id": 1 + i, "content": word} for i, word in enumerate(words)]
            pieces = [["a", -1.0], *([word, -2.0 - i] for i, word in enumerate(words))]
            scored = {"model": {"type": "Unigram", "vocab": pieces}, "added_tokens": []}
            added = {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": flags}
            (folder / "tokenizer.json").write_text(json.dumps(added if kind == "added tokens" else scored))
        tokens = {0: "a"} | {1 + i: word for i, word in enumerate(words)}
        return lambda: tokenizer_files.with_tokens(tmp_path / f"base-{n}", tokens, dict.fromkeys(words, folder))

    made = json.loads(joined(3)()["tokenizer.json"])
    if kind == "added tokens":
        assert made["added_tokens"] == [{"id": 1 + i, "content": f"<{i}>"} for i in range(3)]
    else:
        assert made["model"]["vocab"] == [["a", -1.0], ["<0>", -2.0], ["<1>", -3.0], ["<2>", -4.0]]
    few, many = (bytecodes(tokenizer_files, joined(n)) for n in (100, 400))
    assert few > 100
    assert many < 5 * few, "four times the tokens, and sixteen times the work"


def test_what_can_be_wrong(merge, models, tmp_path):
    with pytest.raises(EpimerError, match=r"write tokenizer_source: union to align them by token"):
        merge("swapped", "plain")
    with pytest.raises(EpimerError, match=r"tokenizer.tokens names '<q>', which the output's tokenizer does not have"):
        merge("added", tokenizer={"tokens": {"<q>": {"source": "added"}}})
    with pytest.raises(EpimerError, match=r"the source of '<x>' is long, which is not merged here"):
        merge("added", tokenizer={"tokens": {"<x>": {"source": "long"}}})
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "added" / "tokenizer.json").unlink()
    with pytest.raises(EpimerError, match=r"union needs every model's tokenizer and table of embeddings"):
        merge("added", tokenizer_source="union")


@pytest.mark.parametrize(("more", "expected"), [
    ({"tokenizer": 3},
     "tokenizer must be a mapping with keys among source, tokens, pad_to_multiple_of. Got 3 instead."),
    ({"tokenizer": {"source": "union"}, "tokenizer_source": "base"},
     "'tokenizer' and 'tokenizer_source' both name a tokenizer; keep one of them."),
    ({"tokenizer": {"pad_to_multiple_of": 0}},
     "tokenizer.pad_to_multiple_of must be an integer at least 1. Got 0 instead."),
    ({"tokenizer": {"tokens": {"<x>": {"source": {"kind": "mean"}}}}},
     "tokenizer.tokens.<x>.source.kind must be zero or model_token. Got 'mean' instead."),
    ({"chat_template": "alpacas"},
     "chat_template must be auto, alpaca, chatml, exaone, llama3, mistral, or the text of a Jinja template: "
     "paste that of a model's chat_template.jinja or tokenizer_config.json. Got 'alpacas' instead."),
])  # fmt: skip
def test_mistakes_are_one_line(more, expected):
    with pytest.raises(EpimerError) as error:
        load_recipe({"merge_method": "linear", "models": [{"model": "a"}], **more})
    assert str(error.value) == f"recipe: {expected}"


def test_a_recipe_with_a_tokenizer_reads_back():
    tokens = {"<x>": {"source": {"kind": "model_token", "model": "a", "token_id": 3}, "force": True},
              "<y>": {"source": "a"}, "<z>": {"source": {"kind": "zero"}}}  # fmt: skip
    given = {"source": "union", "tokens": tokens, "pad_to_multiple_of": 8}
    recipe = load_recipe({"merge_method": "linear", "models": [{"model": "a"}], "tokenizer": given})
    assert recipe.to_dict()["tokenizer"] == given
    assert load_recipe(recipe.to_dict()) == recipe
