"""What could go silently wrong: weights per tensor, equal names, ties, narrow copies, other people's files."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from commands import assert_refused, run
from epimer.atomic_files import remove
from epimer.checkpoints import open_checkpoint
from epimer.errors import OutputError, TensorError

NAMES = [f"layers.{i}.w" for i in range(3)]


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    base = {name: torch.randn(8, 6) for name in NAMES}
    states = [base] + [{n: W + torch.randn_like(W) for n, W in base.items()} for _ in range(2)]
    for t, state in enumerate(states):
        (tmp_path / f"m{t}").mkdir()
        save_file(state, tmp_path / f"m{t}" / "model.safetensors")
    return states


def recipe(root, method="average", *entries, **more):
    entries = entries or [{"model": str(root / f"m{t}")} for t in (1, 2)]
    return {"merge_method": method, "base_model": str(root / "m0"), "models": list(entries), **more}


def test_every_tensor_of_ties_has_its_own_weights(models, tmp_path):
    entries = [
        {"model": str(tmp_path / f"m{t}"), "parameters": {"weight": w}} for t, w in ((1, [1, 0.5, 0]), (2, [0, 0.5, 1]))
    ]
    epimer.merge(recipe(tmp_path, "ties", *entries, parameters={"density": 1}), tmp_path / "out", progress=False)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.allclose(merged[NAMES[0]], models[1][NAMES[0]], atol=1e-6)
    assert torch.allclose(merged[NAMES[2]], models[2][NAMES[2]], atol=1e-6)


def test_models_of_one_name_are_not_confused(models, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "q").mkdir()
    one, two = (shutil.copytree(tmp_path / f"m{t}", tmp_path / where / "m") for t, where in ((1, "p"), (2, "q")))
    weighed = [({"weight": 0.9}, {"weight": 0.1}), ({"weight": 0.1}, {"weight": 0.9})]

    def entries(first, second):
        return [{"model": str(m), "parameters": w} for m, w in zip((first, second), weighed[0], strict=True)]

    record = epimer.merge(recipe(tmp_path, "average", *entries(one, two)), tmp_path / "out", progress=False)
    with pytest.raises(OutputError, match="--overwrite"):
        epimer.merge(recipe(tmp_path, "average", *entries(two, one)), tmp_path / "out", progress=False)
    swapped = epimer.merge(recipe(tmp_path, "average", *entries(two, one)), tmp_path / "swapped", progress=False)
    assert record.request != swapped.request


def test_a_copy_that_does_not_fit_its_dtype_is_refused(models, tmp_path):
    state = dict(models[0])
    state[NAMES[1]] = torch.full((8, 6), 1e6)
    save_file(state, tmp_path / "m0" / "model.safetensors")
    with pytest.raises(TensorError, match=r"'layers\.1\.w' does not fit in torch\.float16"):
        epimer.merge(recipe(tmp_path, rules={NAMES[1]: "copy"}, dtype="float16"), tmp_path / "out", progress=False)


def test_skipping_an_embedding_keeps_its_tied_head(tmp_path):
    for t in range(3):
        torch.manual_seed(t)
        table = torch.randn(8, 4)
        torch.save({"embed_tokens.weight": table, "lm_head.weight": table}, tmp_path / f"m{t}.bin")
    given = {
        "merge_method": "average",
        "base_model": str(tmp_path / "m0.bin"),
        "models": [{"model": str(tmp_path / f"m{t}.bin")} for t in (1, 2)],
        "rules": {"embed_tokens.weight": "skip"},
    }
    epimer.merge(given, tmp_path / "out", progress=False)
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["lm_head.weight"]


def lora(folder, module, seed):
    torch.manual_seed(seed)
    folder.mkdir()
    prefix = f"base_model.model.{module}"
    embedding = "embed" in module
    A, B = (".lora_embedding_A", ".lora_embedding_B") if embedding else (".lora_A.weight", ".lora_B.weight")
    shapes = ((2, 8), (4, 2)) if embedding else ((2, 4), (8, 2))
    tensors = {prefix + A: torch.randn(shapes[0]), prefix + B: torch.randn(shapes[1])}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2}))


def test_adapters_of_tied_tables_have_their_own_fingerprints_and_heads_are_refused(tmp_path):
    table = torch.randn(8, 4)
    torch.save({"embed_tokens.weight": table, "lm_head.weight": table}, tmp_path / "base.bin")
    for t in range(2):
        lora(tmp_path / f"a{t}", "embed_tokens", t)
    lora(tmp_path / "head", "lm_head", 3)
    base = open_checkpoint(str(tmp_path / "base.bin"))
    adapted = [open_checkpoint(f"{tmp_path / 'base.bin'}+{tmp_path / f'a{t}'}") for t in range(2)]
    assert len({base.fingerprint, *(one.fingerprint for one in adapted)}) == 3
    assert torch.equal(adapted[0].read("lm_head.weight"), adapted[0].read("embed_tokens.weight"))
    assert not torch.equal(adapted[0].read("lm_head.weight"), table)
    with pytest.raises(epimer.CheckpointError, match="shares with its embeddings"):
        open_checkpoint(f"{tmp_path / 'base.bin'}+{tmp_path / 'head'}")


def test_a_batch_that_needs_more_than_the_limit_still_goes_ahead(tmp_path):
    from epimer.api import plan_merge
    from epimer.engine.merge import MergeWalk
    from epimer.engine.threads import Threads

    torch.manual_seed(0)
    for t in range(3):
        save_file({f"v{i}": torch.randn(3000) for i in range(40)}, tmp_path / f"m{t}.safetensors")
    plan = plan_merge(
        {
            "merge_method": "dare",
            "base_model": str(tmp_path / "m0.safetensors"),
            "models": [{"model": str(tmp_path / f"m{t}.safetensors")} for t in (1, 2)],
        }
    )
    walk = MergeWalk(plan, plan.parts)
    engine = Threads([torch.device("cpu")], memory=plan.memory + 1)
    assert max(batch.memory for batch in walk.jobs) > plan.memory + 1
    assert sum(len(merged) for _, merged in engine.map(walk)) == 40


def test_what_appears_at_the_output_meanwhile_is_not_touched(models, tmp_path, monkeypatch):
    from epimer.checkpoints.writer import Draft

    put, out = Draft.wrote, tmp_path / "out"

    def meanwhile(self, *args):
        out.mkdir(exist_ok=True)
        (out / "precious.txt").write_text("mine")
        put(self, *args)

    monkeypatch.setattr(Draft, "wrote", meanwhile)
    with pytest.raises(OutputError, match="--overwrite"):
        epimer.merge(recipe(tmp_path), out, progress=False)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]


def test_overwriting_never_removes_what_epimer_did_not_make(models, tmp_path):
    out = tmp_path / "out"
    epimer.merge(recipe(tmp_path), out, progress=False)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"also holds 'notes\.txt'"):
        epimer.merge(recipe(tmp_path, "tsv"), out, overwrite=True, progress=False)
    (out / "notes.txt").unlink()
    epimer.merge(recipe(tmp_path, "tsv"), out, overwrite=True, progress=False)
    own = tmp_path / ".other.epimer"
    own.mkdir()
    (own / "diary").write_text("mine")
    with pytest.raises(OutputError, match="'diary', which epimer did not put there"):
        epimer.merge(recipe(tmp_path), tmp_path / "other", progress=False)
    assert (own / "diary").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(OutputError, match="is a link"):
        epimer.merge(recipe(tmp_path), tmp_path / "link", progress=False)


@pytest.fixture
def interrupted(models, tmp_path, monkeypatch):
    """The draft of a merge that was stopped after its first tensor, and a folder with a file of the user's."""
    from epimer.checkpoints.writer import Draft

    wrote = Draft.wrote

    def once(self, *args):
        wrote(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Draft, "wrote", once)
    with pytest.raises(KeyboardInterrupt):
        epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    monkeypatch.setattr(Draft, "wrote", wrote)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("precious")
    return tmp_path / ".out.epimer"


