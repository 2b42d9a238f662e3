"""Every command that writes meets kills, signals, full disks, failing files and other runs: nothing wrong is left.

What stands under an output's name is the whole result, or what was there before; nothing else is left behind, the
message says what to do, and the same command afterwards gives the bytes of a run that met nothing. A few moments of
each command are tried here, chosen at random with a fixed seed; `make soak` tries many more, and a disk that fails at
every one.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import transformers

import tiny
from faults import COMMANDS, Commands, Trial, contents, furnish, make_workshop, write_yaml

NAMES = list(COMMANDS)
SIGNALS = ("SIGKILL", "SIGINT", "SIGTERM")
ERRORS = {"ENOSPC": "the disk is full", "EDQUOT": "quota", "EROFS": "Read-only", "EMFILE": "ulimit -n", "EIO": "disk"}
INPUTS = {
    "merge": "animal/model.safetensors",
    "merge torch files": "animal.bin",
    "merge, a LoRA": "base/model.safetensors",
    "basis": "pace/model.safetensors",
    "diagnose": "base/model.safetensors",
    "sweep": "pace/model.safetensors",
    "extract-lora": "tuned/model.safetensors",
    "convert": "base.bin",
    "curvature": "animal-train.jsonl",
}
"""command -> a file that it reads"""

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop") / "made")


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def three_at_once(commands, tmp_path_factory) -> Iterator[list[Commands]]:
    """Commands that can run beside each other."""
    others = [Commands(tmp_path_factory.mktemp("other")) for _ in range(2)]
    yield [commands, *others]
    for other in others:
        other.close()


@pytest.fixture(scope="module")
def trials(workshop, commands, tmp_path_factory):
    """Trials by the names of their commands; each is made once."""
    made: dict[str, Trial] = {}

    def trial(name: str) -> Trial:
        if name not in made:
            made[name] = Trial(commands, workshop, tmp_path_factory.mktemp("trial") / "here", COMMANDS[name])
        return made[name]

    return trial


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_is_stopped(trials, name, signal):
    trial = trials(name)
    moment = random.Random(f"{name} {signal}").randint(1, len(trial.moments))
    assert trial.meet(signal, at=moment) == [], trial.moments[moment - 1]


@pytest.mark.parametrize("name", NAMES)
def test_the_system_refuses_to_write(trials, name):
    trial, generator = trials(name), random.Random(name)
    for error in generator.sample(list(ERRORS), 2):
        moment = generator.choice(trial.writes)
        assert trial.meet(error, at=moment) == [], (error, trial.moments[moment - 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_disk_fails_at_each_kind_of_call(trials, name):
    """At one call of each kind, of which `make soak` tries all."""
    trial, generator = trials(name), random.Random(f"{name} each")
    for kind, moments in trial.kinds.items():
        moment = generator.choice(moments)
        assert trial.meet("EIO", at=moment) == [], (kind, trial.moments[moment - 1])


@pytest.mark.parametrize("error", ERRORS)
def test_the_message_says_what_the_system_refused(trials, error):
    trial = trials("convert")
    trial.start()
    ran = trial.run(fault=error, at=1)
    assert ran.code == 2
    assert ERRORS[error] in ran.err
    assert "out.safetensors cannot be written" in ran.err


@pytest.mark.parametrize("name", NAMES)
def test_the_disk_fails_in_reading(trials, name):
    trial, generator = trials(name), random.Random(name)
    trial.start()
    moments = trial.run(reads=True).moments
    opened = [i for i, moment in enumerate(moments, 1) if moment.startswith("open to read")]
    for moment in generator.sample(opened, 2):
        assert trial.meet("EIO", at=moment, reads=True) == [], moments[moment - 1]


@pytest.mark.parametrize("how", ["cut", "rewrite", "replace", "remove"])
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_changes_while_it_is_read(trials, name, how):
    """The file changes just before one of the openings of it but the first, after which it must stay as it was."""
    trial, file = trials(name), INPUTS[name]
    trial.start()
    trial._put_back(file)
    moments = trial.run(reads=True).moments
    opened = [i for i, moment in enumerate(moments, 1) if moment.startswith("open to read") and moment.endswith(file)]
    assert len(opened) > 2, moments
    moment = random.Random(f"{name} {how}").choice(opened[1:])
    assert trial.meet(f"{how} {file}", at=moment, reads=True) == []


def test_what_was_changed_is_named(trials):
    trial = trials("merge torch files")
    trial.start()
    trial._put_back("animal.bin")
    count = len(trial.run(reads=True).moments)
    for how, words in (("cut", "animal.bin"), ("rewrite", "animal.bin was changed while"), ("remove", "animal.bin")):
        trial.start()
        trial._put_back("animal.bin")
        ran = trial.run(fault=f"{how} animal.bin", at=count // 2, reads=True)
        assert (ran.code, ran.err.count("\n")) == (2, 1), ran
        assert words in ran.err
        assert not (trial.folder / "out").exists()


@pytest.mark.parametrize("name", ["merge", "merge, a LoRA", "curvature", "basis", "convert", "report", "sweep"])
def test_a_limit_on_the_size_of_files(trials, name):
    trial = trials(name)
    assert trial.meet("EFBIG", limits={"FSIZE": 600}) == []


@pytest.mark.parametrize("files", [8, 14, 20, 30])
@pytest.mark.parametrize("name", ["merge", "curvature", "basis", "report"])
def test_too_few_file_handles(trials, name, files):
    assert trials(name).meet("EMFILE", limits={"NOFILE": files}) == []


@pytest.fixture
def mounted(tmp_path) -> Iterator[Path]:
    """A disk of 80 kB."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=80k", "tmpfs", place], capture_output=True)
    if not made or made.returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("name", ["merge", "merge, a LoRA", "curvature", "basis", "convert", "sweep", "report"])
