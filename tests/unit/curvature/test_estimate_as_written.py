"""Data and losses as people have them: loaders of dicts, a Hugging Face model's own loss, another ignore_index."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import epimer
from epimer.errors import CurvatureError, ParameterError
from oracle import near

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 17}
LENGTHS = (7, 5, 6, 4)
BATCH = 2


def build(name, config, **settings):
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings, pad_token_id=0)).double()
    with torch.no_grad():
        for W in model.parameters():
            W += 0.3 * torch.randn(W.shape, dtype=W.dtype)
    return model


def language_model():
    return build("LlamaForCausalLM", "LlamaConfig", **SIZES, num_key_value_heads=1)


def classifier():
    return build("BertForSequenceClassification", "BertConfig", **SIZES, num_labels=3)


def seq2seq():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 17}
    return build("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)


def texts():
    """Rows of a padded data set of texts, for DataLoader's own collator."""
    torch.manual_seed(1)
    rows = []
    for length in LENGTHS:
        mask = (torch.arange(max(LENGTHS)) < length).long()
        ids = torch.randint(1, 17, mask.shape) * mask
        rows.append({"input_ids": ids, "attention_mask": mask})
    return rows


def labelled(model):
    """The rows with the labels that their model takes: a class, or tokens with -100 at padding."""
    rows = texts()
    for i, row in enumerate(rows):
        tokens = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
        row["labels"] = torch.tensor(i % 3) if "Classification" in type(model).__name__ else tokens
    return rows


def diagonal_by_autograd(model, rows):
    """E[(∇L)²] with the loss of the model itself, which is a mean over the counted labels, times their number."""
    model = copy.deepcopy(model).eval()
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in rows:
        model.zero_grad()
        labels = row["labels"][None]
        causal = type(model).__name__.endswith("CausalLM")
        counted = int(((labels[:, 1:] if causal else labels) != -100).sum())
        (model(**{name: value[None] for name, value in row.items()}).loss * counted).backward()
        for name, p in model.named_parameters():
            totals[name] += 0 if p.grad is None else p.grad.square() / len(rows)
    return totals


@pytest.mark.parametrize("build_model", [language_model, classifier, seq2seq])
def test_a_loader_of_dicts_and_no_loss_measure_the_models_own_loss(build_model):
    model = build_model()
    rows = labelled(model)
    measured = epimer.estimate_curvature(model, DataLoader(rows, batch_size=BATCH), kind="diagonal", labels="true")
    truth = diagonal_by_autograd(model, rows)
    assert len(measured) > 10
    for name in measured:
        assert near(measured[name].F, truth[name], 1e-6)  # transformers computes its losses in float32
    assert model.config.problem_type is None  # as it was: a model notes there which labels it got


@pytest.mark.parametrize("build_model", [language_model, classifier])
def test_trainers_loader_of_batch_encodings_gives_what_pairs_give(build_model, tmp_path):
    model = build_model()
    rows = labelled(model)

    def collate(rows):
        return transformers.BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], seed=3
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    batches = list(trainer.get_train_dataloader())
    assert isinstance(batches[0], transformers.BatchEncoding)
    measured = epimer.estimate_curvature(model, batches, kind="kronecker")

    def loss(outputs, targets):
        logits, targets = outputs.logits, targets
        if logits.dim() == 3:
            logits, targets = logits[:, :-1].transpose(1, 2), targets[:, 1:]
        return cross_entropy(logits, targets, reduction="none").reshape(len(targets), -1).sum(1)

    pairs = [({k: v for k, v in b.items() if k != "labels"}, b["labels"]) for b in batches]
    expected = epimer.estimate_curvature(model, pairs, loss, kind="kronecker")
    assert set(measured) == set(expected)
    for name in measured:
        assert near(measured[name].A, expected[name].A)
        assert near(measured[name].G, expected[name].G)


def test_texts_without_labels_are_measured_under_the_models_own():
    model = language_model()
    unlabelled = epimer.estimate_curvature(model, DataLoader(texts(), batch_size=BATCH), kind="diagonal", seed=5)
    tokens = epimer.estimate_curvature(model, DataLoader(labelled(model), batch_size=BATCH), kind="diagonal", seed=5)
    for name in unlabelled:  # the tokens only say which places count
        assert near(unlabelled[name].F, tokens[name].F)


@pytest.mark.parametrize("labels", ["true", "model", "expected"])
def test_another_ignore_index_counts_as_minus_100_does(labels):
    model = language_model()
    rows = labelled(model)
    expected = epimer.estimate_curvature(model, DataLoader(rows, batch_size=BATCH), kind="diagonal", labels=labels)
    for row in rows:
        row["labels"] = row["labels"].masked_fill(row["labels"] == -100, 0)  # the padding token
    loader = DataLoader(rows, batch_size=BATCH)
    measured = epimer.estimate_curvature(model, loader, kind="diagonal", labels=labels, ignore_index=0)
    for name in expected:
        assert near(measured[name].F, expected[name].F)


def test_a_loss_that_ignores_another_index_gets_its_own():
    model = language_model()
    rows = labelled(model)
    expected = epimer.estimate_curvature(model, DataLoader(rows, batch_size=BATCH), kind="diagonal")
    for row in rows:
        row["labels"] = row["labels"].masked_fill(row["labels"] == -100, -1)

    def loss(outputs, targets):
        logits, targets = outputs.logits[:, :-1].transpose(1, 2), targets[:, 1:]
        return cross_entropy(logits, targets, reduction="none", ignore_index=-1).sum(1)

    loader = DataLoader(rows, batch_size=BATCH)
    measured = epimer.estimate_curvature(model, loader, loss, kind="diagonal", ignore_index=-1)
    for name in expected:
        assert near(measured[name].F, expected[name].F)
    with pytest.raises(ParameterError, match="may give a place the label 0, which loss_fn ignores"):
        epimer.estimate_curvature(model, loader, loss, kind="diagonal", ignore_index=0)


def test_a_model_whose_loss_is_another_or_unknown_is_refused_with_the_way_out():
    regression = build("BertForSequenceClassification", "BertConfig", **SIZES, num_labels=1)
    rows = [{**row, "labels": torch.tensor(0.5)} for row in texts()]
    with pytest.raises(CurvatureError, match=r"is not the cross-entropy of its logits.*give loss_fn="):
        epimer.estimate_curvature(regression, DataLoader(rows, batch_size=BATCH), labels="true")
    with pytest.raises(CurvatureError, match=r"forward takes labels, which Linear's does not; give loss_fn="):
        epimer.estimate_curvature(nn.Linear(2, 2), [(torch.ones(2, 2), torch.zeros(2).long())])
