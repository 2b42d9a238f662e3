"""Measuring with care: losses that are refused, a model that is left as it was, and other ways of running it."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import epimer
from cases import cross_entropy
from epimer.errors import CurvatureError
from oracle import gradients, near

CLASSES = 3
KINDS = ("diagonal", "kronecker", "samples", "ekfac")

# torch's own forward-mode derivatives, when they are first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


class Model(nn.Module):
    """A bit of everything, with dropout everywhere."""

    def __init__(self, segments="none"):
        super().__init__()
        self.segments = segments
        self.table = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.5, batch_first=False)
        self.drop, self.norm, self.head = nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, ids):
        x = self.table(ids).transpose(0, 1)
        for _ in range(2):  # one segment, used twice
            if self.segments == "none":
                x = self.layer(x)
            else:
                x = checkpoint(self.layer, x, use_reentrant=self.segments == "reentrant")
        return self.head(self.drop(self.norm(x.mean(0))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(7, (n, T), generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for n, T in ((4, 4), (3, 5))
    ]


def tensors(metric):
    return {part: value for part, value in vars(metric).items() if isinstance(value, torch.Tensor)}


def same(one, other, tolerance=1e-10):
    """Whether two curvatures agree in every number."""
    assert set(one) == set(other)
    assert len(one)
    for name in one:
        found, expected = tensors(one[name]), tensors(other[name])
        assert found.keys() == expected.keys()
        for part in found:
            assert near(found[part], expected[part], tolerance), (name, part)


def measure(model, batches, loss=cross_entropy, **options):
    return epimer.estimate_curvature(model, batches, loss, **{"kind": "diagonal", "labels": "true"} | options)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "loss",
    [lambda o, t: cross_entropy(o, t).sum(), lambda o, t: cross_entropy(o, t)[:, None].expand(-1, 2) / 2],
    ids=["sum", "parts of each sample's loss"],
)
def test_a_sum_of_losses_is_as_good_as_one_per_sample(model, batches, kind, loss):
    same(measure(model, batches, loss, kind=kind), measure(model, batches, kind=kind))


def mean(outputs, targets):
    return cross_entropy(outputs, targets).mean()


class OneSize(nn.Module):
    """Takes batches of four samples only."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids):
        return self.head(functional.one_hot(ids, 7)[:, 0, :4].double().view(4, 4))


@pytest.mark.parametrize("labels", ["true", "model"])
@pytest.mark.parametrize("kind", [*KINDS, "hessian", "ggn"])
def test_a_batch_mean_is_refused_at_once(model, batches, kind, labels):
    calls = []

    def counted(outputs, targets):
        calls.append(len(targets))
        return mean(outputs, targets)

    basis = None
    if kind in ("hessian", "ggn"):
        base = {"head.weight": model.head.weight.detach()}
        other = [{"head.weight": base["head.weight"] + torch.randn(CLASSES, 4).double()} for _ in range(2)]
        basis = epimer.build_basis(base, other, rules=[("head.weight", "matrix")])
    with pytest.raises(CurvatureError, match=r"batch mean; return a loss per sample"):
        measure(model, batches, counted, kind=kind, labels=labels, basis=basis)
    assert max(calls) <= 4
    assert 3 not in calls  # the second batch


def test_a_batch_mean_is_refused_where_the_model_takes_one_batch_size(batches):
    with pytest.raises(CurvatureError, match="batch mean"):
        measure(OneSize().double(), batches[:1], mean)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: cross_entropy(o, t).repeat(2), r"losses of shape \(\d,\) for \d samples"),
        (lambda o, t: cross_entropy(o, t)[:-1], r"losses of shape \(\d,\) for \d samples"),
        (lambda o, t: float(cross_entropy(o, t).sum()), "must return a tensor with a loss per sample, got float"),
        (lambda o, t: (cross_entropy(o, t), o), "got tuple"),
        (lambda o, t: cross_entropy(o.detach(), t), "does not depend on any layer"),
        (lambda o, t: torch.zeros(len(t)), "does not depend on any layer"),
    ],
)
def test_what_is_no_loss_per_sample_is_refused(model, batches, loss, words):
    with pytest.raises(CurvatureError, match=words):
        measure(model, batches[:1], loss)


