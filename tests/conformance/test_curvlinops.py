"""Measured curvature against curvlinops, which nobody here wrote, in float64 to 1e-10.

Runs in an environment of its own: `make conformance`.

Conventions. Ours is the mean over samples of a loss that is summed within the sample, whatever loss_fn's batches are.
Theirs follows `reduction`: with "sum" it is the sum over samples; with "mean" it is divided by the number of loss
terms, so by a sample's places too where every place has a target, and for MSELoss also by the outputs C. In one line,
for every operator below (`scale`):

    theirs = ours · N                        reduction="sum"
    theirs = ours / (places · C if MSE)      reduction="mean"

Their empirical Fisher of a mean squared error is (1/NC) Σ ggᵀ with g of the summed error, so 1/C of ours, not 1/C² as
the gradients of the mean would give; the same holds for their Kronecker factors.

What has no exact counterpart, and what is compared instead:

* Labels drawn from the model: two generators never draw alike, so `labels="model"` is held against the exact Fisher
  in the mean over many draws only.
* A target at every place, empirical Fisher: their sample is a place, ours a sequence, whose gradients are summed
  before the outer product. Compared where both agree on what a sample is: every place handed to us as one.
* A target at every place, exact Kronecker factors, layers before tokens are mixed: they send one column of all
  places' Hessian roots back at once, so gradients of different places are added where they meet and G gets cross
  terms; we send back one place at a time. Compared without mixing, and behind it; before it with the mean over many
  labels drawn by them, in which cross terms vanish. (The Gauss-Newton matrix itself has no such freedom and is compared
  everywhere, as are factors from given labels.)
* Targets of -100: their Kronecker factors do not know them; the Gauss-Newton matrix does.
* A layer used twice: their A adds both uses up, ours is a mean over them, so kron(G, A) is twice ours; and with
  "reduce" they reduce each use by itself, we all of a sample's tokens.
* Grouped convolutions: their factors average over groups; we have none.
* Biases: their factor for a bias is G alone; we keep a bias's diagonal only, which is compared as such.
* EKFAC: where a factor has a null space of two dimensions or more, its eigenvectors are anyone's choice, so there are
  more samples here than any factor has rows.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is installed by `make conformance`")

from curvlinops import (  # noqa: E402
    EFLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
)
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

SIZES = (1, 6, 3, 11)  # uneven, and a single sample first
N = sum(SIZES)
CLASSES, TOKENS = 4, 3
FISHER = {"expected": "type-2", "true": "empirical"}


@pytest.fixture(autouse=True)
def float64():
    """Also have attention done by operations that can be differentiated forwards, as they do."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(fast)
    torch.set_default_dtype(torch.float32)


class Mixer(nn.Module):
    """Linear layers on tokens, across tokens, and behind their mean."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 4, bias=False)
        self.across, self.head = nn.Linear(TOKENS, TOKENS), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.down(self.up(x).tanh()).tanh()
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2).tanh()
        return self.head(x.mean(1))


class Twice(nn.Module):
    """One layer, used two times."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())


class Transformer(nn.Module):
    """Embedding, attention, norms and a head that is the embedding; logits of the mean token, or of every token."""

    def __init__(self, *, everywhere=False):
        super().__init__()
        self.everywhere = everywhere
        self.embed = nn.Embedding(CLASSES + 1, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES + 1, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        logits = self.head(self.norm(self.block(self.embed(ids))))
        return logits.transpose(1, 2) if self.everywhere else logits.mean(1)


class Tokenwise(nn.Module):
    """A prediction for every token, from that token alone (or, with `mixing`, from all of them)."""

    def __init__(self, *, classes_last=False, mixing=False):
        super().__init__()
        self.classes_last, self.mixing = classes_last, mixing
        self.up, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.up(x).tanh()
        logits = self.head(x + x.mean(1, keepdim=True) if self.mixing else x)
        return logits if self.classes_last else logits.movedim(-1, 1)


def gpt2_layers():
    from transformers.pytorch_utils import Conv1D

    layers = nn.Sequential(Conv1D(6, 5), nn.Tanh(), Conv1D(CLASSES, 6))
    for layer in layers[::2]:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layers


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, dilation=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3, CLASSES),
    )


