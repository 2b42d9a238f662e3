"""Merges by inputs without labels: steps against dense float64, scales and rounds against choices made by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import epimer
from epimer.diagnosis.rounds import CHOOSING, DAMPING, FIT, LENGTHS, measure_curvature, refine
from epimer.diagnosis.sweep import SCALES
from epimer.errors import CurvatureError, DataError, ParameterError
from epimer.evaluation.suite import Split, Suite, SuiteTask
from epimer.geometry.metric import Diagonal
from trained import make_suite, network

SAMPLES, WEIGHTS = 64, [0.5, 0.3, 0.2]
MEASURED = {"one.weight", "two.weight"}


@pytest.fixture(scope="module")
def suite():
    return make_suite(None)


# -- the same, by hand


def rows(suite, seed=0):
    """Return every task's inputs: all, those to fit and those that only validate."""
    for task in suite.tasks:
        x = task.splits["train"].x
        chosen = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:SAMPLES]]
        held_out = torch.arange(SAMPLES) % 4 == 3
        yield chosen, chosen[~held_out], chosen[held_out]


def log_probabilities(state, task, x):
    return network(state, task).double()(x.double()).log_softmax(1)


def kl_by_hand(suite, state, part, weights):
    total = 0.0
    for task, model, weight, parts in zip(suite.tasks, suite.models, weights, rows(suite), strict=True):
        p, q = (log_probabilities(one, task, parts[part]).detach() for one in (model, state))
        total += weight * float((p.exp() * (p - q)).sum(1).mean())
    return total


def order_by_hand(suite, state, part):
    """Return 1 - (disagreement + KL), both means over tasks."""
    hits = []
    for task, model, parts in zip(suite.tasks, suite.models, rows(suite), strict=True):
        p, q = (log_probabilities(one, task, parts[part]).argmax(1) for one in (model, state))
        hits.append(float((p == q).double().mean()))
    return sum(hits) / len(hits) - kl_by_hand(suite, state, part, [1 / len(hits)] * len(hits))


def measured_by_hand(suite, states, seed=0, part=1):
    """Return curvature on the inputs to fit, or on all of them (part 0)."""
    found = []
    for task, state, parts in zip(suite.tasks, states, rows(suite, seed), strict=True):
        x = parts[part]
        batches = [(part, None) for part in x.split(16)]
        model, loss = network(state, task), lambda out, y: cross_entropy(out, y, reduction="none")
        found.append(epimer.estimate_curvature(model, batches, loss, samples=None, seed=seed, progress=False))
    return [{name: metric for name, metric in one.items() if name in suite.base} for one in found]


def merged_by_hand(suite, curvature, scale, **more):
    return epimer.merge_state_dicts(suite.base, suite.models, "epimer_kron", curvature=curvature, scale=scale, **more)


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, W in expected.items():
        torch.testing.assert_close(state[name], W, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def relabelled(suite, label):
    tasks = [
        replace(task, splits={name: Split(split.x, label(split.y)) for name, split in task.splits.items()})
        for task in suite.tasks
    ]
    return replace(suite, tasks=tasks)


# -- refinement


def test_a_step_is_the_damped_natural_gradient(suite):
    inputs = suite.inputs_only(SAMPLES)
    state = dict(epimer.merge_state_dicts(suite.base, suite.models, "average"))
    curvatures = measure_curvature(inputs, [state] * 3)
    found, divergences = refine(inputs, state, curvatures, WEIGHTS, 1)

    leaves = {name: W.double().requires_grad_(name in MEASURED) for name, W in state.items()}
    total = 0.0
    for task, model, weight, (_, fit, _) in zip(suite.tasks, suite.models, WEIGHTS, rows(suite), strict=True):
        whole = {**leaves, "head.weight": task.head["weight"].double(), "head.bias": task.head["bias"].double()}
        q = torch.func.functional_call(network(state, task).double(), whole, fit.double()).log_softmax(1)
        p = log_probabilities(model, task, fit).detach()
        total = total + weight * (p.exp() * (p - q)).sum(1).mean()
    gradients = dict(zip(MEASURED, torch.autograd.grad(total, [leaves[name] for name in MEASURED]), strict=True))
    lengths = []
    for name, gradient in gradients.items():
        direction = dense_direction([each[name] for each in curvatures], gradient)
        step = (found[name] - state[name]).double()
        lengths.append(float(step.norm() / direction.norm()))
        torch.testing.assert_close(step, lengths[-1] * direction, rtol=1e-3, atol=1e-4 * float(step.abs().max()))
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-4)
    tried = {length: kl_by_hand(suite, {**state, **moved(state, found, length / lengths[0])}, 2, WEIGHTS)
             for length in LENGTHS}  # fmt: skip
    best = min(tried, key=tried.get)
    assert lengths[0] == pytest.approx(best, rel=1e-4)
    assert divergences == pytest.approx([kl_by_hand(suite, state, 2, WEIGHTS), tried[best]], rel=1e-4)
    assert divergences[1] < divergences[0]
    for name in state.keys() - MEASURED:
        assert found[name] is state[name]


