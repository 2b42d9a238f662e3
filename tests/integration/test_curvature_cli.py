"""The commands `curvature` and `basis`, and merges with what they make: the numbers, the folders, and what is refused.

What is measured is compared with `estimate_curvature` on a model that transformers loaded, and on batches put together
here: tokens looked up in a list of words, pixels by numpy, rows shuffled by `random.Random`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.curvature.format import model_fingerprint
from epimer.evaluation.judges import by_agreement
from epimer.evaluation.unlabelled import suite_of_inputs
from epimer.plan.participants import align

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
Image = pytest.importorskip("PIL.Image")

from safetensors.torch import load_file, save_file  # noqa: E402

import commands  # noqa: E402
from commands import EPIMER, Ran, assert_done, run  # noqa: E402
from tiny import save_tokenizer, write_jsonl  # noqa: E402

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONGEST = 90  # seconds; a command that hangs is a failure, not the end of the tests
PLAIN = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "over", "sea", "slow", "fast"]
WORDS = ["<pad>", "<unk>", "<eos>", *PLAIN]
IDS = {word: i for i, word in enumerate(WORDS)}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "pad_token_id": 0}
SIGHT = {"image_size": 8, "patch_size": 4, "projection_dim": 12}
CLASSES = {"bad": 0, "fine": 1, "good": 2}
NAMED = {"label2id": CLASSES, "id2label": {i: name for name, i in CLASSES.items()}}
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
PIXELS = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}
ROWS = 22
NOISE = 1e-10  # what rounding leaves where the curvature is 0: adding one vector to all keys changes no attention
IMAGES = ("image-classification", "pictures")
ON = {
    "bert": ("text-classification", "reviews.jsonl"),
    "gpt2": ("causal-lm", "lines.txt"),
    "llama": ("causal-lm", "lines.txt"),
    "vit": IMAGES,
    "clip": (*IMAGES, "--head", "head.safetensors"),
}


def gpt2() -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(WORDS), "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=2, pad_token_id=0))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=1, bos_token_id=None, eos_token_id=2)
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **TEXT, **NAMED)),
    "gpt2": gpt2,
    "llama": llama,
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **SIGHT, **NAMED)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES, **SIGHT)),
}


def save(folder: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Save a random model, the ancestor (seed 0) or one a little away from it, with all it takes to read data."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for W in model.parameters():
            W += 0.1 * torch.randn(W.shape)
        generator = torch.Generator().manual_seed(seed)
        for W in model.parameters():
            W += 0.05 * seed * torch.randn(W.shape, generator=generator)
    model.to(dtype).save_pretrained(folder)
    if family in ("vit", "clip"):
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
        return
    save_tokenizer(folder, IDS)


def write_data(folder: Path) -> None:
    """Write the same number of texts with labels, of texts, and of images in class folders."""
    generator = random.Random(0)
    rows = [
        {"text": " ".join(generator.choices(PLAIN, k=generator.randint(3, 9))), "label": generator.randrange(3)}
        for _ in range(ROWS)
    ]
    write_jsonl(folder / "reviews.jsonl", rows)
    (folder / "lines.txt").write_text("".join(row["text"] + "\n" for row in rows))
    noise = np.random.default_rng(0)
    for i in range(ROWS):
        place = folder / "pictures" / list(CLASSES)[i % 3] / f"{i:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    torch.manual_seed(1)
    save_file({"weight": torch.randn(3, 16), "bias": torch.randn(3)}, folder / "head.safetensors")


pytestmark = pytest.mark.usefixtures("no_progress_bars")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with data, and an ancestor and two models of every family."""
    root = tmp_path_factory.mktemp("made")
    write_data(root)
    for family in FAMILIES:
        for seed, name in enumerate(("base", "one", "two")):
            save(root / family / name, family, seed)
    save(root / "bert" / "three", "bert", 3)
    return root


# commands


def start(*command: object, cwd: Path) -> Ran:
    """Run a program as a user does; if it hangs, it ends with all that it started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        list(map(str, command)), text=True, env=ENVIRONMENT, cwd=cwd, start_new_session=True, **pipes
    ) as process:
        try:
            out, err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ran(process.returncode, out, err)


def done(*arguments: object) -> str:
    """Run a command that must succeed; return what it printed."""
    return assert_done(run(*arguments))


def assert_refused(ran: Ran, *words: str, out: Path = Path("out")) -> None:
    """One line on stderr that holds these words, exit code 2, nothing printed, nothing left on disk."""
    commands.assert_refused(ran, *words)
    assert not left_over(out)


def left_over(out: Path) -> list[str]:
    """Return what there is of an output: itself, a draft, or one that was moved aside."""
    return [
        path.name for path in out.absolute().parent.iterdir() if path.name == out.name or out.name + ".e" in path.name
    ]


def on(family: str, model: str = "one") -> list[str]:
    """Return the arguments that measure a model of a family on its data."""
    task, data, *more = ON[family]
    return [f"{family}/{model}", "--task", task, "--data", data, *more]


def header(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "curvature.json").read_text())


def said(folder: str | Path) -> dict[str, Any]:
    """Return a header without the hashes of itself and of the tensors."""
    found = header(folder)
    for holder, key in ((found, "sha256"), (found, "checksums"), (found["inputs"], "checksums")):
        del holder[key]
    return found


def stored(folder: str | Path) -> bytes:
    return (Path(folder) / "curvature.safetensors").read_bytes()


def write_recipe(file: str, method: str, family: str, curvature: Sequence[str] = (), **keys: object) -> str:
    """Write a recipe that merges `one` and `two` of a family, or whichever are named."""
    names = keys.pop("names", ("one", "two"))
    entries: list[dict[str, str]] = [{"model": f"{family}/{name}"} for name in names]
    for entry, folder in zip(entries, curvature, strict=False):
        entry["curvature"] = folder
    recipe = {"merge_method": method, "base_model": f"{family}/base", "models": entries, **keys}
    Path(file).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return file


# the same by hand


class Seen(nn.Module):
    """CLIP's vision model with a linear head on what it pools."""

    def __init__(self, body: nn.Module, W: Tensor, b: Tensor) -> None:
        super().__init__()
        self.body, self.W, self.b = body, W, b

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.body(pixel_values).pooler_output @ self.W.T + self.b


def load(folder: Path, family: str) -> nn.Module:
    """Load a model with transformers, in float32."""
    auto = {"bert": "SequenceClassification", "vit": "ImageClassification"}.get(family, "CausalLM")
    if family == "clip":
        head = load_file(folder.parents[1] / "head.safetensors")
        body = transformers.CLIPVisionModel.from_pretrained(folder, dtype=torch.float32)
        return Seen(body, head["weight"], head["bias"]).eval()
    return getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder, dtype=torch.float32).eval()


