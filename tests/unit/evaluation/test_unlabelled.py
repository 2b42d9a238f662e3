"""Suites of kept inputs: agreement and KL as computed one text at a time, and curvature as measured on the data."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
from epimer.checkpoints.memory import StateDict
from epimer.curvature.kept_inputs import KeptInputs
from epimer.curvature.measure import Request, measure
from epimer.errors import CheckpointError, DataError
from epimer.evaluation.judges import by_agreement
from epimer.evaluation.unlabelled import KeptSplit, Source, suite_of_inputs
from epimer.plan.participants import Participant, align

transformers = pytest.importorskip("transformers")

from epimer.checkpoints import open_checkpoint  # noqa: E402
from tiny import TASKS, encode, make_classifiers, make_llamas, read_jsonl, save_tokenizer  # noqa: E402

COUNT = 22


pytestmark = pytest.mark.usefixtures("no_progress_bars")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Classifiers with heads of 3 and 2 classes, the same as bare models with heads in files, and language models."""
    root = tmp_path_factory.mktemp("made")
    make_classifiers(root)
    for task in ("base", *TASKS):
        transformers.BertModel.from_pretrained(root / task).save_pretrained(root / "bare" / task)
        save_tokenizer(root / "bare" / task)
    for task in TASKS:
        state = load_file(root / task / "model.safetensors")
        head = {part: state[f"classifier.{part}"] for part in ("weight", "bias")}
        save_file(head, root / f"{task}-head.safetensors")
    make_llamas(root / "llama", ("base", *TASKS), 0.3)
    return root


def request(made: Path, kind: str, task: str, out: Path, **changes) -> Request:
    folder = {"own": made, "head": made / "bare", "llama": made / "llama"}[kind]
    options = {
        "model": str(folder / task),
        "task": "causal-lm" if kind == "llama" else "text-classification",
        "data": str(made / f"{task}-train.jsonl"),
        "samples": COUNT,
        "head": made / f"{task}-head.safetensors" if kind == "head" else None,
        "out": out,
        "progress": False,
    }
    return Request(**options | changes)


def measured(made: Path, kind: str, out: Path, **changes):
    """Measure both models; return where they are, the participants and the curvature as it is on disk."""
    requests = [request(made, kind, task, out / task, **changes) for task in TASKS]
    for one in requests:
        measure(one)
    where = [one.model for one in requests]
    base = open_checkpoint(str(Path(where[0]).parent / "base"))
    participants = align(base, [open_checkpoint(model) for model in where], where)
    return where, participants, [epimer.Curvature.load(one.out) for one in requests]


def texts(made: Path, task: str, split: str) -> list[str]:
    """Return the texts of a split, in the order in which they were measured."""
    rows = read_jsonl(made / f"{task}-train.jsonl")
    random.Random(0).shuffle(rows)
    chosen = [(i, row["sentence"]) for i, row in enumerate(rows[:COUNT])]
    return [text for i, text in chosen if split == "train" or (i % 4 == 3) is (split == "test")]


def logits_by_hand(made: Path, kind: str, task: str, state, text: str) -> torch.Tensor:
    """Return a text's predictions, [rows, classes], by transformers alone."""
    if kind == "llama":
        model = transformers.LlamaForCausalLM.from_pretrained(made / "llama" / task)
        left = model.load_state_dict(dict(state), strict=False)
        assert left.missing_keys in ([], ["lm_head.weight"])
        return model.eval()(encode(text)).logits[0, :-1]
    model = transformers.BertForSequenceClassification.from_pretrained(made / task)
    prefix = "bert." if kind == "head" else ""
    mine = {prefix + name: W for name, W in state.items() if not name.startswith(("classifier", "cls"))}
    left = model.load_state_dict(mine, strict=False)
    assert all(name.startswith("classifier.") for name in left.missing_keys)
    return model.eval()(encode(text)).logits


@torch.no_grad()
def agreement_by_hand(made: Path, kind: str, task: str, tuned, merged, split: str) -> tuple[torch.Tensor, float]:
    hits, divergences = [], []
    for text in texts(made, task, split):
        p, q = (logits_by_hand(made, kind, task, state, text).double().log_softmax(1) for state in (tuned, merged))
        hits.append((p.argmax(1) == q.argmax(1)).double())
        divergences.append((p.exp() * (p - q)).sum(1))
    return torch.cat(hits), float(torch.cat(divergences).mean())