@pytest.mark.parametrize("sample", range(7))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_sample(model, batches, sample, value):
    targets = torch.cat([t for _, t in batches])
    marked = targets.clone()
    marked[sample] += 100
    given = [(ids, marked[a:b]) for (ids, _), (a, b) in zip(batches, ((0, 4), (4, 7)), strict=True)]

    def loss(outputs, targets):
        return cross_entropy(outputs, targets % 100) + torch.where(targets >= 100, value, 0.0)

    with pytest.raises(CurvatureError, match=f"sample {sample} is {value}"):
        measure(model, given, loss)


@pytest.mark.parametrize("labels", ["true", "model"])
@pytest.mark.parametrize("sample", [0, 1, 4])
def test_a_sample_that_breaks_the_model_is_named(sample, labels):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    x[sample] = float("nan")
    with pytest.raises(CurvatureError, match=rf"sample {sample}\b.*(?i:nan|inf)"):
        measure(nn.Linear(4, CLASSES), [(x, torch.zeros(5, dtype=torch.long))], labels=labels)


def test_classes_that_are_ruled_out_are_no_fault():
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(4, 3), _Forbid())
    x, targets = torch.randn(5, 4).double(), torch.tensor([0, 2, 0, 2, 2])
    found = measure(model.double(), [(x, targets)])
    s = gradients(model, [(x, targets)], cross_entropy)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0))


class _Forbid(nn.Module):
    """Class 1 cannot be: its logit is -inf."""

    def forward(self, logits):
        return logits.masked_fill(torch.tensor([False, True, False]), -torch.inf)


def test_layers_without_gradients_are_refused_by_name():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            with torch.no_grad():
                x = self.body(x)
            return self.head(x)

    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(CurvatureError, match=r"'body' ran without gradients .* layers="):
        measure(Frozen(), [batch])
    assert set(measure(Frozen(), [batch], layers="head.*")) == {"head.weight", "head.bias"}


def test_an_input_that_is_changed_after_its_use_is_refused():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            h = self.one(x).tanh()
            y = self.two(h)
            h.mul_(2)
            return y

    with pytest.raises(CurvatureError, match=r"input of layer 'two' was changed in place"):
        measure(Changed(), [(torch.randn(3, 4), torch.tensor([0, 1, 2]))])


def test_what_the_loss_does_not_depend_on_has_no_curvature():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.spare, self.table = nn.Linear(4, CLASSES), nn.Linear(4, 5), nn.Embedding(6, 4)

        def forward(self, x):
            self.spare(x)
            self.table(torch.zeros(len(x), dtype=torch.long))
            return self.head(x)

    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.warns(epimer.EpimerWarning, match=r"no gradient reached 'spare\.weight'"):
        found = measure(Spare(), [batch])
    assert not found["spare.weight"].F.any()
    assert found["head.weight"].F.any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epimer.EpimerWarning)
        found = measure(Spare(), [batch], kind="kronecker")
    assert not found["spare.weight"].G.any()
    assert "table.weight" not in found  # a table has no factors, whether it was reached or not


# --- the model is left as it was -------------------------------------------------------------------------------------