def samples_of(made: Path, family: str, seed: int, count: int) -> tuple[list[Any], list[int]]:
    """Return the first tokens or pixels, and labels, of the shuffled data."""
    if family in ("vit", "clip"):
        files = sorted((made / "pictures").rglob("*.png"))
        inputs = []
        for file in files:
            with Image.open(file) as image:
                inputs.append(((np.asarray(image) / 255 - MEAN) / STD).transpose(2, 0, 1))
        labels = [CLASSES[file.parent.name] for file in files]
    else:
        rows = [json.loads(line) for line in (made / "reviews.jsonl").read_text().splitlines()]
        inputs, labels = [[IDS[word] for word in row["text"].split()] for row in rows], [row["label"] for row in rows]
    order = list(range(len(inputs)))
    random.Random(seed).shuffle(order)
    return [inputs[i] for i in order[:count]], [labels[i] for i in order[:count]]


def batches_of(made: Path, family: str, seed: int, count: int, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield batches as the model takes them."""
    inputs, labels = samples_of(made, family, seed, count)
    for start in range(0, len(inputs), size):
        part, targets = inputs[start : start + size], torch.tensor(labels[start : start + size])
        if family in ("vit", "clip"):
            yield {"pixel_values": torch.tensor(np.stack(part), dtype=torch.float32)}, targets
            continue
        longest = max(map(len, part))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in part])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
        if family in ("gpt2", "llama"):
            following = torch.tensor([[*row[1:], *[-100] * (longest - len(row) + 1)] for row in part])
            targets = following
        yield {"input_ids": ids, "attention_mask": mask}, targets


def loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    if targets.dim() == 1:
        return cross_entropy(logits, targets, reduction="none")
    return cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100).sum(1)


def names_on_disk(model: nn.Module, folder: Path) -> dict[str, str]:
    """Return parameter -> the tensor on disk that has its values; no two tensors are alike."""
    disk = load_file(folder / "model.safetensors")
    found = {}
    for name, W in model.named_parameters():
        (found[name],) = [key for key, V in disk.items() if V.shape == W.shape and torch.equal(V.to(W), W)]
    return found


def by_hand(
    made: Path, family: str, model: str = "one", *, seed: int = 0, count: int = ROWS, size: int = 16, **how: Any
):
    """Measure with `estimate_curvature`; return the metrics under the names on disk, and what was measured."""
    loaded = load(made / family / model, family)
    batches = list(batches_of(made, family, seed, count, size))
    found = epimer.estimate_curvature(loaded, batches, loss, seed=seed, samples=None, progress=False, **how)
    names = names_on_disk(loaded, made / family / model)
    return {names[name]: metric for name, metric in found.items()}, found.provenance


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare curvature, tensor by tensor; that of EKFAC by what it does, as eigenvectors have signs."""
    assert set(found) == set(expected)
    for name, metric in expected.items():
        if isinstance(metric, epimer.Corrected):
            D = torch.randn(metric.S.shape, generator=torch.Generator().manual_seed(0))
            parts = [(found[name].apply(D), metric.apply(D))]
        else:
            letters = [letter for letter in ("F", "A", "G", "g", "x") if hasattr(metric, letter)]
            parts = [(getattr(found[name], letter), getattr(metric, letter)) for letter in letters]
        for one, other in parts:
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) + NOISE)


def assert_merged(out: Path, expected: Mapping[str, Tensor], base: Path, tolerance: float = 1e-4) -> None:
    """Compare a merged model with a state dict, by how far each tensor is from the base."""
    merged, before = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    assert set(merged) == set(expected)
    for name, W in merged.items():
        moved = (expected[name].float() - before[name].float()).norm()
        assert moved > 0
        assert (W.float() - expected[name].float()).norm() <= tolerance * moved, name


# what is measured

CASES = [
    ("bert", "kronecker", "model"),
    ("bert", "diagonal", "expected"),
    ("bert", "samples", "true"),
    ("bert", "ekfac", "model"),
    ("gpt2", "kronecker", "true"),
    ("gpt2", "diagonal", "true"),
    ("gpt2", "ekfac", "model"),
    ("llama", "kronecker", "expected"),
    ("llama", "diagonal", "model"),
    ("llama", "samples", "model"),
    ("llama", "ekfac", "true"),
    ("vit", "kronecker", "expected"),
    ("vit", "diagonal", "model"),
    ("vit", "samples", "true"),
    ("vit", "ekfac", "expected"),
    ("clip", "kronecker", "model"),
    ("clip", "diagonal", "true"),
    ("clip", "samples", "expected"),
]


@pytest.mark.parametrize(("family", "kind", "labels"), CASES)
def test_the_numbers_are_those_of_the_model_that_transformers_loads(here, made, family, kind, labels):
    options = ["--kind", kind, "--labels", labels, "--samples", 13, "--batch-size", 5, "--seed", 3]
    printed = done("curvature", *on(family), *options, "--out", "out")
    expected, about = by_hand(made, family, seed=3, count=13, size=5, kind=kind, labels=labels)
    found = epimer.Curvature.load("out")
    assert_same(found, expected)
    disk = load_file(made / family / "one" / "model.safetensors")
    written = header("out")
    wanted = {"format": 2, "kind": kind, "samples": 13, "labels": labels, "seed": 3, "dtype": "float32"}
    wanted |= {"source": "data", "basis": None, "version": epimer.__version__}
    wanted["model"] = model_fingerprint({name: disk[name] for name in found})
    assert {key: written[key] for key in wanted} == wanted
    assert written["tokens"] == about.tokens
    if kind != "diagonal":
        inputs, _ = samples_of(made, family, 3, 13)
        assert written["tokens"] == (13 * 5 if family in ("vit", "clip") else sum(map(len, inputs)))
    assert printed.startswith(f"out: {kind} of {len(found)} tensors, ")
    assert f"(13 samples, {written['tokens']} tokens, {labels} labels)" in printed
    assert set(written["left_out"]) <= set(disk) - set(found)


def test_the_same_command_measures_the_same_bytes_in_another_process(here):
    command = ["curvature", *on("bert"), "--samples", "9", "--batch-size", "4"]
    ran = start(EPIMER, *command, "--out", "one", cwd=here)
    assert (ran.code, ran.err) == (0, "")
    assert "left out 'bert.embeddings" in ran.out
    done(*command, "--out", "two")
    done(*command, "--out", "three", "--seed", "1")
    assert stored("one") == stored("two") != stored("three")
    assert header("one") == header("two") != header("three")
    found = json.loads(done(*command, "--out", "four", "--json"))
    assert found["samples"] == 9
    assert found["tensors"] == len(epimer.Curvature.load("four"))
    assert done(*command, "--out", "five", "--quiet") == ""
    done(*command, "--out", "six", "--passes", 3)
    assert stored("six") == stored("one")
    assert header("six") == header("one")


def test_little_memory_is_said_first_and_measured_in_passes(here, monkeypatch):
    command = ["curvature", *on("bert"), "--samples", "9", "--batch-size", "4"]
    done(*command, "--out", "one")
    monkeypatch.setattr("epimer.curvature.passes.available_memory", lambda: 20_000)
    first, second, *_ = done(*command, "--out", "deeper/two").splitlines()
    assert first.startswith("note: the sums of ")
    assert " kB of memory are free: they are measured in " in first
    assert second.startswith("deeper/two: kronecker of ")
    assert stored("deeper/two") == stored("one")
    assert header("deeper/two") == header("one")
    assert [path.name for path in Path("deeper").iterdir()] == ["two"]


