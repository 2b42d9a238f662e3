"""What an independent review found: measured wrongly, accepted silently or refused for the wrong reason."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import epimer
from cases import cross_entropy
from epimer.curvature.basis import save_basis
from epimer.errors import CurvatureError, EpimerWarning, TensorError

CLASSES = 3


def measure(model, batches, loss=cross_entropy, kind="diagonal", labels="true", **options):
    return epimer.estimate_curvature(model, batches, loss, kind=kind, labels=labels, progress=False, **options)


def diagonal(model, x, y):
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(len(x)):
        loss = cross_entropy(model(x[n : n + 1]), y[n : n + 1]).sum()
        for name, g in zip(total, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True):
            total[name] += 0 if g is None else g.square()
    return {name: value / len(x) for name, value in total.items()}


class Louder(nn.MultiheadAttention):
    def forward(self, x):
        return 3 * super().forward(x, x, x, need_weights=False)[0] + x


class WithLouder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mix, self.head = Louder(4, 2, batch_first=True), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.mix(self.attention(x)).tanh().mean(1))


def test_an_attention_with_a_forward_of_its_own_keeps_it():
    torch.manual_seed(0)
    model, x, y = WithLouder().double(), torch.randn(5, 3, 4).double(), torch.randint(CLASSES, (5,))
    found, expected = measure(model, [(x, y)]), diagonal(model, x, y)
    assert {"mix.weight", "head.weight"} <= set(found)
    for name in found:
        torch.testing.assert_close(found[name].F, expected[name])
    assert "attention.in_proj_weight" in found.provenance.left_out


class OneSize(nn.Module):
    """Takes batches of four, and uses a weight outside its layer."""

    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        assert len(x) == 4
        return self.head((self.one(x).tanh() @ self.one.weight).tanh())


def test_a_model_of_one_batch_size_is_checked_too():
    torch.manual_seed(0)
    model, x, y = OneSize().double(), torch.randn(4, 4).double(), torch.randint(CLASSES, (4,))
    found = measure(model, [(x, y)])
    assert "one.weight" in found.provenance.left_out
    assert "head.weight" in found


class Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, CLASSES)

    def forward(self, ids, position_ids):
        return self.head((self.words(ids) + self.places(position_ids)).tanh().mean(1))


def test_positions_that_are_as_many_as_samples_are_no_samples():
    torch.manual_seed(0)
    model, ids, y = Positioned().double(), torch.randint(9, (5, 5)), torch.randint(CLASSES, (5,))
    batch = {"ids": ids, "position_ids": torch.arange(5)}
    found = measure(model, [(batch, y)])
    single = measure(
        model, [({"ids": ids[n : n + 1], "position_ids": torch.arange(5)}, y[n : n + 1]) for n in range(5)]
    )
    for name in found:
        torch.testing.assert_close(found[name].F, single[name].F)
    assert "head.weight" in found


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_outputs_of_any_form_are_checked(form):
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self, coupled):
            super().__init__()
            self.layer, self.coupled = nn.Linear(4, CLASSES), coupled

        def forward(self, x):
            z = self.layer(x - x.mean(0) if self.coupled else x)
            return (z, None) if form == "tuple" else {"z": z}

    def z_of(outputs):
        return outputs[0] if form == "tuple" else outputs["z"]

    batches = [(torch.randn(4, 4), torch.randint(CLASSES, (4,)))]
    with pytest.raises(CurvatureError, match="batch mean"):
        measure(Odd(False), batches, lambda o, t: functional.cross_entropy(z_of(o), t))
    with pytest.warns(EpimerWarning, match="depends on the other samples"):
        measure(Odd(True), batches, lambda o, t: cross_entropy(z_of(o), t))
    assert "layer.weight" in measure(Odd(False), batches, lambda o, t: cross_entropy(z_of(o), t))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head((self.one(x).tanh() @ self.one.weight).tanh().mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_in_half_precision_are_checked_as_well(dtype):
    torch.manual_seed(0)
    found = measure(Twice().to(dtype), [(torch.randn(4, 512, 8).to(dtype), torch.randint(CLASSES, (4,)))])
    assert "one.weight" in found.provenance.left_out


def test_reduced_sums_do_not_overflow_in_float16():
    torch.manual_seed(0)
    x = (150 + torch.randn(2, 512, 4)).half()

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.layer(x / 1).mean(1).float()

    model = Mean().half()
    with torch.no_grad():
        model.layer.weight.mul_(1e-2)
    found = measure(model, [(x, torch.tensor([0, 1]))], kind="kronecker", sequence="reduce")
    mean = x.float().mean(1)
    torch.testing.assert_close(found["layer.weight"].A, mean.T @ mean / 2, rtol=1e-3, atol=0.1)


def test_a_label_out_of_range_names_its_sample():
    x = torch.randn(4, 4)
    with pytest.raises(CurvatureError, match=r"target of sample 2 is 7, expected 0 to 2"):
        measure(nn.Linear(4, CLASSES), [(x, torch.tensor([0, 1, 7, 2]))])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_the_gauss_newton_matrix_without_targets_leaves_padding_out():
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.one, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

        def forward(self, ids, attention_mask):
            return self.head(self.one(self.words(ids)).tanh())

    def loss(outputs, targets):
        return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").sum(1)

    model, ids, mask = Tagger().double(), torch.randint(9, (4, 5)), torch.ones(4, 5, dtype=torch.long)
    mask[1:, 3:] = 0
    base = {name: p.detach() for name, p in model.named_parameters()}
    other = [{name: W + torch.randn_like(W) for name, W in base.items()} for _ in range(2)]
    basis = epimer.build_basis(base, other, rank=2, rules=[("words.weight", "average"), ("head.weight", "average")])
    batches = [({"ids": ids, "attention_mask": mask}, None)]
    exact = measure(model, batches, loss, kind="ggn", labels="model", basis=basis)
    fisher = measure(model, batches, loss, kind="samples", labels="expected", basis=basis)
    for name in exact:
        torch.testing.assert_close(exact[name].H, fisher[name].H)


def small(tmp_path, names="ab"):
    torch.manual_seed(0)
    base = {"l.weight": torch.randn(12, 10)}
    states = {name: {"l.weight": base["l.weight"] + torch.randn(12, 10)} for name in names}
    from safetensors.torch import save_file

    for name, state in {"base": base, **states}.items():
        save_file(state, tmp_path / f"{name}.safetensors")
    return base, states


def recipe(tmp_path, names, method="epimer_free", **keys):
    models = [{"model": str(tmp_path / f"{name}.safetensors")} for name in names]
    return {"merge_method": method, "base_model": str(tmp_path / "base.safetensors"), "models": models, **keys}


def test_a_basis_belongs_to_its_models_in_their_order(tmp_path):
    from epimer.api import make_basis

    small(tmp_path)
    make_basis(recipe(tmp_path, "ab", parameters={"rank": 2}), tmp_path / "basis", progress=False)
    given = {"basis": str(tmp_path / "basis"), "parameters": {"rank": 2}}
    epimer.merge(recipe(tmp_path, "ab", **given), tmp_path / "out", progress=False)
    with pytest.raises(CurvatureError, match="in another order"):
        epimer.merge(recipe(tmp_path, "ba", **given), tmp_path / "other", progress=False)


def test_a_basis_of_a_broken_model_is_refused(tmp_path):
    from safetensors.torch import save_file

    from epimer.api import make_basis

    small(tmp_path)
    save_file({"l.weight": torch.full((12, 10), float("nan"))}, tmp_path / "a.safetensors")
    with pytest.raises(TensorError, match="NaN"):
        make_basis(recipe(tmp_path, "ab"), tmp_path / "basis", progress=False)
    assert not (tmp_path / "basis").exists()


def test_regmean_refuses_what_has_no_gram_matrix_of_inputs(tmp_path):
    base, states = small(tmp_path)
    P, Q = (torch.linalg.qr(torch.randn(side, side)).Q for side in (12, 10))
    metrics = {"l.weight": epimer.Corrected(S=torch.rand(12, 10), P=P, Q=Q)}
    with pytest.raises(CurvatureError, match=r"regmean needs epimer\.Kronecker"):
        epimer.merge_state_dicts(base, list(states.values()), "regmean", curvature=[metrics, metrics])


def test_eigenvectors_must_be_orthogonal():
    v = torch.zeros(10)
    v[:2] = torch.tensor([1.0, -1.0]) / 2**0.5
    metric = epimer.Corrected(S=torch.rand(12, 10), P=torch.eye(12), Q=torch.eye(10) + 3 * torch.outer(v, v))
    assert metric.problem((12, 10)) == "Q must be orthogonal"


@pytest.mark.parametrize(
    "change",
    [{"samples": "many"}, {"counts": {"l.weight": "x"}}, {"ties": {"a": ["b"]}}, {"left_out": []}, {"kind": ["a"]}],
)
def test_headers_of_other_types_are_refused(tmp_path, change):
    model = nn.Linear(4, CLASSES)
    measure(model, [(torch.randn(4, 4), torch.randint(CLASSES, (4,)))]).save(tmp_path / "c")
    header = json.loads((tmp_path / "c/curvature.json").read_text())
    (tmp_path / "c/curvature.json").write_text(json.dumps(header | change))
    with pytest.raises(CurvatureError, match="measure it again"):
        epimer.Curvature.load(tmp_path / "c")


def test_a_basis_in_another_precision_is_the_same_basis(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(10, 12)
    base = {"weight": model.weight.detach().double()}
    others = [{"weight": base["weight"] + torch.randn(12, 10).double()} for _ in range(2)]
    basis = epimer.build_basis(base, others, rank=2)
    batches = [(torch.randn(6, 10), torch.randint(12, (6,)))]
    curvature = [measure(model, batches, kind="samples", basis=basis) for _ in range(2)]
    merged = epimer.merge_state_dicts(base, others, "epimer_exact", curvature=curvature, basis=basis)
    assert torch.isfinite(merged["weight"]).all()
    save_basis(basis.items(), tmp_path / "b", about={})
