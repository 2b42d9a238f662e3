"""Methods against their published formulas, written out plainly."""

import pytest
import torch

import epimer
from dense import close
from epimer import ParameterError
from epimer.methods.rules import stored_inputs_first
from models import MATRICES, make_base, make_models

BASE = make_base(torch.float64)
MODELS = make_models(BASE)
WEIGHTS = [0.5, 0.2, 0.3]
NAME = "block.0.weight"
FLOATS = [k for k, v in BASE.items() if v.is_floating_point() and v.numel()]
DELTAS = [model[NAME] - BASE[NAME] for model in MODELS]


def merge(method, **given):
    return epimer.merge_state_dicts(BASE, MODELS, method, **given)


def flat(state):
    return torch.cat([state[k].flatten() for k in FLOATS])


def test_average_is_the_weighted_mean_of_every_tensor():
    merged = merge("average", weights=[1, 2, 5])
    expected = (1 * flat(MODELS[0]) + 2 * flat(MODELS[1]) + 5 * flat(MODELS[2])) / 8
    assert close(flat(merged), expected)
    assert close(flat(merge("average")), sum(flat(m) for m in MODELS) / 3)


def test_task_arithmetic_takes_weights_as_given():
    merged = merge("task_arithmetic", weights=[0.3, 0.3, -0.1], scale=2)
    tau = [flat(m) - flat(BASE) for m in MODELS]
    assert close(flat(merged), flat(BASE) + 2 * (0.3 * tau[0] + 0.3 * tau[1] - 0.1 * tau[2]))


def test_nan_weighs_by_inverse_norms_of_whole_models():
    norms = torch.stack([flat(m).norm() for m in MODELS])
    lam = (1 / norms) / (1 / norms).sum()
    merged = merge("nan")
    assert close(flat(merged), sum(w * flat(m) for w, m in zip(lam, MODELS, strict=True)))
    assert merged.record.weights == pytest.approx(lam.tolist())


@pytest.mark.parametrize("elect", ["mass", "frequency"])
def test_ties_trims_globally_elects_and_averages_what_agrees(elect):
    tau = torch.stack([flat(m) - flat(BASE) for m in MODELS])
    size, density = tau.shape[1], 0.3
    for row in tau:
        row[row.abs() < row.abs().sort().values[size - int(density * size) - 1]] = 0
    sign = (tau if elect == "mass" else tau.sign()).sum(0).sign()
    agree = (tau.sign() == sign) & (sign != 0)
    expected = flat(BASE) + (tau * agree).sum(0) / agree.sum(0).clamp_min(1)
    assert close(flat(merge("ties", density=density, elect=elect)), expected)
    everything = torch.stack([flat(m) - flat(BASE) for m in MODELS])
    agree = everything.sign() == everything.sum(0).sign()
    expected = flat(BASE) + (everything * agree).sum(0) / agree.sum(0)
    assert close(flat(merge("ties", density=1.0)), expected)


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3] * 4, [1, 1, 2] * 4, [1, 2, 3, 7, 11, 13] * 2])
def test_ties_by_frequency_leaves_exact_ties_at_the_base_in_any_order(weights):
    tasks, generator = 12, torch.Generator().manual_seed(0)
    signs = torch.randint(-1, 2, (tasks, 4000), generator=generator)
    lead = signs.sum(0) if weights is None else (signs * torch.tensor([round(10 * w) for w in weights])[:, None]).sum(0)
    sizes = torch.rand(tasks, 4000, generator=generator) + 0.5
    order = torch.randperm(tasks, generator=generator).tolist()
    base, models = {"w": torch.zeros(4000)}, [{"w": row} for row in signs * sizes]

    def merged(order):
        given = None if weights is None else [weights[t] for t in order]
        chosen = [models[t] for t in order]
        return epimer.merge_state_dicts(base, chosen, "ties", density=1.0, elect="frequency", weights=given)["w"]

    assert int((lead == 0).sum()) > 50  # among which some model moved
    for found in (merged(range(tasks)), merged(order)):
        assert torch.equal(found.sign().long(), lead.sign())


def test_dare_is_unbiased_and_keeps_its_density():
    base = {"w": torch.zeros(400, 500)}
    models = [{"w": torch.full((400, 500), 1.0)}, {"w": torch.full((400, 500), 2.0)}]
    merged = epimer.merge_state_dicts(base, models, "dare", weights=[1, 10], density=0.25)["w"]
    values, counts = merged.unique(return_counts=True)
    assert values.tolist() == pytest.approx([0, 4, 80, 84])
    share = counts / counts.sum()
    assert share.tolist() == pytest.approx([0.75**2, 0.25 * 0.75, 0.25 * 0.75, 0.25**2], abs=0.01)
    assert close(merged.mean(), torch.tensor(21.0), 0.02)
    other = epimer.merge_state_dicts(base, models, "dare", density=0.25, seed=1)["w"]
    assert not torch.equal(other, epimer.merge_state_dicts(base, models, "dare", density=0.25)["w"])
    assert close(flat(merge("dare", density=1.0)), flat(merge("task_arithmetic")))


