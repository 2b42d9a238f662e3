"""Killed, interrupted, repeated, with other workers: the output is the same bytes, and never something else."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.checkpoints.writer import Draft, plan_shards
from epimer.errors import OutputError

SHAPES = {
    "embed.weight": (600, 64),
    **{f"layers.{i}.{part}.weight": (96, 64) for i in range(12) for part in ("q", "k", "v")},
    **{f"layers.{i}.norm.weight": (64,) for i in range(12)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    base = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for t in range(4):
        folder = root / f"m{t}"
        folder.mkdir()
        save_file(
            base if t == 0 else {n: W + 0.05 * torch.randn_like(W) for n, W in base.items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps({"model_type": "bert", "dtype": "float32"}))
    return root


def recipe(models, method="tsv", **more):
    return {
        "merge_method": method,
        "base_model": str(models / "m0"),
        "models": [{"model": str(models / f"m{t}")} for t in (1, 2, 3)],
        **more,
    }


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


SLOW = """
import sys, time
from epimer.checkpoints import writer
put = writer.Draft.wrote
def slow(*args):
    time.sleep(0.02)
    put(*args)
writer.Draft.wrote, writer.FLUSH_SECONDS = slow, 0.05
import epimer
from epimer.api import merge
print("ready", flush=True)
merge(sys.argv[1], sys.argv[2], max_shard_size="200KB", progress=False)
"""


def test_a_run_killed_at_25_random_moments_ends_in_the_same_bytes(models, tmp_path):
    """The merge is slowed down (20 ms per tensor) so that kills fall into every stage of it."""
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(models, "ties")))
    whole, out, draft = tmp_path / "whole", tmp_path / "out", tmp_path / ".out.epimer"
    epimer.merge(file, whole, max_shard_size="200KB", progress=False)
    expected = contents(whole)
    assert len([name for name in expected if name.endswith(".safetensors")]) >= 3
    generator = random.Random(0)
    killed = resumed = 0
    for _ in range(25):
        command = [sys.executable, "-c", SLOW, str(file), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + generator.uniform(0, 1.6)
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.005)
                if out.exists():
                    assert contents(out) == expected  # it appears whole or not at all
            process.send_signal(signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
        journal = draft / "journal.jsonl"
        resumed += journal.exists() and len(journal.read_bytes().splitlines()) > 2
        if out.exists() or generator.random() < 0.5:  # finish from here, or be killed again
            epimer.merge(file, out, max_shard_size="200KB", progress=False)
            assert contents(out) == expected
            assert not draft.exists()
            shutil.rmtree(out)
    assert killed >= 15
    assert resumed >= 5


@pytest.mark.parametrize("method", ["tsv", "epimer_free", "ties", "task_arithmetic", "dare"])
def test_workers_and_repetition_change_no_byte(models, tmp_path, method):
    outs = [tmp_path / name for name in ("one", "two", "again")]
    for out, workers in zip(outs, (1, 2, 2), strict=True):
        epimer.merge(recipe(models, method, out_dtype="bfloat16"), out, workers=workers, device="cpu", progress=False)
    assert contents(outs[0]) == contents(outs[1]) == contents(outs[2])


def test_tensors_written_by_a_killed_run_are_not_made_again(models, tmp_path, monkeypatch):
    import epimer.checkpoints.writer as writer

    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.0)
    made = []
    put = Draft.wrote

    def dying(self, key, *rest):
        if len(made) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(key)
        put(self, key, *rest)

    monkeypatch.setattr(Draft, "wrote", dying)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        epimer.merge(recipe(models), out, progress=False)
    assert not out.exists()
    assert (tmp_path / ".out.epimer").is_dir()
    first = len(made)
    monkeypatch.setattr(Draft, "wrote", lambda self, key, *rest: (made.append(key), put(self, key, *rest)))
    record = epimer.merge(recipe(models), out, progress=False)
    assert 10 <= first <= 11
    assert len(made) - len(SHAPES) <= 1  # all but the one that was being written
    epimer.merge(recipe(models), tmp_path / "whole", progress=False)
    assert contents(out) == contents(tmp_path / "whole")
    assert all(tensor.seconds is not None for tensor in record.tensors.values())


def unfinished(models, out, monkeypatch, method="average", stop=5):
    """Leave a half-made output behind."""
    put, made = Draft.wrote, []

    def dying(self, key, *rest):
        put(self, key, *rest)
        made.append(key)
        if len(made) == stop:
            self.flush()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "wrote", dying)
        with pytest.raises(KeyboardInterrupt):
            epimer.merge(recipe(models, method), out, progress=False)


def test_a_changed_recipe_starts_over(models, tmp_path, monkeypatch):
    out = tmp_path / "out"
    unfinished(models, out, monkeypatch, "average")
    epimer.merge(recipe(models, "tsv"), out, progress=False)
    epimer.merge(recipe(models, "tsv"), tmp_path / "whole", progress=False)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_changed_input_starts_over(models, tmp_path, monkeypatch):
    copies = tmp_path / "models"
    shutil.copytree(models, copies)
    out = tmp_path / "out"
    unfinished(copies, out, monkeypatch)
    changed = load_file(copies / "m1" / "model.safetensors")
    changed["embed.weight"][300, 10] += 1  # where no fingerprint looks
    save_file(changed, copies / "m1" / "model.safetensors")
    epimer.merge(recipe(copies, "average"), out, progress=False)
    states = [load_file(copies / f"m{t}" / "model.safetensors") for t in range(4)]
    expected = epimer.merge_state_dicts(states[0], states[1:], "average")
    merged = load_file(out / "model.safetensors")
    assert all(torch.equal(merged[name], expected[name]) for name in SHAPES)


DAMAGE = ["torn line", "flipped byte", "shorter shard", "no shard", "no journal", "garbage", "changed entry", "more"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_draft_is_repaired(models, tmp_path, monkeypatch, damage):
    out = tmp_path / "out"
    unfinished(models, out, monkeypatch)
    root = tmp_path / ".out.epimer"
    journal, shard = root / "journal.jsonl", root / "model" / "model.safetensors"
    match damage:
        case "torn line":
            journal.write_bytes(journal.read_bytes()[:-20])
        case "flipped byte":
            data = bytearray(shard.read_bytes())
            data[len(data) // 8] ^= 255
            shard.write_bytes(data)
        case "shorter shard":
            os.truncate(shard, shard.stat().st_size // 2)
        case "no shard":
            shard.unlink()
        case "no journal":
            journal.unlink()
        case "garbage":
            journal.write_bytes(b"\xff\x00not a journal\n")
        case "changed entry":
            assert b'"unchanged": false' in journal.read_bytes()
            journal.write_bytes(journal.read_bytes().replace(b'"unchanged": false', b'"unchanged": true'))
        case "more":  # of a run with other settings that was killed before its end
            (root / "model" / "code").mkdir()
            (root / "model" / "code" / "model.py").write_text("")
            (root / "model" / "chat_template.jinja").write_text("")
    epimer.merge(recipe(models, "average"), out, progress=False)
    epimer.merge(recipe(models, "average"), tmp_path / "whole", progress=False)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_second_merge_into_the_same_place_waits_its_turn(tmp_path):
    shards = plan_shards({"w": torch.empty(3, device="meta")}, {}, 1 << 20)
    with (
        Draft(tmp_path / "out", shards, "key").opened(),
        pytest.raises(OutputError, match="another merge is writing"),
        Draft(tmp_path / "out", shards, "key").opened(),
    ):
        pass


def test_an_output_that_was_moved_aside_comes_back(models, tmp_path):
    """A kill between the two renames of --overwrite leaves the old output in the draft; the next run restores it."""
    out = tmp_path / "out"
    epimer.merge(recipe(models, "average"), out, progress=False)
    before = contents(out)
    root = tmp_path / ".out.epimer"
    root.mkdir()
    (root / "journal.jsonl").write_text("")
    out.rename(root / "old")
    assert epimer.merge(recipe(models, "average"), out, progress=False).request
    assert contents(out) == before
    assert not root.exists()


def test_the_same_request_is_done_once(models, tmp_path):
    out = tmp_path / "out"
    first = epimer.merge(recipe(models, "average"), out, progress=False)
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    again = epimer.merge(recipe(models, "average"), out, progress=False)
    assert again.request == first.request
    assert not again.timings
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(OutputError, match="--overwrite"):
        epimer.merge(recipe(models, "task_arithmetic"), out, progress=False)
    epimer.merge(recipe(models, "task_arithmetic"), out, overwrite=True, progress=False)
    assert json.loads((out / "epimer.json").read_text())["method"] == "task_arithmetic"


def test_an_output_with_a_file_missing_is_not_taken_for_done(models, tmp_path):
    out = tmp_path / "out"
    epimer.merge(recipe(models, "average"), out, progress=False)
    (out / "config.json").unlink()
    with pytest.raises(OutputError, match="--overwrite"):
        epimer.merge(recipe(models, "average"), out, progress=False)


def test_an_empty_draft_left_by_a_signal_after_the_last_rename_is_let_go(models, tmp_path):
    out = tmp_path / "out"
    epimer.merge(recipe(models, "average"), out, progress=False)
    (tmp_path / ".out.epimer").mkdir()
    epimer.merge(recipe(models, "average"), out, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_spent_draft_that_cannot_be_removed_is_left_to_the_next_run(models, tmp_path, monkeypatch):
    """The output is whole all the same, so the merge ends well."""
    out, draft = tmp_path / "out", tmp_path / ".out.epimer"

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patch:
        patch.setattr("epimer.atomic_files.remove", refuse)
        epimer.merge(recipe(models, "average"), out, progress=False)
    assert [path.name for path in draft.iterdir()] == ["journal.jsonl"]
    made = contents(out)
    assert not epimer.merge(recipe(models, "average"), out, progress=False).timings  # already there
    assert not draft.exists()
    assert contents(out) == made
