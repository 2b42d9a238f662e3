"""Models of speech that are trained by CTC: their curvature is that of their own loss, by the command and in Python."""

from __future__ import annotations

import itertools
import json
import wave

import numpy as np
import pytest
import torch
from torch import nn

import epimer
from commands import assert_refused, run
from epimer.evaluation.open_suite import open_suite
from epimer.tasks.ctc import CtcLoss

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the loss is that of:epimer.errors.EpimerWarning"),
    pytest.mark.filterwarnings("ignore:left out, without curvature.*parametrised:epimer.errors.LeftOutWarning"),
]
LETTERS = ["<pad>", "<unk>", "|", *"abcdefg"]
RATE, LENGTHS = 1600, (400, 400, 300, 300, 360)
TEXTS = ("abba", "c dag", "fed", "a", "gg ee")


def build(norm: str = "layer") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    sound = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    how = {"feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer", "ctc_loss_reduction": "sum"}
    config = transformers.Wav2Vec2Config(vocab_size=len(LETTERS), pad_token_id=0, **sizes, **sound, **places, **how)
    return transformers.Wav2Vec2ForCTC(config).double().eval()


def labels(text: str) -> torch.Tensor:
    return torch.tensor([[LETTERS.index("|" if letter == " " else letter) for letter in text]])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model, its tokenizer and feature extractor, and five recordings of three lengths."""
    monkeypatch.chdir(tmp_path)
    transformers.logging.disable_progress_bar()
    build().float().save_pretrained("listener")
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    transformers.Wav2Vec2CTCTokenizer("vocab.json", bos_token=None, eos_token=None).save_pretrained("listener")
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, do_normalize=False).save_pretrained("listener")
    noise = np.random.default_rng(0)
    rows = []
    for i, (length, text) in enumerate(zip(LENGTHS, TEXTS, strict=True)):
        with wave.open(f"{i}.wav", "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes(noise.integers(-20000, 20000, length, dtype=np.int16).tobytes())
        rows.append({"audio": f"{i}.wav", "text": text})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    transformers.logging.enable_progress_bar()


def sounds() -> list[torch.Tensor]:
    found = []
    for i in range(len(LENGTHS)):
        with wave.open(f"{i}.wav") as file:
            found.append(np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768)
    return [torch.tensor(sound)[None] for sound in found]


def squares(model: nn.Module, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean over rows of squared gradients of the model's own loss."""
    total = {name: torch.zeros_like(W) for name, W in model.named_parameters()}
    for sound, transcript in rows:
        loss = model(sound, labels=transcript).loss
        for name, g in zip(total, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True):
            total[name] += 0 if g is None else g.square() / len(rows)
    return total


def compare(found: epimer.Curvature, expected: dict[str, torch.Tensor]) -> None:
    assert len(found) > 40
    assert {name for name in expected if name not in found} <= {name for name in expected if "parametrizations" in name}
    largest = max(float(F.max()) for F in expected.values())
    for name, metric in found.items():
        assert torch.allclose(metric.F, expected[name], rtol=1e-4, atol=1e-12 * largest), name


TASK = ("--task", "automatic-speech-recognition", "--data", "rows.jsonl", "--dtype", "float64", "-q")


def test_the_command_measures_the_models_own_loss(here):
    ran = run("curvature", "listener", *TASK, "--labels", "true", "--kind", "diagonal", "-o", "out.curv")
    assert ran.code == 0, ran.err
    model = transformers.Wav2Vec2ForCTC.from_pretrained("listener").double().eval()
    found = epimer.Curvature.load("out.curv")
    assert found.provenance.samples == len(TEXTS)
    compare(found, squares(model, [(sound, labels(text)) for sound, text in zip(sounds(), TEXTS, strict=True)]))


