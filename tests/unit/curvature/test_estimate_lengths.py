"""Networks whose shapes depend on what is in the batch: padding is cut to the batch's longest text."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from epimer.curvature.recorder import ELSEWHERE, UNKNOWN
from epimer.errors import EpimerWarning, LeftOutWarning
from oracle import gradients, near

CLASSES, WORDS, WIDTH = 3, 9, 4


def cross_entropy(outputs, targets):
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return functional.cross_entropy(logits, targets, reduction="none")


def measure(model, batches, kind, labels="true"):
    return epimer.estimate_curvature(model, batches, cross_entropy, kind=kind, labels=labels, progress=False)


def texts(*lengths, side="right", width=8):
    """Return a batch of texts of these lengths, padded to `width`, which no text fills."""
    ids = torch.randint(1, WORDS, (len(lengths), width))
    places = torch.arange(width) if side == "right" else torch.arange(width).flip(0)
    mask = (places < torch.tensor(lengths)[:, None]).long()
    return {"ids": ids * mask, "attention_mask": mask}, torch.randint(CLASSES, (len(lengths),))


def batches(side="right", lengths=((1, 3, 2, 5, 4), (2, 6), (3,), (4, 1, 7, 2, 2, 3))):
    torch.manual_seed(1)
    return [texts(*group, side=side) for group in lengths]


class Text(nn.Module):
    """A classifier of texts; its layers keep samples first, second or flattened with the tokens."""

    def __init__(self, trim="", routed=False):
        super().__init__()
        self.trim, self.routed = trim, routed
        self.table, self.first, self.flat = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 5, batch_first=True)
        self.later, self.expert, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, ids, attention_mask):
        longest = int(attention_mask.sum(1).max())
        if self.trim == "right":
            ids, attention_mask = ids[:, :longest], attention_mask[:, :longest]
        if self.trim == "left":
            ids, attention_mask = ids[:, -longest:], attention_mask[:, -longest:]
        real = attention_mask.bool()
        x = self.norm(self.first(self.table(ids)).tanh())
        x = x + self.flat(x.flatten(0, 1)).tanh().view_as(x)
        x = self.layer(x, src_key_padding_mask=~real)
        x = self.later(x.transpose(0, 1)).tanh().transpose(0, 1)
        if self.routed:  # tokens of all samples, as many of each as it has
            mixed = x.clone()
            mixed[real] = self.expert(x[real]).tanh()
            x = mixed
        return self.head((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))


def pair(side, **options):
    """Return the network that trims its padding and the one that does not."""
    torch.manual_seed(0)
    trimmed, plain = Text(side, **options).double(), Text("", **options).double()
    plain.load_state_dict(trimmed.state_dict())
    return trimmed, plain


@pytest.mark.parametrize("labels", ["true", "model"])
@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "samples"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_trimmed_padding_changes_no_curvature(side, kind, labels):
    (trimmed, plain), data = pair(side), batches(side)
    measured, expected = measure(trimmed, data, kind, labels), measure(plain, data, kind, labels)
    assert measured.provenance.left_out == expected.provenance.left_out
    assert measured.provenance.counts == expected.provenance.counts
    assert {"first.weight", "flat.weight", "later.weight", "layer.linear1.weight", "head.weight"} <= set(measured)
    for name, metric in measured.items():
        D = torch.randn(trimmed.get_parameter(name).shape, dtype=torch.float64)
        assert near(metric.apply(D), expected[name].apply(D)), name


@pytest.mark.parametrize("lengths", [((1, 3, 2, 5, 4),), ((3, 5), (5, 1)), ((3, 1, 6), (2, 2, 2, 5)), ((4,), (2, 5))])
def test_the_diagonal_of_a_trimmed_network_is_that_of_its_samples_one_by_one(lengths):
    (trimmed, _), data = pair("right"), batches(lengths=lengths)
    measured, s = measure(trimmed, data, "diagonal"), gradients(trimmed, data, cross_entropy)
    assert set(s) - set(measured) == {"expert.weight", "expert.bias"} - set(measured)
    for name in measured:
        assert near(measured[name].F, s[name].square().mean(0)), name


MIXING = [
    ((1, 3, 2, 5, 4), (2, 6)),
    ((3, 5), (5, 1)),
    ((2, 2, 3, 3),),
    ((2, 2, 2, 6),),
    ((2, 2, 2, 2), (3, 1), (4, 4)),  # seen only after some batches that do not mix
]


@pytest.mark.parametrize("side", ["", "right"])
@pytest.mark.parametrize("lengths", MIXING)
def test_a_layer_that_mixes_samples_is_measured_with_batches_of_one(side, lengths):
    (model, data) = pair(side, routed=True)[0], batches(lengths=lengths)
    with pytest.warns(EpimerWarning, match="'expert.weight'.* mix the samples of a batch"):
        measured = measure(model, data, "diagonal")
    s = gradients(model, data, cross_entropy)
    assert measured.provenance.left_out == {}
    assert set(measured) == set(s)
    for name in measured:
        assert near(measured[name].F, s[name].square().mean(0)), name


@pytest.mark.parametrize("kind", ["kronecker", "ekfac", "samples"])
def test_a_layer_that_mixes_samples_has_the_curvature_of_batches_of_one(kind):
    (model, data) = pair("right", routed=True)[0], batches()
    ones = [({k: v[n : n + 1] for k, v in x.items()}, y[n : n + 1]) for x, y in data for n in range(len(y))]
    with pytest.warns(EpimerWarning, match="mix the samples of a batch"):
        measured = measure(model, data, kind)
    expected = measure(model, ones, kind)
    assert "expert.weight" in measured
    assert set(measured) == set(expected)
    assert measured.provenance.counts == expected.provenance.counts
    for name, metric in measured.items():
        D = torch.randn(model.get_parameter(name).shape, dtype=torch.float64)
        assert near(metric.apply(D), expected[name].apply(D)), name


def test_what_is_left_out_is_warned_of_by_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.token = nn.Linear(4, 4), nn.Linear(4, CLASSES), nn.Parameter(torch.randn(1, 1, 4))
            self.square = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.two(self.one(x + self.token[0]) @ self.one.weight @ self.square.T)

    data = [(torch.randn(3, 4), torch.randint(CLASSES, (3,)))]
    with pytest.warns(LeftOutWarning) as raised:
        measured = measure(Odd(), data, "kronecker")
    assert set(measured) == {"two.weight"}
    (text,) = (str(warning.message) for warning in raised)
    assert f"'one.weight' ({ELSEWHERE})" in text
    assert f"'square' ({UNKNOWN})" in text
    assert "token" not in text


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_a_transformers_model_that_trims_is_measured(architecture):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "max_position_embeddings": 8, "num_labels": CLASSES, "attn_implementation": "eager"}
    if architecture == "bert":
        sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 5}
        inner = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **small))
    else:
        sizes = {"dim": 4, "n_layers": 2, "n_heads": 2, "hidden_dim": 5}
        inner = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes, **small))

    class Trimmed(nn.Module):
        def __init__(self, trim):
            super().__init__()
            self.inner, self.trim = inner, trim

        def forward(self, ids, attention_mask):
            end = int(attention_mask.sum(1).max()) if self.trim else None
            return self.inner(input_ids=ids[:, :end], attention_mask=attention_mask[:, :end])

    inner.double()
    data = batches()
    for kind in ("diagonal", "kronecker"):
        measured, expected = measure(Trimmed(True), data, kind), measure(Trimmed(False), data, kind)
        assert measured.provenance.left_out == expected.provenance.left_out
        assert len([name for name in measured if "weight" in name]) >= 12
        for name, metric in measured.items():
            D = torch.randn(inner.get_parameter(name.removeprefix("inner.")).shape, dtype=torch.float64)
            assert near(metric.apply(D), expected[name].apply(D)), name


# --- padding that no mask of a known form tells of -------------------------------------------------------------------


class Tagger(nn.Module):
    """A causal transformer that labels each token, with no mask or one that is called and shaped in its own way."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.features, self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def attend(self, x, hidden):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) + torch.ones(x.shape[1], x.shape[1]).tril().log()
        return x + self.out(scores.masked_fill(hidden, torch.finfo(x.dtype).min).softmax(-1) @ v)

    def forward(self, ids, mask=None):
        x = self.features(ids).tanh() if ids.is_floating_point() else self.table(ids)
        if mask is None:
            hidden = torch.zeros(1, 1, 1, dtype=torch.bool)  # the tokens of a text do not look at those after it
        else:
            hidden = mask[:, 0] < 0 if mask.dim() == 4 else ~mask.bool()[:, None]
        x = self.attend(x, hidden)
        return self.head(x + self.narrow(self.wide(x).tanh()))


