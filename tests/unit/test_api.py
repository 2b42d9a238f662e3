"""The public functions on what people hold in their hands: modules, and the shortest calls."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import epimer
from epimer.errors import CurvatureError, EpimerWarning, TensorError
from epimer.evaluation.judges import SplitScores

TASKS = 3


class Net(nn.Module):
    """Words, a matrix, a norm with running statistics, and a head that is the table of words."""

    def __init__(self, tied=True):
        super().__init__()
        self.words, self.middle, self.norm = nn.Embedding(9, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.register_buffer("places", torch.arange(4))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.norm(self.middle(self.words(ids).mean(1))))


@pytest.fixture
def base():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def models(base):
    made = [copy.deepcopy(base) for _ in range(TASKS)]
    with torch.no_grad():
        for model in made:
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    return made


@pytest.fixture
def ids():
    return torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(1))


def states(modules):
    return [module.state_dict() for module in modules]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(W, other[name]) for name, W in one.items())


def test_the_shortest_call_merges_without_data(base, models):
    merged = epimer.merge_state_dicts(base, models)
    assert merged.record.method == "epimer_free"
    assert equal(merged, epimer.merge_state_dicts(base.state_dict(), states(models), "epimer_free"))
    assert not torch.equal(merged["middle.weight"], base.middle.weight)


def curved(kind):
    """Return one model's curvature of each kind that can be given from Python."""
    torch.manual_seed(3)
    X = torch.randn(6, 6)
    metrics = {
        "diagonal": lambda: epimer.Diagonal(torch.rand(6, 6)),
        "kronecker": lambda: epimer.Kronecker(A=X @ X.T, G=X.T @ X),
        "ekfac": lambda: epimer.EKFAC(S=torch.rand(6, 6), P=torch.eye(6), Q=torch.eye(6)),
        "samples": lambda: epimer.Samples(g=torch.randn(4, 2, 6), x=torch.randn(4, 2, 6)),
    }
    return {"middle.bias": epimer.Diagonal(torch.rand(6)), "middle.weight": metrics[kind]()}


@pytest.mark.parametrize(
    ("kind", "method"),
    [("kronecker", "epimer_kron"), ("ekfac", "epimer_kron"), ("diagonal", "epimer"), ("samples", "epimer_exact")],
)
def test_curvature_that_is_given_is_used_without_naming_a_method(base, models, kind, method):
    given = {"curvature": [curved(kind) for _ in models], "rules": [("*words*", "average"), ("*head*", "average")]}
    merged = epimer.merge_state_dicts(base, models, **given)
    assert merged.record.method == method
    assert equal(merged, epimer.merge_state_dicts(base, models, method, **given))
    assert equal(merged, epimer.merge_models(base, models, **given).state_dict())


@pytest.mark.parametrize("use", [epimer.merge_state_dicts, lambda *a, **o: epimer.sweep_state_dicts(*a, len, **o)])
def test_what_is_no_curvature_is_refused_without_a_method(base, models, use):
    curvature = [{"middle.weight": torch.rand(6, 6)} for _ in models]
    with pytest.raises(CurvatureError, match=r"curvature\[0\]\['middle.weight'\] is Tensor"):
        use(base, models, curvature=curvature)


@pytest.mark.parametrize("wrap", [lambda module: module, nn.DataParallel], ids=["plain", "data parallel"])
def test_modules_are_merged_as_their_state_dicts(base, models, wrap):
    expected = epimer.merge_state_dicts(base.state_dict(), states(models), "tsv", weights=[1, 2, 1])
    merged = epimer.merge_state_dicts(
        wrap(base), [models[0], wrap(models[1]), models[2].state_dict()], "tsv", weights=[1, 2, 1]
    )
    assert equal(merged, expected)
    assert merged["head.weight"] is merged["words.weight"]


