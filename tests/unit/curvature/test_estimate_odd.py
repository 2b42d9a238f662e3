"""Layers unlike their kind, weights used elsewhere, odd shapes: right, or left out with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from cases import CLASSES, cross_entropy, draw, labels
from oracle import gradients, near


class Scaled(nn.Embedding):
    """As in BART, Gemma and other models: a subclass with a forward of its own."""

    def forward(self, ids):
        return 3 * super().forward(ids)


class Offset(nn.Embedding):
    """As OPT's positions: the input is not the row."""

    def forward(self, mask):
        return super().forward(mask.long().cumsum(1) + 1)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class StandardizedConv(nn.Conv2d):
    def forward(self, x):
        W = self.weight
        return functional.conv2d(x, (W - W.mean((1, 2, 3), keepdim=True)) / W.std((1, 2, 3), keepdim=True), self.bias)


class ChannelNorm(nn.LayerNorm):
    """As in ConvNeXt: channels are the second dimension."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GatedNorm(nn.Module):
    """As in Mamba: a norm with a second input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x, gate):
        x = x * gate.sigmoid()
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class NormalizedLinear(nn.Module):
    """A norm by name only: a layer that normalises its weight."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return x @ functional.normalize(self.weight, dim=1).T


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.norm, self.head = nn.Linear(4, 4), nn.Linear(4, 4), GatedNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.one(x), self.other(x)))


class TableAsHead(nn.Module):
    """The idiom of many language models: the table's weight is used without calling a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.layer(self.table(ids)).mean(1) @ self.table.weight.T


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.T


class TiedToUnknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, 4), nn.Linear(4, 4)
        self.head = Head(self.table.weight)

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)).mean(1))


class NeverCalled(nn.Module):
    """A layer that is read, but not called, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        self.read, self.head, self.unused = nn.Linear(4, 5), nn.Linear(5, CLASSES), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(functional.linear(x, self.read.weight, self.read.bias).tanh())


class OneAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True, **options), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Positions(nn.Module):
    """Learned positions in each of the shapes people give them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.tokens, self.positions, self.head = nn.Embedding(5, 4), nn.Embedding(9, 4), nn.Linear(4, CLASSES)
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, ids):
        x, steps = self.tokens(ids), torch.arange(ids.shape[1])
        match self.form:
            case "rows":
                x = x + self.positions(steps)
            case "one sample":
                x = x + self.positions(steps[None])
            case "every sample":
                x = x + self.positions(steps.expand_as(ids))
            case "expanded":
                x = torch.cat([self.positions(steps[:1]).expand(len(ids), 1, 4), x], 1)
            case "repeated":
                x = torch.cat([self.positions(steps[None, :1]).repeat(len(ids), 1, 1), x], 1)
            case _:
                x = torch.cat([self.start.expand(len(ids), -1, -1), x], 1)
        return self.head(x.tanh().mean(1))


def _on_vectors(*layers):
    return nn.Sequential(*layers), (draw(4, 4), labels(4))


def _on_pictures(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(CLASSES)), (
        draw(3, 2, 6, 6),
        labels(3),
    )


def _on_ids(model, tokens=5, samples=4):
    return model, (torch.randint(CLASSES, (samples, tokens)), labels(samples))


