"""Layers beside the usual ones: transposed and volume convolutions, recurrent layers, routers, parametrised weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import epimer
from cases import CLASSES, cross_entropy, draw, labels
from epimer.curvature.recorder import PARAMETRISED, UNKNOWN
from epimer.errors import LeftOutWarning
from oracle import gradients, near


class Pooled(nn.Module):
    """A convolution of any kind, and the mean over its places to classes."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).tanh().flatten(2).mean(2))


class Recurrent(nn.Module):
    def __init__(self, layer, *, initial=False):
        super().__init__()
        self.layer, self.initial = layer, initial
        self.head = nn.Linear((1 + layer.bidirectional) * layer.hidden_size, CLASSES)

    def forward(self, x):
        layer, N = self.layer, x.shape[0]
        x = x if layer.batch_first else x.transpose(0, 1)
        state = None
        if self.initial:
            start = torch.linspace(-1, 1, layer.hidden_size).double()
            start = start.expand(layer.num_layers * (1 + layer.bidirectional), N, -1).contiguous()
            state = (start, 0.5 * start) if isinstance(layer, nn.LSTM) else start
        y, end = layer(x, state)
        end = end[0] if isinstance(layer, nn.LSTM) else end
        y = y if layer.batch_first else y.transpose(0, 1)
        return self.head(y.square().mean(1) + torch.cat(list(end[-1 - layer.bidirectional :]), dim=1))


CONVOLUTIONS = {
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1), (5,)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 4, (2, 3), stride=(2, 1), padding=(0, 1)), (3, 4)),
    "transposed 2d, patches apart": (lambda: nn.ConvTranspose2d(2, 4, 2, stride=2, bias=False), (3, 3)),
    "transposed 2d, wide output": (lambda: nn.ConvTranspose2d(2, 4, 2, dilation=3, output_padding=2), (3, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2, stride=2, padding=1), (2, 3, 2)),
    "3d": (lambda: nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)), (3, 4, 4)),
    "3d, same": (lambda: nn.Conv3d(2, 4, 3, padding="same", padding_mode="circular"), (3, 4, 3)),
    "transposed 2d, groups": (lambda: nn.ConvTranspose2d(2, 4, 3, groups=2), (2, 3)),
    "3d, groups": (lambda: nn.Conv3d(2, 4, 2, groups=2), (2, 3, 2)),
}
RECURRENT = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.5),
    "lstm, both ways": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, bias=False),
    "gru": lambda: nn.GRU(3, 4, num_layers=2),
    "gru, both ways": lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


def check(model, data):
    """Compare the diagonal, and every sample's own gradient, with autograd's of one sample at a time."""
    s = gradients(model, data, cross_entropy)
    diagonal = epimer.estimate_curvature(model, data, cross_entropy, kind="diagonal", labels="true")
    assert set(diagonal) == set(s)
    assert not diagonal.provenance.left_out
    for name, metric in diagonal.items():
        assert near(metric.F, s[name].square().mean(0)), name
    samples = epimer.estimate_curvature(model, data, cross_entropy, kind="samples", labels="true")
    for name, metric in samples.items():
        G = torch.einsum("ntm,ntk->nmk", metric.g, metric.x)
        assert near(G, s[name].flatten(2)), name
    return samples


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_have_the_gradients_of_autograd(kind):
    torch.manual_seed(0)
    build, sides = CONVOLUTIONS[kind]
    model = Pooled(build()).double()
    samples = check(model, [(draw(3, 2, *sides), labels(3)), (draw(2, 2, *sides), labels(2))])
    assert ("layer.weight" in samples) == ("groups" not in kind)


def test_a_transposed_convolutions_inputs_belong_to_dimension_0():
    torch.manual_seed(0)
    model = Pooled(nn.ConvTranspose2d(2, 4, 3, stride=2)).double()
    x = draw(5, 2, 3, 4)
    metric = epimer.estimate_curvature(model, [(x, labels(5))], cross_entropy)["layer.weight"]
    pixels = x.movedim(1, -1).reshape(-1, 2)
    assert metric.inputs == 0
    assert near(metric.G, pixels.T @ pixels / len(pixels))  # G acts on dimension 0, here the inputs


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_have_the_gradients_of_autograd(kind, initial):
    torch.manual_seed(0)
    model = Recurrent(RECURRENT[kind](), initial=initial).double()
    samples = check(model.eval(), [(draw(3, 5, 3), labels(3)), (draw(2, 4, 3), labels(2)), (draw(4, 4, 3), labels(4))])
    assert {name for name, p in model.named_parameters() if p.dim() > 1} == set(samples)
    assert "forward" not in vars(model.layer)


def test_a_recurrent_layers_kronecker_factors_are_sums_over_its_steps():
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(3, 4, batch_first=True)).double()
    x = draw(5, 6, 3)
    measured = epimer.estimate_curvature(model, [(x, labels(5))], cross_entropy, labels="true")
    h = torch.cat([torch.zeros(5, 1, 4).double(), model.layer(x)[0][:, :-1].detach()], dim=1)
    for name, inputs in (("layer.weight_ih_l0", x), ("layer.weight_hh_l0", h)):
        rows = inputs.flatten(0, 1)
        assert near(measured[name].A, rows.T @ rows / len(rows)), name
    assert near(measured["layer.weight_ih_l0"].G, measured["layer.weight_hh_l0"].G)  # both multiply into the gates


def test_packed_sequences_are_left_out_and_named():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            return self.head(self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0])

    with pytest.warns(
        LeftOutWarning, match="'layer.weight_hh_l0', 'layer.weight_ih_l0'|'layer.weight_ih_l0', 'layer.weight_hh_l0'"
    ):
        measured = epimer.estimate_curvature(Packed().double(), [(draw(3, 4, 3), labels(3))], cross_entropy)
    assert set(measured) == {"head.weight"}


class Router(nn.Module):
    """As in transformers' mixtures of experts: a product with a parameter of its own, on tokens of all samples."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        gates = functional.linear(x.reshape(-1, 4), self.weight, bias=self.bias).softmax(-1)
        return (gates @ self.table).view_as(x)


def test_a_weight_of_functional_linear_has_the_gradients_of_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Router(), nn.Flatten(1, 1), nn.Linear(4, CLASSES)).double()
    data = [(draw(3, 4), labels(3)), (draw(4, 4), labels(4))]
    s = gradients(model, data, cross_entropy)
    with pytest.warns(LeftOutWarning, match="'1.table'"):
        measured = epimer.estimate_curvature(model, data, cross_entropy, kind="diagonal", labels="true")
    assert measured.provenance.left_out == {"1.table": UNKNOWN}
    for name, metric in measured.items():
        assert near(metric.F, s[name].square().mean(0)), name


@pytest.mark.parametrize(
    ("kind", "left"), [("diagonal", {"0.bias", "1.weight", "1.bias"}), ("kronecker", {"1.weight"})]
)
def test_parametrised_weights_are_left_out_with_the_way_out(kind, left):
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, CLASSES)).double()
    with pytest.warns(LeftOutWarning, match="original1' .*parametrize.remove_parametrizations"):
        measured = epimer.estimate_curvature(model, [(draw(3, 4), labels(3))], cross_entropy, kind=kind)
    originals = {f"0.parametrizations.weight.original{i}" for i in (0, 1)}
    assert {name for name, why in measured.provenance.left_out.items() if why == PARAMETRISED} == originals
    assert set(measured) == left