def patches():
    return nn.Sequential(
        nn.Conv2d(2, 2, (2, 3), stride=(2, 3), bias=False),
        nn.Tanh(),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, CLASSES, bias=False),
    )


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)), (5,)),
    "tokens": (Mixer, (TOKENS, 5)),
    "conv": (convolutions, (2, 6, 6)),
    "patches": (patches, (2, 6, 9)),
    "twice": (Twice, (5,)),
    "gpt2": (gpt2_layers, (TOKENS, 5)),
}
KRONECKER = ("linear", "tokens", "conv", "patches")


class OfMean(nn.Module):
    """Logits per sample, from a model of tokens."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).mean(1)


def example(name, loss="cross-entropy"):
    """Return a model and its batches."""
    make, shape = MODELS[name]
    model = OfMean(make()) if name == "gpt2" else make()
    y = torch.randint(CLASSES, (N,)) if loss == "cross-entropy" else torch.randn(N, CLASSES)
    return model.eval(), batched(torch.randn(N, *shape), y)


def batched(x, y):
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss, lambda f, y: functional.cross_entropy(f, y, reduction="none")),
    "mse": (nn.MSELoss, lambda f, y: (f - y).square().sum(1)),
}


def every_place(f, y):
    """Cross-entropy of a target at every place, summed as our samples are."""
    return functional.cross_entropy(f, y, reduction="none").sum(1)


def scale(loss, reduction, places=1):
    """Return what ours is to be multiplied with, see the top."""
    return N if reduction == "sum" else 1 / (places * (CLASSES if loss == "mse" else 1))


def ours(model, batches, loss_fn, kind, labels, **options):
    return epimer.estimate_curvature(
        model, batches, loss_fn, kind=kind, labels=labels, samples=None, progress=False, **options
    )


def block(operator, model, name, loss, batches):
    """Return one parameter's block of their operator, dense."""
    W = dict(model.named_parameters())[name]
    return operator(model, loss, [W], batches, check_deterministic=False) @ torch.eye(W.numel())


def kfac(model, loss, batches, operator=KFACLinearOperator, **options):
    """Return their operator of all parameters, weights apart from biases, and the weights' blocks."""
    parameters = dict(model.named_parameters())
    options |= {"separate_weight_and_bias": True, "check_deterministic": False}
    made = operator(model, loss, list(parameters.values()), batches, **options)
    whole = (made @ torch.eye(made.shape[0])).detach()
    spans = torch.arange(made.shape[0]).split([W.numel() for W in parameters.values()])
    places = dict(zip(parameters, spans, strict=True))
    return made, {name: whole[places[name]][:, places[name]] for name in matrices(model)}


def kfac_factors(model, loss, batches, **options):
    operator, blocks = kfac(model, loss, batches, **options)
    state = operator.state_dict()
    inputs, gradients = state["input_covariances"], state["gradient_covariances"]
    return blocks, {layer: (inputs[layer], gradients[layer]) for layer in inputs}


def matrices(model):
    return {name: W for name, W in model.named_parameters() if W.dim() > 1}


def dense(metric, W):
    """Return our operator as a matrix on the entries of W, row by row."""
    m, n = len(W), W[0].numel()
    return torch.stack([metric.apply(D).flatten() for D in torch.eye(m * n).view(-1, m, n)], dim=1)


def agree(found, expected, tolerance=1e-10):
    assert found.shape == expected.shape
    assert not found.requires_grad
    assert expected.norm() > 1e-8, "nothing is compared"
    difference = (found - expected).norm() / expected.norm()
    assert difference < tolerance, f"{difference:.1e}"


reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])
losses = pytest.mark.parametrize("loss", LOSSES)
policies = pytest.mark.parametrize(
    ("labels", "operator"), [("true", EFLinearOperator), ("expected", GGNLinearOperator)]
)


