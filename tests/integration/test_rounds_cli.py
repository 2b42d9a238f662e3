"""Recipes merged by the inputs that curvature keeps: `scale: auto`, `rounds`, `refine`; `sweep` without --eval.

Divergences are computed anew, text by text, by transformers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import epimer
from epimer.cli.app import STARTED
from epimer.engine.options import ENGINES
from epimer.engine.threads import Threads

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

import tiny  # noqa: E402
from commands import assert_done, assert_refused, run  # noqa: E402

SAMPLES = 32


def done(*arguments: object) -> str:
    """Run a command that must succeed; return the words that it printed."""
    return " ".join(assert_done(run(*arguments)).split())


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A base, two classifiers, their suite, and curvature: with its inputs, on others, and without any."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    tiny.write_suite(root / "suite.yaml")
    for task in tiny.TASKS:
        on = ["--task", "text-classification", "--data", root / f"{task}-train.jsonl", "--text", "sentence", "-q"]
        for name, more in {
            "curvature": (),
            "other": ("--seed", "1"),
            "bare": ("--no-inputs",),
            "diagonal": ("--kind", "diagonal"),
        }.items():
            done("curvature", root / task, *on, "--samples", SAMPLES, *more, "-o", root / f"{name}-{task}")
    return root


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_refused_line(*arguments: object) -> str:
    """Run a command that must be refused; return what it says."""
    ran = run(*arguments)
    assert_refused(ran)
    return ran.err


def write(made: Path, curvature: str | None = "curvature", **changes: Any) -> Path:
    """Write a recipe beside the models."""
    models = [{"model": task} | ({"curvature": f"{curvature}-{task}"} if curvature else {}) for task in tiny.TASKS]
    recipe = {"merge_method": "epimer_kron", "base_model": "base", "models": models, "rules": tiny.RULES} | changes
    (made / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return made / "recipe.yaml"


def record(out: str) -> dict:
    return json.loads(Path(out, "epimer.json").read_text())


@torch.no_grad()
def by_hand(made: Path, out: str, part: str) -> tuple[float, float]:
    """Return 1 - (disagreement + KL) and the KL of a merge from each task's own model, both means over tasks."""
    disagreement = divergence = 0.0
    for task in tiny.TASKS:
        kept = load_file(made / f"curvature-{task}" / "inputs.safetensors")
        own = transformers.BertForSequenceClassification.from_pretrained(made / task).eval()
        merged, count = tiny.loaded(made, task, Path(out)), 0
        misses = total = 0.0
        for i in range(SAMPLES):
            if (i % 4 == 3) is (part == "test"):
                ids = kept["input_ids"][i : i + 1].long()[:, : int(kept["attention_mask"][i].sum())]
                p, q = (model(ids).logits.double().log_softmax(1) for model in (own, merged))
                misses += float(p.argmax() != q.argmax())
                total += float((p.exp() * (p - q)).sum())
                count += 1
        disagreement += misses / count / len(tiny.TASKS)
        divergence += total / count / len(tiny.TASKS)
    return 1 - disagreement - divergence, divergence


def test_the_scale_is_chosen_by_kept_inputs(made, here):
    said = done("merge", write(made, scale="auto"), "out")
    found = record("out")
    scale = found["parameters"]["scale"]
    orders = {}
    for one in {0.7, 1.0, scale, 1.5}:
        done("merge", write(made, scale=one), f"at-{one}", "-q")
        orders[one] = by_hand(made, f"at-{one}", "val")[0]
    assert max(orders, key=orders.get) == scale
    why = f"epimer_kron at scale {scale:g}: divergence {1 - orders[scale]:.3f} from the models on their inputs"
    assert f"auto took {why} without labels." in said
    assert (found["unlabelled"], found["choices"]) == (SAMPLES, [f"{why} without labels"])
    same = Path(f"at-{scale}", "model.safetensors").read_bytes()
    assert Path("out", "model.safetensors").read_bytes() == same
    assert record(f"at-{scale}").get("unlabelled") is None


