"""Curvature against brute force, in float64: every kind, on every sort of layer that torch itself has."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import epimer
from dense import matrix_of
from epimer.errors import CurvatureError, ParameterError
from oracle import Case, factors, fisher, gradients, layer_uses, near

CLASSES = 3


def cross_entropy(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def labels(*shape):
    return torch.randint(CLASSES, shape)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm.weight)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.relu(y)


class Encoder(nn.Module):
    """nn.TransformerEncoder on padded tokens, mean over the real ones."""

    def __init__(self, *, batch_first, norm_first=False, shared=False):
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.positions = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(8, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if shared:
            self.encoder.layers[1] = self.encoder.layers[0]
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids):
        padding = ids == 0
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])[None])
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head((x * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True))


class Cross(nn.Module):
    """Queries of one length that attend to keys and values of another."""

    def __init__(self, *, bias=True, **widths):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, bias=bias, **widths)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, query, memory, values):
        return self.head(self.attention(query, memory, values)[0].mean(1))


class Shared(nn.Module):
    """One layer called three times, one weight in two layers, a table that is the head."""

    def __init__(self):
        super().__init__()
        self.table, self.again, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(3):
            x = self.norm(self.again(x)).tanh()
        return self.head(self.other(self.one(x).tanh()).mean(1))


class Flattened(nn.Module):
    """Tokens of all samples in one dimension: a sample's beside each other, or alternating."""

    def __init__(self, *, inner):
        super().__init__()
        self.inner = inner
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = x.transpose(0, 1) if self.inner else x
        y = self.second(self.norm(self.first(x.reshape(-1, 3)).tanh())).unflatten(0, x.shape[:2])
        return y.mean(0 if self.inner else 1)


def _mlp():
    model = nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.5), nn.RMSNorm(5), nn.Linear(5, CLASSES, bias=False)
    )
    return Case(model, [(draw(n, 4), labels(n)) for n in (4, 3)], cross_entropy)


def _convnet():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2), dilation=(1, 2)),
        nn.ReLU(inplace=True),
        Residual(4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, (2, 3), padding="same", bias=False),
        nn.Conv2d(3, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return Case(model, [(draw(n, 2, 8, 9), labels(n)) for n in (3, 2)], cross_entropy, no_factors=["3.weight"])


def _padding_modes():
    modes = ("reflect", "replicate", "circular")
    layers = [nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode=mode, stride=(1, 2)) for mode in modes]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))
    batch = draw(4, 2, 5, 11), labels(4)
    model(batch[0].float())
    return Case(model, [batch], cross_entropy)


