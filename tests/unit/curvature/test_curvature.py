"""What a measurement can do: add up, go to disk and back, serve merges, and be shared by processes."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import epimer
from cases import cross_entropy
from epimer.curvature.basis import StoredBasis, save_basis
from epimer.errors import CurvatureError, OutputError
from oracle import near

# torch's own forward-mode derivatives, when they are first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

CLASSES = 3


class Conv1D(nn.Module):
    """As in transformers: a linear layer that stores inputs x outputs."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(0.5 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.first, self.second = nn.Embedding(7, 4), nn.Linear(4, 5), Conv1D(4, 5)
        self.out = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, ids, attention_mask):
        x = self.second(self.first(self.table(ids)).tanh()).tanh() * attention_mask[..., None]
        return self.out(x.sum(1))


def data(sizes=((5, 4), (3, 6), (6, 3)), seed=1):
    """Return batches of different lengths, padded differently."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for n, T in sizes:
        ids = torch.randint(7, (n, T), generator=generator)
        mask = torch.ones_like(ids)
        for i in range(1, n):
            mask[i, max(1, T - i) :] = 0
        targets = torch.randint(CLASSES, (n,), generator=generator)
        batches.append(({"ids": ids, "attention_mask": mask}, targets))
    return batches


def states(count=3):
    return [{name: p.detach() for name, p in Model(seed).named_parameters()} for seed in range(count)]


def basis(kind="tagged"):
    base, *models = states()
    return epimer.build_basis(base, models, rank=1, basis=kind, rules=[("table.weight", "average")])


KINDS = {
    "diagonal": {"kind": "diagonal"},
    "kronecker": {"kind": "kronecker"},
    "reduce": {"kind": "kronecker", "sequence": "reduce"},
    "samples": {"kind": "samples"},
    "samples, expected": {"kind": "samples", "labels": "expected"},
    "diagonal, projected": {"kind": "diagonal", "basis": "tagged"},
    "kronecker, projected": {"kind": "kronecker", "basis": "tensor"},
    "samples, projected": {"kind": "samples", "basis": "tagged"},
    "hessian": {"kind": "hessian", "basis": "tagged"},
    "ggn": {"kind": "ggn", "basis": "tagged"},
    "ekfac": {"kind": "ekfac"},
}


def measure(name, batches=None, model=None, **options):
    options = {"labels": "true", "samples": None} | KINDS[name] | options
    if isinstance(options.get("basis"), str):
        options["basis"] = basis(options["basis"])
    return epimer.estimate_curvature(model or Model(), batches or data(), cross_entropy, **options)


def tensors(metric):
    return {part: value for part, value in vars(metric).items() if isinstance(value, torch.Tensor)}


def dense(metric):
    """Return a metric's numbers, for samples those that do not depend on how they are padded."""
    if isinstance(metric, epimer.Samples):
        s = torch.einsum("ntm,ntk->nmk", metric.g, metric.x).flatten(1)
        return {"H": s.T @ s / len(s)}
    return tensors(metric)


def same(one, other, tolerance=1e-10):
    assert set(one) == set(other)
    assert len(one)
    for name in one:
        found, expected = dense(one.metrics[name]), dense(other.metrics[name])
        assert found.keys() == expected.keys()
        assert getattr(one[name], "inputs", 1) == getattr(other[name], "inputs", 1)
        for part in found:
            assert near(found[part], expected[part], tolerance), (name, part)


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KINDS if name != "ekfac"])
def test_measurements_of_parts_add_up_to_the_whole(name):
    batches = data()
    parts = [measure(name, [batch]) for batch in batches]
    total, whole = parts[0] + parts[1] + parts[2], measure(name, batches)
    same(total, whole)
    assert (total.provenance.samples, total.provenance.tokens) == (whole.provenance.samples, whole.provenance.tokens)
    assert total.provenance.counts == whole.provenance.counts
    assert total.provenance.samples == 14
    same(parts[0] + (parts[1] + parts[2]), whole)


