"""Suites of one's own as objects: what a file says, tensors in networks, curvature under the names on disk, metrics."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy, log_softmax

import epimer
from epimer.evaluation.evaluate import evaluate
from epimer.evaluation.metrics import CLASSIFIER_SCORES, TOKEN_SCORES, unit
from epimer.evaluation.user_code import is_entry_point
from epimer.experiments.bench import Bench, Candidate
from epimer.score_format import format_score, metric_value
from epimer.tasks.task import sample_losses

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

import numpy as np  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import tiny  # noqa: E402
from epimer.evaluation.hf_suite import read_suite  # noqa: E402
from epimer.evaluation.suite_file import read_suite_file  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    return root


def write(path, suite):
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path


# the file


def test_what_a_file_says(made):
    described = tiny.suite_of(batch_size=5, max_length=12, dtype="float64")
    described["tasks"][0]["metric"] = "loss"
    described["tasks"][1]["classifier"] = "bert.pooler.*"
    del described["tasks"][1]["name"]
    found = read_suite_file(write(made / "said.yaml", described))
    one, two = found.tasks
    assert (found.name, found.batch, found.max_length, found.dtype) == ("words", 5, 12, torch.float64)
    assert (one.metric, two.metric, two.name) == ("loss", "accuracy", "pace")
    assert one.classifier == ("classifier.*",)
    assert two.classifier == ("classifier.*", "bert.pooler.*")
    assert {split: len(table) for split, table in one.tables.items()} == tiny.COUNTS
    assert one.model == str(made / "animal")
    del described["name"]
    assert read_suite_file(write(made / "said.yaml", described)).name == "said"


def test_splits_of_one_dataset(made, tmp_path):
    folder = tmp_path / "set" / "small"
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        (folder / f"{name}.jsonl").write_text((made / f"pace-{split}.jsonl").read_text())
    data = {"dataset": "set", "subset": "small", "train": "train", "val": "validation", "test": "test"}
    suite = tiny.suite_of(base=str(made / "base"))
    suite["tasks"] = [{"model": str(made / "pace"), "data": data | {"text": "sentence"}}]
    (entry,) = read_suite_file(write(tmp_path / "suite.yaml", suite)).tasks
    assert {split: len(table) for split, table in entry.tables.items()} == tiny.COUNTS
    for change, words in (
        ({"val": "holdout"}, r"suite.yaml:12: .*no split 'holdout'"),
        ({"subset": "smal"}, r"no subset 'smal'.*Did you mean 'small'"),
    ):
        suite["tasks"][0]["data"] = data | {"text": "sentence"} | change
        with pytest.raises(epimer.RecipeError, match=words):
            read_suite_file(write(tmp_path / "suite.yaml", suite))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the suite is empty"),
        ("- a", "a suite must be a mapping"),
        ("base: [1", "not valid YAML"),
        ("base: b\ntasks: [{model: m, task: causal-lm, head: h}]", "has no classes; leave out 'head'"),
        ("base: b\ntasks: [{model: m}]", r"tasks\[0\] has no 'task'"),
        ("base: b\ntasks: [{task: causal-lm}]", r"tasks\[0\] has no 'model'"),
        ("base: b\ntasks: [{model: m, task: causal-lm, data: {label: x}}]", "'label' is not a column of causal-lm"),
        ("base: b\ntasks: [{model: m, task: text-classification, data: {subset: x, test: y}}]", "'subset' is one of"),
        ("base: b\ntasks: [{model: m, task: text-classification, classes: [a, a]}]", "none of them twice"),
        ("base: b\nbase: c", "'base' is given twice"),
        ("base: !!python/object:os.system {}", "tag"),
    ],
)
def test_files_that_are_refused(tmp_path, text, words):
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(epimer.RecipeError, match=words):
        read_suite_file(tmp_path / "suite.yaml")


def test_entry_points_are_told_from_files_and_names():
    assert all(map(is_entry_point, ("a:b", "my_package.my_suite:make")))
    assert not any(
        map(is_entry_point, ("suite.yaml", "glyphs8", "a:b:c", "../x:y", "a b:c", ":make", "C:/suite", "1a:b"))
    )


# networks


def test_states_are_copied_into_one_network_per_task(made):
    suite = read_suite(write(made / "suite.yaml", tiny.suite_of()))
    assert not any(name.startswith(("classifier.", "cls.")) for name in suite.base)
    task = suite.tasks[0]
    networks = []
    for folder in ("base", "animal", "pace", "base"):
        state = suite.base if folder == "base" else suite.models[list(tiny.TASKS).index(folder)]
        networks.append(suite.network(state, task))
        expected = tiny.loaded(made, "animal", made / folder).state_dict()
        assert all(torch.equal(W, expected[name]) for name, W in networks[-1].state_dict().items())
    assert all(network is networks[0] for network in networks)


def test_a_base_of_another_shape_and_models_of_another_kind(made, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**tiny.SIZES | {"hidden_size": 8}, **tiny.TEXT)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "narrow")
    transformers.BertModel(transformers.BertConfig(**tiny.SIZES, **tiny.TEXT)).save_pretrained(tmp_path / "bare")
    transformers.BertForMaskedLM(transformers.BertConfig(**tiny.SIZES, **tiny.TEXT)).save_pretrained(tmp_path / "mlm")
    for base, words in (
        ("narrow", r"animal\[.*\] has shape \(.*\), the base's \(.*\)"),
        ("bare", "animal shares no tensor with the base.*same prefix"),
        ("mlm", "animal has 'bert.pooler.dense.bias', 'bert.pooler.dense.weight', which the base lacks"),
    ):
        with pytest.raises(epimer.RecipeError, match=words):
            read_suite(write(made / "other.yaml", tiny.suite_of(base=str(tmp_path / base))))
    own = ["classifier.*", "bert.pooler.*"]
    suite = read_suite(write(made / "other.yaml", tiny.suite_of(base=str(tmp_path / "mlm"), classifier=own)))
    assert not any("pooler" in name for name in suite.base)
    network = suite.network(suite.base, suite.tasks[0])
    own = transformers.BertForSequenceClassification.from_pretrained(made / "animal")
    assert torch.equal(network.bert.pooler.dense.weight, own.bert.pooler.dense.weight)
    assert not torch.equal(network.bert.embeddings.word_embeddings.weight, own.bert.embeddings.word_embeddings.weight)


def test_curvature_has_the_names_on_disk(made, tmp_path):
    """With heads the network's names begin with `backbone.`; kept in a merge they must be the checkpoint's."""
    tasks = []
    for task, words in tiny.TASKS.items():
        torch.manual_seed(len(task))
        model = transformers.BertModel(transformers.BertConfig(**tiny.SIZES, **tiny.TEXT, **tiny.CALM))
        model.save_pretrained(tmp_path / task)
        tiny.save_tokenizer(tmp_path / task)
        save_file({"weight": torch.randn(len(words), 16)}, tmp_path / f"{task}.safetensors")
        data = {split: str(made / f"{task}-{split}.jsonl") for split in tiny.COUNTS} | {"text": "sentence"}
        tasks.append({"model": task, "head": f"{task}.safetensors", "data": data})
    suite = {"base": "animal", "task": "text-classification", "tasks": tasks}
    bench = Bench(read_suite(write(tmp_path / "suite.yaml", suite)), samples=16)
    measured = bench.curvature("diagonal")[1]
    assert set(measured) <= set(bench.suite.base)
    model = transformers.BertModel.from_pretrained(tmp_path / "pace")
    head = torch.nn.Linear(16, 2, bias=False)
    (weight,) = (bench.suite.network(bench.states[1], bench.suite.tasks[1]).head.weight,)
    head.weight = torch.nn.Parameter(weight.detach().clone())

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.top = model, head

        def forward(self, **inputs):
            return self.top(self.backbone(**inputs).pooler_output)

    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16]
    rows = [tiny.read_jsonl(made / "pace-train.jsonl")[i] for i in order]
    longest = max(len(row["sentence"].split()) for row in rows)
    ids = torch.zeros(16, longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["sentence"].split())] = tiny.encode(row["sentence"])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}, torch.tensor([row["label"] for row in rows])
    expected = epimer.estimate_curvature(
        Plain(),
        [batch],
        lambda out, y: cross_entropy(out, y, reduction="none"),
        kind="diagonal",
        samples=None,
        layers=["backbone.*"],
        progress=False,
    )
    name = "encoder.layer.0.intermediate.dense.weight"
    assert torch.allclose(measured[name].F, expected[f"backbone.{name}"].F, rtol=1e-4, atol=1e-9)
    for method in ("epimer", "epimer_kron", "epimer_exact"):
        merged = bench.merge(Candidate(method), rank=4)
        notes = [record.note for record in merged.record.tensors.values() if record.rule == "matrix"]
        assert notes
        assert not any("no curvature" in note for note in notes)


def test_images_and_running_statistics(tmp_path):
    classes = ("blue", "green", "red")
    names = {"label2id": {name: i for i, name in enumerate(classes)}, "id2label": dict(enumerate(classes))}
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", **names
    )
    models = {}
    for seed, name in enumerate(("base", "one", "two")):
        torch.manual_seed(seed)
        model = transformers.ResNetForImageClassification(config)
        model.train()(torch.randn(8, 3, 8, 8))  # gives the running statistics values of their own
        model.eval().save_pretrained(tmp_path / name)
        about = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True}
        about |= {"rescale_factor": 1 / 255, "do_normalize": False}
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(about))
        models[name] = model
    noise = np.random.default_rng(0)
    pixels, labels = [], []
    for i, label in enumerate(classes):
        (tmp_path / "test" / label).mkdir(parents=True)
        for j in range(6):
            pixels.append(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            labels.append(i)
            Image.fromarray(pixels[-1]).save(tmp_path / "test" / label / f"{j}.png")
    tasks = [{"name": name, "model": name, "data": {"test": "test"}} for name in ("one", "two")]
    suite = {"base": "base", "task": "image-classification", "metric": "loss", "batch_size": 4, "tasks": tasks}
    read = read_suite(write(tmp_path / "suite.yaml", suite), keep=False)
    assert any(name.endswith("running_var") for name in read.base)
    wrote = evaluate(read, str(tmp_path / "two")).to_dict()
    x = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2) / 255
    for task in wrote["tasks"]:
        for who, name in (("score", "two"), ("base", "base"), ("fine_tuned", task["name"])):
            with torch.no_grad():
                expected = cross_entropy(models[name](x).logits, torch.tensor(labels))
            assert task[who] == pytest.approx(float(expected), rel=1e-4)


# metrics


def test_metrics_of_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    targets[0, 3:] = targets[2, 1:] = -100
    outputs = SimpleNamespace(logits=logits)
    p = log_softmax(logits.double(), -1)
    for i in range(3):
        real = [j for j in range(5) if targets[i, j] != -100]
        losses = [-float(p[i, j, targets[i, j]]) for j in real]
        hits = [float(logits[i, j].argmax() == targets[i, j]) for j in real]
        assert float(sample_losses(outputs, targets)[i]) == pytest.approx(sum(losses), rel=1e-5)
        assert float(TOKEN_SCORES["loss"](outputs, targets)[i]) == pytest.approx(-sum(losses) / len(real), rel=1e-5)
        assert float(TOKEN_SCORES["perplexity"](outputs, targets)[i]) == pytest.approx(
            -sum(losses) / len(real), rel=1e-5
        )
        assert float(TOKEN_SCORES["token-accuracy"](outputs, targets)[i]) == pytest.approx(sum(hits) / len(real))
    whole = CLASSIFIER_SCORES["loss"](logits[:, 0], targets[:, 0])
    assert torch.allclose(whole, -cross_entropy(logits[:, 0], targets[:, 0], reduction="none"))


def test_logits_that_are_no_numbers_get_no_score():
    logits = torch.randn(4, 3)
    targets = logits.argmax(1)
    logits[1, 0], logits[2, targets[2]] = math.nan, math.inf
    assert CLASSIFIER_SCORES["accuracy"](logits, targets).nan_to_num(-1).tolist() == [1, -1, 1, 1]
    logits = torch.randn(3, 4, 5)
    targets = logits.argmax(-1)
    targets[:, 2:] = -100
    logits[0, 3, 0], logits[1, 1, 0] = math.nan, math.nan  # a place that does not count, and one that does
    assert TOKEN_SCORES["token-accuracy"](logits, targets).nan_to_num(-1).tolist() == [1, -1, 1]


def test_scores_as_people_know_them():
    assert format_score("accuracy", 0.8125) == "81.2"
    assert format_score("loss", -0.5) == "0.500"
    assert metric_value("perplexity", -2.0) == pytest.approx(math.exp(2))
    assert metric_value("perplexity", -1e6) < math.inf
    assert format_score("f1", 0.25) == "0.250"
    assert unit("token-accuracy") == unit("accuracy") != unit("loss")
