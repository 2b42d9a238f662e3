"""The command line: a bad input is one line, exit code 2 and nothing left behind; and what it prints otherwise."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor

import commands
import epimer
from commands import EPIMER, Ran, start
from models import MATRICES, make_base, make_models

LONGEST = 20  # seconds; a command that hangs is a failure, not the end of the tests
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a base, two models of it and a recipe, which is where commands run."""
    monkeypatch.chdir(tmp_path)
    base = make_base()
    for name, state in zip(("base", "one", "two"), (base, *make_models(base, 2)), strict=True):
        save(tmp_path / name, state)
    write_recipe()
    return tmp_path


@pytest.fixture
def run() -> Iterator[Callable[..., Ran]]:
    """Run a command in this process; it must end soon."""

    def command(*arguments: object) -> Ran:
        signal.alarm(LONGEST)
        ran = commands.run(*arguments)
        signal.alarm(0)
        return ran

    def too_long(*_: object) -> None:
        raise TimeoutError(f"the command did not end within {LONGEST} s")

    before = signal.signal(signal.SIGALRM, too_long)
    yield command
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def save(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file({name: W.contiguous() for name, W in state.items()}, folder / "model.safetensors")


def change(name: str, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of one model."""
    state = safetensors.torch.load_file(Path(name) / "model.safetensors")
    edit(state)
    save(Path(name), state)


def write_recipe(file: str = "recipe.yaml", **keys: object) -> Path:
    recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}
    Path(file).write_text(yaml.safe_dump({k: v for k, v in (recipe | keys).items() if v is not None}, sort_keys=False))
    return Path(file)


def write_header(path: Path, table: object, data: bytes = b"", *, length: int | None = None) -> None:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def assert_refused(ran: Ran, *words: str, out: Path = Path("out"), there: bool = False) -> str:
    """One line on stderr that holds these words, exit code 2, nothing printed, no draft left; return the line."""
    commands.assert_refused(ran, *words)
    assert out.exists() is there
    assert not os.path.lexists(out.parent / f".{out.name}.epimer")
    return ran.err


# inputs that are at fault


def cut(path: str, keep: int) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:keep])


FILE = Path("two/model.safetensors")
BROKEN: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "truncated in the data": (
        lambda: cut("two/model.safetensors", -1),
        ("models[1]: two/model.safetensors is truncated", "copy or download it again"),
    ),
    "truncated in the header": (
        lambda: cut("two/model.safetensors", 100),
        ("two/model.safetensors is not a whole safetensors file", "the file has 100; copy or download it again"),
    ),
    "truncated in the length": (
        lambda: cut("two/model.safetensors", 5),
        ("two/model.safetensors is not a whole safetensors file", "the file has 5;"),
    ),
    "empty": (lambda: cut("two/model.safetensors", 0), ("two/model.safetensors is not a whole safetensors file",)),
    "header length too large": (
        lambda: write_header(FILE, {"a": ENTRY}, bytes(8), length=10_000),
        ("two/model.safetensors is not a whole safetensors file: it says its header has 10000 bytes",),
    ),
    "header length of 2^64": (
        lambda: write_header(FILE, {"a": ENTRY}, bytes(8), length=2**64 - 1),
        ("it says its header has 18446744073709551615 bytes",),
    ),
    "duplicate keys": (
        lambda: write_header(FILE, b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
        ("two/model.safetensors has 'a' twice in its header", "save the file again"),
    ),
    "overlapping offsets": (
        lambda: write_header(FILE, {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
        ("two/model.safetensors: the data of 'b' and 'a' overlap", "save the file again"),
    ),
    "a Git LFS pointer": (
        lambda: FILE.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"),
        ("two/model.safetensors is a Git LFS pointer", "run `git lfs pull`"),
    ),
    "no weights": (FILE.unlink, ("models[1]: two holds no weights", "expected model.safetensors")),
    "another shape": (
        lambda: change("two", lambda state: state.update({"block.0.weight": torch.ones(24, 21)})),
        (
            "models[1] (two)['block.0.weight'] has shape (24, 21), expected (24, 20)",
            "give it the rule 'copy' or 'skip'",
        ),
    ),
    "a missing tensor": (
        lambda: change("two", lambda state: state.pop("conv.weight")),
        ("models[1] (two) lacks 1 tensors that base has: 'conv.weight'", "add them, or give them the rule"),
    ),
    "an extra tensor": (
        lambda: change("two", lambda state: state.update(extra=torch.ones(3))),
        ("models[1] (two) has 1 tensors that base lacks: 'extra'", "give them the rule 'skip'"),
    ),
    "another kind of dtype": (
        lambda: change("two", lambda state: state.update({"block.0.bias": torch.ones(24, dtype=torch.int64)})),
        ("models[1] (two)['block.0.bias'] is torch.int64 where the output takes torch.float32",),
    ),
    "NaN in a model": (
        lambda: change("two", lambda state: state["block.1.weight"][3, 4:6].fill_(float("nan"))),
        ("models[1] (two)['block.1.weight'] holds NaN or Inf in 2 of 540 entries", "repair or leave out that model"),
    ),
    "Inf in a model": (
        lambda: change("one", lambda state: state["temperature"].fill_(float("inf"))),
        ("models[0] (one)['temperature'] holds NaN or Inf in 1 of 1 entries",),
    ),
    "NaN in base": (
        lambda: change("base", lambda state: state["lm_head.weight"][0].fill_(float("nan"))),
        ("base['lm_head.weight'] holds NaN or Inf in 20 of 100 entries",),
    ),
    "-Inf in base": (
        lambda: change("base", lambda state: state["conv.weight"][0, 0, 0].fill_(float("-inf"))),
        ("base['conv.weight'] holds NaN or Inf in 2 of 48 entries",),
    ),
    "another base": (
        lambda: save(Path("base"), {f"other.{i}": W for i, W in enumerate(make_base().values())}),
        ("models[0] (one) has none of base's tensors", "is it a model of this ancestor", "1 more: see epimer merge"),
    ),
    "a base with a prefix": (
        lambda: save(Path("base"), {f"model.{name}": W for name, W in make_base().items()}),
        ("models[0] (one) has none of base's tensors", "`prefix: {'': 'model.'}`", "1 more: see epimer merge"),
    ),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_model_is_refused(here, run, damage, words):
    damage()
    assert_refused(run("merge", "recipe.yaml", "out"), *words)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_an_error_ends_workers_that_wait(here, run, workers):
    """While the reader is busy with a large tensor, one worker fails and the others have nothing to do."""
    for name in ("base", "one", "two"):
        save(Path(name), {"first": torch.zeros(400_000), "large": torch.zeros(4_000_000)})
    change("two", lambda state: state["first"].fill_(float("nan")))
    ran = run("merge", "recipe.yaml", "out", "--workers", workers)
    assert_refused(ran, "models[1] (two)['first'] holds NaN or Inf in 400000 of 400000 entries")


def test_a_model_that_does_not_exist(here, run):
    write_recipe(models=[{"model": "one"}, {"model": "./three"}])
    assert_refused(
        run("merge", "recipe.yaml", "out"),
        "models[1]: ./three does not exist; give a file, a model folder or a hub id (org/name@revision)",
    )


def test_all_that_cannot_be_opened_is_said_at_once(here, run):
    write_recipe(base_model="./gone", models=[{"model": "one"}, {"model": "./three"}])
    assert_refused(
        run("merge", "recipe.yaml", "out"), "base_model: ./gone does not exist", "models[1]: ./three does not"
    )


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("bsae", "./base"), ("./bsae", "./base"), ("{here}/bsae", "{here}/base"), ("mdels/one", "./models/one")],
)
def test_a_misspelt_path_is_answered_with_the_near_one(here, run, monkeypatch, wrong, near):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree("one", "models/one")
    wrong, near = wrong.format(here=here), near.format(here=here)
    write_recipe(base_model=wrong)
    line = f"error: base_model: {wrong} does not exist. Did you mean {near!r}?\n"
    assert assert_refused(run("merge", "recipe.yaml", "out")) == line
    assert assert_refused(run("inspect", wrong)) == line.replace("base_model: ", "")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert assert_refused(run("merge", "../recipe.yaml", "out")) == line


def test_models_that_are_all_elsewhere_are_said_in_one_reason(here, run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("elsewhere").mkdir()
    Path("recipe.yaml").rename("elsewhere/recipe.yaml")
    monkeypatch.chdir("elsewhere")
    line = assert_refused(run("merge", "recipe.yaml", "out"), "base_model base, models[0] one, models[1] two: each")
    assert line.count("hub cannot be reached") == 1


def test_a_wrong_file_is_refused_by_every_command(here, run):
    Path("model.txt").write_text("hello")
    assert_refused(run("inspect", "model.txt"), "model.txt is not a checkpoint: expected .safetensors, .bin, .pt, .pth")
    assert_refused(run("inspect", "./nowhere.safetensors"), "./nowhere.safetensors does not exist")
    assert_refused(run("convert", "nowhere.bin", "out.safetensors"), "nowhere.bin cannot be read: No such file")
    assert_refused(run("convert", "model.txt", "out.safetensors"), "model.txt is not a torch file")
    assert_refused(run("convert", "model.bin", "out.bin"), "out.bin should end in .safetensors")
    assert not Path("out.safetensors").exists()


# nothing is executed, and nothing leads out


class Marks:
    """When unpickled, makes a folder: what a hostile checkpoint would do."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ["zip", "old", "plain"])
def test_a_pickle_that_would_execute_code(here, run, kind, protocol):
    FILE.unlink()
    state = {"a": torch.ones(2), "b": Marks()}
    if kind == "plain":
        Path("two/pytorch_model.bin").write_bytes(pickle.dumps(Marks(), protocol))
    else:
        torch.save(
            state,
            "two/pytorch_model.bin",
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=kind == "zip",
        )
    words = (
        ["never does", "torch.save(model.state_dict(), path)"] if kind == "zip" else ["epimer convert pytorch_model"]
    )
    assert_refused(run("merge", "recipe.yaml", "out"), "two/pytorch_model.bin", *words)
    assert_refused(run("inspect", "two"), "two/pytorch_model.bin", *words)
    assert_refused(run("convert", "two/pytorch_model.bin", "out.safetensors"), "two/pytorch_model.bin")
    assert not Path("marker").exists()
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("leads", ["../secret.safetensors", "{absolute}"])
def test_an_index_that_leads_out(here, run, leads):
    FILE.rename("secret.safetensors")
    name = leads.replace("{absolute}", str(here / "secret.safetensors"))
    names = safetensors.torch.load_file("secret.safetensors")
    Path("two/model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    assert_refused(run("merge", "recipe.yaml", "out"), f"{name!r} leads out of the folder two", "put the file itself")


def test_a_link_that_leads_out(here, run):
    FILE.rename("secret.safetensors")
    FILE.symlink_to("../secret.safetensors")
    assert_refused(run("merge", "recipe.yaml", "out"), "'model.safetensors' leads out of the folder two")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_linked_config_is_not_copied(here, run, file):
    Path("password").write_text('{"secret": 1}')
    Path("base", file).symlink_to("../password")
    assert_refused(run("merge", "recipe.yaml", "out"), f"{file!r} leads out of the folder base")


# recipes


def test_a_misspelled_key_has_a_line_and_a_suggestion(here, run):
    text = write_recipe(merge_method="ties", parameters={"densty": 0.3}).read_text()
    line = next(i for i, line in enumerate(text.splitlines(), 1) if "densty" in line)
    assert_refused(
        run("merge", "recipe.yaml", "out"), f"recipe.yaml:{line}: unknown key 'densty'", "Did you mean 'density'?"
    )
    write_recipe(base_modle="base")
    assert_refused(run("merge", "recipe.yaml", "out"), "unknown key 'base_modle'. Did you mean 'base_model'?")


RECIPES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "unknown method": ({"merge_method": "tie"}, ("recipe.yaml:1: There is no method 'tie'", "Did you mean 'ties'?")),
    "too many models": ({"merge_method": "slerp"}, ("slerp merges exactly 1 model with the base, and there are",)),
    "no method": ({"merge_method": None}, ("has no 'merge_method'",)),
    "no models": ({"models": []}, ("recipe.yaml:3: models must be a list of models",)),
    "no base": ({"base_model": None}, ("task_arithmetic needs the base model", "add 'base_model'")),
    "a value out of range": ({"merge_method": "ties", "parameters": {"density": 2}}, ("density", "Got 2 instead")),
    "a rule for nothing": ({"rules": {"nowhere.*": "copy"}}, ("pattern 'nowhere.*' matches no tensor",)),
    "everything skipped": ({"rules": {"*": "skip"}}, ("there is nothing to write",)),
    "no curvature": ({"merge_method": "epimer"}, ("epimer needs diagonal curvature", "curvature: folder")),
    "no Kronecker curvature": ({"merge_method": "regmean"}, ("regmean needs kronecker curvature",)),
    "curvature that is not there": (
        {"merge_method": "epimer", "curvature": ["./c0", "./c1"]},
        ("curvature of models[0]: ./c0 is not a curvature folder", "curvature of models[1]"),
    ),
    "curvature for some": (
        {"merge_method": "epimer", "models": [{"model": "one", "curvature": "one"}, {"model": "two"}]},
        ("models[1] has no curvature, while others have",),
    ),
    "normalize: false for a mean": (
        {"merge_method": "tsv", "parameters": {"normalize": False}},
        ("tsv takes a mean, so `normalize: false` means nothing to it; remove it, or set scale",),
    ),
    "a tokenizer that is not there": ({"tokenizer_source": "./gone"}, ("tokenizer_source: ./gone does not exist",)),
    "a model's name without end": ({"models": [{"model": "x" * 5000}]}, ("models[0]: xxx", "does not exist")),
    "a home that is not there": (
        {"base_model": "~nobody-of-this-name/x"},
        ("base_model: ~nobody-of-this-name/x does not",),
    ),
    "a scale that overflows": (
        {"parameters": {"scale": 1e6}, "dtype": "float16"},
        ("does not fit in torch.float16; lower scale, or widen its dtype",),
    ),
}


@pytest.mark.parametrize(("keys", "words"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_cannot_be_followed(here, run, keys, words):
    write_recipe(**keys)
    assert_refused(run("merge", "recipe.yaml", "out"), *words)


@pytest.mark.parametrize("folder", ["out", "one"])
def test_a_recipe_in_the_place_of_the_output(here, run, folder):
    line = f"error: the recipe comes first: epimer merge recipe.yaml {folder}.\n"
    assert assert_refused(run("merge", folder, "recipe.yaml")) == line


def test_a_recipe_that_cannot_be_read(here, run):
    assert_refused(run("merge", "nowhere.yaml", "out"), "Cannot read the recipe 'nowhere.yaml': No such file")
    assert_refused(run("merge", "one", "out"), "Cannot read the recipe 'one': Is a directory")
    assert_refused(run("merge", "one/model.safetensors", "out"), "one/model.safetensors:1: not")
    Path("recipe.yaml").write_text("models: [")
    assert_refused(run("merge", "recipe.yaml", "out"), "recipe.yaml:1: not valid YAML")
    Path("recipe.yaml").write_text("")
    assert_refused(run("merge", "recipe.yaml", "out"), "recipe.yaml:1: the recipe is empty")


# options


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-memory", "lots", "'max_memory' parameter must be a size like 5GB or 512MiB. Got 'lots' instead"),
        ("--max-memory", "-1GB", "'max_memory' parameter must be a size"),
        ("--max-memory", "0", "'max_memory' parameter must be a size"),
        ("--max-memory", "", "'max_memory' parameter must be a size"),
        ("--max-memory", "nan", "'max_memory' parameter must be a size"),
        ("--max-memory", "1MB", "is too little: 'block.1.weight' needs"),
        ("--max-shard-size", "5XB", "'max_shard_size' parameter must be a size like 5GB or 512MiB. Got '5XB' instead"),
        ("--max-shard-size", "0GB", "'max_shard_size' parameter must be a size"),
        ("--device", "tpu", "device 'tpu' cannot be used here"),
        ("--device", "cuda:99", "device 'cuda:99' cannot be used here"),
        ("--device", "meta", "device 'meta' cannot be used: it has no data"),
        ("--device", "", "device ''"),
        ("--workers", "0", "'workers' parameter must be an integer at least 1. Got 0 instead"),
        ("--workers", "-2", "'workers' parameter must be an integer at least 1. Got -2 instead"),
        ("--workers", "many", "workers"),
        ("--threads", "0", "'threads' parameter must be an integer at least 1. Got 0 instead"),
        ("--threads", "1.5", "threads"),
        ("--bogus", "1", "--bogus"),
        ("--record", "nowhere/record.json", "nowhere/record.json cannot be written"),
    ],
)
def test_an_option_with_a_bad_value(here, run, option, value, words):
    assert_refused(run("merge", "recipe.yaml", "out", option, value), words)


@pytest.mark.parametrize("command", [["diagnose"], ["sweep", "--eval", "glyphs8"], ["basis", "basis", "--rank", "2"]])
@pytest.mark.parametrize(("device", "words"), [("cuda:99", "cannot be used here"), ("meta", "it has no data")])
def test_every_command_that_computes_takes_a_device(here, run, command, device, words):
    write_recipe(merge_method="epimer_free")
    name, *rest = command
    assert_refused(run(name, "recipe.yaml", *rest, "--device", device), f"device '{device}' cannot be used", words)
    assert not Path("basis").exists()


@pytest.mark.parametrize("command", ["diagnose", "basis"])
def test_a_device_that_is_there_is_used(here, run, command):
    write_recipe(merge_method="epimer_free")
    for name in ("default", "cpu"):
        out = ["--out", f"{name}.json"] if command == "diagnose" else [name, "--rank", "2"]
        assert run(command, "recipe.yaml", *out, "-q", *(["--device", "cpu"] if name == "cpu" else [])).code == 0
    files = (
        ("default.json", "cpu.json")
        if command == "diagnose"
        else ("default/basis.safetensors", "cpu/basis.safetensors")
    )
    assert Path(files[0]).read_bytes() == Path(files[1]).read_bytes()


def test_too_little_memory_says_how_much_is_needed(here, run):
    line = assert_refused(run("merge", "recipe.yaml", "out", "--max-memory", "1MB"), "give ")
    enough = re.search(r"give ([0-9.]+)GB", line)
    assert enough
    assert run("merge", "recipe.yaml", "out", "--max-memory", f"{float(enough[1]) + 0.2}GB").code == 0


@pytest.mark.parametrize(
    "arguments", [["merge"], ["merge", "recipe.yaml"], ["merge", "recipe.yaml", "a", "b"], ["merg"], ["methods", "tie"]]
)
def test_a_command_that_is_incomplete_or_unknown(here, run, arguments):
    assert_refused(run(*arguments))


def test_json_says_the_error_too(here, run):
    write_recipe(merge_method="tie")
    ran = run("merge", "recipe.yaml", "out", "--json")
    assert ran.code == 2
    assert ran.err == f"error: {json.loads(ran.out)['error']}\n"
    assert not Path("out").exists()


# outputs


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_output_that_exists_is_replaced_only_when_asked_and_ours(here, run):
    assert run("merge", "recipe.yaml", "out").code == 0
    before = listing(Path("out"))
    write_recipe(parameters={"scale": 0.5})
    refused = "out exists and holds another merge: {} changed since; choose another name, or pass --overwrite"
    assert_refused(run("merge", "recipe.yaml", "out"), refused.format("the recipe"), there=True)
    write_recipe()
    shutil.copytree("two", "kept")
    change("two", lambda state: state["block.0.weight"].mul_(2))
    assert_refused(run("merge", "recipe.yaml", "out"), refused.format("the models"), there=True)
    shutil.rmtree("two")
    Path("kept").rename("two")
    write_recipe(parameters={"scale": 0.5})
    assert listing(Path("out")) == before
    assert run("merge", "recipe.yaml", "out", "--overwrite").code == 0
    assert listing(Path("out"))["model.safetensors"] != before["model.safetensors"]
    assert listing(Path("out")).keys() == before.keys()
    assert not Path(".out.epimer").exists()


def test_a_failed_replacement_keeps_what_was_there(here, run):
    assert run("merge", "recipe.yaml", "out").code == 0
    before = listing(Path("out"))
    change("two", lambda state: state["temperature"].fill_(float("nan")))
    assert_refused(run("merge", "recipe.yaml", "out", "--overwrite"), "['temperature'] holds NaN", there=True)
    assert listing(Path("out")) == before


@pytest.mark.parametrize("options", [[], ["--overwrite"]], ids=["plain", "overwrite"])
def test_a_folder_of_somebody_else_is_never_removed(here, run, options):
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("years of work")
    word = "was not made by epimer, so it is not replaced; remove it yourself" if options else "pass --overwrite"
    assert_refused(run("merge", "recipe.yaml", "out", *options), f"{here / 'out'} ", word, there=True)
    assert listing(Path("out")) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("out", ["two/out", "base/deep/out", "link/out", "lora/out"])
def test_an_output_in_the_folder_of_an_input(here, run, out):
    Path("link").symlink_to("two")
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    factors = {"block.0.lora_A.weight": torch.ones(2, 20), "block.0.lora_B.weight": torch.ones(24, 2)}
    safetensors.torch.save_file(factors, "lora/adapter_model.safetensors")
    write_recipe(models=[{"model": name} for name in ("one", "two", "base+lora")])
    before = listing(here)
    ran = run("merge", "recipe.yaml", out)
    assert_refused(ran, f"{out} lies in ", "which the merge reads; choose a folder outside of it", out=Path(out))
    assert listing(here) == before


@pytest.mark.parametrize("out", ["two", "base", "two/.", "./sub/../two", ".", "link"])
def test_an_output_that_holds_an_input(here, run, out):
    Path("sub").mkdir()
    Path("link").symlink_to("two")
    before = listing(here)
    ran = run("merge", "recipe.yaml", out, "--overwrite")
    assert_refused(ran, "which the merge reads; choose another output", out=Path("two"), there=True)
    assert listing(here) == before


def test_an_output_that_is_a_file(here, run):
    Path("out").write_text("mine")
    assert_refused(
        run("merge", "recipe.yaml", "out", "--overwrite"), "out is a file; the output is a folder", there=True
    )
    assert Path("out").read_text() == "mine"
    ran = run("merge", "recipe.yaml", "out/model")
    assert_refused(ran, "cannot be made", "choose another place", out=Path("out/model"))


def test_an_output_that_no_file_system_takes(here, run):
    ran = run("merge", "recipe.yaml", "x" * 300)
    assert_refused(ran, "xxx", "File name too long; choose another")
    assert {path.name for path in here.iterdir()} == {"base", "one", "two", "recipe.yaml"}


def test_an_empty_folder_is_taken(here, run):
    Path("out").mkdir()
    assert run("merge", "recipe.yaml", "out").code == 0
    assert Path("out/model.safetensors").exists()


@pytest.fixture
def mounted(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("there is no mount command")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def save_wide(entries: int) -> None:
    """Replace the models by wider ones."""
    for name in ("base", "one", "two"):
        save(Path(name), {"wide": torch.randn(entries)})


@pytest.mark.parametrize("entries", [1_000_000, 522_000], ids=["weights do not fit", "the rest does not fit"])
def test_a_full_disk(here, run, mounted, entries):
    save_wide(entries)
    ran = run("merge", "recipe.yaml", mounted / "out")
    assert_refused(
        ran, "cannot be written: the disk is full", "make room, or choose another place", out=mounted / "out"
    )
    assert list(mounted.iterdir()) == []


def test_a_full_disk_keeps_what_was_there(here, run, mounted):
    assert run("merge", "recipe.yaml", mounted / "out").code == 0
    before = listing(mounted)
    save_wide(1_000_000)
    ran = run("merge", "recipe.yaml", mounted / "out", "--overwrite")
    assert_refused(ran, "the disk is full", out=mounted / "out", there=True)
    assert listing(mounted) == before


def test_convert_to_a_full_disk(here, run, mounted):
    torch.save({"wide": torch.ones(1_000_000)}, "model.bin")
    target = mounted / "model.safetensors"
    assert_refused(run("convert", "model.bin", target), f"{target} cannot be written: the disk is full", out=target)
    assert list(mounted.iterdir()) == []


def test_a_read_only_disk(here, run, mounted):
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    ran = run("merge", "recipe.yaml", mounted / "out")
    assert_refused(ran, "may not be written to (Read-only file system); choose another place", out=mounted / "out")
    torch.save({"a": torch.ones(2)}, "model.bin")
    target = mounted / "model.safetensors"
    assert_refused(run("convert", "model.bin", target), "Read-only file system", out=target)


# as users run it


def test_a_real_process_refuses_nan(here):
    change("two", lambda state: state["block.1.weight"][3, 4:6].fill_(float("nan")))
    assert_refused(
        start("merge", "recipe.yaml", "out"), "models[1] (two)['block.1.weight'] holds NaN or Inf in 2 of 540"
    )


def test_a_real_process_executes_no_pickle(here):
    torch.save({"a": torch.ones(2), "b": Marks()}, "model.bin")
    assert_refused(start("convert", "model.bin", "out.safetensors"), "model.bin holds Python objects", "never does")
    Path("model.bin").write_bytes(pickle.dumps(Marks()))
    assert_refused(start("convert", "model.bin", "out.safetensors"), "model.bin")
    assert not Path("marker").exists()


def test_a_real_process_knows_no_hub_id_offline(here):
    write_recipe(models=[{"model": "one"}, {"model": "nobody/nothing"}])
    ran = start("merge", "recipe.yaml", "out", HF_HOME=str(here / "hub"))
    assert_refused(
        ran, "models[1]: nobody/nothing is neither a path here nor in the hub's cache", "hf download nobody/nothing"
    )


def test_a_real_process_takes_no_bad_option(here):
    assert_refused(start("merge", "recipe.yaml", "out", "--workers", "many"), "workers")


# when all is well


def test_help_and_version(run):
    for arguments in (["--help"], ["-h"], ["merge", "--help"], ["inspect", "-h"], ["methods", "-h"], ["convert", "-h"]):
        ran = run(*arguments)
        assert (ran.code, ran.err) == (0, "")
        assert "Usage: " in ran.out
    ran = start("--help")
    assert (ran.code, ran.err) == (0, "")
    assert "Usage: epimer" in ran.out
    assert run("--version") == (0, f"epimer {epimer.__version__}\n", "")
    assert start("--version") == (0, f"epimer {epimer.__version__}\n", "")


def test_shell_completion():
    shell = ["bash", "-c", f"{EPIMER} --show-completion; exit $?"]  # the shell is found out by looking at the parents
    ran = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "complete -o default -F _epimer_completion epimer" in ran.stdout
    ran = start(_EPIMER_COMPLETE="complete_bash", COMP_WORDS="epimer me", COMP_CWORD="1")
    assert ran.out.split() == ["merge", "methods"]


def test_methods(run):
    ran = run("methods")
    assert ran.code == 0
    for name in epimer.list_methods():
        assert re.search(rf"^{name} ", ran.out, re.MULTILINE), name
    ran = run("methods", "ties")
    assert (ran.code, ran.out) == (0, f"{epimer.describe_method('ties')}\n")
    rows = json.loads(run("methods", "--json").out)
    assert [row["name"] for row in rows] == epimer.list_methods()
    for row in rows:
        method = epimer.describe_method(row["name"])
        assert [parameter["name"] for parameter in row["parameters"]] == [p.name for p in method.parameters]
        assert row["needs_base"] is method.needs_base
    (row,) = json.loads(run("methods", "ties", "--json").out)
    assert row["name"] == "ties"


def test_diagnose_prints_what_it_writes(here, run):
    ran = run("diagnose", "recipe.yaml", "--json", "--out", "found.json")
    assert (ran.code, ran.err) == (0, "")
    printed = json.loads(ran.out)
    assert printed == json.loads(Path("found.json").read_text())
    assert printed["models"] == ["one", "two"]
    ran = run("diagnose", "nowhere.yaml", "--json")
    assert json.loads(ran.out)["error"].startswith("Cannot read the recipe 'nowhere.yaml'")


def test_inspect(here, run):
    expected = safetensors.torch.load_file(FILE)
    ran = run("inspect", "two", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert {row["name"]: (row["shape"], row["dtype"], row["bytes"], row["tied_to"]) for row in found["tensors"]} == {
        name: (list(W.shape), str(W.dtype)[len("torch.") :], W.nbytes, None) for name, W in expected.items()
    }
    assert found["bytes"] == sum(W.nbytes for W in expected.values())
    assert found["entries"] == sum(W.numel() for W in expected.values())
    table = run("inspect", "two")
    assert table.code == 0
    lines = {line.split()[0]: line.split()[1:] for line in table.out.splitlines()}
    prints = {row["name"]: row["fingerprint"] for row in found["tensors"]}
    assert len(set(prints.values())) == len(prints)
    assert lines["block.0.weight"] == ["24", "x", "20", "float32", "1.9", "kB", prints["block.0.weight"]]
    assert lines["temperature"] == ["scalar", "float32", "4", "B", prints["temperature"]]
    assert lines["steps"] == ["3", "int64", "24", "B", prints["steps"]]
    assert f"{len(expected)} tensors" in table.out
    assert found["fingerprint"] in table.out


def test_convert_then_inspect(here, run):
    W = torch.randn(4, 3)
    torch.save({"epoch": 3, "model": {"embed": W, "head": W}}, "model.bin")
    assert_refused(run("convert", "model.bin", "out.safetensors"), "model.bin")
    ran = run("convert", "model.bin", "out.safetensors", "--key", "model")
    assert ran == (0, "wrote out.safetensors (1 tied names share a tensor)\n", "")
    rows = {row["name"]: row for row in json.loads(run("inspect", "out.safetensors", "--json").out)["tensors"]}
    assert rows["head"].pop("fingerprint") == rows["embed"]["fingerprint"]
    assert rows["head"] == {"name": "head", "shape": [4, 3], "dtype": "float32", "bytes": 48, "tied_to": "embed"}
    assert torch.equal(safetensors.torch.load_file("out.safetensors")["embed"], W)
    exists = run("convert", "model.bin", "out.safetensors", "--key", "model")
    assert_refused(exists, "out.safetensors exists; choose another name, or pass --overwrite")
    assert run("convert", "model.bin", "out.safetensors", "--key", "model", "--overwrite", "--quiet") == (0, "", "")


def test_dry_run_shows_every_tensor(here, run):
    write_recipe(rules={"lm_head.*": "skip", "temperature": "copy"}, merge_method="tsv")
    ran = run("merge", "recipe.yaml", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()}
    assert lines["block.0.weight"][:7] == ["matrix", "24", "x", "20", "float32", "5.8", "kB"]
    assert lines["block.0.bias"][:6] == ["average", "24", "float32", "288", "B", "96"]
    assert lines["temperature"][:6] == ["copy", "scalar", "float32", "4", "B", "4"]
    assert "lm_head.weight" not in lines
    found = json.loads(run("merge", "recipe.yaml", "--dry-run", "--json").out)
    state = safetensors.torch.load_file("base/model.safetensors")
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows.keys() == state.keys() - {"lm_head.weight"}
    for name, row in rows.items():
        W = state[name]
        assert (row["rule"] == "matrix") is (name in MATRICES)
        assert (row["shape"], row["writes"]) == (list(W.shape), W.nbytes)
        assert row["reads"] == (W.nbytes if row["rule"] == "copy" else 3 * W.nbytes)
        assert row["memory"] >= row["reads"]
    assert found["totals"]["reads"] == sum(row["reads"] for row in rows.values())
    assert found["totals"]["writes"] == sum(row["writes"] for row in rows.values())
    assert found["problems"] == []
    assert {path.name for path in here.iterdir()} == {"base", "one", "two", "recipe.yaml"}


def test_dry_run_shows_all_problems(here, run):
    change("one", lambda state: state.update({"block.0.weight": torch.ones(2, 2), "block.0.bias": torch.ones(3)}))
    change("two", lambda state: state.pop("conv.weight"))
    ran = run("merge", "recipe.yaml", "--dry-run")
    assert ran.code == 2
    problems = [line for line in ran.out.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3
    for words in ("['block.0.weight'] has shape (2, 2)", "['block.0.bias'] has shape (3,)", "lacks 1 tensors"):
        assert sum(words in problem for problem in problems) == 1
    ran = run("merge", "recipe.yaml", "--dry-run", "--json")
    assert ran.code == 2
    assert [f"problem: {problem}" for problem in json.loads(ran.out)["problems"]] == problems
    assert_refused(run("merge", "recipe.yaml", "out"), "(2 more: see epimer merge --dry-run)")


def test_dry_run_knows_the_memory(here, run):
    ran = run("merge", "recipe.yaml", "--dry-run", "--max-memory", "1MB")
    assert ran.code == 2
    assert "problem: max_memory of 1.0 MB is too little" in ran.out


def test_merge_prints_json(here, run):
    write_recipe(merge_method="wudi", rules={"lm_head.*": "skip"})
    ran = run("merge", "recipe.yaml", "out", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    state, *models = (safetensors.torch.load_file(f"{name}/model.safetensors") for name in ("base", "one", "two"))
    expected = epimer.merge_state_dicts(state, models, "wudi", rules=[("lm_head.*", "skip")]).record
    assert found["method"] == "wudi"
    assert {n: tensor["rule"] for n, tensor in found["tensors"].items()} == {
        n: tensor.rule for n, tensor in expected.tensors.items()
    }
    assert found["tensors"]["lm_head.weight"]["rule"] == "skip"
    for name, tensor in found["tensors"].items():
        assert (tensor["eta"] is None) is (name not in MATRICES)
        assert tensor["eta"] == pytest.approx(expected.tensors[name].eta)
    parts = {"start", "plan", "prepass", "merge", "write"}
    assert found["timings"].keys() == parts | {"total"}
    assert found["timings"]["total"] == pytest.approx(sum(found["timings"][part] for part in parts))
    assert all(found["timings"][part] > 0 for part in parts)
    assert found["peak_memory"] > 10_000_000
    assert found["files"]["model.safetensors"] == Path("out/model.safetensors").stat().st_size
    lasting = json.loads(Path("out/epimer.json").read_text())
    assert lasting.keys() == found.keys() - {"timings", "peak_memory", "date"} | {"sha256"}
    assert lasting["request"] == found["request"]


def test_quiet_prints_nothing(here, run):
    assert run("merge", "recipe.yaml", "out", "--quiet") == (0, "", "")
    assert Path("out/model.safetensors").exists()


def test_the_output_is_what_the_library_makes(here, run):
    ran = run("merge", "recipe.yaml", "out")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("out  task_arithmetic, 9 tensors (7 elementwise, 2 copy)\n")
    base, *models = (safetensors.torch.load_file(f"{name}/model.safetensors") for name in ("base", "one", "two"))
    expected = epimer.merge_state_dicts(base, models, "task_arithmetic")
    found = safetensors.torch.load_file("out/model.safetensors")
    assert found.keys() == expected.keys()
    for name, W in expected.items():
        assert torch.equal(found[name], W), name


def test_the_same_again_is_already_there(here, run):
    assert run("merge", "recipe.yaml", "out").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    ran = run("merge", "recipe.yaml", "out")
    assert ran == (0, "out is already there, made from the same recipe and models; nothing to do.\n", "")
    assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before
    assert not Path(".out.epimer").exists()


def test_a_record_is_written(here, run):
    ran = run("merge", "recipe.yaml", "out", "--json", "--record", "record.json")
    assert ran.code == 0
    assert json.loads(Path("record.json").read_text()) == json.loads(ran.out)