@pytest.mark.parametrize("kind", ["own", "head", "llama"])
def test_agreement_is_that_of_each_text_alone(made, tmp_path, kind):
    suite = suite_of_inputs(*measured(made, kind, tmp_path), device="cpu")
    assert [task.name for task in suite.tasks] == list(TASKS)
    base = {name: suite.base[name] for name in suite.base}
    heads = {"own": ("cls.",), "head": (), "llama": ()}[kind]
    merged = {
        name: (suite.models[0][name] + suite.models[1][name]) / 2 if name in suite.models[0] else W
        for name, W in base.items()
        if not name.startswith(heads or "none")
    }
    evaluate = by_agreement(suite)
    for split, count in (("val", 17), ("test", 5)):
        scores = evaluate(merged, split)
        for t, task in enumerate(TASKS):
            assert len(suite.tasks[t].splits[split]) == count
            hits, kl = agreement_by_hand(made, kind, task, suite.models[t], merged, split)
            assert sorted(scores.scores[task].tolist()) == sorted(hits.tolist())  # short texts come first
            assert scores.kl[task] == pytest.approx(kl, rel=1e-4, abs=1e-7)
            assert kl > 1e-4
    for t, task in enumerate(suite.tasks):  # each model agrees with itself, and its task alone is judged by it
        own = evaluate(suite.models[t], "val")
        assert bool(own.scores[task.name].all())
        assert own.kl[task.name] == pytest.approx(0, abs=1e-9)


def test_networks_that_do_not_fit_beside_each_other_are_loaded_in_turn(made, tmp_path):
    where, participants, curvatures = measured(made, "own", tmp_path)
    state, loads = suite_of_inputs(where, participants, curvatures, device="cpu").models[0], {}
    for most in (None, 0):
        suite = suite_of_inputs(where, participants, curvatures, device="cpu", most=most)
        evaluate = by_agreement(suite)
        scores = [evaluate(state, split) for split in ("val", "val", "test")]
        one, again = (suite.network(state, suite.tasks[0]) for _ in range(2))
        assert one is again
        loads[most] = scores, one is suite.network(state, suite.tasks[1]) or suite.network(state, suite.tasks[0]) is one
    (kept, stayed), (reloaded, came_back) = loads[None], loads[0]
    assert stayed
    assert not came_back
    for first, second in zip(kept, reloaded, strict=True):
        assert first.kl == second.kl
        assert all(torch.equal(first.scores[task], second.scores[task]) for task in TASKS)


@pytest.mark.parametrize(("vocabulary", "longest", "batch"), [(49152, 256, 1), (32000, 64, 8), (50, 64, 5242)])
def test_predictions_of_a_language_model_are_formed_for_few_texts_at_a_time(vocabulary, longest, batch):
    """64 MiB of float32 logits, or those of one text."""
    headers = {"embed.weight": torch.empty(vocabulary, 8, device="meta"), "norm.weight": torch.empty(8, device="meta")}
    ids = torch.zeros(300, longest, dtype=torch.int32)
    inputs = KeptInputs("causal-lm", "auto", {"input_ids": ids, "attention_mask": ids.byte() + 1}, ids == 0)
    model = Participant(StateDict({}, "model"), "model", headers)
    assert Source("model", model, inputs, None).batch == batch
    data = KeptSplit(inputs, "cpu", torch.float32, batch)
    assert max(len(chosen["input_ids"]) for chosen, _ in data.batches(32)) == min(batch, 32)


def test_judged_texts_come_in_the_order_of_their_lengths(made, tmp_path):
    suite = suite_of_inputs(*measured(made, "own", tmp_path), device="cpu")
    for task in suite.tasks:
        for split, in_order in (("val", True), ("test", True), ("train", False)):
            batches = [inputs["attention_mask"] for inputs, _ in task.splits[split].batches(4)]
            lengths = torch.cat([mask.sum(1) for mask in batches])
            assert (lengths.tolist() == lengths.sort().values.tolist()) is in_order
            assert all(mask.shape[1] == mask.sum(1).max() for mask in batches)