@pytest.mark.parametrize("place", ["model", "model/model.safetensors", "old", "model/README.md", "second name"])
def test_a_link_in_a_draft_is_neither_followed_nor_written_through(interrupted, tmp_path, place):
    """A folder that was unpacked from an archive may hold links to anything."""
    mine, shard = tmp_path / "mine" / "model.safetensors", interrupted / "model" / "model.safetensors"
    if place == "second name":
        shard.unlink()
        shard.hardlink_to(mine)
    else:
        if (interrupted / place).exists():
            remove(interrupted / place)
        (interrupted / place).symlink_to(mine if "." in place else mine.parent)
    with pytest.raises(OutputError, match="which epimer did not put there; remove it"):
        epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)
    assert mine.read_text() == "precious"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_draft_of_another_user_is_not_taken_up(interrupted, tmp_path):
    os.chown(interrupted, 65534, -1)
    with pytest.raises(OutputError, match="belongs to another user, so it is not taken up; choose another output"):
        epimer.merge(recipe(tmp_path), tmp_path / "out", progress=False)


def test_an_output_without_a_name_is_refused(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe(tmp_path)))
    before = sorted(tmp_path.iterdir())
    for ran in (run("merge", "recipe.json", ""), run("merge", "recipe.json", "", "--dry-run")):
        assert_refused(ran, "give the folder to make: epimer merge RECIPE OUT.")
    with pytest.raises(OutputError, match="the name of the output is empty"):
        epimer.merge(recipe(tmp_path), "", progress=False)
    assert sorted(tmp_path.iterdir()) == before


def test_an_old_output_left_by_a_kill_after_the_last_rename_is_let_go(models, tmp_path):
    out = tmp_path / "out"
    epimer.merge(recipe(tmp_path), out, progress=False)
    shutil.copytree(out, tmp_path / ".out.epimer" / "old")
    assert not epimer.merge(recipe(tmp_path), out, progress=False).timings  # already there
    assert not (tmp_path / ".out.epimer" / "old").exists()
    epimer.merge(recipe(tmp_path, "tsv"), out, overwrite=True, progress=False)
    assert json.loads((out / "epimer.json").read_text())["method"] == "tsv"


def test_a_missing_index_is_noticed_and_tokenizers_tell_no_path(models, tmp_path):
    (tmp_path / "m0" / "tokenizer_config.json").write_text(
        json.dumps({"name_or_path": "/home/alice/m", "special_tokens_map_file": "/home/alice/x", "model_max_length": 5})
    )
    out = tmp_path / "out"
    epimer.merge(recipe(tmp_path), out, max_shard_size=200, progress=False)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 5}
    (out / "model.safetensors.index.json").unlink()
    with pytest.raises(OutputError, match="--overwrite"):
        epimer.merge(recipe(tmp_path), out, max_shard_size=200, progress=False)