def test_the_factors_of_a_command_serve_a_merge(here):
    """Under labels that the model samples, by default."""
    model = build()
    with torch.no_grad():
        for W in model.parameters():
            W += 0.01 * torch.randn_like(W)
    model.float().save_pretrained("moved")
    for file in ("vocab.json", "tokenizer_config.json", "preprocessor_config.json"):
        (here / "moved" / file).write_bytes((here / "listener" / file).read_bytes())
    ran = run("curvature", "moved", *TASK, "-o", "moved.curv")
    assert ran.code == 0, ran.err
    recipe = "merge_method: epimer_kron\nbase_model: listener\nmodels: [{model: moved, curvature: moved.curv}]\n"
    (here / "recipe.yaml").write_text(recipe)
    ran = run("merge", "recipe.yaml", "merged", "-q")
    assert ran.code == 0, ran.err
    merged = transformers.Wav2Vec2ForCTC.from_pretrained("merged")
    assert torch.isfinite(merged(sounds()[0].float()).logits).all()


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_a_padded_loader_is_measured_without_its_padding(here, norm):
    """With a mask every recording counts alone, as the model hears it, also where the padding would change it."""
    model, rows = build(norm), list(zip(sounds(), map(labels, TEXTS), strict=True))
    longest = [max(part.shape[1] for part in column) for column in zip(*rows, strict=True)]
    batch = {
        "input_values": torch.cat([nn.functional.pad(x, (0, longest[0] - x.shape[1])) for x, _ in rows]),
        "labels": torch.cat([nn.functional.pad(y, (0, longest[1] - y.shape[1]), value=-100) for _, y in rows]),
        "attention_mask": torch.stack([(torch.arange(longest[0]) < x.shape[1]).long() for x, _ in rows]),
    }
    found = epimer.estimate_curvature(model, [batch], kind="diagonal", labels="true", progress=False)
    compare(found, squares(model, rows))


def test_sampled_transcripts_give_the_fisher_information():
    """Σ_y p(y) ∇log p(y) ∇log p(y)ᵀ over all transcripts of three frames, in the logits."""
    logits = torch.tensor([[0.3, -0.2, 0.8], [1.0, 0.1, -0.4], [0.0, 0.5, 0.2]], dtype=torch.float64)[None]
    loss, paths = CtcLoss(blank=0), itertools.product(range(3), repeat=3)
    texts = {tuple(token for token, _ in itertools.groupby(path) if token) for path in paths}

    def gradient(text: tuple[int, ...]) -> tuple[float, torch.Tensor]:
        probe = logits.clone().requires_grad_()
        value = loss(probe, torch.tensor([text], dtype=torch.long))
        return float(torch.exp(-value.detach())), torch.autograd.grad(value.sum(), probe)[0].flatten()

    weighted = [gradient(text) for text in texts]
    assert sum(p for p, _ in weighted) == pytest.approx(1)
    fisher = sum(p * torch.outer(g, g) for p, g in weighted)
    drawn = loss.sample(logits.expand(20000, -1, -1), torch.Generator().manual_seed(0))
    many = logits.repeat(len(drawn), 1, 1).requires_grad_()
    gradients = torch.autograd.grad(loss(many, drawn).sum(), many)[0].flatten(1)
    assert (gradients.T @ gradients / len(drawn) - fisher).norm() < 0.02 * fisher.norm()


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([{"audio": "0.wav", "text": "abcdefg" * 9}], ("--labels", "true"), ("line 1", "inf")),
        ([{"audio": "0.wav", "text": "ab"}], ("--labels", "expected"), ("CTC", "labels='model'")),
    ],
)
def test_what_is_refused(here, rows, more, words):
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_refused(run("curvature", "listener", *TASK, *more, "-o", "out"), *words)


def test_suites_do_not_score_transcripts(here):
    (here / "suite.yaml").write_text(
        "base: listener\ntask: automatic-speech-recognition\ntasks: [{model: listener, data: {test: rows.jsonl}}]\n"
    )
    suite = open_suite("suite.yaml", progress=False, device="cpu")
    with pytest.raises(epimer.EpimerError, match="trained by CTC, whose transcripts suites do not score"):
        suite.finite_scores(suite.models[0], suite.tasks[0], "test", "the model")


def test_another_loss_than_the_models_own_is_refused():
    """A model called ForCTC whose loss is another one."""
    model = build()
    own = type(model).forward

    class OtherForCTC(type(model)):
        def forward(self, input_values, labels=None):
            outputs = own(self, input_values, labels=labels)
            outputs.loss = None if labels is None else 2 * outputs.loss
            return outputs

    model.__class__ = OtherForCTC
    batch = {"input_values": torch.randn(2, 400, dtype=torch.float64), "labels": torch.tensor([[3, 4], [5, -100]])}
    with pytest.raises(epimer.CurvatureError, match=r"OtherForCTC is not the CTC loss of its logits.*give loss_fn="):
        epimer.estimate_curvature(model, [batch], progress=False)
