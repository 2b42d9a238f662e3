"""How data comes and which tensors are chosen: none of it changes a number."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import epimer
from cases import CLASSES, Flattened, build, cross_entropy, draw, labels, measure
from epimer.errors import CurvatureError, EpimerWarning, ParameterError
from oracle import gradients, near


def ids_case(n=7):
    case = build("encoder, sequence first")
    ids = torch.randint(1, 9, (n, 5))
    ids[2:, 4] = 0
    ids[5:, 2:] = 0
    return case, ids, labels(n)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "samples", "ekfac"])
@pytest.mark.parametrize("sizes", [(1,) * 7, (3, 3, 1), (2, 5), (1, 6)])
def test_batch_sizes_change_nothing(kind, sizes):
    case, ids, targets = ids_case()
    whole = measure(case, kind, [(ids, targets)])
    parts = measure(case, kind, list(zip(ids.split(sizes), targets.split(sizes), strict=True)))
    assert parts.provenance.counts == whole.provenance.counts
    assert parts.provenance.samples == 7
    for name in whole:
        shape = whole[name].apply(torch.ones(())).shape if kind == "diagonal" else None
        probe = draw(*(shape or (case.model.get_parameter(name).shape[0], case.model.get_parameter(name)[0].numel())))
        assert near(parts[name].apply(probe), whole[name].apply(probe)), name


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_model_runs_once_for_each_batch_and_a_few_times_more(size):
    """A few more at the beginning, whatever the batch size and however many layers there are."""
    case, ids, targets = ids_case()
    runs = []
    case.model.register_forward_hook(lambda *_: runs.append(1))
    batches = list(zip(ids.split(size), targets.split(size), strict=True))
    measure(case, "diagonal", batches)
    assert len(runs) <= len(batches) + 7


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 7, 9])
def test_samples_cut_in_the_middle_of_a_batch(samples):
    case, ids, targets = ids_case()
    cut = measure(case, "diagonal", list(zip(ids.split(3), targets.split(3), strict=True)), samples=samples)
    s = gradients(case.model, [(ids[:samples], targets[:samples])], case.loss)
    assert cut.provenance.samples == min(samples, 7)
    for name in cut:
        assert near(cut[name].F, s[name].square().mean(0))


def test_batches_come_in_any_form():
    case, ids, targets = ids_case()

    class Named(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, scale=1.0):
            return self.model(ids) * scale

    pairs = list(zip(ids.split(3), targets.split(3), strict=True))
    forms = {
        "list": pairs,
        "generator": (pair for pair in pairs),
        "loader": DataLoader(TensorDataset(ids, targets), batch_size=3),
        "tuple": [((x,), t) for x, t in pairs],
        "list of inputs": [[[x], t] for x, t in pairs],
        "dict": [({"ids": x, "scale": 1.0}, t) for x, t in pairs],
        "half of it the same for all": [((x, torch.ones(())), t) for x, t in pairs],
    }
    for kind in ("diagonal", "ekfac"):
        expected = measure(case, kind, pairs)
        for form, batches in forms.items():
            given = (pair for pair in pairs) if form == "generator" else batches
            named = form in ("dict", "half of it the same for all")
            model = Named(case.model) if named else case.model
            found = epimer.estimate_curvature(model, given, case.loss, kind=kind, labels="true")
            for name in expected:
                one = found[f"model.{name}" if named else name]
                assert near(*(m.F if kind == "diagonal" else m.S for m in (one, expected[name]))), (form, name)


def test_ekfac_takes_no_more_of_a_generator_than_it_needs():
    case, ids, targets = ids_case()

    def endless():
        for _ in range(1000):
            yield ids, targets
        raise AssertionError("far more batches were taken than were asked for")

    found = measure(case, "ekfac", endless(), samples=10)
    assert found.provenance.samples == 10


@pytest.mark.parametrize("tokens", [3, 5])
def test_tokens_that_are_as_many_as_samples_are_not_samples(tokens):
    """A causal mask is T x T: with T samples its rows look like samples."""
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6), nn.Linear(4, CLASSES)

        def forward(self, x, mask):
            return self.head(self.layer(x.transpose(0, 1), src_mask=mask).mean(0))

    model = Causal().double()
    x, targets = draw(5, tokens, 4), labels(5)
    mask = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)
    found = epimer.estimate_curvature(model, [((x, mask), targets)], cross_entropy, kind="diagonal", labels="true")
    one_by_one = [((x[n : n + 1], mask), targets[n : n + 1]) for n in range(5)]
    single = epimer.estimate_curvature(model, one_by_one, cross_entropy, kind="diagonal", labels="true")
    assert set(found) | set(found.provenance.left_out) == set(single)
    assert "head.weight" in found
    for name in found:
        assert near(found[name].F, single[name].F), name


@pytest.mark.parametrize("tokens", [3, 5])
def test_inputs_with_tokens_first_are_measured_or_refused(tokens):
    torch.manual_seed(0)

    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(self.layer(x).mean(0))

    model, x, targets = TokensFirst().double(), draw(tokens, 5, 4), labels(5)
    single = [(x[:, n : n + 1], targets[n : n + 1]) for n in range(5)]
    expected = epimer.estimate_curvature(model, single, cross_entropy, kind="diagonal", labels="true")
    try:
        found = epimer.estimate_curvature(model, [(x, targets)], cross_entropy, kind="diagonal", labels="true")
    except CurvatureError:
        return
    for name in found:
        assert near(found[name].F, expected[name].F), name


def test_lengths_of_flattened_tokens_may_differ_between_batches():
    torch.manual_seed(0)
    model = Flattened(inner=False).double()
    batches = [(draw(4, tokens, 3), labels(4)) for tokens in (4, 6, 2)]
    found = epimer.estimate_curvature(model, batches, cross_entropy, kind="diagonal", labels="true")
    s = gradients(model, batches, cross_entropy)
    assert set(found) == set(s)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0))


def test_padding_is_seen_in_a_model_inside_a_model():
    """The mask is called something else where the user's own wrapper takes it."""
    torch.manual_seed(0)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x, attention_mask):
            return (self.layer(x).tanh() * attention_mask[..., None]).sum(1)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(4, CLASSES)

        def forward(self, x, real):
            return self.head(self.inner(x, attention_mask=real))

    x, real = draw(4, 5, 3), torch.ones(4, 5, dtype=torch.long)
    real[1, 3:] = real[2, 1:] = 0
    found = epimer.estimate_curvature(Outer().double(), [((x, real), labels(4))], cross_entropy, labels="true")
    rows = x[real.bool()]
    assert near(found["inner.layer.weight"].A, rows.T @ rows / len(rows))