CHOICES = {
    "scale": {"scale": "auto"},
    "method": {"merge_method": "auto"},
    "suite": {"scale": "auto", "eval": "suite.yaml"},
    "rounds": {"rounds": 1},
    "refine": {"refine": 1},
}


@pytest.fixture
def threads_seen() -> Iterator[list[int]]:
    """Return torch's number of threads at every call of a network, as long as the test runs."""
    seen: list[int] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    yield seen
    hook.remove()


@pytest.mark.parametrize("choice", CHOICES)
def test_threads_reach_the_networks_that_choose(made, here, threads_seen, choice):
    recipe, before = write(made, **CHOICES[choice]), torch.get_num_threads()
    done("merge", recipe, "three", "--threads", 3)
    assert set(threads_seen) == {3}
    threads_seen.clear()
    done("merge", recipe, "six", "--threads", 3, "--workers", 2)
    assert set(threads_seen) == {6}
    assert torch.get_num_threads() == before


def test_threads_of_a_sweep_are_its_workers(made, here, threads_seen):
    done("sweep", write(made), "--methods", "average", "--scale", "1", "--workers", 3)
    assert set(threads_seen) == {3}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--device", "cuda:99", "device 'cuda:99' cannot be used here"),
        ("--device", "meta", "device 'meta' cannot be used: it has no data"),
        ("--max-memory", "1MB", "max_memory of 1.0 MB is too little"),
        ("--threads", "0", "The 'threads' parameter must be an integer at least 1."),
        ("--engine", "cluster", "There is no engine 'cluster'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_chosen(
    made, here, threads_seen, choice, option, value, words
):
    assert_refused(run("merge", write(made, **CHOICES[choice]), "out", option, value), words)
    assert threads_seen == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("choice", CHOICES)
def test_every_merge_while_choosing_has_the_engine_and_its_limits(made, here, monkeypatch, choice):
    started = []

    class Noted(Threads):
        def __init__(self, devices, *, threads=1, memory=None):
            started.append((len(devices), threads, memory))
            super().__init__(devices, threads=threads, memory=memory)

    monkeypatch.setitem(ENGINES, "noted", Noted)
    options = ["--engine", "noted", "--workers", 3, "--threads", 2, "--max-memory", "3GB"]
    done("merge", write(made, **CHOICES[choice]), "out", *options)
    assert len(started) > 1
    assert {(workers, threads) for workers, threads, _ in started} == {(3, 2)}
    assert max(memory for _, _, memory in started) < 3e9


@pytest.mark.parametrize("choice", CHOICES)
def test_the_time_is_that_of_the_whole_command(made, here, choice):
    recipe, began = write(made, **CHOICES[choice]), time.perf_counter()
    starting = began - STARTED  # of this process, which runs many commands
    said = done("merge", recipe, "out", "--record", "record.json")
    took = time.perf_counter() - began
    timings = json.loads(Path("record.json").read_text())["timings"]
    total, parts = timings.pop("total"), {"start", "plan", "choose", "prepass", "merge", "write"}
    assert timings.keys() == parts | ({"measure"} if choice in ("rounds", "refine") else set())
    assert sum(timings.values()) == pytest.approx(total)
    assert 0.9 * took - 0.3 < total - starting < took + 0.01
    assert min(timings.values()) > 0
    assert f" in {total:.1f} s (starting {timings['start']:.1f}, " in said
    shown = f"choosing {timings['choose']:.1f}" in said
    assert shown == (timings["choose"] > 0.05)  # shorter parts are left out of the line
    assert "timings" not in record("out")


