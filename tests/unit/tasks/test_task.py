"""Tasks: what is loaded is what lies on disk, under the names it has there, and batches hold what the data says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from epimer.checkpoints import open_checkpoint
from epimer.errors import CheckpointError, CurvatureError, DataError, EpimerError, ParameterError
from epimer.tasks.data import open_data
from epimer.tasks.task import Task, load_task

transformers = pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<eos>", "the", "cat", "dog", "sat", "ran", "on", "a", "mat", "fast"]
IDS = {word: i for i, word in enumerate(WORDS)}
VOCABULARY = {"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": IDS["<eos>"]}
PIXELS = {"image_size": 8, "patch_size": 4}
GPT2 = {"n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, **VOCABULARY}
VISION = {**SIZES, **PIXELS, "projection_dim": 12}


pytestmark = pytest.mark.usefixtures("no_progress_bars")


def bert_config(**more):
    labels = {"bad": 0, "fine": 1, "good": 2}
    about = {"label2id": labels, "id2label": {i: name for name, i in labels.items()}}
    return transformers.BertConfig(**SIZES, vocab_size=len(WORDS), max_position_embeddings=8, **{**about, **more})


def clip_config(**more):
    text = {**SIZES, **VOCABULARY, "max_position_embeddings": 8, "projection_dim": 12, "bos_token_id": 2}
    return transformers.CLIPConfig(vision_config=VISION, text_config=text, projection_dim=12, **more)


BUILDERS = {
    "bert": lambda: transformers.BertForSequenceClassification(bert_config()),
    "bert_model": lambda: transformers.BertModel(bert_config()),
    "bert_mlm": lambda: transformers.BertForMaskedLM(bert_config()),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, vocab_size=len(WORDS), max_position_embeddings=8, pad_token_id=1)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt2_model": lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2)),
    "gpt2_classifier": lambda: transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(num_labels=3, **GPT2)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **VOCABULARY, num_key_value_heads=1, max_position_embeddings=32)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **VOCABULARY, num_key_value_heads=1, num_local_experts=2)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **PIXELS, num_labels=2)),
    "vit_model": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, **PIXELS)),
    "clip": lambda: transformers.CLIPModel(clip_config()),
    "clip_vision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)),
    "clip_projected": lambda: transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**VISION)),
    "clip_classifier": lambda: transformers.CLIPForImageClassification(clip_config(num_labels=2)),
    "siglip": lambda: transformers.SiglipModel(
        transformers.SiglipConfig(
            vision_config={**SIZES, **PIXELS},
            text_config={**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 8, "projection_size": 16},
        )
    ),
}
TASKS = {"bert": "text-classification", "roberta": "text-classification", "gpt2_classifier": "text-classification"}
TASKS |= {"gpt2": "causal-lm", "gpt2_model": "causal-lm", "llama": "causal-lm", "mixtral": "causal-lm"}
TASKS |= {"vit": "image-classification", "clip_classifier": "image-classification"}


def build(family: str, seed: int = 0) -> nn.Module:
    """Return a model in which no two tensors are the same: norms and biases would be, and names could be mixed up."""
    torch.manual_seed(seed)
    model = BUILDERS[family]().eval()
    with torch.no_grad():
        for W in model.parameters():
            W += 0.1 * torch.randn(W.shape)
    return model


def save_tokenizer(folder: Path, *, framed: bool, typed: bool) -> None:
    """Save words as tokens: with the ends, the padding and the types of an encoder, or not."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed:
        ends = [(word, IDS[word]) for word in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {"unk_token": "[UNK]", "eos_token": "<eos>"} | ({"pad_token": "[PAD]"} if framed else {})
    inputs = ["input_ids", *(["token_type_ids"] if typed else []), "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", model_input_names=inputs, **special
    )
    fast.save_pretrained(folder)


PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 8},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 8, "width": 8},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
    "do_convert_rgb": True,
}