# inputs that are kept, and measuring at a merged model


@pytest.mark.parametrize("family", ["bert", "llama", "clip"])
def test_the_inputs_are_kept_with_the_curvature(here, made, family):
    done("curvature", *on(family), "--samples", 13, "--batch-size", 5, "--seed", 3, "--out", "out")
    inputs = epimer.Curvature.load("out").inputs
    assert (inputs.task, inputs.pooling, len(inputs)) == (ON[family][0], "auto", 13)
    ((whole, targets),) = batches_of(made, family, 3, 13, 13)
    assert set(inputs.tensors) - {"token_type_ids"} == set(whole)
    for name, value in whole.items():
        kept = inputs.tensors[name]
        assert torch.equal(kept, value.to(kept.dtype))
    assert (inputs.counted is None) is (family != "llama")
    assert inputs.counted is None or torch.equal(inputs.counted, targets != -100)
    head = load_file(made / "head.safetensors") if family == "clip" else {}
    assert {name: W.tolist() for name, W in inputs.head.items()} == {name: W.tolist() for name, W in head.items()}


@torch.no_grad()
def test_a_suite_of_kept_images_and_a_head(here, made):
    models = ["clip/one", "clip/two"]
    for model in ("one", "two"):
        done("curvature", *on("clip", model), "--out", f"{model}.curv")
    participants = align(open_checkpoint("clip/base"), [open_checkpoint(model) for model in models], models)
    curvatures = [epimer.Curvature.load(f"{model}.curv") for model in ("one", "two")]
    suite = suite_of_inputs(models, participants, curvatures, device="cpu")
    ((whole, _),) = batches_of(made, "clip", 0, ROWS, ROWS)
    pixels = whole["pixel_values"].half().float()
    for t, name in enumerate(("one", "two")):
        for state, model in ((suite.base, "base"), (suite.models[t], name)):
            expected = load(made / "clip" / model, "clip")(pixels)
            network = suite.network(state, suite.tasks[t])
            found = [network(**inputs).logits for inputs, _ in suite.tasks[t].splits["train"].batches(8)]
            torch.testing.assert_close(torch.cat(found), expected)
    assert bool(by_agreement(suite)(suite.models[0], "test").scores["one"].all())


def test_no_more_inputs_are_kept_than_wanted(here):
    done("curvature", *on("bert"), "--no-inputs", "--out", "without")
    assert {path.name for path in Path("without").iterdir()} == {"curvature.json", "curvature.safetensors"}
    assert epimer.Curvature.load("without").inputs is None
    done("curvature", *on("bert"), "--out", "with")
    assert stored("with") == stored("without")
    Path("many.txt").write_text("the cat sat\n" * 300)
    done("curvature", "bert/one", "--task", ON["bert"][0], "--data", "many.txt", "--samples", 300, "--out", "many")
    assert header("many")["samples"] == 300
    assert header("many")["inputs"]["samples"] == len(epimer.Curvature.load("many").inputs) == 256


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "clip"])
def test_measuring_at_a_model_is_measuring_that_model(here, family):
    done("curvature", *on(family), "--out", "plain")
    printed = done("curvature", *on(family), "--at", f"{family}/one", "--out", "same")
    assert stored("same") == stored("plain")
    before, after = said("plain"), said("same")
    assert before.pop("at") is None
    assert after.pop("at") == before["model"]
    assert after == before
    assert f"measured at {family}/one" in printed
    done("curvature", *on(family, "base"), "--out", "base")
    done("curvature", *on(family), "--at", f"{family}/base", "--out", "there")
    assert stored("there") == stored("base") != stored("plain")
    there = header("there")
    assert there["model"] == before["model"]  # so recipes take it as this model's
    assert there["at"] == header("base")["model"]


def test_measuring_at_a_merge_keeps_the_tasks_own_head(here, made):
    """What the merged model lacks, or has in another shape, is the model's own."""
    own, base = (load_file(made / "bert" / name / "model.safetensors") for name in ("one", "base"))
    merged = {name: W for name, W in base.items() if not name.startswith("classifier")}
    shutil.copytree(made / "bert" / "base", "merged", symlinks=False)
    save_file(merged | {"classifier.weight": torch.zeros(5, 16)}, "merged/model.safetensors", {"format": "pt"})
    shutil.copytree(made / "bert" / "one", "expected")
    save_file(own | merged, "expected/model.safetensors", {"format": "pt"})
    done("curvature", *on("bert"), "--at", "merged", "--out", "there")
    task, data = ON["bert"]
    done("curvature", "expected", "--task", task, "--data", data, "--out", "by_hand")
    assert stored("there") == stored("by_hand")
    measured = set(epimer.Curvature.load("there"))
    assert "classifier.weight" in measured
    shared = {name: base[name] for name in measured - {"classifier.weight"}}
    assert header("there")["at"] == model_fingerprint(shared)
    recipe = write_recipe("recipe.yaml", "epimer_kron", "bert", ["there", "there"], names=("one", "one"))
    done("merge", recipe, "out")


def test_what_cannot_be_measured_at(here, made):
    assert_refused(run("curvature", *on("bert"), "--at", "llama/one", "--out", "out"), "no matrix of the same name")
    bad = load_file(made / "bert" / "base" / "model.safetensors")
    bad["bert.pooler.dense.weight"][0, 0] = torch.nan
    save_file(bad, "bad.safetensors")
    ran = run("curvature", *on("bert"), "--at", "bad.safetensors", "--out", "out")
    assert_refused(ran, "bad.safetensors['bert.pooler.dense.weight'] holds NaN or Inf in 1 entries")
    assert_refused(run("curvature", *on("bert"), "--at", "nowhere/at/all", "--out", "out"), "nowhere/at/all")
    options = ["--optimizer", "x.pt", "--task", "causal-lm", "--at", "llama/base", "--out", "out"]
    assert_refused(run("curvature", "llama/one", *options), "--at is for measuring on --data")


@pytest.mark.parametrize("kind", ["samples", "ekfac", "diagonal"])
def test_drawn_labels_depend_on_the_seed_alone(here, kind):
    for out, seed in (("one", 0), ("two", 0), ("three", 1)):
        done("curvature", *on("vit"), "--kind", kind, "--seed", seed, "--out", out)
    assert stored("one") == stored("two") != stored("three")