def test_fisher_keeps_the_average_where_no_model_has_curvature():
    F = [torch.rand(24, 20).double() for _ in MODELS]
    for f in F:
        f[:5] = 0
    curvature = [
        {k: epimer.Diagonal(torch.zeros_like(BASE[k])) for k in MATRICES} | {NAME: epimer.Diagonal(f)} for f in F
    ]
    merged = merge("fisher", curvature=curvature)
    assert close(merged[NAME][:5], sum(m[NAME][:5] for m in MODELS) / 3)
    expected = sum(f * m[NAME] for f, m in zip(F, MODELS, strict=True)) / sum(F)
    assert close(merged[NAME][5:], expected[5:])
    assert merged.record.tensors["block.0.bias"].note == "no curvature: averaged"


def test_tsv_puts_singular_values_on_whitened_vectors():
    k = 20 // 3
    svds = [torch.linalg.svd(D, full_matrices=False) for D in DELTAS]
    P, _, Qh = torch.linalg.svd(torch.cat([U[:, :k] for U, _, _ in svds], 1), full_matrices=False)
    R, _, Sh = torch.linalg.svd(torch.cat([Vh[:k] for _, _, Vh in svds], 0), full_matrices=False)
    sigma = torch.cat([S[:k] for _, S, _ in svds])
    assert close(merge("tsv")[NAME] - BASE[NAME], (P @ Qh) @ torch.diag(sigma) @ (R @ Sh), 1e-8)
    owned = torch.cat([3 * w * S[:k] for w, (_, S, _) in zip(WEIGHTS, svds, strict=True)])
    weighted = merge("tsv", weights=WEIGHTS, scale=0.5)[NAME] - BASE[NAME]
    assert close(weighted, 0.5 * (P @ Qh) @ torch.diag(owned) @ (R @ Sh), 1e-8)


def test_iso_c_equalises_the_spectrum_of_the_sum():
    delta = merge("iso_c")[NAME] - BASE[NAME]
    S = torch.linalg.svdvals(sum(DELTAS))
    assert close(torch.linalg.svdvals(delta), S.mean().expand(20))
    U, _, Vh = torch.linalg.svd(sum(DELTAS), full_matrices=False)
    assert close(delta, S.mean() * U @ Vh)


def test_iso_cts_without_task_directions_is_iso_c():
    assert close(merge("iso_cts", common=1.0)[NAME], merge("iso_c")[NAME])
    spectrum = torch.linalg.svdvals(merge("iso_cts")[NAME] - BASE[NAME])
    assert close(spectrum, spectrum.mean().expand(20), 1e-8)


def test_greedy_soup_adds_only_what_helps():
    target = 0.5 * flat(MODELS[0]) + 0.5 * flat(MODELS[2])
    seen = []

    def evaluate(state):
        seen.append(state)
        return -float((flat(state) - target).norm())

    merged = merge("greedy_soup", evaluate=evaluate)
    assert merged.record.weights == (0.5, 0.0, 0.5)
    assert close(flat(merged), target)
    assert len(seen) == 5
    assert close(
        flat(merge("greedy_soup", evaluate=lambda state: -float(flat(state).norm() ** 0))),
        sum(flat(m) for m in MODELS) / 3,
    )