def on_real_tokens(outputs, targets):
    return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").sum(1)


def tagged(told, features):
    """Return batches of padded texts, and the same texts one by one."""
    torch.manual_seed(3)
    side = "left" if told == "mask" else "right"
    table = torch.randn(WORDS, WIDTH, dtype=torch.float64)
    together, alone = [], []
    for lengths in ((5, 2, 4), (3, 6), (1, 1)):
        inputs, _ = texts(*lengths, side=side)
        real = inputs["attention_mask"].bool()
        targets = torch.where(real, torch.randint(CLASSES, real.shape), -100)
        ids = table[inputs["ids"]] if features else inputs["ids"]
        ahead = torch.where(real, 0.0, float("-inf")).double()[:, None, None].expand(-1, 1, 8, 8)
        masks = {"mask": {"mask": real.long()}, "4-D": {"mask": ahead}, "none": {}}
        together.append(({"ids": ids, **masks[told]}, targets))
        alone += [({"ids": ids[n : n + 1, real[n]]}, targets[n : n + 1, real[n]]) for n in range(len(lengths))]
    return together, alone


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
@pytest.mark.parametrize("labels", ["true", "expected"])
@pytest.mark.parametrize("features", [False, True], ids=["tokens", "features"])
@pytest.mark.parametrize("told", ["mask", "4-D", "none"])
def test_padding_counts_in_no_factor_however_the_model_learns_of_it(told, features, labels, sequence):
    torch.manual_seed(0)
    model = Tagger().double()
    measured, expected = (
        epimer.estimate_curvature(model, batches, on_real_tokens, labels=labels, sequence=sequence, progress=False)
        for batches in tagged(told, features)
    )
    layers = ("qkv", "out", "wide", "narrow", "head", *(["features"] if features else []))
    assert set(measured) == set(expected) >= {f"{layer}.weight" for layer in layers}
    for name, metric in measured.items():
        assert near(metric.A, expected[name].A), name
        assert near(metric.G, expected[name].G), name
    assert measured.provenance.counts == expected.provenance.counts
    assert measured.provenance.tokens == 5 + 2 + 4 + 3 + 6 + 1 + 1


def test_tokens_that_count_through_others_alone_count_in_every_layer():
    """Prompts and tokens that a classifier does not read have no gradient in the last layers, and count there too."""

    class Masked(Tagger):
        def forward(self, ids, attention_mask):
            return super().forward(ids, attention_mask)

    torch.manual_seed(0)
    model, masked = Tagger().double(), Masked().double()
    masked.load_state_dict(model.state_dict())
    batches, _ = tagged("none", features=False)
    for _, targets in batches:
        last = (targets != -100).sum(1, keepdim=True) - 1
        targets[torch.arange(targets.shape[1]) < last] = -100
    known = [({**inputs, "attention_mask": (inputs["ids"] != 0).long()}, targets) for inputs, targets in batches]
    measured, expected = (
        epimer.estimate_curvature(net, data, on_real_tokens, labels="true", progress=False)
        for net, data in ((model, batches), (masked, known))
    )
    assert measured.provenance.counts == expected.provenance.counts
    for name, metric in measured.items():
        assert near(metric.A, expected[name].A), name
        assert near(metric.G, expected[name].G), name