def test_measurements_that_do_not_belong_together_are_refused(tmp_path):
    one = measure("kronecker")
    for other, words in (
        (measure("diagonal"), "different kind"),
        (measure("kronecker", model=Model(1)), "different model"),
        (measure("kronecker", labels="model"), "different labels"),
        (measure("reduce"), "different sequence"),
        (measure("kronecker, projected"), "different basis"),
        (measure("ekfac"), "ekfac curvature cannot be added"),
        (measure("kronecker", layers=["first.*"]), "different model|only one of the measurements has"),
    ):
        with pytest.raises(CurvatureError, match=words):
            one + other
    with pytest.raises(CurvatureError, match="only curvature can be added"):
        one + {"first.weight": one["first.weight"]}
    with pytest.raises(CurvatureError, match="ekfac curvature cannot be added"):
        measure("ekfac") + measure("ekfac")


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_what_is_saved_is_what_is_loaded(name, tmp_path):
    found = measure(name)
    found.save(tmp_path / "c")
    loaded = epimer.Curvature.load(tmp_path / "c")
    assert loaded.provenance == found.provenance
    assert list(loaded) == list(found)
    assert loaded.nbytes == found.nbytes
    assert loaded.clipped == found.clipped
    for tensor in found:
        given, stored = found[tensor], loaded[tensor]
        assert type(stored) is type(given)
        assert getattr(stored, "inputs", 1) == getattr(given, "inputs", 1)
        assert tensors(given).keys() == tensors(stored).keys()
        assert all(torch.equal(value, tensors(stored)[part]) for part, value in tensors(given).items())
    if name in ("kronecker", "reduce", "kronecker, projected"):
        assert found["second.weight"].inputs == 0
        assert found["first.weight"].inputs == 1
    if name != "ekfac":
        same(loaded + found, found)  # twice the same data has the same mean


def test_an_existing_folder_is_not_replaced_unasked(tmp_path):
    one, other = measure("diagonal"), measure("diagonal", data(seed=2))
    one.save(tmp_path / "c")
    with pytest.raises(OutputError, match="exists"):
        other.save(tmp_path / "c")
    same(epimer.Curvature.load(tmp_path / "c"), one)
    other.save(tmp_path / "c", overwrite=True)
    same(epimer.Curvature.load(tmp_path / "c"), other)
    foreign = tmp_path / "papers"
    foreign.mkdir()
    (foreign / "paper.txt").write_text("mine")
    with pytest.raises(OutputError, match="choose another name"):
        one.save(foreign, overwrite=True)
    assert [path.name for path in foreign.iterdir()] == ["paper.txt"]


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("replaces", [False, True])
def test_an_interrupted_save_leaves_nothing_or_what_was_there(tmp_path, monkeypatch, call, replaces):
    one, other = measure("diagonal"), measure("diagonal", data(seed=2))
    if replaces:
        one.save(tmp_path / "c")
    calls, sync = [], os.fsync

    def interrupted(handle):
        calls.append(handle)
        if len(calls) == call:
            raise KeyboardInterrupt
        sync(handle)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.save(tmp_path / "c", overwrite=True)
    assert os.listdir(tmp_path) == (["c"] if replaces else [])
    if replaces:
        same(epimer.Curvature.load(tmp_path / "c"), one)


# --- in merges -------------------------------------------------------------------------------------------------------


def measured(name, **options):
    return [measure(name, data(((40, 4), (30, 5)), seed=t), Model(t), **options) for t in (1, 2)]


def plain(curvatures):
    """Return the same numbers as a user would write them down."""
    return [{name: curvature[name] for name in curvature} for curvature in curvatures]


AVERAGED = [("table.weight", "average"), ("*.bias", "average")]


