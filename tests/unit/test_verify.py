"""`epimer.verify`: every way in which a folder is not what its record says is found, and named."""

import hashlib
import json
import os
import random
import shutil
import zlib
from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import epimer
from commands import assert_refused, run
from epimer.checkpoints.journal import Journal
from epimer.checkpoints.writer import Draft
from epimer.checksums import data_hash
from epimer.curvature.format import Provenance
from epimer.engine.recompute import TOLERANCE
from epimer.errors import DataError, ParameterError

SHAPES = {
    "embed_tokens.weight": (40, 24),
    **{f"layers.{i}.{part}.weight": (48, 24) for i in range(3) for part in ("q", "v")},
    **{f"layers.{i}.norm.weight": (24,) for i in range(3)},
    "wide.weight": (900, 24),
}
PARTS = ["record", "files", "tensors", "inputs", "recomputed"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three models, and merges of them beside them."""
    root = tmp_path_factory.mktemp("made")
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for name in ("base", "one", "two"):
        moved = {
            n: W if name == "base" else W + 0.1 * torch.randn(W.shape, generator=generator) for n, W in base.items()
        }
        (root / name).mkdir()
        save_file(moved, root / name / "model.safetensors")
        (root / name / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for method in ("average", "tsv"):
        epimer.merge(recipe(root, method), root / method, max_shard_size="40KB", progress=False)
    epimer.merge(recipe(root, "average"), root / "hashed", hash_inputs=True, progress=False)
    return root


@pytest.fixture
def root(made, tmp_path):
    """A copy of all of it that a test may damage."""
    return shutil.copytree(made, tmp_path / "copy")


def recipe(root, method="average", **more):
    models = [{"model": f"{root}/{name}"} for name in ("one", "two")]
    return {"merge_method": method, "base_model": f"{root}/base", "models": models, **more}


def outcomes(found):
    return {check.part: str(check.outcome) for check in found.checks}


def differing(found):
    """Return the parts that differ, each with the names of what does."""
    return {check.part: check.names for check in found.checks if check.outcome == "differs"}


def forge(folder, tensors=None):
    """Bring the record of a folder in line with its files, as a forger would."""
    file = folder / "epimer.json"
    data = json.loads(file.read_bytes())
    for name in data["checksums"]:
        content = (folder / name).read_bytes()
        weights = name.endswith(".safetensors")
        found = f"crc32:{zlib.crc32(content):08x}" if weights else f"sha256:{hashlib.sha256(content).hexdigest()}"
        data["checksums"][name] = found
    for name, W in (tensors or {}).items():
        data["tensor_checksums"][name] = f"{zlib.crc32(W.contiguous().view(torch.uint8).numpy().tobytes()):08x}"
    data["sha256"] = data_hash(data)
    file.write_text(json.dumps(data))


def shard_of(folder, name):
    return next(file for file in folder.glob("*.safetensors") if name in load_file(file))


def replace_tensor(folder, name, W):
    """Write another tensor over one, in its place in its file."""
    shard = shard_of(folder, name)
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    raw = W.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(raw) == stop - start
    data[8 + length + start : 8 + length + stop] = raw
    shard.write_bytes(data)


@pytest.mark.parametrize("method", ["average", "tsv", "ties", "dare", "epimer_free", "nan", "slerp"])
def test_a_merge_is_what_its_record_says_to_the_last_bit(made, tmp_path, method):
    given = recipe(made, method)
    if method == "slerp":
        given = {**given, "models": given["models"][:1], "parameters": {"t": 0.3}}
    epimer.merge(given, tmp_path / "out", progress=False, max_shard_size="30KB")
    found = epimer.verify(tmp_path / "out", recipe=given, sample=None)
    assert outcomes(found) == dict.fromkeys(PARTS, "ok")
    assert (found.verified, found.differs) == (True, False)
    assert (found.checks[-1].identical, found.checks[-1].difference) == (len(SHAPES), 0.0)


def test_the_record_has_the_checksums_that_other_tools_give(made):
    record = json.loads((made / "average" / "epimer.json").read_bytes())
    files = {path.name: path.read_bytes() for path in (made / "average").iterdir() if path.name != "epimer.json"}
    assert len([name for name in files if name.endswith(".safetensors")]) == 2
    assert record["checksums"] == {
        name: f"crc32:{zlib.crc32(data):08x}"
        if name.endswith(".safetensors")
        else f"sha256:{hashlib.sha256(data).hexdigest()}"
        for name, data in files.items()
    }
    tensors = {n: W for f in (made / "average").glob("*.safetensors") for n, W in load_file(f).items()}
    assert record["tensor_checksums"] == {n: f"{zlib.crc32(W.numpy().tobytes()):08x}" for n, W in tensors.items()}
    hashed = json.loads((made / "hashed" / "epimer.json").read_bytes())["input_files"]
    names = [f"{name}/model.safetensors" for name in ("base", "one", "two")]
    assert hashed == [[name, hashlib.sha256((made / name).read_bytes()).hexdigest()] for name in names]
    assert "input_files" not in record


def test_names_are_found_beside_the_folder_and_here(made, monkeypatch, tmp_path):
    assert epimer.verify(made / "tsv").verified
    moved = shutil.copytree(made / "tsv", tmp_path / "elsewhere" / "tsv")
    lost = epimer.verify(moved)
    assert outcomes(lost) == dict.fromkeys(PARTS[:3], "ok") | dict.fromkeys(PARTS[3:], "not checked")
    assert (lost.verified, lost.differs) == (False, False)
    assert lost.checks[3].text.startswith("'base', 'one', 'two' not found here or beside the folder; give the recipe")
    assert epimer.verify(moved, recipe=recipe(made)).verified  # of the recipe the paths are taken, and nothing else
    monkeypatch.chdir(made)
    assert epimer.verify(moved).verified
    assert outcomes(epimer.verify(moved, files_only=True)) == dict.fromkeys(PARTS[:3], "ok")


@pytest.mark.parametrize("out", ["out", "runs/deep/out"])
def test_models_that_lie_elsewhere_are_found_from_anywhere_and_after_a_move(root, tmp_path, monkeypatch, out):
    for place, name in (("p", "one"), ("q", "two")):  # models of one name, told by their places
        (root / "models" / place).mkdir(parents=True)
        (root / name).rename(root / "models" / place / "same")
    (root / "recipes").mkdir()
    models = [{"model": f"../models/{place}/same"} for place in ("p", "q")]
    written = {"merge_method": "tsv", "base_model": "../base", "models": models}
    (root / "recipes/recipe.yaml").write_text(yaml.safe_dump(written))
    monkeypatch.chdir(root)
    epimer.merge("recipes/recipe.yaml", out, progress=False)
    assert str(tmp_path) not in (root / out / "epimer.json").read_text()
    assert epimer.verify(out).verified
    monkeypatch.chdir("/")
    assert epimer.verify(root / out).verified
    moved = root.rename(tmp_path / "moved")
    assert epimer.verify(moved / out).verified
    shutil.rmtree(moved / "models")
    lost = epimer.verify(moved / out)
    assert lost.checks[3].text.startswith("'same', 'same' not found here or beside the folder; give the recipe")


def test_places_far_from_the_output_are_not_recorded(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "somebody"))
    for user in ("somebody", "another"):
        (tmp_path / "home" / user).mkdir(parents=True)
    shutil.copytree(root / "base", tmp_path / "home/another/base")
    epimer.merge(recipe(root) | {"base_model": str(tmp_path / "home/another/base")}, tmp_path / "home/somebody/out")
    text = (tmp_path / "home/somebody/out/epimer.json").read_text()
    assert "another" not in text
    assert "places" not in json.loads(text)


def test_renamed_models_and_models_of_one_name_are_told_by_their_place(root):
    for place, name in (("p", "one"), ("q", "two")):
        (root / place).mkdir()
        (root / name).rename(root / place / "same")
    given = recipe(root) | {"models": [{"model": str(root / place / "same")} for place in ("p", "q")]}
    assert epimer.verify(root / "tsv", recipe=given).verified
    swapped = given | {"models": given["models"][::-1]}
    assert differing(epimer.verify(root / "tsv", recipe=swapped)) == {"inputs": ("same", "same")}
    fewer = given | {"models": given["models"][:1]}
    unchecked = epimer.verify(root / "tsv", recipe=fewer).checks[3]
    assert (unchecked.outcome, "not as many models" in unchecked.text) == ("not checked", True)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_of_the_record_is_found(root, seed):
    file = root / "tsv" / "epimer.json"
    data = bytearray(file.read_bytes())
    generator = random.Random(seed)
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    file.write_bytes(data)
    assert not epimer.verify(root / "tsv", files_only=True).verified


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["weights"].__setitem__(0, 0.9),
        lambda data: data.update(method="ties"),
        lambda data: data.pop("models"),
        lambda data: data["tensors"].popitem(),
        lambda data: data.update(sha256="0" * 64),
    ],
)
def test_an_edited_record_is_found(root, change):
    file = root / "tsv" / "epimer.json"
    data = json.loads(file.read_bytes())
    change(data)
    file.write_text(json.dumps(data))
    found = epimer.verify(root / "tsv", files_only=True)
    assert differing(found) == {"record": ("epimer.json",)}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"method": 1, "parameters": {}, "weights": []}']
)
def test_what_is_no_record_leaves_the_rest_unchecked(root, content):
    (root / "tsv" / "epimer.json").write_bytes(content)
    expected = {"record": "differs"} | dict.fromkeys(PARTS[1:], "not checked")
    assert outcomes(epimer.verify(root / "tsv")) == expected


def test_files_that_are_added_removed_or_edited_are_named(root):
    out = root / "tsv"
    (out / "more").mkdir()
    (out / "more" / "extra.txt").write_text("x")
    (out / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (out / "README.md").unlink()
    found = epimer.verify(out, files_only=True)
    assert differing(found) == {"files": ("config.json", "README.md", "more/extra.txt")}
    text = "changed: 'config.json'; missing: 'README.md'; not in the record: 'more/extra.txt'"
    assert found.checks[1].text == text


def test_what_the_hub_adds_to_a_folder_is_no_difference(root):
    for name in (".gitattributes", ".cache/huggingface/download/config.json.metadata", ".git/HEAD"):
        (root / "tsv" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tsv" / name).write_text("x")
    assert epimer.verify(root / "tsv").verified
    (root / "tsv" / ".cache" / "other").write_text("x")
    assert differing(epimer.verify(root / "tsv", files_only=True)) == {"files": (".cache/other",)}


def test_a_name_that_is_no_text_is_shown_all_the_same(root):
    (root / "tsv" / os.fsdecode(b"x\xff")).write_bytes(b"")
    ran = run("verify", root / "tsv", "--files-only", "--json")
    assert (ran.code, json.loads(ran.out)["checks"][1]["names"]) == (2, ["x\\udcff"])


VALUES = (None, -1, 1e300, 10**40, "", "\0", "\ud800", "a" * 300, "../base", "crc32:", "a+b", [], {}, [[]], "x: [")


def keys_of(value, path=()):
    """Yield the place of every value in plain data."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from keys_of(inner, (*path, key))


def test_whatever_a_record_says_ends_in_a_verdict(root):
    """Records with values of the wrong type, size or sense, under a hash that fits, as a stranger may send them."""
    file = root / "tsv" / "epimer.json"
    original = file.read_bytes()
    verdicts = set()
    for seed in range(150):
        generator, data = random.Random(seed), json.loads(original)
        *path, last = generator.choice([*keys_of(data), *([(key,) for key in data] * 3)])
        place = data
        for key in path:
            place = place[key]
        if last == "recipe":
            word = generator.choice(("base", "one", "tsv", "models", "model"))
            place[last] = place[last].replace(word, str(generator.choice(VALUES)))
        elif generator.random() < 0.2:
            del place[last]
        else:
            place[last] = generator.choice(VALUES)
        data["sha256"] = data_hash(data)
        file.write_text(json.dumps(data))
        found = epimer.verify(root / "tsv", sample=2)
        json.dumps(found.to_dict(), ensure_ascii=False).encode()
        verdicts |= {check.outcome for check in found.checks}
    assert verdicts == {"ok", "differs", "not checked"}


@pytest.mark.parametrize("seed", range(20))
def test_one_flipped_bit_of_the_weights_names_its_tensor(root, seed):
    generator = random.Random(seed)
    name = generator.choice(list(SHAPES))
    shard = shard_of(root / "tsv", name)
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + generator.randrange(start, stop)] ^= 1 << generator.randrange(8)
    shard.write_bytes(data)
    assert differing(epimer.verify(root / "tsv", files_only=True)) == {"files": (shard.name,), "tensors": (name,)}