@pytest.mark.parametrize("left", [4096, 20480])
def test_a_disk_that_is_full(workshop, commands, mounted, name, left):
    folder = furnish(workshop, mounted / "here")
    command = COMMANDS[name]
    (folder / "ballast").write_bytes(bytes(81920 - left))
    ran = commands.run(folder, *command.arguments)
    if ran.code:  # small results fit
        assert (ran.code, ran.err.count("\n")) == (2, 1), ran
        assert "disk is full" in ran.err
        assert "make room" in ran.err
    (folder / "ballast").unlink()
    there = set(contents(folder))
    whole = {*command.makes, "figures"} if ran.code == 0 else {"page.html", "figures", "sweep.json"}  # which come first
    assert {name.split("/")[0] for name in there} <= whole
    assert not [name for name in there if "/." in name]


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_read_only(workshop, commands, mounted, name):
    folder = furnish(workshop, mounted / "here")
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    command = COMMANDS[name]
    ran = commands.run(folder, *command.arguments, environment=command.environment)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert "may not be" in ran.err
    assert "choose another place" in ran.err
    assert contents(folder) == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_clock_that_jumps(trials, name):
    trial = trials(name)
    trial.start()
    ran = trial.run(clock=True)
    assert (ran.code, ran.err) == (0, "")
    assert trial.contents() == trial.expected


def test_files_from_the_future_and_from_long_ago(trials):
    trial = trials("merge")
    for stamp in (4_000_000_000, 0, -1_000_000):
        trial.start()
        trial._put_back("animal/model.safetensors")
        path = trial.folder / "animal" / "model.safetensors"
        shutil.os.utime(path, (stamp, stamp))
        ran = trial.run(clock=True)
        assert (ran.code, ran.err) == (0, "")
        assert trial.contents() == trial.expected
        again = trial.run(clock=True)
        assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize(
    "name",
    ["merge", "merge, a LoRA", "extract-lora", "curvature, replacing", "basis", "convert", "sweep", "report", "bench"],
)
def test_runs_into_one_output_at_once(trials, three_at_once, name):
    trial = trials(name)
    trial.start()
    with ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(lambda one: one.run(trial.folder, *trial.command.arguments), three_at_once))
    assert trial.contents() == trial.expected
    assert 0 in [one.code for one in ran]
    for one in ran:
        assert one.code in (0, 2), one
        assert one.err.count("\n") == (one.code != 0)
        assert one.code == 0 or "is writing" in one.err or " exists" in one.err, one


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Models of one tensor of 16 MB and a recipe for them."""
    root = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    for name in ("base", "one", "two"):
        (root / name).mkdir()
        save_file({"w": torch.randn(2000, 2000), "v": torch.randn(2000, 2000)}, root / name / "model.safetensors")
    recipe = {"merge_method": "iso_c", "base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}
    write_yaml(root / "recipe.yaml", recipe)
    return root


@pytest.mark.parametrize("extra", [20, 60, 120])
def test_too_little_memory(wide, commands, tmp_path, extra):
    """MB of address space that the command may add to what Python and torch have."""
    folder = furnish(wide, tmp_path / "here")
    ran = commands.run(folder, "merge", "recipe.yaml", "out", "--quiet", limits={"AS": extra << 20})
    assert ran.code == 2, ran
    assert ran.err.count("\n") == 1
    assert "too little memory" in ran.err
    assert contents(folder) == {}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, commands) -> Path:
    """A classifier with wide layers, rows for it, and its curvature."""
    root = tmp_path_factory.mktemp("measured")
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "hidden_size": 64, "intermediate_size": 4096}
    config = transformers.BertConfig(**sizes, **tiny.TEXT, **tiny.CALM, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(root / "bert")
    tiny.save_tokenizer(root / "bert")
    tiny.write_rows(root, "animal")
    assert commands.run(root, *WIDE_CURVATURE, "whole").code == 0
    return root


WIDE_CURVATURE = (
    "curvature", "bert", "--data", "animal-train.jsonl", "--task", "text-classification", "--text", "sentence",
    "--samples", "256", "--batch-size", "256", "--kind", "diagonal", "--quiet", "-o",
)  # fmt: skip


@pytest.mark.parametrize("extra", [80, 100, 125, 150])
def test_too_little_memory_to_measure_curvature(measured, commands, tmp_path, extra):
    """Smaller batches give the same numbers, or it is said that memory is too little; 200 MB are enough."""
    folder = furnish(measured, tmp_path / "here")
    ran = commands.run(folder, *WIDE_CURVATURE, "out", limits={"AS": extra << 20})
    if ran.code:
        assert (ran.code, ran.err.count("\n")) == (2, 1), ran
        assert "too little memory" in ran.err
        assert contents(folder) == {}
    else:
        found, whole = (load_file(path / "curvature.safetensors") for path in (folder / "out", measured / "whole"))
        assert found.keys() == whole.keys()
        for name, F in found.items():
            torch.testing.assert_close(F, whole[name], rtol=1e-4, atol=1e-9)