def test_wudi_is_the_least_squares_merge_of_the_task_vectors_outputs():
    delta = merge("wudi", damping=1e-9)[NAME] - BASE[NAME]
    grams = [D.T @ D / D.square().sum() for D in DELTAS]
    expected = sum(D @ A for D, A in zip(DELTAS, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    assert close(delta, expected, 1e-6)


def test_jitter_and_damping_enter_as_documented():
    F = [torch.rand(24, 20).double() for _ in MODELS]
    curvature = [
        {k: epimer.Diagonal(torch.ones_like(BASE[k])) for k in MATRICES} | {NAME: epimer.Diagonal(f)} for f in F
    ]
    jittered = merge("fisher", curvature=curvature, jitter=0.5)[NAME]
    assert close(jittered, sum((f + 0.5) * m[NAME] for f, m in zip(F, MODELS, strict=True)) / sum(f + 0.5 for f in F))
    both = merge("fisher", curvature=curvature, jitter=0.5, normalize="trace", damping=0.1)[NAME]
    H = [(f + 0.5) / (f + 0.5).mean() + 0.1 for f in F]
    assert close(both, sum(h * m[NAME] for h, m in zip(H, MODELS, strict=True)) / sum(H))
    plain = merge("fisher", curvature=curvature, damping=0.1)[NAME]
    H = [f + 0.1 * f.mean() for f in F]
    assert close(plain, sum(h * m[NAME] for h, m in zip(H, MODELS, strict=True)) / sum(H))


def test_a_task_without_curvature_becomes_damping_times_identity():
    F = [torch.rand(24, 20).double(), torch.rand(24, 20).double(), torch.zeros(24, 20).double()]
    curvature = [
        {k: epimer.Diagonal(torch.ones_like(BASE[k])) for k in MATRICES} | {NAME: epimer.Diagonal(f)} for f in F
    ]
    merged = merge("fisher", curvature=curvature, normalize="trace", damping=0.1)[NAME]
    H = [f / f.mean() + 0.1 for f in F[:2]] + [torch.full((24, 20), 0.1, dtype=torch.float64)]
    assert close(merged, sum(h * m[NAME] for h, m in zip(H, MODELS, strict=True)) / sum(H))


def test_singular_curvature_is_damped_visibly():
    torch.manual_seed(0)
    curvature = []
    for _ in MODELS:
        x = torch.randn(2, 20).double()
        curvature.append(
            {NAME: epimer.Kronecker(A=x.T @ x), "block.1.weight": epimer.Kronecker(A=torch.eye(30).double())}
        )
    with pytest.warns(epimer.EpimerWarning, match=r"damped.*block\.0\.weight"):
        merged = merge("regmean", curvature=curvature, off_diagonal=1)
    assert merged.record.tensors[NAME].status == "damped"
    assert merged.record.tensors["block.1.weight"].status == "exact"
    A = [one[NAME].A for one in curvature]
    expected = sum(m[NAME] @ a for m, a in zip(MODELS, A, strict=True)) @ torch.linalg.pinv(sum(A), rtol=1e-8)
    seen = torch.linalg.svd(sum(A)).U[:, :6]
    assert close(merged[NAME] @ seen, expected @ seen, 1e-6)  # where there is data, least squares
    unseen = torch.linalg.svd(sum(A)).U[:, 6:]
    assert close(merged[NAME] @ unseen, sum(m[NAME] for m in MODELS) / 3 @ unseen, 1e-6)  # elsewhere, the average


def test_registry_describes_every_method():
    for name in epimer.list_methods():
        method = epimer.describe_method(name)
        text = str(method)
        assert name in text
        assert method.citation in text
        assert all(p.name in text and p.meaning in text for p in method.parameters)
        assert any(p.name == "scale" for p in method.parameters)
    assert set(epimer.list_methods()) == {
        "average", "task_arithmetic", "nan", "ties", "dare", "fisher", "regmean", "gradient_matching", "tsv", "iso_c",
        "iso_cts", "mats", "wudi", "epimer", "epimer_kron", "epimer_exact", "epimer_free",
        "epimer_full", "greedy_soup", "passthrough", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della",
        "della_linear", "slerp", "nuslerp", "multislerp", "karcher", "model_stock", "sce", "ram", "ramplus_tl",
        "nearswap", "arcee_fusion",
    }  # fmt: skip


def test_record_is_plain_data():
    import json

    record = merge("greedy_soup", evaluate=lambda state: 0.0, rules=[("block.0.bias", "copy")]).record
    data = json.loads(json.dumps(record.to_dict()))
    assert data["method"] == "greedy_soup"
    assert data["tensors"]["block.0.bias"]["rule"] == "copy"
    assert data["tensors"]["steps"]["rule"] == "copy"
    assert data["parameters"]["evaluate"] == "function"


def gpt2(blocks=("transformer.h.0",), *, inputs_first=True, width=8, hidden=20, generator=None):
    """Return a GPT-2's matrices as its Conv1D stores them, inputs x outputs, or as an nn.Linear would."""
    shapes = {
        "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "mlp.c_fc": (width, hidden),
        "mlp.c_proj": (hidden, width), "crossattention.q_attn": (width, width),
        "crossattention.c_attn": (width, 2 * width), "crossattention.c_proj": (width, width),
    }  # fmt: skip
    state = {
        f"{block}.{layer}.weight": torch.randn(shape, generator=generator, dtype=torch.float64)
        for block in blocks
        for layer, shape in shapes.items()
    }
    return state if inputs_first else transposed(state)


def transposed(state):
    return {name: W.T.contiguous() for name, W in state.items()}


@pytest.mark.parametrize("hidden", [20, 8, 5])
@pytest.mark.parametrize("method", ["wudi", "iso_c", "iso_cts", "tsv", "epimer_free"])
def test_weights_stored_inputs_first_merge_as_their_transposes_do(method, hidden):
    generator = torch.Generator().manual_seed(0)
    base, *models = (gpt2(hidden=hidden, generator=generator) for _ in range(4))
    found = epimer.merge_state_dicts(base, models, method)
    twins = epimer.merge_state_dicts(transposed(base), [transposed(model) for model in models], method)
    assert all(close(found[name], twins[name].T, 1e-9) for name in base)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("epimer_full", {}),
        ("epimer_kron", {"calibrate": 1.0, "rank": 3}),
        ("epimer_kron", {"calibrate": 1.0, "rank": 3, "anchor": "tsv"}),
    ],
)
def test_calibration_goes_along_the_outputs_that_curvature_names(method, given):
    """As of a transposed convolution, which no name tells: its curvature says that its inputs are stored first."""
    generator = torch.Generator().manual_seed(0)
    base, *models = (torch.randn(14, 9, generator=generator, dtype=torch.float64) for _ in range(4))
    factors = [(X.T @ X, Y.T @ Y) for X, Y in ((torch.randn(20, 14, generator=generator, dtype=torch.float64),
                torch.randn(20, 9, generator=generator, dtype=torch.float64)) for _ in models)]  # fmt: skip
    usual = [{"w": epimer.Kronecker(G=G, A=A)} for G, A in factors]
    turned = [{"w": epimer.Kronecker(G=A, A=G, inputs=0)} for G, A in factors]
    expected = epimer.merge_state_dicts({"w": base}, [{"w": W} for W in models], method, curvature=usual, **given)["w"]
    flipped = [{"w": W.T.contiguous()} for W in models]
    found = epimer.merge_state_dicts({"w": base.T.contiguous()}, flipped, method, curvature=turned, **given)["w"]
    assert close(found.T, expected, 1e-8)