def test_a_damaged_header_and_a_cut_file_are_found(root):
    shard = shard_of(root / "tsv", "wide.weight")
    whole = shard.read_bytes()
    names = tuple(sorted(load_file(shard)))
    for damaged in (whole[:-5], whole[:3], b"\xff" * 8 + whole[8:], whole + b"x", b""):
        shard.write_bytes(damaged)
        found = differing(epimer.verify(root / "tsv", files_only=True))
        assert found["files"] == (shard.name,)
        assert found["tensors"] == names


def test_swapped_shards_and_tensors_of_another_merge_are_found(root):
    out = root / "tsv"
    first, second = sorted(out.glob("model-*.safetensors"))[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert differing(epimer.verify(out, files_only=True)) == {"files": (first.name, second.name)}
    first.write_bytes((root / "average" / first.name).read_bytes())
    second.write_bytes(two)
    assert set(differing(epimer.verify(out, files_only=True))) == {"files", "tensors"}


def test_a_forged_folder_is_found_by_computing_again(root):
    name = "layers.1.q.weight"
    other = load_file(shard_of(root / "average", name))[name]
    replace_tensor(root / "tsv", name, other)
    forge(root / "tsv", {name: other})
    found = epimer.verify(root / "tsv", sample=None)
    assert outcomes(found) == dict.fromkeys(PARTS[:4], "ok") | {"recomputed": "differs"}
    assert found.checks[-1].names == (name,)
    assert found.checks[-1].identical == len(SHAPES) - 1
    assert found.checks[-1].difference > 0.1
    hits = [not epimer.verify(root / "tsv", sample=3, seed=seed).verified for seed in range(12)]
    assert 0 < sum(hits) < 12  # a sample of 3 of 11 sees it sometimes
    assert hits == [not epimer.verify(root / "tsv", sample=3, seed=seed).verified for seed in range(12)]
    assert [check.part for check in epimer.verify(root / "tsv", sample=0).checks] == PARTS[:4]


def test_a_forged_note_of_a_pre_pass_is_found_by_computing_again(root, monkeypatch):
    """Who can write the draft of a killed merge can change its end; the pre-pass is computed again, not believed."""
    given, out = recipe(root, "ties", parameters={"density": 0.3}), root / "ties"

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "wrote", stop)
        with pytest.raises(KeyboardInterrupt):
            epimer.merge(given, out, progress=False)
    path = root / ".ties.epimer" / "journal.jsonl"
    entries = [json.loads(line.partition(b" ")[2]) for line in path.read_bytes().splitlines()]
    note = next(entry["value"] for entry in entries if entry.get("note") == "prepared")
    note["context"] = [0.5 * threshold for threshold in note["context"]]
    journal = Journal(path, entries[0]["key"])
    journal.begin()
    journal.append(entries[1:])
    assert epimer.merge(given, out, progress=False).tensors.keys() == SHAPES.keys()
    found = epimer.verify(out, sample=None)
    assert outcomes(found) == dict.fromkeys(PARTS[:4], "ok") | {"recomputed": "differs"}
    epimer.merge(given, root / "again", progress=False)
    assert epimer.verify(root / "again", sample=None).verified