def save(folder: Path, family: str, seed: int = 0) -> nn.Module:
    model = build(family, seed)
    model.save_pretrained(folder)
    if family.startswith(("vit", "clip", "siglip")):
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    else:
        encoder = family.startswith(("bert", "roberta"))
        save_tokenizer(folder, framed=encoder, typed=encoder or family == "llama")  # which has no use for types
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves each family once and returns its folder and its model."""
    made: dict[str, tuple[Path, nn.Module]] = {}

    def get(family: str) -> tuple[Path, nn.Module]:
        if family not in made:
            folder = tmp_path_factory.mktemp("models") / family
            made[family] = (folder, save(folder, family))
        return made[family]

    return get


def rows_of(tmp_path: Path, rows: list[dict], name: str = "d.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_data(str(path))


def write_head(path: Path, classes: int, features: int, *, bias: bool = True) -> tuple[Path, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tensors = {"weight": torch.randn(classes, features, generator=generator)}
    if bias:
        tensors["bias"] = torch.randn(classes, generator=generator)
    save_file(tensors, path)
    return path, tensors


def fault(kind: type[EpimerError], call, *arguments, **options) -> str:
    with pytest.raises(kind) as caught:
        list(call(*arguments, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def first(task: Task, table, **options):
    options = {"batch_size": len(table), "text": None, "label": None, "image": None} | options
    return next(iter(task.batches(table, range(len(table)), **options)))


def check_names(task: Task, *, without: set[str] = frozenset()) -> None:
    """Every parameter is, under its name on disk, what lies there."""
    parameters = dict(task.model.named_parameters())
    left = {name for name in parameters if name not in task.names and not name.startswith("head.")}
    assert left == set(task.unmatched) == without
    assert len(set(task.names.values())) == len(task.names)
    for name, disk in task.names.items():
        assert torch.equal(parameters[name].cpu(), task.checkpoint.read(disk).to(parameters[name].dtype)), name
    assert not task.model.training


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [family for family in TASKS if family != "mixtral"])
def test_parameters_are_found_on_disk_whatever_they_are_called_there(saved, family):
    folder, model = saved(family)
    task = load_task(str(folder), TASKS[family])
    check_names(task)
    if family != "gpt2_model":
        assert all(map(torch.equal, task.model.parameters(), model.parameters()))
    assert task.checkpoint.fingerprint == open_checkpoint(str(folder)).fingerprint
    assert task.classes == {"bert": 3, "roberta": 2, "gpt2_classifier": 3, "vit": 2, "clip_classifier": 2}.get(family)
    names = set(task.names.items())
    if family == "vit":
        assert ("vit.layers.1.attention.q_proj.weight", "vit.encoder.layer.1.attention.attention.query.weight") in names
    elif family == "gpt2_model":
        assert ("transformer.h.0.ln_1.bias", "h.0.ln_1.bias") in names
    else:
        assert all(name == disk for name, disk in names)


def test_tensors_that_transformers_joins_are_left_out(saved):
    folder, _ = saved("mixtral")
    task = load_task(str(folder), "causal-lm")
    joined = {f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")}
    check_names(task, without=joined)
    assert task.names["model.layers.1.mlp.gate.weight"] == "model.layers.1.block_sparse_moe.gate.weight"


def test_a_name_that_only_ends_like_the_one_on_disk(saved, tmp_path):
    """As wrappers save: a prefix that transformers knows nothing of."""
    folder, model = saved("vit")
    task = load_task(str(folder), "image-classification")
    save_file(
        {f"net.inner.{n}": W for n, W in load_file(folder / "model.safetensors").items()}, tmp_path / "m.safetensors"
    )
    from epimer.tasks.loading import match_names

    found, unmatched, _ = match_names(task.model, open_checkpoint(str(tmp_path / "m.safetensors")))
    assert found["classifier.weight"] == "net.inner.classifier.weight"
    assert found["vit.layernorm.bias"] == "net.inner.vit.layernorm.bias"
    assert "vit.layers.0.attention.q_proj.weight" in unmatched
    changed = {f"net.inner.{n}": W + (n == "classifier.weight") for n, W in model.state_dict().items()}
    save_file(changed, tmp_path / "m.safetensors")
    _, unmatched, _ = match_names(task.model, open_checkpoint(str(tmp_path / "m.safetensors")))
    assert unmatched == ["classifier.weight"]


def test_tied_weights_kept_under_the_other_name(saved, tmp_path):
    folder, model = saved("gpt2")
    state = {
        ("lm_head.weight" if n == "transformer.wte.weight" else n): W.detach() for n, W in model.named_parameters()
    }
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    task = load_task(str(tmp_path), "causal-lm")
    check_names(task)
    assert task.names["transformer.wte.weight"] == "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_model_has_the_dtype_that_is_asked_for(saved, dtype):
    folder, model = saved("bert")
    task = load_task(str(folder), "text-classification", dtype=dtype)
    check_names(task)
    assert {W.dtype for W in task.model.parameters()} == {dtype}
    assert all(torch.equal(W, V.to(dtype)) for W, V in zip(task.model.parameters(), model.parameters(), strict=True))


def test_shards_and_torch_files(saved, tmp_path):
    folder, model = saved("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for kind in ("shards", "bin"):
            (tmp_path / kind / name).write_bytes((folder / name).read_bytes())
    for kind in ("shards", "bin"):
        task = load_task(str(tmp_path / kind), "causal-lm")
        check_names(task)
        assert all(map(torch.equal, task.model.parameters(), model.parameters()))


# --- adapters --------------------------------------------------------------------------------------------------------


def save_adapter(model: nn.Module, folder: Path, **config) -> dict[str, Tensor]:
    """Save an adapter in which nothing is zero; return what PEFT makes of it and the model."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **config))
    with torch.no_grad():
        for W in adapted.parameters():
            if W.requires_grad:
                W += 0.1 * torch.randn(W.shape)
    adapted.save_pretrained(folder)
    return {name: W.detach().clone() for name, W in adapted.merge_and_unload().named_parameters()}