# Second moments of gradients: the empirical Fisher, and the Gauss-Newton matrix


@policies
@losses
@pytest.mark.parametrize("name", MODELS)
def test_samples_and_diagonal(name, loss, labels, operator):
    model, batches = example(name, loss)
    theirs_of, loss_fn = LOSSES[loss]
    samples = ours(model, batches, loss_fn, "samples", labels)
    diagonal = ours(model, batches, loss_fn, "diagonal", labels)
    assert list(samples) == list(matrices(model))
    assert list(diagonal) == [parameter for parameter, _ in model.named_parameters()]
    for reduction, (parameter, W) in product(("sum", "mean"), model.named_parameters()):
        factor = scale(loss, reduction)
        theirs = block(operator, model, parameter, theirs_of(reduction=reduction), batches)
        agree(diagonal[parameter].F.flatten() * factor, theirs.diagonal())
        if W.dim() > 1:
            agree(dense(samples[parameter], W) * factor, theirs)


@policies
def test_a_transformer(labels, operator):
    model = Transformer().eval()
    batches = batched(torch.randint(CLASSES + 1, (N, TOKENS)), torch.randint(CLASSES + 1, (N,)))
    _, loss_fn = LOSSES["cross-entropy"]
    samples = ours(model, batches, loss_fn, "samples", labels)
    diagonal = ours(model, batches, loss_fn, "diagonal", labels)
    # the embedding is also the head: two uses of different kinds have a diagonal, but no two-sided form
    assert set(samples) == set(matrices(model)) - {"embed.weight"}
    assert list(diagonal) == [parameter for parameter, _ in model.named_parameters()]
    for parameter, W in model.named_parameters():
        theirs = block(operator, model, parameter, nn.CrossEntropyLoss(), batches)
        agree(diagonal[parameter].F.flatten(), theirs.diagonal())
        if parameter in samples:
            agree(dense(samples[parameter], W), theirs)


@reductions
def test_gauss_newton_with_a_target_at_every_place(reduction):
    model = Transformer(everywhere=True).eval()
    batches = batched(torch.randint(CLASSES + 1, (N, TOKENS)), torch.randint(CLASSES + 1, (N, TOKENS)))
    if reduction == "sum":  # a mean over the targets that are there weighs samples unevenly
        for _, y in batches:
            y[torch.rand(y.shape) < 0.3] = -100

    samples = ours(model, batches, every_place, "samples", "expected")
    diagonal = ours(model, batches, every_place, "diagonal", "expected")
    factor = scale("cross-entropy", reduction, TOKENS)
    for parameter, W in model.named_parameters():
        theirs = block(GGNLinearOperator, model, parameter, nn.CrossEntropyLoss(reduction=reduction), batches)
        agree(diagonal[parameter].F.flatten() * factor, theirs.diagonal())
        if parameter in samples:
            agree(dense(samples[parameter], W) * factor, theirs)


@reductions
def test_gauss_newton_of_a_squared_error_at_every_place(reduction):
    model = Tokenwise(classes_last=True, mixing=True)
    batches = batched(torch.randn(N, TOKENS, 5), torch.randn(N, TOKENS, CLASSES))
    samples = ours(model, batches, lambda f, y: (f - y).square().sum((1, 2)), "samples", "expected")
    for parameter, W in matrices(model).items():
        theirs = block(GGNLinearOperator, model, parameter, nn.MSELoss(reduction=reduction), batches)
        agree(dense(samples[parameter], W) * scale("mse", reduction, TOKENS), theirs)


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_the_width_of_a_squared_error(weight):
    """However a squared error is weighed, the labels' spread that it stands for follows."""

    class Weighed(nn.MSELoss):
        def forward(self, f, y):
            return weight * super().forward(f, y)

    model, batches = example("linear", "mse")
    diagonal = ours(model, batches, lambda f, y: weight * (f - y).square().mean(1), "diagonal", "expected")
    for parameter, _ in model.named_parameters():
        agree(
            diagonal[parameter].F.flatten(), block(GGNLinearOperator, model, parameter, Weighed(), batches).diagonal()
        )