def state_of(model):
    return {
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "hooks": [
            [list(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
            for m in model.modules()
        ],
        "own attributes": [sorted(vars(m)) for m in model.modules()],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.get_rng_state(),
    }


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def basis_of(model):
    base = {name: p.detach() for name, p in model.named_parameters() if name == "layer.linear1.weight"}
    others = [{name: W + torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    return epimer.build_basis(base, others, rank=1)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("fails", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", [*KINDS, "hessian", "ggn"])
def test_the_model_is_left_as_it_was(model, batches, kind, fails, fast):
    model.train()
    model.norm.eval()
    model.layer.self_attn.eval()
    model.head.weight.requires_grad_(False)
    model.head.bias.grad = torch.ones(CLASSES).double()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    basis = basis_of(model) if kind in ("hessian", "ggn") else None
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if fails is not None and len(calls) == 3:
            raise fails("stop")
        return cross_entropy(outputs, targets)

    before_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        before = copy.copy(state_of(model))
        if fails is None:
            measure(model, batches, loss, kind=kind, basis=basis)
        else:
            with pytest.raises(fails, match="stop"):
                measure(model, batches * 2, loss, kind=kind, basis=basis)
        assert equal(state_of(model), before)
    finally:
        torch.backends.mha.set_fastpath_enabled(before_fast)
    assert seen


def test_a_forward_that_someone_put_on_an_attention_stays(model, batches):
    attention = model.layer.self_attn
    plain, calls = attention.forward, []

    def own(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    attention.forward = own
    measure(model, batches)
    assert vars(attention).get("forward") is own


def test_inputs_with_gradients_are_left_alone():
    x = torch.randn(3, 4, requires_grad=True)
    measure(nn.Linear(4, CLASSES), [(x, torch.tensor([0, 1, 2]))])
    assert x.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_frozen_parameters_change_nothing(model, batches, kind):
    expected = measure(copy.deepcopy(model).eval(), batches, kind=kind)
    model.train().requires_grad_(False)
    same(measure(model, batches, kind=kind), expected)
    with torch.no_grad():
        same(measure(model, batches, kind=kind), expected)
    same(measure(nn.DataParallel(model), batches, kind=kind), expected)


# --- other ways of running a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["true", "expected"])
@pytest.mark.parametrize("segments", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_nothing(model, batches, kind, segments, labels):
    other = Model(segments).double()
    other.load_state_dict(model.state_dict())
    same(measure(other.train(), batches, kind=kind, labels=labels), measure(model, batches, kind=kind, labels=labels))


class Pictures(nn.Module):
    """Every sort of layer whose reader computes something."""

    def __init__(self):
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2, bias=False)
        self.batch, self.group, self.layer = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(16)
        self.first, self.second = nn.Linear(16, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.group(self.grouped(self.batch(self.conv(x)).relu())).tanh()
        x = self.second(self.first(self.layer(x.flatten(2))).relu())
        return self.head(x.mean(1))


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["bfloat16", "float16", "autocast"])
def test_half_precision_is_summed_in_float32(kind, form, sequence):
    torch.manual_seed(0)
    model, x, targets = Pictures(), torch.randn(32, 2, 6, 6), torch.randint(CLASSES, (32,))
    expected = measure(model, [(x, targets)], kind=kind, sequence=sequence)
    if form == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = measure(model, [(x, targets)], kind=kind, sequence=sequence)
    else:
        dtype = getattr(torch, form)
        found = measure(model.to(dtype), [(x.to(dtype), targets)], kind=kind, sequence=sequence)
    assert found.provenance.dtype == "float32"
    assert set(found) == set(expected)
    for name in expected:
        assert all(value.dtype == torch.float32 for value in tensors(found[name]).values())
        if kind == "ekfac":  # eigenvectors may turn, the trace may not
            assert float(found[name].S.sum()) == pytest.approx(float(expected[name].S.sum()), rel=0.1), name
        elif kind == "samples":
            assert near(found[name].g, expected[name].g, 0.1), name
        else:
            for part, value in tensors(expected[name]).items():
                assert near(tensors(found[name])[part], value, 0.05), (name, part)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="norms of mixed precision are refused on GPUs only")
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_autocast_leaves_nothing_out_on_a_gpu(form):
    torch.manual_seed(0)
    model, x, targets = Pictures(), torch.randn(32, 2, 6, 6), torch.randint(CLASSES, (32,))
    expected = measure(model, [(x, targets)])
    with torch.autocast("cuda", getattr(torch, form)):
        found = measure(model.cuda(), [(x, targets)])
    assert set(found) == set(expected)
    for name in expected:
        assert near(found[name].F.cpu(), expected[name].F, 0.05), name


def test_small_gradients_survive_float16():
    torch.manual_seed(0)
    model, x, targets = nn.Linear(4, 2), torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    with torch.no_grad():
        model.weight.mul_(1e-2)
        model.bias.copy_(torch.tensor([15.0, 0.0]))  # gradients near 3e-7, where float16 has one digit

    def wide(outputs, targets):
        return cross_entropy(outputs.float(), targets)

    expected = measure(model, [(x, targets)], wide)
    found = measure(model.half(), [(x.half(), targets)], wide)
    for name in expected:
        assert near(found[name].F, expected[name].F, 0.05), name


@pytest.mark.parametrize("kind", KINDS)
def test_sums_may_be_wider_than_the_model(kind):
    torch.manual_seed(0)
    model, batch = nn.Linear(4, CLASSES), (torch.randn(6, 4), torch.randint(CLASSES, (6,)))
    found = measure(model, [batch], kind=kind, dtype=torch.float64)
    assert all(value.dtype == torch.float64 for value in tensors(found["weight"]).values())
    assert found.provenance.dtype == "float64"
    s = gradients(model, [batch], cross_entropy)["weight"]
    H = s.flatten(1).T @ s.flatten(1) / len(s)
    if kind == "diagonal":
        assert near(found["weight"].F.flatten(), H.diagonal().double(), 1e-5)