def test_an_anchor_without_singular_vectors_is_not_calibrated():
    for method in ("epimer_free", "epimer_full"):
        with pytest.raises(ParameterError, match="set calibrate to None, or take another anchor") as caught:
            epimer.describe_method(method).resolve({"anchor": "iso_c"})
        assert "'iso_c'" in str(caught.value)
        epimer.describe_method(method).resolve({"anchor": "iso_c", "calibrate": None})
        epimer.describe_method(method).resolve({"anchor": "iso_c", "aggregator": "mean"})


def test_wudi_s_inputs_are_the_rows_of_a_conv1d():
    generator = torch.Generator().manual_seed(0)
    base, *models = (gpt2(generator=generator) for _ in range(4))
    merged = epimer.merge_state_dicts(base, models, "wudi", damping=1e-9)
    for name, W in base.items():
        deltas = [model[name] - W for model in models]
        grams = [D @ D.T / D.square().sum() for D in deltas]
        grams = [len(A) * A / A.trace() for A in grams]  # mean diagonal 1
        expected = torch.linalg.solve(sum(grams), sum(A @ D for A, D in zip(grams, deltas, strict=True)))
        assert close(merged[name] - W, expected, 1e-6)


def test_which_weights_are_stored_inputs_first_is_told_by_each_block_s_shapes():
    decoder, vision = gpt2(("gpt.h.0", "gpt.h.1")), gpt2(("visual.0",), inputs_first=False)
    others = {"model.layers.0.mlp.up_proj.weight": torch.zeros(8, 20), "c_proj.weight": torch.zeros(4, 4)}
    assert stored_inputs_first(decoder | vision | others) == set(decoder)
    assert stored_inputs_first({"h.0.attn.c_attn.bias": torch.zeros(3, 4), "h.0.x.c_proj": torch.zeros(4)}) == set()


@pytest.mark.parametrize(
    ("given", "cancels"),
    [
        ({}, False), ({"scale": 0}, False), ({"scale": 2.0}, True), ({"scale": 0.5, "base_samples": 3}, True),
        ({"scale": 2.0, "prior": 0.1}, False), ({"scale": 2.0, "base_curvature": True}, False),
        ({"scale": 2.0, "base_curvature": True, "base_samples": 0}, True),
    ],
)  # fmt: skip
def test_gradient_matching_says_where_its_scale_cancels(given, cancels, recwarn):
    diagonals = [{k: epimer.Diagonal(torch.rand_like(BASE[k]) + t + 0.1) for k in MATRICES} for t in range(4)]
    options = given | ({"base_curvature": diagonals[3]} if "base_curvature" in given else {})
    merged = merge("gradient_matching", curvature=diagonals[:3], **options)
    once = merge("gradient_matching", curvature=diagonals[:3], **(options | {"scale": 1.0}))
    if cancels:
        assert all(close(merged[k], once[k]) for k in MATRICES)
    texts = [str(warning.message) for warning in recwarn if "cancels" in str(warning.message)]
    assert texts == (
        ["gradient_matching: scale cancels without a prior and without the base's curvature; give it a prior."]
        if cancels
        else []
    )
