"""Suites of files as objects: tensors in networks, curvature under the names on disk, images and buffers."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

import epimer
from epimer.evaluation.evaluate import evaluate
from epimer.experiments.bench import Bench, Candidate

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

import numpy as np  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import tiny  # noqa: E402
from epimer.evaluation.hf_suite import read_suite  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    tiny.make_classifiers(root)
    return root


def test_states_are_copied_into_one_network_per_task(made):
    suite = read_suite(tiny.write_suite(made / "suite.yaml"))
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
            read_suite(tiny.write_suite(made / "other.yaml", tiny.suite_of(base=str(tmp_path / base))))
    own = ["classifier.*", "bert.pooler.*"]
    suite = read_suite(tiny.write_suite(made / "other.yaml", tiny.suite_of(base=str(tmp_path / "mlm"), classifier=own)))
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
    bench = Bench(read_suite(tiny.write_suite(tmp_path / "suite.yaml", suite)), samples=16)
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
    read = read_suite(tiny.write_suite(tmp_path / "suite.yaml", suite), keep=False)
    assert any(name.endswith("running_var") for name in read.base)
    wrote = evaluate(read, str(tmp_path / "two")).to_dict()
    x = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2) / 255
    for task in wrote["tasks"]:
        for who, name in (("score", "two"), ("base", "base"), ("fine_tuned", task["name"])):
            with torch.no_grad():
                expected = cross_entropy(models[name](x).logits, torch.tensor(labels))
            assert task[who] == pytest.approx(float(expected), rel=1e-4)
