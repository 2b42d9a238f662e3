"""Whose labels: the given ones, drawn ones that the loss can be seen to receive, and all of them at once."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from epimer.errors import CurvatureError
from oracle import factors, fisher, gradients, layer_uses, near, singles

CLASSES = 4
IGNORED = -100


def cross_entropy(outputs, targets):
    """Return a loss per sample, of logits with the classes last."""
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).sum(1)


def shifted(outputs, targets):
    return cross_entropy(outputs[:, :-1], targets[:, 1:])


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


class Sequence(nn.Module):
    """Tokens that see each other, logits for each of them."""

    def __init__(self, scale=1.0, form="tensor"):
        super().__init__()
        self.scale, self.form = scale, form
        self.table, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, ids, attention_mask=None):
        x = self.table(ids)
        x = x + self.mix(x.cumsum(1)).tanh()
        logits = self.scale * self.head(x)
        return logits if self.form == "tensor" else Output(logits)


class Output(dict):
    """As transformers has it: .logits, ["logits"] and [0] are the same."""

    def __init__(self, logits):
        super().__init__(logits=logits, cache="something else")

    @property
    def logits(self):
        return self["logits"]

    def __getitem__(self, key):
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def sequence(**options):
    torch.manual_seed(0)
    return Sequence(**options).double()


def ids_and_targets(n=5, T=4):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(9, (n, T), generator=generator)
    targets = torch.randint(CLASSES, (n, T), generator=generator)
    targets[0, 1] = targets[2, 3] = targets[3, 2] = IGNORED
    targets[4, 1:] = IGNORED
    return ids, targets


class Capture:
    """A loss that remembers the targets of each batch that a gradient was taken of."""

    def __init__(self, loss):
        self.loss, self.seen = loss, []

    def __call__(self, outputs, targets):
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        self.seen.append((logits.grad_fn is not None, targets.clone()))
        return self.loss(outputs, targets)

    def measured(self, sizes):
        """Return the last targets of each batch size, in the order of the batches."""
        found = []
        live = [targets for grad, targets in self.seen if grad]
        for size in sizes:
            while len(live[0]) != size:
                live.pop(0)
            found.append(live.pop(0))
        return found


def by_reach(outputs, targets):
    """Return the loss times √(p / q) for q ∝ p · ‖e - p‖, spelled out."""
    p = outputs.detach().softmax(-1)
    reach = (torch.eye(CLASSES, dtype=p.dtype) - p[:, None]).norm(dim=-1)
    q = p * reach / (p * reach).sum(1, keepdim=True)
    rows = torch.arange(len(targets))
    return cross_entropy(outputs, targets) * (p[rows, targets] / q[rows, targets]).sqrt()


def measure(model, batches, loss, kind="diagonal", **options):
    return epimer.estimate_curvature(model, batches, loss, kind=kind, **options)


# --- labels drawn from the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "samples"])
def test_the_drawn_labels_are_those_whose_gradients_are_measured(kind):
    model, loss = mlp(), Capture(cross_entropy)
    batches = [(draw(n, 3), torch.zeros(n, dtype=torch.long)) for n in (6, 5)]
    found = measure(model, batches, loss, kind, seed=3)
    drawn = loss.measured((6, 5))
    assert len(set(torch.cat(drawn).tolist())) > 1
    given = [(x, t) for (x, _), t in zip(batches, drawn, strict=True)]
    again = measure(model, given, by_reach, kind, labels="true")
    s = gradients(model, given, by_reach)
    for name in found:
        for part, value in vars(found[name]).items():
            assert part == "inputs" or near(value, getattr(again[name], part))
        if kind == "diagonal":
            assert near(found[name].F, s[name].square().mean(0))


def test_ekfac_draws_the_same_labels_twice():
    model, loss = mlp(), Capture(cross_entropy)
    batches = [(draw(n, 3), torch.zeros(n, dtype=torch.long)) for n in (6, 5)]
    found = measure(model, batches, loss, "ekfac")
    drawn = loss.measured((6, 5))
    s = gradients(model, [(x, t) for (x, _), t in zip(batches, drawn, strict=True)], by_reach)
    for name in found:
        assert near(found[name].S, (found[name].P.T @ s[name] @ found[name].Q).square().mean(0))


def test_seeds_decide_the_labels_and_nothing_else_does():
    model, x = mlp(), draw(20, 3)

    def drawn(seed):
        loss = Capture(cross_entropy)
        measure(model, [(x, torch.zeros(20, dtype=torch.long))], loss, seed=seed)
        return loss.measured((20,))[0]

    torch.manual_seed(0)
    one = drawn(5)
    state = torch.get_rng_state()
    assert torch.equal(drawn(5), one)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(drawn(6), one)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_many_draws_approach_the_expectation(kind):
    model, x = mlp(), draw(3, 3)
    many = x.repeat(3000, 1)
    expected = measure(model, [(x, torch.zeros(3, dtype=torch.long))], cross_entropy, kind, labels="expected")
    found = measure(model, [(many, None)], cross_entropy, kind, labels="model", samples=None)
    for name in expected:
        parts = ("F",) if kind == "diagonal" else ("A", "G")
        for part in parts:
            assert near(getattr(found[name], part), getattr(expected[name], part), 0.05), (name, part)


def test_labels_are_drawn_as_often_as_their_reach_says():
    model, x = mlp(), draw(1, 3)
    p = model(x).softmax(-1)[0].detach()
    q = p * (torch.eye(CLASSES, dtype=p.dtype) - p).norm(dim=1)
    loss = Capture(cross_entropy)
    measure(model, [(x.expand(20_000, 3), None)], loss, samples=None)
    drawn = torch.cat([targets for _, targets in loss.seen if len(targets) == 20_000][-1:])
    assert near(drawn.bincount(minlength=CLASSES) / 20_000.0, (q / q.sum()).float(), 0.02)


def test_a_sure_model_is_known_from_few_samples():
    """Where one label in a thousand is another, 64 labels drawn as they come say next to nothing."""
    model, x = mlp(), draw(64, 3)
    with torch.no_grad():
        model[2].bias[1] += 7.0
    zeros = torch.zeros(64, dtype=torch.long)
    expected = measure(model, [(x, zeros)], cross_entropy, labels="expected")

    def off(loss):
        found = [measure(model, [(x, zeros)], loss, seed=seed) for seed in range(20)]
        errors = [one["0.weight"].F / expected["0.weight"].F.mean() for one in found]
        return float((torch.stack(errors) - expected["0.weight"].F / expected["0.weight"].F.mean()).square().mean())

    as_they_come = off(lambda outputs, targets: cross_entropy(outputs, targets).sum())
    assert off(cross_entropy) < 0.1 * as_they_come


def confident(scale=3.0):
    """Return a model of sequences, and data for it, whose predictions are mostly near certain."""
    model = sequence(scale=scale)
    with torch.no_grad():
        model.head.bias[1] += 1.0
    return model, ids_and_targets(n=5, T=4)


@pytest.mark.parametrize("given", [cross_entropy, shifted, lambda o, t: cross_entropy(o, t).sum()])
@pytest.mark.parametrize(("kind", "mode"), [("diagonal", "expand"), ("kronecker", "expand"), ("kronecker", "reduce")])
def test_sampled_tokens_have_the_mean_of_all_labels(kind, mode, given):
    """Within four standard errors, which are small, of the exact expectation: one pass per class and position."""
    model, (ids, targets) = confident()
    part, seeds = "F" if kind == "diagonal" else "G", 30
    per_sample = shifted if given is shifted else cross_entropy
    exact = measure(model, [(ids, targets)], per_sample, kind, labels="expected", sequence=mode)
    many = [(ids.repeat(100, 1), targets.repeat(100, 1))]
    runs = [measure(model, many, given, kind, seed=n, samples=None, sequence=mode) for n in range(seeds)]
    for name in exact:
        values, expected = torch.stack([getattr(run[name], part) for run in runs]), getattr(exact[name], part)
        standard_error = values.std(0) / seeds**0.5
        assert float(standard_error.norm()) < 0.05 * float(expected.norm())
        off = (values.mean(0) - expected).abs() - 1e-9 * float(expected.norm())
        assert float((off / standard_error.clamp_min(1e-12)).max()) < 4.5, name


def test_tokens_of_a_confident_model_are_known_from_fewer_samples():
    """Against labels sampled from p, which a loss that is no sum over positions still gets; see docs/curvature.md."""
    model, (ids, targets) = confident()

    def mean_square(loss):
        runs = [measure(model, [(ids, targets)], loss, "kronecker", seed=seed) for seed in range(60)]
        return float(torch.stack([run["mix.weight"].G - exact["mix.weight"].G for run in runs]).square().mean())

    def joined(outputs, targets):
        """Return nearly the same loss, but with labels that matter a little to the gradients of other positions."""
        return cross_entropy(outputs, targets) * (1 + 0.005 * (targets == 0).sum(1))

    exact = measure(model, [(ids, targets)], cross_entropy, "kronecker", labels="expected")
    assert mean_square(cross_entropy) < 0.7 * mean_square(joined)


@pytest.mark.parametrize("saturated", [40.0, 400.0, 4000.0])
def test_a_model_without_doubt_has_no_curvature_and_no_nan(saturated):
    model, x = mlp(), draw(8, 3)
    with torch.no_grad():
        model[2].bias[2] += saturated
    found = measure(model, [(x, torch.zeros(8, dtype=torch.long))], cross_entropy, "kronecker")
    assert all(bool(one.G.isfinite().all()) and float(one.G.abs().max()) < 1e-10 for one in found.values())


@pytest.mark.parametrize("form", ["tensor", "output"])
@pytest.mark.parametrize(("inside", "shift"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("targets", ["given", "none"])
def test_labels_come_from_the_logits_they_are_compared_with(inside, shift, form, targets):
    model = sequence(scale=30.0, form=form)
    ids, given = ids_and_targets(n=20, T=5)
    logits = model(ids) if form == "tensor" else model(ids).logits
    gap = logits.topk(3).values[..., 1:].diff().abs().squeeze(-1)  # sampled by importance: one of two

    def on_logits(outputs, targets):
        values = outputs if form == "tensor" else outputs.logits
        return (shifted if inside else cross_entropy)(values, targets)

    loss = Capture(on_logits)
    measure(model, [(ids, given if targets == "given" else None)], loss)
    (drawn,) = loss.measured((20,))
    sure = 0
    for n in range(20):
        for t in range(shift, 5):
            if targets == "given" and given[n, t] == IGNORED:
                assert drawn[n, t] == IGNORED
            elif gap[n, t - shift] > 9:
                assert drawn[n, t] in logits[n, t - shift].topk(2).indices
                sure += 1
    assert sure > 15


@pytest.mark.parametrize("key", ["logits", 0])
@pytest.mark.parametrize("kind", ["diagonal", "ggn"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_loss_may_index_the_output_as_transformers_lets_it(kind, key):
    ids, targets = ids_and_targets()
    found = {}
    for form in ("tensor", "output"):
        model = sequence(form=form)
        base = {"head.weight": model.head.weight.detach()}
        models = [{"head.weight": base["head.weight"] + W} for W in (torch.eye(4).double(), draw(4, 4))]
        basis = None
        if kind == "ggn":
            basis = epimer.build_basis(base, [models[0], base], rank=1, rules=[("head.weight", "matrix")])

        def loss(outputs, targets, form=form):
            return cross_entropy(outputs if form == "tensor" else outputs[key], targets)

        found[form] = measure(model, [(ids, targets)], loss, kind, basis=basis)["head.weight"]
    for part in ("F",) if kind == "diagonal" else ("H",):
        assert near(getattr(found["output"], part), getattr(found["tensor"], part))


def test_without_targets_padding_is_ignored():
    model, loss = sequence(), Capture(cross_entropy)
    ids, _ = ids_and_targets()
    mask = torch.ones_like(ids)
    mask[1, 2:] = mask[3, 1:] = 0
    measure(model, [({"ids": ids, "attention_mask": mask}, None)], loss)
    (drawn,) = loss.measured((5,))
    assert torch.equal(drawn == IGNORED, mask == 0)
    without = measure(model, [({"ids": ids, "attention_mask": mask}, None)], cross_entropy, labels="expected")
    given = measure(model, [(ids, torch.where(mask == 0, IGNORED, 0))], cross_entropy, labels="expected")
    for name in given:
        assert near(without[name].F, given[name].F)


def test_classes_may_be_the_second_dimension():
    class Picture(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, CLASSES, 3, padding=1)

        def forward(self, x):
            return 50 * self.conv(x)

    torch.manual_seed(0)
    model, x = Picture().double(), draw(3, 2, 5, 5)

    def plain(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)

    loss = Capture(plain)
    targets = torch.zeros(3, 5, 5, dtype=torch.long)
    targets[1, 2] = IGNORED
    measure(model, [(x, targets)], loss)
    (drawn,) = loss.measured((3,))
    logits = model(x)
    sure = (logits.topk(3, 1).values[:, 1:].diff(dim=1).abs()[:, 0] > 12) & (targets != IGNORED)
    assert sure.sum() > 10
    assert bool((drawn[:, None] == logits.topk(2, 1).indices).any(1)[sure].all())
    assert torch.equal(drawn == IGNORED, targets == IGNORED)


# --- the expectation over all labels ---------------------------------------------------------------------------------


def expectation(model, batches, loss):
    """Return, for every parameter, the gradients for each class at each place, times the root of its probability."""
    rows = {name: [] for name, _ in model.named_parameters()}
    count = 0
    for inputs, target in singles(batches):
        count += 1
        logits = model(inputs)
        p = logits.softmax(-1).detach().reshape(-1, CLASSES)
        for place in range(target.numel()):
            if target.flatten()[place] == IGNORED:
                continue
            for label in range(CLASSES):
                only = torch.full_like(target, IGNORED)
                only.view(-1)[place] = label
                for name, s in gradients(model, [(inputs, only)], loss).items():
                    rows[name].append(s[0] * p[place, label].sqrt())
    return {name: torch.stack(found) for name, found in rows.items()}, count


def _classes():
    x = draw(4, 3)
    return mlp(), [(x[:3], torch.zeros(3, dtype=torch.long)), (x[3:], torch.ones(1, dtype=torch.long))]


def _places():
    ids, targets = ids_and_targets()
    return sequence(), [(ids[:3], targets[:3]), (ids[3:, :3], targets[3:, :3])]


@pytest.mark.parametrize("make", [_classes, _places], ids=["classes", "sequences"])
def test_the_expectation_is_the_sum_over_classes_and_places(make):
    model, batches = make()
    s, count = expectation(model, batches, cross_entropy)
    diagonal = measure(model, batches, cross_entropy, labels="expected")
    samples = measure(model, batches, cross_entropy, "samples", labels="expected")
    ekfac = measure(model, batches, cross_entropy, "ekfac", labels="expected")
    for name in diagonal:
        assert near(diagonal[name].F, s[name].square().sum(0) / count), name
    for name in samples:
        m, n = s[name].shape[1:]
        D = draw(m, n)
        assert near(samples[name].apply(D).flatten(), fisher(s[name]) @ D.flatten() * len(s[name]) / count), name
        turned = ekfac[name].P.T @ s[name] @ ekfac[name].Q
        assert near(ekfac[name].S, turned.square().sum(0) / count)


@pytest.mark.parametrize("mode", ["expand", "reduce"])
def test_inputs_are_counted_once_under_the_expectation(mode):
    model, batches = _places()
    found = measure(model, batches, cross_entropy, "kronecker", labels="expected", sequence=mode)
    # no loss depends on the tokens after a text's last label, which without a mask count as padding
    after = [(row == IGNORED).flip(0).cummin(0).values.flip(0) for _, targets in batches for row in targets]
    masks = [~row for row in after]
    for name in found:
        A = factors(layer_uses(model, batches, cross_entropy)[0][name], mode, masks)[1]
        assert near(found[name].A, A), name
        G = 0
        for inputs, target in singles(batches):
            p = model(inputs).softmax(-1).detach()[0]
            for t in (target[0] != IGNORED).nonzero().flatten():
                for label in range(CLASSES):
                    only = torch.full_like(target, IGNORED)
                    only[0, t] = label
                    uses, _ = layer_uses(model, [(inputs, only)], cross_entropy)
                    G = G + p[t, label] * factors(uses[name], mode)[0]
        assert near(found[name].G, G / 5), name
        assert found.provenance.counts[name] == sum(int(mask.sum()) for mask in masks)


def test_the_expectation_of_a_shifted_loss_weighs_with_the_shifted_logits():
    model = sequence()
    ids, targets = ids_and_targets()
    found = measure(model, [(ids, targets)], shifted, labels="expected")
    before = torch.cat([targets[:, 1:], torch.full((5, 1), IGNORED)], 1)  # the same, shifted by the user
    other = measure(model, [(ids, before)], cross_entropy, labels="expected")
    for name in found:
        assert near(found[name].F, other[name].F), name


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: cross_entropy(o, t).sum(), "needs a loss per sample"),
        (lambda o, t: cross_entropy(o, t) / (t != IGNORED).sum(1), "sums over a sample's places"),
    ],
)
def test_losses_without_an_expectation_are_refused(loss, words):
    with pytest.raises(CurvatureError, match=words):
        measure(sequence(), [ids_and_targets()], loss, labels="expected")


def test_too_many_classes_are_refused():
    model = nn.Linear(3, 2000)
    with pytest.raises(CurvatureError, match=r"would take 2000 backward passes.*labels='model'"):
        measure(model, [(torch.randn(2, 3), torch.tensor([0, 1]))], cross_entropy, labels="expected")


# --- squared error ---------------------------------------------------------------------------------------------------

SQUARES = {
    "half": (lambda o, t: 0.5 * (o - t).square().flatten(1).sum(1), 1.0),
    "whole": (lambda o, t: (o - t).square().flatten(1).sum(1), 2.0),
    "mean over outputs": (lambda o, t: (o - t).square().flatten(1).mean(1), 2.0 / CLASSES),
    "sum over the batch": (lambda o, t: (o - t).square().sum(), 2.0),
    "with a constant": (lambda o, t: (o - t).square().sum(1) + 3, 2.0),
    "mse_loss": (lambda o, t: functional.mse_loss(o, t, reduction="none"), 2.0),
}


@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.parametrize("n", [1, 4])
def test_the_expected_fisher_of_squared_error_is_its_gauss_newton_matrix(name, n):
    loss, curvature = SQUARES[name]
    model, x = mlp(), draw(n, 3)
    found = measure(model, [(x, draw(n, CLASSES))], loss, "samples", labels="expected")
    for weight in found:
        W = dict(model.named_parameters())[weight].detach()
        J = torch.func.jacrev(lambda w, weight=weight: torch.func.functional_call(model, {weight: w}, (x,)))(W)
        J = J.detach().reshape(n * CLASSES, -1)
        D = torch.randn_like(W)
        assert near(found[weight].apply(D).flatten(), curvature * J.T @ (J @ D.flatten()) / n)


def test_drawn_squared_errors_approach_the_expectation():
    loss, _ = SQUARES["whole"]
    model, x = mlp(), draw(3, 3)
    many = x.repeat(3000, 1)
    expected = measure(model, [(x, draw(3, CLASSES))], loss, labels="expected")
    found = measure(model, [(many, draw(9000, CLASSES))], loss, labels="model", samples=None)
    for name in expected:
        assert near(found[name].F, expected[name].F, 0.05), name


WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("policy", ["model", "expected"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o - t).abs().sum(1),
        lambda o, t: functional.huber_loss(o, t, reduction="none").sum(1),
        lambda o, t: functional.binary_cross_entropy_with_logits(o, t, reduction="none").sum(1),
        lambda o, t: -(t * o.log_softmax(1)).sum(1),
        lambda o, t: ((o - t).square() * WEIGHTS).sum(1),
        lambda o, t: ((o - t).square() * WEIGHTS).sum(),
    ],
    ids=["absolute", "huber", "binary", "soft labels", "weighted", "weighted sum"],
)
def test_losses_of_floats_that_are_not_squared_error_are_refused(loss, n, policy):
    with pytest.raises(CurvatureError, match=r"use labels='true'"):
        measure(mlp(), [(draw(n, 3), draw(n, CLASSES).sigmoid())], loss, labels=policy)


# --- what cannot be told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "batch", "options", "words"),
    [
        ("mlp", lambda: (draw(3, 3), None), {"labels": "true"}, r"needs targets.*labels='model'"),
        ("mlp", lambda: (draw(3, 3), {"a": torch.zeros(3)}), {}, "needs targets as a tensor, got dict"),
        ("mlp", lambda: (draw(3, 3), draw(3, 2)), {}, r"targets of shape \(3, 2\) do not fit outputs"),
        ("mlp", lambda: (draw(3, 3), torch.zeros(3, 2, dtype=torch.long)), {}, "cannot tell which of the logits"),
        ("tuple", lambda: (draw(3, 3), torch.zeros(3, dtype=torch.long)), {}, "the model returned tuple"),
    ],
)
def test_labels_that_cannot_be_drawn_are_refused(model, batch, options, words):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, CLASSES).double()

        def forward(self, x):
            return self.layer(x), x

    def loss(outputs, targets):
        return (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum(1)

    with pytest.raises(CurvatureError, match=words):
        measure(mlp() if model == "mlp" else Pair(), [batch()], loss, **options)


def test_a_loss_that_mixes_places_is_refused():
    def mixed(outputs, targets):
        return cross_entropy(outputs.cumsum(1), targets)

    with pytest.raises(CurvatureError, match="cannot tell which logits a target is compared with"):
        measure(sequence(), [ids_and_targets()], mixed)
