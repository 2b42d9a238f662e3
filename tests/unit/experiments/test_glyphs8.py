"""The embedded suite at its tiny size: what its data, its network and its folders promise. The numbers are not here."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.errors import DataError
from epimer.evaluation.suite import Suite
from epimer.experiments.glyphs8 import build, tasks
from epimer.experiments.glyphs8.build import cache_folder, fingerprint, load
from epimer.experiments.glyphs8.render import draw_character, has_glyph, import_extra, seeded_generator
from epimer.experiments.glyphs8.tasks import SPLITS, TASKS, draw_pool, faces_of
from epimer.experiments.glyphs8.train import TINY, Settings
from epimer.experiments.glyphs8.vit import FrozenHead, Shape, Vit

pytestmark = pytest.mark.slow

CHARACTERS = {"greek": tasks.GREEK, "operators": tasks.OPERATORS, "rotation": tasks.DIRECTED, "braille": tasks.BRAILLE}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return load(tmp_path_factory.mktemp("suites"), progress=False, settings=TINY)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_share_no_picture_and_show_every_class(task: tasks.GlyphTask) -> None:
    seen: set[bytes] = set()
    for split in SPLITS:
        x, y = task.samples(split, 300, seed=0)
        assert x.dtype == torch.uint8
        assert x.shape == (300, 27, 27)
        assert y.unique().tolist() == list(range(len(task.classes)))
        pictures = {picture.numpy().tobytes() for picture in x}
        assert len(pictures) == 300
        assert not pictures & seen
        seen |= pictures


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_seed_gives_the_same_pictures_and_another_seed_others(task: tasks.GlyphTask) -> None:
    x, y = task.samples("val", 60, seed=0)
    again, labels = task.samples("val", 60, seed=0)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert not torch.equal(x, task.samples("val", 60, seed=1)[0])


def test_held_out_faces_are_in_one_split_only() -> None:
    faces = (*tasks.ALL_FACES, *tasks.COMPUTER_MODERN)
    parts = [set(faces_of(split, faces)) for split in SPLITS]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(faces)


def test_handwritten_images_are_in_one_split_only() -> None:
    x, _ = tasks._handwritten()
    assert sum(tasks.DIGITS) == len(x) == 1797
    assert len({image.numpy().tobytes() for image in x}) == 1797
    test, _ = TASKS[0].samples("test", 5000, seed=0)
    assert len(test) == tasks.DIGITS[2]  # none is shown twice


@pytest.mark.parametrize("name", CHARACTERS)
def test_characters_differ_in_every_face(name: str) -> None:
    characters = CHARACTERS[name]
    assert len(set(characters)) == len(characters)
    for face in ("DejaVuSans", "DejaVuSerif-Italic"):
        drawn = {draw_character(character, face).numpy().tobytes() for character in characters}
        assert len(drawn) == len(characters)


def test_a_sum_is_of_two_digits_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    # Digits drawn as blocks of their value's brightness: each half then shows which digit was taken.
    blocks = torch.zeros(5, 1, 48, 48)
    blocks[:, :, 12:36, 14:34] = torch.arange(5.0)[:, None, None, None] / 4
    monkeypatch.setattr(tasks, "draw_characters", lambda characters, faces: blocks)
    monkeypatch.setattr(tasks, "add_background", lambda ink, rng, background: ink)
    ink, y = TASKS[-1].samples("train", 90, seed=0)
    left, right = ink[:, 13, 6] * 4, ink[:, 13, 20] * 4
    assert torch.allclose(left + right, y.float(), atol=1e-4)


def test_the_pool_shares_no_character_with_the_tasks() -> None:
    used = set("".join(CHARACTERS.values())) | set("01234")
    assert not used & set(tasks.POOL)
    faces = ("DejaVuSans", "DejaVuSerif")
    drawings = {
        draw_character(character, face).numpy().tobytes()
        for character in used
        for face in faces
        if has_glyph(face, character)
    }
    kept = [(character, face) for character in tasks.POOL if character not in tasks.LOOKALIKES for face in faces]
    assert not drawings & {draw_character(*pair).numpy().tobytes() for pair in kept if has_glyph(pair[1], pair[0])}
    drawn = draw_pool(10_000)
    assert len(drawn.counts) >= Settings().pool
    x, y = drawn.batch(2000, seeded_generator(0))
    assert len(x) == 2000
    assert 0 <= int(y.min()) <= int(y.max()) < len(drawn.counts)


def test_the_network_has_the_names_and_sizes_of_a_vit() -> None:
    state = Vit(Shape()).state_dict()
    assert state["patch_embed.proj.weight"].shape == (192, 81)
    assert state["pos_embed"].shape == (1, 9, 192)
    assert state["blocks.1.attn.q.weight"].shape == (192, 192)
    assert state["blocks.1.attn.proj.weight"].shape == (192, 192)
    assert state["blocks.0.mlp.fc1.weight"].shape == (768, 192)
    assert state["blocks.0.norm1.weight"].shape == state["norm.bias"].shape == (192,)
    assert 0.9e6 < sum(W.numel() for W in state.values()) < 0.92e6


def test_patches_are_cut_row_by_row() -> None:
    network = Vit(Shape())
    x = torch.zeros(1, 27, 27)
    x[0, 9:18, 18:27] = 1  # the patch in row 1, column 2
    with torch.no_grad():
        moved = (network.patch_embed(x) - network.patch_embed(torch.zeros_like(x))).abs().sum(-1)[0]
    assert moved.nonzero().flatten().tolist() == [5]


def test_a_network_is_the_backbone_and_a_frozen_head(suite: Suite) -> None:
    task = suite.tasks[1]
    network = suite.network(suite.models[1], task)
    x = task.splits["val"].x[:7]
    assert not network.training
    assert {name for name, _ in network.named_parameters()} == set(network.state_dict()) == set(suite.base)
    features = Vit(TINY.shape)
    features.load_state_dict(dict(suite.models[1]))
    with torch.no_grad():
        expected = features(x) @ task.head["weight"].T + task.head["bias"]
        assert torch.allclose(network(x), expected, atol=1e-5)
    assert torch.equal(FrozenHead(task.head).weight, task.head["weight"])


def test_the_suite_is_what_was_drawn(suite: Suite) -> None:
    assert [task.name for task in suite.tasks] == [task.name for task in TASKS]
    for given, task in zip(TASKS, suite.tasks, strict=True):
        for split in SPLITS:
            x, y = given.samples(split, TINY.size(split), seed=0)
            assert torch.equal(task.splits[split].x, x.float() / 255)
            assert torch.equal(task.splits[split].y, y)
        assert task.head["weight"].shape == (len(given.classes), TINY.shape.width)


def test_its_note_holds_what_is_measured_again(suite: Suite) -> None:
    about = json.loads((suite.folder / "suite.json").read_text())
    assert set(about["seconds"]) == {"data", "pretrain", "heads", "fine-tune", "evaluate"}
    right = suite.scores(suite.base, "test")
    for task, hits, state in zip(suite.tasks, right, suite.models, strict=True):
        noted = about["tasks"][task.name]["accuracy"]
        assert noted["probe"]["test"] == pytest.approx(float(hits.float().mean()))
        assert noted["fine-tuned"]["val"] == pytest.approx(float(suite.scores_on(state, task, "val").float().mean()))


def test_curvature_sees_every_matrix(suite: Suite) -> None:
    task = suite.tasks[0]
    network = suite.network(suite.models[0], task)
    batches = [(task.splits["train"].x[:16], task.splits["train"].y[:16])]
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    curvature = epimer.estimate_curvature(network, batches, loss, kind="kronecker", samples=16, progress=False)
    assert {name for name, W in suite.base.items() if W.dim() == 2} <= set(curvature)
    assert set(curvature) <= set(suite.base)


def test_its_folders_merge_like_anybodys(suite: Suite, tmp_path: Path) -> None:
    folders = [suite.folder / "models" / task.name for task in suite.tasks]
    recipe = {
        "merge_method": "average",
        "base_model": str(suite.folder / "base"),
        "models": [{"model": str(folder)} for folder in folders],
    }
    epimer.merge(recipe, tmp_path / "merged", progress=False)
    merged = open_checkpoint(str(tmp_path / "merged"))
    name = "blocks.0.mlp.fc1.weight"
    expected = torch.stack([model[name].double() for model in suite.models]).mean(0)
    assert torch.allclose(merged.read(name).double(), expected, atol=1e-6)
    assert set(merged.headers) == set(suite.base)


def test_a_second_load_builds_nothing(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", None)
    again = load(suite.folder.parent, progress=False, settings=TINY)
    assert again.folder == suite.folder
    assert all(torch.equal(W, again.base[name]) for name, W in suite.base.items())


@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_a_damaged_suite_is_said_with_its_remedy(suite: Suite, tmp_path: Path, damage: str) -> None:
    place = tmp_path / suite.folder.name
    shutil.copytree(suite.folder, place)
    file = place / "data.safetensors"
    file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match=re.escape(f"Delete {place}, and it is built again.")):
        load(tmp_path, progress=False, settings=TINY)


def test_a_build_is_the_same_twice(suite: Suite, tmp_path: Path) -> None:
    again = load(tmp_path, progress=False, settings=TINY)
    assert again.folder.name == suite.folder.name
    for state, twin in zip([suite.base, *suite.models], [again.base, *again.models], strict=True):
        assert all(torch.equal(W, twin[name]) for name, W in state.items())


def test_an_interrupted_build_leaves_nothing_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(build, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, progress=False, settings=replace(TINY, train=100, pretrain_steps=1))
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_a_killed_build_left_is_cleared(tmp_path: Path) -> None:
    settings = replace(TINY, train=100, pretrain_steps=1)
    left = tmp_path / f".glyphs8-{fingerprint(settings)}.epimer"
    left.mkdir()
    (left / "base").mkdir()
    load(tmp_path, progress=False, settings=settings)
    assert not left.exists()


def test_a_fingerprint_tells_settings_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(TINY)
    assert fingerprint(replace(TINY, seed=1)) != before
    assert fingerprint(replace(TINY, shape=Shape())) != before
    monkeypatch.setattr(build, "versions", lambda: {"matplotlib": "0"})
    assert fingerprint(TINY) != before


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPIMER_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("EPIMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "epimer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "epimer"


def test_a_missing_package_is_named_with_its_remedy() -> None:
    with pytest.raises(DataError, match=r"needs matplotlib; install it: pip install 'epimer\[suites\]'"):
        import_extra("no_such_module", "matplotlib")
