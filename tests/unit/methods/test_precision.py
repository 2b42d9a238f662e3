"""The fast float32 routes (searched SVD, single-precision CG) against the same merge in float64 with full SVDs."""

import pytest
import torch

import epimer
from dense import close

pytestmark = pytest.mark.slow

SHAPES = {"square.weight": (320, 320), "tall.weight": (520, 256), "wide.weight": (256, 520)}
TASKS, RANK = 4, 8


def vector(m, n, generator):
    """A task vector with a falling spectrum, as fine-tuning leaves it."""
    side = min(m, n)
    U = torch.linalg.qr(torch.randn(m, side, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, side, generator=generator, dtype=torch.float64)).Q
    i = torch.arange(1, side + 1)
    return (U * i**-0.7 * torch.exp(-1.5 * i / side)) @ V.T


@pytest.fixture(scope="module")
def states():
    generator = torch.Generator().manual_seed(0)
    base = {k: 0.02 * torch.randn(s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}
    models = [{k: W + vector(*W.shape, generator) for k, W in base.items()} for _ in range(TASKS)]
    g = {k: torch.randn(TASKS, 60, 2, s[0], generator=generator).double() for k, s in SHAPES.items()}
    x = {k: torch.randn(TASKS, 60, 2, s[1], generator=generator).double() for k, s in SHAPES.items()}
    decay = {size: torch.arange(1, size + 1).double() ** -0.5 for size in {d for s in SHAPES.values() for d in s}}
    g = {k: v * decay[v.shape[-1]] for k, v in g.items()}
    x = {k: v * decay[v.shape[-1]] for k, v in x.items()}
    curvature = {"diagonal": [], "kronecker": [], "samples": []}
    for t in range(TASKS):
        grads = {k: torch.einsum("ntm,ntk->nmk", g[k][t], x[k][t]) for k in SHAPES}
        curvature["diagonal"].append({k: epimer.Diagonal(s.square().mean(0)) for k, s in grads.items()})
        flat = {k: (g[k][t].flatten(0, 1), x[k][t].flatten(0, 1)) for k in SHAPES}
        curvature["kronecker"].append(
            {k: epimer.Kronecker(G=a.T @ a / len(a), A=b.T @ b / len(b)) for k, (a, b) in flat.items()}
        )
        curvature["samples"].append({k: epimer.Samples(g=g[k][t], x=x[k][t]) for k in SHAPES})
    return base, models, curvature


def narrow(state):
    return {k: v.float() for k, v in state.items()}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tsv", {}),
        ("tsv", {"coefficients": "projected"}),
        ("iso_c", {}),
        ("epimer", {}),
        ("epimer", {"projection_tol": 0}),
        ("epimer", {"basis": "tensor", "aggregator": "mean"}),
        ("epimer_kron", {}),
        ("epimer_kron", {"aggregator": "mean", "damping": 1e-2}),
        ("epimer_free", {}),
        ("epimer_exact", {}),
        ("regmean", {"damping": 1e-2}),
        ("wudi", {}),
    ],
)
def test_float32_merges_agree_with_float64(monkeypatch, states, name, given):
    base, models, curvature = states
    monkeypatch.setattr("epimer.geometry.diagonal.CHEAP", 0)  # take the low-rank start of a diagonal solve
    kind = epimer.describe_method(name).curvature
    parameters = {p.name for p in epimer.describe_method(name).parameters}
    given = given | ({"rank": RANK} if "rank" in parameters else {}) | {"curvature": curvature.get(kind)}
    exact = epimer.merge_state_dicts(base, models, name, **given)
    fast = epimer.merge_state_dicts(narrow(base), [narrow(m) for m in models], name, **given)
    for k in SHAPES:
        assert close(fast[k].double() - base[k], exact[k] - base[k], 2e-3)
        assert fast.record.tensors[k].status in ("exact", "converged")
        assert exact.record.tensors[k].status in ("exact", "converged")


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def adapters(noise):
    """Eight strong directions per task over weak noise: what is weak must still be found."""
    draw = drawn()
    return [draw(400, 8) @ draw(8, 300) / 8**0.5 + noise * draw(400, 300) for _ in range(4)]


def dominated(factor):
    draw = drawn(1)
    return [draw(400, 300) + factor * torch.outer(draw(400) / 20, draw(300) / 17) for _ in range(4)]


