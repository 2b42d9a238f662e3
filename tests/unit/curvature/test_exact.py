"""The exact kinds in a basis: the dense Hessian and Gauss-Newton matrix of torch.func, projected."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from cases import draw
from epimer.errors import CurvatureError
from oracle import each, near

# torch's own forward-mode derivatives, when they are first used
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

CLASSES = 3


def cross_entropy(outputs, targets):
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).sum(1)


def squares(outputs, targets):
    return (outputs - targets).square().flatten(1).sum(1)


class Tokens(nn.Module):
    """Attention, norms, a table that is also the head."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.table = nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, dropout=0.3, activation="gelu")
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        padding = ids == 0
        x = self.layer(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def _mlp(loss):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, CLASSES))
    batches = [(draw(n, 4), draw(n, CLASSES) if loss is squares else torch.randint(CLASSES, (n,))) for n in (4, 2, 1)]
    return model, batches, loss


def _pictures():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 3, 2, padding_mode="circular", padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )
    model[1].running_mean.normal_()
    return model, [(draw(n, 2, 6, 6), torch.randint(CLASSES, (n,))) for n in (3, 2)], cross_entropy


def _tokens(batch_first):
    batches = []
    for n, T in ((3, 4), (2, 3)):
        ids = torch.randint(1, 5, (n, T))
        ids[-1, 2:] = 0
        batches.append((ids, torch.where(ids == 0, -100, torch.randint(5, (n, T)))))
    return Tokens(batch_first), batches, cross_entropy


