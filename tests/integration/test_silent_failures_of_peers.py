"""What goes wrong in other mergers without a word: here it is refused in one line, or it comes out right.

One test per silent failure that was found in mergekit 0.1.5; SECURITY.md has the table. Models are tiny Llamas and a
tiny CLIP; what is right is computed in float64.
"""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from commands import ENVIRONMENT, assert_refused, run
from tiny_clip import make_clip

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")
NAMES = ("base", "one", "two")


@pytest.fixture
def llamas(tmp_path, monkeypatch) -> Path:
    """A tiny Llama and two models tuned from it, in the folder that commands run in."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    for t, name in enumerate(NAMES):
        with torch.no_grad():
            for W in model.parameters():
                W += 0.1 * t * torch.randn(W.shape)
        model.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(recipe: dict, file: str = "recipe.yaml") -> Path:
    Path(file).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return Path(file)


def ties(**more: object) -> dict:
    models = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in NAMES[1:]]
    return {"merge_method": "ties", "base_model": "base", "models": models, "out_dtype": "float32", **more}


def average(*names: str) -> dict:
    return {"merge_method": "average", "models": [{"model": name} for name in names]}


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Set tensors of a checkpoint, or take them out; dots are written as `__`."""
    file = folder / "model.safetensors"
    state = load_file(file)
    state |= {name.replace("__", "."): W for name, W in tensors.items()}
    save_file({name: W for name, W in state.items() if W is not None}, file, metadata={"format": "pt"})


def mean_of(*folders: str) -> dict[str, torch.Tensor]:
    states = [load_file(Path(folder) / "model.safetensors") for folder in folders]
    return {name: sum(state[name].double() for state in states) / len(states) for name in states[0]}


def assert_holds(out: Path, expected: dict[str, torch.Tensor]) -> None:
    """The weights that transformers would load are these, all of them and no others."""
    index = out / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert files == {path.name for path in out.glob("*.safetensors")}  # no orphans, none missing
    found = {name: W for file in files for name, W in load_file(out / file).items()}
    assert found.keys() == expected.keys()
    for name, W in found.items():
        torch.testing.assert_close(W.double(), expected[name], rtol=1e-6, atol=1e-6, msg=name)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


TYPOS = {
    "densty": (ties(parameters={"densty": 0.3}), "density"),
    "densty of a model": (ties(models=[{"model": "one", "parameters": {"densty": 0.5, "weight": 1}}]), "density"),
    "out_dtpye": (ties(out_dtpye="bfloat16"), "out_dtype"),
    "base_modle": ({**average("one", "two"), "base_modle": "base"}, "base_model"),
    "tokenizer_sorce": (ties(tokenizer_sorce="base"), "tokenizer_source"),
    "modle": (ties(models=[{"modle": "one"}]), "model"),
}