def near_duplicates(noise):
    draw = drawn(2)
    D = draw(400, 300) * torch.logspace(0, -2, 300)
    return [D + noise * D.std() * draw(400, 300) for _ in range(4)]


def opposed():
    draw = drawn(3)
    D = draw(400, 4) @ draw(4, 300)
    return [D, -D, 2 * D, draw(400, 300)]


@pytest.mark.parametrize(
    "models",
    [adapters(0.01), adapters(0.1), dominated(1e3), dominated(1e4), near_duplicates(1e-2), near_duplicates(1e-3)],
    ids=["adapters .01", "adapters .1", "dominated 1e3", "dominated 1e4", "duplicates 1e-2", "duplicates 1e-3"],
)
@pytest.mark.parametrize("name", ["tsv", "epimer_free"])
def test_hard_spectra_in_float32_agree_with_float64(models, name):
    base = torch.zeros(400, 300)
    fast = epimer.merge_state_dicts({"w": base}, [{"w": D} for D in models], name, rank=16)["w"]
    exact = epimer.merge_state_dicts({"w": base.double()}, [{"w": D.double()} for D in models], name, rank=16)["w"]
    assert close(fast.double(), exact, 2e-3)


@pytest.mark.parametrize("unit", [1e-15, 2e5, 1e12])
def test_the_unit_of_the_weights_does_not_matter(unit):
    models = [D * unit for D in adapters(0.1)]
    base = {"w": torch.zeros(400, 300)}
    merged = epimer.merge_state_dicts(base, [{"w": D} for D in models], "tsv", rank=8)["w"]
    expected = epimer.merge_state_dicts(base, [{"w": D} for D in adapters(0.1)], "tsv", rank=8)["w"]
    assert close(merged / unit, expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposed_models_have_an_orthonormal_basis(dtype):
    models = [{"w": D.to(dtype)} for D in opposed()]
    basis = epimer.build_basis({"w": torch.zeros(400, 300, dtype=dtype)}, models, rank=4)["w"]
    size = basis.project(models[0]["w"]).numel()
    gram = torch.stack([basis.project(basis.lift(unit)) for unit in torch.eye(size, dtype=torch.float64)])
    assert close(gram, torch.eye(size, dtype=torch.float64), 1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_kronecker_curvature_without_damping_keeps_the_average_elsewhere(dtype):
    draw = drawn(4)
    base = {"w": draw(20, 15).to(dtype)}
    models = [{"w": base["w"] + draw(20, 15).to(dtype)} for _ in range(2)]
    sides = [(draw(20).to(dtype), draw(15).to(dtype)) for _ in models]
    curvature = [{"w": epimer.Kronecker(G=torch.outer(g, g), A=torch.outer(x, x))} for g, x in sides]
    merged = epimer.merge_state_dicts(base, models, "mats", curvature=curvature, damping=0, normalize="none")
    assert merged.record.tensors["w"].status == "damped"
    for model, (g, x) in zip(models, sides, strict=True):  # each task's one sensitive direction is its own
        assert float(g @ merged["w"] @ x) == pytest.approx(float(g @ model["w"] @ x), rel=1e-3)
    average = (models[0]["w"] + models[1]["w"]) / 2
    span = torch.stack([torch.outer(g, x).flatten() for g, x in sides], dim=1)
    step = (merged["w"] - average).flatten()
    outside = step - span @ torch.linalg.lstsq(span, step[:, None]).solution[:, 0]
    assert float(outside.norm()) < (5e-2 if dtype == torch.float32 else 1e-5) * float(step.norm())


def test_a_given_tensor_basis_keeps_its_own_anchor():
    base = {"w": torch.zeros(40, 30, dtype=torch.float64)}
    models = [{"w": drawn(seed)(40, 30).double()} for seed in range(3)]
    factors = [{"w": epimer.Kronecker(A=torch.eye(30), G=torch.diag(torch.rand(40)))} for _ in models]
    bases = epimer.build_basis(base, models, rank=2, basis="tensor")
    given = epimer.merge_state_dicts(base, models, "epimer_kron", curvature=factors, basis=bases)
    assert close(given["w"], epimer.merge_state_dicts(base, models, "epimer_kron", curvature=factors, rank=2)["w"])
    assert given.record.tensors["w"].rank == 2


def test_iso_cts_cannot_take_more_task_directions_than_there_are():
    base = {"w": torch.zeros(11, 12)}
    models = [{"w": drawn(seed)(11, 12)} for seed in range(3)]
    spectrum = torch.linalg.svdvals(epimer.merge_state_dicts(base, models, "iso_cts", common=0)["w"])
    assert close(spectrum, spectrum.mean().expand(11), 1e-5)


def test_a_basis_may_be_of_another_precision_than_the_models():
    base = {"w": torch.zeros(40, 30)}
    models = [{"w": drawn(seed)(40, 30)} for seed in range(3)]
    wide = [{"w": state["w"].double()} for state in (base, *models)]
    for kind in ("tagged", "tensor"):
        bases = epimer.build_basis(base, models, rank=2, basis=kind)
        merged = epimer.merge_state_dicts(wide[0], wide[1:], "epimer_free", basis=bases)["w"]
        expected = epimer.merge_state_dicts(base, models, "epimer_free", basis=bases)["w"]
        assert close(merged, expected.double(), 1e-5)
    found = epimer.diagnose_state_dicts(wide[0], wide[1:], basis=epimer.build_basis(base, models, rank=2)).total
    assert found.eta == pytest.approx(epimer.diagnose_state_dicts(wide[0], wide[1:], rank=2).total.eta, rel=1e-4)


def related(shape, tasks, power=0.7):
    """Return task vectors in float32 with falling spectra: a part that all share, and one that each has to itself."""
    generator = torch.Generator().manual_seed(1)

    def part():
        side = min(shape)
        U, V = (torch.linalg.qr(torch.randn(n, side, generator=generator, dtype=torch.float64)).Q for n in shape)
        i = torch.arange(1, side + 1)
        return (U * i**-power * torch.exp(-1.5 * i / side)) @ V.T

    shared = part()
    return [(0.7 * shared + 0.7 * part()).float() for _ in range(tasks)]


@pytest.mark.parametrize(
    ("name", "shape", "tasks", "power"),
    [
        ("tsv", (256, 256), 4, 0.7),
        ("iso_cts", (384, 512), 8, 0.7),
        ("iso_cts", (384, 512), 8, 1.5),
        ("epimer", (384, 384), 4, 0.7),
        ("epimer_free", (384, 384), 4, 0.7),
        ("epimer_exact", (384, 384), 4, 0.7),
        ("epimer_exact", (256, 256), 4, 1.5),
    ],
)
def test_float32_merges_of_related_models_are_within_their_tolerance(name, shape, tasks, power):
    """The same float32 models and curvature, once more in float64."""
    generator = torch.Generator().manual_seed(2)
    base, deltas, kind = torch.zeros(shape), related(shape, tasks, power), epimer.describe_method(name).curvature
    falls = [torch.arange(1, n + 1) ** -0.5 for n in shape]
    gradients = [[torch.randn(64, 4, len(fall), generator=generator) * fall for fall in falls] for _ in deltas]
    metrics = {
        "samples": [epimer.Samples(g=g, x=x) for g, x in gradients],
        "diagonal": [epimer.Diagonal((g.flatten(0, 1).T @ x.flatten(0, 1)).square()) for g, x in gradients],
    }.get(kind)

    def merged(dtype):
        state = {"w": base.to(dtype)}
        given = {}
        if metrics is not None:
            given["curvature"] = [{"w": metric.to(base.device, dtype)} for metric in metrics]
        return epimer.merge_state_dicts(state, [{"w": D.to(dtype)} for D in deltas], name, **given)["w"]

    assert close(merged(torch.float32).double(), merged(torch.float64), 2e-4)


@pytest.mark.parametrize("method", ["iso_c", "iso_cts"])
def test_directions_that_are_rounding_in_float32_are_named(method):
    """A merge that gives every direction the same length differs by those that it leaves out, and says so."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    sigma = torch.linspace(1, 0.5, 40, dtype=torch.float64)
    sigma[-3:] = 1e-7
    model = {"w": ((U * sigma) @ V.T).float()}
    merged = epimer.merge_state_dicts({"w": torch.zeros(40, 40)}, [model], method)
    exact = epimer.merge_state_dicts({"w": torch.zeros(40, 40).double()}, [{"w": model["w"].double()}], method)
    note = merged.record.tensors["w"].note
    assert note == "3 of 40 directions are below 6e-06 of the largest singular value, so rounding: left out"
    assert exact.record.tensors["w"].note == ""
    missing = float((merged["w"].double() - exact["w"]).norm() / exact["w"].norm())
    assert missing == pytest.approx((3 / 40) ** 0.5, rel=1e-3)
