"""Checkpoints of a real Trainer: each parameter's moments are those of the gradients that it was given."""

import pytest
import torch
import transformers

from epimer.curvature.optimizer_state import moments

VOCABULARY, LENGTH = 40, 8
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, **SIZES}


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def frozen_bert():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    return model


def qwen3():  # normalises queries and keys with layers that are no nn.LayerNorm
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_key_value_heads=1, head_dim=8, **TEXT))


def t5():
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def clip():
    sight = {"image_size": 8, "patch_size": 4, **SIZES}
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=sight, projection_dim=12)
    return transformers.CLIPModel(config)


class Record(transformers.TrainerCallback):
    """Keep the gradients of every step as the optimiser is about to see them: after clipping."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})


def mean(gradients, name, beta, power):
    """Return the mean of the powers of a gradient, each step weighing beta times the next."""
    weights = [beta ** (len(gradients) - 1 - t) for t in range(len(gradients))]
    return sum(w * g[name] ** power for w, g in zip(weights, gradients, strict=True)) / sum(weights)


def compare(found, gradients, betas=(0.9, 0.999), moment="second"):
    assert set(found) == set(gradients[0])
    for name, metric in found.items():
        if moment == "second":
            expected = mean(gradients, name, betas[1], 2)
        else:
            expected = mean(gradients, name, betas[0], 1).square()
        assert metric.F.dtype == torch.float32
        torch.testing.assert_close(metric.F.double(), expected, rtol=2e-5, atol=1e-6 * float(expected.max()) + 1e-30)
    values = [metric.F for metric in found.values()]
    assert len({float(F.double().sum()) for F in values if F.any()}) > len(values) / 2  # no two alike: names matter


@pytest.mark.parametrize("make", [gpt2, bert, frozen_bert])
def test_a_trainers_checkpoint_folder(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    tokens = torch.randint(2, VOCABULARY, (12, LENGTH))
    labels = tokens[:, 0] % 2 if make is frozen_bert else tokens
    rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    record = Record()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[record]).train()
    assert len(record.gradients) == 3
    for path in (tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "checkpoint-3" / "optimizer.pt"):
        compare(moments(path, make()), record.gradients)
    compare(moments(path, make(), moment="first"), record.gradients, moment="first")
    if make is frozen_bert:
        assert not any(name.startswith("bert.embeddings") for name in moments(path, model))


@pytest.mark.parametrize("make", [gpt2, bert, frozen_bert, qwen3, t5, clip])
def test_the_trainers_two_groups_in_every_family(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    decays = transformers.Trainer.get_decay_parameter_names(None, model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    split = [[p for name, p in trained if (name in decays) == first] for first in (True, False)]
    assert all(split)
    optimiser = torch.optim.AdamW([{"params": split[0], "weight_decay": 0.1}, {"params": split[1]}])
    gradients = {name: torch.randn_like(p) for name, p in trained}
    for name, p in trained:
        p.grad = gradients[name].clone()
    optimiser.step()
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.pt")
    compare(moments(tmp_path, model), [{name: g.double() for name, g in gradients.items()}])