def test_every_function_in_memory_takes_modules(base, models):
    plain, given = (base.state_dict(), states(models)), (base, models)
    bases = [epimer.build_basis(*args, rank=1) for args in (plain, given)]
    assert all(torch.equal(one.U, bases[1][name].U) for name, one in bases[0].items())
    assert epimer.diagnose_state_dicts(*plain).norms == epimer.diagnose_state_dicts(*given).norms

    def judge(state, split):
        return SplitScores({"size": torch.stack([W.double().norm() for W in state.values()])})

    first, second = (
        epimer.sweep_state_dicts(*args, judge, methods=["tsv"], scales=[0.5, 1.0]) for args in (plain, given)
    )
    assert first.to_dict() == second.to_dict()


@pytest.mark.parametrize("method", ["average", "tsv", "epimer_free"])
def test_a_live_model_computes_with_the_merged_weights(base, models, ids, method):
    base.middle.bias.requires_grad_(False)
    base(ids).sum().backward()
    before = copy.deepcopy(base.state_dict())
    live = epimer.merge_models(base, models, method, scale=0.7)
    tensors = epimer.merge_state_dicts(base.state_dict(), states(models), method, scale=0.7)
    assert type(live) is Net
    assert equal(live.state_dict(), tensors)
    assert torch.equal(live(ids), functional_call(Net().eval(), dict(tensors), (ids,)))
    assert not torch.allclose(live(ids), base(ids), atol=1e-3)
    assert live.head.weight is live.words.weight
    assert not live.training
    assert [p.requires_grad for p in live.parameters()] == [p.requires_grad for p in base.parameters()]
    assert all(p.grad is None for p in live.parameters())
    live(ids).sum().backward()
    assert live.words.weight.grad is not None
    assert equal(before, base.state_dict()), "base is as it was"
    assert not {W.data_ptr() for W in live.state_dict().values()} & {
        W.data_ptr() for module in (base, *models) for W in module.state_dict().values()
    }


def test_a_live_model_of_the_shortest_call(base, models):
    assert equal(epimer.merge_models(base, models).state_dict(), epimer.merge_state_dicts(base, models))


def test_warnings_point_at_the_line_that_called(base, models):
    for merge in (epimer.merge_models, epimer.merge_state_dicts):
        with pytest.warns(EpimerWarning, match="rank 99 lowered") as caught:
            merge(base, models, "tsv", rank=99)
        assert {warning.filename for warning in caught} == {__file__}


def test_a_live_model_keeps_what_is_not_merged(base, models):
    live = epimer.merge_models(base, models, "tsv", rules=[("middle.weight", "skip")])
    assert torch.equal(live.middle.weight, base.middle.weight)
    assert not torch.equal(live.middle.bias, base.middle.bias)


def test_a_live_model_whose_ties_the_models_broke_is_refused(base):
    torch.manual_seed(2)
    untied = [Net(tied=False) for _ in range(2)]
    with pytest.raises(TensorError, match=r"base ties 'head\.weight' to 'words\.weight', and the models do not"):
        epimer.merge_models(base, untied, "average")
    base.head.weight = nn.Parameter(base.head.weight.detach().clone())
    live = epimer.merge_models(base, untied, "average")
    assert torch.allclose(live.head.weight, (untied[0].head.weight + untied[1].head.weight) / 2)


def test_a_live_model_cannot_be_of_another_dtype_than_its_base():
    small = nn.Linear(4, 4, bias=False).to(torch.float8_e4m3fn).requires_grad_(False)
    with pytest.raises(
        TensorError, match=r"'weight' is torch\.float8_e4m3fn in base, and its merge is torch\.bfloat16"
    ):
        epimer.merge_models(small, [copy.deepcopy(small)], "average")


def test_a_live_model_needs_a_module_to_copy(base, models):
    with pytest.raises(TensorError, match=r"nn\.Module, got OrderedDict; take merge_state_dicts"):
        epimer.merge_models(base.state_dict(), models)
    with pytest.raises(TensorError, match="list of state dicts or modules"):
        epimer.merge_models(base, models[0])