def dense_direction(metrics, gradient, weights=WEIGHTS):
    """Return -(Σ λ_t G_t ⊗ A_t + εI)⁻¹ ∇, the whole matrix formed."""
    H = sum(w * torch.kron(m.G.double(), m.A.double()) for w, m in zip(weights, metrics, strict=True))
    H += DAMPING * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    return -torch.linalg.solve(H, gradient.double().flatten()).reshape(gradient.shape)


def moved(state, found, length):
    return {name: state[name] + length * (found[name] - state[name]) for name in MEASURED}


def test_every_step_lowers_the_divergence_on_held_out_inputs(suite):
    inputs = suite.inputs_only(SAMPLES)
    state = dict(epimer.merge_state_dicts(suite.base, suite.models, "average"))
    found, divergences = refine(inputs, state, measure_curvature(inputs, [state] * 3), WEIGHTS, 6)
    assert len(divergences) > 3
    assert divergences == sorted(divergences, reverse=True)
    assert len(set(divergences)) == len(divergences)
    assert divergences[-1] == pytest.approx(kl_by_hand(suite, found, 2, WEIGHTS), rel=1e-4)


class Conv1D(nn.Module):
    """A layer as GPT-2 stores it: inputs x outputs."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_steps_of_convolutions_and_of_layers_stored_inputs_first():
    torch.manual_seed(0)
    shape = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), Conv1D(4, 12))

    def make(state, task):
        shape.load_state_dict(dict(state))
        return shape.eval()

    base = {name: W.clone() for name, W in shape.state_dict().items()}
    model = {name: W + 0.3 * torch.randn(W.shape) for name, W in base.items()}
    splits = {name: Split(torch.randn(24, 2, 3, 3), torch.zeros(24, dtype=torch.long)) for name in ("train", "test")}
    task = SuiteTask("pixels", list("abcd"), splits | {"val": splits["train"]})
    suite = Suite("pixels", base, [model], [task], make)
    curvatures = measure_curvature(suite, [base])
    found, divergences = refine(suite, base, curvatures, [1.0], 1)
    assert divergences[1] < divergences[0]

    x = splits["train"].x
    p = make(model, task)(x).detach().log_softmax(1)
    q = make(base, task)(x).log_softmax(1)
    names = {"0.weight": (3, 2, 2, 2), "3.weight": (12, 4)}
    parameters = dict(shape.named_parameters())
    gradients = torch.autograd.grad((p.exp() * (p - q)).sum(1).mean(), [parameters[name] for name in names])
    for (name, size), gradient in zip(names.items(), gradients, strict=True):
        direction, step = dense_direction([curvatures[0][name]], gradient, [1.0]), (found[name] - base[name]).double()
        assert step.shape == size
        length = min(LENGTHS, key=lambda one: abs(one - float(step.norm() / direction.norm())))
        torch.testing.assert_close(step, length * direction, rtol=1e-3, atol=1e-3 * float(step.abs().max()))


class Line(nn.Linear):
    """Two classes by one number."""

    def __init__(self, state):
        super().__init__(1, 2, bias=False)
        self.load_state_dict(dict(state))


def tug_of_war(pulls):
    """Return two tasks of which the first, then the second pulls: its inputs are not 0 in fit, then in held-out."""
    weights = [{"weight": torch.tensor([[pull], [-pull]])} for pull in (2.0, -2.0)]
    tasks = []
    for t in range(2):
        sizes = {"train": 1.0, "val": float(pulls[0] == t), "test": float(pulls[1] == t)}
        splits = {
            name: Split(torch.full((8, 1), size), torch.zeros(8, dtype=torch.long)) for name, size in sizes.items()
        }
        tasks.append(SuiteTask(f"{t}", ["a", "b"], splits))
    return Suite("tug", {"weight": torch.zeros(2, 1)}, weights, tasks, lambda state, task: Line(state).eval())


@pytest.mark.parametrize(("pulls", "taken"), [((0, 1), False), ((1, 0), False), ((0, 0), True), ((1, 1), True)])
def test_a_step_that_does_not_help_on_held_out_inputs_is_not_taken(pulls, taken):
    suite = tug_of_war(pulls)
    state = {"weight": torch.tensor([[0.3], [-0.1]])}
    curvatures = measure_curvature(suite, [state] * 2)
    found, divergences = refine(suite, state, curvatures, [0.5, 0.5], 3)
    assert (len(divergences) > 1) is taken
    assert (found["weight"] is not state["weight"]) is taken
    if taken:
        towards = suite.models[pulls[0]]["weight"] - state["weight"]
        assert float(((found["weight"] - state["weight"]) * towards).sum()) > 0


def test_steps_need_kronecker_curvature(suite):
    diagonal = [{"one.weight": Diagonal(torch.ones(24, 8))}] * 3
    with pytest.raises(CurvatureError, match=r"^natural-gradient steps need kronecker curvature, got diagonal;"):
        refine(suite.inputs_only(SAMPLES), suite.base, diagonal, WEIGHTS, 1)


# -- whole merges


def test_the_scale_is_where_divergence_is_least(suite):
    merged = epimer.merge_suite(suite, samples=SAMPLES)
    curvature = measured_by_hand(suite, suite.models, part=0)  # nothing validates
    orders = {a: order_by_hand(suite, merged_by_hand(suite, curvature, a), 1) for a in SCALES}
    best = max(orders, key=orders.get)
    assert merged.record.parameters["scale"] == best != 1
    assert_close(merged, merged_by_hand(suite, curvature, best))
    assert merged.record.unlabelled == SAMPLES
    assert merged.record.choices == (f"scale {best:g}, by 48 inputs per task without labels",)
    fixed = epimer.merge_suite(suite, scale=1.3, samples=SAMPLES, curvature=curvature, weights=[5, 3, 2])
    assert_close(fixed, merged_by_hand(suite, curvature, 1.3, weights=[5, 3, 2]))
    assert (fixed.record.unlabelled, fixed.record.choices) == (SAMPLES, ())


def test_rounds_measure_at_the_merge_and_are_given_up_where_they_do_not_help(suite):
    scale = 3.0
    states = [merged_by_hand(suite, measured_by_hand(suite, suite.models), scale)]
    orders = [order_by_hand(suite, states[0], 2)]
    while orders == sorted(orders):  # as long as every round helps
        states.append(merged_by_hand(suite, measured_by_hand(suite, [states[-1]] * 3, 0), scale))
        orders.append(order_by_hand(suite, states[-1], 2))
    worse = len(states) - 1
    assert worse > 1
    one, most = (epimer.merge_suite(suite, scale=scale, samples=SAMPLES, rounds=rounds) for rounds in (1, worse + 1))
    assert_close(one, states[1])
    assert_close(most, states[-2])
    notes = [f"divergence on validation inputs {1 - a:.4f} -> {1 - b:.4f}." for a, b in itertools.pairwise(orders)]
    helped = tuple(f"round {n} of measuring at the merge: {note}" for n, note in enumerate(notes[:-1], 1))
    assert one.record.choices == helped[:1]
    assert most.record.choices == (*helped, f"round {worse} of measuring at the merge was given up: {notes[-1]}")


def test_curvature_of_a_round_is_measured_with_the_seed(suite):
    seed = 3
    curvature = measured_by_hand(suite, suite.models, seed)
    first = merged_by_hand(suite, curvature, 2.0)
    second = merged_by_hand(suite, measured_by_hand(suite, [first] * 3, seed), 2.0)
    assert_close(epimer.merge_suite(suite, scale=2.0, samples=SAMPLES, rounds=1, seed=seed), second)


def test_every_round_chooses_its_scale(suite):
    merged = epimer.merge_suite(suite, samples=SAMPLES, rounds=1)
    chosen = []
    curvature = measured_by_hand(suite, suite.models)
    for _ in range(2):
        orders = {a: order_by_hand(suite, merged_by_hand(suite, curvature, a), 1) for a in SCALES}
        best = max(orders, key=orders.get)
        chosen.append(best)
        latest, curvature = curvature, measured_by_hand(suite, [merged_by_hand(suite, curvature, best)] * 3)
    curvature = latest
    assert merged.record.parameters["scale"] == best != chosen[0]
    assert_close(merged, merged_by_hand(suite, curvature, best))


def with_other_validation_inputs(suite):
    """Return the suite with other inputs in the places of those that only validate."""
    tasks = []
    for task in suite.tasks:
        split = task.splits["train"]
        order = torch.randperm(len(split.x), generator=torch.Generator().manual_seed(0))[:SAMPLES]
        x = split.x.clone()
        x[order[3::4]] = 1.1 * x[order[3::4]].roll(1, 0)
        tasks.append(replace(task, splits={**task.splits, "train": Split(x, split.y)}))
    return replace(suite, tasks=tasks)


def test_validation_inputs_are_used_for_nothing_else(suite):
    """What they judge is the same two times, so with others in their place the merge is the same to the last bit."""
    settings = {"scale": 3.0, "samples": SAMPLES, "rounds": 1}
    merged = epimer.merge_suite(suite, **settings)
    other = epimer.merge_suite(with_other_validation_inputs(suite), **settings)
    assert merged.record.choices != other.record.choices  # divergences
    assert not any("given up" in line for line in (*merged.record.choices, *other.record.choices))
    assert all(torch.equal(other[name], W) for name, W in merged.items())
    assert merged.record.inputs == {"curvature": 48, "validation": 16}


def test_the_record_says_which_inputs_were_used_for_what(suite):
    most = epimer.merge_suite(suite, samples=SAMPLES, rounds=1, refine=1).record
    assert most.inputs == {"scale": 48, "curvature": 48, "steps": 48, "validation": 16}
    assert epimer.merge_suite(suite, samples=SAMPLES).record.inputs == {"scale": 48}
    assert type(most).from_dict(most.to_dict()).inputs == most.inputs
    assert "inputs" not in epimer.merge_state_dicts(suite.base, suite.models, "average").record.to_dict()


def test_of_many_inputs_a_few_choose_the_scale(suite):
    seen = []

    def counted(state, task):
        made = network(state, task)
        made.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
        return made

    merged = epimer.merge_suite(replace(suite, network=counted), "tsv", samples=300)
    scale, by = merged.record.parameters["scale"], merged.record.inputs
    assert by == {"scale": CHOOSING}
    assert sum(seen) <= 3 * CHOOSING * 7  # each model's own predictions once, and those of a few scales
    few = []
    for task in suite.tasks:
        x = task.splits["train"].x
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:300]
        few.append(x[order[torch.arange(300) % 4 != 3][:CHOOSING]])
    orders = {}
    for a in SCALES:
        state = epimer.merge_state_dicts(suite.base, suite.models, "tsv", scale=a)
        total = 0.0
        for task, model, x in zip(suite.tasks, suite.models, few, strict=True):
            p, q = (log_probabilities(one, task, x).detach() for one in (model, state))
            total += float((p.argmax(1) == q.argmax(1)).double().mean() - (p.exp() * (p - q)).sum(1).mean())
        orders[a] = total
    assert scale == max(orders, key=orders.get)


@pytest.mark.parametrize("method", ["epimer_kron", "tsv", "average"])
def test_refinement_is_added_to_the_merge(suite, method):
    curvature = measured_by_hand(suite, suite.models) if method == "epimer_kron" else None
    settings = {"scale": 0.7, "samples": SAMPLES, "weights": WEIGHTS, "curvature": curvature}
    merged = epimer.merge_suite(suite, method, **settings)
    refined = epimer.merge_suite(suite, method, **settings, refine=2)
    inputs = suite.inputs_only(SAMPLES)
    expected, divergences = refine(inputs, dict(merged), measure_curvature(inputs, [merged] * 3, split=FIT), WEIGHTS, 2)
    assert_close(refined, expected)
    assert all((not torch.equal(refined[name], merged[name])) == (name in MEASURED) for name in merged)
    note = f"2 natural-gradient steps: KL on validation inputs {divergences[0]:.4f} -> {divergences[2]:.4f}."
    assert refined.record.choices == (note,)


@pytest.mark.parametrize("part", [1 << 28, 1 << 10])
@pytest.mark.parametrize("rule", ["average", "copy", "skip", "matrix"])
def test_refinement_follows_the_rules_of_tensors(suite, rule, part, monkeypatch):
    """An averaged matrix is refined too, whole or in parts; one that is copied stays as it was."""
    monkeypatch.setattr("epimer.plan.jobs.PART", part)

    def with_base(state, task):  # a network for state dicts that lack a tensor
        return network({**suite.base, **state}, task)

    partial, rules = replace(suite, network=with_base), [("one.weight", rule), ("two.weight", "average")]
    merged, refined = (
        epimer.merge_suite(partial, "tsv", scale=1.0, samples=SAMPLES, refine=steps, rules=rules) for steps in (0, 3)
    )
    changed = {name for name in merged if not torch.equal(refined[name], merged[name])}
    assert changed == (MEASURED if rule in ("average", "matrix") else {"two.weight"})
    before, after = (kl_by_hand(suite, {**suite.base, **one}, 2, [1 / 3] * 3) for one in (merged, refined))
    assert after < before
    assert refined.record.choices[0].endswith(f"KL on validation inputs {before:.4f} -> {after:.4f}.")


def test_no_label_is_read(suite):
    settings = {"samples": SAMPLES, "rounds": 1, "refine": 2}
    expected = epimer.merge_suite(suite, **settings)
    for label in (lambda y: y[torch.randperm(len(y))], lambda y: -y - 7, lambda y: torch.full_like(y, 10**9)):
        found = epimer.merge_suite(relabelled(suite, label), **settings)
        assert found.record.choices == expected.record.choices
        assert all(torch.equal(found[name], W) for name, W in expected.items())


def test_inputs_only_divides_the_training_inputs(suite):
    for task, parts in zip(suite.inputs_only(SAMPLES).tasks, rows(suite), strict=True):
        for name, expected in zip(("train", "val", "test"), parts, strict=True):
            (batch,) = task.splits[name].batches(1000)
            assert torch.equal(batch[0], expected)
            assert len(task.splits[name]) == len(expected) == {"train": 64, "val": 48, "test": 16}[name]


def test_of_texts_only_the_places_that_count_are_kept():
    targets = torch.arange(24).reshape(8, 3).masked_fill(torch.rand(8, 3) < 0.5, -100)
    task = SuiteTask("texts", [], {"train": Split(torch.arange(24).reshape(8, 3), targets)})
    (only,) = Suite("texts", {}, [{}], [task], None).inputs_only(8).tasks
    for inputs, places in only.splits["val"].batches(2):
        kept = targets[inputs[:, 0] // 3] != -100
        assert torch.equal(places, torch.where(kept, 0, -100))


def test_a_merge_leaves_no_graph(suite):
    tracked = replace(suite, models=[{n: nn.Parameter(W) for n, W in model.items()} for model in suite.models])
    merged = epimer.merge_suite(tracked, "average", samples=SAMPLES, refine=1)
    assert not any(W.requires_grad for W in merged.values())


def test_weights_of_a_sum_may_be_negative(suite):
    weights = [1.0, -0.2, 0.5]
    merged = epimer.merge_suite(suite, "task_arithmetic", scale=0.5, samples=SAMPLES, weights=weights)
    assert_close(
        merged, epimer.merge_state_dicts(suite.base, suite.models, "task_arithmetic", scale=0.5, weights=weights)
    )


REFUSED = {
    "scale text": ({"scale": "atuo"}, "The 'scale' parameter must be a number or 'auto'. Got 'atuo' instead."),
    "scale none": ({"scale": None}, "The 'scale' parameter must be a number or 'auto'. Got None instead."),
    "rounds -1": ({"rounds": -1}, "The 'rounds' parameter must be an integer at least 0. Got -1 instead."),
    "rounds 1.5": ({"rounds": 1.5}, "The 'rounds' parameter must be an integer at least 0. Got 1.5 instead."),
    "refine text": ({"refine": "x"}, "The 'refine' parameter must be an integer at least 0. Got 'x' instead."),
    "refine true": ({"refine": True}, "The 'refine' parameter must be an integer at least 0. Got True instead."),
    "tsv": ({"method": "tsv", "rounds": 1}, "rounds measure kronecker curvature again, which tsv does not use;"),
    "diagonal": ({"method": "epimer", "rounds": 1}, "rounds measure kronecker curvature again, which epimer does"),
    "few": ({"samples": 3}, "small: task 'task0' has 3 inputs to choose by, and 4 are the fewest that can be divided;"),
    "no samples": ({"samples": 0}, "small: task 'task0' has 0 inputs to choose by, and 4 are the fewest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(suite, case):
    given, message = REFUSED[case]
    with pytest.raises((ParameterError, DataError)) as caught:
        epimer.merge_suite(suite, **given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_suite_without_training_data_is_refused(suite):
    tasks = [replace(task, splits={"val": task.splits["val"]}) for task in suite.tasks]
    with pytest.raises(
        DataError, match=r"^small: task 'task0' has no train data, which inputs are taken from; add it\.$"
    ):
        epimer.merge_suite(replace(suite, tasks=tasks))
