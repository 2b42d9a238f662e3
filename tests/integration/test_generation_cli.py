"""`epimer curvature` of models that write text from texts, images and speech: their own loss, and data files as read.

What is measured is compared with gradients, in float64, of the loss that transformers' model computes of labels put
together here: tokens looked up in a list of words, one row at a time and without padding.
"""

from __future__ import annotations

import json
import random
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epimer
from epimer.checkpoints import open_checkpoint
from epimer.evaluation.divergence import counted_logits
from epimer.evaluation.open_suite import open_suite
from epimer.evaluation.unlabelled import suite_of_inputs
from epimer.methods.rules import is_matrix
from epimer.plan.participants import align
from epimer.tasks.audio import read_recording
from epimer.tasks.batches import Batch
from epimer.tasks.data import open_data

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from commands import assert_refused, run  # noqa: E402
from tiny import write_jsonl  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:At least one mel filter:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the loss is that of:epimer.errors.EpimerWarning"),
    pytest.mark.usefixtures("no_progress_bars"),
]

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<image>", "USER:", "ASSISTANT:"]
PLAIN = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "fast", "see", "what", "?"]
WORDS = [*SPECIAL, *PLAIN]
IDS = {word: i for i, word in enumerate(WORDS)}
TEXT = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
ROWS, RATE = 5, 1600
PATCHES = 4  # an image of 8 x 8 in patches of 4 x 4
TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def t5() -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 6, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**TEXT, **sizes, decoder_start_token_id=0))


def bart() -> nn.Module:
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 16}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**TEXT, **sizes, decoder_start_token_id=3, tie_word_embeddings=False)
    )


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=1, max_position_embeddings=64)
    how = {"image_token_index": IDS["<image>"], "vision_feature_layer": -1}
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, **how)
    )


def whisper() -> nn.Module:
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "num_mel_bins": 4}
    sizes |= {"max_source_positions": 5, "max_target_positions": 12, "decoder_start_token_id": IDS["<s>"]}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**TEXT, **sizes, suppress_tokens=None, begin_suppress_tokens=None)
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {"t5": t5, "bart": bart, "llava": llava, "whisper": whisper}
ENDS = {"t5": "$A </s>", "bart": "<s> $A </s>", "llava": "<s> $A", "whisper": "<s> $A </s>"}
ON = {
    "t5": ("seq2seq-lm", "texts.jsonl"),
    "bart": ("seq2seq-lm", "texts.jsonl"),
    "llava": ("image-text-to-text", "images.jsonl"),
    "whisper": ("automatic-speech-recognition", "speech.jsonl"),
}


def tokenizer(family: str) -> Any:
    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single=ENDS[family], special_tokens=[(word, IDS[word]) for word in ("<s>", "</s>")]
    )
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **names, additional_special_tokens=["<image>"], chat_template=None
    )