def _conv1d():
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.BatchNorm1d(3),
        nn.Conv1d(3, 4, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
    model[1].running_mean.normal_()
    return Case(model, [(draw(n, 2, 9), labels(n)) for n in (3, 4)], cross_entropy)


TABLES = ("tokens.weight", "positions.weight")


def _padded_ids():
    batches = []
    for n, longest in ((4, 5), (3, 6)):
        ids = torch.randint(1, 9, (n, longest))
        for i in range(1, n):
            ids[i, longest - i :] = 0
        batches.append((ids, labels(n)))
    return batches


def _encoder(**options):
    return Case(Encoder(**options), _padded_ids(), cross_entropy, real=lambda ids: ids != 0, no_factors=TABLES)


def _cross(**widths):
    sizes = widths.get("kdim", 4), widths.get("vdim", 4)
    batches = [((draw(n, 2, 4), draw(n, 3, sizes[0]), draw(n, 3, sizes[1])), labels(n)) for n in (4, 2)]
    return Case(Cross(**widths), batches, cross_entropy)


def _shared():
    batches = [(torch.randint(5, (n, 3)), torch.randint(5, (n,))) for n in (4, 2)]
    return Case(Shared(), batches, cross_entropy, no_factors=["table.weight"])


def _flattened(inner):
    return Case(Flattened(inner=inner), [(draw(n, 4, 3), labels(n)) for n in (4, 3)], cross_entropy)


CASES = {
    "mlp": _mlp,
    "convnet": _convnet,
    "padding modes": _padding_modes,
    "conv1d": _conv1d,
    "encoder": lambda: _encoder(batch_first=True),
    "encoder, sequence first": lambda: _encoder(batch_first=False, norm_first=True),
    "encoder, one layer twice": lambda: _encoder(batch_first=True, shared=True),
    "cross attention": lambda: _cross(),
    "cross attention, own widths": lambda: _cross(kdim=3, vdim=5, bias=False),
    "shared": _shared,
    "flattened": lambda: _flattened(False),
    "flattened, alternating": lambda: _flattened(True),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    made = CASES[request.param]()
    made.model.double()
    return made


def measure(case, kind, batches=None, **options):
    options = {"labels": "true", "samples": None} | options
    return epimer.estimate_curvature(case.model, batches or case.batches, case.loss, kind=kind, **options)


def matrices(case):
    """Return the weights that have a two-sided curvature."""
    return {
        name: p
        for name, p in case.model.named_parameters()
        if p.dim() > 1 and name not in (*case.no_factors, *case.left_out)
    }


# --- every kind on every model ---------------------------------------------------------------------------------------


def test_the_diagonal_is_the_mean_squared_gradient(case):
    found, s = measure(case, "diagonal"), gradients(case.model, case.batches, case.loss)
    assert set(found) == set(s) - set(case.left_out)
    assert set(found.about.left_out) == set(case.left_out)
    for name in found:
        assert near(found[name].F, s[name].square().mean(0)), name
        assert not found[name].F.requires_grad


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
def test_kronecker_factors_are_second_moments_of_inputs_and_gradients(case, sequence):
    found = measure(case, "kronecker", sequence=sequence)
    uses, _ = layer_uses(case.model, case.batches, case.loss)
    masks = None if case.real is None else [row for inputs, _ in case.batches for row in case.real(inputs)]
    assert set(found) == set(matrices(case))
    assert set(found.about.left_out) >= set(case.no_factors)
    for name in found:
        G, A = factors(uses[name], sequence, masks)
        assert near(found[name].G, G), name
        assert near(found[name].A, A), name
        assert found[name].inputs == 1
        tokens = sum(len(use.x) for sample in uses[name] for use in sample)
        if masks is not None:
            tokens = sum(
                int(mask.sum()) if len(use.x) == len(mask) else len(use.x)
                for sample, mask in zip(uses[name], masks, strict=True)
                for use in sample
            )
        assert found.about.counts[name] == tokens


def test_samples_are_the_whole_fisher(case):
    found, s = measure(case, "samples"), gradients(case.model, case.batches, case.loss)
    assert set(found) == set(matrices(case))
    for name in found:
        H = matrix_of(found[name], len(s[name][0]), s[name][0][0].numel())
        assert near(H, fisher(s[name])), name


def test_ekfac_has_the_exact_moments_along_the_factors_eigenvectors(case):
    found, s = measure(case, "ekfac"), gradients(case.model, case.batches, case.loss)
    kronecker = measure(case, "kronecker")
    assert set(found) == set(matrices(case))
    for name in found:
        metric, s_nmn = found[name], s[name].flatten(2)
        P, Q = metric.P, metric.Q
        for E, factor in ((P, kronecker[name].G), (Q, kronecker[name].A)):
            assert near(E.T @ E, torch.eye(len(E), dtype=torch.float64))
            turned = E.T @ factor @ E
            assert near(turned, torch.diag(turned.diagonal()))
        S = (P.T @ s_nmn @ Q).square().mean(0)
        assert near(metric.S, S), name
        D = draw(*s_nmn.shape[1:])
        dense = torch.kron(P, Q) @ torch.diag(S.flatten()) @ torch.kron(P, Q).T
        assert near(metric.apply(D).flatten(), dense @ D.flatten())
        assert S.sum() == pytest.approx(float(s_nmn.square().sum() / len(s_nmn)))  # a rotation keeps the trace
    with pytest.raises(CurvatureError, match="EKFAC"):
        found + found


# --- in a basis ------------------------------------------------------------------------------------------------------


def bases(case, kind, *, copies, rank=1):
    """Return a basis of two models; with `copies` they are the same, so that it is rank-deficient."""
    generator = torch.Generator().manual_seed(1)
    base = {name: W.detach() for name, W in case.model.named_parameters()}
    steps = [
        {n: W + torch.randn(W.shape, generator=generator, dtype=W.dtype) for n, W in base.items()} for _ in range(2)
    ]
    rules = [(name, "matrix") for name in matrices(case)]
    models = [steps[0], steps[0] if copies else steps[1]]
    found = epimer.build_basis(base, models, rank=rank, basis=kind, rules=rules)
    return {name: one for name, one in found.items() if name in matrices(case)}


def directions(basis):
    """Return S, the orthonormal directions of tagged atoms as columns on row-major vec(D)."""
    S = torch.stack([torch.outer(u, v).flatten() for u, v in zip(basis.U.T, basis.V.T, strict=True)], dim=1)
    return S if basis.mix is None else S @ basis.mix


@pytest.fixture(params=["mlp", "convnet", "encoder", "encoder, sequence first", "shared"])
def projected_case(request):
    torch.manual_seed(0)
    made = CASES[request.param]()
    made.model.double()
    return made


@pytest.mark.parametrize("kind", ["tagged", "tensor"])
@pytest.mark.parametrize("copies", [False, True])
def test_projected_factors_are_the_factors_projected(projected_case, kind, copies):
    basis = bases(projected_case, kind, copies=copies)
    found, full = measure(projected_case, "kronecker", basis=basis), measure(projected_case, "kronecker")
    assert found.keys() == basis.keys()
    assert len(found) > 1
    for name, one in basis.items():
        assert near(found[name].G, one.U.T @ full[name].G @ one.U)
        assert near(found[name].A, one.V.T @ full[name].A @ one.V)
        assert found[name].H is None


@pytest.mark.parametrize("copies", [False, True])
def test_projected_samples_and_diagonals_are_the_fisher_projected(projected_case, copies):
    basis = bases(projected_case, "tagged", copies=copies)
    s = gradients(projected_case.model, projected_case.batches, projected_case.loss)
    samples, diagonal = (measure(projected_case, kind, basis=basis) for kind in ("samples", "diagonal"))
    assert samples.keys() == diagonal.keys() == basis.keys()
    for name, one in basis.items():
        assert (one.mix is not None) == copies
        S = directions(one)
        assert near(S.T @ S, torch.eye(S.shape[1], dtype=torch.float64), 1e-8)
        assert near(samples[name].H, S.T @ fisher(s[name]) @ S)
        assert near(diagonal[name].H, S.T @ torch.diag(s[name].square().mean(0).flatten()) @ S)


@pytest.mark.parametrize(
    ("kind", "basis", "words"),
    [
        ("ekfac", "tagged", "cannot be projected"),
        ("samples", "tensor", "build a tagged basis"),
        ("diagonal", "tensor", "build a tagged basis"),
        ("ggn", None, "needs basis="),
    ],
)
def test_a_basis_that_does_not_fit_the_kind_is_refused(kind, basis, words):
    case = _mlp()
    case.model.double()
    with pytest.raises(CurvatureError, match=words):
        measure(case, kind, basis=None if basis is None else bases(case, basis, copies=False))


def test_a_basis_of_other_models_is_refused():
    case = _mlp()
    case.model.double()
    basis = bases(case, "tagged", copies=False)
    with pytest.raises(CurvatureError, match=r"'1\.kernel', which is not in the model"):
        measure(case, "kronecker", basis={"1.kernel": basis["0.weight"]})
    with pytest.raises(CurvatureError, match=r"of 5 x 4 matrices, but the model's has shape \(3, 5\)"):
        measure(case, "kronecker", basis={"5.weight": basis["0.weight"]})
    for chosen, layers in ((basis, ["*.bias"]), ({}, None)):
        with pytest.raises(CurvatureError):  # nothing is left to measure, and it says so
            measure(case, "kronecker", basis=chosen, layers=layers)


# --- what is right, or left out --------------------------------------------------------------------------------------


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
        assert found.about.left_out[missing]
    assert "head.weight" not in s or "head.weight" in found


# --- how the data comes ----------------------------------------------------------------------------------------------


def ids_case(n=7):
    torch.manual_seed(0)
    case = _encoder(batch_first=False)
    case.model.double()
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
    assert parts.about.counts == whole.about.counts
    assert parts.about.samples == 7
    for name in whole:
        shape = whole[name].apply(torch.ones(())).shape if kind == "diagonal" else None
        probe = draw(*(shape or (case.model.get_parameter(name).shape[0], case.model.get_parameter(name)[0].numel())))
        assert near(parts[name].apply(probe), whole[name].apply(probe)), name


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 7, 9])
def test_samples_cut_in_the_middle_of_a_batch(samples):
    case, ids, targets = ids_case()
    cut = measure(case, "diagonal", list(zip(ids.split(3), targets.split(3), strict=True)), samples=samples)
    s = gradients(case.model, [(ids[:samples], targets[:samples])], case.loss)
    assert cut.about.samples == min(samples, 7)
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
    assert found.about.samples == 10


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
    assert set(found) | set(found.about.left_out) == set(single)
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
        (nn.Linear(2, 2), [{"x": torch.ones(2, 2)}], "batch 0 is dict"),
        (nn.Linear(2, 2), [(torch.ones(()), None)], "no tensor with a batch dimension"),
        (nn.LayerNorm(2), [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))], "none .* can be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, batches, words):
    with pytest.raises(CurvatureError, match=words):
        epimer.estimate_curvature(model, batches, cross_entropy)


