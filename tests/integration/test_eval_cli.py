"""`epimer eval` and `epimer bench` on suites of one's own: YAML files, Python functions, and lm-eval.

The models are tiny and really trained; every score is compared with one that this file computes with transformers
directly, text by text.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
import yaml

import epimer

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import tiny  # noqa: E402
from commands import ENVIRONMENT, Ran, assert_refused, run, start  # noqa: E402
from epimer.cli.bench import EXPERIMENTS as NAMED  # noqa: E402
from epimer.experiments.paper import EXPERIMENTS  # noqa: E402

LLAMAS = ("llama", "poet", "cook")


def found(*arguments: object) -> dict:
    """Run a command that must succeed; return the JSON it prints."""
    ran = run(*arguments, "--json")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    return json.loads(ran.out)


pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a base, two classifiers, their data, a suite, and a merge of the two."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    models = [{"model": str(root / task)} for task in tiny.TASKS]
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(root / "base"),
        "models": models,
        "rules": tiny.RULES,
    }
    epimer.merge(recipe | {"scale": 0.8}, root / "merged")
    tiny.write_suite(root / "suite.yaml")
    return root


def rows_of(here: Path, task: str, split: str = "test") -> list[dict]:
    return tiny.read_jsonl(here / f"{task}-{split}.jsonl")


# suites of classifiers


def test_a_real_process_prints_every_score(here):
    ran = start("eval", "suite.yaml", "--model", "merged", "-o", "found.json", cwd=here)
    assert (ran.code, ran.err) == (0, "")
    wrote = json.loads((here / "found.json").read_text())
    assert [task["name"] for task in wrote["tasks"]] == list(tiny.TASKS)
    for task in wrote["tasks"]:
        rows = rows_of(here, task["name"])
        own = transformers.BertForSequenceClassification.from_pretrained(here / task["name"])
        assert task["score"] == pytest.approx(tiny.judge(tiny.loaded(here, task["name"], here / "merged"), rows)[0])
        assert task["base"] == pytest.approx(tiny.judge(tiny.loaded(here, task["name"], here / "base"), rows)[0])
        assert task["fine_tuned"] == pytest.approx(tiny.judge(own, rows)[0])
        assert task["samples"] == len(rows)
        assert task["low"] <= task["score"] <= task["high"]
        line = next(line for line in ran.out.splitlines() if line.split()[:1] == [task["name"]])
        shown = f"{100 * task['score']:.1f} [{100 * task['low']:.1f}, {100 * task['high']:.1f}]"
        assert " ".join(line.split()[2:5]) == shown
        assert line.split()[5:] == [f"{100 * task['base']:.1f}", f"{100 * task['fine_tuned']:.1f}"]
    scores = [task["score"] for task in wrote["tasks"]]
    assert wrote["average"]["score"] == pytest.approx(sum(scores) / 2)
    made = {
        "epimer": epimer.__version__,
        "torch": torch.__version__,
        "date": str(date.today()),
        "limit": None,
    }
    assert wrote["made"] == {**wrote["made"], **made}
    assert wrote["worst"]["score"] == min(scores)
    assert wrote["worst"]["task"] == list(tiny.TASKS)[scores.index(min(scores))]
    assert max(task["fine_tuned"] for task in wrote["tasks"]) > 0.9, "the models have learned their tasks"
    assert sorted(path.name for path in here.iterdir() if "found" in path.name) == ["found.json"]


def test_losses_are_shown_as_losses(here):
    suite = tiny.write_suite(here / "loss.yaml", tiny.suite_of(metric="loss", batch_size=7))
    wrote = found("eval", suite, "--model", "merged", "--split", "val")
    for task in wrote["tasks"]:
        loss = tiny.judge(tiny.loaded(here, task["name"], here / "merged"), rows_of(here, task["name"], "val"))[1]
        assert task["score"] == pytest.approx(loss, rel=1e-5)
        assert 0 < task["low"] < task["score"] < task["high"]
    assert wrote["worst"]["score"] == max(task["score"] for task in wrote["tasks"])
    printed = run("eval", suite, "--model", "merged", "--split", "val", "--no-references").out
    assert "fine-tuned" not in printed
    assert "-" not in printed.splitlines()[2], "a loss has no sign"


def test_tasks_of_different_metrics_have_no_average(here):
    described = tiny.suite_of()
    described["tasks"][0]["metric"] = "loss"
    suite = tiny.write_suite(here / "mixed.yaml", described)
    wrote = found("eval", suite, "--model", "merged", "--no-references")
    assert "average" not in wrote
    assert "base" not in wrote["tasks"][0]
    ran = run("bench", suite, "-o", "out", "-q")
    assert_refused(ran, "words", "accuracy, loss", "give all tasks one metric")


def test_an_evaluation_can_be_put_on_a_page(here):
    assert run("eval", "suite.yaml", "--model", "merged", "-o", "eval.json", "-q").code == 0
    wrote = json.loads((here / "eval.json").read_text())
    assert run("report", "eval.json", "-o", "page.html", "-q").code == 0
    page = (here / "page.html").read_text()
    assert f"{100 * wrote['average']['score']:.1f}" in page
    assert all(task["name"] in page for task in wrote["tasks"])


def test_benches_of_losses_show_losses(here):
    suite = tiny.write_suite(here / "loss.yaml", tiny.suite_of(metric="loss"))
    assert run("bench", suite, "--experiment", "performance", "-o", "out", "-q").code == 0
    page = (here / "out" / "performance.md").read_text()
    assert "words: loss of merged models" in page
    assert "in loss, so that less is better" in page
    loss = tiny.judge(tiny.loaded(here, "pace", here / "base"), rows_of(here, "pace"))[1]
    assert f"| {loss:.3f} |" in next(line for line in page.splitlines() if line.startswith("| base |"))
    record = json.loads((here / "out" / "performance.json").read_text())
    assert (record["suite"], record["metric"], record["made"]["seed"]) == ("words", "loss", 0)
    tasks = {row["method"]: row for row in record["data"]}["base"]["tasks"]
    assert tasks["pace"] == pytest.approx(-loss, rel=1e-5), "in data higher is better"
    rows = {row[0]: row for row in record["rows"]}
    better = [row for row in record["data"] if row.get("difference", 0) > 0]
    assert all(rows[row["method"]][-1].startswith("-") for row in better)
    figure = (here / "out" / "performance.svg").read_text()
    assert ">loss</text>" in figure, "what the axis is called"
    assert ">−" not in figure, "a loss has no sign"
    assert_refused(run("bench", suite, "--experiment", "worst-task", "-o", "other"), "'worst-task'", "a loss has none")


def test_all_leaves_out_what_does_not_fit(here):
    suite = tiny.write_suite(here / "loss.yaml", tiny.suite_of(metric="loss"))
    assert run("bench", suite, "--experiment", "all", "-o", "out", "-q").code == 0
    assert NAMED.split(", ") == list(EXPERIMENTS)
    written = {path.name for path in (here / "out").iterdir()}
    kinds = [name for name in EXPERIMENTS if name not in ("landscape", "worst-task")]
    assert written == {f"{name}.{kind}" for name in kinds for kind in ("json", "md", "svg")}
    page = (here / "out" / "performance.md").read_text()
    assert "Left out: 'landscape' needs 3 tasks at least" in page
    assert "Left out: 'worst-task' tells what share" in page
    samples = json.loads((here / "out" / "samples.json").read_text())["data"]
    assert max(row["samples"] for row in samples) == len(rows_of(here, "pace", "train"))
    assert all(json.loads(path.read_text())["title"].startswith("words: ") for path in (here / "out").glob("*.json"))


def test_one_task_is_too_few_to_merge(here):
    described = tiny.suite_of()
    suite = tiny.write_suite(here / "one.yaml", described | {"tasks": described["tasks"][:1]})
    for name in ("performance", "samples", "tasks", "all"):
        assert_refused(run("bench", suite, "--experiment", name, "-o", "out"), "needs 2 tasks at least", "there are 1")
    assert not (here / "out").exists()


def test_where_results_cannot_go_is_said_before_any_work(here, monkeypatch):
    (here / "file").write_text("kept")
    monkeypatch.setattr("epimer.experiments.run.open_suite", lambda *_, **__: pytest.fail("the suite was opened"))
    assert_refused(run("bench", "suite.yaml", "-o", "file"), "file cannot be written", "is no folder")
    assert_refused(run("bench", "suite.yaml", "-o", "file/more/out"), "is no folder")
    assert (here / "file").read_text() == "kept"


def test_a_model_with_more_layers_is_refused(here):
    config = transformers.AutoConfig.from_pretrained(here / "base")
    config.num_hidden_layers += 1
    transformers.BertForPreTraining(config).save_pretrained(here / "deep")
    said = ("deep has 16 tensors like those of words's base but of other numbers", "give a model with as many layers")
    assert_refused(run("eval", "suite.yaml", "-m", "deep"), *said)


def test_a_limit_takes_the_same_samples_every_time(here):
    one = found("eval", "suite.yaml", "--model", "merged", "--limit", "9")
    assert [task["samples"] for task in one["tasks"]] == [9, 9]
    assert one == found("eval", "suite.yaml", "--model", "merged", "--limit", "9")


def test_labels_by_name_and_other_columns(here):
    described = tiny.suite_of()
    for entry in described["tasks"]:
        words = tiny.TASKS[entry["name"]]
        for split in ("val", "test"):
            rows = [{"t": row["sentence"], "y": words[row["label"]]} for row in rows_of(here, entry["name"], split)]
            tiny.write_jsonl(here / f"named-{entry['name']}-{split}.jsonl", rows)
        entry["data"] = {"test": f"named-{entry['name']}-test.jsonl", "text": "t", "label": "y"}
    suite = tiny.write_suite(here / "named.yaml", described)
    assert found("eval", suite, "--model", "merged")["tasks"] == found("eval", "suite.yaml", "-m", "merged")["tasks"]


def test_an_adapter_on_the_base_is_a_model(here):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    base = transformers.BertForPreTraining.from_pretrained(here / "base")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(here / "adapter")
    adapted.merge_and_unload().save_pretrained(here / "whole")
    assert (
        found("eval", "suite.yaml", "-m", "base+adapter")["tasks"]
        == found("eval", "suite.yaml", "-m", "whole")["tasks"]
    )


def test_bench_runs_on_it_as_on_any_suite(here):
    ran = run("bench", "suite.yaml", "--experiment", "performance", "-o", "out", "-q")
    assert (ran.code, ran.err) == (0, "")
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (here / "out" / "performance.md").read_text().splitlines()
        if line.startswith("|")
    ]
    table = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    states = [load_file(here / task / "model.safetensors") for task in tiny.TASKS]
    base = {name: W for name, W in load_file(here / "base" / "model.safetensors").items() if name.startswith("bert.")}
    models = [{name: state[name] for name in base} for state in states]
    for method in ("task_arithmetic", "tsv"):
        scale = float(table[method]["scale"].rstrip("*"))
        (here / method).mkdir()
        save_file(
            dict(epimer.merge_state_dicts(base, models, method, scale=scale)), here / method / "model.safetensors"
        )
        for task in tiny.TASKS:
            expected = tiny.judge(tiny.loaded(here, task, here / method), rows_of(here, task))[0]
            assert table[method][task] == f"{100 * expected:.1f}"
    for task in tiny.TASKS:
        own = transformers.BertForSequenceClassification.from_pretrained(here / task)
        assert table["fine-tuned"][task] == f"{100 * tiny.judge(own, rows_of(here, task))[0]:.1f}"
        assert (
            table["base"][task]
            == f"{100 * tiny.judge(tiny.loaded(here, task, here / 'base'), rows_of(here, task))[0]:.1f}"
        )
    assert {"fisher", "epimer", "epimer_kron", "epimer_exact"} <= table.keys()


def test_experiments_that_choose_need_val(here):
    described = tiny.suite_of()
    del described["tasks"][1]["data"]["val"]
    suite = tiny.write_suite(here / "short.yaml", described)
    ran = run("bench", suite, "-o", "out", "-q")
    assert_refused(ran, "words", "'pace' has no val data", "'performance' chooses")
    assert not (here / "out").exists()
    assert found("eval", suite, "-m", "merged")["tasks"] == found("eval", "suite.yaml", "-m", "merged")["tasks"]
    assert_refused(run("eval", suite, "-m", "merged", "--split", "val"), "'pace' has no val data")


# what is refused


def changed(here: Path, change) -> Path:
    described = tiny.suite_of()
    change(described)
    return tiny.write_suite(here / "changed.yaml", described)


REFUSED = [
    (lambda s: s.update(taks=[]), "changed.yaml:", "unknown key 'taks'", "Did you mean 'tasks'?"),
    (lambda s: s["tasks"][0].update(metrc="loss"), "tasks[0]", "Did you mean 'metric'?"),
    (lambda s: s["tasks"][0]["data"].update(txt="a"), "tasks[0].data", "Did you mean 'text'?"),
    (lambda s: s.update(metric="acuracy"), "metric must be one of accuracy, loss", "Did you mean 'accuracy'?"),
    (lambda s: s["tasks"][1].update(metric="perplexity"), "tasks[1].metric must be one of accuracy, loss"),
    (lambda s: s.update(task="classification"), "task must be one of causal-lm, text-classification"),
    (lambda s: s.pop("base"), "the suite has no 'base'"),
    (lambda s: s.update(tasks=[]), "tasks must be a list of tasks"),
    (lambda s: s.update(batch_size=0), "batch_size must be an integer, at least 1"),
    (lambda s: s["tasks"][0].update(model="./nowhere"), "changed.yaml:8", "nowhere does not exist"),
    (lambda s: s["tasks"][0]["data"].update(test="nowhere.jsonl"), "nowhere.jsonl does not exist"),
    (lambda s: s["tasks"][0]["data"].update(test="animal-val.jsonl"), "val and test are the same data"),
    (
        lambda s: s["tasks"][0]["data"].update(test="./no/../animal-val.jsonl"),
        "changed.yaml:",
        "are the same data; what",
    ),
    (lambda s: s["tasks"][0]["data"].update(text="words"), "no column 'words' for the text", "'sentence'"),
    (lambda s: s["tasks"][0].update(data={}), "tasks[0].data names no data"),
    (
        lambda s: s["tasks"][0].update(head="nowhere.safetensors"),
        "changed.yaml:14: the head",
        "nowhere.safetensors does not exist",
    ),
    (lambda s: s["tasks"][0].update(pooling="cls"), "'pooling' is what a 'head' reads"),
    (lambda s: s["tasks"][1].update(name="animal"), "two tasks are called 'animal'"),
    (lambda s: s.pop("classifier"), "animal has 'classifier.bias', 'classifier.weight'", "name them in 'classifier'"),
    (lambda s: s.update(classifier=["score.*"]), "has no tensor 'score.*'", "patterns such as 'classifier.*'"),
    (lambda s: s["tasks"][0].update(classes=["cat", "dog"]), "the model has 3 classes, but 'classes' names 2"),
    (
        lambda s: s["tasks"][0]["data"].update(test="pace-test.jsonl", label="sentence"),
        "pace-test.jsonl line 1",
        "class",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[1] for case in REFUSED])
def test_a_wrong_suite_is_refused_in_one_line(here, case):
    change, *words = case
    suite = changed(here, change)
    assert_refused(run("eval", suite, "--model", "merged", "-o", "found.json"), *words)
    assert not [path.name for path in here.iterdir() if "found" in path.name]


def test_wrong_labels_are_named_by_line(here):
    rows = rows_of(here, "pace")
    for label, words in (("slov", ("line 2", "'slov'", "Did you mean 'slow'?")), (7, ("line 2", "label 7", "0 to 1"))):
        rows[1]["label"] = label
        tiny.write_jsonl(here / "wrong.jsonl", rows)
        suite = changed(here, lambda s: s["tasks"][1]["data"].update(test="wrong.jsonl"))
        assert_refused(run("eval", suite, "-m", "merged", "-o", "found.json"), "wrong.jsonl", *words)
        assert not (here / "found.json").exists()


def test_a_model_that_does_not_fit_is_refused(here):
    state = load_file(here / "merged" / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    for change, words in (
        ({name: None}, ("lacks 1 of the", name)),
        ({name: torch.zeros(3, 3)}, ("has shape (3, 3), expected (16, 24)", name)),
        ({name: state[name] * math.nan}, ("NaN or Inf in 384 of 384 entries", name)),
    ):
        (here / "other").mkdir(exist_ok=True)
        other = {n: W for n, W in (state | change).items() if W is not None}
        save_file(other, here / "other" / "model.safetensors")
        assert_refused(run("eval", "suite.yaml", "-m", "other"), "other", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["suite.yaml"], ("--model",)),
        (["--model", "merged"], ("SUITE.yaml", "--harness lm-eval")),
        (["suite.yaml", "-m", "merged", "--harness", "lm-eval"], ("either a suite",)),
        (["suite.yaml", "-m", "merged", "--tasks", "x"], ("--tasks is for --harness",)),
        (["suite.yaml", "-m", "merged", "--split", "train"], ("--split must be one of test, val",)),
        (["suite.yaml", "-m", "merged", "--limit", "0"], ("--limit must be at least 1",)),
        (["suite.yaml", "-m", "merged", "--device", "gpu"], ("--device must be auto",)),
        (["suite.yaml", "-m", "merged", "-o", "no/where.json"], ("there is no folder no",)),
        (["suite.yaml", "-m", "merged", "-o", "merged"], ("it is a folder",)),
        (["suite.yaml", "-m", "nothing/here/at/all"], ("does not exist",)),
        (["nowhere.yaml", "-m", "merged"], ("Cannot read the suite 'nowhere.yaml'",)),
        (["glyphs9", "-m", "merged"], ("no suite 'glyphs9'", "Did you mean 'glyphs8'?", "module:function")),
        (["-m", "merged", "--harness", "lmeval", "--tasks", "x"], ("Did you mean 'lm-eval'?",)),
    ],
)
def test_wrong_options(here, arguments, words):
    assert_refused(run("eval", *arguments), *words)


def test_a_device_that_is_not_there_or_would_not_be_used_is_refused(here, monkeypatch):
    for count, device, words in ((0, "cuda", "no CUDA device"), (2, "cuda:2", "this machine has cuda:0, cuda:1;")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        ran = run("eval", "suite.yaml", "-m", "merged", "--device", device)
        assert_refused(ran, f"error: --device {device}: ", words)
        for suite in ("glyphs8", "my_own_suite:make"):
            ran = run("eval", suite, "-m", "merged", "--device", device)
            assert_refused(ran, "--device is for suites in YAML files", f"leave it out for {suite}")
    (here / "my_own_suite.py").write_text(MODULE)
    save_file({"weight": torch.eye(2), "bias": torch.zeros(2)}, here / "model.safetensors")
    monkeypatch.syspath_prepend(here)
    assert found("eval", "my_own_suite:make", "-m", "model.safetensors", "--device", "cpu")["suite"] == "columns"


# heads, images and language models


def with_head(model, ids):
    return model(input_ids=ids).pooler_output @ model.head[0].T + model.head[1]


def test_heads_outside_the_models(here):
    torch.manual_seed(5)
    base = transformers.BertModel(transformers.BertConfig(**tiny.SIZES, **tiny.TEXT))
    base.save_pretrained(here / "bare")
    tasks, models = [], {}
    for task, words in tiny.TASKS.items():
        torch.manual_seed(6)
        model = transformers.BertModel.from_pretrained(here / "bare")
        head = {"weight": torch.randn(len(words), 16), "bias": torch.randn(len(words))}
        with torch.no_grad():
            for W in model.parameters():
                W += 0.05 * torch.randn(W.shape)
        model.save_pretrained(here / f"bare-{task}")
        tiny.save_tokenizer(here / f"bare-{task}")
        save_file(head, here / f"{task}.safetensors")
        models[task] = model
        named = [{"text": r["sentence"], "label": words[r["label"]]} for r in rows_of(here, task)]
        tiny.write_jsonl(here / f"bare-{task}.jsonl", named)
        data = {"test": f"bare-{task}.jsonl"}
        entry = {"name": task, "model": f"bare-{task}", "head": f"{task}.safetensors", "classes": list(words)}
        tasks.append(entry | {"data": data})
    suite = {"base": "bare", "task": "text-classification", "metric": "loss", "tasks": tasks}
    wrote = found("eval", tiny.write_suite(here / "heads.yaml", suite), "--model", "bare-animal")
    assert wrote["suite"] == "heads"
    for task in wrote["tasks"]:
        head = load_file(here / f"{task['name']}.safetensors")
        for who, model in (("score", models["animal"]), ("base", base), ("fine_tuned", models[task["name"]])):
            model.head = head["weight"], head["bias"]
            expected = tiny.judge(model, rows_of(here, task["name"]), with_head)[1]
            assert task[who] == pytest.approx(expected, rel=1e-4)
    good = load_file(here / "pace.safetensors")
    for head, words in (
        ({"weight": torch.zeros(2, 8), "bias": torch.zeros(2)}, ("heads.yaml:16: the head reads 8 features",)),
        (
            {name: W * math.nan for name, W in good.items()},
            ("the model gets NaN or Inf as accuracy on 40 of 40 test samples of task 'pace'", "the task's head"),
        ),
    ):
        save_file(head, here / "pace.safetensors")
        suite["metric"] = "accuracy"
        assert_refused(run("eval", tiny.write_suite(here / "heads.yaml", suite), "-m", "bare"), *words)
    tasks[0]["classes"] = ["cat"]
    again = run("eval", tiny.write_suite(here / "heads.yaml", suite), "-m", "bare")
    assert_refused(again, "the head has 3 classes", "names 1")


def test_language_models_by_token_accuracy_and_perplexity(here):
    tiny.make_llamas(here, LLAMAS, 0.1)
    texts = [row["sentence"] for row in rows_of(here, "animal")]
    (here / "lines.txt").write_text("".join(text + "\n" for text in texts))
    tasks = [{"name": name, "model": name, "data": {"test": "lines.txt"}} for name in ("poet", "cook")]
    suite = {"base": "llama", "task": "causal-lm", "tasks": tasks}
    model = transformers.LlamaForCausalLM.from_pretrained(here / "cook")
    shares, losses = [], []
    for text in texts:
        ids = tiny.encode(text)
        with torch.no_grad():
            out = model(input_ids=ids, labels=ids)
        losses.append(float(out.loss))
        shares.append(float((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).double().mean()))
    loss, share = sum(losses) / len(losses), sum(shares) / len(shares)
    for metric, expected in (("token-accuracy", share), ("loss", loss), ("perplexity", math.exp(loss))):
        wrote = found("eval", tiny.write_suite(here / "lm.yaml", suite | {"metric": metric}), "-m", "cook")
        assert [task["metric"] for task in wrote["tasks"]] == [metric] * 2
        assert wrote["tasks"][0]["score"] == pytest.approx(expected, rel=1e-5)
        assert wrote["tasks"][1]["fine_tuned"] == wrote["tasks"][1]["score"]
        assert wrote["tasks"][0]["low"] < expected < wrote["tasks"][0]["high"]


# suites in Python

MODULE = """
from dataclasses import replace
import torch
from torch import nn
from epimer.evaluation.suite import Split, Suite, SuiteTask