def test_last_digits_may_differ_within_the_tolerance_and_not_beyond(root):
    name = "layers.1.q.weight"
    stored, base = (load_file(shard_of(folder, name))[name].clone() for folder in (root / "tsv", root / "base"))
    changed = (stored - base).norm()
    for size, verdict in ((0.3 * TOLERANCE, "ok"), (3 * TOLERANCE, "differs")):
        noise = torch.randn(stored.shape, generator=torch.Generator().manual_seed(1))
        other = stored + size * changed * noise / noise.norm()
        replace_tensor(root / "tsv", name, other)
        forge(root / "tsv", {name: other})
        check = epimer.verify(root / "tsv", sample=None).checks[-1]
        assert (check.outcome, check.identical) == (verdict, len(SHAPES) - 1)
        assert check.difference == pytest.approx(size, rel=0.05)
        assert outcomes(epimer.verify(root / "tsv", sample=None, tolerance=0))["recomputed"] == "differs"


def test_changed_inputs_are_found_by_fingerprint_or_by_hash(root):
    state = load_file(root / "two" / "model.safetensors")
    hidden = state["wide.weight"].clone()
    hidden.view(-1)[5000] += 1  # between the samples of 4096 bytes
    save_file(state | {"wide.weight": hidden}, root / "two" / "model.safetensors")
    assert differing(epimer.verify(root / "hashed", sample=0)) == {"inputs": ("two/model.safetensors",)}
    assert outcomes(epimer.verify(root / "average", sample=0))["inputs"] == "ok"  # samples do not see it
    assert differing(epimer.verify(root / "average", sample=None)) == {"recomputed": ("wide.weight",)}
    save_file(state | {"layers.0.norm.weight": torch.ones(24)}, root / "two" / "model.safetensors")
    found = epimer.verify(root / "average")
    assert differing(found) == {"inputs": ("two",)}
    assert outcomes(found)["recomputed"] == "not checked"


