"""Merged folders are models to transformers: they load whole and compute what the same merge in memory computes.

The expected tensors come from files read with the safetensors library and merged by `merge_state_dicts`; the expected
outputs from a folder that the safetensors library wrote. Everything is compared bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import epimer

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file, save_model  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

VOCABULARY = 60
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {"vocab_size": VOCABULARY, **SIZES}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1}
SIGHT = {"image_size": 16, "patch_size": 8, **SIZES}
SHARD = 20_000  # bytes; every model here has more than three times as many


def bert() -> transformers.BertConfig:
    return transformers.BertConfig(max_position_embeddings=24, **TEXT)


def qwen2(*, tied: bool) -> transformers.PreTrainedModel:
    config = transformers.Qwen2Config(num_key_value_heads=1, tie_word_embeddings=tied, **TOKENS, **TEXT)
    return transformers.Qwen2ForCausalLM(config)


def clip() -> transformers.PreTrainedModel:
    text = {"max_position_embeddings": 24, **TOKENS, **TEXT}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=SIGHT, projection_dim=24))


def gpt2() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS))


def t5() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


@dataclass(frozen=True)
class Family:
    """An architecture: how to make one, which class loads it, and what it looks at."""

    make: Callable[[], transformers.PreTrainedModel]
    auto: type
    inputs: tuple[str, ...] = ("input_ids",)


IMAGES = ("pixel_values",)
FAMILIES = {
    "bert": Family(lambda: transformers.BertModel(bert()), transformers.AutoModel),
    "bert_classifier": Family(
        lambda: transformers.BertForSequenceClassification(bert()), transformers.AutoModelForSequenceClassification
    ),
    "bert_mlm": Family(lambda: transformers.BertForMaskedLM(bert()), transformers.AutoModelForMaskedLM),
    "clip": Family(clip, transformers.AutoModel, ("input_ids", "pixel_values")),
    "clip_vision": Family(
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIGHT)), transformers.AutoModel, IMAGES
    ),
    "vit": Family(lambda: transformers.ViTModel(transformers.ViTConfig(**SIGHT)), transformers.AutoModel, IMAGES),
    "vit_classifier": Family(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIGHT)),
        transformers.AutoModelForImageClassification,
        IMAGES,
    ),
    "llama": Family(
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TOKENS, **TEXT)),
        transformers.AutoModelForCausalLM,
    ),
    "qwen2": Family(lambda: qwen2(tied=False), transformers.AutoModelForCausalLM),
    "qwen2_tied": Family(lambda: qwen2(tied=True), transformers.AutoModelForCausalLM),
    "gpt2": Family(gpt2, transformers.AutoModelForCausalLM),
    "t5": Family(t5, transformers.AutoModelForSeq2SeqLM, ("input_ids", "decoder_input_ids")),
}
TIED = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "t5": {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    "bert_mlm": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "qwen2_tied": {"lm_head.weight": "model.embed_tokens.weight"},
}


pytestmark = pytest.mark.usefixtures("quiet_transformers")  # it also prints tables of keys, which are checked here


def make_models(family: str, count: int, dtype: torch.dtype = torch.float32) -> list[transformers.PreTrainedModel]:
    """Return an ancestor and `count` fine-tuned models: the ancestor and some noise."""
    made = []
    for t in range(count + 1):
        torch.manual_seed(0)
        model = FAMILIES[family].make()
        generator = torch.Generator().manual_seed(t)
        with torch.no_grad():
            for W in model.parameters():
                W += 0.02 * t * torch.randn(W.shape, generator=generator)
        made.append(model.to(dtype).eval())
    return made


def save_all(
    folder: Path, family: str, count: int, dtype: torch.dtype = torch.float32, shard: int | None = None
) -> list[Path]:
    """Save an ancestor and its fine-tuned models; with `shard`, in files of that many bytes."""
    paths = []
    for t, model in enumerate(make_models(family, count, dtype)):
        paths.append(folder / ("base" if t == 0 else f"model{t}"))
        model.save_pretrained(paths[-1], **({} if shard is None else {"max_shard_size": shard}))
    return paths


def stored(folder: Path) -> dict[str, Tensor]:
    """Return a folder's tensors as the safetensors library reads them."""
    return {name: W for file in sorted(folder.glob("*.safetensors")) for name, W in load_file(file).items()}


def recipe(paths: list[Path], method: str, **more) -> dict:
    return {
        "merge_method": method,
        "base_model": str(paths[0]),
        "models": [{"model": str(path)} for path in paths[1:]],
        **more,
    }