@pytest.mark.parametrize("kind", ["own", "head", "llama"])
def test_curvature_on_kept_inputs_is_that_on_the_data(made, tmp_path, kind):
    where, participants, curvatures = measured(made, kind, tmp_path)
    suite = suite_of_inputs(where, participants, curvatures, device="cpu")
    at = str(Path(where[0]).parent / "base")
    for t, task in enumerate(suite.tasks):
        model = suite.network(suite.base, task)
        names = suite.names(task)
        batches = task.splits["train"].batches(16)
        found = epimer.estimate_curvature(
            model, batches, task.loss, labels="model", samples=None, layers=list(names), progress=False
        ).renamed(names)
        expected = measure(request(made, kind, task.name, tmp_path / f"again{t}", at=at))
        assert set(found) == {name for name in expected if name in participants.template.headers}
        assert len(found) >= 6
        for name in found:
            assert torch.equal(found[name].A, expected[name].A)
            assert torch.equal(found[name].G, expected[name].G)


def test_what_a_state_lacks_is_the_models_own_again(made, tmp_path):
    suite = suite_of_inputs(*measured(made, "own", tmp_path), device="cpu")
    task, name = suite.tasks[1], "bert.encoder.layer.0.output.dense.weight"
    own = load_file(made / "pace" / "model.safetensors")
    zeros = {key: torch.zeros_like(W) for key, W in own.items() if not key.startswith("classifier")}
    zeros["classifier.weight"] = torch.zeros(3, 16)  # of the other task, which has three classes
    assert not suite.network(zeros, task).state_dict()[name].any()
    network = suite.network({"bert.pooler.dense.bias": torch.ones(16), "unknown": torch.ones(2)}, task)
    for key, W in network.state_dict().items():
        assert torch.equal(W, torch.ones(16) if key == "bert.pooler.dense.bias" else own[key]), key
    with pytest.raises(CheckpointError, match="shares no tensor of the same name and shape"):
        suite.network({"unknown": torch.ones(2), "bert.pooler.dense.bias": torch.ones(3)}, task)
    assert torch.equal(network.state_dict()["bert.pooler.dense.bias"], own["bert.pooler.dense.bias"])


def test_there_are_no_labels(made, tmp_path):
    suite = suite_of_inputs(*measured(made, "own", tmp_path), device="cpu")
    with pytest.raises(DataError, match="there are no labels"):
        suite.scores(suite.base, "val")


def test_without_inputs_there_is_no_suite(made, tmp_path):
    where, participants, curvatures = measured(made, "own", tmp_path / "with")
    measure(request(made, "own", "pace", tmp_path / "without", no_inputs=True))
    without = epimer.Curvature.load(tmp_path / "without")
    assert without.inputs is None
    assert suite_of_inputs(where, participants, [curvatures[0], without]) is None
    few = measured(made, "own", tmp_path / "few", samples=3)
    with pytest.raises(DataError, match="keeps 3 inputs, and 4 are the fewest"):
        suite_of_inputs(*few)


def test_inputs_of_another_model_are_refused(made, tmp_path):
    where, participants, _ = measured(made, "own", tmp_path)
    changed = epimer.Curvature.load(tmp_path / "pace")
    changed.inputs.tensors["input_ids"][2, 1] = 99
    changed.save(tmp_path / "pace", overwrite=True)
    curvatures = [epimer.Curvature.load(tmp_path / task) for task in TASKS]
    suite = suite_of_inputs(where, participants, curvatures, device="cpu")
    with pytest.raises(DataError, match="has token 99, but the model knows 15 tokens"):
        suite.network(suite.base, suite.tasks[1])


def test_names_are_numbered_where_models_share_one(made, tmp_path):
    where, _, curvatures = measured(made, "own", tmp_path)
    twice = [where[0], where[0]]
    both = align(open_checkpoint(str(made / "base")), [open_checkpoint(one) for one in twice], twice)
    suite = suite_of_inputs(twice, both, [curvatures[0]] * 2, device="cpu")
    assert [task.name for task in suite.tasks] == ["animal (0)", "animal (1)"]