def test_asking_for_hashes_of_a_folder_without_them_makes_it_again(root):
    with pytest.raises(epimer.OutputError, match="--overwrite"):
        epimer.merge(recipe(root), root / "average", max_shard_size="40KB", hash_inputs=True, progress=False)
    again = epimer.merge(recipe(root), root / "hashed", hash_inputs=True, progress=False)
    assert not again.timings  # it is there
    epimer.merge(
        recipe(root), root / "average", max_shard_size="40KB", hash_inputs=True, overwrite=True, progress=False
    )
    found = epimer.verify(root / "average")
    assert found.verified
    assert found.checks[3].text.endswith("their 3 files the recorded SHA-256")


def test_a_record_of_an_earlier_version_is_not_a_pass(root):
    file = root / "tsv" / "epimer.json"
    data = json.loads(file.read_bytes())
    new = ("checksums", "tensor_checksums", "measured", "environment", "sha256")
    file.write_text(json.dumps({key: value for key, value in data.items() if key not in new}))
    found = epimer.verify(root / "tsv")
    assert outcomes(found)["inputs"] == "ok"
    assert [outcomes(found)[part] for part in ("record", "files", "tensors")] == ["not checked"] * 3
    assert not found.verified


def test_tied_tensors_copies_skipped_ones_and_narrow_dtypes(tmp_path):
    for t in range(3):
        torch.manual_seed(t)
        table = torch.randn(30, 8)
        state = {"embed_tokens.weight": table, "lm_head.weight": table, "steps": torch.tensor([3, 1])}
        torch.save(state | {"w": torch.randn(16, 8), "gone": torch.ones(2)}, tmp_path / f"m{t}.bin")
    given = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "m0.bin"),
        "models": [{"model": str(tmp_path / f"m{t}.bin")} for t in (1, 2)],
        "rules": {"gone": "skip", "steps": "copy"},
        "dtype": "bfloat16",
    }
    epimer.merge(given, tmp_path / "out", progress=False)
    found = epimer.verify(tmp_path / "out", sample=None)
    assert found.verified, found
    assert found.checks[-1].identical == 3