@pytest.mark.parametrize(("recipe", "meant"), TYPOS.values(), ids=TYPOS)
def test_a_typo_in_a_recipe_is_refused_with_the_word_that_was_meant(llamas, recipe, meant):
    write(recipe)
    assert_refused(run("merge", "recipe.yaml", "out"), "recipe.yaml:", "unknown key", f"Did you mean '{meant}'?")
    assert not Path("out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("owner", ["base", "two"])
def test_a_number_that_is_none_in_an_input_is_refused_by_name(llamas, owner, value):
    name = "model.layers.1.mlp.up_proj.weight"
    W = load_file(Path(owner) / "model.safetensors")[name]
    W[3, 5] = value
    change(Path(owner), model__layers__1__mlp__up_proj__weight=W)
    write(ties())
    assert_refused(run("merge", "recipe.yaml", "out"), name, owner)
    assert not Path("out").exists()


def test_a_smaller_merge_leaves_no_shard_and_no_index_of_the_larger_one(llamas):
    write(average("one", "two"))
    assert run("merge", "recipe.yaml", "out", "--max-shard-size", "8KB", "-q").code == 0
    assert len(list(Path("out").glob("*.safetensors"))) > 3
    assert_holds(Path("out"), mean_of("one", "two"))
    write(average("base", "two"))
    assert run("merge", "recipe.yaml", "out", "--overwrite", "-q").code == 0
    assert not Path("out/model.safetensors.index.json").exists()
    assert_holds(Path("out"), mean_of("base", "two"))
    loaded = transformers.LlamaForCausalLM.from_pretrained("out").state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(loaded[name].double(), mean_of("base", "two")[name], rtol=1e-6, atol=1e-6)


SLOW = """
import sys, time
from epimer.checkpoints import writer
put = writer.Draft.wrote
def slow(*arguments):
    put(*arguments)
    print("wrote", flush=True)
    time.sleep(0.05)
writer.Draft.wrote, writer.FLUSH_SECONDS = slow, 0.0
import epimer
epimer.merge(sys.argv[1], sys.argv[2], max_shard_size="8KB", overwrite=True, progress=False)
"""


def killed(recipe: Path, out: str, after: int) -> int:
    """Merge, slowed down, and kill -9 the process when it has written so many tensors; return its exit status."""
    command = [sys.executable, "-c", SLOW, str(recipe), out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        for _ in range(after):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    return process.returncode


def test_an_interrupted_run_leaves_the_old_model_whole_and_the_next_run_ends_it(llamas):
    write(average("one", "two"), "old.yaml")
    write(average("base", "two"), "new.yaml")
    assert run("merge", "old.yaml", "out", "-q").code == 0
    before = bytes_of(Path("out"))
    for after in (1, 6, 12):
        assert killed(Path("new.yaml"), "out", after) == -signal.SIGKILL
        assert bytes_of(Path("out")) == before
        assert_holds(Path("out"), mean_of("one", "two"))
    assert run("merge", "new.yaml", "out", "--overwrite", "--max-shard-size", "8KB", "-q").code == 0
    assert_holds(Path("out"), mean_of("base", "two"))
    assert {path.name for path in llamas.iterdir()} == {*NAMES, "out", "old.yaml", "new.yaml"}  # nothing left behind


def test_a_tensor_that_no_architecture_knows_is_merged(llamas):
    for t, name in enumerate(NAMES):
        change(Path(name), model__layers__0__adapter_of_ours__weight=torch.full((4, 4), float(t)))
    write(average("one", "two"))
    assert run("merge", "recipe.yaml", "out", "-q").code == 0
    found = load_file("out/model.safetensors")
    assert found["model.layers.0.adapter_of_ours.weight"].equal(torch.full((4, 4), 1.5))
    assert_holds(Path("out"), mean_of("one", "two"))


@pytest.mark.parametrize("owner", ["base", "one"])
def test_a_tensor_that_not_every_model_has_is_refused_by_name(llamas, owner):
    change(Path(owner), model__layers__0__adapter_of_ours__weight=torch.ones(4, 4))
    write(ties())
    assert_refused(run("merge", "recipe.yaml", "out"), "model.layers.0.adapter_of_ours.weight")
    assert not Path("out").exists()


def test_parameters_may_have_any_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("W", "encoder/0/kernel:0", "слой.вес", "block 1 . weight", "a" * 200)
    for t, model in enumerate(("one", "two")):
        Path(model).mkdir()
        save_file({name: torch.full((2, 3), float(t)) for name in names}, f"{model}/model.safetensors")
    write(average("one", "two"))
    assert run("merge", "recipe.yaml", "out", "-q").code == 0
    assert_holds(Path("out"), {name: torch.full((2, 3), 0.5, dtype=torch.float64) for name in names})


def test_neither_the_config_nor_any_byte_depends_on_the_hash_seed(llamas):
    """Without a base, and with configs that differ, somebody has to give the config: always the same model."""
    for name, size in (("one", 1024), ("two", 4096)):
        config = json.loads((llamas / name / "config.json").read_text())
        (llamas / name / "config.json").write_text(json.dumps({**config, "max_position_embeddings": size}))
    write(average("one", "two"))
    outs = []
    for seed in ("0", "1", "2", "1234"):
        command = [sys.executable, "-m", "epimer", "merge", "recipe.yaml", f"out{seed}", "-q"]
        subprocess.run(command, env={**ENVIRONMENT, "PYTHONHASHSEED": seed}, check=True, capture_output=True)
        outs.append(bytes_of(Path(f"out{seed}")))
    assert outs[0] == outs[1] == outs[2] == outs[3]
    assert json.loads(Path("out0/config.json").read_text())["max_position_embeddings"] == 1024  # the first model's


def test_a_clip_model_merges_whole_and_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "two")):
        make_clip(seed).save_pretrained(name)
    write(average("one", "two"))
    assert run("merge", "recipe.yaml", "out", "-q").code == 0
    assert_holds(Path("out"), mean_of("one", "two"))
    clip = transformers.CLIPModel.from_pretrained("out")
    expected = mean_of("one", "two")
    for name, W in clip.state_dict().items():
        if name in expected:
            torch.testing.assert_close(W.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert expected.keys() <= clip.state_dict().keys()


PEAK = """
import sys
import torch, epimer.api
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
epimer.merge(sys.argv[1], sys.argv[2], progress=False, device="cpu", workers=2)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of a process so")
def test_a_merge_does_not_hold_its_models_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count, shape = 100, (512, 1024)  # 100 tensors of 2 MiB in each of three models
    for t, name in enumerate(NAMES):
        Path(name).mkdir()
        draw = torch.Generator().manual_seed(t)
        state = {f"layers.{i}.weight": torch.randn(shape, generator=draw) for i in range(count)}
        save_file(state, f"{name}/model.safetensors")
    total = len(NAMES) * count * 4 * shape[0] * shape[1]
    command = [sys.executable, "-c", PEAK, str(write(ties(), "recipe.yaml")), "out"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < total / 3, f"{int(done.stdout) / 2**20:.0f} MiB for {total / 2**20:.0f} MiB of models"