def test_how_many_samples(here):
    counts = {}
    for out, options in {
        "few": ["--samples", 5],
        "least": ["--fraction", 0.001],
        "half": ["--fraction", 0.5],
        "all": ["--samples", ROWS],
        "more": ["--samples", 10 * ROWS],
        "whole": ["--fraction", 1],
    }.items():
        done("curvature", *on("bert"), "--batch-size", 5, *options, "--out", out)
        counts[out] = header(out)["samples"]
    assert counts == {"few": 5, "least": 5, "half": 11, "all": ROWS, "more": ROWS, "whole": ROWS}
    assert stored("few") == stored("least")
    assert stored("all") == stored("more") == stored("whole") != stored("half")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", 1], "curvature was measured on 1 sample and is mostly noise; take a few dozen"),
        (["--samples", 30], f"curvature was measured on {ROWS} samples instead of 30: reviews.jsonl has no more rows"),
        (["--samples", ROWS], ""),
        (["--fraction", 0.1, "--batch-size", 2], "measured on 3 samples and is mostly noise; take a few dozen"),
        ([], ""),
    ],
)
def test_few_samples_are_said(here, options, said):
    printed = done("curvature", *on("bert"), *options, "--out", "out")
    assert said in printed
    assert len([line for line in printed.splitlines() if "was measured on" in line]) == bool(said)


@pytest.mark.parametrize(
    ("kind", "side", "numbers"),
    [
        ("kronecker", 1700, 16 * 17 / 2 + 1700 * 1701 / 2),
        ("ekfac", 1200, 16 * 16 + 1200 * 1200 + 16 * 1200),
    ],
)
def test_a_large_size_on_disk_is_said_before_measuring(here, kind, side, numbers):
    torch.manual_seed(0)
    sizes = {**SIZES, **TEXT, **NAMED, "intermediate_size": side}
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained("large")
    save_tokenizer(Path("large"), IDS)
    of = ["--layers", "*.layer.0.intermediate.dense.weight", "--layers", "*.layer.0.output.dense.weight"]
    command = ["curvature", "large", *on("bert")[1:], "--kind", kind, *of, "--samples", 8]
    first, second, *_ = done(*command, "--out", "out").splitlines()
    model = sum(W.nbytes for W in load_file("large/model.safetensors").values())
    assert first == (
        f"note: measuring {kind} of 2 tensors: out will take up to {2 * 4 * numbers / 1e6:.1f} MB "
        f"(the model takes {model / 1e3:.1f} kB)."
    )
    written = Path("out/curvature.safetensors").stat().st_size
    assert 0 <= written - 2 * 4 * numbers < 1000
    assert second.startswith(f"out: {kind} of 2 tensors, {written / 1e6:.1f} MB")


def test_patterns_choose_tensors_by_their_names_on_disk(here, made):
    """Those of a ViT are other ones than in memory."""
    options = ["--labels", "true", "--layers", "*.query.weight", "--layers", "vit.encoder.*.intermediate.*"]
    done("curvature", *on("vit"), *options, "--out", "out")
    expected, _ = by_hand(made, "vit", labels="true")
    wanted = [n for n in expected if n.endswith((".query.weight", ".intermediate.dense.weight"))]
    assert len(wanted) == 2
    assert_same(epimer.Curvature.load("out"), {name: expected[name] for name in wanted})


def test_other_columns_and_class_names(here, made):
    names = list(CLASSES)
    rows = [json.loads(line) for line in Path("reviews.jsonl").read_text().splitlines()]
    lines = [f"{row['text']},{names[row['label']]}" for row in rows]
    Path("table.csv").write_text("\n".join(["said,meant", *lines]))
    command = ["curvature", "bert/one", "--task", "text-classification", "--labels", "true"]
    done(*command, "--data", "table.csv", "--text", "said", "--label", "meant", "--out", "one")
    done(*command, "--data", "reviews.jsonl", "--out", "two")
    assert stored("one") == stored("two")


# merges


@pytest.fixture(scope="module")
def measured(made) -> Path:
    """Curvature of two models of each family, as folders `FAMILY-KIND-MODEL`, with labels as given."""
    root = made / "measured"
    before = Path.cwd()
    os.chdir(made)
    for family, kinds in {"bert": ("kronecker", "ekfac", "diagonal", "samples"), "gpt2": ("kronecker",)}.items():
        for kind in kinds:
            for model in ("one", "two"):
                out = root / f"{family}-{kind}-{model}"
                done("curvature", *on(family, model), "--kind", kind, "--labels", "true", "--out", out)
    os.chdir(before)
    return root


METHODS = [
    ("bert", "epimer_kron", "kronecker", {"rank": 4}),
    ("bert", "epimer_kron", "ekfac", {"rank": 4}),
    ("bert", "epimer", "diagonal", {"rank": 4}),
    ("bert", "epimer_exact", "samples", {"rank": 4}),
    ("bert", "regmean", "kronecker", {}),
    ("bert", "fisher", "diagonal", {}),
    ("gpt2", "epimer_kron", "kronecker", {"rank": 4}),
]


def folders(measured: Path, family: str, kind: str) -> list[str]:
    return [str(measured / f"{family}-{kind}-{model}") for model in ("one", "two")]


def states(made: Path, family: str, *names: str) -> list[dict[str, Tensor]]:
    return [load_file(made / family / name / "model.safetensors") for name in names]


@pytest.mark.parametrize(("family", "method", "kind", "parameters"), METHODS)
def test_a_recipe_with_measured_curvature(here, made, measured, family, method, kind, parameters):
    recipe = write_recipe("r.yaml", method, family, folders(measured, family, kind), parameters=parameters)
    done("merge", recipe, "out")
    base, *models = states(made, family, "base", "one", "two")
    curvature = [by_hand(made, family, model, kind=kind, labels="true")[0] for model in ("one", "two")]
    expected = epimer.merge_state_dicts(base, models, method, curvature=curvature, **parameters)
    assert_merged(Path("out"), expected, made / family / "base")
    average = epimer.merge_state_dicts(base, models, "average")
    with pytest.raises(AssertionError):  # it made a difference
        assert_merged(Path("out"), average, made / family / "base")


def test_wide_layers_are_named_first_and_merged_in_a_basis(here, made, monkeypatch):
    monkeypatch.setattr("epimer.curvature.collectors.WIDEST", 20)
    measuring = ("--data", made / "reviews.jsonl", "--task", "text-classification", "--samples", 8)
    first, second, *_ = done("curvature", made / "bert" / "one", *measuring, "-o", "wide").splitlines()
    assert first.startswith("note: 'bert.encoder.layer.0.intermediate.dense.weight', ")
    assert "kB; they are kept at most 20 wide" in first
    assert second.startswith("wide: kronecker of ")
    recipe = write_recipe(
        "r.yaml", "epimer_kron", "bert", ["one.curv", "two.curv"], basis="basis", parameters={"rank": 4}
    )
    done("basis", recipe, "basis")
    for model in ("one", "two"):
        printed = done("curvature", made / "bert" / model, *measuring, "--basis", "basis", "-o", f"{model}.curv")
        assert "Kronecker factors" not in printed
    done("merge", recipe, "out")
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    base, one = (load_file(folder / "model.safetensors")[name] for folder in (made / "bert" / "base", Path("out")))
    assert float((one - base).norm()) > 0