def in_memory(paths: list[Path], method: str, dtype: torch.dtype, **parameters) -> dict[str, Tensor]:
    """Merge what lies in safetensors files; widening before and rounding after change nothing, see docs/recipes.md."""
    base, *fine_tuned = ({name: W.float() for name, W in stored(path).items()} for path in paths)
    merged = epimer.merge_state_dicts(base, fine_tuned, method, **parameters)
    return {name: W.to(dtype) for name, W in merged.items()}


def load(folder: Path, auto: type, **how) -> tuple[transformers.PreTrainedModel, dict]:
    """Load a model with the list of keys that did not fit."""
    model, info = auto.from_pretrained(folder, output_loading_info=True, **how)
    return model.eval(), info


def looks_at(family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    known = {
        "input_ids": torch.randint(2, VOCABULARY, (2, 9), generator=generator),
        "decoder_input_ids": torch.randint(2, VOCABULARY, (2, 5), generator=generator),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(dtype),
    }
    return {name: known[name] for name in FAMILIES[family].inputs}


def outputs(model: transformers.PreTrainedModel, family: str) -> list[Tensor]:
    """Return every tensor of a forward pass."""
    with torch.no_grad():
        found = model(**looks_at(family, model.dtype), return_dict=True)
    tensors = [value for value in found.values() if isinstance(value, Tensor)]
    assert tensors
    return tensors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert that two state dicts are the same, bit by bit."""
    assert one.keys() == other.keys()
    for name, W in one.items():
        assert W.dtype == other[name].dtype, name
        assert torch.equal(W, other[name]), name


def whole(info: dict) -> None:
    """Assert that every key was found and none was left over."""
    assert not any(info.values()), info


def check_files(out: Path, expected: dict[str, Tensor], shard: int | None) -> None:
    """Assert that weights and index are what the safetensors library and the index's own definition say."""
    files = sorted(file.name for file in out.glob("*.safetensors"))
    index = out / "model.safetensors.index.json"
    if shard is None:
        assert files == ["model.safetensors"]
        assert not index.exists()
        return
    count = len(files)
    assert count >= 3
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    table = json.loads(index.read_text())
    held = {file: load_file(out / file) for file in files}
    assert table["weight_map"] == {name: file for file in files for name in held[file]}
    assert table["weight_map"].keys() == expected.keys()
    sizes = {file: sum(W.numel() * W.element_size() for W in tensors.values()) for file, tensors in held.items()}
    assert table["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= shard or len(held[file]) == 1 for file, size in sizes.items())
    for file in files:
        with safetensors.safe_open(out / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def dtypes_of(config: dict) -> set[str]:
    """Return every dtype that a config and the configs in it name."""
    found = {value for key, value in config.items() if key in ("dtype", "torch_dtype")}
    return found.union(*(dtypes_of(value) for value in config.values() if isinstance(value, dict)))


@dataclass(frozen=True)
class Case:
    """One merge: of what, by what, from which files into which."""

    family: str
    method: str
    parameters: dict = field(default_factory=dict)
    tasks: int = 2
    saved: str = "float32"
    asked: str | None = None
    shard_in: int | None = None
    shard_out: int | None = None

    def __str__(self) -> str:
        said = [f"{self.saved}-{self.asked}" if self.asked else self.saved]
        said += ["shards_in"] * bool(self.shard_in) + ["shards_out"] * bool(self.shard_out)
        return "-".join([self.family, self.method, *said])


CASES = [
    Case("bert", "average", shard_in=SHARD),
    Case("bert", "tsv", tasks=3, asked="bfloat16", shard_out=SHARD // 2),
    Case("bert_classifier", "ties", {"density": 0.3}, tasks=3, shard_in=SHARD, shard_out=SHARD),
    Case("bert_classifier", "epimer_free", saved="bfloat16"),
    Case("bert_mlm", "task_arithmetic", {"scale": 0.7}, shard_out=SHARD),
    Case("clip", "epimer_free", tasks=3, shard_in=SHARD, shard_out=SHARD),
    Case("clip", "ties", saved="bfloat16", asked="float32"),
    Case("clip_vision", "tsv", shard_out=SHARD),
    Case("clip_vision", "average", tasks=3, saved="bfloat16", shard_in=SHARD // 2),
    Case("vit", "task_arithmetic", {"scale": 0.4}, tasks=3, asked="bfloat16"),
    Case("vit_classifier", "epimer_free", shard_in=SHARD, shard_out=SHARD),
    Case("llama", "tsv", {"rank": 4}, tasks=3, saved="bfloat16", shard_in=SHARD // 2, shard_out=SHARD // 2),
    Case("llama", "ties", asked="float16"),
    Case("qwen2", "epimer_free", {"rank": 8}, asked="bfloat16", shard_out=SHARD // 2),
    Case("qwen2", "average", tasks=3, saved="bfloat16", asked="float32", shard_out=SHARD),
    Case("qwen2_tied", "tsv", saved="bfloat16", shard_out=SHARD // 2),
    Case("qwen2_tied", "dare", {"seed": 3}, tasks=3),
    Case("t5", "epimer_free", shard_in=SHARD, shard_out=SHARD),
    Case("t5", "ties", tasks=3, saved="bfloat16"),
    Case("gpt2", "tsv", tasks=3, shard_in=SHARD, shard_out=SHARD),
    Case("gpt2", "task_arithmetic", {"scale": 0.5}, saved="bfloat16", asked="float32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_merged_folder_loads_as_the_model_that_is_merged_in_memory(case, tmp_path):
    family, saved = FAMILIES[case.family], getattr(torch, case.saved)
    paths, out, twin = (
        save_all(tmp_path, case.family, case.tasks, saved, case.shard_in),
        tmp_path / "out",
        tmp_path / "t",
    )
    for path in paths:
        assert len(list(path.glob("*.safetensors"))) >= 3 if case.shard_in else (path / "model.safetensors").exists()
    given = recipe(paths, case.method, parameters=case.parameters, **({"dtype": case.asked} if case.asked else {}))
    epimer.merge(given, out, progress=False, **({"max_shard_size": case.shard_out} if case.shard_out else {}))

    dtype = getattr(torch, case.asked or case.saved)
    expected = in_memory(paths, case.method, dtype, **case.parameters)
    equal(stored(out), expected)
    check_files(out, expected, case.shard_out)
    assert dtypes_of(json.loads((out / "config.json").read_text())) == {case.asked or case.saved}

    twin.mkdir()
    save_file(expected, twin / "model.safetensors", {"format": "pt"})
    (twin / "config.json").write_bytes((paths[0] / "config.json").read_bytes())
    model, info = load(out, family.auto)
    other, _ = load(twin, family.auto, dtype=dtype)
    base, _ = load(paths[0], family.auto)
    whole(info)
    assert type(model) is type(other) is type(base)
    equal(model.state_dict(), other.state_dict())
    for name, head in TIED.get(case.family, {}).items():
        assert model.get_parameter(name) is model.get_parameter(head)
    found, wanted, before = (outputs(one, case.family) for one in (model, other, base))
    assert all(map(torch.equal, found, wanted))
    assert not any(torch.equal(one, another.to(dtype)) for one, another in zip(found, before, strict=True))


@pytest.mark.parametrize("family", ["bert_classifier", "bert_mlm", "vit_classifier", "llama", "gpt2", "t5"])
def test_auto_model_finds_in_the_merge_what_it_finds_in_the_base(family, tmp_path):
    """AutoModel drops heads and may miss a pooler; the merge must not make that any different."""
    paths, out = save_all(tmp_path, family, 2), tmp_path / "out"
    epimer.merge(recipe(paths, "average"), out, progress=False, max_shard_size=SHARD)
    model, info = load(out, transformers.AutoModel)
    base, known = load(paths[0], transformers.AutoModel)
    assert type(model) is type(base)
    assert info == known
    inner = load(out, FAMILIES[family].auto)[0].base_model.state_dict()
    found = {name: W for name, W in model.state_dict().items() if name not in info["missing_keys"]}
    equal(found, {name: inner[name] for name in found})


# --- what lies beside the weights -----------------------------------------------------------------------------------


def save_tokenizer(folder: Path, words: str) -> transformers.PreTrainedTokenizerFast:
    table = {word: i for i, word in enumerate(["<unk>", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=f"{{# {words} #}}{{{{ messages[0].content }}}}"
    )
    fast.save_pretrained(folder)
    return fast


PREPROCESSOR = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "do_normalize": True}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def furnished(tmp_path):
    """Llamas with tokenizers of which each adds a token, generation settings that differ, and a processor."""
    paths = save_all(tmp_path / "home", "llama", 2)
    for t, (path, words) in enumerate(
        zip(paths, ("red green blue", "red green blue pink", "red green blue pink mauve"), strict=True)
    ):
        save_tokenizer(path, words)
        transformers.GenerationConfig(max_new_tokens=11 + t, **TOKENS).save_pretrained(path)
        (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, "resample": t}))
        (path / "training_args.bin").write_bytes(b"not for others")
        (path / "modeling_own.py").write_text("raise SystemExit\n")
    return paths


def test_settings_tokenizer_and_processor_come_from_the_base(furnished, tmp_path):
    out = tmp_path / "out"
    epimer.merge(recipe(furnished, "average"), out, progress=False)
    for file in ("generation_config.json", "preprocessor_config.json", *TOKENIZER_FILES):
        assert (out / file).read_bytes() == (furnished[0] / file).read_bytes(), file
    ours = {"README.md", "epimer.json", "recipe.yaml", "config.json", "model.safetensors"}
    carried = {"generation_config.json", "preprocessor_config.json", *TOKENIZER_FILES}
    assert {file.name for file in out.iterdir()} == ours | carried
    assert load(out, transformers.AutoModelForCausalLM)[0].generation_config.max_new_tokens == 11
    text, known = "blue red mauve", transformers.AutoTokenizer.from_pretrained(furnished[0])
    assert transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"] == known(text)["input_ids"] == [3, 1, 0]


@pytest.mark.parametrize("among", [True, False])
def test_the_tokenizer_is_that_of_the_source_named(furnished, tmp_path, among):
    """A model of the recipe, or a model that is merged with nothing."""
    out, source = tmp_path / "out", furnished[2]
    paths = furnished if among else furnished[:2]
    epimer.merge(recipe(paths, "average", tokenizer_source=str(source)), out, progress=False)
    for file in ("generation_config.json", *TOKENIZER_FILES):
        assert (out / file).read_bytes() == (source / file).read_bytes(), file
    assert (out / "preprocessor_config.json").read_bytes() == (furnished[0] / "preprocessor_config.json").read_bytes()
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found("blue red mauve")["input_ids"] == [3, 1, 5]
    assert found.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert not any(str(tmp_path) in text for text in texts(out).values())


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json", "config.json"])
def test_a_file_that_changed_since_is_not_taken_for_the_one_that_was_carried(furnished, tmp_path, file):
    """The merge is not what lies there any more: it is written anew, or refused as something else."""
    out = tmp_path / "out"
    epimer.merge(recipe(furnished, "average"), out, progress=False)
    changed = {**json.loads((furnished[0] / file).read_text()), "changed": 1}
    (furnished[0] / file).write_text(json.dumps(changed))
    try:
        epimer.merge(recipe(furnished, "average"), out, progress=False)
    except epimer.OutputError:
        return
    assert json.loads((out / file).read_text()) == changed


def test_without_a_base_the_first_model_gives_the_files(furnished, tmp_path):
    out = tmp_path / "out"
    given = {"merge_method": "average", "models": [{"model": str(path)} for path in furnished[1:]]}
    epimer.merge(given, out, progress=False)
    for file in ("generation_config.json", "preprocessor_config.json", *TOKENIZER_FILES):
        assert (out / file).read_bytes() == (furnished[1] / file).read_bytes(), file
    one, other = (stored(path) for path in furnished[1:])
    equal(stored(out), epimer.merge_state_dicts(None, [one, other], "average"))


def texts(folder: Path) -> dict[str, str]:
    """Return every file of a folder that is not weights, and the headers of those that are."""
    found = {}
    for file in folder.rglob("*"):
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]
        found[file.name] = data.decode()
    return found


@pytest.mark.parametrize("shard", [None, SHARD])
def test_the_card_is_valid_and_no_file_tells_where_the_models_lay(furnished, tmp_path, shard):
    config = json.loads((furnished[0] / "config.json").read_text())
    (furnished[0] / "config.json").write_text(json.dumps({**config, "_name_or_path": str(furnished[0])}))
    out = tmp_path / "out"
    given = recipe(furnished, "ties", tokenizer_source=str(furnished[1]), parameters={"density": 0.4})
    epimer.merge(given, out, progress=False, **({"max_shard_size": shard} if shard else {}))
    read = texts(out)
    assert {"README.md", "config.json", "epimer.json"} <= read.keys()
    for name, text in read.items():
        assert str(tmp_path) not in text, name
        assert str(Path.home()) not in text, name
    start, front, body = read["README.md"].split("---\n", 2)
    head = yaml.safe_load(front)
    assert start == ""
    assert head["library_name"] == "transformers"
    assert {"merge", "epimer", "ties"} <= set(head["tags"])
    shown = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert shown == {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": "model1"}, {"model": "model2"}],
        "parameters": {"density": 0.4},
        "tokenizer_source": "model1",
    }


def test_a_config_of_transformers_4_gets_the_dtype_under_its_own_key(tmp_path):
    paths, out = save_all(tmp_path, "clip", 2), tmp_path / "out"
    config = json.loads((paths[0] / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part.pop("dtype", None)
        part["torch_dtype"] = "float32"
    (paths[0] / "config.json").write_text(json.dumps(config))
    epimer.merge(recipe(paths, "average", out_dtype="bfloat16"), out, progress=False)
    found = json.loads((out / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["torch_dtype"] = "bfloat16"
    assert found == config
    model, info = load(out, transformers.AutoModel)
    whole(info)
    assert {W.dtype for W in model.state_dict().values()} == {torch.bfloat16}


# --- torch files and tied weights -----------------------------------------------------------------------------------


def save_bin(folder: Path, model: transformers.PreTrainedModel, shards: int = 1) -> None:
    """Save as transformers 4 could: the whole state dict with its tied names; with `shards`, in that many files."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = dict(model.state_dict())
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    groups: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    place: dict[int, int] = {}  # names of one tensor go into one file, as transformers puts them
    for i, (name, W) in enumerate(state.items()):
        groups[place.setdefault(W.data_ptr(), i % shards)][name] = W
    files = [f"pytorch_model-{i:05d}-of-{shards:05d}.bin" for i in range(1, shards + 1)]
    for file, group in zip(files, groups, strict=True):
        torch.save(group, folder / file)
    weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def saved_as(kind: str, folder: Path, model: transformers.PreTrainedModel) -> Path:
    folder.mkdir(parents=True)
    if kind == "safetensors":
        model.save_pretrained(folder)
    elif kind == "save_model":  # safetensors' own way: one name kept, whichever sorts first; the others in the metadata
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    else:
        save_bin(folder, model, shards=3 if kind == "bin_shards" else 1)
    return folder


@pytest.mark.parametrize("method", ["tsv", "dare"])
@pytest.mark.parametrize(
    ("base", "others"),
    [
        ("bin", "bin"),
        ("bin_shards", "bin"),
        ("safetensors", "bin"),
        ("bin", "safetensors"),
        ("save_model", "save_model"),
        ("save_model", "bin"),
        ("bin", "save_model"),
        ("save_model", "safetensors"),
        ("safetensors", "save_model"),
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "t5", "bert_mlm"])
def test_tied_weights_stay_one_tensor_whichever_way_they_were_saved(family, base, others, method, tmp_path):
    made = make_models(family, 2)
    paths = [saved_as(base if t == 0 else others, tmp_path / f"m{t}", model) for t, model in enumerate(made)]
    out = tmp_path / "out"
    record = epimer.merge(recipe(paths, method), out, progress=False)

    ties = TIED[family]
    states = [{n: W for n, W in model.state_dict().items() if n not in ties} for model in made]
    expected = epimer.merge_state_dicts(states[0], states[1:], method)
    held = stored(out)
    assert len(held) == len(expected)
    if base != "save_model":
        equal(held, expected)
    if base.startswith("bin"):
        assert {name for name, found in record.tensors.items() if found.status == "tied"} == ties.keys()
    model, info = load(out, FAMILIES[family].auto)
    whole(info)
    for name, head in ties.items():
        assert model.get_parameter(name) is model.get_parameter(head)
    if base != "save_model" or method != "dare":  # dare draws by name, and save_model keeps another one
        equal({n: W for n, W in model.state_dict().items() if n not in ties}, expected)
        reference = make_models(family, 0)[0]
        reference.load_state_dict(expected, strict=False)
        assert all(map(torch.equal, outputs(model, family), outputs(reference, family)))


def test_a_merge_can_be_merged_again(tmp_path):
    """The output's own shards, index and tied names are read as they were meant."""
    made = make_models("gpt2", 2)
    paths = [saved_as("bin", tmp_path / f"m{t}", model) for t, model in enumerate(made)]
    first, second = tmp_path / "first", tmp_path / "second"
    epimer.merge(recipe(paths, "task_arithmetic"), first, progress=False, max_shard_size=SHARD)
    epimer.merge(recipe([first, *paths[1:]], "task_arithmetic"), second, progress=False)
    states = [{n: W for n, W in model.state_dict().items() if n != "lm_head.weight"} for model in made]
    once = epimer.merge_state_dicts(states[0], states[1:], "task_arithmetic")
    equal(stored(first), once)
    equal(stored(second), epimer.merge_state_dicts(once, states[1:], "task_arithmetic"))
    model, info = load(second, transformers.AutoModelForCausalLM)
    whole(info)
    assert model.lm_head.weight is model.transformer.wte.weight