def test_empirical_fisher_of_places():
    """Their sample is a place; ours is what we are given as one."""
    model = Tokenwise()
    batches = batched(torch.randn(N, TOKENS, 5), torch.randint(CLASSES, (N, TOKENS)))
    apart = [(x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]) for x, y in batches]

    samples = ours(model, apart, every_place, "samples", "true")
    for parameter, W in matrices(model).items():
        agree(dense(samples[parameter], W), block(EFLinearOperator, model, parameter, nn.CrossEntropyLoss(), batches))


@losses
def test_drawn_labels_in_the_mean(loss):
    """2,000 draws per sample leave an error of about 1/√2000 of each entry; the seed is fixed."""
    model, batches = example("linear", loss)
    theirs_of, loss_fn = LOSSES[loss]
    many = [(x.repeat(500, 1), y.repeat(500, *[1] * (y.dim() - 1))) for x, y in batches] * 4
    diagonal = ours(model, many, loss_fn, "diagonal", "model")
    for parameter, _ in model.named_parameters():
        theirs = block(GGNLinearOperator, model, parameter, theirs_of(reduction="sum"), batches) / N
        agree(diagonal[parameter].F.flatten(), theirs.diagonal(), tolerance=0.05)


# Kronecker factors


@pytest.mark.parametrize("labels", FISHER)
@losses
@pytest.mark.parametrize("sequence", ["expand", "reduce"])
@pytest.mark.parametrize("name", KRONECKER)
def test_kronecker(name, sequence, loss, labels):
    """A is the same in both; the whole of `scale` is in G."""
    model, batches = example(name, loss)
    theirs_of, loss_fn = LOSSES[loss]
    found = ours(model, batches, loss_fn, "kronecker", labels, sequence=sequence)
    for reduction in ("sum", "mean"):
        options = {"fisher_type": FISHER[labels], "kfac_approx": sequence}
        blocks, factors = kfac_factors(model, theirs_of(reduction=reduction), batches, **options)
        assert list(found) == list(blocks)
        factor = scale(loss, reduction)
        for parameter, W in matrices(model).items():
            A, G = factors[parameter.removesuffix(".weight")]
            agree(found[parameter].A, A)
            agree(found[parameter].G * factor, G)
            agree(torch.kron(found[parameter].G, found[parameter].A) * factor, blocks[parameter])
            agree(dense(found[parameter], W) * factor, blocks[parameter])


@pytest.mark.parametrize("labels", FISHER)
@reductions
@pytest.mark.parametrize("mixing", [False, True])
def test_kronecker_with_a_target_at_every_place(mixing, reduction, labels):
    """Of the exact factors before tokens are mixed, A alone is compared here; G in the test below."""
    model = Tokenwise(mixing=mixing)
    batches = batched(torch.randn(N, TOKENS, 5), torch.randint(CLASSES, (N, TOKENS)))

    found = ours(model, batches, every_place, "kronecker", labels)
    _, theirs = kfac_factors(model, nn.CrossEntropyLoss(reduction=reduction), batches, fisher_type=FISHER[labels])
    for layer in ("up", "head"):
        A, G = theirs[layer]
        agree(found[f"{layer}.weight"].A, A)
        if not (mixing and labels == "expected" and layer == "up"):
            agree(found[f"{layer}.weight"].G * scale("cross-entropy", reduction, TOKENS), G)


def test_exact_gradients_before_tokens_are_mixed():
    """The seed is fixed; their one pass for all places is off by far more than the draws."""
    model = Tokenwise(mixing=True)
    batches = batched(torch.randn(N, TOKENS, 5), torch.randint(CLASSES, (N, TOKENS)))
    G = ours(model, batches, every_place, "kronecker", "expected")["up.weight"].G
    loss = nn.CrossEntropyLoss(reduction="sum")
    _, drawn = kfac_factors(model, loss, batches, fisher_type="mc", mc_samples=500)
    _, at_once = kfac_factors(model, loss, batches, fisher_type="type-2")
    agree(G * N, drawn["up"][1], tolerance=0.03)
    assert (at_once["up"][1] - drawn["up"][1]).norm() > 0.1 * drawn["up"][1].norm()