def test_networks_that_do_not_fit_are_refused_before_anything_is_chosen(made, here, threads_seen):
    """Every tensor fits: what comes on top are networks, their inputs and copies of the model."""
    plain = float(re.search(r"give ([0-9.]+)GB", run("merge", write(made), "out", "--max-memory", "1MB").err)[1])
    asked = assert_refused_line("merge", write(made, scale="auto"), "out", "--max-memory", "1MB")
    assert re.search(r"'comparing merges by inputs' needs [0-9.]+ kB beside", asked)
    assert float(re.search(r"give ([0-9.]+)GB", asked)[1]) >= plain - 0.05
    assert threads_seen == []


def test_the_record_says_which_inputs_were_used_for_what(made, here):
    done("merge", write(made, scale="auto", rounds=1, refine=1), "out", "-q")
    assert record("out")["inputs"] == {"scale": 24, "curvature": 24, "steps": 24, "validation": 8}
    done("merge", write(made, scale="auto"), "scaled", "-q")
    assert record("scaled")["inputs"] == {"scale": 24}
    done("merge", write(made), "plain", "-q")
    assert "inputs" not in record("plain")


def test_rounds_and_steps_are_merged_written_and_told(made, here):
    rough = {"scale": "auto", "parameters": {"rank": 1, "anchor": "tsv"}}  # a merge that steps can help
    recipe = write(made, **rough, rounds=1, refine=2)
    said = done("merge", recipe, "out")
    found = record("out")
    scale, (first, round_1, steps) = found["parameters"]["scale"], found["choices"]
    assert found["unlabelled"] == SAMPLES
    assert first == f"scale {scale:g}, by 24 inputs per task without labels"
    assert all(choice.rstrip(".") in said for choice in found["choices"])
    assert "auto took" not in said  # every round chose: there is one scale, and it is said once
    assert "rounds: 1" in found["recipe"]
    assert "refine: 2" in found["recipe"]

    plain = done("merge", write(made, **rough), "plain")
    assert "auto took" in plain
    done("merge", write(made, **rough, rounds=1), "round", "-q")
    before, after = (by_hand(made, out, "test")[0] for out in ("plain", "round"))
    assert round_1 in record("round")["choices"]
    assert ("given up" in round_1) == (after == before)
    if "given up" not in round_1:
        assert round_1.endswith(f"divergence on validation inputs {1 - before:.4f} -> {1 - after:.4f}.")
        assert after > before
    unrefined, refined = (by_hand(made, out, "test")[1] for out in ("round", "out"))
    assert steps == f"2 natural-gradient steps: KL on validation inputs {unrefined:.4f} -> {refined:.4f}."
    assert refined < unrefined

    model = transformers.BertModel.from_pretrained("out")
    state = load_file(Path("out", "model.safetensors"))
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(model.state_dict()[name], state[f"bert.{name}"])
    base = load_file(made / "base" / "model.safetensors")
    assert torch.equal(state["cls.seq_relationship.bias"], base["cls.seq_relationship.bias"])

    assert "out is already there" in done("merge", write(made, **rough, rounds=1, refine=2), "out")
    assert_refused(run("merge", write(made, "other", **rough, rounds=1, refine=2), "out"), "--overwrite")
    assert_refused(run("merge", write(made, scale=scale), "out"), "--overwrite")


@pytest.mark.parametrize("method", ["tsv", "auto"])
def test_what_was_refined_without_curvature_is_of_its_inputs_too(made, here, method):
    """tsv uses no curvature, but its refinement is by the inputs that were kept with it."""
    rank = {"rank": 2} if method == "tsv" else {}
    said = done("merge", write(made, "diagonal", merge_method=method, refine=1, parameters=rank), "out")
    assert "is ignored" not in said
    assert record("out")["unlabelled"] == SAMPLES
    helped, idle = "1 natural-gradient step: KL on validation inputs ", "no natural-gradient step helped."
    assert record("out")["choices"][-1].startswith(helped if method == "tsv" else (helped, idle))
    assert len(record("out")["choices"]) == (1 if method == "tsv" else 2)
    again = write(made, "diagonal", merge_method=method, refine=1, parameters=rank)
    assert "already there" in done("merge", again, "out")
    taken = record("out")["method"]
    other = "other" if not epimer.describe_method(taken).needs_curvature else "curvature"
    recipe = write(made, other, merge_method=taken, refine=1, parameters=rank)
    assert run("merge", recipe, "out").code == 2