def test_samples_that_see_each_other_are_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, CLASSES)

        def forward(self, x):
            y = self.layer(x)
            return y - y.mean(0)

    with pytest.raises(CurvatureError, match="depends on the other samples"):
        epimer.estimate_curvature(Centred(), [(torch.randn(5, 4), labels(5))], cross_entropy)


# --- cases where an approximation is exact ---------------------------------------------------------------------------


def half_squares(outputs, targets):
    return 0.5 * (outputs - targets).square().flatten(1).sum(1)


def gauss_newton(model, x, name):
    """Return JᵀJ of the outputs with respect to one weight, the mean over samples: that of half the squared error."""
    W = dict(model.named_parameters())[name].detach()

    def outputs(w):
        return torch.func.functional_call(model, {name: w}, (x,))

    J = torch.func.jacrev(outputs)(W).detach().reshape(-1, W.numel())
    return J.T @ J / len(x)


@pytest.mark.parametrize(
    ("widths", "shape"),
    [((4, 3), (7,)), ((4, 3, 5), (7,)), ((4, 3, 5), (7, 6))],  # with tokens, each has a loss of its own
)
def test_kfac_is_the_gauss_newton_matrix_of_a_linear_model_under_squared_error(widths, shape):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))).double()
    x = draw(*shape, 4)
    batches = [(x[:4], torch.zeros_like(model(x[:4]))), (x[4:], torch.zeros_like(model(x[4:])))]
    found = epimer.estimate_curvature(model, batches, half_squares, labels="expected")
    for name in found:
        assert near(torch.kron(found[name].G, found[name].A), gauss_newton(model, x, name))