def test_curvature_of_another_model_is_used_only_if_asked(here, made, measured):
    crossed = folders(measured, "bert", "kronecker")[::-1]
    recipe = write_recipe("r.yaml", "epimer_kron", "bert", crossed)
    wrong = f"{crossed[0]} was measured on another model than models[0] (bert/one)"
    assert_refused(run("merge", recipe, "out"), wrong, "measure it on this one, or pass --any-curvature")
    printed = done("merge", recipe, "out", "--any-curvature")
    assert f"note: {wrong}; it is used as you asked." in printed
    base, *models = states(made, "bert", "base", "one", "two")
    curvature = [by_hand(made, "bert", model, labels="true")[0] for model in ("two", "one")]
    expected = epimer.merge_state_dicts(base, models, "epimer_kron", curvature=curvature)
    assert_merged(Path("out"), expected, made / "bert" / "base")


def test_a_model_changed_since_is_another_model(here, made, measured):
    shutil.copytree(made / "bert" / "one", "later")
    state = load_file("later/model.safetensors")
    state["bert.pooler.dense.weight"][0, 0] += 0.1
    save_file(state, "later/model.safetensors")
    recipe = yaml.safe_load(Path(write_recipe("r.yaml", "epimer_kron", "bert")).read_text())
    for entry, folder in zip(recipe["models"], folders(measured, "bert", "kronecker"), strict=True):
        entry["curvature"] = folder
    recipe["models"][0]["model"] = "later"
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    assert_refused(run("merge", "r.yaml", "out"), "was measured on another model than models[0] (later)")


def test_curvature_that_does_not_fit_the_recipe(here, measured):
    kronecker, samples = (folders(measured, "bert", kind) for kind in ("kronecker", "samples"))
    mixed = write_recipe("r.yaml", "epimer_kron", "bert", [kronecker[0], samples[1]])
    assert_refused(
        run("merge", mixed, "out"), f"{kronecker[0]} is kronecker curvature, {samples[1]} is samples; measure all"
    )
    wrong = write_recipe("r.yaml", "epimer_kron", "bert", samples)
    assert_refused(run("merge", wrong, "out"), f"{samples[0]} is samples curvature, but epimer_kron needs kronecker")
    one = write_recipe("r.yaml", "epimer_kron", "bert", kronecker[:1])
    assert_refused(run("merge", one, "out"), "models[1] has no curvature, while others have")
    none = write_recipe("r.yaml", "epimer_kron", "bert", [kronecker[0], "nowhere"])
    assert_refused(run("merge", none, "out"), "curvature of models[1]: nowhere is not a curvature folder")