def test_curvature_is_one_of_the_inputs(tmp_path, root):
    state = load_file(root / "base" / "model.safetensors")
    names = [name for name in SHAPES if name.endswith(("q.weight", "v.weight"))]
    for t, name in enumerate(("one", "two")):
        generator = torch.Generator().manual_seed(t)
        diagonals = {n: epimer.Diagonal(torch.rand(state[n].shape, generator=generator) + 0.1) for n in names}
        epimer.Curvature(diagonals, Provenance("diagonal")).save(root / f"curvature-{name}")
    models = [{"model": str(root / name), "curvature": str(root / f"curvature-{name}")} for name in ("one", "two")]
    given = recipe(root, "epimer", models=models, rules={"embed_tokens.weight": "average", "wide.weight": "average"})
    record = epimer.merge(given, root / "curved", hash_inputs=True, progress=False)
    assert [name for name, _ in record.measured] == ["curvature-one", "curvature-two"]
    assert len(record.input_files) == 5
    found = epimer.verify(root / "curved", sample=None)
    assert found.verified, found
    shutil.rmtree(root / "curvature-one")
    shutil.copytree(root / "curvature-two", root / "curvature-one")
    assert set(differing(epimer.verify(root / "curved"))) == {"inputs"}


def test_an_adapter_is_verified_by_its_factors(root):
    record = epimer.extract_lora(str(root / "one"), str(root / "base"), root / "lora", 4, progress=False)
    assert any(tensor.error is not None for tensor in record.tensors.values())
    found = epimer.verify(root / "lora", sample=None)
    assert found.verified, found
    file = root / "lora" / "adapter_model.safetensors"
    tensors = {name: W.clone() for name, W in load_file(file).items()}  # not mapped: the file is written to
    A = next(name for name in tensors if "layers.1.q.lora_A" in name)
    B = A.replace("lora_A", "lora_B")
    turned = {A: -tensors[A], B: -tensors[B]}  # the same product
    for name, W in turned.items():
        replace_tensor(root / "lora", name, W)
    assert differing(epimer.verify(root / "lora", files_only=True))["tensors"] == tuple(sorted(turned))
    forge(root / "lora", turned)
    check = epimer.verify(root / "lora", sample=None).checks[-1]
    assert (check.outcome, check.difference) == ("ok", 0.0)
    assert check.identical == len(record.tensors) - 1
    replace_tensor(root / "lora", A, tensors[A])  # one factor alone: another product
    forge(root / "lora", {A: tensors[A]})
    assert differing(epimer.verify(root / "lora", sample=None)) == {"recomputed": ("layers.1.q.weight",)}