@pytest.mark.parametrize(
    ("method", "name", "options"),
    [
        ("fisher", "diagonal", {}),
        ("epimer", "diagonal", {"rank": 1}),
        ("mats", "kronecker", {}),
        ("mats", "ekfac", {}),
        ("regmean", "kronecker", {}),
        ("epimer_kron", "kronecker", {"rank": 1}),
        ("epimer_kron", "ekfac", {"rank": 1}),
        ("epimer_exact", "samples", {"rank": 1}),
    ],
)
def test_curvature_goes_into_a_merge_as_it_is(method, name, options, tmp_path):
    base, *models = states()
    curvatures = measured(name, labels="expected")
    rules = [] if method == "fisher" else AVERAGED
    merged = epimer.merge_state_dicts(base, models, method, curvature=curvatures, rules=rules, **options)
    given = epimer.merge_state_dicts(base, models, method, curvature=plain(curvatures), rules=rules, **options)
    for t, curvature in enumerate(curvatures):
        curvature.save(tmp_path / f"c{t}")
    loaded = [epimer.Curvature.load(tmp_path / f"c{t}") for t in (0, 1)]
    stored = epimer.merge_state_dicts(base, models, method, curvature=loaded, rules=rules, **options)
    flat = epimer.merge_state_dicts(base, models, "average")
    for tensor in merged:
        assert torch.equal(merged[tensor], given[tensor])
        assert near(merged[tensor], stored[tensor])  # in another memory layout, so not to the last bit
    assert not torch.allclose(merged["first.weight"], flat["first.weight"])


@pytest.mark.parametrize("name", ["samples, projected", "hessian", "ggn"])
def test_projected_curvature_goes_into_a_merge_with_its_basis(name, tmp_path):
    """tagged x samples x sum, solved by hand: T (Σ H_t)⁻¹ Σ H_t x_t, x_t the coordinates of the task vectors."""
    base, *models = states()
    chosen = basis()
    curvatures = measured(name)
    save_basis(chosen.items(), tmp_path / "basis", about={})
    for t, curvature in enumerate(curvatures):
        curvature.save(tmp_path / f"c{t}")
    stored, loaded = StoredBasis(tmp_path / "basis"), [epimer.Curvature.load(tmp_path / f"c{t}") for t in (0, 1)]
    again = measure(name, data(((40, 4), (30, 5)), seed=1), Model(1), basis=stored)
    same(again, curvatures[0])
    assert again.provenance.basis == curvatures[0].provenance.basis
    options = {"rules": [*AVERAGED, ("out.weight", "average")], "normalize": "none", "damping": 0.0}
    merged = epimer.merge_state_dicts(base, models, "epimer_exact", curvature=curvatures, **options)
    from_disk = epimer.merge_state_dicts(base, models, "epimer_exact", curvature=loaded, basis=stored, **options)
    for tensor in ("first.weight", "second.weight"):
        assert torch.equal(merged[tensor], from_disk[tensor])
        one = chosen[tensor]
        S = torch.stack([torch.outer(u, v).flatten() for u, v in zip(one.U.T, one.V.T, strict=True)], dim=1)
        x = [S.T @ (model[tensor] - base[tensor]).flatten() for model in models]
        H = [curvature[tensor].H for curvature in curvatures]
        assert all(float(torch.linalg.eigvalsh(M)[0]) > -1e-12 for M in H)
        step = torch.linalg.solve(sum(H), sum(M @ y for M, y in zip(H, x, strict=True)))
        assert near(S.T @ (merged[tensor] - base[tensor]).flatten(), 2 * step, 1e-7), tensor


def test_fisher_weighs_every_entry_by_its_curvature():
    _, *models = states()
    curvatures = measured("diagonal")
    merged = epimer.merge_state_dicts(None, models, "fisher", curvature=curvatures)
    for name in merged:
        F = [curvature[name].F for curvature in curvatures]
        weighed = sum(f * model[name] for f, model in zip(F, models, strict=True)) / sum(F)
        mean = sum(model[name] for model in models) / 2
        assert near(merged[name], torch.where(sum(F) > 0, weighed, mean))