CASES = {
    "cross-entropy": lambda: _mlp(cross_entropy),
    "squared error": lambda: _mlp(squares),
    "pictures": _pictures,
    "tokens": lambda: _tokens(True),
    "tokens first": lambda: _tokens(False),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    model, batches, loss = CASES[request.param]()
    return model.double().train(), batches, loss


def bases(model, *, copies=False, rank=1):
    base = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    steps = [{name: W + draw(*W.shape) for name, W in base.items()} for _ in range(2)]
    rules = [(name, "matrix") for name in base]
    return epimer.build_basis(base, [steps[0], steps[0] if copies else steps[1]], rank=rank, rules=rules)


def directions(basis):
    S = torch.stack([torch.outer(u, v).flatten() for u, v in zip(basis.U.T, basis.V.T, strict=True)], dim=1)
    return S if basis.mix is None else S @ basis.mix


def dense(model, batches, loss, name, kind):
    """Return the Hessian or JᵀHJ of the mean loss in one weight, by torch.func and nothing else."""
    model = model.eval()
    W = dict(model.named_parameters())[name].detach()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    total, count = 0, 0
    for inputs, targets in batches:

        def outputs(w, inputs=inputs):
            step = {name: w}
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return torch.func.functional_call(model, step, (inputs,))

        if kind == "hessian":
            H = torch.func.jacrev(torch.func.jacrev(lambda w, t=targets, f=outputs: loss(f(w), t).sum()))(W)
        else:
            J = torch.func.jacrev(outputs)(W).detach().flatten(-W.dim()).flatten(0, -2)
            z = outputs(W).detach()
            inner = torch.func.hessian(lambda z, t=targets: loss(z, t).sum())(z).detach()
            H = J.T @ inner.reshape(len(J), len(J)) @ J
        total = total + H.detach().reshape(W.numel(), W.numel())
        count += len(targets)
    torch.backends.mha.set_fastpath_enabled(fast)
    return total / count


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_exact_kinds_are_the_dense_matrices_projected(case, kind, copies):
    model, batches, loss = case
    basis = bases(model, copies=copies)
    found = epimer.estimate_curvature(model, batches, loss, kind=kind, labels="true", basis=basis)
    assert model.training
    assert found.keys() == basis.keys()
    assert found.provenance.samples == sum(len(targets) for _, targets in batches)
    for name, one in basis.items():
        S = directions(one)
        H = S.T @ dense(model, batches, loss, name, kind) @ S
        raw = found.metrics[name].H
        assert near(raw, H, 1e-9), name
        values, vectors = torch.linalg.eigh(H)
        assert near(found[name].H, vectors @ torch.diag(values.clamp_min(0)) @ vectors.T, 1e-8)
        share = float(values.clamp_max(0).abs().sum() / values.abs().sum())
        if kind == "hessian":
            assert found.clipped.get(name, 0) == pytest.approx(share, abs=1e-9)
        else:
            assert share < 1e-9
            assert found.clipped == {}


def test_negative_curvature_is_kept_but_not_used():
    """Half a sample's output squared, with a sign of its own: the Hessian is the signed moment of the inputs."""
    torch.manual_seed(0)
    model, x, signs = nn.Linear(4, 1, bias=False).double(), draw(5, 4), torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    moment = torch.einsum("n,ni,nj->ij", signs.double(), x, x) / 5
    V = torch.linalg.qr(draw(4, 4)).Q
    U = torch.ones(1, 4, dtype=torch.float64)
    base = {"weight": model.weight.detach()}
    (basis,) = epimer.build_basis(base, [{"weight": base["weight"] + 1}], rules=[("weight", "matrix")]).values()
    basis = type(basis)(U, V, torch.ones(4).double(), torch.zeros(4, dtype=torch.long))
    found = epimer.estimate_curvature(
        model,
        [(x, signs)],
        lambda o, t: 0.5 * t * o[:, 0].square(),
        kind="hessian",
        labels="true",
        basis={"weight": basis},
    )
    assert near(found.metrics["weight"].H, V.T @ moment @ V)
    values = torch.linalg.eigvalsh(moment)
    assert values[0] < 0 < values[-1]
    assert near(torch.linalg.eigvalsh(found["weight"].H), values.clamp_min(0), 1e-8)
    assert found.clipped == {"weight": pytest.approx(float(values.clamp_max(0).sum().abs() / values.abs().sum()))}


def test_both_agree_where_the_model_is_linear():
    torch.manual_seed(0)
    model, batch = nn.Linear(4, CLASSES).double(), (draw(6, 4), torch.randint(CLASSES, (6,)))
    basis = bases(model)
    given = {kind: {"kind": kind, "labels": "true"} for kind in ("hessian", "ggn")} | {
        "fisher": {"kind": "samples", "labels": "expected"}
    }
    H, ggn, fisher = (
        epimer.estimate_curvature(model, [batch], cross_entropy, basis=basis, **options)["weight"].H
        for options in given.values()
    )
    assert near(H, ggn)
    assert near(fisher, ggn)


@pytest.mark.parametrize("case_name", ["cross-entropy", "squared error", "tokens"])
def test_the_gauss_newton_matrix_is_the_expected_fisher(case_name):
    torch.manual_seed(0)
    model, batches, loss = CASES[case_name]()
    model.double()
    basis = {name: one for name, one in bases(model).items() if name != "table.weight"}
    ggn = epimer.estimate_curvature(model, batches, loss, kind="ggn", labels="true", basis=basis)
    fisher = epimer.estimate_curvature(model, batches, loss, kind="samples", labels="expected", basis=basis)
    for name in basis:
        assert near(ggn[name].H, fisher[name].H, 1e-9), name


def test_both_kinds_draw_the_same_labels():
    torch.manual_seed(0)
    model, batches, loss = _tokens(True)
    model.double()
    basis = bases(model)
    seen = {"hessian": [], "ggn": []}
    for kind, targets in seen.items():

        def kept(outputs, given, targets=targets):
            targets.append(given)
            return loss(outputs, given)

        epimer.estimate_curvature(model, batches, kept, kind=kind, labels="model", seed=4, basis=basis)
    for size in (3, 2):
        drawn = {kind: [t for t in targets if len(t) == size][-1] for kind, targets in seen.items()}
        assert torch.equal(drawn["hessian"], drawn["ggn"])


def test_the_mean_hessian_under_sampled_labels_is_the_gauss_newton_matrix():
    """Of a confident classifier, within four standard errors, which are small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    with torch.no_grad():
        model[2].weight *= 3
        model[2].bias[1] += 3
    x, seeds, name = draw(20, 4), 30, "0.weight"
    basis = {name: bases(model)[name]}
    S = directions(basis[name])
    ggn = S.T @ dense(model, [(x, torch.zeros(20, dtype=torch.long))], cross_entropy, name, "ggn") @ S
    options = {"kind": "hessian", "labels": "model", "samples": None, "basis": basis}
    batches = [(x.repeat(200, 1), None)]
    runs = [epimer.estimate_curvature(model, batches, cross_entropy, seed=seed, **options) for seed in range(seeds)]
    H = torch.stack([run.metrics[name].H for run in runs])
    standard_error = H.std(0) / seeds**0.5
    assert float(standard_error.norm()) < 0.03 * float(ggn.norm())
    assert bool(((H.mean(0) - ggn).abs() <= 4 * standard_error).all())


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_batches_and_sums_change_nothing(kind):
    torch.manual_seed(0)
    model, batches, loss = _tokens(False)
    model.double()
    basis = bases(model)
    whole = epimer.estimate_curvature(model, batches, loss, kind=kind, labels="true", basis=basis)
    single = [
        (each(ids, lambda t, n=n: t[n : n + 1]), targets[n : n + 1])
        for ids, targets in batches
        for n in range(len(ids))
    ]
    parts = epimer.estimate_curvature(model, single, loss, kind=kind, labels="true", basis=basis)
    summed = epimer.estimate_curvature(
        model, batches, lambda o, t: loss(o, t).sum(), kind=kind, labels="true", basis=basis
    )
    for name in basis:
        assert near(parts.metrics[name].H, whole.metrics[name].H)
        assert near(summed.metrics[name].H, whole.metrics[name].H)


def test_better_approximations_are_nearer_the_gauss_newton_matrix():
    """Under the expected labels: the Fisher is exact, EKFAC beats K-FAC and the diagonal is worst."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    batch = draw(40, 6) * torch.arange(1.0, 7).double(), torch.randint(CLASSES, (40,))
    for name in ("0.weight", "2.weight"):
        exact = dense(model, [batch], cross_entropy, name, "ggn")
        errors = {}
        for kind in ("samples", "ekfac", "kronecker", "diagonal"):
            found = epimer.estimate_curvature(model, [batch], cross_entropy, kind=kind, labels="expected")
            shape = model.get_parameter(name).shape
            units = torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape)
            H = torch.stack([found[name].apply(unit).flatten() for unit in units])
            errors[kind] = float((H - exact).norm() / exact.norm())
        assert errors["samples"] < 1e-10
        assert list(errors.values()) == sorted(errors.values()), errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "expected"}, "take labels='true' or 'model'"),
        ({"labels": "true"}, "needs targets, but a batch has none"),
    ],
)
def test_what_a_hessian_cannot_be_of_is_refused(options, words):
    model = nn.Linear(4, CLASSES).double()
    targets = None if options["labels"] == "true" else torch.zeros(2, dtype=torch.long)
    with pytest.raises(CurvatureError, match=words):
        epimer.estimate_curvature(
            model, [(draw(2, 4), targets)], cross_entropy, kind="hessian", basis=bases(model), **options
        )