def test_a_merge_of_adapters_is_verified(root):
    for name in ("one", "two"):
        epimer.extract_lora(str(root / name), str(root / "base"), root / f"{name}-lora", 3, progress=False)
    models = [{"model": f"{root / 'base'}+{root / f'{name}-lora'}"} for name in ("one", "two")]
    for output in ("model", "lora"):
        given = recipe(root, "average", models=models, output=output)
        epimer.merge(given, root / output, hash_inputs=True, progress=False)
        found = epimer.verify(root / output, sample=None)
        assert found.verified, found
        assert epimer.verify(root / output, recipe=given).verified


def test_a_folder_in_an_object_store_is_verified_there(root, monkeypatch):
    fs = fsspec.filesystem("memory")
    monkeypatch.chdir(root)
    epimer.merge(recipe(root, "tsv"), "memory://bucket/out", progress=False, max_shard_size="40KB")
    found = epimer.verify("memory://bucket/out", sample=None)
    assert found.verified, found
    shard = next(name for name in fs.find("/bucket/out") if name.endswith(".safetensors"))
    data = bytearray(fs.cat_file(shard))
    data[-1] ^= 1
    fs.pipe_file(shard, bytes(data))
    fs.pipe_file("/bucket/out/more.txt", b"x")
    assert set(differing(epimer.verify("memory://bucket/out", files_only=True))["files"]) == {
        Path(shard).name,
        "more.txt",
    }
    fs.rm("/bucket", recursive=True)