def test_regmean_is_least_squares_on_the_inputs_of_either_orientation():
    _, *models = states()
    curvatures = measured("kronecker")
    merged = epimer.merge_state_dicts(
        None, models, "regmean", curvature=curvatures, off_diagonal=1.0, rules=[("table.weight", "average")]
    )
    for name in ("first.weight", "second.weight", "out.weight"):
        transposed = name == "second.weight"
        grams = [curvature[name].G if transposed else curvature[name].A for curvature in curvatures]
        stored = [model[name] if transposed else model[name].T for model in models]
        W = torch.linalg.solve(sum(grams), sum(gram @ W for gram, W in zip(grams, stored, strict=True)))
        assert near(merged[name], W if transposed else W.T, 1e-8)


def test_ekfac_merges_by_its_dense_curvature():
    base, *models = states()
    curvatures = measured("ekfac", labels="expected")
    options = {"basis": "full", "aggregator": "mean", "normalize": "none", "damping": 0.0, "rules": AVERAGED}
    merged = epimer.merge_state_dicts(base, models, "epimer_kron", curvature=curvatures, **options)
    for name in ("first.weight", "second.weight"):
        H = [torch.kron(c[name].P, c[name].Q) for c in curvatures]
        H = [E @ torch.diag(c[name].S.flatten()) @ E.T for E, c in zip(H, curvatures, strict=True)]
        total = sum(M @ model[name].flatten() for M, model in zip(H, models, strict=True))
        assert near(merged[name].flatten(), torch.linalg.solve(sum(H), total), 1e-6), name


def test_a_basis_on_disk_is_the_basis(tmp_path):
    base, *models = states()
    for kind in ("tagged", "tensor"):
        for copies in (False, True):
            given = [models[0], models[0]] if copies else models
            rules = [("table.weight", "average")]
            made = epimer.build_basis(base, given, rank=1, basis=kind, rules=rules)
            folder = tmp_path / f"{kind}-{copies}"
            save_basis(made.items(), folder, about={"models": ["base", "one", "two"]})
            stored = StoredBasis(folder)
            assert set(stored) == set(made)
            for name, one in made.items():
                other = stored[name]
                assert type(other) is type(one)
                assert torch.equal(one.U, other.U)
                assert torch.equal(one.V, other.V)
                atoms, twins = (one, other) if kind == "tagged" else (one.atoms, other.atoms)
                assert torch.equal(atoms.owner, twins.owner)
                assert (atoms.mix is not None) == copies
                assert not copies or torch.equal(atoms.mix, twins.mix)
            found, again = (measure("kronecker", basis=chosen) for chosen in (made, stored))
            same(again, found)
            assert found.provenance.basis == again.provenance.basis
    with pytest.raises(OutputError, match="exists"):
        save_basis(made.items(), folder, about={})


# --- several processes -----------------------------------------------------------------------------------------------

SHARED = ("diagonal", "kronecker", "reduce", "samples", "kronecker, projected", "samples, projected")


def worker(rank, folder):
    """Measure this rank's part of the data; save what all of them have together."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    own = data()[:2] if rank == 0 else data()[2:]
    for name in SHARED:
        measure(name, own).summed_over_ranks().save(f"{folder}/{name}-{rank}")
    try:
        measure("diagonal", own, layers=["first.*"] if rank else None).summed_over_ranks()
    except CurvatureError as error:
        Path(f"{folder}/refused-{rank}").write_text(str(error))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_measure_their_parts_and_share_the_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=2)
    for name in SHARED:
        whole = measure(name)
        for rank in (0, 1):
            found = epimer.Curvature.load(tmp_path / f"{name}-{rank}")
            same(found, whole)
            assert found.provenance.samples == 14
            assert found.provenance.counts == whole.provenance.counts
    for rank in (0, 1):
        assert re.search("different", (tmp_path / f"refused-{rank}").read_text())


def test_one_process_is_its_own_sum():
    found = measure("ekfac")
    assert found.summed_over_ranks() is found