def network(state, task):
    made = nn.Linear(2, 2)
    made.load_state_dict(dict(state))
    return made.eval()

def make():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    tasks = [SuiteTask(f"column{i}", ["low", "high"], {"test": Split(x, (x[:, i] > 0).long())}) for i in (0, 1)]
    states = [{"weight": torch.eye(2) * s, "bias": torch.zeros(2)} for s in (1.0, 2.0, 3.0)]
    return Suite("columns", states[0], states[1:], tasks, network)

def nothing():
    return {}

def broken():
    return 1 / 0

def score(outputs, targets):
    raise RuntimeError("no score today")

def leaves(state, task):
    raise SystemExit("bye")

def altered(**changes):
    made = make()
    tasks = [replace(task, **changes.pop("task", {})) for task in made.tasks]
    return replace(made, **{"tasks": tasks, **changes})

def unscored():
    return altered(task={"score": score})

def left():
    return altered(network=leaves)

def fewer():
    return altered(models=make().models[:1])

def twice():
    return altered(tasks=[make().tasks[0]] * 2)

def wide():
    return altered(tasks=[replace(task, score=lambda outputs, targets: outputs) for task in make().tasks])
"""


def test_a_function_makes_a_suite(here, monkeypatch):
    (here / "my_own_suite.py").write_text(MODULE)
    (here / "half.py").write_text("import not_there_at_all\n")
    (here / "linear").mkdir()
    weight = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])  # the second class where the first column is positive
    save_file({"weight": weight, "bias": torch.zeros(2)}, here / "linear" / "model.safetensors")
    ran = start("eval", "my_own_suite:make", "--model", "linear", "--json", cwd=here)
    assert (ran.code, ran.err) == (0, "")
    wrote = json.loads(ran.out)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    agree = float(((x[:, 0] > 0) == (x[:, 1] > 0)).double().mean())
    assert [task["score"] for task in wrote["tasks"]] == pytest.approx([1.0, agree])
    monkeypatch.syspath_prepend(here)
    for entry, words in {
        "my_own_suite:mak": ("no function 'mak'", "Did you mean 'make'?"),
        "my_own_suite:nothing": ("returned dict", "Suite"),
        "my_own_suite:broken": ("ZeroDivisionError: division by zero", "my_own_suite.py line 22"),
        "my_own_suite:unscored": ("score failed: RuntimeError: no score today", "my_own_suite.py line 25"),
        "my_own_suite:left": ("network failed: SystemExit: bye", "my_own_suite.py line 28"),
        "my_own_suite:fewer": ("there are 1 models and 2 tasks",),
        "my_own_suite:twice": ("two tasks are named 'column0'",),
        "my_own_suite:wide": ("task 'column0' scores 50 samples", "(50, 2)", "expected one number per sample"),
        "my_other_suite:make": ("no module 'my_other_suite'",),
        "half:make": ("importing half failed", "not_there_at_all", "half.py line 1"),
    }.items():
        assert_refused(run("eval", entry, "-m", "linear"), *words)
    assert_refused(run("bench", "my_own_suite:make", "-o", "out"), "'column0' has no train data")


def test_the_suite_in_the_guide_runs(here, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "evaluating.md").read_text(encoding="utf-8")
    (here / "guide_suite.py").write_text(guide.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(here)
    suite = importlib.import_module("guide_suite").make()
    merged = epimer.merge_state_dicts(dict(suite.base), list(suite.models), "tsv")
    (here / "products").mkdir()
    save_file(dict(merged), here / "products" / "model.safetensors")
    wrote = found("eval", "guide_suite:make", "-m", "products")
    for task, given in zip(wrote["tasks"], suite.tasks, strict=True):
        x, y = given.splits["test"].x, given.splits["test"].y
        hidden = (x @ merged["one.weight"].T + merged["one.bias"]).tanh()
        hidden = (hidden @ merged["two.weight"].T + merged["two.bias"]).tanh()
        right = (hidden @ given.head["weight"].T + given.head["bias"]).argmax(1) == y
        assert task["score"] == pytest.approx(float(right.double().mean()))
        assert task["fine_tuned"] > 0.8
    ran = run("bench", "guide_suite:make", "--experiment", "alpha", "-o", "out", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert (here / "out" / "alpha.md").is_file()


# lm-eval


def test_without_lm_eval_one_line_says_how_to_install_it(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = run("eval", "--harness", "lm-eval", "--tasks", "arc_easy", "--model", "merged")
    assert_refused(ran, "pip install 'epimer[lm-eval]'")


TASK = {
    "task": "next_animal",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "doc_to_choice": list(tiny.TASKS["animal"]),
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
}


def test_lm_eval_scores_a_tiny_llama(here):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'epimer[lm-eval]'")
    tiny.make_llamas(here, LLAMAS, 0.1)
    rows = []
    for row in rows_of(here, "animal"):
        words = [word for word in row["sentence"].split() if word not in tiny.TASKS["animal"]]
        rows.append({"text": " ".join(words), "label": row["label"]})
    tiny.write_jsonl(here / "docs.jsonl", rows)
    (here / "my-tasks").mkdir()
    files = {"dataset_kwargs": {"data_files": {"test": str(here / "docs.jsonl")}}}
    (here / "my-tasks" / "next_animal.yaml").write_text(yaml.safe_dump(TASK | files))
    (here / "cache").mkdir()
    environment = {**ENVIRONMENT, "HF_HOME": str(here / "cache"), "HF_DATASETS_OFFLINE": "1"}
    asked = ["eval", "--harness", "lm-eval", "--tasks", "next_animal", "--include-path", "my-tasks", "-m", "cook"]
    command = [sys.executable, "-m", "epimer", *asked, "-o", "found.json"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (row,) = json.loads((here / "found.json").read_text())["results"]
    model = transformers.LlamaForCausalLM.from_pretrained(here / "cook")
    choices = [tiny.IDS[word] for word in tiny.TASKS["animal"]]
    with torch.no_grad():
        last = [model(input_ids=tiny.encode(doc["text"])).logits[0, -1] for doc in rows]
    right = [int(logits[choices].argmax()) == doc["label"] for logits, doc in zip(last, rows, strict=True)]
    assert row["score"] == pytest.approx(sum(right) / len(right))
    assert (row["task"], row["metric"], row["samples"]) == ("next_animal", "acc", len(rows))
    assert f"{row['score']:.4f}" in done.stdout
    again = [sys.executable, "-m", "epimer", *asked[:4], "next_animl", *asked[5:]]
    done = subprocess.run(again, cwd=here, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert_refused(
        Ran(done.returncode, done.stdout, done.stderr), "no task 'next_animl'", "Did you mean 'next_animal'?"
    )