class Routed(nn.Module):
    """Some tokens go to an expert; here as many as there are samples, but not one of each."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        tokens = x.reshape(-1, 4)
        chosen = tokens[:, 0] > 0
        mixed = tokens.clone()
        mixed[chosen] = self.expert(tokens[chosen]).tanh()
        return self.head(mixed.view_as(x).mean(1))


def _routed(*chosen):
    x = draw(len(chosen), 2, 4)
    x[..., 0] = torch.tensor(chosen).double() - 0.5
    return Routed(), (x, labels(len(chosen)))


class Traced(nn.Module):
    """A part that was compiled long ago: nothing in it can be watched, nor asked for its arguments."""

    def __init__(self):
        super().__init__()
        self.part = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.part(x))


def _bilinear():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.head = nn.Bilinear(4, 4, 3), nn.Linear(3, CLASSES)

        def forward(self, x):
            return self.head(self.both(x, x.flip(1)))

    return Both(), (draw(4, 4), labels(4))


ODD = {
    "embedding with a forward of its own": lambda: _on_ids(
        nn.Sequential(Scaled(CLASSES, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    ),
    "embedding of other rows": lambda: _on_ids(nn.Sequential(Offset(18, 4), nn.Flatten(), nn.Linear(20, CLASSES))),
    "linear with a forward of its own": lambda: _on_vectors(DoubledLinear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
    "convolution with a forward of its own": lambda: _on_pictures(StandardizedConv(4, 4, 2), nn.Tanh()),
    "instance norm": lambda: _on_pictures(nn.Tanh(), nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
    "channels-first norm": lambda: _on_pictures(ChannelNorm(4), nn.Tanh()),
    "norm with two inputs": lambda: (Gated(), (draw(4, 4), labels(4))),
    "norm by name only": lambda: _on_vectors(NormalizedLinear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
    "table used as head": lambda: _on_ids(TableAsHead()),
    "table tied to an unknown layer": lambda: _on_ids(TiedToUnknown()),
    "a layer that is not called": lambda: (NeverCalled(), (draw(4, 4), labels(4))),
    "attention with bias_kv": lambda: (OneAttention(add_bias_kv=True), (draw(4, 3, 4), labels(4))),
    "attention with zeros": lambda: (OneAttention(add_zero_attn=True), (draw(4, 3, 4), labels(4))),
    "an expert's tokens": lambda: _routed((1, 1), (0, 0), (1, 0)),
    "an expert's tokens, the first two alike": lambda: _routed((1, 0), (0, 1), (1, 1), (0, 0)),
    "a traced part": lambda: (Traced(), (draw(4, 4), labels(4))),
    "bilinear": _bilinear,
    "max_norm": lambda: _on_ids(
        nn.Sequential(nn.Embedding(CLASSES, 4, max_norm=100.0), nn.Flatten(), nn.Linear(20, CLASSES))
    ),
    "transposed convolution": lambda: _on_pictures(nn.ConvTranspose2d(4, 2, 2), nn.Tanh()),
} | {
    f"positions as {form}, {T} tokens": lambda form=form, T=T: _on_ids(Positions(form), tokens=T)
    for form in ("rows", "one sample", "every sample", "expanded", "repeated", "parameter")
    for T in (1, 4, 5)
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_what_is_reported_is_right_and_the_rest_is_left_out_with_a_reason(name):
    torch.manual_seed(0)
    model, batch = ODD[name]()
    if isinstance(model, nn.Sequential) and batch[0].dim() == 4:
        model(batch[0].float())
    model.double()
    found = epimer.estimate_curvature(model, [batch], cross_entropy, kind="diagonal", labels="true")
    s = gradients(model, [batch], cross_entropy)
    assert not [name for name in found if not near(found[name].F, s[name].square().mean(0))]
    for missing in set(s) - set(found):
        assert found.provenance.left_out[missing]
    assert "head.weight" not in s or "head.weight" in found


class Tables(nn.Module):
    """A table alone, one that is also the head, a grouped convolution and a norm of two dimensions."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(CLASSES, 6), nn.Embedding(5, 6)
        self.middle, self.norm = nn.Linear(6, 6), nn.LayerNorm((5, 6))
        self.grouped, self.head = nn.Conv1d(6, 6, 3, padding=1, groups=2), nn.Linear(6, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(5).expand_as(ids))
        h = self.grouped(self.norm(self.middle(h)).transpose(1, 2)).transpose(1, 2)
        return self.head(h.mean(1))


@pytest.mark.parametrize("kind", ["kronecker", "samples"])
def test_only_what_is_a_matrix_and_a_table_is_said_to_be_both(kind):
    torch.manual_seed(0)
    batch = torch.randint(0, CLASSES, (8, 5)), torch.randint(0, CLASSES, (8,))
    found = epimer.estimate_curvature(Tables(), [batch], cross_entropy, kind=kind, progress=False)
    assert set(found) == {"middle.weight"}
    neither = "a table, a vector or a grouped convolution has no two-sided curvature"
    assert found.provenance.left_out == {
        "words.weight": "it is also used as a table, which has no two-sided curvature",
        **dict.fromkeys(("places.weight", "grouped.weight", "norm.weight", "norm.bias"), neither),
    }