def save(folder: Path, family: str, *, moved: bool = False) -> None:
    torch.manual_seed(1 if moved else 0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for W in model.parameters():
            W += 0.1 * torch.randn(W.shape)
    model.save_pretrained(folder)
    if family == "whisper":
        listening = {"feature_size": 4, "sampling_rate": RATE, "hop_length": 160, "chunk_length": 1, "n_fft": 400}
        transformers.WhisperFeatureExtractor(**listening).save_pretrained(folder)
    if family == "llava":
        pixels = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
        looking = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        images = transformers.CLIPImageProcessorPil(**pixels)
        transformers.LlavaProcessor(images, tokenizer(family), **looking, chat_template=TEMPLATE).save_pretrained(
            folder
        )
    else:
        tokenizer(family).save_pretrained(folder)


def write_wave(file: Path, values: np.ndarray, rate: int = RATE, channels: int = 1) -> None:
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(values.dtype.itemsize)
        out.setframerate(rate)
        out.writeframes(values.tobytes())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a model of every family and their data; sources are as long as targets, and are padded."""
    root = tmp_path_factory.mktemp("made")
    for family in FAMILIES:
        save(root / family, family)
    choose, noise = random.Random(0), np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(choose.choices(PLAIN, k=count))

    texts, images, speech = [], [], []
    for i in range(ROWS):
        texts.append({"document": words(i + 1), "summary": words(ROWS - i)})
        Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / f"{i}.png")
        images.append({"image": f"{i}.png", "prompt": words(2) + " ?", "completion": words(i + 1)})
        write_wave(root / f"{i}.wav", noise.integers(-20000, 20000, 500 + 200 * i, dtype=np.int16))
        speech.append({"audio": f"{i}.wav", "text": words(i + 1)})
    for name, rows in (("texts", texts), ("images", images), ("speech", speech)):
        write_jsonl(root / f"{name}.jsonl", rows)
    return root


# the same by hand


def tokens(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def pixels(file: Path) -> Tensor:
    with Image.open(file) as image:
        scaled = np.asarray(image) / 255
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return torch.tensor(((scaled - mean) / std).transpose(2, 0, 1), dtype=torch.float32)[None]


def by_hand(made: Path, family: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return every row's inputs and labels, as a user would write them for transformers' model."""
    rows = [json.loads(line) for line in (made / ON[family][1]).read_text().splitlines()]
    samples = []
    for row in rows:
        if family in ("t5", "bart"):
            start = [] if family == "t5" else [2]
            source, target = ([*start, *tokens(row[key]), 3] for key in ("document", "summary"))
            samples.append(({"input_ids": torch.tensor([source])}, torch.tensor([target])))
        elif family == "llava":
            prompt = [2, *tokens("USER:"), *[IDS["<image>"]] * PATCHES, *tokens(row["prompt"]), *tokens("ASSISTANT:")]
            answer = [*tokens(row["completion"]), 3]
            labels = torch.tensor([[-100] * len(prompt) + answer])
            inputs = {"input_ids": torch.tensor([prompt + answer]), "pixel_values": pixels(made / row["image"])}
            samples.append((inputs, labels))
        else:
            with wave.open(str(made / row["audio"])) as file:
                sound = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
            extractor = transformers.WhisperFeatureExtractor.from_pretrained(made / family)
            features = extractor(sound.astype(np.float32), sampling_rate=RATE, return_tensors="pt").input_features
            samples.append(({"input_features": features}, torch.tensor([[*tokens(row["text"]), 3]])))
    return samples


def load(made: Path, family: str) -> nn.Module:
    return type(FAMILIES[family]()).from_pretrained(made / family).double().eval()


def doubles(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def squares(made: Path, family: str) -> dict[str, Tensor]:
    """Return the mean over rows of squared gradients of the model's own loss, its mean over tokens undone."""
    model = load(made, family)
    total = {name: torch.zeros_like(W) for name, W in model.named_parameters()}
    samples = by_hand(made, family)
    for inputs, labels in samples:
        counted = int((labels[:, 1:] if family == "llava" else labels).ne(-100).sum())
        loss = model(**doubles(inputs), labels=labels).loss * counted
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for name, g in zip(total, found, strict=True):
            total[name] += 0 if g is None else g.square() / len(samples)
    return total


def stored_names(model: nn.Module, folder: Path) -> dict[str, str]:
    """Return tensor on disk -> parameter, by values; no two are alike."""
    disk = open_checkpoint(str(folder))
    values = {name: disk.read(name).double() for name in disk.headers}
    parameters = dict(model.named_parameters())
    return {
        name: next(key for key, V in parameters.items() if V.shape == W.shape and torch.equal(V, W))
        for name, W in values.items()
        if any(V.shape == W.shape and torch.equal(V, W) for V in parameters.values())
    }


def measured(*arguments: object, out: str = "out.curv") -> epimer.Curvature:
    ran = run("curvature", *arguments, "--labels", "true", "--dtype", "float64", "-o", out)
    assert ran.code == 0, ran.err
    return epimer.Curvature.load(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_curvature_is_that_of_the_models_own_loss(here, family):
    task, data = ON[family]
    found = measured(family, "--task", task, "--data", data, "--kind", "diagonal")
    expected, names = squares(here, family), stored_names(load(here, family), here / family)
    assert found.provenance.samples == ROWS
    assert len(found) > 20
    for name, metric in found.items():
        F = expected[names[name]]
        assert torch.allclose(metric.F.double(), F, rtol=1e-5, atol=1e-9 * float(F.max()) + 1e-12), name
    assert (found.inputs is None) is (family in ("llava", "whisper"))


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("bart", ("lm_head", "model.decoder.layers.0.fc1", "model.encoder.layers.0.fc1")),
        ("t5", ("decoder.block.0.layer.2.DenseReluDense.wi",)),
        ("whisper", ("model.decoder.layers.0.fc1",)),
    ],
)
def test_padding_of_sources_and_targets_does_not_count(here, family, layers):
    """Factors are of real tokens alone: the head's of targets, though sources are padded to the same length."""
    task, data = ON[family]
    found = measured(family, "--task", task, "--data", data, "--kind", "kronecker")
    model, seen = load(here, family), dict[str, list[Tensor]]()
    names = {memory: disk for disk, memory in stored_names(model, here / family).items()}
    for layer in layers:
        module = model.get_submodule(layer)
        module.register_forward_pre_hook(lambda _, args, layer=layer: seen.setdefault(layer, []).append(args[0]))
    with torch.no_grad():
        for inputs, labels in by_hand(here, family):
            model(**doubles(inputs), labels=labels)
    for layer in layers:
        x = torch.cat([x.flatten(0, -2) for x in seen[layer]])
        assert torch.allclose(found[names[f"{layer}.weight"]].A.double(), x.T @ x / len(x), rtol=1e-5, atol=1e-9), layer


def test_a_loader_of_labels_gives_the_same_as_the_command(here):
    """A Whisper model, which has no method to make its decoder's inputs, and labels padded by -100."""
    found = measured("whisper", "--task", "automatic-speech-recognition", "--data", "speech.jsonl")
    samples, model = by_hand(here, "whisper"), load(here, "whisper")
    longest = max(labels.shape[1] for _, labels in samples)
    labels = [nn.functional.pad(labels, (0, longest - labels.shape[1]), value=-100) for _, labels in samples]
    features = torch.cat([inputs["input_features"] for inputs, _ in samples]).double()
    loader = [{"input_features": features, "labels": torch.cat(labels)}]
    in_python = epimer.estimate_curvature(model, loader, labels="true", progress=False)
    names = {memory: disk for disk, memory in stored_names(model, here / "whisper").items()}
    assert len(in_python) == len(found) > 10
    for name, metric in in_python.items():
        for side in ("A", "G"):
            assert torch.allclose(getattr(found[names[name]], side), getattr(metric, side), rtol=1e-4, atol=1e-9), name


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_inputs_are_kept_and_judge_merges_without_labels(here, family):
    """Logits of the kept inputs are those of every row alone; a merge can choose its scale by them."""
    save(here / "moved", family, moved=True)
    how = ("--task", "seq2seq-lm", "--data", "texts.jsonl", "--quiet")
    for name in (family, "moved"):
        ran = run("curvature", name, *how, "-o", f"{name}.curv")
        assert ran.code == 0, ran.err
    curvature = epimer.Curvature.load("moved.curv")
    models = [open_checkpoint("moved")]
    suite = suite_of_inputs(["moved"], align(open_checkpoint(family), models, ["moved"]), [curvature], device="cpu")
    order = list(range(ROWS))
    random.Random(0).shuffle(order)
    for state, folder in ((suite.base, family), (suite.models[0], "moved")):
        expected = []
        model = type(FAMILIES[family]()).from_pretrained(here / folder).eval()
        with torch.no_grad():
            for inputs, labels in (by_hand(here, family)[i] for i in order):
                expected.append(model(**inputs, labels=labels).logits[0])
            network = suite.network(state, suite.tasks[0])
            batches = suite.tasks[0].splits["train"].batches(2)
            found = [counted_logits(Batch(inputs, targets, 0), network) for inputs, targets in batches]
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)
    recipe = f"merge_method: epimer_kron\nbase_model: {family}\nscale: auto\nrounds: 1\n"
    (here / "recipe.yaml").write_text(recipe + "models: [{model: moved, curvature: moved.curv}]\n")
    ran = run("merge", "recipe.yaml", "merged")
    assert ran.code == 0, ran.err