@pytest.mark.parametrize("labels", FISHER)
def test_kronecker_of_a_layer_used_twice(labels):
    model, batches = example("twice")
    found = ours(model, batches, LOSSES["cross-entropy"][1], "kronecker", labels)
    blocks, _ = kfac_factors(model, nn.CrossEntropyLoss(), batches, fisher_type=FISHER[labels])
    for parameter, W in matrices(model).items():
        agree(dense(found[parameter], W) * (2 if parameter == "layer.weight" else 1), blocks[parameter])


@pytest.mark.parametrize("labels", FISHER)
@pytest.mark.parametrize("sequence", ["expand", "reduce"])
def test_kronecker_of_gpt2_layers(sequence, labels):
    """They do not know Conv1D; its twin of nn.Linear has the weights, and so the factors, the other way round."""
    model, batches = example("gpt2")
    twin = OfMean(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
    twin.load_state_dict({name: W.T if W.dim() > 1 else W for name, W in model.state_dict().items()})
    found = ours(model, batches, LOSSES["cross-entropy"][1], "kronecker", labels, sequence=sequence)
    options = {"fisher_type": FISHER[labels], "kfac_approx": sequence}
    _, factors = kfac_factors(twin, nn.CrossEntropyLoss(), batches, **options)
    for parameter, W in matrices(model).items():
        A, G = factors[parameter.removesuffix(".weight")]
        assert found[parameter].inputs == 0
        agree(dense(found[parameter], W), torch.kron(A, G))


# EKFAC


@pytest.mark.parametrize("labels", FISHER)
@losses
@pytest.mark.parametrize("sequence", ["expand", "reduce"])
@pytest.mark.parametrize("name", KRONECKER)
def test_ekfac(name, sequence, loss, labels):
    """The operators agree; so do S, and P and Q up to sign, as both sort by eigenvalue."""
    model, batches = example(name, loss)
    theirs_of, loss_fn = LOSSES[loss]
    found = ours(model, batches, loss_fn, "ekfac", labels, sequence=sequence)
    options = {"fisher_type": FISHER[labels], "kfac_approx": sequence}
    operator, blocks = kfac(model, theirs_of(reduction="sum"), batches, EKFACLinearOperator, **options)
    state = operator.state_dict()
    assert list(found) == list(blocks)
    places = [parameter for parameter, _ in model.named_parameters()]
    for parameter, W in matrices(model).items():
        layer, metric = parameter.removesuffix(".weight"), found[parameter]
        P, Q = (state[f"{side}_covariances_eigenvectors"][layer] for side in ("gradient", "input"))
        agree(dense(metric, W) * N, blocks[parameter], tolerance=1e-9)
        agree(metric.S * N, state["corrected_eigenvalues"][layer][places.index(parameter)], tolerance=1e-9)
        agree((metric.Q.T @ Q).abs(), torch.eye(len(Q)), tolerance=1e-9)
        if (loss, labels) != ("mse", "expected") or parameter != list(found)[-1]:  # there G = 2I: any P will do
            agree((metric.P.T @ P).abs(), torch.eye(len(P)), tolerance=1e-9)


# Exact curvature on a basis


def bases(model, *, copies=False, kind="tagged"):
    """Return a basis of two fine-tuned models; of a model and its copy, where it needs `mix`."""
    base = {name: W.detach().clone() for name, W in model.state_dict().items()}
    models = [{name: W + 0.1 * torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    return epimer.build_basis(base, [models[0], models[0]] if copies else models, rank=2, basis=kind)


def directions(basis):
    size = basis.U.shape[1] if basis.mix is None else basis.mix.shape[1]
    return torch.stack([basis.lift(x).flatten() for x in torch.eye(size)], dim=1)


@pytest.mark.parametrize(("kind", "operator"), [("hessian", HessianLinearOperator), ("ggn", GGNLinearOperator)])
@losses
@pytest.mark.parametrize("copies", [False, True], ids=["two models", "copies"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_on_a_basis(name, copies, loss, kind, operator):
    model, batches = example(name, loss)
    theirs_of, loss_fn = LOSSES[loss]
    basis = bases(model, copies=copies)
    assert basis
    found = ours(model, batches, loss_fn, kind, "true", basis=basis)
    assert set(found) == set(basis)
    for parameter, one in basis.items():
        assert one.mix is not None or not copies  # near-copies, as tiny models may be by chance, have one too
        S, factor = directions(one), scale(loss, "mean")
        agree(S.T @ S, torch.eye(S.shape[1]))
        H = S.T @ block(operator, model, parameter, theirs_of(), batches) @ S
        agree(found.metrics[parameter].H * factor, H)
        values, vectors = torch.linalg.eigh(H)  # what a merge is given has no negative part
        negative = (vectors * values.clamp_max(0)) @ vectors.T
        agree(found[parameter].H * factor + negative, H)


@pytest.mark.parametrize(("kind", "operator"), [("hessian", HessianLinearOperator), ("ggn", GGNLinearOperator)])
@pytest.mark.parametrize("everywhere", [False, True])
def test_exact_on_a_basis_of_a_transformer(everywhere, kind, operator):
    model = Transformer(everywhere=everywhere).eval()
    y = torch.randint(CLASSES + 1, (N, TOKENS) if everywhere else (N,))
    batches = batched(torch.randint(CLASSES + 1, (N, TOKENS)), y)
    basis = {name: one for name, one in bases(model).items() if name != "head.weight"}  # stored as the embedding
    loss_fn = every_place if everywhere else LOSSES["cross-entropy"][1]
    found = ours(model, batches, loss_fn, kind, "true", basis=basis)
    assert set(found) == set(basis)
    for parameter, one in basis.items():
        S = directions(one)
        H = S.T @ block(operator, model, parameter, nn.CrossEntropyLoss(reduction="sum"), batches) @ S
        agree(found.metrics[parameter].H * N, H)


@pytest.mark.parametrize("copies", [False, True], ids=["two models", "copies"])
@pytest.mark.parametrize("name", [*KRONECKER, "gpt2"])
def test_other_kinds_on_a_basis(name, copies):
    """Measured in the basis, second moments are SᵀFS of their blocks, and diagonals Sᵀ diag(F) S."""
    model, batches = example(name)
    _, loss_fn = LOSSES["cross-entropy"]
    basis = bases(model, copies=copies)
    for labels, operator in (("true", EFLinearOperator), ("expected", GGNLinearOperator)):
        samples = ours(model, batches, loss_fn, "samples", labels, basis=basis)
        diagonal = ours(model, batches, loss_fn, "diagonal", labels, basis=basis)
        for parameter, one in basis.items():
            S, theirs = directions(one), block(operator, model, parameter, nn.CrossEntropyLoss(), batches)
            agree(samples[parameter].H, S.T @ theirs @ S)
            agree(diagonal[parameter].H, S.T @ theirs.diagonal().diag() @ S)


@pytest.mark.parametrize("kind", ["tagged", "tensor"])
@pytest.mark.parametrize("name", KRONECKER)
def test_kronecker_on_a_basis(name, kind):
    model, batches = example(name)
    basis = bases(model, kind=kind)
    found = ours(model, batches, LOSSES["cross-entropy"][1], "kronecker", "expected", basis=basis)
    _, factors = kfac_factors(model, nn.CrossEntropyLoss(), batches, fisher_type="type-2")
    for parameter, one in basis.items():
        A, G = factors[parameter.removesuffix(".weight")]
        agree(found[parameter].A, one.V.T @ A @ one.V)
        agree(found[parameter].G, one.U.T @ G @ one.U)