ADAPTERS = {
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "bert": {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]},
}


@pytest.mark.parametrize("family", ADAPTERS)
def test_an_adapter_is_merged_in_as_peft_does(saved, tmp_path, family):
    folder, base = saved(family)
    expected = save_adapter(build(family), tmp_path / "adapter", **ADAPTERS[family])
    task = load_task(f"{folder}+{tmp_path / 'adapter'}", TASKS[family])
    check_names(task)
    found = dict(task.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, W in expected.items():
        torch.testing.assert_close(found[name], W, rtol=1e-6, atol=1e-6)
    moved = [name for name, W in base.named_parameters() if not torch.equal(W, found[name])]
    assert len(moved) == {"llama": 4, "gpt2": 4, "bert": 6}[family]
    again = load_task(str(folder), TASKS[family])
    assert again.checkpoint.fingerprint != task.checkpoint.fingerprint


def test_an_adapter_under_a_head_and_an_adapter_on_an_adapter(saved, tmp_path):
    """Both of a whole classifier, on the model without its head; PEFT itself would not find the names."""
    folder, _ = saved("bert")
    save_adapter(build("bert"), tmp_path / "one", target_modules=["query"])
    twice = build("bert")
    with torch.no_grad():
        adapted = load_task(f"{folder}+{tmp_path / 'one'}", "text-classification").model.state_dict()
    twice.load_state_dict(adapted)
    expected = save_adapter(twice, tmp_path / "two", target_modules=["query", "key"])
    head, _ = write_head(tmp_path / "head.safetensors", 4, 16)
    task = load_task(f"{folder}+{tmp_path / 'one'}+{tmp_path / 'two'}", "text-classification", head=head)
    check_names(task)
    assert len(task.names) == len(expected) - 2  # all but the classifier's
    for name, disk in task.names.items():
        torch.testing.assert_close(task.model.get_parameter(name), expected[disk], rtol=1e-6, atol=1e-6)


def test_an_adapter_of_what_transformers_joins_is_refused(saved, tmp_path):
    folder, model = saved("mixtral")
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    W = load_file(folder / "model.safetensors")[f"{name}.weight"]
    factors = {"A": torch.ones(2, W.shape[1]), "B": torch.ones(W.shape[0], 2)}
    (tmp_path / "a").mkdir()
    save_file(
        {f"base_model.model.{name}.lora_{k}.weight": F for k, F in factors.items()},
        tmp_path / "a" / "adapter_model.safetensors",
    )
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    said = fault(CheckpointError, load_task, f"{folder}+{tmp_path / 'a'}", "causal-lm")
    assert (
        f"changes '{name}.weight', which transformers holds in another form; merge it into its base with PEFT" in said
    )
    assert model is not None


# --- heads -----------------------------------------------------------------------------------------------------------

TEXT = {
    "input_ids": torch.tensor([[2, 5, 6, 3], [2, 9, 3, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
PICTURES = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))}


def masked_mean(hidden: Tensor) -> Tensor:
    return torch.stack([hidden[0].mean(0), hidden[1, :3].mean(0)])


def vision_of(model: nn.Module):
    return model.vision_model(**PICTURES)


HEADS = {
    ("bert", "auto", 16): lambda m: m.bert(**TEXT).pooler_output,
    ("bert", "mean", 16): lambda m: masked_mean(m.bert(**TEXT).last_hidden_state),
    ("bert_mlm", "auto", 16): lambda m: masked_mean(m.bert(**TEXT).last_hidden_state),  # it has no pooler
    ("bert_model", "pooler", 16): lambda m: m(**TEXT).pooler_output,
    ("bert_model", "cls", 16): lambda m: m(**TEXT).last_hidden_state[:, 0],
    ("llama", "auto", 16): lambda m: masked_mean(m.model(**TEXT).last_hidden_state),
    ("vit", "auto", 16): lambda m: m.vit(**PICTURES).last_hidden_state[:, 0],  # it has no pooler
    ("vit", "mean", 16): lambda m: m.vit(**PICTURES).last_hidden_state.mean(1),
    ("vit_model", "auto", 16): lambda m: m(**PICTURES).pooler_output,
    ("clip_vision", "auto", 16): lambda m: m(**PICTURES).pooler_output,
    ("clip_projected", "auto", 12): lambda m: m(**PICTURES).image_embeds,
    ("clip_projected", "pooler", 16): lambda m: vision_of(m).pooler_output,
    ("clip", "auto", 12): lambda m: m.visual_projection(vision_of(m).pooler_output),
    ("clip", "cls", 16): lambda m: vision_of(m).last_hidden_state[:, 0],
    ("siglip", "auto", 16): lambda m: vision_of(m).pooler_output,
}


@pytest.mark.parametrize(("family", "pooling", "features"), HEADS, ids=lambda value: str(value))
def test_a_head_reads_the_features_of_the_model_below(saved, tmp_path, family, pooling, features):
    folder, model = saved(family)
    path, head = write_head(tmp_path / "head.safetensors", 5, features, bias=pooling == "auto")
    inputs, kind = (PICTURES, "image") if family.startswith(("vit", "clip", "siglip")) else (TEXT, "text")
    task = load_task(str(folder), f"{kind}-classification", head=path, pooling=pooling)
    with torch.no_grad():
        expected = HEADS[family, pooling, features](model) @ head["weight"].T + head.get("bias", 0)
        torch.testing.assert_close(task.model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    assert task.classes == 5
    pooler = {"bert_mlm": "backbone.pooler.dense", "vit": "backbone.pooler.dense"}.get(family)
    check_names(task, without={f"{pooler}.weight", f"{pooler}.bias"} if pooler else set())
    assert set(task.names.values()) <= open_checkpoint(str(folder)).headers.keys()
    if family == "clip":
        layer = "encoder.layers.1.mlp.fc1.weight"
        vision = "backbone.vision_model." if pooling == "auto" else "backbone."
        assert task.names[vision + layer] == f"vision_model.{layer}"
        assert not any(disk.startswith("text") for disk in task.names.values())


def test_gradients_reach_the_backbone_and_not_the_head(saved, tmp_path):
    folder, _ = saved("clip_projected")
    path, _ = write_head(tmp_path / "head.safetensors", 3, 12)
    task = load_task(str(folder), "image-classification", head=path)
    task.loss(task.model(**PICTURES), torch.tensor([0, 2])).sum().backward()
    assert all(task.model.get_parameter(name).grad is not None for name in task.names)
    assert task.model.head.weight.grad is None


def test_heads_that_do_not_fit(saved, tmp_path):
    folder, _ = saved("clip_projected")

    def said(tensors: dict[str, Tensor] | None) -> str:
        path = tmp_path / "head.safetensors"
        if tensors is not None:
            save_file(tensors, path)
        text = fault(CheckpointError, load_task, str(folder), "image-classification", head=path)
        return text.replace(f"{path}", "HEAD")

    assert said(None) == "the head HEAD does not exist; give a file with 'weight' and 'bias'."
    assert said({"w": torch.ones(2, 12)}) == (
        "the head HEAD holds 'w'; expected 'weight' (classes, features) and, if any, 'bias'."
    )
    assert "has shapes {'weight': (12,)}; expected" in said({"weight": torch.ones(12)})
    assert "'bias': (3,)" in said({"weight": torch.ones(2, 12), "bias": torch.ones(3)})
    assert "at least 2 classes" in said({"weight": torch.ones(1, 12)})
    path, _ = write_head(tmp_path / "wide.safetensors", 2, 16)
    task = load_task(str(folder), "image-classification", head=path)
    with pytest.raises(CurvatureError, match="reads 16 features, but the model gives 12; was it trained on this model"):
        task.model(**PICTURES)
    assert fault(CurvatureError, load_task, str(saved("gpt2")[0]), "causal-lm", head=path).startswith("a head is for")
    said_pooler = fault(
        CheckpointError, load_task, str(saved("vit")[0]), "image-classification", head=path, pooling="pooler"
    )
    assert re.search(r"lacks 'pooler.dense.bias', 'pooler.dense.weight', which would be random numbers", said_pooler)


def test_poolings_that_cannot_be_had(saved, tmp_path):
    path, _ = write_head(tmp_path / "head.safetensors", 2, 16)
    task = load_task(str(saved("llama")[0]), "text-classification", head=path, pooling="pooler")
    with pytest.raises(CurvatureError, match="gives no features for pooling 'pooler': it has 'last_hidden_state', "):
        task.model(**TEXT)
    for source in saved("bert")[0].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    said = fault(CheckpointError, load_task, str(tmp_path), "text-classification", head=path)
    assert "lacks 'encoder.layer.2." in said
    assert said.endswith("give the whole model.")
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    said = fault(CheckpointError, load_task, str(tmp_path), "text-classification", head=path)
    assert "the config cannot be loaded by transformers: The checkpoint you are trying to load has model type" in said


# --- batches of texts ------------------------------------------------------------------------------------------------

SENTENCES = ["the cat sat on a mat", "dog ran", "the the xyz"]


def ids_of(text: str) -> list[int]:
    return [IDS.get(word, IDS["[UNK]"]) for word in text.split()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_targets_of_a_causal_model_are_the_next_tokens(saved, tmp_path, family):
    folder, model = saved(family)
    task = load_task(str(folder), "causal-lm")
    table = rows_of(tmp_path, [{"content": text} for text in SENTENCES])
    batches = list(task.batches(table, [2, 0, 1], batch_size=2, text=None, label=None, image=None))
    eos = IDS["<eos>"]
    one, two, three = (ids_of(SENTENCES[i]) for i in (2, 0, 1))
    assert [b[0]["input_ids"].tolist() for b in batches] == [[one + [eos] * 3, two], [three]]
    assert [b[0]["attention_mask"].tolist() for b in batches] == [[[1, 1, 1, 0, 0, 0], [1] * 6], [[1, 1]]]
    assert [b[1].tolist() for b in batches] == [
        [one[1:] + [-100] * 4, [*two[1:], -100]],
        [[*three[1:], -100]],
    ]
    assert set(batches[0][0]) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        losses = torch.cat([task.loss(task.model(**inputs), targets) for inputs, targets in batches])
        for ids, loss in zip((one, two, three), losses, strict=True):
            p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = -sum(p[t, ids[t + 1]] for t in range(len(ids) - 1))
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("answer", ["response", "completion"])
def test_with_a_response_beside_the_prompt_only_its_tokens_count(saved, tmp_path, answer):
    folder, model = saved("llama")
    task = load_task(str(folder), "causal-lm")
    rows = [("the cat sat", " on a mat"), ("dog", "ran")]
    table = rows_of(tmp_path, [{"prompt": prompt, answer: response} for prompt, response in rows])
    inputs, targets = first(task, table, batch_size=2)
    long, short, eos = ids_of("the cat sat on a mat"), ids_of("dog ran"), IDS["<eos>"]
    assert inputs["input_ids"].tolist() == [long, short + [eos] * 4]
    assert inputs["attention_mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    assert targets.tolist() == [[-100, -100, *long[3:], -100], [short[1], *[-100] * 5]]
    with torch.no_grad():
        losses = task.loss(task.model(**inputs), targets)
        for ids, start, loss in zip((long, short), (3, 1), losses, strict=True):
            p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = -sum(p[t - 1, ids[t]] for t in range(start, len(ids)))
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    _, alone = first(task, table, batch_size=1, text="prompt")
    assert alone.tolist() == [[*long[1:3], -100]]


def test_a_prompt_that_leaves_no_room_for_its_response(saved, tmp_path):
    task = load_task(str(saved("llama")[0]), "causal-lm")
    table = rows_of(tmp_path, [{"prompt": "the cat sat on", "response": "a mat"}])
    assert first(task, table, max_length=5)[1].tolist() == [[-100, -100, -100, IDS["a"], -100]]
    assert fault(DataError, first, task, table, max_length=4) == (
        "d.jsonl line 1 has a prompt of 4 tokens or more, which leaves none for its response; raise --max-length, or "
        "leave the row out."
    )
    table = rows_of(tmp_path, [{"prompt": "the cat", "response": None}])
    assert fault(DataError, first, task, table) == "d.jsonl line 1 has None in 'response', expected a text."


def test_texts_are_cut_to_what_is_asked_for_and_what_the_model_takes(saved, tmp_path):
    table = rows_of(tmp_path, [{"text": " ".join(["cat"] * 40)}])
    for family, limit in {"gpt2": 12, "llama": 32, "bert": 8, "roberta": 6}.items():
        task = load_task(str(saved(family)[0]), TASKS[family])
        for asked in (4, 512):
            inputs, _ = first(task, table, max_length=asked)
            assert inputs["input_ids"].shape == (1, min(asked, limit)), family
            task.model(**inputs)


def test_batches_for_a_classifier(saved, tmp_path):
    folder, model = saved("bert")
    task = load_task(str(folder), "text-classification")
    labels = [2, "0", "fine"]
    table = rows_of(tmp_path, [{"sentence": t, "label": y} for t, y in zip(SENTENCES, labels, strict=True)])
    inputs, targets = first(task, table)
    framed = [[2, *ids_of(text), 3] for text in SENTENCES]
    assert inputs["input_ids"].tolist() == [ids + [0] * (8 - len(ids)) for ids in framed]
    assert inputs["attention_mask"].tolist() == [[1] * len(ids) + [0] * (8 - len(ids)) for ids in framed]
    assert inputs["token_type_ids"].tolist() == [[0] * 8] * 3
    assert targets.tolist() == [2, 0, 1]
    with torch.no_grad():
        losses = task.loss(task.model(**inputs), targets)
        for ids, y, loss in zip(framed, [2, 0, 1], losses, strict=True):
            z = model(torch.tensor([ids])).logits[0].double()
            expected = math.log(sum(math.exp(v) for v in z)) - float(z[y])
            assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_a_decoder_classifies_at_the_last_token_that_is_real(saved, tmp_path):
    folder, model = saved("gpt2_classifier")
    task = load_task(str(folder), "text-classification")
    table = rows_of(tmp_path, [{"text": text} for text in SENTENCES])
    inputs, targets = first(task, table)
    assert targets is None
    with torch.no_grad():
        logits = task.model(**inputs).logits
        hidden = [model.transformer(torch.tensor([ids_of(text)])).last_hidden_state[0, -1] for text in SENTENCES]
        torch.testing.assert_close(logits, torch.stack(hidden) @ model.score.weight.T, rtol=1e-5, atol=1e-5)


def test_csv_labels_and_columns_by_name(saved, tmp_path):
    task = load_task(str(saved("bert")[0]), "text-classification")
    (tmp_path / "d.csv").write_text("words,mood\nthe cat,good\na dog, 1 \n")
    _, targets = first(task, open_data(str(tmp_path / "d.csv")), text="words", label="mood")
    assert targets.tolist() == [2, 1]


LABEL_FAULTS = {
    3: "d.jsonl line 2 has label 3, but the model's 3 classes are 0 to 2.",
    -1: "d.jsonl line 2 has label -1, but the model's 3 classes are 0 to 2.",
    "-1": "d.jsonl line 2 has label -1, but the model's 3 classes are 0 to 2.",
    "god": (
        "d.jsonl line 2 has label 'god', which is no class of the model: 'bad', 'fine', 'good'. Did you mean 'good'?"
    ),
    1.5: "d.jsonl line 2 has label 1.5, expected a class's number or name.",
    None: "d.jsonl line 2 has no label in 'label'; give every row one, or leave the row out.",
    "": "d.jsonl line 2 has no label in 'label'; give every row one, or leave the row out.",
}


@pytest.mark.parametrize("label", LABEL_FAULTS, ids=repr)
def test_labels_that_are_no_class(saved, tmp_path, label):
    task = load_task(str(saved("bert")[0]), "text-classification")
    table = rows_of(tmp_path, [{"text": "a", "label": 0}, {"text": "cat", "label": label}])
    if label in (-1, "-1"):  # data sets mark rows without labels so, which are good where labels are not needed
        assert first(task, table)[1].tolist() == [0, 0]
    task.require_labels = True
    assert fault(DataError, first, task, table) == LABEL_FAULTS[label]


def test_labels_that_are_missing(saved, tmp_path):
    task = load_task(str(saved("bert")[0]), "text-classification")
    table = rows_of(tmp_path, [{"text": "a", "label": 0}, {"text": "cat"}])
    assert fault(DataError, first, task, table) == LABEL_FAULTS[None]
    table = rows_of(tmp_path, [{"text": "a", "lable": 0}])
    assert first(task, table)[1] is None
    assert fault(DataError, first, task, table, label="label") == (
        "d.jsonl has no column 'label' for the label; it has 'text', 'lable'. Did you mean 'lable'?"
    )
    task.require_labels = True
    assert fault(DataError, first, task, table) == (
        "d.jsonl has no column 'label' or 'labels'; it has 'text', 'lable': name the one for the labels with --label."
    )
    assert first(task, table, label="lable")[1].tolist() == [0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "d.jsonl line 2 has None in 'text', expected a text."),
        (["a"], "d.jsonl line 2 has ['a'] in 'text', expected a text."),
        (" \n", "d.jsonl line 2 has an empty text in 'text'; leave the row out."),
        ("cat", "d.jsonl line 2 has 1 token, expected at least 2; leave it out."),
    ],
)
def test_texts_that_cannot_be_used(saved, tmp_path, value, said):
    task = load_task(str(saved("llama")[0]), "causal-lm")
    table = rows_of(tmp_path, [{"text": "a cat"}, {"text": value}])
    assert fault(DataError, first, task, table) == said


def test_columns_and_sizes_that_are_not_there(saved, tmp_path):
    task = load_task(str(saved("llama")[0]), "causal-lm")
    table = rows_of(tmp_path, [{"body": "a cat", "id": 3}])
    assert fault(DataError, first, task, table).endswith("it has 'body', 'id': name the one for the text with --text.")
    assert "no column 'bodi' for the text; it has 'body', 'id'. Did you mean 'body'?" in fault(
        DataError, first, task, table, text="bodi"
    )
    assert "'batch_size' parameter of a task must be at least 1. Got 0" in fault(
        ParameterError, first, task, table, batch_size=0
    )


def test_a_tokenizer_of_another_model(saved, tmp_path):
    folder, _ = saved("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    table = {word: i for i, word in enumerate([*WORDS, "zebra"])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = load_task(str(tmp_path), "causal-lm")
    table = rows_of(tmp_path, [{"text": "a zebra"}])
    assert fault(DataError, first, task, table) == (
        "d.jsonl line 1 has token 14, but the model knows 14 tokens; is this its tokenizer?"
    )


# --- batches of images -----------------------------------------------------------------------------------------------


def expected_pixels(path: Path) -> Tensor:
    """Return an image as PROCESSOR says: shortest edge to 8, the middle 8 x 8, to 0..1, standardised."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    scale = 8 / min(width, height)
    image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - 8) // 2, (image.height - 8) // 2
    image = image.crop((left, top, left + 8, top + 8))
    x = torch.tensor(list(image.tobytes()), dtype=torch.float64).view(8, 8, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(PROCESSOR[key], dtype=torch.float64).view(3, 1, 1) for key in ("image_mean", "image_std"))
    return (x - mean) / std


@pytest.fixture
def pictures(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name, size in {"cat/1.png": (16, 16), "dog/1.png": (24, 16), "dog/2.png": (16, 32)}.items():
        path = tmp_path / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = torch.randint(0, 256, (size[0] * size[1] * 3,), generator=generator)
        Image.frombytes("RGB", size, bytes(data.tolist())).save(path)
    return tmp_path / "pets"


@pytest.mark.parametrize("family", ["vit", "clip_classifier"])
def test_images_are_prepared_as_the_processor_says(saved, pictures, family):
    folder, model = saved(family)
    task = load_task(str(folder), "image-classification")
    table = open_data(str(pictures))
    inputs, targets = first(task, table)
    expected = torch.stack([expected_pixels(pictures / table.where(i)) for i in range(3)])
    torch.testing.assert_close(inputs["pixel_values"].double(), expected, rtol=1e-5, atol=1e-5)
    assert targets.tolist() == [0, 1, 1]
    assert inputs.keys() == {"pixel_values"}
    with torch.no_grad():
        torch.testing.assert_close(task.model(**inputs).logits, model(expected.float()).logits, rtol=1e-4, atol=1e-5)


def test_pixels_have_the_models_dtype(saved, pictures):
    task = load_task(str(saved("vit")[0]), "image-classification", dtype=torch.bfloat16)
    inputs, targets = first(task, open_data(str(pictures)))
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert task.loss(task.model(**inputs), targets).dtype == torch.float32


def test_class_folders_and_the_models_classes(saved, pictures, tmp_path):
    task = load_task(str(saved("vit")[0]), "image-classification")
    task.label2id = {"dog": 0, "cat": 1}
    assert first(task, open_data(str(pictures)))[1].tolist() == [1, 0, 0]  # the model's own names
    (pictures / "cat").rename(pictures / "1")
    (pictures / "dog").rename(pictures / "0")
    assert first(task, open_data(str(pictures)))[1].tolist() == [0, 0, 1]  # numbers
    (pictures / "0").rename(pictures / "bird")
    (pictures / "1").rename(pictures / "ant")
    assert first(task, open_data(str(pictures)))[1].tolist() == [0, 1, 1]  # as many, in their order
    (pictures / "cow").mkdir()
    (pictures / "ant" / "1.png").rename(pictures / "cow" / "1.png")
    (pictures / "bird" / "1.png").rename(pictures / "ant" / "1.png")
    assert fault(DataError, first, task, open_data(str(pictures))) == (
        "pets has 3 class folders ('ant', 'bird', 'cow'), but the model has 2 classes ('dog', 'cat'); "
        "name the folders as the model's classes, or by their numbers."
    )


def test_images_that_do_not_decode(saved, pictures):
    task = load_task(str(saved("vit")[0]), "image-classification")
    (pictures / "dog" / "2.png").write_bytes(b"not an image")
    assert re.match(
        r"dog/2\.png is not an image that can be decoded", fault(DataError, first, task, open_data(str(pictures)))
    )


def test_images_of_several_sizes_that_no_processor_evens_out(saved, pictures, tmp_path):
    for source in saved("vit")[0].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    uneven = {**PROCESSOR, "do_resize": False, "do_center_crop": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(uneven))
    task = load_task(str(tmp_path), "image-classification")
    said = fault(DataError, first, task, open_data(str(pictures)))
    assert re.match(r"cat/1\.png: the image processor failed: ", said)


# --- models that cannot be measured ----------------------------------------------------------------------------------


RANDOM = "which would be random numbers, and so would the curvature; give the whole model"
OTHER_KINDS = [
    (
        "bert_model",
        "text-classification",
        f"lacks 'classifier.bias', 'classifier.weight', {RANDOM}, or a trained head with --head.",
    ),
    ("llama", "text-classification", f"lacks 'score.weight', {RANDOM}, or"),
    ("clip", "image-classification", f"lacks 'classifier.bias', 'classifier.weight', {RANDOM}, or"),
    (
        "clip_vision",
        "image-classification",
        "is a clip_vision_model model, for which transformers has no AutoModelForImageClassification; "
        "give a model of that kind, or a head with --head.",
    ),
    (
        "vit",
        "causal-lm",
        "is a vit model, for which transformers has no AutoModelForCausalLM; give a model of that kind.",
    ),
    ("bert_mlm", "causal-lm", "is a BertForMaskedLM, which sees the next token; give a causal model."),
]


@pytest.mark.parametrize(("family", "task", "said"), OTHER_KINDS)
def test_models_of_another_kind(saved, family, task, said):
    folder, _ = saved(family)
    assert said in fault(CheckpointError, load_task, str(folder), task)


CODE = "asks for code that is not part of transformers"
LOADED = "cannot be loaded by transformers: "
DAMAGES = [
    ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, f"config.json {CODE} (auto_map), which is never run"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}, f"tokenizer_config.json {CODE}"),
    ("config.json", {"attn_implementation": "somebody/kernel"}, f"config.json {CODE} (attn_implementation)"),
    ("config.json", {"parts": [{"_attn_implementation": "a/b"}]}, f"config.json {CODE} (_attn_implementation)"),
    ("config.json", {"model_type": "nonesuch"}, f"the model {LOADED}The checkpoint you are trying to load has model"),
    ("config.json", {"num_hidden_layers": 3}, "lacks 'bert.encoder.layer.2."),
    ("config.json", {"num_hidden_layers": 10**30}, "config.json has 'num_hidden_layers' above 10000, which no network"),
    ("config.json", {"text_config": {"n_layers": 10**5}}, "config.json has 'n_layers' above 10000, which no network"),
    ("config.json", {"hidden_size": 18}, f"the model {LOADED}"),
    ("config.json", {"problem_type": "regression"}, "was trained for regression; expected one of two or more classes"),
    ("adapter_config.json", {"peft_type": "LORA"}, "holds adapter_config.json beside a whole model"),
    ("config.json", None, "has no config.json, so no model can be built"),
    ("tokenizer.json", None, "has no tokenizer; copy tokenizer.json"),
    ("tokenizer.json", {"version": 7}, f"the tokenizer {LOADED}"),
]


@pytest.mark.parametrize(("file", "change", "said"), DAMAGES)
def test_folders_that_are_not_right(saved, tmp_path, file, change, said):
    for source in saved("bert")[0].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "own.py").write_text("raise SystemExit")
    path = tmp_path / file
    if change is None:
        path.unlink()
    else:
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | change))
    assert said in fault(CheckpointError, load_task, str(tmp_path), "text-classification")


def test_other_faults(saved, tmp_path):
    folder, _ = saved("vit")
    assert fault(ParameterError, load_task, str(folder), "image-classify") == (
        "The 'task' parameter must be one of causal-lm, text-classification, image-classification, seq2seq-lm, "
        "image-text-to-text, automatic-speech-recognition. Got 'image-classify' instead. "
        "Did you mean 'image-classification'?"
    )
    assert "'pooling' parameter must be one of auto, pooler, cls, mean. Got 'max'" in fault(
        ParameterError, load_task, str(folder), "image-classification", pooling="max"
    )
    assert "has no config.json" in fault(CheckpointError, load_task, str(folder / "model.safetensors"), "causal-lm")
    assert "device 'nowhere' cannot" in fault(
        CurvatureError, load_task, str(folder), "image-classification", device="nowhere"
    )
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "has no image processor; copy preprocessor_config.json" in fault(
        CheckpointError, load_task, str(tmp_path), "image-classification"
    )


def test_a_model_with_one_output_is_no_classifier(saved, tmp_path):
    transformers.BertForSequenceClassification(bert_config(label2id={"x": 0}, id2label={0: "x"})).save_pretrained(
        tmp_path
    )
    said = fault(CheckpointError, load_task, str(tmp_path), "text-classification")
    assert "was trained for one output, a regression; expected one of two or more classes" in said


@pytest.mark.slow
def test_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from epimer.tasks.task import load_task\n"
        "try: load_task('nothing', 'causal-lm')\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "measuring a task needs transformers; install it: pip install 'epimer[hf]'\n"


def test_loading_leaves_transformers_as_it_was_and_says_nothing(saved, tmp_path, capfd):
    logging = transformers.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    fault(CheckpointError, load_task, str(saved("clip")[0]), "image-classification")
    load_task(str(saved("bert")[0]), "text-classification")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