def test_sampled_labels_serve_a_merge(here):
    save(here / "moved", "t5", moved=True)
    ran = run("curvature", "moved", "--task", "seq2seq-lm", "--data", "texts.jsonl", "-o", "moved.curv", "--quiet")
    assert ran.code == 0, ran.err
    (here / "recipe.yaml").write_text(
        "merge_method: epimer_kron\nbase_model: t5\nmodels: [{model: moved, curvature: moved.curv}]\n"
    )
    ran = run("merge", "recipe.yaml", "merged", "--quiet")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_averaged_and_linear_layers_are_matrices(family):
    """By the kind of the module: embeddings of tokens and positions, and BART's bias of logits, are no matrices."""
    model = FAMILIES[family]()
    kinds = {f"{name}.weight": type(module) for name, module in model.named_modules()}
    for name, W in (*model.named_parameters(), *model.named_buffers()):  # a tied head is its table
        linear = kinds.get(name) is nn.Linear and "lm_head" not in name
        assert is_matrix(name, W.shape) is linear, name


@pytest.mark.parametrize("family", FAMILIES)
def test_suites_score_what_the_models_own_loss_says(here, family):
    """The loss per token of every row, as transformers' model has it; a head and classes are refused."""
    task, data = ON[family]
    save(here / "moved", family, moved=True)
    lines = f"base: {family}\ntask: {task}\nmetric: loss\ntasks: [{{model: moved, data: {{test: {data}}}}}]\n"
    (here / "suite.yaml").write_text(lines)
    suite = open_suite("suite.yaml", progress=False, device="cpu")
    model = type(FAMILIES[family]()).from_pretrained(here / "moved").eval()
    with torch.no_grad():
        expected = [-float(model(**inputs, labels=labels).loss) for inputs, labels in by_hand(here, family)]
    scores = suite.finite_scores(suite.models[0], suite.tasks[0], "test", "the model")
    torch.testing.assert_close(scores.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)
    (here / "suite.yaml").write_text(lines.replace("moved, data", "moved, classes: [a, b], data"))
    with pytest.raises(epimer.EpimerError, match=f"is {task}, which has no classes"):
        open_suite("suite.yaml", progress=False)