# --- which tensors ---------------------------------------------------------------------------------------------------


def test_layers_chooses_tensors_by_name():
    case, ids, targets = ids_case()
    everything = measure(case, "diagonal", [(ids, targets)])
    for patterns, wanted in (
        ("head.*", {"head.weight", "head.bias"}),
        (["*.norm1.bias", "head.weight"], {f"encoder.layers.{i}.norm1.bias" for i in range(2)} | {"head.weight"}),
        (["encoder.layers.1.self_attn.in_proj_weight"], {"encoder.layers.1.self_attn.in_proj_weight"}),
    ):
        found = measure(case, "diagonal", [(ids, targets)], layers=patterns)
        assert set(found) == wanted
        for name in found:
            assert near(found[name].F, everything[name].F)
    with pytest.raises(CurvatureError, match=r"no tensor 'haed\.weight'\. Did you mean 'head\.weight'"):
        measure(case, "diagonal", [(ids, targets)], layers=["haed.weight"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "kroneker"}, "'kind' parameter must be one of .*kronecker.* Got 'kroneker'"),
        ({"labels": "True"}, "'labels' parameter must be one of true, model, expected"),
        ({"sequence": "sum"}, "'sequence' parameter must be one of expand, reduce"),
        ({"samples": 0}, "'samples' parameter"),
        ({"samples": 2.5}, "'samples' parameter"),
        ({"dtype": torch.float16}, "'dtype' parameter"),
    ],
)
def test_parameters_out_of_range_are_refused(options, words):
    with pytest.raises(ParameterError, match=words):
        epimer.estimate_curvature(nn.Linear(2, 2), [], cross_entropy, **options)


@pytest.mark.parametrize(
    ("model", "batches", "words"),
    [
        (nn.ReLU(), [(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))], "no parameters"),
        (nn.Linear(2, 2), [], "batches is empty"),
        (nn.Linear(2, 2), [torch.ones(2, 2)], r"batch 0 is Tensor, expected a pair \(inputs, targets\)"),
        (nn.Linear(2, 2), ["a text"], "batch 0 is str, expected .* or a dict with 'labels'"),
        (nn.Linear(2, 2), [(torch.ones(()), None)], "no tensor with a batch dimension"),
        (nn.LayerNorm(2), [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))], "none .* can be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, batches, words):
    with pytest.raises(CurvatureError, match=words):
        epimer.estimate_curvature(model, batches, cross_entropy)


class Centred(nn.Module):
    """Takes a part of the batch's mean from every sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x):
        y = self.layer(x)
        return y - 0.5 * y.mean(0)


class Limited(nn.Module):
    """Has room for the first four samples of a batch only; the others pass by its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        y = torch.where(torch.arange(len(x))[:, None] < 4, self.layer(x), 0)
        return self.head(x + y)


@pytest.mark.parametrize("kind", [Centred, Limited])
@pytest.mark.parametrize("loss", [cross_entropy, lambda outputs, y: cross_entropy(outputs, y).sum()])
def test_samples_that_see_each_other_are_measured_with_batches_of_one(kind, loss):
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(7, 4), labels(7)
    options = {"kind": "diagonal", "labels": "true", "progress": False}
    with pytest.warns(EpimerWarning, match="depends on the other samples of its batch, so .* batches of one sample"):
        found = epimer.estimate_curvature(model, [(x, y)], loss, **options)
    squares = {name: torch.zeros_like(W) for name, W in model.named_parameters()}
    for n in range(7):
        gradients = torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]).sum(), list(model.parameters()))
        for name, g in zip(squares, gradients, strict=True):
            squares[name] += g.square() / 7
    assert found.keys() == squares.keys()
    for name, F in squares.items():
        torch.testing.assert_close(found[name].F, F, rtol=1e-5, atol=1e-8)