def test_a_bfloat16_checkpoint_is_measured_in_float32_and_known_again(here):
    for seed, name in enumerate(("base", "one", "two")):
        save(here / "half" / name, "llama", seed, torch.bfloat16)
    for name in ("one", "two"):
        task = ["--task", "causal-lm", "--data", "lines.txt", "--labels", "true"]
        done("curvature", f"half/{name}", *task, "--out", f"c-{name}")
        model = load(here / "half" / name, "llama")
        assert model.lm_head.weight.dtype == torch.float32
        expected = epimer.estimate_curvature(
            model, list(batches_of(here, "llama", 0, ROWS, 16)), loss, labels="true", progress=False
        )
        assert_same(epimer.Curvature.load(f"c-{name}"), expected)
        assert header(f"c-{name}")["model"] == expected.provenance.model
    done("merge", write_recipe("r.yaml", "epimer_kron", "half", ["c-one", "c-two"]), "out")
    assert load_file("out/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_curvature_saved_from_python_is_known_again(here, made, measured):
    for name in ("one", "two"):
        model = load(made / "bert" / name, "bert")
        batches = list(batches_of(made, "bert", 0, ROWS, 16))
        epimer.estimate_curvature(model, batches, loss, labels="true", progress=False).save(f"c-{name}")
    done("merge", write_recipe("r.yaml", "epimer_kron", "bert", ["c-one", "c-two"]), "out")
    done("merge", write_recipe("r.yaml", "epimer_kron", "bert", folders(measured, "bert", "kronecker")), "other")
    assert_merged(Path("out"), load_file("other/model.safetensors"), made / "bert" / "base", 1e-5)


# bases


@pytest.mark.parametrize(
    ("method", "measure", "kind"),
    [
        ("epimer_kron", "kronecker", "tensor"),
        ("epimer_kron", "kronecker", "tagged"),
        ("epimer_exact", "samples", "tagged"),
        ("epimer", "diagonal", "tagged"),
    ],
)
def test_what_lies_in_the_basis_is_all_a_merge_needs(here, made, measured, method, measure, kind):
    printed = done("basis", write_recipe("b.yaml", method, "bert", parameters={"rank": 4}), "b", "--kind", kind)
    assert printed.startswith(f"b: {kind} basis of 7 tensors, ")
    for name in ("one", "two"):
        options = ["--kind", measure, "--labels", "true", "--basis", "b", "--out", f"c-{name}"]
        assert f"projected {measure} of 7 tensors" in done("curvature", *on("bert", name), *options)
        assert header(f"c-{name}")["basis"] == json.loads(Path("b/basis.json").read_text())["fingerprint"]
    done("merge", write_recipe("r.yaml", method, "bert", ["c-one", "c-two"], basis="b"), "out")
    parameters = {"rank": 4, "basis": kind}
    full = write_recipe("f.yaml", method, "bert", folders(measured, "bert", measure), parameters=parameters)
    done("merge", full, "full")
    assert_merged(Path("out"), load_file("full/model.safetensors"), made / "bert" / "base", 1e-5)


def along(folder: Path, name: str) -> Callable[[Tensor], Tensor]:
    """Return the map from coordinates in a stored basis to a change of the tensor."""
    parts = load_file(folder / "basis.safetensors")
    U, V, mix = (parts.get(f"{name}.{letter}") for letter in ("U", "V", "mix"))
    return lambda x: (U * (x if mix is None else mix @ x)) @ V.T


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_exact_kinds(here, made):
    """The projected Hessian is autograd's; the Gauss-Newton matrix is the Fisher matrix under all labels, weighed."""
    done("basis", write_recipe("b.yaml", "epimer_exact", "bert", parameters={"rank": 2}), "b")
    assert json.loads(Path("b/basis.json").read_text())["kind"] == "tagged"
    count = 6
    for kind, labels, measure in (("h", "true", "hessian"), ("g", "true", "ggn"), ("s", "expected", "samples")):
        for name in ("one", "two"):
            options = ["--kind", measure, "--labels", labels, "--samples", count, "--basis", "b"]
            done("curvature", *on("bert", name), *options, "--out", f"{kind}-{name}")
        done("merge", write_recipe("r.yaml", "epimer_exact", "bert", [f"{kind}-one", f"{kind}-two"], basis="b"), kind)
    model = load(made / "bert" / "one", "bert")
    ((inputs, targets),) = batches_of(made, "bert", 0, count, 16)
    name = "bert.pooler.dense.weight"
    step, W = along(Path("b"), name), model.get_parameter(name).detach()

    def mean_loss(x: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, {name: W + step(x)}, (), inputs)
        return loss(outputs, targets).mean()

    H = epimer.Curvature.load("h-one").metrics[name].H
    torch.testing.assert_close(
        H, torch.func.hessian(mean_loss)(torch.zeros(len(H))), rtol=1e-4, atol=1e-5 * float(H.abs().max())
    )
    ggn, fisher = (epimer.Curvature.load(f"{kind}-one").metrics for kind in "gs")
    for key in ggn:
        value = ggn[key].H
        torch.testing.assert_close(value, fisher[key].H, rtol=1e-3, atol=1e-5 * float(value.abs().max()))
    assert_merged(Path("g"), load_file("s/model.safetensors"), made / "bert" / "base", 1e-3)
    assert not torch.allclose(H, ggn[name].H, rtol=0.05, atol=0)


def test_bases_that_do_not_fit(here):
    done("basis", write_recipe("b.yaml", "epimer_kron", "bert", parameters={"rank": 4}), "b")
    done(
        "basis", write_recipe("o.yaml", "epimer_kron", "bert", names=("one", "three"), parameters={"rank": 4}), "other"
    )
    done("basis", write_recipe("v.yaml", "epimer_kron", "vit", parameters={"rank": 4}), "sight")
    for name in ("one", "two"):
        done("curvature", *on("bert", name), "--basis", "b", "--out", f"c-{name}")
    curvature = ["c-one", "c-two"]
    without = write_recipe("r.yaml", "epimer_kron", "bert", curvature)
    Path("b").rename("elsewhere")
    assert_refused(run("merge", without, "out"), "c-one is projected on a basis that is not here", "under 'basis'")
    Path("elsewhere").rename("b")
    another = write_recipe("r.yaml", "epimer_kron", "bert", curvature, basis="other")
    assert_refused(run("merge", another, "out"), "c-one is projected on a basis that is not here", "measure it on this")
    nowhere = write_recipe("r.yaml", "epimer_kron", "bert", curvature, basis="nowhere")
    assert_refused(run("merge", nowhere, "out"), "basis: nowhere is not a basis folder")
    done("curvature", *on("bert", "three"), "--basis", "b", "--out", "c-three")
    others = write_recipe("r.yaml", "epimer_kron", "bert", ["c-one", "c-three"], names=("one", "three"), basis="b")
    assert_refused(run("merge", others, "out"), "b was built from other models, or in another order")
    lower = write_recipe("r.yaml", "epimer_kron", "bert", curvature, basis="b", parameters={"rank": 2})
    assert_refused(run("merge", lower, "out"), "b was built with rank 4, the recipe says 2")
    unused = write_recipe("r.yaml", "fisher", "bert", curvature, basis="b")
    assert_refused(run("merge", unused, "out"), "r.yaml:8: fisher is not merged in a basis; remove 'basis'")
    measure = ["curvature", *on("bert"), "--out", "out", "--basis"]
    assert_refused(run(*measure, "sight"), "sight has a basis for 'vit.encoder.layer.0.", "bert/one does not hold")
    assert_refused(run(*measure, "b", "--kind", "samples"), "on all pairs of a tensor basis", "build a tagged basis")
    assert_refused(run(*measure, "b", "--kind", "ekfac"), "cannot be projected while it is measured")
    assert_refused(run(*measure, "nowhere"), "nowhere is not a basis folder")
    assert_refused(run(*measure[:-1], "--kind", "ggn"), "--kind ggn is measured in a basis only", "`epimer basis`")


def test_bases_that_cannot_be_made(here):
    recipe = write_recipe("b.yaml", "epimer_kron", "bert")
    assert_refused(run("basis", recipe, "out", "--kind", "full"), "a basis is one of tagged, tensor, got 'full'")
    assert_refused(run("basis", recipe, "out", "--rank", 0), "--rank must be at least 1, got 0")
    assert_refused(run("basis", "nowhere.yaml", "out"), "Cannot read the recipe 'nowhere.yaml'")
    assert_refused(run("basis", write_recipe("f.yaml", "ties", "bert"), "out"), "ties is not merged in a basis")
    done("basis", recipe, "b")
    before = Path("b/basis.safetensors").read_bytes()
    ran = run("basis", recipe, "b", "--rank", 2)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "pass --overwrite to replace it" in ran.err
    assert Path("b/basis.safetensors").read_bytes() == before
    done("basis", recipe, "b", "--rank", 2, "--overwrite")
    assert Path("b/basis.safetensors").read_bytes() != before
    assert sorted(left_over(Path("b"))) == ["b"]


# other sources


def test_an_optimisers_state(here, made):
    for name in ("one", "two"):
        torch.manual_seed(0)
        model = load(made / "bert" / name, "bert")
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
        squares = {key: torch.zeros_like(W) for key, W in model.named_parameters()}
        for inputs, targets in batches_of(made, "bert", 0, ROWS, 8):
            optimiser.zero_grad()
            loss(model(**inputs), targets).mean().backward()
            optimiser.step()
            for key, W in model.named_parameters():
                squares[key] = 0.99 * squares[key] + 0.01 * W.grad.square()
        torch.save(optimiser.state_dict(), f"{name}.pt")
        command = ["curvature", f"bert/{name}", "--task", "text-classification", "--optimizer", f"{name}.pt"]
        assert "(optimizer, second moment)" in done(*command, "--out", f"c-{name}")
        found = epimer.Curvature.load(f"c-{name}")
        assert set(found) == set(squares)
        for key, F in squares.items():
            torch.testing.assert_close(found[key].F, F / (1 - 0.99**3), rtol=1e-4, atol=1e-12)
    assert header("c-one")["source"] == "optimizer, second moment"
    assert header("c-one")["samples"] is None
    assert epimer.Curvature.load("c-one").inputs is None
    done("merge", write_recipe("r.yaml", "fisher", "bert", ["c-one", "c-two"]), "merged")
    base, *models = states(made, "bert", "base", "one", "two")
    curvature = [epimer.Curvature.load(f"c-{name}") for name in ("one", "two")]
    expected = epimer.merge_state_dicts(base, models, "fisher", curvature=curvature)
    assert_merged(Path("merged"), expected, made / "bert" / "base")
    other = ["curvature", "gpt2/one", "--task", "causal-lm", "--optimizer", "one.pt", "--out", "out"]
    assert_refused(run(*other), "one.pt does not fit the model: it has 25 parameters, the model 16")
    assert_refused(run(*command, "--layers", "*", "--out", "out"), "--layers is for measuring on --data")
    assert_refused(run(*command, "--data", "reviews.jsonl", "--out", "out"), "give either --data")


def test_an_adapter_over_its_base(here, made):
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(load(made / "llama" / "base", "llama"), config).save_pretrained("adapter")
    done("curvature", "llama/base+adapter", *on("llama")[1:], "--labels", "true", "--out", "c-one")
    whole = peft.PeftModel.from_pretrained(load(made / "llama" / "base", "llama"), "adapter").merge_and_unload().eval()
    batches = list(batches_of(made, "llama", 0, ROWS, 16))
    expected = epimer.estimate_curvature(whole, batches, loss, labels="true", progress=False)
    assert_same(epimer.Curvature.load("c-one"), expected)
    done("curvature", *on("llama", "two"), "--labels", "true", "--out", "c-two")
    recipe = yaml.safe_load(Path(write_recipe("r.yaml", "epimer_kron", "llama", ["c-one", "c-two"])).read_text())
    recipe["models"][0]["model"] = "llama/base+adapter"
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    done("merge", "r.yaml", "out")
    base, two = states(made, "llama", "base", "two")
    curvature = [expected, by_hand(made, "llama", "two", labels="true")[0]]
    merged = epimer.merge_state_dicts(base, [whole.state_dict(), two], "epimer_kron", curvature=curvature)
    assert_merged(Path("out"), merged, made / "llama" / "base")
    assert_refused(
        run("curvature", "adapter", *on("llama")[1:], "--out", "x"), "write it as BASE+adapter", out=Path("x")
    )


def test_the_sum_over_processes(here, measured):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    ran = start(*torchrun, EPIMER, "curvature", *on("bert"), "--labels", "true", "--out", "out", cwd=here)
    assert ran.code == 0, ran.err
    assert ran.out.count("out: kronecker of 8 tensors") == 1
    whole = measured / "bert-kronecker-one"
    assert_same(epimer.Curvature.load("out"), epimer.Curvature.load(whole))
    together, alone = said("out"), said(whole)
    assert (together["inputs"].pop("samples"), alone["inputs"].pop("samples")) == (ROWS // 2, ROWS)  # the first's share
    assert together == alone
    kept, every = (epimer.Curvature.load(one).inputs.tensors["input_ids"] for one in ("out", whole))
    assert torch.equal(kept, every[::2, : kept.shape[1]])


# what is refused


def lines(*rows: object) -> str:
    Path("bad.jsonl").write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return "bad.jsonl"


FINE = {"text": "the cat sat", "label": 0}
BAD_ROWS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "no rows": ((), ("bad.jsonl holds no rows",)),
    "no column of texts": (({"said": "the cat", "label": 1},), ("bad.jsonl has no column 'text' or", "--text")),
    "no column of labels": (({"text": "the cat"},), ("bad.jsonl has no column 'label' or 'labels'", "--label")),
    "a label too high": ((FINE, {"text": "a dog", "label": 3}), ("line 2 has label 3", "3 classes are 0 to 2")),
    "a negative label": ((FINE, {"text": "a dog", "label": -1}), ("line 2 has label -1", "0 to 2")),
    "a class that is not": ((FINE, {"text": "a dog", "label": "goood"}), ("line 2 has label 'goood'", "mean 'good'?")),
    "a label that is none": ((FINE, {"text": "a dog", "label": 0.5}), ("line 2 has label 0.5", "number or name")),
    "a row without a label": ((FINE, {"text": "a dog"}), ("bad.jsonl line 2 has no label in 'label'",)),
    "an empty text": ((FINE, {"text": " ", "label": 1}), ("bad.jsonl line 2 has an empty text",)),
    "a text that is none": ((FINE, {"text": 7, "label": 1}), ("bad.jsonl line 2 has 7 in 'text', expected a text",)),
    "no JSON": ((FINE, "{nope"), ("bad.jsonl line 2 is not JSON",)),
    "no JSON far down": ((*[FINE] * 150, "{nope"), ("bad.jsonl line 151 is not JSON",)),
    "no object": ((FINE, "[1, 2]"), ("bad.jsonl line 2 is [1, 2], expected an object",)),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(here, case):
    rows, words = BAD_ROWS[case]
    command = ["curvature", "bert/one", "--task", "text-classification", "--labels", "true", "--out", "out"]
    assert_refused(run(*command, "--data", lines(*rows)), *words)


OPTIONS: dict[str, tuple[list[object], tuple[str, ...]]] = {
    "task": (["--task", "causallm"], ("--task must be one of", "got 'causallm'. Did you mean 'causal-lm'?")),
    "kind": (["--kind", "kron"], ("--kind must be one of", "got 'kron'. Did you mean 'kronecker'?")),
    "labels": (["--labels", "real"], ("--labels must be one of true, model, expected, got 'real'",)),
    "sequence": (["--sequence", "mean"], ("--sequence must be one of expand, reduce, got 'mean'",)),
    "pooling": (["--pooling", "max"], ("--pooling must be one of auto, pooler, cls, mean, got 'max'",)),
    "dtype": (["--dtype", "fp16"], ("--dtype must be one of", "Did you mean 'float16'?")),
    "device": (["--device", "gpu"], ("--device must be auto, cpu, cuda or cuda:N, got 'gpu'",)),
    "samples": (["--samples", 0], ("--samples must be at least 1, got 0",)),
    "no number": (["--samples", "all"], ("Invalid value for '--samples'",)),
    "passes": (["--passes", 0], ("--passes must be at least 1, got 0",)),
    "batch size": (["--batch-size", 0], ("--batch-size must be at least 1, got 0",)),
    "fraction": (["--fraction", 5], ("--fraction must be above 0 and at most 1, got 5",)),
    "pattern": (["--layers", "query"], ("bert/one has no tensor 'query'", "a glob over the whole name")),
    "only norms": (["--layers", "*.LayerNorm.*"], ("none of the chosen tensors can be measured as kronecker",)),
    "data": (["--data", "nowhere.jsonl"], ("nowhere.jsonl does not exist",)),
    "no data": (["--data", "head.safetensors"], ("head.safetensors is not data that can be read",)),
    "both": (["--optimizer", "optimizer.pt"], ("give either --data, to measure on, or --optimizer",)),
    "head": (["--head", "bert/one/model.safetensors"], ("the head bert/one/model.safetensors holds 'bert.",)),
    "split": (["--split", "test"], ("reviews.jsonl is one file, of which --split test cannot be chosen",)),
    "column": (["--text", "said"], ("reviews.jsonl has no column 'said' for the text",)),
    "unknown": (["--sample", 3], ("No such option: --sample",)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(here, case):
    options, words = OPTIONS[case]
    assert_refused(run("curvature", *on("bert"), *options, "--out", "out"), *words)


def test_what_is_missing(here):
    task = ["--task", "text-classification"]
    assert_refused(run("curvature", "bert/one", *task, "--out", "out"), "give either --data")
    assert_refused(run("curvature", "bert/one", "--data", "reviews.jsonl", "--out", "out"), "Missing option '--task'")
    assert_refused(run("curvature", "bert/one", *task, "--data", "reviews.jsonl"), "Missing option '--out'")
    assert_refused(run("curvature", "./none", *task, "--data", "reviews.jsonl", "--out", "out"), "./none")


def test_factors_of_another_library_are_imported(here):
    """Our own factors as sums in kronfluence's files, under the layers' names: the same curvature again."""
    done("curvature", *on("llama"), "--out", "own")
    measured = epimer.Curvature.load("own")
    layers = {name.removesuffix(".weight"): metric for name, metric in measured.items()}
    tokens = {layer: torch.tensor([measured.provenance.counts[f"{layer}.weight"]]) for layer in layers}
    Path("factors_x").mkdir()
    for side, factors in (
        ("activation", {layer: metric.A * tokens[layer] for layer, metric in layers.items()}),
        ("gradient", {layer: metric.G * ROWS for layer, metric in layers.items()}),
    ):
        save_file(factors, f"factors_x/{side}_covariance.safetensors")
        save_file(tokens, f"factors_x/num_{side}_covariance_processed.safetensors")
    how = ("curvature", "llama/one", "--task", "causal-lm", "--import", "factors_x")
    assert "factors of kronfluence" in done(*how, "--samples", ROWS, "--out", "imported.curv")
    found = epimer.Curvature.load("imported.curv")
    assert list(found) == list(measured)
    assert found.provenance.model == measured.provenance.model
    for name, metric in found.items():
        assert torch.allclose(metric.A, measured[name].A, rtol=1e-5, atol=1e-7)
        assert torch.allclose(metric.G, measured[name].G, rtol=1e-5, atol=1e-9)
    assert_refused(run(*how, "--data", "lines.txt", "--out", "out"), "give either --data", "--import")
    assert_refused(run(*how, "--kind", "diagonal", "--out", "out"), "--import gives Kronecker factors")
    assert_refused(run(*how, "--basis", "b", "--out", "out"), "leave it out with --import")


def test_models_that_cannot_be_measured(here, made):
    transformers.BertModel(transformers.BertConfig(**SIZES, **TEXT)).save_pretrained("headless")
    shutil.copy("bert/one/tokenizer.json", "headless")
    command = ["--task", "text-classification", "--data", "reviews.jsonl", "--labels", "true", "--out", "out"]
    assert_refused(
        run("curvature", "headless", *command),
        "headless lacks 'classifier.bias', 'classifier.weight', which would be random numbers",
        "or a trained head with --head",
    )
    assert_refused(run("curvature", "clip/one", *on("vit")[1:], "--out", "out"), "clip/one", "or a head with --head")
    shutil.copytree("bert/one", "sick")
    state = load_file("sick/model.safetensors")
    state["bert.encoder.layer.0.output.dense.weight"][0, :3] = float("nan")
    save_file(state, "sick/model.safetensors", {"format": "pt"})
    assert_refused(
        run("curvature", "sick", *command),
        "sick['bert.encoder.layer.0.output.dense.weight'] holds NaN or Inf in 3 of 384 entries",
    )
    Path("sick/tokenizer.json").unlink()
    Path("sick/tokenizer_config.json").unlink()
    assert_refused(run("curvature", "sick", *command), "sick has no tokenizer")


def test_a_loss_that_is_no_number_names_its_row(here):
    """One word's vector is finite, but its square is not."""
    shutil.copytree("bert/one", "sick")
    state = load_file("sick/model.safetensors")
    state["bert.embeddings.word_embeddings.weight"][IDS["sea"]] = torch.tensor([3e38, -3e38] * 8)
    save_file(state, "sick/model.safetensors", {"format": "pt"})
    data = lines(*[FINE] * 12, {"text": "over the sea", "label": 1}, *[FINE] * 3)
    command = ["--task", "text-classification", "--data", data, "--labels", "true", "--out", "out"]
    for size in (1, 16):
        ran = run("curvature", "sick", *command, "--batch-size", size)
        assert_refused(ran, "the loss of bad.jsonl line 13 is nan")


def test_images_that_cannot_be_decoded(here, made):
    shutil.copytree(made / "pictures", "album")
    broken, whole = Path("album/fine/01.png"), (made / "pictures/fine/01.png").read_bytes()
    command = ["curvature", "vit/one", "--task", "image-classification", "--data", "album", "--out", "out"]
    broken.write_bytes(b"no picture")
    assert_refused(start(EPIMER, *command, cwd=here), "fine/01.png is not an image that can be decoded")
    broken.write_bytes(whole[:60])
    assert_refused(run(*command), "fine/01.png is not an image that can be decoded ('image file is truncated')")


def test_an_output_that_is_there(here, made):
    command = ["curvature", *on("clip"), "--samples", 4, "--out"]
    done(*command, "out")
    before = stored("out")
    ran = run(*command, "out", "--seed", 1)
    assert (ran.code, ran.err) == (2, "error: out exists; choose another name, or pass --overwrite to replace it.\n")
    assert stored("out") == before
    Path("out/extra").write_text("")
    done(*command, "out", "--seed", 1, "--overwrite")
    assert stored("out") != before
    files = ["curvature.json", "curvature.safetensors", "head.safetensors", "inputs.safetensors"]
    assert sorted(path.name for path in Path("out").iterdir()) == files
    Path("notes").mkdir()
    Path("notes/diary.txt").write_text("dear diary")
    for place in ("notes", "notes/diary.txt"):
        ran = run(*command, place, "--overwrite")
        assert ran.code == 2
        assert ran.err == f"error: {place} exists and is not a folder with curvature.json; choose another name.\n"
    assert Path("notes/diary.txt").read_text() == "dear diary"
    assert_refused(run(*command, "out/curvature.json/deep"), "cannot be written", out=Path("notes/deep"))
    done(*command, "new/folders/out")
    assert stored("new/folders/out") == before


# stopped runs

WATCHED = """
import sys
from epimer.cli import main

moment, opened = sys.argv.pop(1), 0

def watch(event, args):
    global opened
    if event != "open":
        return
    path = str(args[0])
    opened += path.endswith("lines.txt")
    if opened == 12 if moment == "measuring" else path.endswith(".epimer-draft/curvature.json"):
        opened += 1
        print("here", flush=True)
        sys.stdin.readline()

sys.addaudithook(watch)
main()
"""


def stopped(moment: str, number: signal.Signals, *arguments: str) -> Ran:
    """Start a command, wait until it comes to a moment, where it waits itself, and send it a signal."""
    command = [sys.executable, "-c", WATCHED, moment, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes) as process:
        assert process.stdout.readline() == "here\n", process.stderr.read()
        process.send_signal(number)
        out, err = process.communicate(timeout=LONGEST)
    return Ran(process.returncode, out, err)


@pytest.mark.parametrize("moment", ["measuring", "saving"])
def test_an_interrupted_run_leaves_nothing(here, moment):
    ran = stopped(moment, signal.SIGINT, "curvature", *on("llama"), "--batch-size", "1", "--out", "out")
    assert ran == (130, "", "stopped; nothing was written.\n")
    assert not left_over(Path("out"))


def test_a_killed_run_leaves_no_folder_and_is_no_hindrance(here):
    command = ["curvature", *on("llama"), "--out", "out"]
    ran = stopped("saving", signal.SIGKILL, *command)
    assert ran.code == -signal.SIGKILL
    assert sorted(left_over(Path("out"))) == [".out.epimer-draft", ".out.epimer-draft.lock"]
    done(*command)
    assert left_over(Path("out")) == ["out"]
    assert header("out")["samples"] == ROWS
