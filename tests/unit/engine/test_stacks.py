"""Matrices of one shape merged together, as on a GPU: the same merges as one by one, within the search's tolerance."""

import pytest
import torch

import epimer
from dense import close
from epimer.engine.batches import TOGETHER, batches, stacks
from epimer.engine.merge import MergeWalk
from epimer.geometry.subspace import BASIS_TOLERANCE, tagged, tagged_of_layers
from epimer.methods.registry import describe_method
from epimer.plan.merge import plan_state_dicts
from epimer.plan.participants import state_dict_participants

TASKS, LAYERS = 3, 3


def decaying(m, n, seed):
    torch.manual_seed(seed)
    U, V = torch.linalg.qr(torch.randn(m, n)).Q, torch.linalg.qr(torch.randn(n, n)).Q
    return (U * torch.arange(1, n + 1) ** -0.7) @ V.T


@pytest.fixture(scope="module")
def layers():
    return [[decaying(320, 240, 10 * layer + t) for t in range(TASKS)] for layer in range(LAYERS)]


def test_the_bases_of_layers_found_at_once_are_those_found_one_by_one(layers, monkeypatch):
    alone = [tagged(deltas, 8) for deltas in layers]
    monkeypatch.setattr("epimer.geometry.svd._groups", lambda tasks, A: [tasks] if tasks else [])  # as on a GPU
    for one, other in zip(alone, tagged_of_layers(layers, 8), strict=True):
        assert close(other.lift_atoms(other.sigma), one.lift_atoms(one.sigma), BASIS_TOLERANCE)
        assert torch.equal(one.owner, other.owner)


def test_copies_and_lost_directions_are_left_to_a_layer_of_its_own(layers):
    copies = [layers[0][0], layers[0][0] + 1e-4 * layers[0][1], layers[0][2]]
    few = [decaying(320, 240, 5)[:, :4] @ torch.randn(4, 240), *layers[1][1:]]
    found = tagged_of_layers([layers[0], copies], 8)
    assert found[0] is not None
    assert found[1] is None
    assert tagged_of_layers([layers[0], few], 8) == [None, None]


@pytest.mark.parametrize("method", ["tsv", "epimer", "epimer_free", "epimer_kron", "average"])
def test_a_merge_of_stacks_is_the_merge_of_its_tensors(layers, method, monkeypatch):
    torch.manual_seed(0)
    names = [f"block.{i}.weight" for i in range(LAYERS)]
    base = {name: torch.randn(320, 240) for name in names} | {"norm.weight": torch.ones(240)}
    models = []
    for t in range(TASKS):
        matrices = {name: base[name] + deltas[t] for name, deltas in zip(names, layers, strict=True)}
        models.append(matrices | {"norm.weight": t * torch.ones(240)})
    G, A = (torch.randn(500, side) * torch.arange(1, side + 1) ** -0.5 for side in (320, 240))
    curvature = {
        "epimer": [{name: epimer.Diagonal(torch.rand(320, 240)) for name in names} for _ in models],
        "epimer_kron": [{name: epimer.Kronecker(G=G.T @ G / 500, A=A.T @ A / 500) for name in names} for _ in models],
    }.get(method)
    given = {"rank": 8} if method != "average" else {}
    whole = epimer.merge_state_dicts(base, models, method, curvature=curvature, **given)
    monkeypatch.setattr("epimer.geometry.svd._groups", lambda tasks, A: [tasks] if tasks else [])
    seen = []

    class Stacked(MergeWalk):
        def __init__(self, plan, jobs, prepared=None, *, stacked=False):
            super().__init__(plan, jobs, prepared, stacked=True)
            seen.extend(len(batch.jobs) for batch in self.jobs if batch.stacked)

    monkeypatch.setattr("epimer.engine.in_memory.MergeWalk", Stacked)
    together = epimer.merge_state_dicts(base, models, method, curvature=curvature, **given)
    assert seen == ([] if method == "average" else [LAYERS])
    for name, W in whole.items():
        assert close(together[name] - base[name], W - base[name], 3 * BASIS_TOLERANCE)
        one, other = whole.record.tensors[name], together.record.tensors[name]
        assert (one.rule, one.rank, one.status, one.note) == (other.rule, other.rank, other.status, other.note)


def plan_of(base, models, weights):
    tsv = describe_method("tsv")
    return plan_state_dicts(state_dict_participants(base, models), tsv, tsv.resolve({}), weights, None)


def test_models_of_weight_zero_and_other_shapes_are_not_stacked(layers):
    base = {"a.weight": torch.zeros(320, 240), "b.weight": torch.zeros(320, 240), "c.weight": torch.zeros(240, 320)}
    models = [{name: torch.randn(W.shape) for name, W in base.items()} for _ in range(TASKS)]
    plan = plan_of(base, models, None)
    assert sorted(len(batch.jobs) for batch in stacks(plan.parts)) == [1, 2]
    plan = plan_of(base, models, [0.5, 0.5, 0.0])
    assert not any(batch.stacked for batch in stacks(plan.parts))


class Counted:
    """A job that counts how often its memory is asked for."""

    asked = 0

    @property
    def memory(self):
        Counted.asked += 1
        return 100


def test_small_jobs_are_grouped_in_time_proportional_to_their_number():
    jobs = [Counted() for _ in range(100_000)]
    grouped = list(batches(jobs))
    assert [job for batch in grouped for job in batch.jobs] == jobs
    assert [len(batch.jobs) for batch in grouped] == [TOGETHER // 100 + 1, 100_000 - TOGETHER // 100 - 1]
    assert Counted.asked <= 4 * len(jobs)
