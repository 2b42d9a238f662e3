"""Several passes over the data, each of some tensors: the same result, in less memory."""

import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn

import epimer
from cases import CASES, build, cross_entropy, measure
from epimer.curvature import passes
from epimer.curvature.collectors import Collector
from epimer.curvature.kinds import tensors_of
from epimer.errors import CurvatureError, EpimerWarning, ParameterError

Disk = namedtuple("Disk", "free")


def assert_same(found, expected):
    assert list(found) == list(expected)
    assert found.provenance == expected.provenance
    for name in expected:
        one, other = tensors_of(found[name]), tensors_of(expected[name])
        assert one.keys() == other.keys()
        assert all(torch.equal(one[part], other[part]) for part in other), name
        assert getattr(found[name], "inputs", 1) == getattr(expected[name], "inputs", 1)


@pytest.fixture
def largest(monkeypatch):
    """Return a function that tells the most bytes of sums that were there at once, since it was last called."""
    seen, total = [0], Collector.total

    def spy(self, *args):
        value = total(self, *args)
        seen.append(sum(one.nbytes for one in self.totals.values()))
        return value

    def most():
        found = max(seen)
        seen[:] = [0]
        return found

    monkeypatch.setattr(Collector, "total", spy)
    return most


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "ekfac", "samples"])
def test_several_passes_measure_the_same_bits(name, kind):
    case = build(name)
    once = measure(case, kind, labels="model", seed=3)
    for count in (2, 5):
        assert_same(measure(build(name), kind, iter(case.batches), labels="model", seed=3, passes=count), once)


def test_more_passes_than_tensors_measure_one_at_a_time(largest):
    case = build("mlp")
    once = measure(case, "kronecker", passes=1)
    assert largest() == once.nbytes
    assert_same(measure(build("mlp"), "kronecker", passes=99), once)
    assert largest() == max(once.size(name) for name in once)


def test_sums_of_one_pass_are_there_at_a_time(largest):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double()
    data = [(torch.randn(5, 8, dtype=torch.float64), torch.randint(8, (5,)))]
    epimer.estimate_curvature(model, data, cross_entropy, passes=3)
    assert largest() == 2 * 8 * (8**2 + 8**2)


def test_a_pass_whose_tensors_the_loss_does_not_reach_gives_zero():
    class Unreached(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    data = [(torch.randn(4, 3), torch.randint(3, (4,)))]
    with pytest.warns(EpimerWarning, match=r"no gradient reached 'unused\.weight'") as caught:
        found = epimer.estimate_curvature(Unreached(), data, cross_entropy, passes=2)
    assert len(caught) == 1
    assert float(found["unused.weight"].G.abs().max()) == 0
    assert float(found["used.weight"].G.abs().max()) > 0


def test_passes_are_chosen_by_the_free_memory_and_said_before_any_data_is_read(monkeypatch, tmp_path, largest):
    case = build("encoder")
    once = measure(case, "kronecker", labels="model", passes=1)
    free = int(once.nbytes / 1.5)
    monkeypatch.setattr(passes, "available_memory", lambda: free)
    assert largest() == once.nbytes
    said = []

    def batches():
        said.extend(str(warning.message) for warning in caught)
        yield from case.batches

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(build("encoder"), "kronecker", batches(), labels="model", scratch=tmp_path)
    (message,) = said
    assert "measured in 3 passes over the data" in message  # 1.5 / 0.6
    assert "finished ones being kept on disk" in message
    assert "--basis" in message
    assert_same(found, once)
    assert largest() <= passes.SHARE * free + max(once.size(name) for name in once)
    assert not list(tmp_path.iterdir())  # the files have no names
    found.save(tmp_path / "curv")
    assert_same(epimer.Curvature.load(tmp_path / "curv"), once)


def test_memory_that_suffices_asks_for_one_pass(monkeypatch):
    case = build("mlp")
    size = measure(case, "kronecker").nbytes
    monkeypatch.setattr(passes, "available_memory", lambda: 2 * size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(case, "kronecker")


def test_in_a_basis_the_same_memory_suffices(monkeypatch):
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30)).double()
    base = {name: W.detach() for name, W in model.named_parameters()}
    models = [{name: W + 0.1 * torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    basis = epimer.build_basis(base, models, rank=2, basis="tensor", rules=[("2.weight", "matrix")])
    data = [(torch.randn(6, 40, dtype=torch.float64), torch.randint(30, (6,)))]
    monkeypatch.setattr(passes, "available_memory", lambda: 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epimer.estimate_curvature(model, data, cross_entropy, basis=basis)
    with pytest.warns(EpimerWarning, match="passes over the data"):
        epimer.estimate_curvature(model, data, cross_entropy)


def test_what_fits_neither_memory_nor_disk_is_refused_before_any_data_is_read(monkeypatch, tmp_path):
    case = build("mlp")
    monkeypatch.setattr(passes, "available_memory", lambda: 64)
    monkeypatch.setattr(passes.shutil, "disk_usage", lambda _: Disk(free=100))

    def batches():
        raise AssertionError("data was read")
        yield

    remedy = r"Say which merge it is for, --recipe recipe\.yaml \(a function as basis=\)"
    with pytest.raises(CurvatureError, match=rf"the curvature takes 600 B.*disk at .* are free\. {remedy}"):
        measure(case, "kronecker", batches(), scratch=tmp_path)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), ()])
def test_a_tensor_in_a_file_leaves_no_file(tmp_path, shape):
    W = torch.randn(shape, dtype=torch.float64)
    stored = passes.in_file(W, tmp_path)
    assert torch.equal(stored, W)
    assert stored.shape == W.shape
    assert not list(tmp_path.iterdir())


def test_tensors_are_divided_in_their_order_into_groups_of_like_size():
    sizes = {"a": 4, "b": 4, "c": 1, "d": 1, "e": 6}
    assert passes.divide(sizes, 1) == [list(sizes)]
    assert passes.divide(sizes, 2) == [["a", "b"], ["c", "d", "e"]]
    assert passes.divide(sizes, 9) == [[name] for name in ("a", "b", "c", "d", "e")]
    assert passes.divide({"a": 0, "b": 0}, 3) == [["a", "b"]]
    assert passes.divide({}, 3) == []


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_passes_must_be_a_number(value):
    with pytest.raises(ParameterError, match="'passes' parameter must be an integer at least 1"):
        measure(build("mlp"), "kronecker", passes=value)


def test_second_derivatives_know_no_passes():
    with pytest.raises(ParameterError, match="kind='hessian' measures one tensor after the other"):
        measure(build("mlp"), "hessian", passes=2)