def test_inputs_in_a_store_have_no_hashes_and_the_fingerprints_are_checked(root, monkeypatch):
    fs = fsspec.filesystem("memory")
    monkeypatch.chdir(root)
    for name in ("base", "one", "two"):
        fs.pipe_file(f"/inputs/{name}/model.safetensors", (root / name / "model.safetensors").read_bytes())
    given = recipe("memory://inputs", "tsv")
    with pytest.raises(epimer.OutputError, match="is not on this disk, so it cannot be hashed; download it first"):
        epimer.merge(given, root / "stored", hash_inputs=True, progress=False)
    epimer.merge(given, root / "stored", progress=False)
    assert epimer.verify(root / "stored", sample=None, recipe=given).verified
    assert epimer.verify(root / "stored", sample=None).verified  # by the folders of the same names and tensors here
    fs.rm("/inputs", recursive=True)


def test_what_was_not_merged_is_refused_in_a_line(root, tmp_path):
    for place in (root / "one", tmp_path / "nothing"):
        with pytest.raises(DataError, match=r"has no epimer\.json, so nothing says what it should be"):
            epimer.verify(place)
    assert_refused(run("verify", root / "one"), "has no epimer.json")
    with pytest.raises(ParameterError, match=r"'sample' parameter of verify must be at least 0\. Got -1 instead"):
        epimer.verify(root / "tsv", sample=-1)
    with pytest.raises(ParameterError, match="'tolerance' parameter"):
        epimer.verify(root / "tsv", tolerance=float("nan"))


def test_the_command_prints_a_line_per_part_and_its_code_is_the_verdict(root):
    ran = run("verify", root / "tsv", "--all")
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert [line.split()[:2] for line in lines[:-1]] == [[part, "ok"] for part in PARTS]
    assert lines[-1] == f"{root / 'tsv'} is what its record says."
    assert run("verify", root / "tsv", "--quiet") == (0, "", "")
    (root / "one").rename(root / "uno")
    ran = run("verify", root / "tsv")
    assert ran.code == 2
    assert [line[12:24].strip() for line in ran.out.splitlines()[3:5]] == ["not checked"] * 2
    assert ran.out.splitlines()[-1].endswith("is as recorded where it was checked, which is not all.")
    assert run("verify", root / "tsv", "--files-only").code == 0
    (root / "tsv" / "config.json").write_text("{}")
    ran = run("verify", root / "tsv", "--files-only", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["verified"], found["kind"]) == (2, False, "verification")
    assert found["checks"][1]["names"] == ["config.json"]
    assert run("verify", root / "tsv", "--files-only").out.splitlines()[-1].endswith("is not what its record says.")


def test_the_command_line_records_hashes(root):
    file = root / "recipe.yaml"
    file.write_text(json.dumps(recipe(root)))
    assert run("merge", file, root / "new", "--hash-inputs", "--quiet").code == 0
    ran = run("verify", root / "new")
    assert (ran.code, "3 files the recorded SHA-256" in ran.out) == (0, True)