def test_a_scale_chosen_on_validation_data_stays_through_the_rounds(made, here):
    plain = done("merge", write(made, scale="auto", eval="suite.yaml"), "plain")
    said = done("merge", write(made, scale="auto", eval="suite.yaml", rounds=1), "out")
    why = plain[plain.index("auto took") :].split(" on validation data")[0]
    assert why in said
    assert record("out")["parameters"]["scale"] == record("plain")["parameters"]["scale"]
    assert not any(choice.startswith("scale") for choice in record("out")["choices"])


def test_rounds_are_left_out_where_the_chosen_method_has_no_kronecker_curvature(made, here):
    said = done("merge", write(made, "diagonal", merge_method="auto", rounds=1), "out")
    method = record("out")["method"]
    assert f"rounds were left out: {method} does not use kronecker curvature." in said


def test_without_kept_inputs_there_are_no_rounds(made, here):
    for curvature in ("bare", None):
        changes = {"rounds": 1} if curvature else {"merge_method": "tsv", "refine": 1}
        assert_refused(
            run("merge", write(made, curvature, **changes), "out"),
            "'rounds' and 'refine' need the inputs that curvature was measured on; measure it for every model",
        )
    assert list(here.iterdir()) == []


def test_a_sweep_without_an_evaluation_goes_by_kept_inputs(made, here):
    asked = ["--methods", "epimer_kron,average", "--scale", "0.7,1.2"]
    said = done("sweep", write(made), *asked, "--out", "sweep.json", "--keep-best", "best")
    assert "inputs without labels: agreement with each task's own model" in said
    found = json.loads(Path("sweep.json").read_text())
    assert found["eval"] == "inputs without labels"
    orders = {}
    for i, trial in enumerate(found["data"]):
        done("merge", write(made, merge_method=trial["method"], scale=trial["scale"]), f"{i}", "-q")
        orders[i] = by_hand(made, f"{i}", "val")[0]
        assert trial["validation"] - trial["kl"] == pytest.approx(orders[i], abs=1e-4)
    best = max(orders, key=orders.get)
    assert found["best"]["scale"] == found["data"][best]["scale"]
    assert Path("best", "model.safetensors").read_bytes() == Path(f"{best}", "model.safetensors").read_bytes()
    words = ("a sweep needs something to compare merges by: --eval, or curvature of every model that kept its inputs.",)
    for curvature in ("bare", None):
        assert_refused(run("sweep", write(made, curvature, merge_method="tsv")), *words)


@pytest.mark.parametrize("key", ["rounds", "refine"])
@pytest.mark.parametrize("value", ["-1", "1.5", "true", "x", "[1]"])
def test_counts_that_are_none_are_refused_with_their_line(made, here, key, value):
    recipe = write(made)
    recipe.write_text(f"{key}: {value}\n" + recipe.read_text())
    shown = {"x": "'x'", "true": "True"}.get(value, value)
    assert_refused(
        run("merge", recipe, "out"), f"recipe.yaml:1: {key} must be an integer at least 0. Got {shown} instead"
    )


@pytest.mark.parametrize(
    ("key", "method"), [("rounds", "tsv"), ("rounds", "epimer"), ("rounds", "average"), ("refine", "average")]
)
def test_counts_that_a_method_has_no_use_for_are_refused_with_their_line(made, here, key, method):
    recipe = write(made, merge_method=method)
    recipe.write_text(f"{key}: 1\n" + recipe.read_text())
    words = {"rounds": "measure kronecker curvature again, which", "refine": "is for methods with a base, and"}
    assert_refused(run("merge", recipe, "out"), f"recipe.yaml:1: '{key}' {words[key]} {method} ")