CHATS = {
    "parts": [
        {"role": "user", "content": [{"type": "image", "path": "{image}"}, {"type": "text", "text": "{prompt}"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "{completion}"}]},
    ],
    "marks": [{"from": "human", "value": "<image>{prompt}"}, {"from": "gpt", "value": "{completion}"}],
    "column": [{"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "{completion}"}],
}


@pytest.mark.parametrize("style", CHATS)
def test_chats_with_images_are_read_as_images_with_prompts(here, style):
    rows = [json.loads(line) for line in (here / "images.jsonl").read_text().splitlines()]
    chats = []
    for row in rows:
        text = json.dumps(CHATS[style])
        for key, value in row.items():
            text = text.replace("{" + key + "}", value)
        chats.append({"messages": json.loads(text), **({} if style == "parts" else {"images": [row["image"]]})})
    write_jsonl(here / "chats.jsonl", chats)
    how = ("--task", "image-text-to-text", "--kind", "diagonal")
    plain = measured("llava", "--data", "images.jsonl", *how)
    chat = measured("llava", "--data", "chats.jsonl", *how, out="chats.curv")
    assert list(chat) == list(plain)
    for name, metric in chat.items():
        assert torch.equal(metric.F, plain[name].F), name


@pytest.mark.parametrize(
    ("family", "rows", "more", "words"),
    [
        ("t5", [{"a": "the", "b": "cat"}], (), ("no columns for a source", "'a', 'b'", "--text source,target")),
        ("t5", [{"question": "the", "context": "a", "answer": "cat"}], (), ("2 ways", "--text question,answer")),
        ("t5", [{"text": "the", "target": "cat"}], ("--text", "text"), ("must name two columns",)),
        ("t5", [{"text": "the", "target": ""}], (), ("line 1", "empty text in 'target'")),
        ("whisper", [{"text": "the"}], (), ("no column 'audio'", "--audio")),
        ("whisper", [{"audio": "fast.wav", "text": "the"}], (), ("line 1", "8000 Hz", "-ar 1600")),
        ("whisper", [{"audio": "long.wav", "text": "the"}], (), ("line 1", "2.0 s", "hears 1 s")),
        ("whisper", [{"audio": "0.png", "text": "the"}], (), ("line 1", "not a PCM .wav recording", "ffmpeg")),
        ("whisper", [{"audio": "gone.wav", "text": "the"}], (), ("line 1", "gone.wav", "copy it there")),
        ("llava", [{"text": "the"}], (), ("no column 'image'", "--image")),
        ("llava", [{"image": "0.png", "prompt": "<image> <image>", "completion": "a"}], (), ("1 images", "2 places")),
        ("llava", [{"image": "0.png", "prompt": "a", "completion": "the"}], ("--max-length", "3"), ("--max-length",)),
        ("bart", [{"image": "0.png", "prompt": "a"}], ("--task", "image-text-to-text"), ("bart model", "ImageText")),
        ("t5", [{"text": "the", "target": "cat"}], ("--head", "0.png"), ("leave --head out for seq2seq-lm",)),
    ],
)
def test_what_is_refused(here, family, rows, more, words):
    write_wave(here / "fast.wav", np.ones(100, np.int16), rate=8000)
    write_wave(here / "long.wav", np.ones(2 * RATE, np.int16))
    write_jsonl(here / "rows.jsonl", rows)
    task = () if "--task" in more else ("--task", ON[family][0])
    assert_refused(run("curvature", family, *task, "--data", "rows.jsonl", "-o", "out", "-q", *more), *words)


@pytest.mark.parametrize(("width", "dtype"), [(1, np.uint8), (2, "<i2"), (3, None), (4, "<i4")])
def test_recordings_of_every_width(tmp_path, width, dtype):
    """A ramp over two channels, whose mean is read; three bytes are written by hand."""
    values = np.linspace(-0.9, 0.9, 20)
    top = 2 ** (8 * width - 1)
    stereo = np.stack([np.round(values * top), np.round(values * top / 2)], 1).astype(np.int64)
    if width == 3:
        raw = b"".join(int(v).to_bytes(3, "little", signed=True) for v in stereo.flatten())
    else:
        raw = (stereo + (128 if width == 1 else 0)).astype(dtype).tobytes()
    with wave.open(str(tmp_path / "a.wav"), "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(width)
        out.setframerate(8000)
        out.writeframes(raw)
    write_jsonl(tmp_path / "rows.jsonl", [{"audio": "a.wav"}])
    found = read_recording(open_data(str(tmp_path / "rows.jsonl")), 0, "audio")
    assert found.rate == 8000
    assert np.allclose(found.samples, 0.75 * values, atol=1.0 / top)


def test_recordings_in_tables(tmp_path):
    """Bytes in a parquet file, as the hub's data sets have them, and numbers in a row."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    values = np.arange(-4, 4, dtype=np.int16) * 4096
    write_wave(tmp_path / "a.wav", values)
    stored = {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "elsewhere.wav"}
    parquet.write_table(arrow.table({"audio": [stored]}), tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "rows.jsonl", [{"audio": {"array": (values / 32768).tolist(), "sampling_rate": RATE}}])
    for name in ("rows.parquet", "rows.jsonl"):
        found = read_recording(open_data(str(tmp_path / name)), 0, "audio")
        assert found.rate == RATE
        assert np.array_equal(found.samples, (values / 32768).astype(np.float32))