def test_reduced_kfac_is_the_gauss_newton_matrix_of_a_linear_model_that_averages_its_tokens():
    torch.manual_seed(0)

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.two(self.one(x)).mean(1)

    model, x = Averaged().double(), draw(6, 5, 4)
    for sequence, exact in (("reduce", True), ("expand", False)):
        batches = [(x, torch.zeros(6, 2).double())]
        found = epimer.estimate_curvature(model, batches, half_squares, labels="expected", sequence=sequence)
        for name in found:
            assert near(torch.kron(found[name].G, found[name].A), gauss_newton(model, x, name)) == exact


@pytest.mark.parametrize("kind", ["kronecker", "samples", "ekfac"])
def test_one_sample_of_one_token_has_a_product_for_its_fisher(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double(), draw(1, 4)
    found = epimer.estimate_curvature(model, [(x, labels(1))], cross_entropy, kind=kind, labels="expected")
    p = model(x)[0].softmax(0).detach()
    for name in found:
        W = dict(model.named_parameters())[name].detach()
        J = torch.func.jacrev(lambda w, name=name: torch.func.functional_call(model, {name: w}, (x,))[0])(W)
        J = J.detach().reshape(4, -1)
        exact = J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
        D = draw(*W.shape)
        assert near(found[name].apply(D).flatten(), exact @ D.flatten())
